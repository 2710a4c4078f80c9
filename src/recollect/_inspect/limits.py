"""Notes of a profile: in what it differs from an ordinary step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from recollect._core.calls import Phase
from recollect._core.profiles import RuleEntry
from recollect._profile.capture import Capture


def list_limits(
    capture: Capture,
    modules: Sequence[nn.Module],
    *,
    before: Sequence[RuleEntry],
    after: Sequence[RuleEntry],
    missed: int,
    is_dry: bool,
) -> Iterator[str]:
    """What a reader has to know of how a step was seen.

    Args:
        capture: what was seen.
        modules: of the step.
        before: the rules that regions were under before the step.
        after: the same after it.
        missed: how many parameters and buffers changed where the profiler does not look.
        is_dry: whether the step ran on fake tensors.
    """
    if is_dry and after:
        yield "regions under policies hold more on fake tensors than in real steps, where they learn what to keep"
    elif len(after) > len(before):
        yield "regions ran under their policies for the first time, to learn what to keep: later steps take less"
    if not any(call.phase is Phase.BACKWARD for call in capture.calls):
        yield "no backward ran, so it is not known what would be kept for it"
    if missed:
        yield (
            f"{missed} of the parameters and buffers changed where the profiler does not look, such as on another "
            "thread: what changed is not restored, and what runs there is not seen"
        )
    if capture.whereabouts.saw_torch_checkpoint:
        yield "torch.utils.checkpoint recomputes here: what it keeps for that is not counted as saved"
    if any(map(_is_compiled, modules)) and not is_dry:
        yield "compiled code is seen from outside: only the operators that it calls at run time are recorded"


def _is_compiled(module: nn.Module) -> bool:
    return any(
        type(part).__name__ == "OptimizedModule" or vars(part).get("_compiled_call_impl") is not None
        for part in module.modules()
    )
