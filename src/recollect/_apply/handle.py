"""The handle of what was applied to a model: its table, what it did, and its removal."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self
from weakref import ref

from torch import nn

from recollect._apply.applied import AppliedPlace, describe_effect, describe_places, write_html
from recollect._apply.instance_forward import InstanceForward
from recollect._apply.stand_in import StandIn
from recollect._core.argument_text import describe_argument
from recollect._core.profiles import Profile
from recollect._core.units import count_noun
from recollect._offload.accounts import OffloadReport
from recollect._offload.offload import Offload


class Applied:
    """What `apply` did to a model. It prints as a table, and ``remove`` undoes it.

    Attributes:
        places: what happened to each module that a rule matched, in the model's order.
    """

    def __init__(self, model: nn.Module, places: Iterable[AppliedPlace]) -> None:
        self._model = ref(model)
        self._model_name = type(model).__name__
        self.places = tuple(places)
        self._entries: list[InstanceForward] = []
        self._notes: list[str] = []
        self._effect = ""
        self._away: list[Offload] = []
        self._is_undone = False
        self._is_paused = False

    def _put(self, entry: InstanceForward) -> None:
        entry.put()
        self._entries.append(entry)

    def report(self) -> OffloadReport:
        """What offloading does in a step: bytes out and back, the hidden share of the copies, waiting time.

        Raises:
            ValueError: nothing is offloaded, or the rules hold several `recollect.offload`: ask each of those.
        """
        if len(self._away) != 1:
            message = "no rule offloads anything, so there is nothing to report"
            if self._away:
                message = (
                    f"the rules hold {len(self._away)} offloads: call report() on each recollect.offload that you "
                )
                message += "passed"
            raise ValueError(message)
        return self._away[0].report()

    @property
    def model(self) -> nn.Module | None:
        """The model; None if it no longer exists. A handle does not keep it alive."""
        return self._model()

    @property
    def has_policy(self) -> bool:
        """Whether any region has a policy."""
        return any(isinstance(entry, StandIn) and entry.choices.policy is not None for entry in self._entries)

    @property
    def is_removed(self) -> bool:
        """Whether it has been undone, by its own ``remove`` or by `recollect.remove`."""
        if self._is_undone or self._is_paused:
            return self._is_undone
        return bool(self._entries) and all(entry.is_removed for entry in self._entries)

    def compare(self, before: Profile, after: Profile) -> None:
        """Show in the table what this frees and costs, from profiles of a step with and without it.

        Args:
            before: a profile of the plain step.
            after: a profile of the same step with this applied.

        >>> import torch, recollect
        >>> from torch.nn import GELU, Linear, Sequential
        >>> model = Sequential(*(Sequential(Linear(8, 8), GELU()) for _ in range(4)))
        >>> x = torch.randn(512, 8)
        >>> plain = recollect.profile(model, x)
        >>> handle = recollect.apply(model)
        >>> handle.compare(plain, recollect.profile(model, x))
        >>> print(handle)
        recollect.apply: 4 regions in Sequential
        module  class       what       rule
        0-3     Sequential  recompute  repeated blocks
        frees ... KiB of a peak of ... KiB (...%), ..., as profiled
        """
        for given in (before, after):
            if not isinstance(given, Profile):
                message = (
                    f"compare expects two profiles, before and after, not {describe_argument(given)}: take them with "
                )
                message += "recollect.profile"
                raise TypeError(message)
        found = (after.peak_bytes, before.peak_bytes, after.step_s, before.step_s)
        self._effect = describe_effect(*found, how="as profiled")

    def remove(self) -> None:
        """Restore every module. Copies of the model keep their regions; `recollect.remove` takes those away."""
        while self._entries:
            self._entries.pop().take_away()
        self._is_undone = True

    def pause(self) -> None:
        """Let the model run plain until ``resume``. The regions keep what they have learned."""
        self._is_paused = True
        for entry in reversed(self._entries):
            entry.take_away()

    def resume(self) -> None:
        """Put back what ``pause`` took away.

        >>> import torch, recollect
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
        >>> handle = recollect.apply(model, {"0": recollect.Decision.RECOMPUTE})
        >>> handle.pause()
        >>> "forward" in vars(model[0])
        False
        >>> handle.resume()
        >>> model[0].forward
        <forward of '0' as a region of recollect>
        """
        self._is_paused = False
        for entry in self._entries:
            entry.put_again()

    def __enter__(self) -> Self:
        """Nothing; leaving the block removes what was applied."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __str__(self) -> str:
        """The table."""
        return "\n".join([self.head, *describe_places(self.places), *self._all_notes()])

    def _all_notes(self) -> list[str]:
        return [*self._notes, self._effect] if self._effect else self._notes

    @property
    def head(self) -> str:
        """What was done, in one line."""
        regions = sum(place.is_region for place in self.places)
        kept = sum(place.is_kept for place in self.places)
        sent = sum(place.is_sent for place in self.places)
        head = f"recollect.apply: {count_noun(regions, 'region')} in {self._model_name}"
        if kept:
            head += f", {count_noun(kept, 'module')} kept"
        if sent:
            head += f", {count_noun(sent, 'module')} offloaded"
        if self.is_removed:
            head += " (removed)"
        return head

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        return write_html(self.head, self.places, self._all_notes())
