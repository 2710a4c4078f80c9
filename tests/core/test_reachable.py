"""Modules are found where a function keeps what it uses, by whichever way."""

import abc
import enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recollect._core.reachable import find_held, find_methods

elsewhere = nn.Linear(2, 2)
scale, Alias = 2.0, nn.Linear


class Plain(nn.Module):
    def forward(self, x: Tensor, factor: float = 2.0, *_: Any) -> Tensor:
        return x * factor * scale * isinstance(self, Alias)


class NamingAGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = elsewhere(x)
        return out


class WithADefault(nn.Module):
    def forward(self, x: Tensor, layer: nn.Module = elsewhere) -> Tensor:
        out: Tensor = layer(x)
        return out


class WithAKeywordDefault(nn.Module):
    def forward(self, x: Tensor, *, layers: tuple[nn.Module, ...] = (elsewhere,)) -> Tensor:
        out: Tensor = layers[0](x)
        return out


def test_a_plain_forward_leads_to_its_module_alone() -> None:
    module = Plain()
    found = find_held(module.forward)
    assert (found.modules, found.tensors, found.generators) == ([module], [], [])


@pytest.mark.parametrize("kind", [NamingAGlobal, WithADefault, WithAKeywordDefault])
def test_a_forward_leads_to_what_it_names_and_to_its_defaults(kind: type[nn.Module]) -> None:
    module = kind()
    found = find_held(module.forward)
    assert {id(one) for one in found.modules} == {id(module), id(elsewhere)}
    assert not found.tensors


def name_a_global(x: Tensor) -> Tensor:
    out: Tensor = elsewhere(x)
    return out


class CallingAFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return name_a_global(x)


def test_a_forward_leads_to_what_functions_that_it_names_lead_to() -> None:
    module = CallingAFunction()
    found = find_held(module.forward)
    assert {id(one) for one in found.modules} == {id(module), id(elsewhere)}


LEVELS = {"low": 0.5}
steps: list[float] = []


class Level(enum.Enum):
    LOW = "low"


class WithMethods(nn.Module):
    """Its forward calls some of its methods, and not others."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x.to(torch.float32))

    def scaled(self, x: Tensor) -> Tensor:
        return x * level_of(self, Level.LOW)

    def named_by_a_function(self) -> float:
        return LEVELS["low"]

    def save(self) -> list[float]:
        return steps

    def to(self, *args: Any, **kwargs: Any) -> Any:
        steps.append(1.0)
        return super().to(*args, **kwargs)


def level_of(module: WithMethods, level: Level) -> float:
    return module.named_by_a_function() if level is Level.LOW else 1.0


def test_of_a_class_only_the_methods_count_that_its_forward_may_call() -> None:
    assert [method.__name__ for method in find_methods([WithMethods])] == ["named_by_a_function"]


def test_classes_and_members_of_enumerations_hold_nothing() -> None:
    def with_enum(x: Tensor, kind: Any = (Level, Level.LOW, AbstractState)) -> Tensor:
        return x * len(kind)

    found = find_held(with_enum)
    assert found.holders == []
    assert found.modules == []


class AbstractState(abc.ABC):
    layer = elsewhere

    @abc.abstractmethod
    def use(self) -> None: ...
