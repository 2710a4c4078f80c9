"""A region under a policy: finds what was decided at its earlier calls."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from recollect._core.errors import TransformError
from recollect._core.torch_private.functorch import transforms_active
from recollect._policy.base import Policy
from recollect._recompute.frame import Frame, Options
from recollect._recompute.region import Region
from recollect._recompute.search import find_modules
from recollect._selective.frame import SelectiveFrame
from recollect._selective.notes import Notes

_MOST_NOTES = 4096
_noted: WeakKeyDictionary[Any, dict[tuple[str, Policy | int, tuple[int, ...]], Notes]] = WeakKeyDictionary()


def _subject(fn: Callable[..., Any]) -> Any:
    """What notes are kept under: the module, or the code of a function, which outlives a closure made at each call."""
    if isinstance(fn, nn.Module):
        return fn
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, nn.Module):
        return owner
    code = getattr(fn, "__code__", None)
    return code if isinstance(code, CodeType) else type(fn)


def notes_of(fn: Callable[..., Any]) -> list[Notes]:
    """All that is known of a function, under any policy."""
    found = _noted.get(_subject(fn), {})
    return list(dict.fromkeys(found.values()))


def all_notes() -> list[Notes]:
    """All that is known of all functions that are alive, under any policy."""
    found: dict[Notes, None] = {}
    for weak in _noted.keyrefs():  # a copy, made at once: other threads may be adding to the table
        subject = weak()
        if subject is not None:
            found.update(dict.fromkeys(list(_noted.get(subject, {}).values())))
    return list(found)


class SelectiveRegion(Region):
    """A region whose policy keeps some of its values."""

    __slots__ = ("_notes", "policy")

    def __init__(self, name: str, fn: Callable[..., Any], options: Options, policy: Policy) -> None:
        super().__init__(name, fn, options)
        self.policy = policy
        self._notes: Notes | None = None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function as a region under the policy; with grad mode off it is a plain call.

        Raises:
            TransformError: inside a ``torch.func`` transform nothing can be kept.
        """
        if transforms_active():
            message = (
                f"region '{self.name}': a policy keeps values by saved-tensor hooks, which torch.func transforms do "
                "not allow.\nInside a transform call recollect.checkpoint without policy=."
            )
            raise TransformError(message)
        return super().call(args, kwargs)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
        """Begin an execution under the policy."""
        notes = self._find_notes()
        frame = SelectiveFrame(self.name, self.fn, self.options, notes, notes.ledger(_kind_of(self.fn, args, kwargs)))
        frame.enter(args, kwargs)
        return frame

    def _find_notes(self) -> Notes:
        roots, _ = find_modules(self.fn, ())
        notes = self._notes
        if notes is not None and notes.is_about(roots):
            return notes
        table = _noted.setdefault(_subject(self.fn), {})
        # By identity first: a policy of many parts takes some microseconds to hash. By the modules too: closures made
        # at each call share their code, not what they close over.
        owners = tuple(map(id, roots))
        notes = table.get((self.name, id(self.policy), owners))
        if notes is None or notes.given is not self.policy:
            notes = table.get((self.name, self.policy, owners))
        if notes is None or not notes.is_about(roots):
            if len(table) >= _MOST_NOTES:
                table.clear()
            notes = Notes(self.name, self.policy, roots)
            table[self.name, self.policy, owners] = table[self.name, id(self.policy), owners] = notes
        self._notes = notes
        return notes


def _kind_of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What makes two calls alike: the tensors' shapes, flags and words among the arguments, training mode."""
    values = (*args, *kwargs.values())
    shapes = tuple((v.shape, v.dtype) if isinstance(v, Tensor) else _word(v) for v in values)
    return getattr(fn, "training", None), shapes


def _word(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, str)) else type(value)
