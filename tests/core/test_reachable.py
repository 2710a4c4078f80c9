"""Modules are found where a function keeps what it uses, by whichever way."""

import abc
import enum
from typing import Any

import pytest
from torch import Tensor, nn

from recollect._core.reachable import find_held

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


class Level(enum.Enum):
    LOW = "low"


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
