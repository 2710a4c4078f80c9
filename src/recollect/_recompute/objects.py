"""Objects among a region's arguments that its function may change: a cache of keys and values, a bag of states.

Lists, dicts and registered containers are taken apart with the arguments and made anew for recomputation. Anything else
with attributes is noted at entry: what it and the containers and objects in it hold. If forward has changed that, it is
put back for the recomputation, whose own changes are thrown away. A tensor in it that was written into in place cannot
be put back: that is an error, which names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from recollect._core.errors import ChangedInputError
from recollect._recompute.contents import COLLECTIONS, Contents, contents_of, cut_off, is_same, mapped, put

_FIXED = (Tensor, nn.Module, torch.Generator, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_VALUES = (type(None), bool, int, float, complex, str, bytes, slice, range)
_MOST = 512  # parts of one object before it is left alone


def may_change(value: Any) -> bool:
    """Whether a function may change this argument by its attributes."""
    return hasattr(value, "__dict__") and not isinstance(value, _FIXED)


def is_object(value: Any) -> bool:
    """Whether this argument is something of its own, which a function may change in ways that are not seen here."""
    return not isinstance(value, (*_FIXED, *_VALUES)) and type(value).__module__ != "torch"


class ObjectState:
    """The objects of one call: noted at entry, `settle`d at exit, put back around recomputation."""

    __slots__ = ("_entries", "_tensors", "_written")

    def __init__(self, objects: Iterable[Any]) -> None:
        self._entries: list[tuple[Any, Contents]] = []
        self._tensors: list[tuple[Tensor, int, str]] = []
        self._written: str | None = None
        for value in objects:
            self._note(value)

    def _note(self, root: Any) -> None:
        seen: set[int] = set()
        waiting: list[tuple[Any, str]] = [(root, type(root).__name__)]
        while waiting and len(seen) < _MOST:
            part, path = waiting.pop()
            if isinstance(part, Tensor):
                if not part.is_inference():
                    self._tensors.append((part, part._version, path))  # noqa: SLF001
                continue
            if id(part) in seen or not (isinstance(part, COLLECTIONS) or may_change(part)):
                continue
            seen.add(id(part))
            held = contents_of(part)
            self._entries.append((part, held))
            named = held.items() if isinstance(held, dict) else enumerate(held)
            is_attribute = not isinstance(part, COLLECTIONS)
            waiting.extend((value, f"{path}.{key}" if is_attribute else f"{path}[{key!r}]") for key, value in named)

    def settle(self) -> ObjectState | None:
        """At exit: what the function has changed; None if nothing."""
        self._written = next((path for t, version, path in self._tensors if t._version != version), None)  # noqa: SLF001
        self._entries = [(part, held) for part, held in self._entries if not is_same(contents_of(part), held)]
        self._tensors = []
        if not self._entries and self._written is None:
            return None
        # Cut off from the graph, which may lead back here.
        self._entries = [(part, mapped(cut_off, held)) for part, held in self._entries]
        return self

    def put(self, region: str) -> Callable[[], None]:
        """Before recomputation: set all as forward found it; gives what puts it back.

        Raises:
            ChangedInputError: a tensor was written into, so that what forward found is lost.
        """
        if self._written is not None:
            message = (
                f"region '{region}': the function wrote into {self._written}, a tensor inside one of its arguments, "
                "and recomputation would read what it wrote.\n"
                "If the argument is a key/value cache, turn it off (use_cache=False in Transformers). Otherwise pass "
                "an object that the function does not write into, or let it assign a new tensor instead."
            )
            raise ChangedInputError(message)
        now = [(part, contents_of(part)) for part, _ in self._entries]
        for part, held in self._entries:
            put(part, held)

        def put_back() -> None:
            for part, held in now:
                put(part, held)

        return put_back
