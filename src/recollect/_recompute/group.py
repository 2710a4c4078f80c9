"""Several backward calls that share one recomputation."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Self

from recollect._core.torch_private.engine import get_group, set_group

if TYPE_CHECKING:
    from recollect._recompute.frame import Frame


class GraphExecGroup:
    """Backward calls inside the block share one recomputation of each region.

    For backward passes that are split in parts, such as input gradients first and weight gradients later. A value
    lives until it is used or the group closes. Two calls in a group must not need the same saved tensor.

    >>> import torch
    >>> from recollect.compat import GraphExecGroup, checkpoint
    >>> runs = []
    >>> x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> def f(x, w):
    ...     runs.append(1)
    ...     return x.sin(), w.cos()
    >>> a, b = checkpoint(f, x, w, use_reentrant=False)
    >>> with GraphExecGroup():
    ...     a.sum().backward()
    ...     b.sum().backward()
    >>> len(runs)
    2
    """

    def __init__(self) -> None:
        """Make a group; it can be entered once at a time."""
        self._frames: list[weakref.ref[Frame]] = []

    def __enter__(self) -> Self:
        """Open the group for the backward calls of this thread."""
        if get_group() is not None:
            message = "a GraphExecGroup is open already: groups cannot be nested; close the outer one first"
            raise RuntimeError(message)
        set_group(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the group: values that nobody used go."""
        set_group(None)
        for ref in self._frames:
            frame = ref()
            if frame is not None and frame.filled_by is self:
                frame.expire()
        self._frames.clear()

    def filled(self, frame: Frame) -> None:
        """A frame has been recomputed for this group."""
        self._frames.append(weakref.ref(frame))
