"""Every way to make a region, compiled into one graph; what backward computes again is counted by operator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.utils import checkpoint as theirs  # torch's own, to compare with

import recollect
from recollect import Decision, Site, compat, policies
from recollect.compat import CheckpointPolicy, composable
from tests.compile.counting import Step, assert_same, parameters_of, run_compiled, run_step
from tests.models import GPT
from tests.naming import name_of

pytestmark = [
    # Dynamo looks at the .grad of every tensor that it meets.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:policy .* this step"),  # many here match nothing in the small function
]

MM, SIN, SIGMOID = torch.ops.aten.mm.default, torch.ops.aten.sin.default, torch.ops.aten.sigmoid.default
PLAIN = {"mm": 4, "sin": 0, "sigmoid": 0, "cos": 1}
ALL_AGAIN = {"mm": 6, "sin": 1, "sigmoid": 1, "cos": 1}
MM_KEPT = {"mm": 4, "sin": 1, "sigmoid": 1, "cos": 1}


def mix(x: Tensor, w: Tensor, scale: float = 1.0) -> Tensor:
    """Two products, a sine between them, a sigmoid behind: each kind of operator can be told from the others."""
    return torch.sigmoid(torch.mm(torch.sin(torch.mm(x, w)), w)) * scale


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


def compiled_like_plain(
    call: Callable[..., Any], plain: Callable[..., Any], inputs: Any, *, of: Any = (), **options: Any
) -> Step:
    """Compile a step into one graph; it has given what the plain one gives."""
    step = run_compiled(call, inputs, of=of, **options)
    assert_same(step, run_step(plain, inputs, of=of))
    return step


def counted(call: Callable[..., Any], inputs: Any, **options: Any) -> dict[str, int]:
    """How often backward runs each operator of `mix`, with gradients compared."""
    return compiled_like_plain(call, mix, inputs, **options).graphs.count(*PLAIN)


# The function.


@pytest.mark.parametrize("partition", ["min-cut", "default"])
def test_a_region_is_recomputed_in_the_backward_graph(inputs: Any, partition: str) -> None:
    assert counted(mix, inputs, partition=partition) == PLAIN
    assert counted(recollect.checkpoint(mix), inputs, partition=partition) == ALL_AGAIN


@pytest.mark.parametrize("partition", ["min-cut", "default"])
def test_a_policy_is_honoured_in_the_backward_graph(inputs: Any, partition: str) -> None:
    kept = recollect.checkpoint(mix, policy=policies.save_matmuls)
    assert counted(kept, inputs, partition=partition) == MM_KEPT


def test_a_region_can_be_made_inside_what_is_compiled(inputs: Any) -> None:
    def call(x: Tensor, w: Tensor) -> Tensor:
        return recollect.checkpoint(mix, policy=policies.save_matmuls)(x, w)

    assert counted(call, inputs) == MM_KEPT


@recollect.checkpoint(policy=policies.save_matmuls, name="mixing")
def decorated(x: Tensor, w: Tensor) -> Tensor:
    return mix(x, w)


@recollect.checkpoint
def bare(x: Tensor, w: Tensor) -> Tensor:
    return mix(x, w)


def test_a_decorated_function_is_a_region(inputs: Any) -> None:
    assert counted(decorated, inputs) == MM_KEPT
    assert counted(bare, inputs) == ALL_AGAIN


def test_a_decorated_method_is_a_region(inputs: Any) -> None:
    class Net(nn.Module):
        @recollect.checkpoint(policy=policies.save_matmuls)
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return mix(x, w)

    assert counted(Net(), inputs) == MM_KEPT


def test_keyword_arguments_named_like_options_reach_the_function(inputs: Any) -> None:
    def f(
        x: Tensor,
        *,
        w: Tensor,
        debug: float,
        early_stop: float,
        policy: float,
        name: float = 1.0,
        key: float = 1.0,
        check: float = 1.0,
        use_reentrant: float = 1.0,
        context_fn: float = 1.0,
        preserve_rng_state: float = 1.0,
    ) -> Tensor:
        return mix(
            x, w, debug * early_stop * policy * name * key * check * use_reentrant * context_fn * preserve_rng_state
        )

    words = {"debug": 2.0, "early_stop": 3.0, "policy": 5.0, "name": 7.0, "key": 11.0, "check": 0.5}
    words |= {"use_reentrant": 1.5, "context_fn": 0.25, "preserve_rng_state": 1.25}
    step = compiled_like_plain(
        lambda x, w: recollect.checkpoint(f)(x, w=w, **words), lambda x, w: f(x, w=w, **words), inputs
    )
    assert step.graphs.count(*PLAIN) == ALL_AGAIN


class Pair(NamedTuple):
    first: Tensor
    rest: dict[str, Any]


def test_containers_go_in_and_come_out(inputs: Any) -> None:
    def f(pair: Pair, *, options: dict[str, Any]) -> Pair:
        hidden = mix(pair.first, pair.rest["w"][0], options["scale"])
        return Pair(hidden, {"list": [hidden.sin(), (hidden * 2, None)], "number": 3, "text": "x"})

    def call(region: Callable[..., Pair]) -> Callable[..., Any]:
        def run(x: Tensor, w: Tensor) -> Any:
            out = region(Pair(x, {"w": [w, 5]}), options={"scale": 2.0})
            assert out.rest["number"] == 3
            assert out.rest["text"] == "x"
            return out.first, out.rest["list"]

        return run

    step = compiled_like_plain(call(recollect.checkpoint(f)), call(f), inputs)
    assert step.graphs.count("mm") == {"mm": 6}


def test_a_region_sees_what_it_closes_over(inputs: Any) -> None:
    bias = torch.randn(4, requires_grad=True)
    factor = 3

    def make(region: Callable[[Any], Any]) -> Callable[..., Any]:
        def call(x: Tensor, w: Tensor) -> Tensor:
            made = w.exp()
            result: Tensor = region(lambda x: mix(x, made, factor) + bias)(x)
            return result

        return call

    step = compiled_like_plain(make(recollect.checkpoint), make(lambda fn: fn), inputs, of=[bias])
    assert step.graphs.count("mm", "exp") == {"mm": 6, "exp": 0}


def test_partials_and_bound_methods_are_regions(inputs: Any) -> None:
    class Box:
        def run(self, x: Tensor, w: Tensor) -> Tensor:
            return mix(x, w)

    assert counted(recollect.checkpoint(functools.partial(mix, scale=1.0)), inputs) == ALL_AGAIN
    assert counted(recollect.checkpoint(Box().run), inputs) == ALL_AGAIN


def test_only_the_inputs_of_a_region_are_saved(inputs: Any) -> None:
    step = compiled_like_plain(
        lambda x, w: recollect.checkpoint(mix)(x.exp(), w).sin(), lambda x, w: mix(x.exp(), w).sin(), inputs
    )
    (forward,) = step.graphs.forward
    saved = [node.name for node in forward.graph.find_nodes(op="output")[0].args[0][1:]]
    assert sorted(saved) == ["exp", "primals_2"]  # not even what it gave
    assert step.graphs.count("exp") == {"exp": 0}


def test_values_that_are_no_tensors_stay_what_they_are(inputs: Any) -> None:
    def f(x: Tensor, w: Tensor, mode: str, times: int, flag: bool, nothing: None) -> tuple[Tensor, str, int]:
        assert nothing is None
        for _ in range(times):
            x = mix(x, w) if flag else x
        return x, mode, times

    def call(region: Any) -> Callable[..., Any]:
        def run(x: Tensor, w: Tensor) -> Tensor:
            out, mode, times = region(x, w, "m", 2, True, None)
            assert (mode, times) == ("m", 2)
            return out  # type: ignore[no-any-return]

        return run

    assert compiled_like_plain(call(recollect.checkpoint(f)), call(f), inputs).graphs.count("mm") == {"mm": 12}


# Nested.


def nest(outer: Any, inner: Any) -> Callable[[Tensor, Tensor], Tensor]:
    inside = recollect.checkpoint(mix, **inner)

    def around(x: Tensor, w: Tensor) -> Tensor:
        return inside(x, w).exp() * 2

    return recollect.checkpoint(around, **outer)


def test_nested_regions_are_recomputed_once(inputs: Any) -> None:
    step = compiled_like_plain(nest({}, {}), lambda x, w: mix(x, w).exp() * 2, inputs)
    assert step.graphs.count("mm", "sin", "sigmoid", "exp") == {"mm": 6, "sin": 1, "sigmoid": 1, "exp": 1}


def test_a_policy_inside_a_full_region_keeps_nothing(inputs: Any) -> None:
    step = compiled_like_plain(nest({}, {"policy": policies.save_matmuls}), lambda x, w: mix(x, w).exp() * 2, inputs)
    assert step.graphs.count("mm") == {"mm": 6}


def test_a_full_region_inside_a_policy_keeps_nothing(inputs: Any) -> None:
    step = compiled_like_plain(nest({"policy": policies.save_matmuls}, {}), lambda x, w: mix(x, w).exp() * 2, inputs)
    assert step.graphs.count("mm") == {"mm": 6}


def test_two_policies_agree_on_what_is_kept(inputs: Any) -> None:
    both = {"policy": policies.save_matmuls}
    step = compiled_like_plain(nest(both, both), lambda x, w: mix(x, w).exp() * 2, inputs)
    assert step.graphs.count("mm") == {"mm": 4}


# Options without a meaning in a graph.


@pytest.mark.parametrize(
    "options",
    [
        {"early_stop": False},
        {"check": "values"},
        {"check": "none"},
        {"check": recollect.ValueCheck()},
        {"preserve_rng": False},
        {"preserve_rng": ["torch", "python"]},
        {"name": "block"},
    ],
    ids=name_of,
)
def test_options_that_mean_nothing_in_a_graph_do_no_harm(inputs: Any, options: Any) -> None:
    assert counted(recollect.checkpoint(mix, **options), inputs) == ALL_AGAIN


def test_a_mismatch_explained_is_one_graph_too(inputs: Any) -> None:
    def call(x: Tensor, w: Tensor) -> Tensor:
        with recollect.explain_mismatch():
            return recollect.checkpoint(mix)(x, w)

    assert counted(call, inputs) == ALL_AGAIN
    with recollect.explain_mismatch():
        assert counted(recollect.checkpoint(mix), inputs) == ALL_AGAIN


def test_code_that_asks_whether_it_is_recomputing_hears_no(inputs: Any) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return mix(x, w) * (2 if recollect.is_recomputing() else 1)

    assert counted(recollect.checkpoint(f), inputs) == ALL_AGAIN


@pytest.mark.parametrize(
    "way", [recollect.checkpoint, functools.partial(recollect.checkpoint, policy=policies.save_all)]
)
@pytest.mark.parametrize("is_inference", [False, True])
def test_without_gradients_a_region_is_a_plain_call(inputs: Any, way: Any, is_inference: bool) -> None:
    call: Any = torch.compile(way(mix), backend="aot_eager", fullgraph=True)
    with torch.inference_mode(is_inference), torch.set_grad_enabled(False):
        found = call(*inputs)
    assert not found.requires_grad
    assert torch.equal(found, mix(*inputs))


def test_grad_mode_off_inside_what_is_compiled(inputs: Any) -> None:
    def call(region: Any) -> Callable[..., Any]:
        def run(x: Tensor, w: Tensor) -> Tensor:
            with torch.no_grad():
                first = region(x.exp(), w)
            return region(x, w) + first  # type: ignore[no-any-return]

        return run

    step = compiled_like_plain(call(recollect.checkpoint(mix)), call(mix), inputs)
    assert step.graphs.count("mm") == {"mm": 6}


def test_grad_mode_off_inside_the_region(inputs: Any) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.mm(x, w).exp()
        return mix(x, w) * scale

    compiled_like_plain(recollect.checkpoint(f), f, inputs)


def test_inputs_none_of_which_requires_grad(inputs: Any) -> None:
    x, w = (tensor.detach() for tensor in inputs)
    linear = nn.Linear(4, 4)

    def f(x: Tensor) -> Tensor:
        return linear(torch.sin(torch.mm(x, w))).sigmoid()  # type: ignore[no-any-return]

    step = compiled_like_plain(recollect.checkpoint(f), f, [x], of=parameters_of(linear))
    assert step.graphs.count("sin") == {"sin": 1}


# Policies.


def small(site: Site) -> Decision:
    return Decision.SAVE if site.op == "aten.sin.default" else Decision.RECOMPUTE


POLICIES: list[tuple[Any, dict[str, int]]] = [
    (policies.save_nothing, ALL_AGAIN),
    (policies.save_all, PLAIN),
    (policies.save_matmuls, MM_KEPT),
    (policies.save_ops("aten.mm.default"), MM_KEPT),
    (policies.save_ops(MM, SIN), {**PLAIN, "sigmoid": 1}),
    (policies.save_ops(SIN), {"mm": 6, "sin": 0, "sigmoid": 1, "cos": 1}),
    (policies.save_every(MM, 2), {**ALL_AGAIN, "mm": 5}),
    (policies.save_every((MM, SIN), 2), {**ALL_AGAIN, "mm": 5, "sin": 0}),
    (policies.save_larger_than("63 B"), PLAIN),
    (policies.save_larger_than("64 B"), ALL_AGAIN),
    (policies.save_if(policies.flops > 100), MM_KEPT),
    (policies.save_if((policies.flops > 100) & (policies.nbytes >= 64)), MM_KEPT),
    (policies.save_if(policies.flops_per_byte > 1), MM_KEPT),
    (policies.save_if(lambda site: site.op == "aten.mm.default" and site.call == 0), {**ALL_AGAIN, "mm": 5}),
    (policies.save_random, ALL_AGAIN),
    (policies.save_routing, ALL_AGAIN),
    (policies.save_collectives, ALL_AGAIN),
    (policies.save_attention, ALL_AGAIN),
    (policies.first_match(policies.save_ops(SIN), policies.save_matmuls), {**PLAIN, "sigmoid": 1}),
    (policies.first_match(policies.save_ops(SIN), policies.otherwise(Decision.RECOMPUTE)), {**ALL_AGAIN, "sin": 0}),
    (policies.otherwise(policies.save_matmuls), MM_KEPT),
    (policies.per_region({"m*": policies.save_matmuls, "other": policies.save_all}), MM_KEPT),
    (policies.per_region({"other": policies.save_all}), ALL_AGAIN),
    (policies.strictly(policies.save_matmuls), MM_KEPT),
    (small, {**ALL_AGAIN, "sin": 0}),
    (lambda site: Decision.SAVE if site.call == 1 else Decision.RECOMPUTE, {**ALL_AGAIN, "mm": 5}),
    (lambda site: Decision.SAVE if site.shape == (4, 4) and site.dtype == "float32" else Decision.RECOMPUTE, PLAIN),
    (lambda site: Decision.SAVE if site.region == "mixed" else Decision.RECOMPUTE, PLAIN),
]


@pytest.mark.parametrize(
    ("policy", "expected"), POLICIES, ids=lambda value: "" if isinstance(value, dict) else name_of(value)
)
def test_each_policy_of_the_catalogue_decides_operator_by_operator(inputs: Any, policy: Any, expected: Any) -> None:
    assert counted(recollect.checkpoint(mix, policy=policy, name="mixed"), inputs) == expected


@pytest.mark.parametrize(
    "policy",
    [
        policies.save_every(MM, 2),
        policies.save_every(MM, 2, start=1),
        policies.save_if(lambda site: site.op == "aten.mm.default" and site.call == 1),
    ],
    ids=name_of,
)
def test_what_is_left_of_an_attempt_to_take_a_product_apart_is_no_call(inputs: Any, policy: Any) -> None:
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in inputs]
    step = run_compiled(recollect.checkpoint(mix, policy=policy), low, decompositions=select_decomp_table())
    assert step.graphs.count("mm") == {"mm": 5}


def test_a_function_of_calls_is_not_asked_about_what_is_left_of_such_an_attempt(inputs: Any) -> None:
    asked: list[Any] = []

    def decide(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(op)
        return CheckpointPolicy.PREFER_RECOMPUTE

    low = [tensor.detach().bfloat16().requires_grad_() for tensor in inputs]
    region = functools.partial(
        compat.checkpoint, mix, context_fn=functools.partial(compat.create_selective_checkpoint_contexts, decide)
    )
    run_compiled(functools.partial(region, use_reentrant=False), low, decompositions=select_decomp_table())
    assert asked.count(MM) == asked.count(SIN) * 2


@pytest.mark.parametrize(
    "policy",
    [policies.save_ops("aten.bmm.default"), policies.save_names("nope"), policies.save_modules("nope")],
    ids=name_of,
)
def test_a_policy_that_matches_nothing_says_so_in_a_graph_too(inputs: Any, policy: Any) -> None:
    with pytest.warns(UserWarning, match=r"matched nothing"):
        run_compiled(recollect.checkpoint(mix, policy=policy), inputs)


def make_wrong_regions() -> dict[str, Any]:
    policy = policies.save_modules("nope.*")
    net, applied = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    recollect.apply(applied, {"0": policy})
    return {
        "module": recollect.checkpoint(net, policy=policy),
        "method": recollect.checkpoint(net.forward, policy=policy),
        "applied": applied,
    }


@pytest.mark.parametrize("way", make_wrong_regions())
def test_a_pattern_that_matches_no_module_is_refused_in_a_graph_too(way: str) -> None:
    region, x = make_wrong_regions()[way], torch.randn(2, 4)
    text = "pattern 'nope.*' matches no module of the region; did you mean '0' or '1'?"
    for call, kind in (
        (torch.compile(region, backend="aot_eager", fullgraph=True), torch._dynamo.exc.Unsupported),
        (torch.compile(region, backend="aot_eager"), ValueError),
        (region, ValueError),
    ):
        with pytest.raises(kind) as caught:
            call(x)
        assert str(caught.value).startswith(text)


def test_a_pattern_may_match_modules_among_the_arguments() -> None:
    net, head, x = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Tanh()), torch.randn(2, 4, requires_grad=True)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = net

        def forward(self, x: Tensor, *, head: nn.Module) -> Tensor:
            return head(self.first(x)).exp()  # type: ignore[no-any-return]

    call = recollect.checkpoint(Both(), policy=policies.save_modules("0"))  # the head's
    step = run_compiled(lambda x: call(x, head=head), [x])
    assert step.graphs.count("tanh") == {"tanh": 0}


def test_random_and_routing_results_can_be_kept() -> None:
    x = torch.randn(8, 8, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        values, indices = torch.topk(x.sin(), 3)
        noise = torch.rand_like(values)
        return (values * noise).exp() * indices

    step = run_compiled(recollect.checkpoint(f, policy=policies.save_routing), [x])
    assert step.graphs.count("topk") == {"topk": 0}
    step = run_compiled(recollect.checkpoint(f, policy=policies.save_random), [x])
    assert step.graphs.count("rand_like", "rand") == {"rand_like": 0, "rand": 0}
    step = run_compiled(recollect.checkpoint(f, policy=policies.save_attention), [x])
    assert step.graphs.count("topk") == {"topk": 0}, "choices are kept by default, whatever the policy"


def test_attention_can_be_kept() -> None:
    q = torch.randn(1, 2, 4, 8, requires_grad=True)

    def f(q: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q.sin(), q, q).exp()

    op = "_scaled_dot_product_flash_attention_for_cpu"
    assert compiled_like_plain(recollect.checkpoint(f), f, [q]).graphs.count(op) == {op: 1}
    kept = compiled_like_plain(recollect.checkpoint(f, policy=policies.save_attention), f, [q])
    assert kept.graphs.count(op, "sin") == {op: 0, "sin": 1}


def test_modules_can_be_kept_by_path_and_class() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Sigmoid(), nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    again = {}
    for policy in (None, policies.save_modules("1"), policies.save_modules("1.1"), policies.save_modules(nn.Linear)):
        step = compiled_like_plain(recollect.checkpoint(net, policy=policy), net, [x], of=parameters_of(net))
        again[repr(policy)] = tuple(step.graphs.count("addmm", "sigmoid", "tanh").values())
    assert again == {
        "None": (2, 1, 1),
        "save_modules('1')": (0, 0, 1),
        "save_modules('1.1')": (1, 1, 1),
        "save_modules(Linear)": (0, 1, 1),
    }


# Names.


@recollect.region("products")
def products(x: Tensor, w: Tensor, *, scale: float = 1.0) -> Tensor:
    return torch.mm(torch.sin(torch.mm(x, w)), w) * scale


def by_region(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(products(x, w=w))


def by_name(x: Tensor, w: Tensor) -> Tensor:
    first = recollect.name(torch.mm(x, w), "first")
    return torch.sigmoid(torch.mm(torch.sin(first), w))


@pytest.mark.parametrize(
    ("f", "policy", "expected"),
    [
        (by_region, policies.save_names("products"), {**PLAIN, "sigmoid": 1}),
        (by_region, policies.save_names("prod*"), {**PLAIN, "sigmoid": 1}),
        (by_region, policies.save_nothing, ALL_AGAIN),
        (by_name, policies.save_names("first"), {**ALL_AGAIN, "mm": 5}),
        (by_name, policies.save_nothing, ALL_AGAIN),
        (
            by_region,
            policies.save_if(lambda site: "products" in site.scopes and site.op == "aten.sin.default"),
            {**ALL_AGAIN, "sin": 0},
        ),
    ],
)
def test_names_are_seen_by_policies(inputs: Any, f: Any, policy: Any, expected: Any) -> None:
    step = compiled_like_plain(recollect.checkpoint(f, policy=policy), f, inputs)
    assert step.graphs.count(*PLAIN) == expected


@pytest.mark.parametrize("f", [by_region, by_name])
def test_names_without_a_region_around_change_nothing(inputs: Any, f: Any) -> None:
    assert compiled_like_plain(f, f, inputs).graphs.count(*PLAIN) == PLAIN


# Modules.


class Net(nn.Module):
    """Blocks of two linear layers each."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Tanh()) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + x
        return x


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def count_net(model: nn.Module, **options: Any) -> tuple[int, ...]:
    """Linear layers, sigmoids, tangents that backward computes again, with gradients compared."""
    x = torch.randn(4, 4, requires_grad=True)
    step = run_compiled(model, [x], of=parameters_of(model), **options)
    assert_same(step, _plain(model, x))
    return tuple(step.graphs.count("addmm", "sigmoid", "tanh").values())


def _plain(model: nn.Module, x: Tensor) -> Step:
    plain = net()
    plain.load_state_dict(model.state_dict())
    return run_step(plain, [x], of=parameters_of(plain))


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"blocks.*": Decision.RECOMPUTE}, (4, 2, 2)),
        ({"blocks.0": Decision.RECOMPUTE}, (2, 1, 1)),
        ({nn.Sequential: Decision.RECOMPUTE}, (4, 2, 2)),
        ({"blocks.*": policies.save_matmuls}, (0, 2, 2)),
        ({"blocks.0": policies.save_matmuls, "blocks.1": Decision.RECOMPUTE}, (2, 2, 2)),
        ({"blocks.*": Decision.RECOMPUTE, "blocks.*.2": Decision.SAVE}, (2, 2, 2)),
        ({"blocks.*": policies.per_region({"blocks.0": policies.save_all})}, (2, 1, 1)),
        ({"blocks.*": lambda site: Decision.SAVE if "sigmoid" in site.op else Decision.RECOMPUTE}, (2, 0, 2)),
        ({"blocks.*": lambda site: Decision.SAVE if site.region == "blocks.0" else Decision.RECOMPUTE}, (2, 1, 1)),
        (policies.save_matmuls, (0, 2, 2)),
    ],
)
def test_applied_rules_are_honoured(rules: Any, expected: Any) -> None:
    model = net()
    recollect.apply(model, rules)
    assert count_net(model) == expected


def test_rules_that_are_removed_leave_nothing_in_the_graph() -> None:
    model = net()
    assert count_net(model) == (0, 0, 0)
    handle = recollect.apply(model, {"blocks.*": Decision.RECOMPUTE})
    assert count_net(model) == (4, 2, 2)
    handle.remove()
    assert count_net(model) == (0, 0, 0)


def wrap_blocks(model: Net, **options: Any) -> Net:
    compat.apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(compat.checkpoint_wrapper, **options),
        check_fn=lambda module: isinstance(module, nn.Sequential),
    )
    return model


@pytest.mark.parametrize("impl", list(compat.CheckpointImpl))
def test_wrapped_blocks_are_recomputed(impl: Any) -> None:
    assert count_net(wrap_blocks(net(), checkpoint_impl=impl)) == (4, 2, 2)


def test_a_wrapper_passes_its_policy_on() -> None:
    def contexts() -> Any:
        return compat.create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

    assert count_net(wrap_blocks(net(), context_fn=contexts)) == (0, 2, 2)
    assert count_net(wrap_blocks(net(), debug=True, early_stop=False, preserve_rng_state=False)) == (4, 2, 2)


def test_a_wrapper_takes_keyword_arguments(inputs: Any) -> None:
    class Mixer(nn.Module):
        def forward(self, x: Tensor, *, w: Tensor, debug: float = 2.0) -> Tensor:
            return mix(x, w, debug)

    for impl in compat.CheckpointImpl:
        wrapped = compat.checkpoint_wrapper(Mixer(), checkpoint_impl=impl)
        step = compiled_like_plain(lambda x, w, m=wrapped: m(x, w=w), lambda x, w: mix(x, w, 2.0), inputs)
        assert step.graphs.count(*PLAIN) == ALL_AGAIN


def test_a_composable_checkpoint_is_recomputed() -> None:
    model = net()
    for block in model.blocks:
        composable.checkpoint(block)
    assert count_net(model) == (4, 2, 2)


def test_a_composable_checkpoint_honours_a_policy() -> None:
    model = net()
    policy = functools.partial(compat.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    for block in model.blocks:
        composable.checkpoint(block, context_fn=policy, debug=True, early_stop=False)
    assert count_net(model) == (0, 2, 2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_sequence_is_recomputed_but_for_its_last_part(use_reentrant: bool) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    x = torch.randn(4, 4, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return compat.checkpoint_sequential(layers, 2, x, use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    step = compiled_like_plain(call, layers, [x], of=parameters_of(layers))
    assert step.graphs.count("addmm", "tanh") == {"addmm": 2, "tanh": 2}


# With torch's signature, and compared with torch's own.


@pytest.mark.parametrize("use_reentrant", [False, True, None])
def test_checkpoint_with_torchs_signature(inputs: Any, use_reentrant: Any) -> None:
    def call(x: Tensor, w: Tensor) -> Tensor:
        return compat.checkpoint(mix, x, w, use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    assert counted(call, inputs) == ALL_AGAIN


@pytest.mark.parametrize(
    "options",
    [
        {"debug": True},
        {"early_stop": False},
        {"determinism_check": "none"},
        {"preserve_rng_state": False},
        {"scale": 1.0},
        {"context_fn": compat.noop_context_fn},
    ],
    ids=lambda options: " ".join(options),
)
def test_options_of_torchs_signature_do_no_harm(inputs: Any, options: Any) -> None:
    def call(x: Tensor, w: Tensor) -> Tensor:
        return compat.checkpoint(mix, x, w, use_reentrant=False, **options)  # type: ignore[no-any-return]

    assert counted(call, inputs) == ALL_AGAIN


def test_context_managers_that_mean_nothing_in_a_graph_do_no_harm(inputs: Any) -> None:
    def call(x: Tensor, w: Tensor) -> Tensor:
        with compat.set_checkpoint_early_stop(False), compat.set_checkpoint_debug_enabled(True):
            return compat.checkpoint(mix, x, w, use_reentrant=False)  # type: ignore[no-any-return]

    assert counted(call, inputs) == ALL_AGAIN
    with compat.set_checkpoint_early_stop(False), compat.set_checkpoint_debug_enabled(True):
        assert counted(call, inputs) == ALL_AGAIN


def save_mm(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is MM else CheckpointPolicy.PREFER_RECOMPUTE


def save_mm_by_bool(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> bool:
    return op is MM


def save_strongly(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE if op in (SIN, SIGMOID) else CheckpointPolicy.MUST_SAVE


class Every:
    """A callable object with a setting."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del ctx, args, kwargs
        return CheckpointPolicy.MUST_SAVE if op is self.op else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXTS: dict[str, Callable[[Any], Any]] = {
    "list": lambda create: functools.partial(create, [MM]),
    "function": lambda create: functools.partial(create, save_mm),
    "answers by bool": lambda create: functools.partial(create, save_mm_by_bool),
    "must": lambda create: functools.partial(create, save_strongly),
    "object": lambda create: functools.partial(create, Every(MM)),
    "object of another setting": lambda create: functools.partial(create, Every(SIN)),
    "nothing": lambda create: functools.partial(create, []),
}


@pytest.mark.parametrize(("kind", "partition"), [*((kind, "min-cut") for kind in CONTEXTS), ("list", "default")])
def test_selective_regions_are_those_of_torch_operator_by_operator(inputs: Any, kind: str, partition: str) -> None:
    contexts = CONTEXTS[kind]
    ours, reference = (
        contexts(compat.create_selective_checkpoint_contexts),
        contexts(theirs.create_selective_checkpoint_contexts),
    )

    def call(x: Tensor, w: Tensor) -> Tensor:
        return compat.checkpoint(mix, x, w, use_reentrant=False, context_fn=ours)  # type: ignore[no-any-return]

    def call_theirs(x: Tensor, w: Tensor) -> Tensor:
        return theirs.checkpoint(mix, x, w, use_reentrant=False, context_fn=reference)  # type: ignore[no-any-return]

    found = compiled_like_plain(call, mix, inputs, partition=partition).graphs
    expected = run_compiled(call_theirs, inputs, partition=partition).graphs
    assert found.count() == expected.count()


def test_a_context_function_may_be_nested_or_made_on_the_spot(inputs: Any) -> None:
    op = MM

    def nested() -> Any:
        def policy(_ctx: Any, func: Any, *_args: Any, **_kwargs: Any) -> bool:
            return func is op

        return compat.create_selective_checkpoint_contexts(policy)

    def call(x: Tensor, w: Tensor) -> Tensor:
        return compat.checkpoint(mix, x, w, use_reentrant=False, context_fn=nested)  # type: ignore[no-any-return]

    def made_inside(x: Tensor, w: Tensor) -> Tensor:
        def contexts() -> Any:
            return compat.create_selective_checkpoint_contexts([MM])

        return compat.checkpoint(mix, x, w, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    class Contexts:
        def __call__(self) -> Any:
            return compat.create_selective_checkpoint_contexts([MM])

    maker = Contexts()

    def by_object(x: Tensor, w: Tensor) -> Tensor:
        return compat.checkpoint(mix, x, w, use_reentrant=False, context_fn=maker)  # type: ignore[no-any-return]

    def on_the_spot(x: Tensor, w: Tensor) -> Tensor:
        return compat.checkpoint(  # type: ignore[no-any-return]
            mix, x, w, use_reentrant=False, context_fn=lambda: compat.create_selective_checkpoint_contexts(save_mm)
        )

    for one in (call, made_inside, by_object, on_the_spot):
        assert counted(one, inputs) == MM_KEPT


def _gpt(way: Callable[[nn.Module], nn.Module] | None) -> GPT:
    torch.manual_seed(0)
    model = GPT(width=8, layers=2, dropout=0.0)
    if way is not None:
        for number, layer in enumerate(model.layers):
            model.layers[number] = way(layer)
    return model


@pytest.mark.parametrize("keeps", [False, True])
def test_a_transformer_has_the_backward_graph_that_torch_gives_it(keeps: bool) -> None:
    tokens = torch.arange(6).reshape(1, 6)

    def run(library: Any) -> Any:
        policy: Any = {}
        if keeps:
            ops = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
            policy = {"context_fn": functools.partial(library.create_selective_checkpoint_contexts, ops)}

        class Region(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: Tensor) -> Tensor:
                return library.checkpoint(self.inner, x, use_reentrant=False, **policy)  # type: ignore[no-any-return]

        model = _gpt(Region)
        return run_compiled(model, [tokens], of=parameters_of(model))

    ours, reference = run(compat), run(theirs)
    plain = _gpt(None)
    assert_same(ours, run_step(plain, [tokens], of=parameters_of(plain)))
    assert ours.graphs.count() == reference.graphs.count()
    # Three of four in each block; the last of all too, because the norm behind asks for what the last block gave.
    assert ours.graphs.count("addmm") == {"addmm": 0 if keeps else 7}

    native = _gpt(None)
    recollect.apply(native, {"layers.*": policies.save_matmuls if keeps else Decision.RECOMPUTE})
    step = run_compiled(native, [tokens], of=parameters_of(native))
    assert step.graphs.count() == reference.graphs.count()


# What nodes say of themselves.


def test_nodes_keep_their_metadata(inputs: Any) -> None:
    model = net()
    recollect.apply(model, {"blocks.*": policies.save_matmuls})
    x = torch.randn(4, 4, requires_grad=True)
    graphs = run_compiled(model, [x], of=parameters_of(model)).graphs
    for graph in (*graphs.forward, *graphs.backward):
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default):
            assert "blocks" in str(node.meta["nn_module_stack"]) or "fwd_nn_module_stack" in node.meta
            assert "test_apis" in node.meta["stack_trace"]
            assert node.meta["seq_nr"] is not None
    (forward,) = graphs.forward
    regions = {node.meta.get("recollect_region") for node in forward.graph.nodes}
    assert "blocks.*" in regions  # without numbers, so that equal blocks are compiled once
    decisions = {
        node.target: node.meta["recollect_decision"]
        for node in forward.graph.nodes
        if "recollect_decision" in node.meta
    }
    assert decisions[torch.ops.aten.addmm.default] == "save"
    assert decisions[torch.ops.aten.sigmoid.default] == "recompute"


def test_recomputed_nodes_say_what_they_are(inputs: Any) -> None:
    (backward,) = run_compiled(recollect.checkpoint(mix, name="mixed"), inputs).graphs.backward
    sines = backward.graph.find_nodes(op="call_function", target=SIN)
    assert [(node.meta["recollect_region"], node.meta["recollect_decision"]) for node in sines] == [
        ("mixed", "recompute")
    ]
    assert "mix" in sines[0].meta["stack_trace"]


def test_an_offloading_policy_leaves_its_word_on_the_nodes(inputs: Any) -> None:
    policy = lambda site: Decision.OFFLOAD if site.op == "aten.mm.default" else Decision.RECOMPUTE  # noqa: E731
    step = compiled_like_plain(recollect.checkpoint(mix, policy=policy), mix, inputs)
    assert step.graphs.count("mm") == {"mm": 4}
    (forward,) = step.graphs.forward
    products = forward.graph.find_nodes(op="call_function", target=MM)
    assert [node.meta["recollect_decision"] for node in products] == ["offload", "offload"]


def test_a_region_of_the_graph_is_one_node_for_dynamo(inputs: Any) -> None:
    graphs = run_compiled(recollect.checkpoint(mix, name="mixed", policy=policies.save_matmuls), inputs).graphs
    (node,) = (
        node for node in graphs.dynamo[0].graph.nodes if node.op == "call_function" and "recollect" in str(node.target)
    )
    assert "save_matmuls" in node.kwargs["key"]
