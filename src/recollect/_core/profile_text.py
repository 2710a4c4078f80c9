"""A profile in a line, and as a fragment of HTML for notebooks. Plain data in; no torch here."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from recollect._core.numbers import format_seconds
from recollect._core.units import count_noun, format_bytes

if TYPE_CHECKING:
    from recollect._core.profiles import Profile

_NUMBER = "style='text-align:right'"
_CELL = "style='text-align:left'"


def describe_profile(profile: Profile) -> str:
    """What was profiled and where, its peak, its time, how many calls: ``GPT on CPU: peak 1.00 GiB, 12 calls``."""
    where = f" on {profile.device}" if profile.device else ""
    time = "" if profile.step_s is None else f", step {format_seconds(profile.step_s)}"
    calls = f", {count_noun(len(profile.calls), 'call')}{', estimated' if profile.is_dry else ''}"
    return f"{profile.name or 'a step'}{where}: peak {format_bytes(profile.peak_bytes)}{time}{calls}"


def profile_as_html(profile: Profile) -> str:
    """The line, where the peak is, what is alive there, and the notes."""
    timeline = profile.timeline
    at = timeline.peak_call
    place = ""
    if at >= 0:
        call = profile.calls[at]
        words = (call.phase.value, call.op, f"in {call.module}" if call.module else "", call.source)
        place = f"<div>the peak is in {html.escape(', '.join(filter(None, words)))}</div>"
    rows = "".join(
        f"<tr><td {_CELL}>{html.escape(category.value)}</td><td {_NUMBER}>{format_bytes(size)}</td></tr>"
        for category, size in timeline.bytes_by_category(at).items()
    )
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in profile.notes)
    return (
        f"<div><b>{html.escape(describe_profile(profile))}</b>{place}"
        f"<table><tr><th {_CELL}>alive at the peak</th><th {_NUMBER}>bytes</th></tr>{rows}</table>"
        f"{f'<ul>{notes}</ul>' if notes else ''}</div>"
    )
