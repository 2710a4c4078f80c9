"""When backward asks for what forward saved, and when it is done with it, pass by pass.

Most steps have one backward pass. Where a graph is kept for another one, regions make their values again in each pass,
and let go of them as that pass does.
"""

from __future__ import annotations

import bisect

from recollect._core.calls import Phase
from recollect._core.profiles import Profile


class Backwards:
    """The backward passes of a step.

    Attributes:
        starts: the first call of each pass.
        asked: for each forward call whose values are asked for, the backward calls that first do so, one for each pass.
        released: for each forward call the backward call at whose start what it saved is gone.
        ends: for each forward call the backward call after the last that belongs to it.
    """

    def __init__(self, profile: Profile) -> None:
        calls = profile.calls
        self.starts: list[int] = []
        self.asked: dict[int, list[int]] = {}
        self.ends: dict[int, int] = {}
        self._ends_in: dict[tuple[int, int], int] = {}
        first: dict[tuple[int, int], int] = {}
        latest = -1
        for number in range(profile.forward_count, len(calls)):
            call = calls[number]
            if call.phase is not Phase.BACKWARD:
                continue
            if call.nth_pass > latest:
                latest = call.nth_pass
                self.starts.append(number)
            if call.forward is not None:
                own = (call.forward, len(self.starts) - 1)
                first.setdefault(own, number)
                self.ends[call.forward] = self._ends_in[own] = number + 1
        self.released = dict(self.ends)
        for edge in profile.saved:
            moments = [first[edge.by, nth] for nth in range(len(self.starts)) if (edge.by, nth) in first]
            if edge.reader is not None:
                moments = [min(moments[0], edge.reader), *moments[1:]] if moments else [edge.reader]
            if moments:
                self.asked[edge.by] = moments
                self.released[edge.by] = max(self.released.get(edge.by, 0), moments[-1] + 1, (edge.reader or 0) + 1)

    @property
    def share_graphs(self) -> bool:
        """Whether several passes ask for values of the same call."""
        return any(len(moments) > 1 for moments in self.asked.values())

    def pass_of(self, call: int) -> int:
        """The pass that a backward call belongs to, or that comes next."""
        return max(0, bisect.bisect_right(self.starts, call) - 1) if len(self.starts) > 1 else 0

    def released_in(self, by: int, nth: int) -> int:
        """The call at whose start one pass is done with what a forward call saved; 0 if it does not ask for it."""
        return self._ends_in.get((by, nth), 0)
