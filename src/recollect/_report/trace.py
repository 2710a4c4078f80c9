"""The step as a trace for chrome://tracing and Perfetto: a track for each phase, and memory by category as a counter.

Calls stand one after the other, as long as they take; without times each takes a microsecond, and the trace says so.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from recollect._core.calls import Phase
from recollect._core.profiles import Profile
from recollect._report.curve import follow_categories
from recollect._report.summary import find_peak

_PROCESS = 1
_TRACKS = {phase: number for number, phase in enumerate(Phase, 1)}
_LINKS = {True: (len(_TRACKS) + 1, "link out"), False: (len(_TRACKS) + 2, "link back")}
_MICROSECONDS = 1e6


def write_trace(profile: Profile) -> str:
    """The trace, as JSON.

    >>> from recollect._core.calls import OpCall
    >>> trace = json.loads(write_trace(Profile(storages=(), calls=(OpCall(op="aten.mm.default", seconds=0.25),))))
    >>> [(event["name"], event["ts"], event["dur"]) for event in trace["traceEvents"] if event["ph"] == "X"]
    [('aten.mm.default', 0.0, 250000.0)]
    """
    peak = find_peak(profile)
    about = {
        "name": profile.name,
        "device": profile.device,
        "torch": profile.torch,
        "clock": profile.clock.value if profile.clock is not None else "none: each call is drawn as 1 µs",
        "is_dry": profile.is_dry,
        "peak_bytes": peak.bytes,
        "peak": peak.sentence,
        "notes": list(profile.notes),
    }
    events = [*_name_tracks(profile), *_list_events(profile)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, separators=(",", ":"))


def _name_tracks(profile: Profile) -> Iterator[dict[str, Any]]:
    def name(what: str, track: int, **values: object) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": _PROCESS, "tid": track, "ts": 0, "args": values}

    yield name("process_name", 0, name=profile.name or "step")
    for phase, track in _TRACKS.items():
        yield name("thread_name", track, name=phase.value)
        yield name("thread_sort_index", track, sort_index=track)
    for track, what in _LINKS.values() if profile.transfers else ():
        yield name("thread_name", track, name=what)
        yield name("thread_sort_index", track, sort_index=track)


def _list_events(profile: Profile) -> Iterator[dict[str, Any]]:
    durations = [_microseconds(call.seconds, has_times=profile.step_s is not None) for call in profile.calls]
    starts = itertools.accumulate(durations, initial=0.0)
    sizes = follow_categories(profile)
    shown = None
    times = list(starts)
    yield from _list_transfers(profile, times)
    for number, (call, start, duration) in enumerate(zip(profile.calls, times, durations, strict=False)):
        memory = {category.value: values[number] for category, values in sizes.items()}
        if memory != shown:
            shown = memory
            yield {"ph": "C", "name": "memory", "pid": _PROCESS, "tid": 0, "ts": start, "args": memory}
        details = {
            "call": number,
            "module": call.module,
            "source": call.source,
            "region": call.region,
            "flops": call.flops,
            "bytes in use": profile.timeline.bytes_at[number],
            "outputs": [f"{value.dtype}{list(value.shape)}" for value in call.outputs],
        }
        yield {
            "ph": "X",
            "name": call.op,
            "cat": call.phase.value,
            "pid": _PROCESS,
            "tid": _TRACKS[call.phase],
            "ts": start,
            "dur": duration,
            "args": {name: value for name, value in details.items() if value or name == "call"},
        }


def _list_transfers(profile: Profile, times: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Copies to other tiers and back, each from the call before which it begins to the one that may count on it."""
    for transfer in profile.transfers:
        track, what = _LINKS[transfer.is_out]
        yield {
            "ph": "X",
            "name": f"{'to' if transfer.is_out else 'from'} {transfer.tier}",
            "cat": what,
            "pid": _PROCESS,
            "tid": track,
            "ts": times[transfer.start],
            "dur": times[transfer.end] - times[transfer.start],
            "args": {"bytes": transfer.bytes},
        }


def _microseconds(seconds: float | None, *, has_times: bool) -> float:
    return _MICROSECONDS * (seconds or 0.0) if has_times else 1.0
