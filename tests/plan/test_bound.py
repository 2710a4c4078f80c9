"""What no plan that only recomputes can beat: gradients on their way count, and moments of backward that tie others."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import recollect
from recollect._core.profiles import Profile
from recollect._plan.presence import Presence
from recollect._plan.problem import Problem
from recollect._plan.solvers.bound import LowerBound
from tests.plan.blocks import make_step
from tests.timing import with_fixed_times

pytest.importorskip("scipy")


def perceptron() -> Problem:
    """Its last layer makes the gradient of its input first, and that waits until those of its parameters are made."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    return Problem(with_fixed_times(recollect.profile(model, torch.randn(256, 16))))


def four_layers(middle_bytes: int) -> Profile:
    """Each layer makes a value that it saves, and hands on nothing that takes memory; the second one's backward does.

    The value of the first layer takes 5 bytes, those of the others 10. To make one again takes a second.
    """
    forward, sizes = list[dict[str, object]](), [0]
    for number in range(4):
        sizes += [10 if number else 5, 0]
        value, result = len(sizes) - 2, len(sizes) - 1
        layer = {"module": f"layers.{number}", "seconds": 1.0}
        forward.append({**layer, "reads": [value - 1], "makes": [value], "saves": []})
        forward.append({**layer, "reads": [value], "makes": [result], "saves": [value]})
    step = make_step(forward, sizes)
    calls = [
        replace(call, workspace_bytes=middle_bytes) if call.op == "aten.op3_backward.default" else call
        for call in step.calls
    ]
    return replace(step, calls=tuple(calls))


def test_a_gradient_that_waits_is_there() -> None:
    problem = perceptron()
    least = LowerBound(problem).seconds(problem.profile.peak_bytes - 256 * 64 * 4 // 2)
    assert least is not None
    assert least > problem.plain_s * 1.001


def test_what_must_be_there_is_there_in_the_plain_step() -> None:
    problem = perceptron()
    assert problem.whole is not None
    there = Presence(problem, problem.whole)
    assert there.bytes_at
    for place, least in enumerate(there.bytes_at):
        moment = problem.forward_count + place
        alive = [
            at for at, (start, end) in enumerate(problem.spans) if start <= moment and (end is None or moment < end)
        ]
        assert there.list_there(moment).issubset(alive)
        assert least <= problem.profile.peak_bytes


@pytest.mark.parametrize(("middle_bytes", "least_s"), [(0, 1.0), (14, 1.5)])
def test_a_later_moment_at_which_little_can_be_held_is_seen_beside_the_one_that_presses_most(
    middle_bytes: int, least_s: float
) -> None:
    # 10 bytes must go by the end of forward: one value, or a half and the first one's 5, which must go for the middle.
    problem = Problem(four_layers(middle_bytes))
    assert LowerBound(problem).seconds(26) == pytest.approx(problem.plain_s + least_s)
