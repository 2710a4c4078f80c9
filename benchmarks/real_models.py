"""What recomputing real models costs and frees, beside their packages' own switch and torch's selective checkpoint.

    python benchmarks/real_models.py --device cuda --json real.json           # all of them, large, bf16
    python benchmarks/real_models.py --device cuda --only qwen3 --case compiled
    python benchmarks/real_models.py --device cpu --quick                     # tiny ones, to see that it runs
    python benchmarks/tables.py real.json docs/benchmarks.md                  # writes the table into the page

All ways to train a model take turns in one process and share its parameters. Peaks are the allocator's, above
parameters and gradients. Before anything is timed, gradients are compared with those of the plain step: the largest
difference stands in each row (kernels that add in any order differ from run to run too). `compiled` compiles the
whole model each way, from an empty cache, and times that too.
Needs `rich` and Transformers, for the U-Net diffusers; run it with `src` importable.
"""

import gc
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from cases import Case, Choice, Setting, main
from packaged import (
    BY_HAND,
    CONTENDERS,
    MODELS,
    OURS,
    OURS_SELECTIVE,
    PLAIN,
    SAC,
    SMALL,
    SWITCH,
    TINY,
    Packaged,
    Size,
    available,
    backward,
    gradients,
    largest_difference,
    prepare,
    train,
    ways_of,
)
from torch import Tensor

from recollect._bench.alternate import Step

UNCOMPILED = (PLAIN, OURS, SWITCH, OURS_SELECTIVE, SAC)


def built(packaged: Packaged, size: Size, setting: Setting) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if setting.device.type != "cpu" else torch.float32
    with setting.device:
        model = packaged.build(size).to(setting.device, dtype).train()
        inputs = packaged.inputs(size)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    return model, inputs


def wanted(setting: Setting) -> list[str]:
    return [name for name in available() if not setting.only or any(part in name for part in setting.only)]


def model_case(
    name: str, size: Size, contenders: tuple[str, ...], setting: Setting, *, is_compiled: bool = False
) -> Case:
    """A row for each way to train one model; what a way cannot do is said in its row."""
    packaged = MODELS[name]
    model, inputs = built(packaged, size, setting)
    ways = ways_of(model, contenders)
    count = sum(parameter.numel() for parameter in model.parameters())
    kind = "compiled, " if is_compiled else ""
    case = Case(name=name, title=f"{name}, {kind}{count / 1e6:.0f} M parameters, {_said(size)}: a training step")
    steps: dict[str, Step] = {}
    compile_s: dict[str, float] = {}
    failed: dict[str, str] = {}
    expected: list[Tensor] = []
    differences: dict[str, float | None] = {}
    for contender in ways:
        try:
            own = prepare(model, contender)
            if own is None:
                continue
            call = own
            if is_compiled:
                torch._dynamo.reset()
                call = torch.compile(own)
            step = partial(train, packaged, call, inputs)
            start = time.perf_counter()
            step()
            if setting.device.type != "cpu":
                torch.accelerator.synchronize(setting.device)
            compile_s[contender] = time.perf_counter() - start
            step()
            found = gradients(model, partial(backward, packaged, call, inputs))
            differences[contender] = compared(contender, found, expected)
            del found
            steps[contender] = step
        except Exception as error:
            failed[contender] = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
        gc.collect()
    expected.clear()
    held = torch.accelerator.memory_allocated(setting.device) if setting.device.type != "cpu" else 0
    timings = setting.alternate(steps)
    base = {key: timings[key] for key in (PLAIN, SWITCH if SWITCH in timings else BY_HAND, OURS) if key in timings}
    rival = timings.get(SWITCH, timings.get(BY_HAND))
    for contender in ways:
        if contender in failed:
            case.rows.append({"candidate": contender, "failed": failed[contender]})
        if contender not in timings:
            continue
        own = timings[contender]
        peak = None if own.peak_bytes is None else own.peak_bytes - held
        rival_peak = None if rival is None or rival.peak_bytes is None else rival.peak_bytes - held
        case.rows.append(
            {
                "candidate": contender,
                "median_ms": own.median_s * 1e3,
                "best_ms": own.best_s * 1e3,
                "best/plain": own.best_s / base[PLAIN].best_s if PLAIN in base else None,
                "best/switch": own.best_s / rival.best_s if rival is not None else None,
                "best/full": own.best_s / base[OURS].best_s if OURS in base else None,
                **({} if peak is None else {"peak_bytes": peak, "peak/switch": peak / rival_peak if rival_peak else 0}),
                **({"compile_s": compile_s[contender]} if is_compiled else {}),
                "gradient_difference": differences[contender],
            }
        )
    return case


def compared(contender: str, found: list[Tensor], expected: list[Tensor]) -> float | None:
    """How far gradients are from the plain step's, which comes first and fills `expected`; None if it failed."""
    if contender == PLAIN:
        expected.extend(found)
    return largest_difference(found, expected) if expected else None


def _said(size: Size) -> str:
    tokens = f" T{size.tokens}" if size.tokens else ""
    return f"d{size.width} L{size.layers}{tokens} B{size.batch}"


def shorter(setting: Setting) -> Setting:
    """Fewer of the long steps, so that all models take minutes."""
    return replace(setting, rounds=min(setting.rounds, 4), repeats=min(setting.repeats, 5))


def eager_cases(setting: Setting) -> Iterator[Case]:
    for name in wanted(setting):
        size = TINY if setting.device.type == "cpu" else MODELS[name].large
        yield model_case(name, size, UNCOMPILED, shorter(setting))


def compiled_cases(setting: Setting) -> Iterator[Case]:
    for name in wanted(setting):
        size = TINY if setting.device.type == "cpu" else MODELS[name].large
        yield model_case(name, size, (PLAIN, OURS, SWITCH, OURS_SELECTIVE), shorter(setting), is_compiled=True)


def small_cases(setting: Setting) -> Iterator[Case]:
    """Launch-bound on an accelerator; all ways to recompute everything."""
    for name in wanted(setting):
        if name in {"gpt2", "llama", "qwen3", "mixtral", "bert", "vit", "whisper", "t5"}:
            size = TINY if setting.device.type == "cpu" else SMALL
            yield model_case(name, size, CONTENDERS, setting)


CHOICES = {
    "eager": Choice(measure=eager_cases, unasked=("cpu", "cuda")),
    "compiled": Choice(measure=compiled_cases),
    "small": Choice(measure=small_cases),
}


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
    main((__doc__ or "").splitlines()[0], CHOICES)
