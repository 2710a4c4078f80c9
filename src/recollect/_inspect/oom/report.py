"""The report of a step that ran out of memory, as data: where it failed, what was alive, what would have made room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from torch import distributed

from recollect._core.calls import Phase
from recollect._core.units import count_noun, format_bytes, list_some
from recollect._inspect.oom.alive import Alive, find_alive
from recollect._inspect.oom.error import Shortage
from recollect._inspect.oom.judged import Judgement, judge
from recollect._inspect.oom.place import ErrorPlace, find_place
from recollect._inspect.oom.remedies import Remedy, find_remedies
from recollect._inspect.oom.text import format_report
from recollect._profile.tracks import Tracks

ROWS = 12
"""That a text lists of what is held for backward, unless more are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomReport:
    """A step that ran out of memory. Plain data, holds no tensor; printed, it is a text of 80 columns."""

    message: str
    """What the exception says, its first line."""
    phase: Phase
    module: str
    """Path of the module in which it happened, from the model; in backward, of the one whose forward was
    differentiated. Empty for the model itself, and outside of modules, where `kind` is empty too."""
    kind: str
    """That module's class."""
    line: str
    """Of the user's code, in forward the one that ran; in backward the one that was differentiated, if known."""
    stack: tuple[str, ...]
    """The user's lines that were running, innermost first."""
    is_exact: bool
    """Whether module and line are certain. Of backward they are those of the last node that has not been freed."""
    device: str
    requested_bytes: int | None
    total_bytes: int | None
    """What the device has, or what the process is allowed of it; the allocator's numbers are None if it gave none."""
    allocated_bytes: int | None
    unused_bytes: int | None
    """Reserved by the allocator, in pieces that were too small."""
    missing_bytes: int | None
    """What would have had to be freed; all of the request, if it is not known what was free."""
    is_fragmentation: bool
    """Whether there was enough, in pieces."""
    alive: Alive
    remedies: tuple[Remedy, ...]
    """Modules to recompute, judged by this allocation alone. The model's blocks come first, then what frees enough."""
    notes: tuple[str, ...]
    rank: int | None
    """Of this process, among several."""
    judgement: Judgement | None = None
    """What would make the whole step fit, where it could be followed on fake tensors."""

    @property
    def rest_bytes(self) -> int | None:
        """Bytes allocated beyond what was found, such as temporaries, gradients in transit and workspaces."""
        return None if self.allocated_bytes is None else max(0, self.allocated_bytes - self.alive.known_bytes)

    def __str__(self) -> str:
        """The text that `on_oom` prints."""
        return format_report(self, top=ROWS)


def make_report(shortage: Shortage, alive: Alive | None, tracks: Tracks, trace: TracebackType | None) -> OomReport:
    """The report of a shortage.

    Args:
        shortage: what the exception says.
        alive: what was seen when it was raised; if nobody looked then, what is alive now.
        tracks: of the modules' calls.
        trace: of the exception.
    """
    place = find_place(trace)
    if alive is None:
        alive = find_alive(tracks, shortage.device, node=place.node)
    is_backward = place.phase is Phase.BACKWARD
    missing = shortage.missing_bytes
    judgement, why_not = _judge(alive, shortage, tracks) if place.phase is not Phase.OPTIMIZER else (None, "")
    return OomReport(
        message=shortage.message,
        phase=place.phase,
        module=alive.failed_module,
        kind=alive.failed_kind,
        line=alive.failed_line if is_backward else place.line,
        stack=place.stack,
        is_exact=not is_backward or place.is_exact or alive.is_exact,
        device=shortage.device,
        requested_bytes=shortage.requested_bytes,
        total_bytes=shortage.total_bytes,
        allocated_bytes=shortage.allocated_bytes,
        unused_bytes=shortage.unused_bytes,
        missing_bytes=missing,
        is_fragmentation=shortage.is_fragmentation,
        alive=alive,
        remedies=find_remedies(
            alive.candidates,
            missing_bytes=missing,
            failed_module=alive.failed_module,
            is_forward=place.phase is Phase.FORWARD,
        ),
        notes=(*_find_notes(alive, place), *([why_not] if why_not else [])),
        judgement=judgement,
        rank=distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else None,
    )


def _judge(alive: Alive, shortage: Shortage, tracks: Tracks) -> tuple[Judgement | None, str]:
    """What would make the whole step fit; or a note that says why that cannot be told."""
    model = None if alive.root is None else alive.root()
    given = None if model is None else tracks.given(model)
    allocated, available = shortage.allocated_bytes, shortage.available_bytes
    is_several = distributed.is_available() and distributed.is_initialized()  # fakes would talk to other ranks
    if model is None or given is None or allocated is None or available is None or is_several:
        return None, ""
    if not given.is_known:
        why = "the model was called with objects that cannot be passed a second time"
        return None, f"{why}: remedies are judged by this allocation alone."
    optimizer = None if alive.optimizer is None else alive.optimizer()
    try:
        judgement = judge(
            model,
            given,
            device=shortage.device,
            capacity_bytes=allocated + available,
            beside_bytes=alive.other_bytes + alive.gradient_bytes,
            optimizer=optimizer,
        )
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        return (
            None,
            f"the step cannot be followed on fake tensors ({why}): remedies are judged by this allocation alone.",
        )
    return judgement, ""


def _find_notes(alive: Alive, place: ErrorPlace) -> Iterator[str]:
    """What a reader has to know to judge the numbers."""
    if place.phase is Phase.OPTIMIZER:
        yield (
            "memory ran out in the optimizer's step, where activations are mostly gone: recomputing modules does not "
            "help there. Make its state and temporaries smaller (foreach=False, fused=True, sharding)."
        )
    if alive.calls > 1:
        yield (
            f"the graphs of {alive.calls} calls of {alive.model} are still alive. If you do not add up losses "
            "before backward, something keeps an earlier result: append loss.item() or loss.detach() to lists, "
            "not the loss."
        )
    if alive.compiled:
        yield "compiled code is one node of the graph, so which module inside it holds what is unknown."
    if alive.forgotten:
        yield f"regions have let go of {count_noun(alive.forgotten, 'tensor')}, to be recomputed."
    if alive.unplaced_bytes:
        size = format_bytes(alive.unplaced_bytes)
        yield f"{size} of what is held was made before on_oom was entered; its modules are not known."
    if alive.opaque:
        names = list_some([f"{name} ({count})" for name, count in alive.opaque], most=4)
        yield f"these nodes may hold more than Python can see: {names}."
