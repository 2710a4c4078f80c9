"""The way of frames whose function runs again and is given what forward kept; and what the givers have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from recollect._core.authors import Role
from recollect._core.torch_private.compiler import untraced
from recollect._recompute.rerun import Rerun
from recollect._selective.kept_calls import KeptCount

if TYPE_CHECKING:
    from recollect._recompute.frame import Frame
    from recollect._recompute.match import Recorder
    from recollect._recompute.rerun import Collector
    from recollect._recompute.way import Pack

T = TypeVar("T")

__recollect_role__ = Role.REGION


class Server:
    """A context around recomputation that gives what was kept."""

    __slots__ = ()

    def check(self, recorder: Recorder | Collector) -> Pack:
        """The saved-tensor hook of a recomputation, which sees that what is given is what was kept there."""
        return recorder.pack()

    def gives_less(self, error: RuntimeError) -> bool:
        """Recomputation failed: whether less is given from now on, so that it is worth another try."""
        raise NotImplementedError

    def held(self) -> list[Tensor]:
        """What is kept."""
        raise NotImplementedError


class ServedWay(Rerun):
    """Runs the function again, under a `Server` if it has one."""

    __slots__ = ()

    def refill(self, frame: Frame, *, is_last: bool) -> None:
        """Run the function again and skip what was kept."""
        self._served_or_not(frame, lambda: super(ServedWay, self).refill(frame, is_last=is_last))

    def read(self, frame: Frame, index: int) -> Tensor:
        """The same as far as to one saved tensor."""
        return self._served_or_not(frame, lambda: super(ServedWay, self).read(frame, index))

    def _served_or_not(self, frame: Frame, run: Callable[[], T]) -> T:
        """Run the function again; where what was kept does not fit, once more without it."""
        server = frame.recompute_context
        try:
            return run()
        except RuntimeError as error:
            if not isinstance(server, Server) or not server.gives_less(error):
                raise
        return run()

    def hook(self, frame: Frame, recorder: Recorder | Collector) -> Pack:
        """Where operators are served, each must be the one that was kept."""
        server = frame.recompute_context
        return server.check(recorder) if isinstance(server, Server) else recorder.pack()

    def held(self, frame: Frame) -> list[tuple[str, Any]]:
        """What is kept."""
        server = frame.recompute_context
        return [("kept", tensor) for tensor in server.held()] if isinstance(server, Server) else []


SERVED = ServedWay()


def marking(pack: Pack, tally: KeptCount) -> Pack:
    """The pack hook of a forward in which the tally is noted at each saved tensor."""
    add_mark = tally.marks.append

    @untraced
    def mark(tensor: Tensor) -> Any:
        add_mark(tally.count)
        return pack(tensor)

    return mark
