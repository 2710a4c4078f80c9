"""The report as a Chrome trace: valid by the format, in order, and with the step's own numbers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import pytest

from recollect._core.calls import Lifetime, OpCall, Storage
from recollect._core.profiles import Profile
from recollect._report.trace import write_trace
from tests.report.steps import transformer_step


def read(step: Profile) -> dict[str, Any]:
    trace = json.loads(write_trace(step))
    assert isinstance(trace, dict)
    return trace


def events(step: Profile, kind: str) -> list[dict[str, Any]]:
    return [event for event in read(step)["traceEvents"] if event["ph"] == kind]


STEPS = {
    "plain": transformer_step(3),
    "recomputed": transformer_step(3, recomputes=True),
    "no times": transformer_step(2, has_times=False),
    "nothing": Profile(storages=(), calls=()),
    "no calls": Profile(storages=(Storage(bytes=8, lifetime=Lifetime.STEP),), calls=()),
    "long": transformer_step(100),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_a_trace_is_valid(step: Profile) -> None:
    trace = read(step)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        assert event["ph"] in "XCM"
        assert isinstance(event["name"], str)
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(size, int) and size >= 0 for size in event["args"].values())


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_calls_follow_each_other_and_none_is_left_out(step: Profile) -> None:
    trace = read(step)["traceEvents"]
    calls = [event for event in trace if event["ph"] == "X"]
    assert [event["name"] for event in calls] == [call.op for call in step.calls]
    assert [event["args"]["call"] for event in calls] == list(range(len(step.calls)))
    assert all(math.isclose(one["ts"] + one["dur"], other["ts"]) for one, other in itertools.pairwise(calls))
    starts = [event["ts"] for event in trace if event["ph"] in "XC"]
    assert starts == sorted(starts)
    if calls and step.step_s is not None:
        assert calls[-1]["ts"] + calls[-1]["dur"] == pytest.approx(1e6 * step.step_s)


def test_each_phase_has_a_track_with_its_name() -> None:
    step = transformer_step(2, recomputes=True)
    names = {event["tid"]: event["args"]["name"] for event in events(step, "M") if event["name"] == "thread_name"}
    assert list(names.values()) == ["forward", "backward", "recomputation", "optimizer"]
    for event, call in zip(events(step, "X"), step.calls, strict=True):
        assert names[event["tid"]] == event["cat"] == call.phase.value


def test_the_counter_has_the_memory_of_each_call() -> None:
    step = transformer_step(2)
    counters = events(step, "C")
    sizes = [sum(event["args"].values()) for event in counters]
    assert max(sizes) == step.peak_bytes
    names = {frozenset(event["args"]) for event in counters}
    assert len(names) == 1, "a stack needs all of its parts every time"
    for one, other in itertools.pairwise(counters):
        assert one["args"] != other["args"]


def test_calls_say_where_they_are() -> None:
    step = transformer_step(1)
    [event] = [event for event in events(step, "X") if event["name"] == "aten.gelu.default"]
    assert event["args"]["module"] == "layers.0.mlp.act"
    assert event["args"]["source"] == "model.py:31"
    assert event["args"]["outputs"] == ["float32[128, 256]"]
    assert event["args"]["bytes in use"] == step.timeline.bytes_at[event["args"]["call"]]


def test_it_says_what_it_is_of_and_how_times_are_known() -> None:
    about = read(transformer_step(2))["otherData"]
    assert (about["name"], about["clock"]) == ("GPT", "measured on the host")
    assert about["peak_bytes"] == transformer_step(2).peak_bytes
    assert read(transformer_step(2, has_times=False))["otherData"]["clock"] == "none: each call is drawn as 1 µs"


def test_any_name_is_valid_json() -> None:
    call = OpCall(op='a"b\\</script>\n', module="\x1b", source="\N{SNOWMAN}:3")
    step = dataclasses.replace(STEPS["nothing"], calls=(call,), name='"')
    [event] = events(step, "X")
    assert event["name"] == 'a"b\\</script>\n'
    assert event["args"]["source"] == "\N{SNOWMAN}:3"
