"""What modules were called with, where their operators do not show it: a region of one would hold all its tensors.

A cache that is passed on as a list of tensors, of which each layer reads its own; a residual that is added last. What a
call saves, or reads before the last one that saves something, is known from the calls and left out. Of modules that are
called several times it also says which calls look the same from outside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from recollect._core.calls import OpCall, Phase, Received, Saved
from recollect._core.families import paths_above
from recollect._core.pytree import Arguments
from recollect._profile.storage_log import StorageLog
from recollect._profile.storages import storages_of


class Receptions:
    """The calls of modules in forward, each with the storages of its arguments. Holds neither modules nor tensors."""

    def __init__(self, log: StorageLog) -> None:
        self._log = log
        self._noted: list[tuple[int, int, tuple[int, ...], str]] = []

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: int) -> None:
        """A module is called before this call; call `settle` of the log before."""
        arguments = Arguments(args, kwargs)
        tensors = (arguments.leaves[index] for index in arguments.tensors)
        found = (self._log.find_same(storage) for tensor in tensors for storage, _ in storages_of(tensor))
        numbers = tuple(dict.fromkeys(number for number in found if number is not None))
        self._noted.append((id(module), call, numbers, ", ".join(map(_word_for, (*args, *kwargs.values())))))

    def list(
        self, calls: Sequence[OpCall], saved: Sequence[Saved], path_of: Callable[[int], str | None]
    ) -> Iterator[Received]:
        """What calls and saved values do not show of them."""
        times = Counter(identity for identity, *_ in self._noted)
        saved_at: dict[int, set[int]] = {}
        for edge in saved:
            saved_at.setdefault(edge.by, set()).add(edge.storage)
        for identity, first, numbers, form in self._noted:
            path = path_of(identity)
            if path is not None:
                shown = _find_shown(calls, saved_at, path, first)
                hidden = tuple(number for number in numbers if number not in shown)
                if hidden or times[identity] > 1:
                    yield Received(module=path, call=first, storages=hidden, form=form if times[identity] > 1 else "")


def _word_for(value: Any) -> str:
    """What of an argument tells one kind of call from another, as `recollect._selective` does."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value) if value is None or isinstance(value, (bool, str)) else type(value).__name__


def _find_shown(calls: Sequence[OpCall], saved_at: dict[int, set[int]], path: str, first: int) -> set[int]:
    """What the calls of one run save, or read before the last one that saves something."""
    shown, waiting = set[int](), set[int]()
    for number in range(first, len(calls)):
        call = calls[number]
        is_anew = number > first and call.entered is not None and call.entered in paths_above(path)
        if call.phase is not Phase.FORWARD or is_anew or path not in paths_above(call.module):
            break
        if number in saved_at:
            shown |= saved_at[number] | waiting
            waiting = set()
        waiting |= call.reads
    return shown
