"""A step on a device that exists in numbers only: two lanes, one computing stream, and what is on the device when."""

from collections.abc import Sequence
from dataclasses import dataclass

from recollect._core.timetables import SeenValue, Speeds, Timetable


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """What became of a step.

    Attributes:
        stall_s: that the computing stream waited for copies.
        here: of each value, from when until when it was on the device, in the times of a step that never waits.
    """

    stall_s: float
    here: tuple[tuple[tuple[float, float], ...], ...]

    def bytes_at(self, values: Sequence[SeenValue], when_s: float) -> int:
        """On the device at a time."""
        return sum(
            value.bytes
            for value, spans in zip(values, self.here, strict=True)
            if any(start <= when_s < end for start, end in spans)
        )


class _Device:
    def __init__(self, values: Sequence[SeenValue], table: Timetable, speeds: Speeds) -> None:
        self.values, self.table, self.speeds = values, table, speeds
        self.stall_s = 0.0
        self._out_s = self._back_s = float("-inf")
        self._gone_s: dict[int, float] = {}
        self._back_at_s: dict[int, float] = {}
        self.here: list[list[tuple[float, float]]] = [[] for _ in values]
        self._since: dict[int, float] = {}

    def make(self, number: int) -> None:
        value = self.values[number]
        self._since[number] = value.made_s
        if self.table.sends[number]:
            start_s = max(self._out_s, value.made_s + self.stall_s)
            self._out_s = self._gone_s[number] = start_s + value.bytes / self.speeds.out
        for gone in self.table.releases.get(number, ()):
            self.stall_s += max(self._gone_s[gone] - (value.made_s + self.stall_s), 0.0)
            self._leave(gone, value.made_s)

    def use(self, number: int, *, is_first: bool) -> None:
        now_s = self.values[number].used_s
        assert now_s is not None
        for one in [*(self.table.fetches.get(-1, []) if is_first else []), *self.table.fetches.get(number, [])]:
            start_s = max(self._back_s, now_s + self.stall_s)
            self._back_s = self._back_at_s[one] = start_s + self.values[one].bytes / self.speeds.back
            self._since.setdefault(one, now_s)
        if number in self._back_at_s:
            self.stall_s += max(self._back_at_s[number] - (now_s + self.stall_s), 0.0)

    def _leave(self, number: int, when_s: float) -> None:
        self.here[number].append((self._since.pop(number), when_s))

    def end(self, number: int, when_s: float) -> None:
        self._leave(number, when_s)


def simulate(values: Sequence[SeenValue], table: Timetable, speeds: Speeds, *, slower: float = 1.0) -> SimulatedStep:
    """Carry a timetable out, over a link that is slower than foreseen by that factor."""
    device = _Device(values, table, Speeds(out=speeds.out / slower, back=speeds.back / slower))
    for number in range(len(values)):
        device.make(number)
    uses = sorted((value.used_s, number) for number, value in enumerate(values) if value.used_s is not None)
    for at, (_, number) in enumerate(uses):
        device.use(number, is_first=at == 0)
        device.end(number, uses[at + 1][0] if at + 1 < len(uses) else float("inf"))
    return SimulatedStep(stall_s=device.stall_s, here=tuple(tuple(spans) for spans in device.here))
