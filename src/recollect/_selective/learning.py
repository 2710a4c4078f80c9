"""Learns a program from a recorded forward: asks whether replay is worth it, and tests it before it is trusted."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recollect._core.authors import Role
from recollect._core.pace import FOLLOWED, SERVED, SURELY_SERVED, TODAYS, DeviceSpeeds, is_bound_by_host
from recollect._core.torch_private.dispatch import without_dispatch_modes
from recollect._core.torch_private.precision import has_tf32_products
from recollect._recompute.handles import find_live
from recollect._selective.drafting import Draft
from recollect._selective.program import HELD, Bound, Program
from recollect._selective.replay import Replay

if TYPE_CHECKING:
    from recollect._recompute.frame import Frame
    from recollect._selective.asking import Asker
    from recollect._selective.decisions import Decisions
    from recollect._selective.knowledge import Knowledge
    from recollect._selective.recorded import SavedTensor
    from recollect._selective.recording import Recording

__recollect_role__ = Role.REGION


def learn_program(
    frame: Frame, recording: Recording, knowledge: Knowledge, decisions: Decisions, asker: Asker | None
) -> tuple[Program, Bound] | None:
    """What to replay, and what this execution has of it: the frame then holds what its slots are to hold.

    None where a program cannot be believed or is not worth it; the recording says why.
    """
    recording.check_versions()
    if decisions.gathers:
        recording.broken("it gathers parameters that are freed again")
    if not decisions.keeps_ops:
        recording.broken("no single operator is kept")
    if not decisions.may_record:
        recording.broken("it calls a higher-order operator")
    if recording.why_broken is None and _is_bound_by_host(frame, recording, knowledge, decisions):
        recording.broken("its operators are too small: running it again without what is kept is faster")
    found = None
    if recording.why_broken is None:
        assert asker is not None, "single operators are kept, so somebody was asked"
        draft = Draft(recording)
        sorts = asker.sort_calls(draft, draws=frame.around.draws)
        if recording.why_broken is None:
            found = draft.program(sorts)
            _try(frame, recording, *found)
    if recording.why_broken is not None:
        frame.held = None
        return None
    return found


def _is_bound_by_host(frame: Frame, recording: Recording, knowledge: Knowledge, decisions: Decisions) -> bool:
    """Whether an accelerator would wait for the host, which a replay keeps busier than running again does.

    Where it is close, it is said to: a replay that does keep it waiting takes up to a third more time than running
    again, and one that does not saves a few percent at most. A plan knows better, from times.
    """
    if knowledge.replays or decisions.ops is None or not is_on_accelerator(frame):
        return False
    speeds = _speeds_of(frame) or TODAYS
    return is_bound_by_host(device_s=_device_s(decisions, speeds), calls=len(recording.entries), call_s=FOLLOWED)


def is_on_accelerator(frame: Frame) -> bool:
    """Whether what a region saves is on one; not if it saves nothing."""
    device = _device_of(frame)
    return device is not None and device.type not in ("cpu", "meta")


def drop_what_does_not_pay(frame: Frame, decisions: Decisions) -> None:
    """Keep nothing where the accelerator waits for the host anyway, if the policy was chosen to save time.

    To intercept what is kept takes the host as long as to call it again. Measured on an H200, models of 512 tokens that
    are 512 wide took up to 1.26 times full recomputation, and mixtures of experts at 16 µs a call 1.2 times.
    """
    if not decisions.policy.keeps_what_pays or not is_on_accelerator(frame):
        return
    speeds = _speeds_of(frame)
    call_s = SURELY_SERVED if speeds is None else SERVED
    if is_bound_by_host(device_s=_device_s(decisions, speeds or TODAYS), calls=len(decisions.lines), call_s=call_s):
        decisions.drop("selective: its operators are too small to be worth keeping")


def _device_of(frame: Frame) -> torch.device | None:
    """Where what a region saves is; None if it saves nothing."""
    meta = next(filter(None, frame.metas), None)
    return None if meta is None else meta[2]


def _speeds_of(frame: Frame) -> DeviceSpeeds | None:
    """How fast the region's accelerator is; None if nobody knows."""
    from recollect._profile.dry.roofline import find_device  # not at import: few regions are learned on a device

    device = _device_of(frame)
    if device is None or device.type != "cuda":
        return None
    try:
        known = find_device(device)
    except ValueError:
        return None
    flops = {**known.flops, "float32": known.flops["tf32"]} if has_tf32_products() else known.flops
    return DeviceSpeeds(flops=flops, bandwidth=known.bandwidth)


def _device_s(decisions: Decisions, speeds: DeviceSpeeds) -> float:
    """How long an accelerator takes for a region's calls."""
    flops: dict[str, int] = {}
    for line in decisions.lines:
        if line.sites and line.sites[0].flops:
            dtype = line.sites[0].dtype
            flops[dtype] = flops.get(dtype, 0) + line.sites[0].flops
    return speeds.device_s(flops=flops, result_bytes=sum(line.bytes for line in decisions.lines))


def _try(frame: Frame, recording: Recording, program: Program, bound: Bound) -> None:
    """Break the recording if its program does not give what forward saved; let the frame hold what it does not give."""
    modules = frame.around.modules
    needed = (held for at, held in enumerate(bound.held) if held is not None and at not in program.scratch)
    if modules is not None and modules.moves_any(needed):
        recording.broken("it reads buffers that it updates")  # the next forward moves them on
    if recording.classes.can_compare:
        try:
            if not _replays_exactly(frame, recording.saved, program, bound):
                recording.broken("its replay gave different values")
        except Exception as error:
            recording.broken(f"its replay failed: {error}")
    live = find_live(frame.handles)
    frame.held = {}
    for index, source in enumerate(program.sources):
        if source is HELD and (live is None or live[index]):
            saved = recording.saved[index].tensor
            assert isinstance(saved, Tensor), "a recording holds what its program holds"
            value = saved.detach()
            frame.held[index] = (value, value._version)  # noqa: SLF001


def _replays_exactly(frame: Frame, saved: list[SavedTensor], program: Program, bound: Bound) -> bool:
    """Replay everything once and compare it, to the bit, with what forward saved.

    In the order of backward, and each value goes when it is compared: so this takes no more memory than backward will.
    """
    assert frame.inputs is not None
    is_same: dict[int, bool] = {}

    def compare(index: int, value: Tensor) -> None:
        is_same[index] = saved[index].has_bits_of(value)

    with without_dispatch_modes(), torch.no_grad(), _without_cached_casts():
        leaves = frame.inputs.materialise(frame.name)
        replay = Replay(frame.name, program, bound, leaves, list(program.uses), is_last=False, fill=compare)
        for index in reversed(range(len(program.sources))):
            if program.sources[index] is not HELD and index not in is_same:
                value = replay.take(index)
                if value is not None:
                    compare(index, value)
                    value = None  # or it would be there while the next one is made
                elif index not in is_same:
                    return False  # the call saves less than it did in forward
        return all(is_same.values())


@contextmanager
def _without_cached_casts() -> Generator[None]:
    """Inside, autocast remembers no casts, which it would hold until the user's code leaves it."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
