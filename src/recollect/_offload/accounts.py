"""What offloading did, in numbers: bytes out and back, how much of the copies was hidden, how long the step waited."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from recollect._core.units import count_noun, format_bytes
from recollect._offload.streams import Mark, StreamClock, Times

_SHORTEST_S = 1e-3  # a wait worth a word


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadReport:
    """What offloading does in one step, as last measured.

    Attributes:
        tier: where values go.
        steps: how many steps there were so far.
        values: number of values sent in a step.
        out_bytes: bytes sent in a step, after compression.
        back_bytes: bytes fetched in a step.
        stayed_bytes: bytes that stayed, because they are needed at once, something else holds them, or there was no
            room.
        copy_s: time that the copies took, both ways together; None if not measured.
        stall_s: time that the step waited for them; None if not measured.
        forward_s: time from the first saved value to the last, without waiting: the most that recomputing
            everything costs.
        out_bytes_per_s: measured speed of the link to the tier.
        back_bytes_per_s: measured speed of the link back.
        pinned_bytes: host memory that the pool holds.
    """

    tier: str
    steps: int = 0
    values: int = 0
    out_bytes: int = 0
    back_bytes: int = 0
    stayed_bytes: int = 0
    copy_s: float | None = None
    stall_s: float | None = None
    forward_s: float | None = None
    out_bytes_per_s: float | None = None
    back_bytes_per_s: float | None = None
    pinned_bytes: int = 0

    @property
    def hidden_share(self) -> float | None:
        """The share of the copies' time that was hidden behind computation; None if not measured.

        >>> OffloadReport(tier="host", copy_s=0.2, stall_s=0.05).hidden_share
        0.75
        """
        if self.copy_s is None or self.stall_s is None:
            return None
        return 1.0 if self.copy_s <= 0 else min(max(1 - self.stall_s / self.copy_s, 0.0), 1.0)

    @property
    def is_slower_than_recomputing(self) -> bool:
        """Whether the step waits longer for copies than running all of forward again would take."""
        return (
            self.stall_s is not None and self.forward_s is not None and self.stall_s > max(self.forward_s, _SHORTEST_S)
        )

    def with_counts(self, steps: int, accounts: Accounts) -> OffloadReport:
        """The same times, with the numbers of a step."""
        return replace(
            self,
            steps=steps,
            values=accounts.values,
            out_bytes=accounts.out_bytes,
            back_bytes=accounts.back_bytes,
            stayed_bytes=accounts.stayed_bytes,
        )

    def __str__(self) -> str:
        """One line.

        >>> print(OffloadReport(tier="host", steps=3, values=2, out_bytes=2**30, back_bytes=2**30))
        offload to host: 2 values, 1.00 GiB out and 1.00 GiB back per step
        """
        text = (
            f"offload to {self.tier}: {count_noun(self.values, 'value')}, {format_bytes(self.out_bytes)} out and "
            f"{format_bytes(self.back_bytes)} back per step"
        )
        if self.stayed_bytes:
            text += f", {format_bytes(self.stayed_bytes)} stayed"
        if self.hidden_share is not None and self.stall_s is not None:
            text += f"; {self.hidden_share:.0%} of the copies hidden, the step waits {self.stall_s * 1e3:.1f} ms"
        return text


class Accounts:
    """Counts one step. Workers note what they did from their own threads.

    Attributes:
        measures: whether times are wanted.
        out_times: of copies out, if they are wanted; `back_times` of those back.
        stalls: clock, start and end of each time that the computing stream waited.
        values, out_bytes, back_bytes, stayed_bytes, host_stall_s:: what was done so far.
    """

    def __init__(self, *, measures: bool) -> None:
        self._written: deque[tuple[int, float]] = deque()  # workers append while others read
        self._read: deque[tuple[int, float]] = deque()
        self.measures = measures
        self.out_times: Times | None = [] if measures else None
        self.back_times: Times | None = [] if measures else None
        self.stalls: list[tuple[StreamClock, Mark, Mark]] = []
        self.values = self.out_bytes = self.back_bytes = self.stayed_bytes = 0
        self.host_stall_s = 0.0

    def note_stall(self, clock: StreamClock, start: Mark, end: Mark) -> None:
        """The computing stream waited."""
        if self.measures:
            self.stalls.append((clock, start, end))

    def note_host_stall(self, seconds: float) -> None:
        """The host waited, and with it whoever is given work by it."""
        self.host_stall_s += seconds

    def note_written(self, size: int, seconds: float) -> None:
        """A worker wrote to a slower tier."""
        self._written.append((size, seconds))

    def note_read(self, size: int, seconds: float) -> None:
        """A worker read from a slower tier."""
        self._read.append((size, seconds))

    def stall_seconds(self) -> list[float]:
        """How long each wait was; all of them must be over."""
        return [clock.seconds(start, end) for clock, start, end in self.stalls]

    def speeds(self, clock: StreamClock) -> tuple[float | None, float | None, float]:
        """Bytes per second out and back, of the slowest part of the way, and what the copies took in all."""
        out, out_s = _speed(_finished(clock, self.out_times or ()))
        back, back_s = _speed(_finished(clock, self.back_times or ()))
        written, written_s = _speed(list(self._written))
        read, read_s = _speed(list(self._read))
        return _slower(out, written), _slower(back, read), max(out_s, written_s) + max(back_s, read_s)


def _finished(clock: StreamClock, times: Iterable[tuple[int, Mark, Mark]]) -> list[tuple[int, float]]:
    """Copies that are done. What was fetched and never asked for may still be on its way."""
    return [(size, clock.seconds(start, end)) for size, start, end in times if clock.is_past(end)]


def _speed(copies: list[tuple[int, float]]) -> tuple[float | None, float]:
    """Bytes per second, of the larger copies if there are any: small ones tell of latency; and the time of all."""
    total_s = sum(seconds for _, seconds in copies)
    if not copies or total_s <= 0:
        return None, total_s
    largest = max(size for size, _ in copies)
    telling = [(size, seconds) for size, seconds in copies if size * 4 >= largest]
    telling_s = sum(seconds for _, seconds in telling)
    return (sum(size for size, _ in telling) / telling_s if telling_s > 0 else None), total_s


def _slower(first: float | None, second: float | None) -> float | None:
    known: list[Any] = [speed for speed in (first, second) if speed is not None]
    return min(known, default=None)
