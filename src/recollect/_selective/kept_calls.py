"""What one execution of a region keeps: filled by forward, read by its recomputations, and checked for order."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from recollect._core.errors import MismatchError
from recollect._core.operators import operator_of
from recollect._core.scope import is_last_recomputation
from recollect._core.units import count_noun
from recollect._offload.offload import Offload, offload_decided
from recollect._recompute.way import Hooks
from recollect._selective.kept_call import KeptCall
from recollect._selective.nested import KeptInside, is_of_operator

Key = tuple[Any, ...]
"""An operator or block, and which call of it.

An operator's calls are numbered apart with grad mode on and off: a warm-up without gradients may happen only once.
"""


class Counter:
    """Numbers the calls of each operator or block."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[Any, int] = {}

    def next(self, what: Any) -> int:
        number = self._counts.get(what, 0)
        self._counts[what] = number + 1
        return number

    def count(self, what: Any) -> int:
        """How many calls there were."""
        return self._counts.get(what, 0)


class Slipped(MismatchError):  # noqa: N818 (never leaves the frame)
    """Kept operators are not served as they were kept; whoever recomputes may do it again without serving any."""


class KeptCount:
    """How many operators were kept, as a check: recomputation must be served as many, at each saved tensor.

    Else forward ran kept operators that recomputation does not run, a warm-up or the filling of a cache, and from there
    on each call would be given the result of another one. Apart from the kept_calls, because the hooks of forward count
    here, and the graph keeps them.

    Attributes:
        count: how many were kept as they ran, with grad mode on.
        marks: the same, noted at each saved tensor of forward.
        is_late: whether some were kept after they had run, so that the marks say nothing.
    """

    __slots__ = ("count", "is_late", "marks")

    def __init__(self) -> None:
        self.count, self.is_late = 0, False
        self.marks: list[int] = []

    def check(self, region: str, index: int, served: int) -> None:
        """Saved tensor `index` is made again, after so many operators were served.

        Raises:
            Slipped: another number was kept.
        """
        if self.is_late or index >= len(self.marks) or self.marks[index] == served:
            return
        ran = count_noun(self.marks[index], "kept operator")
        message = f"region '{region}': before saved tensor {index}, forward ran {ran} and recomputation ran {served}."
        raise Slipped(message)


class KeptCalls:
    """What one execution of a region keeps; filled by forward, read by its recomputations.

    Attributes:
        inside: inside another region: what is handed to it.
        tally: how many operators were kept.
        offloads: whether some of it is to live elsewhere.
        preserves: whether torch's generators stand in recomputation where they stood in forward: only then are they
            moved on where a call is left out that drew from them.
    """

    __slots__ = ("_is_packed", "calls", "inside", "offloads", "preserves", "region", "tally")

    def __init__(self, region: str, inside: KeptInside | None = None, *, preserves: bool = True) -> None:
        self.region, self.inside, self.preserves = region, inside, preserves
        self.calls: dict[Key, KeptCall] = {}
        self.tally = KeptCount()
        self._is_packed = self.offloads = False

    def offloader(self) -> Offload:
        """Where values go that are to live elsewhere."""
        return offload_decided()

    def settle(self, hooks: Hooks | None) -> None:
        """At the end of forward: inside other hooks, kept values are saved tensors of whoever set them."""
        for kept in self.calls.values():
            kept.settle()
        if hooks is None:
            if self.offloads:
                self._send()
            return
        self._is_packed = True
        inside = self.inside
        if inside is not None and inside.keys is None:
            inside.note(key for key, call in self.calls.items() if call.tensors)
        for key in self.calls if inside is None or inside.keys is None else inside.keys:
            call = self.calls.get(key)
            if call is None:
                self._miss(key)
            else:
                call.hand_to(hooks)

    def keep_choices(self) -> None:
        """Let go of what operators gave, but for choices, which nobody writes into; blocks stay."""
        for key in [key for key in self.calls if is_of_operator(key) and not operator_of(key[0]).is_routing]:
            del self.calls[key]

    def _send(self) -> None:
        """Hand over what is to live elsewhere; it leaves as soon as nobody else holds it."""
        self._is_packed = True
        away = self.offloader()
        for call in self.calls.values():
            if call.line is not None and call.line.is_offloaded and not call.is_message:
                call.hand_to(away.hooks)
        away.settle()

    def _miss(self, key: Key) -> None:
        message = (
            f"region '{self.region}', inside another region that is being recomputed, did not reach call {key[-1]} "
            f"of {key[0]}, which forward kept.\n"
            "The function took a different path than in forward: it read something that changed in between."
        )
        raise MismatchError(message)

    def unpack(self) -> None:
        """Before a recomputation: get back what others hold."""
        if self._is_packed:
            for call in self.calls.values():
                call.unpack()

    def let_go(self) -> None:
        """After a recomputation: hold no more than before."""
        if self._is_packed:
            for call in self.calls.values():
                call.let_go()

    def tensors(self) -> list[Tensor]:
        """All that is kept."""
        return [tensor for call in self.calls.values() for tensor in call.tensors]

    def take(self, key: Key) -> KeptCall | None:
        """What was kept of a call; in the last recomputation it is let go."""
        return self.calls.pop(key, None) if is_last_recomputation() else self.calls.get(key)
