"""What modules still have in variables when their code returns is in the profile; other profilers are let be."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import Profile
from recollect._profile.memory import LiveBytes


class Holds(nn.Module):
    """Has the sine in a variable to the end, and lets go of the cosine: it is never in one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        sine = torch.sin(x)
        both = [torch.exp(torch.cos(sine))]
        x = torch.sigmoid(both[0])
        found: Tensor = self.inner(x)
        return torch.relu(found)


def until(seen: Profile, op: str) -> int | None:
    """When the last variable lets go of what an operator gave."""
    call = next(call for call in seen.calls if call.op.startswith(f"aten.{op}."))
    return seen.storages[call.outputs[0].storage].in_variable_until


def test_what_variables_hold_when_code_returns_is_noted_with_the_call_after() -> None:
    model, x = nn.Sequential(Holds(), nn.Softplus()), torch.randn(4, 4, requires_grad=True)
    for dry in (False, True):
        seen = recollect.profile(model, x, dry=dry)
        after = next(number for number, call in enumerate(seen.calls) if "softplus" in call.op)
        assert [until(seen, op) for op in ("sin", "exp", "sigmoid", "tanh")] == [after] * 4
        assert until(seen, "cos") is None
        assert Profile.from_json(seen.to_json()).storages == seen.storages
        assert sys.getprofile() is None


def test_a_step_that_is_profiled_by_others_is_left_to_them() -> None:
    heard = []

    def hear(*_: Any) -> None:
        heard.append(1)

    sys.setprofile(hear)
    try:
        seen = recollect.profile(Holds(), torch.randn(4, 4, requires_grad=True))
        assert sys.getprofile() is hear
    finally:
        sys.setprofile(None)
    assert heard
    assert until(seen, "sin") is None


def test_a_step_that_fails_leaves_no_profile_function_behind() -> None:
    class Fails(Holds):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        recollect.profile(Fails(), torch.randn(4, 4, requires_grad=True))
    assert sys.getprofile() is None


class Two(nn.Module):
    """Gives two values, of which the caller uses one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(x, 1)
        return weights @ x, weights


class Loop(nn.Module):
    """Has what a layer gave in a variable until the next one returns, as loops over layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Two() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            both = layer(x)
            x = both[0]
        return x


def test_what_the_caller_has_in_variables_meanwhile_is_noted() -> None:
    for dry in (False, True):
        seen = recollect.profile(Loop(), torch.randn(4, 4, requires_grad=True), dry=dry)
        made = [call.outputs[0].storage for call in seen.calls if call.op == "aten._softmax.default"]
        ends = [number + 1 for number, call in enumerate(seen.calls) if call.op == "aten.mm.default"]
        ends = [end for end in ends if end <= seen.forward_count]
        assert [seen.storages[storage].in_variable_until for storage in made] == [*ends[1:], ends[-1]]


def test_the_profile_lets_go_of_what_it_saw_in_variables() -> None:
    model, x = Loop(), torch.randn(64, 64)
    with LiveBytes(include=x) as meter, torch.no_grad():
        model(x)
    with torch.no_grad():
        assert recollect.profile(lambda: model(x), timed=False).peak_bytes == meter.peak_bytes
