"""Products that read recomputed activations run after the next one, so that one kernel makes all that both need."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache, run_and_get_code

from recollect import Choice, Decision, Plan
from recollect._compile import partition
from recollect._compile.deferring import defer_readers
from recollect._compile.partition import partitioner

ROWS, WIDE, NARROW = 8, 16, 4


class Layer(fx.Graph):
    """Backward of a layer behind a sigmoid, whose input is there, and of what comes before it.

    Args:
        reads_early: whether another product reads the activation first.
        columns: of what the second product gives.
        is_chained: whether the second product reads what the first gives.
        reads_another: whether the first product reads a gradient that the second does not.
    """

    def __init__(
        self,
        *,
        reads_early: bool = False,
        columns: int = WIDE,
        is_chained: bool = False,
        reads_another: bool = False,
    ) -> None:
        super().__init__()
        raw, weight = self._given("raw", ROWS, WIDE), self._given("weight", NARROW, columns)
        incoming = self._given("tangents_1", ROWS, NARROW)
        active = self._call(torch.ops.aten.sigmoid.default, raw)
        read = self._given("tangents_2", ROWS, NARROW) if reads_another else incoming
        turned = self._call(torch.ops.aten.t.default, read)
        early = (self._call(torch.ops.aten.mm.default, turned, active),) if reads_early else ()
        of_weight = self._call(torch.ops.aten.mm.default, turned, active)
        doubled = self._call(torch.ops.aten.mul.Tensor, of_weight, 2.0)
        left = self._call(torch.ops.aten.mm.default, incoming, doubled if is_chained else weight)
        cut = self._call(torch.ops.aten.slice.Tensor, left, 1, 0, WIDE)
        of_raw = self._call(torch.ops.aten.mul.Tensor, cut, active)
        self.output((doubled, of_raw, *early))

    def _given(self, name: str, *shape: int) -> fx.Node:
        node = self.placeholder(name)
        node.meta["val"] = torch.empty(shape)
        return node

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self.call_function(target, args)
        values = [one.meta["val"] if isinstance(one, fx.Node) else one for one in args]
        node.meta["val"] = target(*values)
        return node


def test_a_product_that_reads_a_recomputed_activation_goes_behind_the_next() -> None:
    module = fx.GraphModule(nn.Module(), Layer())
    given = [torch.randn(ROWS, WIDE), torch.randn(NARROW, WIDE), torch.randn(ROWS, NARROW)]
    expected = module(*given)
    assert defer_readers(module) == 1
    order = [node.name for node in module.graph.nodes if "mm" in node.name]
    assert order == ["mm_default_1", "mm_default"]
    for found, wanted in zip(module(*given), expected, strict=True):
        assert torch.equal(found, wanted)


def test_where_memory_counts_it_stays_unless_there_is_room_for_all_that_one_kernel_holds() -> None:
    """The activation and the gradient, each of the size of what they are made of, are written by one kernel."""
    asked: list[list[str]] = []

    def leave(room_bytes: int) -> Any:
        def find(nodes: Sequence[fx.Node]) -> int:
            asked.append([node.name for node in nodes if "mm" in node.name])
            return room_bytes

        return find

    size = 4 * ROWS * WIDE
    assert defer_readers(fx.GraphModule(nn.Module(), Layer()), leave(2 * size - 1)) == 0
    assert defer_readers(fx.GraphModule(nn.Module(), Layer()), leave(2 * size)) == 1
    assert asked == [["mm_default", "mm_default_1"]] * 2


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(Layer(reads_early=True), id="the activation is in memory already"),
        pytest.param(Layer(columns=2 * WIDE), id="what the second gives is larger than the activation"),
        pytest.param(Layer(is_chained=True), id="the second reads what the first gives"),
        pytest.param(Layer(reads_another=True), id="the first would hold a gradient for longer"),
    ],
)
def test_other_products_stay_where_they_are(layer: fx.Graph) -> None:
    module = fx.GraphModule(nn.Module(), layer)
    before = [node.name for node in module.graph.nodes]
    assert defer_readers(module) == 0
    assert [node.name for node in module.graph.nodes] == before


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 64, bias=False), nn.Linear(16, 64, bias=False)
        self.down = nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


@pytest.mark.kernels
def test_under_inductor_one_kernel_makes_the_activation_and_its_gradients() -> None:
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(32, 16)
    expected = torch.autograd.grad(model(x).square().mean(), [*model.parameters()])
    pointwise = Plan(
        choices=(Choice(op="aten.mm.default", decision=Decision.SAVE), Choice(decision=Decision.RECOMPUTE))
    )
    options: dict[str, Any] = {"custom_partitioner_fn": partitioner(pointwise)}
    with fresh_cache(), inductor_config.patch(compile_threads=1):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, options=options)
        found, codes = run_and_get_code(lambda: torch.autograd.grad(compiled(x).square().mean(), [*model.parameters()]))
    backward = codes[-1].partition("def call(")[2]
    assert backward.count("cpp_fused_") == 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("decides", ["budget", "plan"])
def test_under_a_budget_products_stay_where_memory_is_at_its_peak(
    decides: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel for the product and both gradients took 21% more than the smallest peak of a small Llama."""
    moved: list[int] = []

    def note(backward: fx.GraphModule, room: Any = None) -> int:
        everywhere = defer_readers(copy.deepcopy(backward))
        moved.extend((everywhere, defer_readers(backward, room)))
        return moved[-1]

    monkeypatch.setattr(partition, "defer_readers", note)
    torch.manual_seed(0)
    model, x = nn.Sequential(Gated(), Gated(), Gated(), Gated()), torch.randn(512, 16)
    choices = (Choice(op="aten.mm.default", decision=Decision.SAVE), Choice(decision=Decision.RECOMPUTE))
    cut = partitioner(budget="min") if decides == "budget" else partitioner(Plan(choices=choices))
    with fresh_cache(), inductor_config.patch(fallback_by_default=True):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, options={"custom_partitioner_fn": cut})
        compiled(x).square().mean().backward()
    everywhere, here = moved
    assert everywhere >= 3
    assert here < everywhere if decides == "budget" else here == everywhere
