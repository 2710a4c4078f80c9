"""State that a module carries from call to call is as forward found it, wherever its code reads and sets it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._core.reads import may_carry
from tests.watching import backward


class Carrying(nn.Module):
    """Reads its state, then sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.state = torch.zeros(2, 4)

    def mix(self, x: Tensor, state: Tensor) -> Tensor:
        return torch.tanh(self.layer(x) + state).sin()

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x, self.state)
        self.state = y.detach() * 2
        return y.tanh()


class InItsBase(Carrying):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class InABaseByName(Carrying):
    def forward(self, x: Tensor) -> Tensor:
        return Carrying.forward(self, x).tanh()


class InAFunction(Carrying):
    def forward(self, x: Tensor) -> Tensor:
        return carry(self, x)


def carry(module: Carrying, x: Tensor) -> Tensor:
    y = module.mix(x, module.state)
    module.state = y.detach() * 2
    return y.tanh()


class ByText(Carrying):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x, getattr(self, "state"))  # noqa: B009
        self.state = y.detach() * 2
        return y.tanh()


class InItsDict(Carrying):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x, self.__dict__["state"])
        self.state = y.detach() * 2
        return y.tanh()


class ThroughAProperty(Carrying):
    @property
    def last(self) -> Tensor:
        return self.state

    @last.setter
    def last(self, value: Tensor) -> None:
        self.state = value

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x, self.last)
        self.last = y.detach() * 2
        return y.tanh()


class UnderADecorator(Carrying):
    @torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class AfterAnAssignmentThatIsSkipped(Carrying):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            self.state = x
        y = self.mix(x, self.state)
        self.state = y.detach() * 2
        return y.tanh()


class ReadByAPart(Carrying):
    class Part(nn.Module):
        def forward(self, x: Tensor, parent: Carrying) -> Tensor:
            return parent.mix(x, parent.state)

    def __init__(self) -> None:
        super().__init__()
        self.part = self.Part()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(x, self)
        self.state = y.detach() * 2
        return y.tanh()


class WithoutForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.state = torch.zeros(2, 4)


class ReadByItsHook(WithoutForward):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_hook(self.shift)

    def shift(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        del module, args
        result = result + self.state
        self.state = result.detach().sin()
        return result

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x).tanh().sin()
        return out


class ReadByAPreHook(WithoutForward):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, args: (args[0] + module.state,))
        self.register_forward_hook(lambda module, _, result: setattr(module, "state", result.detach() * 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x).tanh().sin()
        return out


@dataclass(slots=True)
class Slots:
    value: Tensor = field(default_factory=lambda: torch.zeros(2, 4))


class InSlots(Carrying):
    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x, self.slots.value)
        self.slots.value = y.detach() * 2
        return y.tanh()


class DeepInCollections(Carrying):
    def __init__(self) -> None:
        super().__init__()
        self.memory = {"a": {"b": {"c": [torch.zeros(2, 4)]}}}

    def forward(self, x: Tensor) -> Tensor:
        held = self.memory["a"]["b"]["c"]
        y = self.mix(x, held[0])
        held[0] = y.detach() * 2
        return y.tanh()


CLASSES: list[type[nn.Module]] = [Carrying, InItsBase, InABaseByName, InAFunction, ByText, InItsDict, ThroughAProperty]
CLASSES += [UnderADecorator, AfterAnAssignmentThatIsSkipped, ReadByAPart, ReadByItsHook, ReadByAPreHook]
CLASSES += [InSlots, DeepInCollections]


def wrap_once(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return recollect.checkpoint(module)


def wrap_anew(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: recollect.checkpoint(module)(x)


def apply(module: nn.Module) -> Callable[[Tensor], Tensor]:
    model = nn.Sequential(module)
    recollect.apply(model, {"0": "full"})
    return model


def apply_keeping(module: nn.Module) -> Callable[[Tensor], Tensor]:
    model = nn.Sequential(module)
    recollect.apply(model, {"0": recollect.policies.save_matmuls})
    return model


WAYS = [wrap_once, wrap_anew, apply, apply_keeping]


def train(kind: type[nn.Module], wrap: Callable[[nn.Module], Callable[[Tensor], Tensor]] | None) -> list[Tensor]:
    """Several steps, then two calls before one backward; gradients, and what a last call gives."""
    torch.manual_seed(0)
    module = kind()
    run = module if wrap is None else wrap(module)
    x, found = torch.randn(2, 4), list[Tensor]()
    for step in range(4):
        module.zero_grad()
        backward((run(x) + run(x * 2)).sum() if step == 3 else run(x).sum())
        found += [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return [*found, run(x).detach()]


@pytest.mark.parametrize("wrap", WAYS, ids=[way.__name__ for way in WAYS])
@pytest.mark.parametrize("kind", CLASSES, ids=[kind.__name__ for kind in CLASSES])
def test_what_a_module_carries_is_as_forward_found_it(kind: type[nn.Module], wrap: Any) -> None:
    for plain, ours in zip(train(kind, None), train(kind, wrap), strict=True):
        assert torch.equal(plain, ours)


def test_a_last_result_that_a_part_of_another_name_shares_is_not_carried() -> None:
    class Shows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.attn = x.softmax(-1)
            return self.attn @ x

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Shows()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attn(x)
            return out

    block = Block()
    assert not may_carry(block.attn, "attn", block.modules())
