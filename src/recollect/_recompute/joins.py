"""Regions that forget what the region before them gave: its frame makes that again, as it makes its saved tensors.

The giver's result is one more saved tensor of its frame, and the taker holds the handle of it in place of the tensor.
When the taker runs again, the giver does so first, to its end, and what it makes for its own backward stays until then.
See docs/design/engine.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor

from recollect._core.torch_private.ambient import quietly
from recollect._core.torch_private.engine import set_grad_enabled
from recollect._recompute.outputs import leaves_of
from recollect._recompute.refusals import refuse_changed

if TYPE_CHECKING:
    from recollect._recompute.frame import Frame


class Joins:
    """What regions of one model have given, until the next one takes it; holds nothing longer than its tensor lives."""

    __slots__ = ("__weakref__", "_offers")

    def __init__(self) -> None:
        self._offers: dict[int, Joined] = {}  # by the id of the tensor

    def offer(self, tensor: Tensor, frame: Frame, handle: int) -> None:
        """A region gives a tensor, which its frame can make again."""
        key, offers = id(tensor), self._offers
        known = ref(tensor, lambda _: offers.pop(key, None))
        offers[key] = Joined(known, tensor._version, frame, handle)  # noqa: SLF001

    def take(self, tensor: Tensor) -> Joined | None:
        """What stands for a tensor that a region is given; None if it did not come so from a region."""
        found = self._offers.pop(id(tensor), None)
        return found if found is not None and found.is_for(tensor) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """What a region has to do with its neighbours.

    Attributes:
        joins: by which they find each other; one for all regions of a model.
        gives: whether the next one forgets what this one gives.
        takes: whether it forgets what the one before gives.
    """

    joins: Joins
    gives: bool = False
    takes: bool = False

    def give(self, frame: Frame, result: Any, pack: Callable[[Tensor], Any]) -> None:
        """Forward has returned, its hooks still in force: its result is saved, too, and offered to the next region."""
        assert frame.inputs is not None
        for tensor in _find_made(result):
            if not frame.inputs.has_given(tensor):
                packed = _pack(pack, tensor)
                if isinstance(packed, int):
                    self.joins.offer(tensor, frame, packed)

    def give_again(self, result: Any, pack: Callable[[Tensor], Any]) -> None:
        """Recomputation has come to the end: its result is saved as it was in forward."""
        for tensor in _find_made(result) if self.gives else ():
            _pack(pack, tensor)


def _find_made(result: Any) -> Iterator[Tensor]:
    """The tensors of a result that have a history."""
    for leaf in (result,) if isinstance(result, Tensor) else leaves_of(result):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            yield leaf


def _pack(pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    set_grad_enabled(False)
    try:
        return quietly(pack)(tensor)
    finally:
        set_grad_enabled(True)


class Joined:
    """Stands for an argument that the frame of another region makes again. Holds that frame, and the handle."""

    __slots__ = ("_frame", "_handle", "_original", "_value", "_version")

    def __init__(self, original: ref[Tensor], version: int, frame: Frame, handle: int) -> None:
        self._original, self._version = original, version
        self._frame, self._handle = frame, handle
        self._value: tuple[Tensor, int] | None = None

    def is_for(self, tensor: Tensor) -> bool:
        """Whether it stands for this tensor, and that has the value with which it was given."""
        return self._original() is tensor and tensor._version == self._version  # noqa: SLF001

    @property
    def packed(self) -> tuple[int, Callable[[Any], Tensor]]:
        """What the frame gave for the tensor, and what takes it back: as of any saved tensor."""
        return self._handle, self._frame.unpack

    def get(self) -> Tensor:
        """The tensor: the one that was given, if it is still there as it was, or made again."""
        original = self._original()
        if original is not None and original._version == self._version:  # noqa: SLF001
            return original
        if self._value is None:
            value = self._frame.give(self._handle)
            if self._frame.inputs is not None:
                return value
            self._value = (value, value._version)  # noqa: SLF001 (nobody can make it once more)
        value, version = self._value
        if value._version != version:  # noqa: SLF001
            refuse_changed(self._frame.name, value)
        return value
