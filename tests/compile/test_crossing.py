"""Sums of gradients are in memory before a kernel runs, if they are smaller than what they are made of."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

from recollect._compile.crossing import find_crossing
from recollect._compile.ordering import keep_order
from recollect._compile.partition import Partition, partitioner
from tests.compile.test_ordering import measure_peak

SIDE = 8


class Joining(fx.Graph):
    """Two gradients are added, a product reads what comes of the sum, and something later the sum again.

    Args:
        terms: how many gradients there are.
        reads_before: whether the product reads what comes of the sum.
        keeps_terms: whether the terms are read later, too.
    """

    def __init__(self, *, terms: int = 2, reads_before: bool = True, keeps_terms: bool = False) -> None:
        super().__init__()
        given = [self._given(f"tangents_{number}") for number in range(terms + 1)]
        total = given[1]
        for term in given[2:]:
            total = self._call(torch.ops.aten.add.Tensor, total, term)
        total = self._call(torch.ops.aten.sin.default, total)
        wave = self._call(torch.ops.aten.cos.default, total if reads_before else given[0])
        product = self._call(torch.ops.aten.mm.default, wave, given[0])
        self.output((self._call(torch.ops.aten.add.Tensor, product, total), *(given[1:] if keeps_terms else ())))

    def _given(self, name: str) -> fx.Node:
        node = self.placeholder(name)
        node.meta["val"] = torch.empty(SIDE, SIDE)
        return node

    def _call(self, target: Any, *args: fx.Node) -> fx.Node:
        node = self.call_function(target, args)
        node.meta["val"] = torch.empty(SIDE, SIDE)
        return node


def test_a_sum_that_is_read_before_and_after_a_product_is_written_before_it() -> None:
    module = fx.GraphModule(nn.Module(), Joining())
    given = [torch.randn(SIDE, SIDE) for _ in range(3)]
    (expected,) = module(*given)
    ((kernel, values),) = find_crossing(module).items()
    assert (kernel.name, [value.name for value in values]) == ("mm_default", ["sin_default"])
    assert keep_order(module) == 1
    (found,) = module(*given)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(Joining(terms=1), id="it is as large as what it is made of"),
        pytest.param(Joining(reads_before=False), id="it is read only afterwards"),
        pytest.param(Joining(keeps_terms=True), id="what it is made of stays anyway"),
    ],
)
def test_other_values_are_left_to_inductor(graph: fx.Graph) -> None:
    assert not find_crossing(fx.GraphModule(nn.Module(), graph))


class Biased(Joining):
    """The gradient of a layer's result is read by a product, and by the sum that is its bias's gradient."""

    def __init__(self) -> None:
        fx.Graph.__init__(self)
        given, weight = self._given("tangents_0"), self._given("primals_0")
        gradient = self._call(torch.ops.aten.sin.default, self._call(torch.ops.aten.mm.default, given, weight))
        product = self._call(torch.ops.aten.mm.default, gradient, weight)
        total = self.call_function(torch.ops.aten.sum.dim_IntList, (gradient, [0]))
        total.meta["val"] = torch.empty(SIDE)
        last = self._call(torch.ops.aten.mm.default, product, weight)
        self.output((last, total))


def test_a_sum_is_made_before_the_next_product_where_a_prediction_is_to_hold() -> None:
    module = fx.GraphModule(nn.Module(), Biased())
    assert not find_crossing(module)
    ((kernel, values),) = find_crossing(module, with_sums=True).items()
    assert (kernel.name, [value.name for value in values]) == ("mm_default_2", ["sum_dim_int_list"])


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[0](self.first(x)).relu()
        return torch.relu(self.norms[1](self.second(inner)) + x)


class Net(nn.Module):
    """Gives a loss."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Convnext(nn.Module):
    """A block of a ConvNeXt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.near = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.near(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # type: ignore[no-any-return]


@pytest.mark.kernels
def test_under_inductor_a_convnext_stays_within_its_budget() -> None:
    pytest.importorskip("scipy")
    torch.manual_seed(0)
    stages = (*(Convnext(32) for _ in range(3)), nn.Conv2d(32, 64, 2, 2), *(Convnext(64) for _ in range(3)))
    model, x = Net(nn.Conv2d(3, 32, 4, 4), *stages), torch.randn(8, 3, 64, 64)
    held = sum(one.nbytes for one in (*model.parameters(), x))
    plain = peak_of(model, x)
    own = {"custom_partitioner_fn": partitioner(budget=int(held + 0.6 * plain))}
    assert peak_of(model, x, options=own) <= 0.6 * plain


def peak_of(model: nn.Module, x: Tensor, **options: Any) -> int:
    """What a compiled step takes beside its inputs."""
    torch._dynamo.reset()
    with fresh_cache(), inductor_config.patch(compile_threads=1):
        compiled = torch.compile(model, fullgraph=True, **options)

        def step() -> None:
            torch.autograd.backward(compiled(x))
            model.zero_grad()

        for _ in range(2):
            step()
        return measure_peak(step)


@pytest.mark.kernels
def test_under_inductor_a_residual_net_takes_what_was_predicted() -> None:
    pytest.importorskip("scipy")
    torch.manual_seed(0)
    model = Net(*(Residual(16) for _ in range(3)))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(4, 16, 32, 32).to(memory_format=torch.channels_last)
    found: list[Partition] = []
    options: dict[str, Any] = {"custom_partitioner_fn": partitioner(budget="min", report=found.append)}
    with fresh_cache(), inductor_config.patch(compile_threads=1):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, options=options)

        def step() -> None:
            torch.autograd.backward(compiled(x))
            model.zero_grad()

        for _ in range(2):
            step()
        measured = measure_peak(step)
    simulation = found[0].simulation
    predicted = simulation.peak_bytes - simulation.held_bytes
    assert measured == pytest.approx(predicted, rel=0.03)
