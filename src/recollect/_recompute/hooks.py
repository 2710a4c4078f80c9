"""What the saved-tensor hooks of forward and of recomputation have in common."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor

from recollect._recompute.oplog import OpLog
from recollect._recompute.values import Evidence

Meta = tuple[Any, ...]
"""What the metadata check compares, then the version, which tells writes after saving apart."""

quick_meta = attrgetter("shape", "dtype", "device", "_version")
"""The metadata of a tensor, in one call of C. Raises RuntimeError for a layout without a shape: see `read_meta`."""


def read_meta(tensor: Tensor) -> Meta:
    """The metadata of any tensor."""
    try:
        meta: Meta = quick_meta(tensor)
    except RuntimeError:  # a layout without a shape (nested tensors of the old kind)
        return (None, tensor.dtype, tensor.device, 0)
    return meta


def observe(tensor: Tensor, evidence: Evidence | None, log: OpLog | None) -> None:
    """A tensor is being saved: tell the log, then keep evidence."""
    if log is not None:
        log.note_saved(tensor)
    if evidence is not None:
        evidence.note(tensor)


def same(tensor: Tensor) -> Tensor:
    """Unpack hook during recomputation: a backward inside the function reads the recomputed tensors as they are."""
    return tensor


class StopRecomputation(Exception):  # noqa: N818 (not an error)
    """Ends a recomputation from inside the function once its last needed tensor is made.

    An `Exception`, because only for those does a module call its ``always_call`` hooks, on which module trackers and
    the hooks of nested regions rely. A function that catches it and goes on meets it again at its next saved tensor.
    """
