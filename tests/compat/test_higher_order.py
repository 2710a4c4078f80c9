import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend, EagerAndRecordGraphs
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._higher_order_ops import wrap as stock
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F  # noqa: N812

from recollect._compile.keys import key_of
from recollect.compat import CheckpointPolicy, create_selective_checkpoint_contexts
from recollect.compat.higher_order import (
    tag_activation_checkpoint,
    wrap,
    wrap_activation_checkpoint,
    wrap_with_set_grad_enabled,
)

aten = torch.ops.aten
REGIONS = [wrap_activation_checkpoint, tag_activation_checkpoint]
OPERATORS = [wrap, functools.partial(wrap_with_set_grad_enabled, True), *REGIONS]
NAMES = ["wrap", "wrap_with_set_grad_enabled", "wrap_activation_checkpoint", "tag_activation_checkpoint"]
PARTITIONERS = [min_cut_rematerialization_partition, default_partition]

each_operator = pytest.mark.parametrize("op", OPERATORS, ids=NAMES)
each_region = pytest.mark.parametrize("op", REGIONS, ids=NAMES[2:])
each_partitioner = pytest.mark.parametrize("cut", PARTITIONERS, ids=["min_cut", "default"])
each_table = pytest.mark.parametrize("decompose", [False, True], ids=["aten", "decomposed"])

keep_products = functools.partial(create_selective_checkpoint_contexts, [aten.mm.default])


def body(x: Tensor, y: Tensor, z: Tensor | None = None) -> Tensor:
    """Backward of the plain function: 4 mm and no sin; recomputed, 2 mm and a sin more."""
    made = torch.sigmoid(torch.mm(torch.sin(torch.mm(x, y)), y))
    return made if z is None else made * z


def draw(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(F.dropout(torch.mm(torch.sin(torch.mm(x, y)), y), 0.4))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Seen:
    """A backend that runs each graph node by node, and shows it."""

    def __init__(self, cut: Any = min_cut_rematerialization_partition, *, decompose: bool = False) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.joint: list[fx.Node] = []

        def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
            self.joint = list(joint.graph.nodes)
            return cut(joint, inputs, **options)

        self.backend = aot_autograd(
            fw_compiler=self._take,
            bw_compiler=self._take,
            partition_fn=partition,
            decompositions=select_decomp_table() if decompose else None,
        )

    def _take(self, graph: fx.GraphModule, _: Any) -> Any:
        self.graphs.append(graph)
        return make_boxed_func(fx.Interpreter(graph).run)

    def count(self, op: Any) -> int:
        """How often backward calls an operator."""
        _, backward = self.graphs
        return sum(node.target is op for node in backward.graph.nodes)

    @property
    def saved(self) -> list[str]:
        """What forward keeps besides what it returns."""
        (results,) = self.graphs[0].graph.output_node().args
        assert isinstance(results, tuple | list)
        return [node.name for node in results[1:] if isinstance(node, fx.Node)]

    def tags(self, op: Any) -> list[Any]:
        return [node.meta.get("recompute") for node in self.forward if node.target is op]

    @property
    def forward(self) -> list[fx.Node]:
        return [node for node in self.joint if node.meta.get("partitioner_tag") == "is_forward"]


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)


def step(fn: Callable[..., Tensor]) -> list[Tensor]:
    """The result and the gradients."""
    x, y = inputs()
    torch.manual_seed(1)
    result = fn(x, y)
    result.sum().backward()
    return [tensor for tensor in (result.detach(), x.grad, y.grad) if tensor is not None]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def compiled(fn: Callable[..., Tensor], backend: Any) -> Callable[..., Tensor]:
    return torch.compile(fn, backend=backend, fullgraph=True)


# Eager.


@each_operator
def test_called_at_once_it_gives_what_the_function_gives(op: Any) -> None:
    assert same(step(lambda x, y: op(body, x, y, z=x)), step(lambda x, y: body(x, y, z=x)))


@each_region
def test_called_at_once_a_region_runs_again_in_backward(op: Any) -> None:
    calls = []

    def counted(x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        return body(x, y)

    step(lambda x, y: op(counted, x, y, early_stop=False, debug=False))
    assert len(calls) == 2


@each_region
def test_called_at_once_a_region_draws_the_same_random_numbers_again(op: Any) -> None:
    assert same(step(lambda x, y: op(draw, x, y)), step(draw))


@each_region
def test_called_at_once_a_region_obeys_a_policy(op: Any) -> None:
    asked = []

    def policy(_: Any, func: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        asked.append(func)
        return CheckpointPolicy.MUST_SAVE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    assert same(step(lambda x, y: op(body, x, y, context_fn=contexts)), step(body))
    assert asked.count(aten.mm.default) == 2


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_mode_is_put_back_after_an_error(enabled: bool) -> None:
    def fail() -> None:
        assert torch.is_grad_enabled() is enabled
        raise ValueError("mine")

    with torch.set_grad_enabled(not enabled):
        with pytest.raises(ValueError, match="mine"):
            wrap_with_set_grad_enabled(enabled, fail)
        assert torch.is_grad_enabled() is not enabled


def test_grad_mode_holds_inside() -> None:
    x, _ = inputs()
    assert not wrap_with_set_grad_enabled(False, torch.sin, x).requires_grad
    with torch.no_grad():
        assert wrap_with_set_grad_enabled(True, torch.sin, x).requires_grad


@each_region
def test_options_are_told_from_the_functions_own_arguments_by_name(op: Any) -> None:
    options = dict.fromkeys(
        ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
    )
    own = dict.fromkeys(("z", "function", "args", "kwargs", "policy"))
    assert op.divide_kwargs({**own, **options}) == (options, own)


# Names.


def test_names_do_not_collide_with_those_of_torch() -> None:
    ours = [op.__name__ for op in (wrap, wrap_with_set_grad_enabled, *REGIONS)]
    assert ours == [f"recollect_{name}" for name in NAMES]
    for name in NAMES:
        assert getattr(torch.ops.higher_order, name) is getattr(stock, name)


def test_ours_and_those_of_torch_go_into_one_graph() -> None:
    def both(x: Tensor, y: Tensor) -> Any:
        first = tag_activation_checkpoint(body, wrap(body, x, y), y)
        return stock.tag_activation_checkpoint(body, stock.wrap(body, first, y), y, use_reentrant=False)

    seen = Seen()
    found = step(compiled(both, seen.backend))
    assert same(found, step(lambda x, y: body(body(body(body(x, y), y), y), y)))
    assert seen.count(aten.mm.default) == 16 + 2 + 2


# In a graph.


@each_operator
def test_dynamo_leaves_one_node_with_the_function_as_its_graph(op: Any) -> None:
    seen = EagerAndRecordGraphs()
    fn = compiled(lambda x, y: op(body, x.cos(), y, z=x), seen)
    assert same(step(fn), step(lambda x, y: body(x.cos(), y, z=x)))
    (graph,) = seen.graphs
    target = op.func if isinstance(op, functools.partial) else op
    (node,) = graph.graph.find_nodes(op="call_function", target=target)
    bodies = [getattr(graph, str(arg.target)) for arg in node.args if isinstance(arg, fx.Node) and arg.op == "get_attr"]
    assert [isinstance(one, fx.GraphModule) for one in bodies] == [True]
    assert target is not wrap_with_set_grad_enabled or node.args[0] is True


@each_operator
@each_partitioner
@each_table
def test_compiled_gradients_are_those_of_the_plain_function(op: Any, cut: Any, decompose: bool) -> None:
    plain = step(compiled(lambda x, y: body(x.cos(), y, z=x), Seen(cut, decompose=decompose).backend))
    torch._dynamo.reset()
    fn = compiled(lambda x, y: op(body, x.cos(), y, z=x), Seen(cut, decompose=decompose).backend)
    assert same(step(fn), plain)


@pytest.mark.parametrize("op", OPERATORS[:2], ids=NAMES[:2])
@each_partitioner
def test_a_wrapped_function_is_not_recomputed(op: Any, cut: Any) -> None:
    seen = Seen(cut)
    step(compiled(lambda x, y: op(body, x.cos(), y), seen.backend))
    assert (seen.count(aten.mm.default), seen.count(aten.sin.default)) == (4, 1)  # that sin is the derivative of cos


@each_region
@each_partitioner
@each_table
def test_backward_holds_the_recomputation(op: Any, cut: Any, decompose: bool) -> None:
    seen = Seen(cut, decompose=decompose)
    step(compiled(lambda x, y: op(body, x.cos(), y, z=x, use_reentrant=False), seen.backend))
    assert (seen.count(aten.mm.default), seen.count(aten.sin.default)) == (6, 2)
    assert sorted(seen.saved) == ["cos", "primals_1", "primals_2"]


@each_region
@each_partitioner
@each_table
def test_a_policy_keeps_what_it_names(op: Any, cut: Any, decompose: bool) -> None:
    seen = Seen(cut, decompose=decompose)
    fn = compiled(lambda x, y: op(body, x.cos(), y, context_fn=keep_products), seen.backend)
    assert same(step(fn), step(lambda x, y: body(x.cos(), y)))
    assert (seen.count(aten.mm.default), seen.count(aten.sin.default)) == (4, 2)
    assert {"mm", "mm_1"} <= set(seen.saved)


@each_region
def test_a_policy_that_counts_is_asked_once_for_each_operator(op: Any) -> None:
    asked = []

    def contexts() -> Any:
        seen: list[Any] = []

        def keep_every_second(_: Any, func: Any, *__: Any, **___: Any) -> CheckpointPolicy:
            asked.append(func)
            seen.append(func)
            is_second = func is aten.mm.default and seen.count(func) % 2 == 0
            return CheckpointPolicy.MUST_SAVE if is_second else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(keep_every_second)

    seen = Seen()
    assert same(step(compiled(lambda x, y: op(body, x.cos(), y, context_fn=contexts), seen.backend)), step(plain_cos))
    assert asked.count(aten.mm.default) == 2
    assert seen.tags(aten.mm.default) == [CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE]
    assert seen.count(aten.mm.default) == 5


def plain_cos(x: Tensor, y: Tensor) -> Tensor:
    return body(x.cos(), y)


class KeepProducts:
    """A policy that is an object."""

    def __call__(self, _: Any, func: Any, *args: Any, **kwargs: Any) -> bool:
        return func is aten.mm.default


keeper = KeepProducts()


def contexts_of_keeper() -> Any:
    return create_selective_checkpoint_contexts(keeper)


@each_region
@pytest.mark.parametrize("kind", ["object", "function", "nested", "partial made inside"])
def test_a_context_fn_may_be_of_any_kind(op: Any, kind: str) -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        def nested() -> Any:
            return create_selective_checkpoint_contexts(keeper)

        if kind == "nested":
            return op(body, x.cos(), y, context_fn=nested)
        if kind == "function":
            return op(body, x.cos(), y, context_fn=contexts_of_keeper)
        if kind == "object":
            return op(body, x.cos(), y, context_fn=with_object)
        inside = functools.partial(create_selective_checkpoint_contexts, keeper)
        return op(body, x.cos(), y, context_fn=inside)

    seen = Seen()
    assert same(step(compiled(fn, seen.backend)), step(plain_cos))
    assert seen.count(aten.mm.default) == 4


with_object = functools.partial(create_selective_checkpoint_contexts, keeper)


@each_region
def test_the_node_says_which_policy_decides(op: Any) -> None:
    def regions_of(**options: Any) -> Any:
        seen = EagerAndRecordGraphs()
        torch._dynamo.reset()
        step(compiled(lambda x, y: op(body, x, y, **options), seen))
        (node,) = seen.graphs[0].graph.find_nodes(op="call_function", target=op)
        return node.kwargs

    other = functools.partial(create_selective_checkpoint_contexts, [aten.sin.default])
    plain, first, again, second = (
        regions_of(**options)
        for options in ({}, {"context_fn": keep_products}, {"context_fn": keep_products}, {"context_fn": other})
    )
    assert plain == {"recollect_region": ("body", key_of(None))}
    assert first != second
    assert plain not in (first, second)
    assert again.keys() == first.keys()


@each_region
def test_random_numbers_are_the_same_again(op: Any) -> None:
    plain = step(compiled(lambda x, y: draw(x.cos(), y), Seen().backend))
    torch._dynamo.reset()
    seen = Seen()
    assert same(step(compiled(lambda x, y: op(draw, x.cos(), y, preserve_rng_state=False), seen.backend)), plain)
    # The engine goes on from what was drawn; the partitioner draws it again.
    assert seen.count(aten.mm.default) == (5 if op is wrap_activation_checkpoint else 6)


@each_region
@each_partitioner
def test_regions_nest(op: Any, cut: Any) -> None:
    def inner(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(torch.mm(x, y))

    def outer(x: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(torch.mm(op(inner, x, y), y))

    seen = Seen(cut)
    assert same(step(compiled(lambda x, y: op(outer, x.cos(), y), seen.backend)), step(plain_cos))
    # The engine runs the inner region once for the outer one, and once for itself; min-cut merges what is equal.
    is_run_twice = op is wrap_activation_checkpoint and cut is default_partition
    assert (seen.count(aten.mm.default), seen.count(aten.sin.default)) == (7 if is_run_twice else 6, 2)


def test_a_region_inside_grad_mode_and_wrap_is_still_a_region() -> None:
    def inner(x: Tensor, y: Tensor) -> Any:
        return tag_activation_checkpoint(body, x, y)

    def outer(x: Tensor, y: Tensor) -> Any:
        return wrap_with_set_grad_enabled(True, inner, x, y)

    seen = Seen()
    assert same(step(compiled(lambda x, y: wrap(outer, x.cos(), y), seen.backend)), step(plain_cos))
    assert seen.count(aten.mm.default) == 6


def test_grad_mode_holds_in_the_graph() -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        return wrap_with_set_grad_enabled(False, body, x, y, z=x) * wrap_with_set_grad_enabled(True, body, x, y)

    seen = Seen()
    found = step(compiled(fn, seen.backend))
    assert same(found, step(lambda x, y: body(x, y, z=x).detach() * body(x, y)))
    assert seen.count(aten.mm.default) == 4


def test_a_function_may_close_over_tensors() -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        shift = x.cos()
        return wrap_with_set_grad_enabled(True, lambda a: body(a, y) + shift, x) + tag_activation_checkpoint(
            lambda a: body(a, y) + shift, x
        )

    found = step(compiled(fn, Seen().backend))
    expected = step(lambda x, y: (body(x, y) + x.cos()) + (body(x, y) + x.cos()))
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found, expected)  # a traced backward may add up what reaches x in another order


@each_region
def test_every_region_has_a_number_of_its_own(op: Any) -> None:
    seen = Seen()
    step(compiled(lambda x, y: op(body, op(body, x, y).cos(), y), seen.backend))
    tagged = [node for node in seen.forward if "ac_graph_id" in node.meta]
    numbers = [node.meta["ac_graph_id"] for node in tagged if node.target is aten.mm.default]
    assert len(numbers) == 4
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 2
    assert all(node.meta["recompute"] is CheckpointPolicy.PREFER_RECOMPUTE for node in tagged)
    (between,) = (node for node in seen.forward if node.target is aten.cos.default)
    assert between.meta["recompute"] is CheckpointPolicy.MUST_SAVE


class Net(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op, self.up, self.down = op, nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.op(self.inside, x).sin()

    def inside(self, x: Tensor) -> Any:
        with torch.fx.traceback.annotate({"mine": "here"}):
            return self.down(torch.tanh(self.up(x)))


def stack_of(node: fx.Node) -> str:
    """The path of the innermost module that a node comes from."""
    path: str = list(node.meta["nn_module_stack"].values())[-1][0]
    return path


@each_operator
def test_nodes_keep_what_they_know_of_their_origin(op: Any) -> None:
    seen = Seen()
    net = Net(op)
    with torch.fx.traceback.preserve_node_meta():
        compiled(net, seen.backend)(torch.randn(2, 4)).sum().backward()
    for phase, graph in zip(("forward", "backward"), seen.graphs, strict=True):
        products = [node for node in graph.graph.nodes if node.target in (aten.addmm.default, aten.mm.default)]
        assert products, phase
        for node in products:
            assert "torch.tanh(self.up(x))" in (node.meta["stack_trace"] or ""), (phase, node)
    forward = [node for node in seen.forward if node.target is aten.addmm.default]
    assert [stack_of(node) for node in forward] == ["L['self'].up", "L['self'].down"]
    assert [node.meta["custom"]["mine"] for node in forward] == ["here", "here"]


@each_region
def test_recomputed_nodes_keep_what_they_know_of_their_origin(op: Any) -> None:
    seen = Seen()
    with torch.fx.traceback.preserve_node_meta():
        compiled(Net(op), seen.backend)(torch.randn(2, 4)).sum().backward()
    again = [node for node in seen.graphs[1].graph.nodes if node.target in (aten.addmm.default, aten.tanh.default)]
    assert again
    for node in again:
        assert "torch.tanh(self.up(x))" in node.meta["stack_trace"]
        assert node.meta["custom"]["mine"] == "here"
    assert {"L['self'].up", "L['self'].down"} == {stack_of(node) for node in again if node.target is aten.addmm.default}


@each_region
def test_results_of_any_structure_come_back(op: Any) -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        found = op(lambda a, b: {"sum": a + b, "parts": [a.sin(), (b.cos(), 3)]}, x, y)
        return found["sum"] * found["parts"][0] * found["parts"][1][0] * found["parts"][1][1]

    assert same(step(compiled(fn, Seen().backend)), step(lambda x, y: (x + y) * x.sin() * y.cos() * 3))


@each_region
def test_side_effects_in_python_happen_once(op: Any) -> None:
    seen: list[Tensor] = []

    def noting(x: Tensor, y: Tensor) -> Tensor:
        made = torch.sin(x)
        seen.append(made)
        return made * y

    assert same(step(compiled(lambda x, y: op(noting, x, y), Seen().backend)), step(lambda x, y: x.sin() * y))
    assert [one.shape for one in seen] == [(4, 4)]


def write(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return torch.sin(torch.mm(x, y)) * torch.sigmoid(x)


def test_a_tagged_function_may_write_into_its_inputs() -> None:
    fn = compiled(lambda x, y: tag_activation_checkpoint(write, x.cos(), y), Seen().backend)
    assert same(step(fn), step(lambda x, y: write(x.cos(), y)))


def test_the_engine_refuses_a_function_that_writes_into_its_inputs() -> None:
    fn = compiled(lambda x, y: wrap_activation_checkpoint(write, x.cos(), y), Seen().backend)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="region 'write': argument 0 was changed"):
        step(fn)


@each_region
def test_without_grad_mode_it_is_a_plain_call(op: Any) -> None:
    x, y = inputs()
    with torch.no_grad():
        found = compiled(lambda x, y: op(body, x, y), Seen().backend)(x, y)
    assert torch.equal(found, body(x, y))
    assert not found.requires_grad


@each_region
def test_a_graph_break_inside_leaves_the_region_to_the_engine(op: Any) -> None:
    calls = []

    def broken(x: Tensor, y: Tensor) -> Tensor:
        made = torch.sin(torch.mm(x, y))
        torch._dynamo.graph_break()
        calls.append(1)
        return torch.sigmoid(torch.mm(made, y))

    counter = CompileCounterWithBackend("aot_eager")
    fn = torch.compile(lambda x, y: op(broken, x.cos(), y), backend=counter)
    assert same(step(fn), step(plain_cos))
    assert len(calls) == 2
    with pytest.raises(torch._dynamo.exc.Unsupported):
        step(compiled(lambda x, y: op(broken, x.cos(), y), "aot_eager"))


@each_region
def test_a_backend_that_runs_the_graph_as_it_is_recomputes_too(op: Any) -> None:
    saved = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    fn = compiled(lambda x, y: op(body, x, y), "eager")
    x, y = inputs()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = fn(x, y)
    result.sum().backward()
    found = [result.detach(), x.grad, y.grad]
    assert same([one for one in found if one is not None], step(body))
    assert {id(one) for one in saved} <= {id(x), id(y)}


def test_choices_are_not_made_again_by_the_engine() -> None:
    def choose(x: Tensor, y: Tensor) -> Tensor:
        values, places = torch.topk(torch.mm(x, y), 2)
        return (values * y.gather(1, places)).sin()

    seen = Seen()
    assert same(step(compiled(lambda x, y: wrap_activation_checkpoint(choose, x, y), seen.backend)), step(choose))
    assert seen.count(aten.topk.default) == 0


@each_region
def test_inductor_recomputes_in_backward(op: Any) -> None:
    products: list[fx.Node] = []

    def count(graph: fx.Graph) -> None:  # those that wait for others are in graphs of their own
        products.extend(node for node in graph.nodes if node.target in (aten.mm.default, aten.addmm.default))

    # It calls torch's kernels, and writes none.
    with torch._inductor.config.patch(post_grad_custom_pre_pass=count, fallback_by_default=True):
        found = step(compiled(lambda x, y: op(body, x.cos(), y, z=x), "inductor"))
        assert len(products) == 2 + 6
        products.clear()
        kept = step(compiled(lambda x, y: op(body, x.cos(), y, z=x, context_fn=keep_products), "inductor"))
    expected = step(lambda x, y: body(x.cos(), y, z=x))
    for one in (found, kept):
        torch.testing.assert_close(one, expected)
    assert len(products) == 2 + 4


@pytest.mark.parametrize("op", REGIONS, ids=NAMES[2:])
def test_sizes_may_change(op: Any) -> None:
    def inside(x: Tensor) -> Tensor:
        return x.sin() @ x.cos().T

    fn = torch.compile(lambda x: op(inside, x), backend="aot_eager", fullgraph=True, dynamic=True)
    for size in (3, 5):
        x = torch.randn(size, 4, requires_grad=True)
        (found,) = torch.autograd.grad(fn(x).sum(), x)
        (expected,) = torch.autograd.grad(inside(x).sum(), x)
        assert torch.equal(found, expected)


def test_the_counts_can_differ() -> None:
    # Guards the tests above: torch's operator recomputes nothing here, because its hooks are off while it is traced.
    theirs: Any = stock.wrap_activation_checkpoint
    seen = Seen()
    step(compiled(lambda x, y: theirs(body, x.cos(), y), seen.backend))
    assert seen.count(aten.mm.default) == 4
