"""A region under a policy: finds what was decided at its earlier calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from recollect._core.authors import Role
from recollect._core.errors import TransformError
from recollect._core.reachable import find_held
from recollect._core.torch_private.functorch import transforms_active
from recollect._policy.base import Policy
from recollect._recompute.ambient import read_autocast
from recollect._recompute.frame import Frame
from recollect._recompute.region import Region
from recollect._recompute.way import Options
from recollect._selective.knowledge import CallKind, Knowledge, are_apart, find_knowledge
from recollect._selective.plain import keeps_all, run_plain
from recollect._selective.way import SelectiveWay

__recollect_role__ = Role.REGION


class SelectiveRegion(Region):
    """A region whose policy keeps some of its values; one that keeps them all is a plain call.

    Attributes:
        holds_elsewhere: whether what it holds lives on a tier, for which it must be a region whatever it keeps.
    """

    __slots__ = ("policy",)

    holds_elsewhere = False

    def __init__(self, name: str, fn: Callable[..., Any], options: Options, policy: Policy) -> None:
        super().__init__(name, fn, options)
        self.policy = policy

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function as a region under the policy; with grad mode off it is a plain call.

        Raises:
            TransformError: inside a ``torch.func`` transform nothing can be kept.
        """
        if transforms_active():
            message = (
                f"region '{self.name}': policies do not work inside a torch.func transform, which does not allow "
                "saved-tensor hooks.\nLeave policy= out there, or use recollect.apply with Decision.RECOMPUTE alone."
            )
            raise TransformError(message)
        if not self.holds_elsewhere and keeps_all(self.policy, self.name) and torch.is_grad_enabled():
            knowledge = self._find_knowledge()
            decisions = knowledge.decisions_for(_kind_of(self.fn, args, kwargs))
            return run_plain(knowledge, decisions, self.fn, args, kwargs)
        return super().run(args, kwargs)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
        """Begin an execution under the policy."""
        knowledge = self._find_knowledge()
        way = SelectiveWay(knowledge, knowledge.decisions_for(_kind_of(self.fn, args, kwargs)))
        frame = Frame(self.name, self.fn, self.options, way, self.memory, self.joining)
        frame.enter(args, kwargs)
        return frame

    def _find_knowledge(self) -> Knowledge:
        roots = find_held(self.fn).modules
        if are_apart():
            return find_knowledge(self.name, self.fn, self.policy, roots)
        # In the memory, which outlives regions that are made anew for each call of a module.
        known: Knowledge | None = self.memory.knowledge
        if known is None or known.given is not self.policy or not known.is_about(roots):
            known = self.memory.knowledge = find_knowledge(self.name, self.fn, self.policy, roots)
        return known


def _kind_of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallKind:
    """What kind of call this is."""
    values = (*args, *kwargs.values())
    shapes = tuple((v.shape, v.dtype) if isinstance(v, Tensor) else _word(v) for v in values)
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", fn)  # of a module, a miss takes 3 µs
    return CallKind(getattr(owner, "training", None), shapes, read_autocast())


def _word(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, str)) else type(value)
