"""What keeping matmuls and attention costs, and what it saves: time, memory, values kept, FLOPs run again.

    python benchmarks/selective.py --device cpu                        # a small model, one thread
    python benchmarks/selective.py --device cuda --json selective.json   # launch-bound and compute-bound steps
    python benchmarks/selective.py --device cuda --case compute

The rivals keep the same: torch's selective checkpointing (SAC) the same operators, torch_remat the same calls.
All candidates take turns in one process; floor and method are those of `overhead.py`. `--quick` takes fewer rounds.
Needs `rich`; run it with `src` importable.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from annotated import NamedBlock, RematBlock
from cases import Case, Choice, Row, Setting, main
from llama_like import Block, Layers, LlamaLike, one_by_one
from peers import OURS, REMAT, REMAT_BARE, engines, missing, ours_keeping, torch_keeping
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry
from training import (
    COMPUTE,
    LAUNCH,
    PLAIN,
    SMALL,
    Model,
    each_block,
    gradient_differences,
    live_bytes,
    measure,
    train,
)

import recollect
from recollect import policies
from recollect._bench.alternate import Timing

FULL = f"{OURS} full"
BY_REGIONS = f"{OURS} by regions"
BY_OPS = f"{OURS} by ops"
SAC = "torch SAC"

# What is kept.


LINEARS = ("attention.qkv", "attention.out", "mlp.gate", "mlp.up", "mlp.down")
"""A block's matmuls, in the order they run in. No backward reads the last one's result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Attention, and of each block's matmuls every n-th from the first on."""

    name: str
    every: int | None

    @property
    def linears(self) -> tuple[str, ...]:
        return LINEARS[:: self.every] if self.every else ()

    @property
    def linears_again(self) -> tuple[str, ...]:
        """Those that backward has to run again."""
        return tuple(path for path in LINEARS[:-1] if path not in self.linears)


MATMULS = Keep(name="mm+sdpa", every=1)
HALF = Keep(name="mm/2+sdpa", every=2)
ATTENTION = Keep(name="sdpa", every=None)
KEEPS = (MATMULS, HALF, ATTENTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """The overloads that the model runs here."""

    matmuls: tuple[OpOverload, ...]
    attention: tuple[OpOverload, ...]

    @property
    def all(self) -> tuple[OpOverload, ...]:
        return self.matmuls + self.attention

    @classmethod
    def of(cls, model: LlamaLike, ids: Tensor) -> "Ops":
        with Calls() as calls:
            model(ids)
        names = {"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"}
        found = cls(
            matmuls=tuple(op for op in calls.count if str(op) in names),
            attention=tuple(op for op in calls.count if str(op).startswith("aten._scaled_dot_product")),
        )
        if not found.matmuls or not found.attention:
            message = (
                f"no fused attention or no matmul among the operators of the model: {sorted(map(str, calls.count))}"
            )
            raise RuntimeError(message)
        return found


def our_policy_by_regions(keep: Keep) -> Any:
    attention = policies.save_names("sdpa")
    return policies.first_match(policies.save_modules(*keep.linears), attention) if keep.linears else attention


def our_policy_by_ops(keep: Keep, ops: Ops) -> Any:
    attention = policies.save_ops(*map(str, ops.attention))
    if keep.every is None:
        return attention
    if keep.every == 1:
        return policies.save_ops(*map(str, ops.all))
    return policies.first_match(*(policies.save_every(str(op), keep.every) for op in ops.matmuls), attention)


def torch_contexts(keep: Keep, ops: Ops) -> Callable[[], Any]:
    if keep.every is None:
        return partial(create_selective_checkpoint_contexts, list(ops.attention))
    if keep.every == 1:
        return partial(create_selective_checkpoint_contexts, list(ops.all))
    return lambda: create_selective_checkpoint_contexts(_EveryNth(keep.every or 1, ops))


class _EveryNth:
    """The policy function of one region, which counts its matmuls, as torchtitan writes it."""

    def __init__(self, every: int, ops: Ops) -> None:
        self._every = every
        self._ops = ops
        self._calls: Counter[tuple[bool, OpOverload]] = Counter()

    def __call__(self, ctx: Any, op: OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del args, kwargs
        keeps = op in self._ops.attention
        if op in self._ops.matmuls:
            call = (ctx.is_recompute, op)  # older versions of torch ask in recomputation too
            keeps = self._calls[call] % self._every == 0
            self._calls[call] += 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def blocks_of(model: LlamaLike) -> list[Block]:
    return [block for block in model.layers if isinstance(block, Block)]


def candidates(model: LlamaLike, keep: Keep, ops: Ops, device: torch.device) -> dict[str, Layers]:
    """Every way to keep this."""
    named = nn.ModuleList(NamedBlock(block) for block in blocks_of(model))
    runs: dict[str, Layers] = {
        BY_REGIONS: instead(named, each_block(ours_keeping(our_policy_by_regions(keep)))),
        BY_OPS: each_block(ours_keeping(our_policy_by_ops(keep, ops))),
        SAC: each_block(torch_keeping(torch_contexts(keep, ops))),
    }
    kept_calls = [path.rpartition(".")[2] for path in keep.linears] + ["sdpa"]
    for engine in engines(device):
        if engine.name in {REMAT, REMAT_BARE}:
            annotated = nn.ModuleList(RematBlock(block, kept_calls) for block in blocks_of(model))
            runs[engine.name] = instead(annotated, each_block(engine.call))
    return runs


def instead(blocks: nn.ModuleList, run: Layers) -> Layers:
    """Run these blocks, which share the parameters of the model's own."""
    return lambda _, x, cos, sin: run(blocks, x, cos, sin)


# What is counted.


class Calls(TorchDispatchMode):
    """Counts the calls of each overload, and the FLOPs of those that have a formula."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[OpOverload] = Counter()
        self.flops = 0

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.count[func] += 1
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result


class Made(TorchDispatchMode):
    """Remembers what some overloads make, without holding it alive."""

    def __init__(self, ops: tuple[OpOverload, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ops = ops
        self._made: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._ops:
            storages = (leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            self._made += [weakref.ref(storage) for storage in storages if storage.nbytes()]
        return result

    def alive(self) -> tuple[int, int]:
        """How many of the values are alive, each storage once, and their bytes."""
        storages = {id(storage): storage for storage in (made() for made in self._made) if storage is not None}
        return len(storages), sum(storage.nbytes() for storage in storages.values())


def kept_values(model: LlamaLike, ids: Tensor, keep: Keep, label: str, run: Layers, ops: Ops) -> Row:
    """What is alive between forward and backward of the matmuls' and attention's results inside the blocks.

    It is the same count for every engine: whoever holds a value, it was made by such an operator and not freed. Ours
    by single operators also says how many matmuls its policy decided to keep: it does not hold the results of those
    that backward has no use for, the last one of each block.
    """
    train(model, ids, run)
    matmuls, attention = Made(ops.matmuls), Made(ops.attention)

    def watched(layers: nn.ModuleList, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        with matmuls, attention:
            return run(layers, x, cos, sin)

    loss = model(ids, watched)
    gc.collect()
    (matmul_values, matmul_bytes), (attention_values, attention_bytes) = matmuls.alive(), attention.alive()
    row: Row = {
        "kept_mm": matmul_values,
        "kept_sdpa": attention_values,
        "kept_bytes": matmul_bytes + attention_bytes,
    }
    row["decided_mm"] = decided_matmuls(model, keep, ops) if label == BY_OPS else ""
    del loss
    return row


def decided_matmuls(model: LlamaLike, keep: Keep, ops: Ops) -> int:
    """How many matmuls of a step are to be kept, as `recollect.explain` tells it."""
    policy, names = repr(our_policy_by_ops(keep, ops)), set(map(str, ops.matmuls))
    regions = [region for region in recollect.explain(model).regions if region.policy == policy]
    return sum(site.what in names for region in regions for site in region.calls[0].kept)


# The cases.


def launch_case(name: str, model_spec: Model, dtype: torch.dtype, setting: Setting) -> Iterator[Case]:
    model, ids = model_spec.build(setting.device, dtype)
    ops = Ops.of(model, ids)
    ours_full = next(engine for engine in engines(setting.device) if engine.name == OURS)
    runs = {FULL: each_block(ours_full.call), **candidates(model, MATMULS, ops, setting.device)}
    measured = measure(model, ids, runs, setting)
    title = (
        f"{model_spec}, {_short(dtype)}, one region per block, kept: {', '.join(map(str, ops.all))}\n"
        "asked: full <= 1.10 floor; by regions <= 0.95 full; by ops <= 1.10 full and <= 0.5 torch SAC"
    )
    case = Case(name=name, title=title)

    def time_columns(timing: Timing) -> Row:
        best_s = {label: other.best_s for label, other in measured.timings.items()}
        return {
            "median_ms": timing.median_s * 1e3,
            "best_ms": timing.best_s * 1e3,
            "best/floor": timing.best_s / measured.floor.best_s,
            "best/plain": timing.best_s / best_s[PLAIN],
            "best/full": timing.best_s / best_s[FULL],
            "best/SAC": timing.best_s / best_s[SAC],
        }

    case.rows.append({"candidate": "floor (plain + forward)", **time_columns(measured.floor)})
    for label, timing in measured.timings.items():
        row: Row = {"candidate": label, **time_columns(timing)}
        if measured.peak_bytes[label] is not None:
            row["peak_bytes"] = measured.peak_bytes[label]
        case.rows.append(row | {"gradient_difference": measured.gradient_differences[label]})
    yield case


def compute_case(model_spec: Model, setting: Setting) -> Iterator[Case]:
    """All policies in one alternation, by single operators, which are what torch can keep."""
    model, ids = model_spec.build(setting.device, torch.bfloat16)
    ops = Ops.of(model, ids)
    runs: dict[tuple[str, str], Layers] = {
        (keep.name, label): run
        for keep in KEEPS
        for label, run in candidates(model, keep, ops, setting.device).items()
        if label in {BY_OPS, SAC}
    }
    keeps = {keep.name: keep for keep in KEEPS}
    kept = {chosen: kept_values(model, ids, keeps[chosen[0]], chosen[1], run, ops) for chosen, run in runs.items()}
    measured = measure(model, ids, {_joined(chosen): run for chosen, run in runs.items()}, setting)
    title = (
        f"{model_spec}, bf16, one region per block, kept: {', '.join(map(str, ops.all))}\n"
        "asked of ours: best/SAC <= 1, peak/SAC <= 1.01, as many values kept"
    )
    plain = measured.timings[PLAIN]
    case = Case(name="compute", title=title)
    case.rows.append(
        {
            "candidate": PLAIN,
            "policy": None,
            "median_ms": plain.median_s * 1e3,
            "best_ms": plain.best_s * 1e3,
            "best/plain": 1.0,
            "best/SAC": None,
            "peak_bytes": measured.peak_bytes[PLAIN],
        }
    )
    for keep_name, label in runs:
        own, sac = _joined((keep_name, label)), _joined((keep_name, SAC))
        timing, peak_bytes, sac_peak_bytes = measured.timings[own], measured.peak_bytes[own], measured.peak_bytes[sac]
        case.rows.append(
            {
                "candidate": label,
                "policy": keep_name,
                "median_ms": timing.median_s * 1e3,
                "best_ms": timing.best_s * 1e3,
                "best/plain": timing.best_s / plain.best_s,
                "best/SAC": timing.best_s / measured.timings[sac].best_s,
                "peak_bytes": peak_bytes,
                "peak/SAC": peak_bytes / sac_peak_bytes if peak_bytes and sac_peak_bytes else None,
                **kept[keep_name, label],
                "gradient_difference": measured.gradient_differences[own],
            }
        )
    yield case


def flops_cases(setting: Setting) -> Iterator[Case]:
    """How often backward runs each overload again: the calls of a step beyond those of a plain step."""
    model, ids = SMALL.build(setting.device, _dtype(setting))
    ops = Ops.of(model, ids)
    plain = _counted(model, ids, one_by_one)
    for keep in KEEPS:
        runs = candidates(model, keep, ops, setting.device)
        runs.pop(REMAT_BARE, None)
        counted = {label: _counted(model, ids, run) for label, run in runs.items()}
        others = {op for calls in counted.values() for op in calls.count if calls.count[op] != plain.count[op]}
        says = dict.fromkeys(ops.attention, 0) | dict.fromkeys(ops.matmuls, len(keep.linears_again) * len(model.layers))
        case = Case(
            name="flops", title=f"calls and FLOPs run again in a step, {SMALL}, one region per block, {keep.name}"
        )
        for op in (*ops.all, *sorted(others.difference(ops.all), key=str)):
            again = {label: calls.count[op] - plain.count[op] for label, calls in counted.items()}
            case.rows.append({"overload": str(op), "plain": plain.count[op], "policy_says": says.get(op), **again})
        flops_says = sum(
            2 * ids.numel() * block.get_parameter(f"{path}.weight").numel()
            for block in blocks_of(model)
            for path in keep.linears_again
        )
        flops_again = {label: calls.flops - plain.flops for label, calls in counted.items()}
        case.rows.append({"overload": "FLOPs", "plain": plain.flops, "policy_says": flops_says, **flops_again})
        yield case


def memory_cases(setting: Setting) -> Iterator[Case]:
    model, ids = SMALL.build(setting.device, _dtype(setting))
    ops = Ops.of(model, ids)
    for keep in KEEPS:
        runs: dict[str, Layers] = {PLAIN: one_by_one, **candidates(model, keep, ops, setting.device)}
        runs.pop(REMAT_BARE, None)
        differences = gradient_differences(model, ids, runs)
        readings = {label: live_bytes(model, ids, run) for label, run in runs.items()}
        case = Case(name="memory", title=f"live bytes of a step, {SMALL}, one region per block, {keep.name}")
        for label, (held, peak) in readings.items():
            case.rows.append(
                {
                    "candidate": label,
                    "held_bytes": held,
                    "peak_bytes": peak,
                    "peak/plain": peak / readings[PLAIN][1],
                    "peak/SAC": peak / readings[SAC][1],
                    **kept_values(model, ids, keep, label, runs[label], ops),
                    "gradient_difference": differences[label],
                }
            )
        yield case


def _counted(model: LlamaLike, ids: Tensor, run: Layers) -> Calls:
    train(model, ids, run)  # whatever an engine sets up once is not the step's
    calls = Calls()
    with calls:
        train(model, ids, run)
    return calls


def _joined(chosen: tuple[str, str]) -> str:
    return " ".join(chosen)


def _dtype(setting: Setting) -> torch.dtype:
    """One that the device's fused attention takes."""
    return torch.float32 if setting.device.type == "cpu" else torch.bfloat16


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16"}.get(dtype, str(dtype).removeprefix("torch."))


TINY = replace(SMALL, tokens=8, batch=1)
CHOICES = {
    "small": Choice(measure=partial(launch_case, "small", TINY, torch.float32), devices=("cpu",), unasked=("cpu",)),
    "launch": Choice(
        measure=partial(launch_case, "launch", LAUNCH, torch.bfloat16), devices=("cuda",), unasked=("cuda",)
    ),
    "compute": Choice(measure=partial(compute_case, COMPUTE), devices=("cuda",), unasked=("cuda",)),
    "flops": Choice(measure=flops_cases, unasked=("cpu", "cuda")),
    "memory": Choice(measure=memory_cases, unasked=("cpu",)),
}


if __name__ == "__main__":
    main((__doc__ or "").splitlines()[0], CHOICES, skipped=missing())
