"""Joined regions: one forgets what the region before it gave, which makes it again, and gradients stay."""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import Choice, Decision, Plan
from recollect._core.forecasts import PlannedRegion
from tests.trying import try_all

WIDTH = 8


class Block(nn.Module):
    """Norm, a wide product, dropout, and a residual; batch norm has statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))
        return found


class Pair(Block):
    """Gives a tuple, and takes one, as blocks of Transformers do."""

    def forward(self, x: Tensor | tuple[Tensor, None]) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x[0] if isinstance(x, tuple) else x), None


class Stack(nn.Module):
    """Blocks in a row, with something between the second and the third."""

    def __init__(self, kind: type[Block] = Block, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(4))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            found = layer(x)
            x = found[0] if isinstance(found, tuple) else found
            if number == 1:
                x = self.between(x)
        return x.square().sum()


def link_all(way: str, kind: str = "Block") -> Plan:
    """All layers as regions, each but the first joined to the one before it."""
    regions = tuple(
        PlannedRegion(path=f"layers.{at}", kind=kind, way=way, joined_to=f"layers.{at - 1}" if at else "")
        for at in range(4)
    )
    wide = Choice(decision=Decision.SAVE, module="layers.*.up", op="aten.addmm.default")
    return Plan(regions=regions, choices=() if way == "rerun" else (wide,))


def gradients(model: nn.Module, x: Tensor, *, passes: int = 1) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(x)
    for number in range(passes):
        loss.backward(retain_graph=number < passes - 1)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def write(x: Tensor) -> Tensor:
    x += 1
    return x


def test_gradients_are_those_of_the_plain_step_whatever_happens_between_the_blocks() -> None:
    def check(variant: tuple[str, type[Block], Callable[[Tensor], Tensor], int]) -> None:
        way, kind, between, passes = variant
        torch.manual_seed(0)
        model, x = Stack(kind, between), torch.randn(6, WIDTH)
        plain = copy.deepcopy(model)
        with recollect.apply(model, link_all(way, kind.__name__)):
            for _ in range(3):
                found, expected = gradients(model, x, passes=passes), gradients(plain, x, passes=passes)
                assert all(map(torch.equal, found, expected))
        state, other = model.state_dict(), plain.state_dict()
        assert all(torch.equal(state[name], other[name]) for name in state)

    same, ways = (lambda x: x), ("rerun", "serve", "replay")
    betweens: list[Callable[[Tensor], Tensor]] = [same, write, lambda x: x.view_as(x), torch.sin, lambda x: x.clone()]
    try_all(
        check,
        [
            *((way, kind, same, passes) for way in ways for kind in (Block, Pair) for passes in (1, 3)),
            *((way, Block, between, 1) for way in ways for between in betweens),
        ],
    )


def test_what_a_linked_region_was_given_is_gone_until_backward_and_after_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Stack()
    given: list[ref[Tensor]] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, args: given.append(ref(args[0].untyped_storage())))
    with recollect.apply(model, link_all("rerun")):
        loss = model(torch.randn(6, WIDTH, requires_grad=True))
        assert [one() is None for one in given] == [False, True, True, True]
        recollect.print_saved(loss)
        assert "'layers.0' (13), 'layers.1' (13), 'layers.2' (13), 'layers.3' (12)" in capsys.readouterr().out
        loss.backward()
        del loss
        assert given[0]() is None


def test_a_step_whose_backward_never_runs_leaves_nothing_behind() -> None:
    model = Stack()
    gc.disable()
    try:
        with recollect.apply(model, link_all("rerun")):
            x = torch.randn(6, WIDTH)
            loss, held = model(x), ref(x.untyped_storage())
            del x
            assert held() is not None
            del loss
            assert held() is None
    finally:
        gc.enable()


@contextmanager
def counting(model: nn.Module) -> Iterator[list[int]]:
    """How often each block ran."""
    counts = [0] * 4
    hooks = []
    for at, layer in enumerate(model.layers):  # type: ignore[arg-type]

        def note(*_: object, at: int = at) -> None:
            counts[at] += 1

        hooks.append(layer.up.register_forward_hook(note))
    yield counts
    for hook in hooks:
        hook.remove()


def test_each_block_runs_again_once() -> None:
    model = Stack()
    with recollect.apply(model, link_all("rerun")), counting(model) as counts:
        model(torch.randn(6, WIDTH)).backward()
    assert counts == [2, 2, 2, 2]


def test_a_pass_to_a_late_parameter_alone_makes_what_its_block_was_given() -> None:
    model, x = Stack(), torch.randn(6, WIDTH)
    model.eval()
    late = model.get_parameter("layers.3.up.weight")
    (expected,) = torch.autograd.grad(model(x), [late])
    with recollect.apply(model, link_all("rerun")):
        loss = model(x)
        (found,) = torch.autograd.grad(loss, [late], retain_graph=True)
        assert torch.equal(found, expected)
        loss.backward()
        assert late.grad is not None
        assert torch.equal(late.grad, expected)


def test_second_derivatives_are_those_of_the_plain_step() -> None:
    model, x = Stack(), torch.randn(6, WIDTH)
    model.eval()
    weights = [model.get_parameter(f"layers.{at}.up.weight") for at in range(4)]

    def twice() -> list[Tensor]:
        firsts = torch.autograd.grad(model(x), weights, create_graph=True)
        return list(torch.autograd.grad(sum(first.square().sum() for first in firsts), weights))  # type: ignore[arg-type]

    expected = twice()
    with recollect.apply(model, link_all("rerun")):
        assert all(map(torch.equal, twice(), expected))


def test_inside_another_region_nothing_is_linked_and_gradients_stay() -> None:
    model, x = Stack(), torch.randn(6, WIDTH)
    expected = gradients(copy.deepcopy(model), x)
    with recollect.apply(model, link_all("rerun")):
        torch.manual_seed(1)
        recollect.checkpoint(model)(x).backward()
    assert all(map(torch.equal, [p.grad for p in model.parameters() if p.grad is not None], expected))


def test_a_plan_says_which_regions_are_linked_and_reads_itself_back() -> None:
    plan = link_all("rerun")
    assert Plan.from_json(plan.to_json()) == plan
    assert [line.split()[0] for line in str(plan).splitlines() if "joined" in line] == ["layers.1-3"]
    assert plan.diff(Plan(regions=plan.regions[:1])).startswith("layers.1: rerun, joined -> plain")
