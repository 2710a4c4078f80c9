"""What a peak is made of, and what would lower it: said where recomputing more of the model would not."""

from __future__ import annotations

from recollect._core.calls import Category, Phase
from recollect._core.numbers import format_share
from recollect._core.profiles import AllocatorEntry
from recollect._core.units import format_bytes
from recollect._report.summary import PeakRow

_STATE = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER, Category.BUFFER)
_MUCH = 0.1  # of a whole: less than that is not worth a word


def judge_peak(peak: PeakRow) -> list[str]:
    """Say what to do about the peak, if it is not made of what forward keeps for backward.

    Returns:
        Sentences; none for a step without memory.
    """
    if not peak.bytes:
        return []
    if peak.phase is Phase.OPTIMIZER:
        return [_judge_optimizer(peak)]
    found = []
    others = peak.by_category.get(Category.OTHER, 0)
    if others > _MUCH * peak.bytes:
        found.append(
            f"{format_share(others, peak.bytes)} of the peak, {format_bytes(others)}, are other tensors in this "
            "process, which the step does not use: earlier models, copies of weights, kept outputs. Delete those that "
            "you no longer need."
        )
    state = sum(peak.by_category.get(category, 0) for category in _STATE)
    if 2 * state > peak.bytes:
        share = format_share(state, peak.bytes)
        found.append(
            f"{share} of the peak stays, whatever is recomputed: {_list_state(peak)}. To reduce it: sharding "
            "(FSDP2), offloading, smaller dtypes, or an optimizer with less state."
        )
    if peak.bytes - state - others > _MUCH * peak.bytes:
        found.append(_judge_parts(peak))
    return found


def _judge_optimizer(peak: PeakRow) -> str:
    return (
        f"The peak is in the optimizer's step, not in activations: {_list_state(peak)}. Recomputing more does not "
        "lower it. Use a fused update, or update one parameter at a time (`fused=True` or `foreach=False`), or shard "
        "or offload the optimizer's state."
    )


def _judge_parts(peak: PeakRow) -> str:
    """Say which of the parts that come and go is the largest."""
    activations, again = peak.by_category.get(Category.ACTIVATION, 0), peak.recomputed_bytes
    parts = {
        "kept": activations - min(activations, again),
        "recomputed": again,
        "head": peak.by_category.get(Category.LOSS_HEAD, 0),
        "temporary": peak.by_category.get(Category.TEMPORARY, 0),
    }
    largest = max(parts, key=lambda part: parts[part])
    size = format_bytes(parts[largest])
    is_again = peak.phase is Phase.RECOMPUTATION and largest == "temporary"
    if is_again or largest == "recomputed":
        region = f" of region '{peak.region}'" if peak.region else ""
        return (
            f"The peak is in the recomputation{region}, not in what is kept between forward and backward: "
            f"{format_bytes(again)} were recomputed and are in memory at once. Recomputing more regions does not "
            "lower it. Make regions smaller: parts of the module, or fewer layers in one."
        )
    if largest == "head":
        return (
            f"The peak is in the loss head: logits, loss and their gradients are {size} of it. Recomputing layers does "
            "not lower that. Compute the loss in chunks of tokens, or make the head and the loss one region."
        )
    if largest == "temporary":
        return (
            f"The peak is made of temporaries: {size} that exist only around this call. Recomputing does not lower "
            "them. Use a fused kernel for it, or split its input into chunks."
        )
    share = format_share(parts["kept"], peak.bytes)
    return f"{share} of the peak, {size}, is kept by forward for backward: recomputing more lowers it."


def _list_state(peak: PeakRow) -> str:
    parts = [(category, peak.by_category[category]) for category in _STATE if peak.by_category.get(category)]
    return ", ".join(f"{category.value} {format_bytes(size)}" for category, size in parts) or "no parameters"


def judge_allocator(entry: AllocatorEntry) -> str:
    """Say what of a device's memory is needed, and what is fragmentation.

    >>> gpu = AllocatorEntry(device="cuda:0", peak_bytes=2**30, reserved_bytes=2**31, total_bytes=2**33)
    >>> print(judge_allocator(gpu))
    cuda:0: tensors take at most 1.00 GiB, the allocator holds 2.00 GiB of 8.00 GiB. The 1.00 GiB between (50%) is
    fragmentation and cache, not tensors: set PYTORCH_ALLOC_CONF=expandable_segments:True, or use fewer different
    shapes.
    """
    unused = max(0, entry.reserved_bytes - entry.peak_bytes)
    share = format_share(unused, entry.reserved_bytes)
    start = (
        f"{entry.device}: tensors take at most {format_bytes(entry.peak_bytes)}, the allocator holds "
        f"{format_bytes(entry.reserved_bytes)} of {format_bytes(entry.total_bytes)}."
    )
    if unused > _MUCH * entry.reserved_bytes:
        return (
            f"{start} The {format_bytes(unused)} between ({share}) is fragmentation and cache, not tensors: set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True, or use fewer different shapes."
        )
    return f"{start} {format_bytes(unused)} ({share}) is lost to fragmentation."
