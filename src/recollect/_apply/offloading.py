"""Regions that offload what they hold: their arguments, and the values that their policy offloads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from recollect._compile.offloading import INPUTS
from recollect._core.torch_private.functorch import transforms_active
from recollect._offload.offload import Offload, TierLike, check_tier, deciding_for, offload_decided
from recollect._offload.tiers import Tier
from recollect._recompute.region import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Where regions send what they hold between forward and backward.

    Attributes:
        to: a tier, for which all regions of a thread share one offload, or an offload of the caller's own.
        takes_inputs: whether arguments go there; if not, only what a policy offloads does.
        shared: what sends values to that tier, in place of the offload of the thread; a plan has one for its step.
    """

    to: TierLike | Offload
    takes_inputs: bool
    shared: Offload | None = None

    def offload(self) -> Offload:
        """What does it, on this thread."""
        if self.shared is not None:
            return self.shared
        return self.to if isinstance(self.to, Offload) else offload_decided(self.to)

    @property
    def in_graph(self) -> str:
        """What compiled code makes of it, in a word: nothing, its inputs go to the host, or where it cannot send to."""
        if isinstance(self.to, Offload):
            return "a recollect.offload with options of its own"
        tiers = (self.to,) if isinstance(self.to, (str, Tier)) else tuple(self.to)
        names = " then ".join(one if isinstance(one, str) else one.name for one in tiers)
        if names != "host":
            return f"the tier '{names}'"
        return INPUTS if self.takes_inputs else ""

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """A context for the call of one region; inside that its own hooks are in force, so only what it holds goes."""
        away = self.offload()
        with deciding_for(away):
            if self.takes_inputs and torch.is_grad_enabled() and not transforms_active():
                with away:
                    yield
            else:
                yield


def parse_elsewhere(
    *, offload_inputs: bool, offload_to: TierLike | Offload | None, has_policy: bool
) -> Elsewhere | None:
    """Check what a caller chose; None if nothing goes elsewhere, except to the host what a policy offloads.

    Raises:
        ValueError: an option has a value it cannot have, or would do nothing.
        TypeError: the tier is none.
    """
    if not isinstance(offload_inputs, bool):
        message = f"offload_inputs={offload_inputs!r}: expected True or False. To choose the tier, pass offload_to="
        raise ValueError(message)  # noqa: TRY004 (as for every other option)
    if offload_to is None:
        return Elsewhere(to="host", takes_inputs=True) if offload_inputs else None
    if not isinstance(offload_to, Offload):
        check_tier(offload_to, "offload_to")
    if not offload_inputs and not has_policy:
        message = (
            f"offload_to={offload_to!r} has no effect: this region offloads nothing. Pass "
            "offload_inputs=True, or a policy that decides to offload"
        )
        raise ValueError(message)
    return Elsewhere(to=offload_to, takes_inputs=offload_inputs)


class HoldsElsewhere(Region):
    """Put before a region's class: the region's holdings go elsewhere."""

    __slots__ = ()

    elsewhere: Elsewhere

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function as a region."""
        with self.elsewhere.in_force():
            return super().run(args, kwargs)
