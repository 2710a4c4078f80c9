"""What the saved-tensor hooks of forward and of recomputation have in common."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor

from recollect._recompute.oplog import OpLog
from recollect._recompute.refusals import refuse_spent
from recollect._recompute.values import Evidence

if TYPE_CHECKING:
    from recollect._recompute.frame import Frame

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
    """A hook that leaves a tensor as it is."""
    return tensor


def find_again(packed: Tensor | ref[Tensor]) -> Tensor:
    """Unpack hook during recomputation: a backward inside the function reads the recomputed tensors as they are.

    The graph refers to them weakly: it lives on where the function puts something away, such as the last state of a
    recurrent layer, and what it saved goes when backward is done with it.

    Raises:
        CheckpointError: the recomputation is long over, and its own graph is run backward.
    """
    if isinstance(packed, Tensor):
        return packed
    tensor = packed()
    return refuse_spent() if tensor is None else tensor


def differs(noted: Meta | None, now: Meta, tensor: Tensor, frame: Frame) -> bool:
    """Whether a recomputed tensor is another one than forward saved, going by its metadata.

    Only of a parameter that the search for modules missed does the version tell anything: a tensor made inside may
    rightly have another one (autograd accumulates in place only where no dispatch mode is on).
    """
    if noted is None or noted == now:
        return False
    inputs = frame.inputs
    is_packed = inputs is not None and inputs.are_packed
    if noted[:3] != now[:3]:
        return True
    modules = frame.around.modules
    is_unknown = tensor.is_leaf and tensor.requires_grad and not is_packed
    return is_unknown and not (modules is not None and modules.is_stand_in(tensor))


def may_stop(frame: Frame, before: Tensor | None, last: Tensor, leaves: list[Any]) -> bool:
    """Whether the function may end before the operator that saves its last needed tensor has run.

    Not if parameters or buffers have changed: the operator may read one, which is seen when it runs. And not if the
    kernel may still write into the tensor saved just before: RReLU's fills the noise it has saved before its input.
    Such would be any fresh floating tensor of the last one's kind, never written, and not one the function was given.
    Then the function runs on to its next saved tensor or its end.

    Args:
        frame: whose function.
        before: the tensor saved before the last one, if it has no gradient.
        last: the last one that is needed.
        leaves: what the function was called with.
    """
    modules = frame.around.modules
    if modules is not None and modules.is_watching:
        return False
    if before is None or not before.is_floating_point() or read_meta(before) != (*read_meta(last)[:3], 0):
        return True
    return any(before is leaf for leaf in leaves) or (modules is not None and modules.holds(before))


class StopRecomputation(Exception):  # noqa: N818 (not an error)
    """Ends a recomputation from inside the function once its last needed tensor is made.

    An `Exception`, because only for those does a module call its ``always_call`` hooks, on which module trackers and
    the hooks of nested regions rely. A function that catches it and goes on meets it again at its next saved tensor.
    """
