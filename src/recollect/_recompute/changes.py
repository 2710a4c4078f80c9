"""What of the tensors that a function uses was changed since forward; a watch, under which none of it may be read.

The watch goes by memory, because what is read may be another object: a view, or what a sharding engine makes of a
shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any
from weakref import ref

from torch import Tensor, nn

from recollect._core.errors import ChangedInputError
from recollect._core.torch_private.dispatch import FAKES, DispatchMode
from recollect._core.torch_private.pytree import tree_leaves
from recollect._recompute.updates import version_of

_PLAIN = frozenset({Tensor, nn.Parameter})

_quick_version, _quick_flag = attrgetter("_version"), attrgetter("requires_grad")

Versions = list[int | None]
Flags = list[bool]


def versions_of(tensors: list[Tensor]) -> Versions:
    """Their versions."""
    try:
        return list(map(_quick_version, tensors))
    except RuntimeError:  # an inference tensor among them
        return list(map(version_of, tensors))


def flags_of(tensors: list[Tensor]) -> Flags:
    """Which of them require grad."""
    return list(map(_quick_flag, tensors))


class Loose:
    """A tensor that a function holds itself, as it stood at entry; held weakly.

    Attributes:
        tensor: gives it, or None.
    """

    __slots__ = ("_flag", "_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = ref(tensor)
        self._version, self._flag = version_of(tensor), tensor.requires_grad

    def if_changed(self) -> Tensor | None:
        """The tensor, if it was changed in place since."""
        tensor = self.tensor()
        return tensor if tensor is not None and version_of(tensor) != self._version else None

    def if_flipped(self) -> Tensor | None:
        """The tensor, if somebody has set its ``requires_grad`` since."""
        tensor = self.tensor()
        return tensor if tensor is not None and tensor.requires_grad != self._flag and tensor.is_leaf else None


def find_changed(watched: list[Tensor], versions: Versions, loose: list[Loose]) -> list[Tensor]:
    """Tensors that were changed in place since these versions were read."""
    now = versions_of(watched)
    found = [] if now == versions else _where_unequal(watched, now, versions)
    return found + _given(one.if_changed() for one in loose) if loose else found


def find_flipped(tensors: list[Tensor], flags: Flags, loose: list[Loose]) -> list[Tensor]:
    """Tensors of which somebody has set ``requires_grad`` since: layers are frozen, or trained from now on."""
    now = list(map(_quick_flag, tensors))
    found = [] if now == flags else [one for one in _where_unequal(tensors, now, flags) if one.is_leaf]
    return found + _given(one.if_flipped() for one in loose) if loose else found


def _where_unequal(tensors: list[Tensor], now: Sequence[object], then: Sequence[object]) -> list[Tensor]:
    return [tensor for tensor, one, other in zip(tensors, now, then, strict=True) if one != other]


def _given(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


class ChangedWatch(DispatchMode):
    """Raises when an operator reads a tensor that was changed in place since forward."""

    def __init__(self, region: str, changed: list[tuple[Tensor, str]]) -> None:
        super().__init__()
        self._region = region
        self._changed = {address: what for tensor, what in changed for address in addresses_of(tensor)}

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator unless it reads what was changed."""
        for leaf in tree_leaves((args, kwargs)):
            found = addresses_of(leaf) if isinstance(leaf, Tensor) else ()
            what = next((self._changed[address] for address in found if address in self._changed), None)
            if what is not None:
                message = (
                    f"region '{self._region}': {what} was changed in place between forward and recomputation, which "
                    "would read the new value.\n"
                    "An optimizer step or another update ran before this backward; or the module updated it in its "
                    "own forward, for the first time.\n"
                    "Run backward before the update. If a module updates its own state, register it with "
                    "`recollect.register_state`."
                )
                raise ChangedInputError(message)
        return func(*args, **kwargs)


def address_of(tensor: Tensor) -> int:
    """Where a tensor's bytes begin; 0 if it has none of its own. Of a fake one, what tells its storage from others."""
    try:
        storage = tensor.untyped_storage()
        return id(storage) if type(tensor).__module__ == FAKES else storage.data_ptr()
    except (RuntimeError, NotImplementedError):  # no storage of its own
        return 0


def addresses_of(tensor: Tensor) -> list[int]:
    """Where a tensor's bytes lie: those of a wrapper (a sharded tensor) in what it wraps."""
    if type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # not only tensors
        return [address for part in parts if isinstance(part, Tensor) for address in addresses_of(part)]
    address = address_of(tensor)
    return [address] if address else []
