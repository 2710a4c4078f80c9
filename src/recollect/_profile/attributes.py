"""What modules keep in attributes of their own: counters, flags and small states, put back when a step is undone.

What a first forward sets up stays: hooks and parts, and with them the flags of that module and of those above it, by
one of which it knows. But a module that has written into its own parameters or buffers, as one does that initialises
itself from its first batch, gets those back, and so its flags: it initialises itself again. Attributes and entries of
dicts that were not there before stay, as do other objects, and what takes the place of a None: a table that is built
when it is first asked for. But a value of this step alone goes: one with a graph, or another one in each step, as the
state that a recurrent model hands on. Modules of torch's own count what nobody can put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from operator import is_
from typing import Any, Final
from weakref import ref

from torch import Tensor, nn

from recollect._profile.contents import CONTAINERS, refill, refill_grown
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
            for name in own.list_changed():
                own.put_back(name)
            own.note_made()


class _Own:
    """The attributes of one module.

    Attributes:
        part: the module.
        values: what can be put back.
    """

    __slots__ = ("_contents", "_large", "_made", "_set_up", "part", "values")

    def __init__(self, part: nn.Module, *, is_looked_into: bool) -> None:
        self.part = part
        self.values: dict[str, Any] = {}
        self._contents: dict[str, Any] = {}
        self._large: list[tuple[str, list[ref[Tensor]]]] = []
        self._made: dict[str, list[ref[Tensor]]] = {}
        self._set_up = _read_set_up(part)
        for name, value in vars(part).items() if is_looked_into else ():
            if name in _OF_TORCH:
                continue
            members = _members_of(value)
            if members is None or not all(isinstance(one, _KEPT) for one in members):
                continue
            tensors = _tensors_of(value)
            if not all(map(_is_light, tensors)):  # held, they would count in the step that lets go of them
                self._large.append((name, [ref(tensor) for tensor in tensors]))
                continue
            self.values[name] = value
            if isinstance(value, CONTAINERS):
                self._contents[name] = value.copy()

    @property
    def was_set_up(self) -> bool:
        """Whether it has got hooks or parts since, or lost some."""
        return _read_set_up(self.part) != self._set_up

    @property
    def has_other_large(self) -> bool:
        """Whether it has other tensors now than some that were not held; numbers beside them may tell of them."""
        now = vars(self.part)
        return any(not _are_same(before, _tensors_of(now.get(name))) for name, before in self._large)

    def list_changed(self) -> list[str]:
        """Which attributes are others than before, and of a kind that can be put back."""
        now = vars(self.part)
        return [
            name
            for name, before in self.values.items()
            if name in now
            and (
                self._is_exchange(name, now[name])
                if now[name] is not before
                else name in self._contents and not _has_all_of(before, self._contents[name])
            )
        ]

    def _is_exchange(self, name: str, now: Any) -> bool:
        """Whether this changed something, and did not make it: a table that is built when first asked for stays."""
        if self.values[name] is not None:
            return isinstance(now, (tuple, *CONTAINERS, *_KEPT))
        tensors = _tensors_of(now)
        is_of_step = any(tensor.grad_fn is not None for tensor in tensors)
        is_made_anew = name in self._made and not _are_same(self._made[name], tensors)
        return isinstance(now, _PLAIN) or is_of_step or is_made_anew

    def note_made(self) -> None:
        """A run is over: what it has left in the place of a None is known again if the next exchanges it."""
        now = vars(self.part)
        for name, before in self.values.items():
            if before is None and name not in self._made and (tensors := _tensors_of(now.get(name))):
                self._made[name] = [ref(tensor) for tensor in tensors]

    def leave(self, names: Iterable[str]) -> None:
        """Let some be from now on what they are."""
        for name in names:
            del self.values[name]

    def put_back(self, name: str) -> None:
        """Let one be what it was, and hold what it held."""
        before = vars(self.part)[name] = self.values[name]
        if isinstance(before, dict):
            refill_grown(before, self._contents[name])
        elif isinstance(before, CONTAINERS):
            refill(before, self._contents[name])


def _members_of(value: Any) -> tuple[Any, ...] | None:
    """What a value is or holds; None where that is nobody's business."""
    if isinstance(value, _KEPT):
        return (value,)
    if type(value) is dict:
        return tuple(value.values())
    return tuple(value) if type(value) in (tuple, *CONTAINERS) else None


def _has_all_of(now: Any, before: Any) -> bool:
    """Whether a collection holds what it held: a list, in this order and nothing else; a dict may have got more."""
    if isinstance(now, dict):
        return all(key in now and now[key] is value for key, value in before.items())
    return len(now) == len(before) and all(map(is_, now, before))


def _tensors_of(value: Any) -> list[Tensor]:
    return [one for one in _members_of(value) or () if isinstance(one, Tensor)]


def _are_same(before: list[ref[Tensor]], now: list[Tensor]) -> bool:
    return len(now) == len(before) and all(one() is tensor for one, tensor in zip(before, now, strict=True))


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
