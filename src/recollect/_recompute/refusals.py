"""Errors of backward: values that it cannot give."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from recollect._core.authors import Role
from recollect._core.errors import ChangedInputError, CheckpointError
from recollect._recompute.oplog import describe_tensor

__recollect_role__ = Role.REGION


def refuse_used(region: str) -> NoReturn:
    """A value was used already, and the region let go of what would make it again.

    Raises:
        CheckpointError: always.
    """
    message = (
        f"region '{region}': a tensor left the region other than as its result (in a list or an attribute), "
        "and backward runs through it after the region's own backward has freed what it needs.\n"
        "Return that tensor from the function, or pass retain_graph=True to the region's backward."
    )
    raise CheckpointError(message)


def refuse_overlap(region: str) -> NoReturn:
    """Two backward calls that share one recomputation need the same value.

    Raises:
        CheckpointError: always.
    """
    message = (
        f"region '{region}': two backward calls of one GraphExecGroup need the same saved tensor.\n"
        "Backward calls in a group share one recomputation, so they must not overlap. Run the second one in a "
        "group of its own."
    )
    raise CheckpointError(message)


def refuse_changed(region: str, value: Tensor) -> NoReturn:
    """A value was changed in place after it had been saved.

    Raises:
        ChangedInputError: always.
    """
    message = (
        f"region '{region}': a saved tensor ({describe_tensor(value)}) was changed in place after it had "
        "been saved for backward, by the function itself.\n"
        "Autograd would refuse this without the region, too. Use the out-of-place form of that operation."
    )
    raise ChangedInputError(message)


def refuse_spent() -> NoReturn:
    """The graph of a recomputation is run backward, and the recomputation is long over.

    Raises:
        CheckpointError: always.
    """
    message = (
        "backward was run through a graph that a recomputation made, and whose values are gone: forward stored a "
        "tensor in an attribute or a list, and recomputation replaced it with its own.\n"
        "Use what forward returns, or run backward through it before the region is recomputed"
    )
    raise CheckpointError(message)
