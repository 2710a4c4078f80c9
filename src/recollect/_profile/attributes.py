"""What modules keep in attributes of their own: counters, flags and small states, put back when a step is undone.

What a first forward sets up stays: hooks and parts, and with them the flags of that module and of those above it, by
one of which it knows. But a module that has written into its own parameters or buffers, as one does that initialises
itself from its first batch, gets those back, and so its flags: it initialises itself again. Attributes that were not
there before stay, as do lists, dicts and other objects. Modules of torch's own count what nobody can put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, Final
from weakref import ref

from torch import Tensor, nn

from recollect._profile.storages import storages_of

_PLAIN = (type(None), bool, int, float, complex, str, Enum)
_KEPT = (Tensor, *_PLAIN)
_NUMBERS = (int, float, complex)
_SMALL = 2**20
_NOT_LOOKED_INTO = ("torch.", "recollect.")
_OF_TORCH = frozenset(vars(nn.Module()))
PARTS_AND_HOOKS: Final = (
    *("_modules", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"),
)


class Attributes:
    """The attributes that modules had when they were noted."""

    def __init__(self) -> None:
        self._known: dict[int, _Own] = {}
        self._kinds: dict[type, bool] = {}
        self._is_settled = False

    def note(self, part: nn.Module) -> None:
        """Keep what a module has now, its parts not looked into; the first time counts."""
        if id(part) not in self._known:
            kind = type(part)
            if kind not in self._kinds:
                self._kinds[kind] = _is_looked_into(kind)
            self._known[id(part)] = _Own(part, is_looked_into=self._kinds[kind])

    def settle(self, was_written: Callable[[nn.Module], bool]) -> None:
        """The step has run once: find out what it has set up, which stays so. The first time counts.

        Args:
            was_written: whether the forward of a module has written into its own parameters or buffers.
        """
        if self._is_settled:
            return
        self._is_settled = True
        set_up = {key for key, own in self._known.items() if own.was_set_up}
        for own in self._known.values():
            changed = own.list_changed()
            if not changed or was_written(own.part):
                continue
            if own.has_other_large:
                own.leave(changed)
            elif set_up and any(id(part) in set_up for part in own.part.modules()):
                own.leave(name for name in changed if not _is_number(own.values[name]))

    def restore(self) -> None:
        """Put back what is no longer so."""
        for own in self._known.values():
            now = vars(own.part)
            for name in own.list_changed():
                now[name] = own.values[name]


class _Own:
    """The attributes of one module.

    Attributes:
        part: the module.
        values: what can be put back.
    """

    __slots__ = ("_large", "_set_up", "part", "values")

    def __init__(self, part: nn.Module, *, is_looked_into: bool) -> None:
        self.part = part
        self.values: dict[str, Any] = {}
        self._large: list[tuple[str, list[ref[Tensor]]]] = []
        self._set_up = _read_set_up(part)
        for name, value in vars(part).items() if is_looked_into else ():
            if name in _OF_TORCH:
                continue
            parts = value if type(value) is tuple else (value,)
            if not all(isinstance(one, _KEPT) for one in parts):
                continue
            tensors = [one for one in parts if isinstance(one, Tensor)]
            if all(map(_is_light, tensors)):
                self.values[name] = value
            else:  # held, it would count in the step that lets go of it
                self._large.append((name, [ref(tensor) for tensor in tensors]))

    @property
    def was_set_up(self) -> bool:
        """Whether it has got hooks or parts since, or lost some."""
        return _read_set_up(self.part) != self._set_up

    @property
    def has_other_large(self) -> bool:
        """Whether it has other tensors now than some that were not held; numbers beside them may tell of them."""
        now = vars(self.part)
        for name, before in self._large:
            value = now.get(name)
            parts = value if type(value) is tuple else (value,)
            tensors = [one for one in parts if isinstance(one, Tensor)]
            if len(tensors) != len(before) or any(
                one() is not tensor for one, tensor in zip(before, tensors, strict=True)
            ):
                return True
        return False

    def list_changed(self) -> list[str]:
        """Which attributes are others than before, and of a kind that can be put back."""
        now = vars(self.part)
        return [
            name
            for name, before in self.values.items()
            if name in now and now[name] is not before and _is_exchange(before, now[name])
        ]

    def leave(self, names: Iterable[str]) -> None:
        """Let some be from now on what they are."""
        for name in names:
            del self.values[name]


def _is_exchange(before: Any, now: Any) -> bool:
    """Whether this changed something, and did not make it: a table that is built when it is first asked for stays."""
    return isinstance(now, _PLAIN) if before is None else isinstance(now, (tuple, *_KEPT))


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBERS) and not isinstance(value, bool)


def _is_light(tensor: Tensor) -> bool:
    return not tensor.requires_grad and sum(storage.nbytes() for storage, _ in storages_of(tensor)) <= _SMALL


def _is_looked_into(kind: type) -> bool:
    return any(issubclass(one, nn.Module) and not one.__module__.startswith(_NOT_LOOKED_INTO) for one in kind.__mro__)


def _read_set_up(part: nn.Module) -> tuple[object, ...]:
    """Which parts and hooks a module has."""
    attributes = vars(part)
    return tuple(
        tuple((key, id(value)) for key, value in table.items())
        for name in PARTS_AND_HOOKS
        if (table := attributes.get(name))
    )
