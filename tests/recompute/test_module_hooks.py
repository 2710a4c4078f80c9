"""Hooks, functions and forwards that come and go between forward and backward: recomputation runs what forward ran."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

import recollect
from recollect import compat, policies
from tests.watching import backward


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.act: Callable[[Tensor], Tensor] = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.act(self.up(x)))
        return result


def hooked(register: Callable[[Block], Any]) -> Callable[[Block], AbstractContextManager[None]]:
    @contextmanager
    def steer(block: Block) -> Iterator[None]:
        with register(block):
            yield

    return steer


@contextmanager
def another_forward(block: Block) -> Iterator[None]:
    own = block.up.forward
    vars(block.up)["forward"] = lambda x: own(x) * 1.5
    yield
    del block.up.forward


@contextmanager
def another_function(block: Block) -> Iterator[None]:
    own, block.act = block.act, torch.sigmoid
    yield
    block.act = own


STEERED = {
    "hook": hooked(lambda block: block.up.register_forward_hook(lambda _, __, y: y * 1.5)),
    "first hook": hooked(lambda block: block.up.register_forward_hook(lambda _, __, y: y * 1.5, prepend=True)),
    "hook with keywords": hooked(
        lambda block: block.up.register_forward_hook(lambda _, __, ___, y: y * 1.5, with_kwargs=True)
    ),
    "pre-hook": hooked(lambda block: block.up.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))),
    "pre-hook with keywords": hooked(
        lambda block: block.up.register_forward_pre_hook(
            lambda _, args, kwargs: ((args[0] * 1.5,), kwargs), with_kwargs=True
        )
    ),
    "hook on all modules": hooked(
        lambda _: of_all_modules.register_module_forward_hook(
            lambda module, _, y: y * 1.5 if isinstance(module, nn.Linear) else None
        )
    ),
    "forward": another_forward,
    "function": another_function,
}
RULES: list[Any] = ["full", policies.save_matmuls, policies.save_ops("aten.tanh.default")]


def gradients_of(steer: Callable[[Block], AbstractContextManager[None]], rule: Any, *, is_late: bool) -> list[Tensor]:
    """Two blocks, steered in the fourth step: in forward only, or in backward only."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if rule is not None:
        recollect.apply(model, {"*": rule})
    for _ in range(3):
        backward(model(torch.randn(2, 4)).sum())
    model.zero_grad()
    x = torch.randn(2, 4)
    if is_late:
        y = model(x)
        with steer(model[0]), steer(model[1]):  # type: ignore[arg-type]
            backward(y.square().sum())
    else:
        with steer(model[0]), steer(model[1]):  # type: ignore[arg-type]
            y = model(x)
        backward(y.square().sum())
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("way", STEERED)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.filterwarnings("ignore:policy .* this step")
def test_recomputation_runs_the_hooks_and_functions_that_forward_ran(way: str, rule: Any, is_late: bool) -> None:
    plain = gradients_of(STEERED[way], None, is_late=is_late)
    ours = gradients_of(STEERED[way], rule, is_late=is_late)
    assert all(map(torch.equal, plain, ours))


def test_hooks_are_afterwards_those_that_were_there_before() -> None:
    block = Block()
    first = block.up.register_forward_hook(lambda _, __, y: y * 1.5)
    y = recollect.checkpoint(block)(torch.randn(2, 4))
    first.remove()
    second = block.up.register_forward_pre_hook(lambda _, args, kwargs: None, with_kwargs=True)
    before = dict(block.up._forward_hooks), dict(block.up._forward_pre_hooks)
    backward(y.sum())
    assert (dict(block.up._forward_hooks), dict(block.up._forward_pre_hooks)) == before
    assert list(block.up._forward_pre_hooks_with_kwargs) == list(block.up._forward_pre_hooks)
    second.remove()
    assert not block.up._forward_pre_hooks


def test_a_hook_that_forward_itself_takes_away_does_not_come_back() -> None:
    calls = list[str]()

    def once(module: nn.Module, _: Any) -> None:
        calls.append(type(module).__name__)
        handle.remove()

    block = Block()
    handle = block.up.register_forward_pre_hook(once)
    backward(recollect.checkpoint(block)(torch.randn(2, 4)).sum())
    assert calls == ["Linear"]


def test_hooks_come_back_after_a_recomputation_that_fails() -> None:
    block = Block()

    def fail(_: nn.Module, __: Any, ___: Tensor) -> None:
        if recollect.is_recomputing():
            raise KeyError

    handle = block.up.register_forward_hook(fail)
    y = recollect.checkpoint(block)(torch.randn(2, 4))
    handle.remove()
    with pytest.raises(KeyError):
        backward(y.sum())
    assert not block.up._forward_hooks


def test_compat_runs_the_hooks_that_there_are_as_torch_does() -> None:
    block, calls = Block(), list[int]()
    y = compat.checkpoint(block, torch.randn(2, 4), use_reentrant=False)
    with block.up.register_forward_hook(lambda *_: calls.append(1)):
        backward(y.sum())
    assert calls == [1]
