"""Several backward calls that share one recomputation."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from torch.compiler import is_dynamo_compiling

from recollect._core.torch_private.compiler import untraced
from recollect._core.torch_private.engine import get_group, set_group

if TYPE_CHECKING:
    from recollect._recompute.refilled import Refilled


class Sharing:
    """Backward calls that share one recomputation of each region, though others may run between them.

    A value goes when its node has made all of its gradients; those that nobody used go at `close`. A value that two
    calls need, but that was gone after the first, costs a second recomputation. It holds no region alive.
    """

    refuses_overlap = False

    def __init__(self) -> None:
        self._frames: list[weakref.ref[Refilled]] = []

    @contextmanager
    def resume(self) -> Iterator[None]:
        """Let the backward calls that this thread makes in the block belong here. May be done again until `close`.

        Raises:
            RuntimeError: other calls are being shared on this thread.
        """
        before = get_group()
        if isinstance(before, Sharing):
            _refuse_nesting()
        set_group(self)
        try:
            yield
        finally:
            set_group(before)

    def filled(self, frame: Refilled) -> None:
        """A frame has been recomputed for these calls."""
        self._frames.append(weakref.ref(frame))

    def close(self) -> None:
        """No more calls will come: values that nobody used go."""
        frames, self._frames = self._frames, []
        for ref in frames:
            frame = ref()
            if frame is not None and frame.filled_by is self:
                frame.expire()


class GraphExecGroup(Sharing):
    """Backward calls inside the block share one recomputation of each region.

    For backward passes that are split in parts, such as input gradients first and weight gradients later. A value
    lives until its node has made all of its gradients or the group closes. Apart from nodes that make some of their
    gradients in one call and the others in another, two calls must not need the same saved tensor.

    In code that torch.compile traces it does nothing: recomputation is a part of each graph there.

    >>> import torch
    >>> from recollect.compat import GraphExecGroup, checkpoint
    >>> runs = []
    >>> x, w = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    >>> def f(x, w):
    ...     runs.append(1)
    ...     return x.exp() @ w.exp()
    >>> y = checkpoint(f, x, w, use_reentrant=False)
    >>> with GraphExecGroup():
    ...     dx = torch.autograd.grad(y, x, torch.ones(2, 2), retain_graph=True)
    ...     dw = torch.autograd.grad(y, w, torch.ones(2, 2))
    >>> len(runs)
    2
    """

    refuses_overlap = True

    def __init__(self) -> None:
        """Make a group; it can be entered once at a time."""
        super().__init__()

    def __enter__(self) -> Self:
        """Open the group for the backward calls of this thread."""
        if not is_dynamo_compiling():
            self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the group: values that nobody used go."""
        if not is_dynamo_compiling():
            self._close()

    @untraced
    def _open(self) -> None:
        if get_group() is not None:
            _refuse_nesting()
        set_group(self)

    @untraced
    def _close(self) -> None:
        set_group(None)
        self.close()


def current_sharing() -> Sharing | None:
    """What the backward calls of this thread share; carried to the engine's threads.

    A group of torch's own class means nothing to us: it never says when it closes, so values would stay.
    """
    group = get_group()
    return group if isinstance(group, Sharing) else None


def _refuse_nesting() -> None:
    message = "a GraphExecGroup is open already: groups cannot be nested; close the outer one first"
    raise RuntimeError(message)
