"""Of the code of classes only what a forward may run counts: by names, through helpers, bases and decorators."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from recollect._core.methods import find_methods, find_run_code

LEVELS = {"low": 0.5}
steps: list[float] = []


class WithMethods(nn.Module):
    """Its forward calls some of its methods, and not others."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x.to(torch.float32))

    def scaled(self, x: Tensor) -> Tensor:
        return x * level_of(self)

    def named_by_a_function(self) -> float:
        return LEVELS["low"]

    def save(self) -> list[float]:
        return steps

    def to(self, *args: Any, **kwargs: Any) -> Any:
        steps.append(1.0)
        return super().to(*args, **kwargs)


def level_of(module: WithMethods) -> float:
    return module.named_by_a_function()


def decorated(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(method)
    def run(*args: Any) -> Tensor:
        return method(*args)

    return run


class Base(nn.Module):
    @property
    def gain(self) -> float:
        return 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Derived(Base):
    @decorated
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def test_of_a_class_only_the_methods_count_that_its_forward_may_call() -> None:
    assert [method.__name__ for method in find_methods([WithMethods])] == ["named_by_a_function"]


def test_the_code_that_may_run_is_that_of_bases_properties_helpers_and_what_is_decorated() -> None:
    code = [code for _, code in find_run_code([WithMethods, Derived])]
    fget = Base.__dict__["gain"].fget
    wanted = [WithMethods.scaled, WithMethods.named_by_a_function, level_of, Base.forward, fget]
    wanted += [Derived.forward.__wrapped__]  # type: ignore[attr-defined]
    assert all(function.__code__ in code for function in wanted)
    assert WithMethods.save.__code__ not in code
