"""What recomputing real models costs and frees, beside their packages' own switch and torch's selective checkpoint.

    python benchmarks/real_models.py --device cuda --json real.json           # all of them, large, bf16
    python benchmarks/real_models.py --device cuda --case compiled --limit 480 --json compiled.json
    python benchmarks/real_models.py --device cpu --quick                     # tiny ones, to see that it runs
    python benchmarks/tables.py --add real.json --add compiled.json           # keeps them, and writes the page's tables

All ways to train a model take turns in one process and share its parameters. Peaks are the allocator's, above
parameters and gradients. Before anything is timed, gradients are compared with those of the plain step: the largest
difference stands in each row (that of the plain step is to itself, run again: some kernels add in any order).
`compiled` compiles the whole model each way, from empty caches, and times that too; it counts the graphs that Dynamo
makes of the step. Where there is more than one, ways share what was compiled for some, and compile times say little.
The models that most people train come first. `--limit` begins no further one after so many seconds, and `--json` is
written after each. Needs `rich` and Transformers, for the U-Net diffusers; run it with `src` importable.
"""

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from cases import Case, Choice, Row, Setting, main
from compiling import peak_bytes, say, timed, warm_up
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
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from recollect._bench.alternate import Step
from recollect._bench.arena import own_code

EAGER, COMPILED, SMALL_KIND = "eager", "compiled", "small"
LINE = "\n"
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


def wanted(setting: Setting) -> Iterator[str]:
    """The models to measure; none any more once the time is over."""
    start = time.monotonic()
    for name in available():
        if setting.only and not any(part in name for part in setting.only):
            continue
        if setting.limit_s is not None and time.monotonic() - start > setting.limit_s:
            say(f"{name}: left out, {setting.limit_s:.0f} s are over")
            continue
        yield name


@dataclass(slots=True, kw_only=True)
class Ready:
    """A way to train a model that has run: its step, and what is known of it before it is timed."""

    step: Step
    difference: float | None
    figures: Row = field(default_factory=dict)


def model_case(kind: str, name: str, size: Size, contenders: tuple[str, ...], setting: Setting) -> Case:
    """A row for each way to train one model; what a way cannot do is said in its row."""
    packaged = MODELS[name]
    model, inputs = built(packaged, size, setting)
    ways = ways_of(model, contenders)
    count = sum(parameter.numel() for parameter in model.parameters())
    case = Case(name=f"{kind} {name}", title=f"{name}, {kind}, {count / 1e6:.0f} M parameters, {_said(size)}")
    ready: dict[str, Ready] = {}
    expected: list[Tensor] = []
    is_compiled = kind == COMPILED
    for contender in ways:
        try:
            own = prepare(model, contender)
            if own is not None:
                make = partial(compiled_way if is_compiled else eager_way, packaged, model, own, inputs)
                ready[contender] = make(expected, setting)
        except Exception as error:  # a rival that does not run is a finding, not the end
            case.rows.append({"candidate": contender, "failed": f"{type(error).__name__}: {str(error).split(LINE)[0]}"})
        gc.collect()
    expected.clear()
    held = torch.accelerator.memory_allocated(setting.device) if setting.device.type != "cpu" else 0
    timings = setting.alternate({contender: one.step for contender, one in ready.items()})
    rival = SWITCH if SWITCH in ready else BY_HAND
    for contender, one in ready.items():
        own_peak = timings[contender].peak_bytes
        if own_peak is not None:
            one.figures.setdefault("peak_bytes", own_peak - held)
    for contender, one in ready.items():
        best_s = timings[contender].best_s
        others = {"plain": PLAIN, "switch": rival, "full": OURS}
        ratios = {f"best/{word}": best_s / timings[key].best_s for word, key in others.items() if key in timings}
        theirs = ready[rival].figures if rival in ready else {}
        row: Row = {"candidate": contender, "median_ms": timings[contender].median_s * 1e3, "best_ms": best_s * 1e3}
        row |= ratios | one.figures
        for figure, ratio in (("peak_bytes", "peak/switch"), ("compile_s", "compile/switch")):
            own_figure, their_figure = one.figures.get(figure), theirs.get(figure)
            if isinstance(own_figure, int | float) and isinstance(their_figure, int | float) and their_figure:
                row[ratio] = own_figure / their_figure
        case.rows.append(row | {"gradient_difference": one.difference})
    return case


def eager_way(
    packaged: Packaged, model: Any, own: Any, inputs: dict[str, Tensor], expected: list[Tensor], setting: Setting
) -> Ready:
    """Two steps, in which policies learn; then gradients."""
    step = partial(train, packaged, own, inputs)
    for _ in range(2):
        timed(step, setting.device)
    return Ready(step=step, difference=difference(model, partial(backward, packaged, own, inputs), expected))


def compiled_way(
    packaged: Packaged, model: Any, own: Any, inputs: dict[str, Tensor], expected: list[Tensor], setting: Setting
) -> Ready:
    """The same, compiled from empty caches."""
    call = partial(torch.compile(own_code(call_model), dynamic=False), own)

    def step() -> None:
        backward(packaged, call, inputs)
        model.zero_grad(set_to_none=False)

    counters.clear()
    with fresh_cache():
        first_s = timed(step, setting.device)
        step_s = min(timed(step, setting.device) for _ in range(2))
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return Ready(
        step=step,
        difference=difference(model, partial(backward, packaged, call, inputs), expected),
        figures={
            "peak_bytes": peak_bytes(step, setting.device),
            "compile_s": first_s - step_s,
            "graphs": graphs,
            "breaks": breaks,
        },
    )


def call_model(model: Any, **inputs: Tensor) -> Any:
    return model(**inputs)


def difference(model: Any, run: Callable[[], None], expected: list[Tensor]) -> float:
    """How far gradients are from those of the first way, which is plain and fills `expected`, then runs again."""
    if not expected:
        expected.extend(gradients(model, run))
    return largest_difference(gradients(model, run), expected)


def _said(size: Size) -> str:
    tokens = f" T{size.tokens}" if size.tokens else ""
    return f"d{size.width} L{size.layers}{tokens} B{size.batch}"


def shorter(setting: Setting) -> Setting:
    """Fewer of the long steps, so that all models take minutes."""
    return replace(setting, rounds=min(setting.rounds, 7), repeats=min(setting.repeats, 3))


def sized(name: str, setting: Setting, size: Size | None = None) -> Size:
    return TINY if setting.device.type == "cpu" else size or MODELS[name].large


def eager_cases(setting: Setting) -> Iterator[Case]:
    for name in wanted(setting):
        yield model_case(EAGER, name, sized(name, setting), UNCOMPILED, shorter(setting))


def compiled_cases(setting: Setting) -> Iterator[Case]:
    """At half the layers: a compiler sees each of them anew, and ratios stay."""
    warm_up(setting.device)
    for name in wanted(setting):
        large = sized(name, setting)
        size = large._replace(layers=large.layers // 2)
        with dynamo_config.patch(recompile_limit=64):  # ways to train share the code of layers
            # By hand torch's checkpoint is one graph, like ours; the switch of Transformers cuts the head off.
            ways = (PLAIN, SWITCH, BY_HAND, OURS, OURS_SELECTIVE)
            yield model_case(COMPILED, name, size, ways, shorter(setting))
        torch._dynamo.reset()


def small_cases(setting: Setting) -> Iterator[Case]:
    """Launch-bound on an accelerator; all ways to recompute everything."""
    for name in wanted(setting):
        if name not in {"gemma3", "convnext", "unet"}:
            yield model_case(SMALL_KIND, name, sized(name, setting, SMALL), CONTENDERS, setting)


CHOICES = {
    EAGER: Choice(measure=eager_cases, unasked=("cpu", "cuda")),
    COMPILED: Choice(measure=compiled_cases),
    SMALL_KIND: Choice(measure=small_cases),
}


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
    main((__doc__ or "").splitlines()[0], CHOICES)
