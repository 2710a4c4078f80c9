"""What `wait=False` promises, in simulated time: the step takes no longer, also where small values are among large."""

from typing import Any

import pytest
import torch
from torch import Tensor

from recollect._offload.session import Session
from tests.offload.timed_lanes import Time, make_timed_session

MIB = 2**20
FORWARD_S, LAYERS, STEPS = 0.005, 24, 8


class Layer(torch.autograd.Function):
    """Saves its input and something small, before or after it, and takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, time: Time, is_small_first: bool) -> Tensor:
        time.now_s += FORWARD_S
        ctx.time = time
        small = x[: 2**14].clone()
        ctx.save_for_backward(*((small, x) if is_small_first else (x, small)))
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        assert len(ctx.saved_tensors) == 2
        ctx.time.now_s += 2 * FORWARD_S
        return grad, None, None


def run_forward(time: Time, *, is_small_first: bool) -> Tensor:
    y: Any = torch.randn(2**19, requires_grad=True) * 1
    call: Any = Layer.apply
    for _ in range(LAYERS):
        y = call(y, time, is_small_first)
    loss: Tensor = y.sum()
    return loss


@pytest.mark.parametrize("is_small_first", [False, True], ids=["small after large", "small before large"])
@pytest.mark.parametrize("copy_s", [0.002, 0.007, 0.02], ids=["quick link", "slow link", "very slow link"])
def test_a_hidden_step_waits_for_no_copy(copy_s: float, *, is_small_first: bool) -> None:
    time = Time()
    session = make_timed_session(time, 2 * MIB / copy_s, waits=False)
    waits = []
    for _ in range(STEPS):
        time.waited_s = 0.0
        with session:
            loss = run_forward(time, is_small_first=is_small_first)
        forward_s = time.waited_s
        loss.backward()
        waits.append((forward_s, time.waited_s - forward_s))
    report = session.report()
    assert report.out_bytes > 8 * MIB
    forward_s, backward_s = waits[-1]
    assert forward_s == 0
    assert backward_s <= 0.01 * LAYERS * FORWARD_S


def test_what_was_sent_is_let_go_before_backward_begins() -> None:
    time = Time()
    session = make_timed_session(time, 2 * MIB / 0.002, waits=False)
    for _ in range(STEPS):
        with session:
            loss = run_forward(time, is_small_first=False)
        step = session._step
        assert step is not None
        parcels = step.live(range(len(step.parcels)))
        here = [parcel for parcel in parcels if parcel.is_leaving and parcel.alias is not None]
        loss.backward()
    assert sum(parcel.kind.size for parcel in here) <= 3 * MIB
    assert session.report().out_bytes > 20 * MIB


def run_parts(time: Time, session: Session, *, is_passed: bool) -> Tensor:
    """Only the first layers send, and faster than the link carries."""
    y: Any = torch.randn(2**19, requires_grad=True) * 1
    call: Any = Layer.apply
    for number in range(LAYERS):
        if number < 4:
            with session:
                y = call(y, time, False)
        else:
            y = call(y, time, False)
            if is_passed:
                session.pass_by()
    loss: Tensor = y.sum()
    return loss


@pytest.mark.filterwarnings("ignore:offloading to host makes each step wait")
@pytest.mark.parametrize("is_passed", [False, True], ids=["no place to look", "places that are passed"])
def test_what_leaves_after_the_last_value_was_saved_is_let_go_where_forward_passes(*, is_passed: bool) -> None:
    time = Time()
    session = make_timed_session(time, 2 * MIB / 0.02, waits=True)
    for _ in range(STEPS):
        time.waited_s = 0.0
        loss = run_parts(time, session, is_passed=is_passed)
        forward_s = time.waited_s
        step = session._step
        assert step is not None
        parcels = step.live(range(len(step.parcels)))
        here = [parcel for parcel in parcels if parcel.is_leaving and parcel.alias is not None]
        loss.backward()
    assert session.report().out_bytes >= 6 * MIB
    assert (forward_s == 0) is is_passed  # else the last value waits for those before it
    assert sum(parcel.kind.size for parcel in here) < MIB or not is_passed
