"""What modules still have in variables when their code returns is in the profile; other profilers are let be."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import Profile


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
