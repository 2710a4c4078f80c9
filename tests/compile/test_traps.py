"""What bites under torch.compile: each trap that was found, and each kind of code that people put into regions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.nn import functional as F  # noqa: N812
from torch.utils import checkpoint as theirs  # torch's own, to compare with

import recollect
from recollect import Choice, Decision, Plan, compat, policies
from recollect._core.forecasts import PlannedRegion
from recollect._core.torch_private import engine
from recollect.compat import composable
from tests.compile.counting import (
    Graphs,
    Step,
    assert_same,
    count_ops,
    parameters_of,
    run_compiled,
    run_inductor,
    run_step,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:policy .* this step"),
    # Dynamo looks at the .grad of every tensor that it meets.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # Dynamo makes an instance of each autograd.Function that it meets.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # torch.export asks pytrees in an old way.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
]

Run = Callable[..., Step]
BACKENDS = {"graphs": run_compiled, "inductor": run_inductor}
both_backends = pytest.mark.parametrize("backend", BACKENDS)
writes_kernels = pytest.mark.kernels


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def like_plain(call: Any, plain: Any, inputs: Any, backend: str = "graphs", **options: Any) -> Step:
    """Compile a step into one graph; it has given what the plain one gives."""
    step = BACKENDS[backend](call, inputs, **options)
    assert_same(step, run_step(plain, inputs, of=options.get("of", ())), exact=backend == "graphs")
    return step


# The ten traps, by number.


def changing_its_input(x: Tensor, buffer: Tensor) -> Tensor:
    y = (x * buffer.sin()).sin()
    buffer.add_(1)
    return y * buffer.exp() * x


def changing_a_view(x: Tensor, buffer: Tensor) -> Tensor:
    row = buffer[0]
    y = (x * buffer.sin()).sin() * row.cos()
    row.mul_(0.5)
    return y * buffer.exp() * x


@both_backends
@pytest.mark.parametrize("f", [changing_its_input, changing_a_view])
@pytest.mark.parametrize(
    "policy", [pytest.param(None, marks=writes_kernels), policies.save_ops("aten.sin.default")], ids=str
)
def test_trap_01_a_region_that_changes_its_input_has_right_gradients(backend: str, f: Any, policy: Any) -> None:
    def fresh() -> list[Tensor]:
        return [torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_(), torch.linspace(0, 1, 16).reshape(4, 4)]

    inputs, plain = fresh(), fresh()
    step = BACKENDS[backend](recollect.checkpoint(f, policy=policy), inputs)
    assert_same(step, run_step(f, plain), exact=False)
    torch.testing.assert_close(inputs[1], plain[1])


@writes_kernels
def test_trap_01_an_input_that_is_changed_behind_the_region_is_read_as_it_was() -> None:
    # torch's own regions, and on Inductor plain code as well, read the changed one.
    def make(region: Any) -> Any:
        def call(x: Tensor, buffer: Tensor) -> Tensor:
            y = region(lambda x: (x * buffer.sin()).sin().exp())(x)
            buffer.mul_(3)
            return y  # type: ignore[no-any-return]

        return call

    x = leaf(4)
    for run in BACKENDS.values():
        step = run(make(recollect.checkpoint), [x, torch.ones(4)])
        assert_same(step, run_step(make(lambda f: f), [x, torch.ones(4)]), exact=False)


@both_backends
def test_trap_01_a_buffer_of_a_module_is_changed_once_and_gradients_are_right(backend: str) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Buffer(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            y = (x * self.seen.sin()).sin()
            self.seen.add_(1)
            return (y * self.seen.exp()).exp()

    nets = Counting(), Counting()
    x = leaf(4)
    step = BACKENDS[backend](recollect.checkpoint(nets[0]), [x])
    assert_same(step, run_step(nets[1], [x]), exact=False)
    assert nets[0].seen.tolist() == nets[1].seen.tolist() == [2.0] * 4


@both_backends
def test_trap_01_batch_norm_counts_once_and_gradients_are_right(backend: str) -> None:
    def net() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sigmoid(), nn.Linear(4, 4))

    one, other = net(), net()
    x = leaf(8, 4)
    step = BACKENDS[backend](recollect.checkpoint(one), [x], of=parameters_of(one))
    assert_same(step, run_step(other, [x], of=parameters_of(other)), exact=False)
    for mine, expected in zip(one.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(mine, expected)


def test_trap_02_operators_are_compared_by_what_they_are_not_by_identity() -> None:
    # Where operators are taken apart, nodes name what they came from by a copy of the overload.
    x = leaf(2, 4)
    gelu = torch.ops.aten.gelu.default

    def f(x: Tensor) -> Tensor:
        return F.gelu(x.sin()).exp()

    from torch._inductor.decomposition import select_decomp_table

    table = {**select_decomp_table()}
    seen = []

    def ours(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> bool:
        seen.append(op)
        return op is gelu

    def call(x: Tensor) -> Tensor:
        contexts = lambda: compat.create_selective_checkpoint_contexts(ours)  # noqa: E731
        return compat.checkpoint(f, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    kept = recollect.checkpoint(f, policy=policies.save_ops(gelu))
    for one in (call, kept):
        step = run_compiled(one, [x], decompositions=table)
        (forward,) = step.graphs.forward
        taken_apart = [
            node for node in forward.graph.nodes if str(node.meta.get("original_aten")) == "aten.gelu.default"
        ]
        assert len(taken_apart) > 1
        assert {node.meta["recompute"].name for node in taken_apart} == {"MUST_SAVE"}
    assert gelu in seen


@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
def test_trap_03_a_graph_break_in_a_region_leaves_gradients_right(policy: Any) -> None:
    x, w = leaf(4, 4), leaf(4, 4)

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = torch.mm(x, w).sin()
        torch._dynamo.graph_break()
        return torch.mm(F.dropout(y, 0.5), w).sigmoid()

    region = recollect.checkpoint(f, policy=policy)
    step = run_compiled(lambda x, w: region(x.exp(), w).cos(), [x, w], breaks=True)
    assert counters["graph_break"]
    assert_same(step, run_step(lambda x, w: f(x.exp(), w).cos(), [x, w]))


@both_backends
@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
def test_trap_04_a_condition_in_a_region_has_right_gradients_and_is_not_recomputed(backend: str, policy: Any) -> None:
    x, w = leaf(4, 4), leaf(4, 4)

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = torch.mm(x, w).sin()
        z = torch.cond(y.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos() * 3, (y,))
        return (z * y).exp()  # type: ignore[no-any-return]

    step = like_plain(recollect.checkpoint(f, policy=policy), f, [x, w], backend)
    if backend == "graphs":
        assert step.graphs.count("cond", "mm") == {"cond": 1, "mm": 2 if policy else 3}  # one is its backward


def test_trap_04_a_policy_may_say_otherwise_of_torchs_kind() -> None:
    # torch's own refuses conditions in a selective region under compile.
    x = leaf(4)

    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x.exp(),)).exp()  # type: ignore[no-any-return]

    def call(x: Tensor) -> Tensor:
        contexts = lambda: compat.create_selective_checkpoint_contexts([torch.ops.aten.exp.default])  # noqa: E731
        return compat.checkpoint(f, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    like_plain(call, f, [x])


@pytest.mark.filterwarnings("ignore:.*scan.*:UserWarning")
@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
def test_trap_04_a_scan_in_a_region_has_right_gradients(policy: Any) -> None:
    from torch._higher_order_ops.scan import scan

    x, start = leaf(3, 4), leaf(4)

    def add(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        carry = torch.sin(carry + x)
        return carry, carry * 2

    def f(x: Tensor, start: Tensor) -> Tensor:
        carry, all_of_them = scan(add, start, x.exp())
        return (all_of_them * carry).sigmoid()  # type: ignore[no-any-return]

    def plain(x: Tensor, start: Tensor) -> Tensor:
        rows, carry = [], start
        for row in x.exp():
            carry, out = add(carry, row)
            rows.append(out)
        return (torch.stack(rows) * carry).sigmoid()

    step = run_compiled(recollect.checkpoint(f, policy=policy), [x, start])
    assert_same(step, run_step(plain, [x, start]), exact=False)


def test_trap_05_what_a_policy_of_ours_saves_is_saved_for_certain() -> None:
    x, w = leaf(4, 4), leaf(4, 4)

    def f(x: Tensor, w: Tensor) -> Tensor:
        return (torch.mm(x, w) * 2).sin().exp()

    graphs = run_compiled(recollect.checkpoint(f, policy=policies.save_ops("aten.sin.default")), [x, w]).graphs
    (sine,) = graphs.forward[0].graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    assert sine.meta["recompute"].name == "MUST_SAVE"
    assert sine.name in {node.name for node in graphs.forward[0].graph.find_nodes(op="output")[0].args[0]}


@pytest.mark.parametrize("options", [{"preserve_rng": False}, {"early_stop": False}], ids=str)
def test_trap_05_random_numbers_are_preserved_whatever_is_asked(options: Any) -> None:
    x = leaf(64)

    def f(x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.5).exp()

    step = like_plain(recollect.checkpoint(f, **options), f, [x])
    assert step.graphs.count("sin", "exp") == {"sin": 1, "exp": 1}


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.5) * x.detach()


@writes_kernels
@pytest.mark.parametrize("budget", [1.0, 0.5, 0.1])
@both_backends
def test_trap_06_masks_agree_under_any_budget(backend: str, budget: float) -> None:
    x = leaf(256)
    with functorch_config.patch(activation_memory_budget=budget):
        step = BACKENDS[backend](recollect.checkpoint(dropped), [x])
    check_mask(x, step)


def test_trap_06_a_budget_of_nothing_is_refused_where_numbers_are_drawn() -> None:
    # torch then asks no tag, and would draw other numbers in backward.
    x = leaf(16)
    with functorch_config.patch(activation_memory_budget=0.0):
        with pytest.raises(Exception, match=r"activation_memory_budget is 0"):
            run_compiled(recollect.checkpoint(dropped), [x])
        assert run_compiled(recollect.checkpoint(torch.sin), [x]).gradients


def check_mask(x: Tensor, step: Step) -> None:
    """Gradients are zero just where forward dropped, and right elsewhere."""
    (out,), (gradient,) = step.outputs, step.gradients
    assert gradient is not None
    kept = out != 0
    assert 0 < int(kept.sum()) < len(x)
    assert torch.equal(gradient != 0, kept)
    expected = 2 * out * x.detach() * 2 * x.detach().cos()  # of the square's sum, as `run_step` takes it
    torch.testing.assert_close(gradient, torch.where(kept, expected, 0.0))


def test_complaint_02_compile_with_a_budget_draws_dropout_once() -> None:
    # With torch's budget below 1 masks were drawn again in backward. In a region of ours they agree.
    x = leaf(256)
    with functorch_config.patch(activation_memory_budget=0.1):
        for policy in (None, policies.save_matmuls):
            check_mask(x, run_compiled(recollect.checkpoint(dropped, policy=policy), [x]))
            check_mask(x, run_inductor(recollect.checkpoint(dropped, policy=policy), [x]))


def test_trap_07_choices_are_saved_because_two_compilations_may_differ_in_a_bit() -> None:
    x, w = leaf(6, 4), leaf(4, 4)

    def f(x: Tensor, w: Tensor) -> Tensor:
        weights, choices = torch.mm(x, w).softmax(-1).topk(2)
        counts = torch.bincount(choices.flatten(), minlength=4)
        return (weights.exp() * choices).sum(-1) + counts.sum()

    for policy in (None, policies.save_attention, policies.save_matmuls):
        step = like_plain(recollect.checkpoint(f, policy=policy), f, [x, w])
        assert step.graphs.count("topk", "bincount") == {"topk": 0, "bincount": 0}
    step = run_compiled(recollect.checkpoint(f, policy=policies.strictly(policies.save_matmuls)), [x, w])
    assert step.graphs.count("topk") == {"topk": 1}, "unless the user says that nothing else is kept"


@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
def test_trap_08_a_backend_that_runs_the_graph_as_it_is_uses_the_eager_engine(policy: Any) -> None:
    x, w = leaf(4, 4), leaf(4, 4)

    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(torch.mm(x, w).sin(), w).exp()

    def count(call: Any) -> int:
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            call(x, w)
        return len(saved)

    compiled = torch.compile(recollect.checkpoint(f, policy=policy), backend="eager", fullgraph=True)
    assert_same(run_step(compiled, [x, w]), run_step(f, [x, w]))
    assert count(compiled) < count(f)


@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
def test_trap_09_flex_attention_in_a_region(policy: Any) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    x, q = leaf(1, 1, 16, 16), torch.randn(1, 1, 16, 16)  # on the CPU it has no backward

    def f(x: Tensor, q: Tensor) -> Tensor:
        mixed: Any = flex_attention(q.sin(), q, q)
        return (mixed * x).sin().exp()  # type: ignore[no-any-return]

    step = run_compiled(recollect.checkpoint(f, policy=policy), [x, q])
    assert_same(step, run_compiled(f, [x, q]), exact=False)
    assert step.graphs.count("flex_attention") == {"flex_attention": 0}  # kept, as all its kind


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
def test_trap_09_flex_attention_in_a_region_on_a_device(policy: Any) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 1, 128, 16, device=torch.accelerator.current_accelerator(), requires_grad=True)

    def f(q: Tensor) -> Tensor:
        mixed: Any = flex_attention(q.sin(), q, q)
        return mixed.exp()  # type: ignore[no-any-return]

    step = run_inductor(recollect.checkpoint(f, policy=policy), [q])
    assert_same(step, run_inductor(f, [q]), exact=False)


def test_trap_09_a_nested_compile_region_in_a_region() -> None:
    inner = torch.compiler.nested_compile_region(lambda x: (x.sin() * 2).exp())
    x = leaf(4)

    def f(x: Tensor) -> Tensor:
        return inner(x.cos()).sigmoid()  # type: ignore[no-any-return]

    for policy in (None, policies.save_matmuls):
        step = run_compiled(recollect.checkpoint(f, policy=policy), [x])
        assert_same(step, run_step(lambda x: (x.cos().sin() * 2).exp().sigmoid(), [x]))


def test_trap_10_all_that_torch_refuses_is_one_graph() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Tanh())
    x = leaf(2, 4)

    def by_context(x: Tensor) -> Tensor:
        with compat.set_checkpoint_early_stop(False):
            return compat.checkpoint(net, x, use_reentrant=False, debug=True)  # type: ignore[no-any-return]

    def by_nested_contexts(x: Tensor) -> Tensor:
        contexts = lambda: compat.create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])  # noqa: E731
        return compat.checkpoint(net, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    def in_sequence(x: Tensor) -> Tensor:
        return compat.checkpoint_sequential(net, 2, x, use_reentrant=False)  # type: ignore[no-any-return]

    for call in (by_context, by_nested_contexts, in_sequence):
        step = like_plain(call, net, [x], of=parameters_of(net))
        assert step.graphs.count("sigmoid") == {"sigmoid": 1}
    composable.checkpoint(net)
    step = run_compiled(net, [x], of=parameters_of(net))
    assert step.graphs.count("sigmoid") == {"sigmoid": 1}


def test_trap_10_a_group_of_backward_passes_is_one_graph() -> None:
    x = leaf(4)

    def call(x: Tensor) -> Tensor:
        with compat.GraphExecGroup():
            return compat.checkpoint(lambda x: x.sin().exp(), x.cos(), use_reentrant=False)  # type: ignore[no-any-return]

    step = like_plain(call, lambda x: x.cos().sin().exp(), [x])
    assert step.graphs.count("exp") == {"exp": 1}
    assert engine.get_group() is None


def test_trap_10_a_group_in_which_the_graph_breaks_is_a_group() -> None:
    x, w = leaf(2, 2), leaf(2, 2)
    runs: list[int] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note() -> None:
        runs.append(1)

    def f(x: Tensor, w: Tensor) -> Tensor:
        note()
        return x.exp() @ w.exp()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def halves(y: Tensor) -> list[Tensor]:
        (dx,) = torch.autograd.grad(y, [x], torch.ones_like(y), retain_graph=True)
        (dw,) = torch.autograd.grad(y, [w], torch.ones_like(y))
        return [dx, dw]

    def call(x: Tensor, w: Tensor) -> list[Tensor]:
        y = compat.checkpoint(f, x, w, use_reentrant=False)
        with compat.GraphExecGroup():
            return halves(y)  # type: ignore[no-any-return]

    expected = torch.autograd.grad(f(x, w), [x, w], torch.ones(2, 2))
    runs.clear()
    assert all(map(torch.equal, torch.compile(call, backend="eager")(x, w), expected))
    assert len(runs) == 2  # forward, and one recomputation for both calls
    assert engine.get_group() is None


# What people put into regions.


def test_shapes_that_change() -> None:
    w = leaf(4, 4)
    graphs = Graphs()

    def f(x: Tensor) -> Tensor:
        return torch.mm(torch.mm(x, w).sin(), w).exp() * x.shape[0]

    compiled = torch.compile(
        recollect.checkpoint(f, policy=policies.save_matmuls), backend=graphs.backend, fullgraph=True, dynamic=True
    )
    for rows in (3, 5, 8):
        x = leaf(rows, 4)
        assert_same(run_step(compiled, [x], of=[w]), run_step(f, [x], of=[w]))
    assert len(graphs.backward) == 1
    assert graphs.count("mm", "sin") == {"mm": 4, "sin": 1}


def test_shapes_that_change_by_themselves() -> None:
    w = leaf(4, 4)
    region = recollect.checkpoint(lambda x: torch.mm(x, w).sin().exp(), policy=policies.save_larger_than("100 B"))
    graphs = Graphs()
    compiled = torch.compile(region, backend=graphs.backend, fullgraph=True)
    for rows in (3, 5, 8, 9):
        x = leaf(rows, 4)
        assert_same(run_step(compiled, [x], of=[w]), run_step(lambda x: torch.mm(x, w).sin().exp(), [x], of=[w]))
    assert len(graphs.backward) == 2


@pytest.mark.parametrize("where", ["inside", "outside", "around"])
def test_autocast(where: str) -> None:
    x, w = leaf(4, 4), leaf(4, 4)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)

    def inside(x: Tensor, w: Tensor) -> Tensor:
        with autocast:
            y = torch.mm(x, w)
        return torch.mm(y.float().sin(), w).exp()

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(torch.mm(x, w).sin(), w).exp()

    def outside(region: Any) -> Any:
        def call(x: Tensor, w: Tensor) -> Tensor:
            with autocast:
                return region(x, w)  # type: ignore[no-any-return]

        return call

    calls = {
        "inside": (recollect.checkpoint(inside), inside),
        "outside": (outside(recollect.checkpoint(plain)), outside(plain)),
        "around": (recollect.checkpoint(plain), plain),
    }
    with autocast if where == "around" else nullcontext():
        # Not with the eager step: that casts the weight once, and sums up its gradients in bfloat16.
        step, expected = (run_compiled(call, [x, w]) for call in calls[where])
    assert_same(step, expected)
    again = step.graphs.backward[0].graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert len(again) == expected.graphs.count("mm")["mm"] + 2
    assert torch.bfloat16 in {node.meta["val"].dtype for node in again}


@both_backends
def test_attention_with_and_without_a_policy(backend: str) -> None:
    q = leaf(1, 2, 4, 8)

    def f(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.sin(), q, q, is_causal=True).exp()

    for policy in (None, policies.save_attention):
        step = like_plain(recollect.checkpoint(f, policy=policy), f, [q], backend)
        if backend == "graphs":
            op = "_scaled_dot_product_flash_attention_for_cpu"
            assert step.graphs.count(op) == {op: 0 if policy else 1}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sin()
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y.exp()  # type: ignore[no-any-return]


def test_a_function_with_a_backward_of_its_own() -> None:
    x = leaf(4)

    def f(x: Tensor) -> Tensor:
        return Doubled.apply(x.cos()).sigmoid()  # type: ignore[no-any-return, no-untyped-call]

    assert like_plain(recollect.checkpoint(f), f, [x]).graphs.count("sin", "cos", "sigmoid") == {
        "sin": 2,  # one is the derivative of the cosine
        "cos": 1,
        "sigmoid": 1,
    }
    kept = like_plain(recollect.checkpoint(f, policy=policies.save_ops("aten.sin.default")), f, [x])
    assert kept.graphs.count("sin") == {"sin": 1}


@both_backends
def test_operators_in_place(backend: str) -> None:
    x, w = leaf(4, 4), leaf(4, 4)

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = torch.mm(x, w)
        y.sin_().mul_(2)
        y[0] = 3
        y[:, 1].add_(w[0])
        return y.exp_() * y.sigmoid()

    for policy in (None, policies.save_matmuls):
        like_plain(recollect.checkpoint(f, policy=policy), f, [x, w], backend)


def test_a_tensor_made_outside_and_changed_inside() -> None:
    x = leaf(4)

    def make(region: Any) -> Any:
        def call(x: Tensor) -> Tensor:
            buffer = x.detach().exp()

            def f(x: Tensor) -> Tensor:
                y = (x * buffer.sin()).sin()
                buffer.mul_(2)
                return y * buffer.exp()

            return region(f)(x) * buffer  # type: ignore[no-any-return]

        return call

    like_plain(make(recollect.checkpoint), make(lambda f: f), [x])


@pytest.mark.parametrize("fallback", [pytest.param(False, marks=writes_kernels), True])
def test_dropout_with_inductor(fallback: bool) -> None:
    x = leaf(256)
    with inductor_config.patch(fallback_random=fallback):
        step = run_inductor(recollect.checkpoint(dropped), [x])
        check_mask(x, step)
        if fallback:
            assert_same(step, run_step(dropped, [x]), exact=False)
        region = recollect.checkpoint(lambda x: recollect.checkpoint(dropped)(x) * 1)
        check_mask(x, run_inductor(region, [x]))


def test_a_model_with_dropout_draws_what_the_plain_one_draws() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Sigmoid(), nn.Dropout(0.3), nn.Linear(8, 8))
    x = leaf(4, 8)
    step = like_plain(recollect.checkpoint(net), net, [x], of=parameters_of(net))
    assert step.graphs.count("addmm") == {"addmm": 1}


@dataclass(frozen=True)
class Batch:
    values: Tensor
    scale: float
    rest: tuple[Tensor, ...] = ()


def test_frozen_dataclasses_go_in_and_come_out() -> None:
    x, w = leaf(4, 4), leaf(4, 4)

    def f(batch: Batch) -> Batch:
        y = torch.mm(batch.values, batch.rest[0]).sin()
        return Batch(y * batch.scale, batch.scale + 1, (y.exp(),))

    def call(region: Any) -> Any:
        def run(x: Tensor, w: Tensor) -> Any:
            out = region(Batch(x, 2.0, (w,)))
            return out.values * out.scale, out.rest[0]

        return run

    step = like_plain(call(recollect.checkpoint(f)), call(f), [x, w])
    assert step.graphs.count("mm") == {"mm": 3}


def test_tensors_that_leak_through_a_list_are_outputs() -> None:
    x, w = leaf(4, 4), leaf(4, 4)

    def make(region: Any) -> Any:
        def call(x: Tensor, w: Tensor) -> Any:
            leaked: list[Tensor] = []

            def f(x: Tensor) -> Tensor:
                y = torch.mm(x, w).sin()
                leaked.append(y)
                return y.exp()

            out = region(f)(x)
            return out, leaked[0].cos()

        return call

    like_plain(make(recollect.checkpoint), make(lambda f: f), [x, w])


def test_side_effects_happen_once() -> None:
    x = leaf(4)
    seen: list[str] = []

    def f(x: Tensor) -> Tensor:
        seen.append("ran")
        return x.sin().exp()

    run_compiled(recollect.checkpoint(f), [x])
    assert seen == ["ran"]


def test_profiler_marks_inside() -> None:
    x = leaf(4)

    def f(x: Tensor) -> Tensor:
        with torch.profiler.record_function("inside"):
            return x.sin().exp()

    for policy in (None, policies.save_ops("aten.sin.default")):
        like_plain(recollect.checkpoint(f, policy=policy), f, [x])


@both_backends
def test_a_region_output_with_a_hook(backend: str) -> None:
    x, w = leaf(4, 4), leaf(4, 4)

    def make(region: Any) -> Any:
        def call(x: Tensor, w: Tensor) -> Tensor:
            y = region(lambda x, w: torch.mm(x, w).sin())(x, w)
            y.register_hook(lambda gradient: gradient * y)
            return y.exp()  # type: ignore[no-any-return]

        return call

    step = like_plain(make(recollect.checkpoint), make(lambda f: f), [x, w], backend)
    if backend == "graphs":
        assert step.graphs.count("cos") == {"cos": 1}


# Graph breaks.


class Broken(nn.Module):
    """Has one part that Dynamo cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sin()
        torch._dynamo.graph_break()
        return self.second(x).exp()  # type: ignore[no-any-return]


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Linear(4, 4), Broken(), nn.Linear(4, 4)
        self.fine = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fine(self.body(self.embed(x).tanh())).cos())  # type: ignore[no-any-return]


def test_complaint_30_a_graph_break_inside_a_region_leaves_the_rest_compiled() -> None:
    # One break sent the whole frame around it to eager, other regions and all.
    net, x = Around(), leaf(2, 4)
    recollect.apply(net, {"body": Decision.RECOMPUTE, "fine": Decision.RECOMPUTE})
    step = run_compiled(net, [x], of=parameters_of(net), breaks=True)
    plain = Around()
    plain.load_state_dict(net.state_dict())
    assert_same(step, run_step(plain, [x], of=parameters_of(plain)))
    compiled = count_ops(step.graphs.forward)
    assert compiled["tanh"] == compiled["cos"] == compiled["sigmoid"] == 1
    assert step.graphs.count("sigmoid") == {"sigmoid": 1}, "the region without a break is in the graph"


def test_the_pieces_of_a_region_around_a_graph_break_are_compiled() -> None:
    net, x = Around(), leaf(2, 4)
    recollect.apply(net, {"body": Decision.RECOMPUTE})
    step = run_compiled(net, [x], of=parameters_of(net), breaks=True)
    compiled = count_ops(step.graphs.forward)
    assert compiled["sin"] == compiled["exp"] == 1, "once: recomputation runs the same code"


def test_the_pieces_of_a_block_that_is_compiled_apart_are_compiled() -> None:
    # It ran as written; torch's checkpoint, which is called around compiled blocks, has two graphs.
    net, plain, x = Around(), Around(), leaf(2, 4)
    plain.load_state_dict(net.state_dict())
    recollect.apply(net, {"body": Decision.RECOMPUTE})
    graphs = Graphs()
    net.body.compile(backend=graphs.backend)
    for _ in range(3):
        step = run_step(net, [x], of=parameters_of(net))
        assert_same(step, run_step(plain, [x], of=parameters_of(plain)))
    assert len(graphs.forward) == 2


def test_a_graph_break_inside_a_region_is_dynamos_error_where_one_graph_is_asked_for() -> None:
    net, x = Around(), leaf(2, 4)
    recollect.apply(net, {"body": Decision.RECOMPUTE})
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"graph.break"):
        run_compiled(net, [x])


def test_contexts_that_are_no_policys_run_eagerly() -> None:
    from contextlib import contextmanager

    entered: list[str] = []

    @contextmanager
    def note(word: str) -> Any:
        entered.append(word)
        yield

    x = leaf(4)

    def call(x: Tensor) -> Tensor:
        return compat.checkpoint(  # type: ignore[no-any-return]
            lambda x: x.sin().exp(), x.cos(), use_reentrant=False, context_fn=lambda: (note("forward"), note("again"))
        )

    step = run_compiled(call, [x], breaks=True)
    assert_same(step, run_step(lambda x: x.cos().sin().exp(), [x]))
    assert entered == ["forward", "again"]


# Compiled parts.


class Counting:
    """A backend that counts how often what it compiled is run."""

    def __init__(self) -> None:
        self.compiled = self.run = 0
        self.graphs = Graphs()

    def __call__(self, module: torch.fx.GraphModule, examples: Any) -> Any:
        self.compiled += 1
        inner = self.graphs.backend(module, examples)

        def run(*args: Any) -> Any:
            self.run += 1
            return inner(*args)

        return run


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))


WAYS: dict[str, Callable[[Any], Any]] = {
    "function": recollect.checkpoint,
    "policy": lambda fn: recollect.checkpoint(fn, policy=policies.save_matmuls),
    "compat": lambda fn: lambda x: compat.checkpoint(fn, x, use_reentrant=False),
    "compat policy": lambda fn: (
        lambda x: compat.checkpoint(
            fn,
            x,
            use_reentrant=False,
            context_fn=lambda: compat.create_selective_checkpoint_contexts([torch.ops.aten.addmm.default]),
        )
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_complaint_31_a_compiled_block_inside_a_region_stays_compiled(way: str) -> None:
    # A policy around a compiled function silently ran it uncompiled.
    net, x, backend = block(), leaf(2, 4), Counting()
    region = WAYS[way](torch.compile(net, backend=backend, fullgraph=True))
    for number in range(1, 4):
        assert_same(run_step(region, [x], of=parameters_of(net)), run_step(net, [x], of=parameters_of(net)))
        assert backend.compiled == 1
        assert number <= backend.run <= 2 * number


@pytest.mark.parametrize("way", WAYS)
def test_a_region_inside_compiled_code_is_compiled(way: str) -> None:
    net, x = block(), leaf(2, 4)
    step = like_plain(WAYS[way](net), net, [x], of=parameters_of(net))
    assert count_ops(step.graphs.forward, "addmm") == {"addmm": 2}
    assert step.graphs.count("sigmoid") == {"sigmoid": 1}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).sigmoid())  # type: ignore[no-any-return]


KEEPING_PRODUCTS = Plan(
    choices=tuple(Choice(decision=Decision.SAVE, region=str(number), op="aten.addmm.default") for number in range(4)),
    regions=tuple(PlannedRegion(path=str(number), kind="Layer", way="replay") for number in range(4)),
)
RULES: dict[str, Any] = {
    "rules": {"*": Decision.RECOMPUTE},
    "selective": "selective",
    "saved modules": {"?": Decision.RECOMPUTE, "*.first": Decision.SAVE},
    "plan": KEEPING_PRODUCTS,
}


@pytest.mark.parametrize("way", [*RULES, "wrapper", "composable"])
def test_equal_blocks_compiled_one_by_one_are_compiled_once(way: str) -> None:
    layers = nn.Sequential(*(Layer() for _ in range(4)))
    x, backend = leaf(2, 4), Counting()
    expected = run_step(layers, [x], of=parameters_of(layers))
    if way in RULES:
        recollect.apply(layers, RULES[way])
    for number, one in enumerate(layers):
        layers[number] = compat.checkpoint_wrapper(one) if way == "wrapper" else one
        if way == "composable":
            composable.checkpoint(one)
        layers[number].compile(backend=backend, fullgraph=True)
    for _ in range(2):
        assert_same(run_step(layers, [x], of=parameters_of(layers)), expected)
    assert backend.graphs.count("sigmoid") == {"sigmoid": 1}
    assert backend.compiled == 1


class Closed(Layer):
    """A block that Dynamo is told not to look into, as diffusers does with its own."""


@pytest.mark.parametrize("rules", [Decision.RECOMPUTE, policies.save_matmuls])
def test_blocks_of_a_class_that_is_allowed_in_graphs_are_one_graph(rules: Any) -> None:
    torch.compiler.allow_in_graph(Closed)
    try:
        net = nn.Sequential(Closed(), Closed())
        with recollect.apply(net, {"*": rules}):
            step = like_plain(net, net, [leaf(2, 4)], of=parameters_of(net))
        assert step.graphs.count("sigmoid") == {"sigmoid": 2}
    finally:
        torch._dynamo.disallow_in_graph(Closed)


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def test_selective_keeps_in_each_kind_of_block_what_pays_there() -> None:
    one_product = nn.Sequential(nn.Linear(4, 4), Sine())
    with_norm = nn.Sequential(nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4), Sine())
    for first, second in ((one_product, with_norm), (with_norm, one_product)):
        net = nn.Sequential(first, second)
        with recollect.apply(net, {"?": "selective"}):
            step = like_plain(net, net, [leaf(2, 4)], of=parameters_of(net))
        assert step.graphs.count("addmm") == {"addmm": 1}  # of the single product, which is made again


def test_a_compiled_function_inside_a_region_inside_compiled_code() -> None:
    net, x = block(), leaf(2, 4)
    inner = torch.compile(net, backend="aot_eager")
    step = like_plain(recollect.checkpoint(inner), net, [x], of=parameters_of(net))
    assert step.graphs.count("sigmoid") == {"sigmoid": 1}


def test_regions_made_anew_at_each_call_are_compiled_once() -> None:
    net, x, graphs = block(), leaf(2, 4), Graphs()

    def call(x: Tensor) -> Tensor:
        return recollect.checkpoint(net, policy=policies.save_matmuls, name="block")(x)  # type: ignore[no-any-return]

    compiled = torch.compile(call, backend=graphs.backend, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            run_step(compiled, [x], of=parameters_of(net))
    assert len(graphs.dynamo) == 1


def test_another_policy_is_compiled_anew() -> None:
    x, w, graphs = leaf(4, 4), leaf(4, 4), Graphs()

    def call(x: Tensor, w: Tensor, policy: Any) -> Tensor:
        return recollect.checkpoint(lambda x: torch.mm(x, w).sin().exp(), policy=policy)(x)

    compiled = torch.compile(call, backend=graphs.backend, fullgraph=True)
    counts = []
    for policy in (policies.save_matmuls, policies.save_nothing, policies.save_matmuls):
        graphs.backward.clear()
        run_step(lambda x, w, policy=policy: compiled(x, w, policy), [x, w])
        counts.append(graphs.count("mm")["mm"] if graphs.backward else None)
    assert counts == [2, 3, None]


# Engines around.


def test_compiled_autograd() -> None:
    x, w = leaf(4, 4), leaf(4, 4)

    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(torch.mm(x, w).sin(), w).exp()

    for region in (recollect.checkpoint(f), recollect.checkpoint(f, policy=policies.save_matmuls)):
        torch._dynamo.reset()
        compiled = torch.compile(region, backend="aot_eager", fullgraph=True)
        x.grad = w.grad = None
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            compiled(x, w).square().sum().backward()
        for found, expected in zip((x.grad, w.grad), torch.autograd.grad(f(x, w).square().sum(), (x, w)), strict=True):
            assert found is not None
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("way", ["apply", "policy", "wrapper", "composable", "call", "compat"])
def test_a_checkpointed_model_is_exported(strict: bool, way: str) -> None:
    net, x = nn.Sequential(block(), block()), torch.randn(2, 4)
    expected = net(x)
    if way in ("apply", "policy"):
        recollect.apply(net, {"*": policies.save_matmuls if way == "policy" else Decision.RECOMPUTE})
    elif way == "composable":
        composable.checkpoint(net[0])
    elif way == "wrapper":
        net[0] = compat.checkpoint_wrapper(net[0])
    else:

        class Calls(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: Tensor) -> Tensor:
                if way == "call":
                    return recollect.checkpoint(self.inner)(x)  # type: ignore[no-any-return]
                return compat.checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

        net = nn.Sequential(Calls(net))
    program = torch.export.export(net, (x,), strict=strict)
    torch.testing.assert_close(program.module()(x), expected)
    lowered = program.run_decompositions({})
    ops = {str(node.target) for node in lowered.graph.nodes}
    assert not any("recollect" in op for op in ops)
    torch.testing.assert_close(lowered.module()(x), expected)


@pytest.mark.parametrize("partition", ["min-cut", "default"])
def test_both_partitioners_give_the_counts_of_torch(partition: str) -> None:
    x, w = leaf(4, 4), leaf(4, 4)

    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(torch.mm(x, w).sin(), w).exp()

    found = run_compiled(lambda x, w: compat.checkpoint(f, x, w, use_reentrant=False), [x, w], partition=partition)
    reference = run_compiled(lambda x, w: theirs.checkpoint(f, x, w, use_reentrant=False), [x, w], partition=partition)
    assert found.graphs.count() == reference.graphs.count()
    assert_same(found, reference)


FIRST_CALLS = """
import importlib, os, sys, warnings, torch

def run(region):
    x = torch.ones(4, requires_grad=True)
    torch.compile(region, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert torch.allclose(x.grad, (x.cos() * x.sin().exp()))
    assert not torch._dynamo.utils.counters["graph_break"]

def f(x):
    return x.sin().exp()

def by_function():
    run(recollect.checkpoint(f))

def by_operator():
    warnings.simplefilter("error")
    run(lambda x: tag_activation_checkpoint(f, x))

def apart(act):
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    act()
    os._exit(0)

failures = []
for order in {orders!r}:
    child = os.fork()
    if not child:
        for name in order:
            importlib.import_module(name)
        import recollect, torch._functorch.partitioners, torch._inductor.fx_passes.joint_graph  # for both at once
        from recollect.compat.higher_order import tag_activation_checkpoint
        os._exit(any([apart(by_function), apart(by_operator)]))
    failures.append(os.waitpid(child, 0)[1])
sys.exit(any(failures))
"""


def test_the_very_first_call_is_one_graph_in_either_order_of_imports() -> None:
    # A child that is forked has compiled nothing either, and need not import again.
    orders = [("recollect.compat.higher_order", "torch._dynamo"), ("torch._dynamo", "recollect")]
    program = FIRST_CALLS.format(orders=orders)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
def test_backward_inside_compiled_code_keeps_dynamo_out_of_the_engine(policy: Any) -> None:
    w = leaf(4, 4)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def nothing() -> None:
        pass

    def f(x: Tensor) -> Tensor:
        nothing()  # breaks the graph, so that the region runs in the eager engine
        return torch.mm(x, w).sin().exp()

    def train(x: Tensor) -> Tensor | None:
        recollect.checkpoint(f, policy=policy)(x).sum().backward()
        return x.grad

    x, plain = leaf(4, 4), leaf(4, 4)
    with torch.no_grad():
        plain.copy_(x)
    f(plain).sum().backward()
    found = torch.compile(train, backend="eager")(x)  # what Dynamo cannot trace, it warns of
    assert found is not None
    assert plain.grad is not None
    assert torch.equal(found, plain.grad)


# On a device.


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch captures one to begin with
def test_cuda_graphs_with_dropout() -> None:
    device = torch.accelerator.current_accelerator()
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 64)).to(device)
    recollect_net = nn.Sequential(net)
    recollect.apply(recollect_net, {"0": Decision.RECOMPUTE})
    compiled = torch.compile(recollect_net, mode="reduce-overhead", fullgraph=True)
    x = torch.randn(32, 64, device=device)
    for _ in range(4):
        net.zero_grad()
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x).square().sum().backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in net.parameters())
    y = torch.ones(4096, device=device, requires_grad=True)
    masked = torch.compile(
        recollect.checkpoint(lambda x: F.dropout(x.exp(), 0.5) * 1), mode="reduce-overhead", fullgraph=True
    )
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        out = masked(y)
        (gradient,) = torch.autograd.grad(out.sum(), [y])
        assert torch.equal(gradient != 0, out != 0)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [None, policies.save_matmuls], ids=str)
def test_a_triton_kernel_in_a_region(policy: Any) -> None:
    from tests.selective import kernels

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = kernels.twice(x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (y,) = ctx.saved_tensors
            return gradient * y.sin()  # type: ignore[no-any-return]

    x = torch.randn(64, device=torch.accelerator.current_accelerator(), requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return Twice.apply(x.sin()).exp()  # type: ignore[no-any-return, no-untyped-call]

    region = recollect.checkpoint(f, policy=policy)
    assert_same(run_inductor(region, [x]), run_step(f, [x]), exact=False)
