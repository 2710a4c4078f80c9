"""What a region costs, for us and for our neighbours: time, saved tensors, nesting, memory.

    python benchmarks/overhead.py --device cpu                      # tiny tensors, one thread: the fixed costs
    python benchmarks/overhead.py --device cuda --json overhead.json  # a whole training step, launch-bound
    python benchmarks/overhead.py --device cuda --case compute        # the same, compute-bound
    python benchmarks/overhead.py --device cuda --case real           # small models of Transformers, beside its switch
    python benchmarks/overhead.py --device cuda --case lengths        # another length at each step

All candidates take turns in one process. The floor is a plain step and one plain forward: what recomputing everything
costs with an engine that costs nothing; bare hooks are the least that hooks of saved tensors can do, without random
state and checks. `--quick` takes fewer rounds. Needs `rich`, and for the last two Transformers; run it with `src`
importable.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from cases import Case, Choice, Row, Setting, main
from lengths import length_case
from llama_like import Layers, one_by_one
from peers import TORCH, Engine, engines, missing, plain
from real_models import small_cases
from shapes import shapes
from torch import Tensor, nn
from training import COMPUTE, LAUNCH, PLAIN, SMALL, Model, each_block, gradient_differences, live_bytes, measure

from recollect._bench.alternate import Step, Timing
from recollect._bench.rivals import Call

# A whole step of a model, on an accelerator.


def model_case(name: str, model_spec: Model, setting: Setting) -> Iterator[Case]:
    model, ids = model_spec.build(setting.device, torch.bfloat16)
    candidates = [engine for engine in engines(setting.device) if engine.preserves_rng or not model_spec.dropout]
    measured = measure(model, ids, {engine.name: each_block(engine.call) for engine in candidates}, setting)
    case = Case(name=name, title=f"{model_spec}, bf16, one region per block: a training step")
    time_columns = partial(_time_columns, floor=measured.floor, timings=measured.timings)
    case.rows.append({"candidate": "floor (plain + forward)", **time_columns(measured.floor)})
    for label, timing in measured.timings.items():
        peak_bytes, torch_peak_bytes = measured.peak_bytes[label] or 0, measured.peak_bytes[TORCH] or 0
        case.rows.append(
            {
                "candidate": label,
                **time_columns(timing),
                "beyond_us": (timing.best_s - measured.floor.best_s) * 1e6 / model_spec.layers,
                "peak_bytes": peak_bytes,
                "peak/torch": peak_bytes / torch_peak_bytes,
                "gradient_difference": measured.gradient_differences[label],
            }
        )
    yield case


def _time_columns(timing: Timing, *, floor: Timing, timings: dict[str, Timing]) -> Row:
    """The best round, as in the tables this model was made for; the median beside it shows the noise."""
    return {
        "median_ms": timing.median_s * 1e3,
        "best_ms": timing.best_s * 1e3,
        "best/floor": timing.best_s / floor.best_s,
        "best/plain": timing.best_s / timings[PLAIN].best_s,
        "best/torch": timing.best_s / timings[TORCH].best_s,
    }


# Fixed costs, on tiny tensors.


def tanh(x: Tensor) -> Tensor:
    return x.tanh()  # saves its result, so that recomputation has to run it


def sines(count: int, x: Tensor) -> Tensor:
    for _ in range(count):
        x = x.sin()
    return x


def nested(call: Call, depth: int, x: Tensor) -> Tensor:
    """The body of the outermost of `depth` regions: the inner ones, then a saved tensor of its own."""
    if depth > 1:
        x = call(body_of(call, depth - 1), x)
    return x.tanh()


@functools.cache
def body_of(call: Call, depth: int) -> Callable[[Tensor], Tensor]:
    """The same function at each call, so that only who wraps anew pays for it."""
    return partial(nested, call, depth)


def chain(call: Call, function: Callable[[Tensor], Tensor], regions: int) -> tuple[Step, Step]:
    """Forward alone, and forward with backward, of `regions` regions in one graph."""
    leaf = torch.linspace(-1, 1, 8, requires_grad=True)
    seed = torch.ones(8)

    def forward() -> Tensor:
        x = leaf
        for _ in range(regions):
            x = call(function, x)
        return x

    def step() -> None:
        leaf.grad = None
        torch.autograd.backward(forward(), seed)

    return forward, step


Body = Callable[[Call], Callable[[Tensor], Tensor]]
"""Makes a region's function, given the way to run the regions within it."""


Costs = dict[tuple[str, str], Timing]
"""By the body's label and the engine's name."""


def costs(bodies: dict[str, Body], chosen: list[Engine], regions: int, setting: Setting) -> Costs:
    """What one region adds to the floor, for each body and engine, all measured in one alternation."""
    steps: dict[str, Step] = {}
    for label, body in bodies.items():
        steps[f"{label}/forward"], steps[f"{label}/plain"] = chain(plain, body(plain), regions)
        for engine in chosen:
            _, steps[f"{label}/{engine.name}"] = chain(engine.call, body(engine.call), regions)
    timings = setting.alternate(steps)
    return {
        (label, engine.name): timings[f"{label}/{engine.name}"]
        .minus(timings[f"{label}/plain"])
        .minus(timings[f"{label}/forward"])
        .times(1 / regions)
        for label in bodies
        for engine in chosen
    }


def cost_case(name: str, title: str, found: dict[str, Timing]) -> Case:
    """One row for each engine: the median of the rounds."""
    rows: list[Row] = [
        {"candidate": label, "cost_us": cost.median_s * 1e6, "cost/torch": cost.median_s / found[TORCH].median_s}
        for label, cost in found.items()
    ]
    return Case(name=name, title=title, rows=rows)


def region_case(setting: Setting) -> Iterator[Case]:
    found = costs({"": lambda _: tanh}, engines(setting.device), 64, setting)
    title = "one region of one saved tensor (64 in a graph): cost beyond the floor"
    yield cost_case("region", title, {engine: cost for (_, engine), cost in found.items()})


def saved_case(setting: Setting) -> Iterator[Case]:
    few, many = 4, 64
    chosen = engines(setting.device)
    found = costs({"few": lambda _: partial(sines, few), "many": lambda _: partial(sines, many)}, chosen, 16, setting)
    slopes = {
        engine.name: found["many", engine.name].minus(found["few", engine.name]).times(1 / (many - few))
        for engine in chosen
    }
    yield cost_case("saved", f"one more saved tensor (slope from {few} to {many} in a region)", slopes)


def nested_case(setting: Setting) -> Iterator[Case]:
    depth = 3
    chosen = [engine for engine in engines(setting.device) if engine.nests]
    found = costs({"": lambda call: body_of(call, depth)}, chosen, 16, setting)
    title = f"{depth} nested regions of one saved tensor each: cost beyond the floor"
    yield cost_case("nested", title, {engine: cost for (_, engine), cost in found.items()})


def shapes_case(setting: Setting) -> Iterator[Case]:
    for shape, function in shapes().items():
        chosen = [engine for engine in engines(setting.device) if engine.preserves_rng]
        found = costs({"": lambda _, function=function: function}, chosen, 16, setting)  # type: ignore[misc]
        yield cost_case("shapes", f"{shape}: cost beyond the floor", {name: cost for (_, name), cost in found.items()})


# Live bytes, on any device.


def each_block_by_keyword(call: Call) -> Layers:
    def run(layers: nn.ModuleList, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in layers:
            x = call(layer, x=x, cos=cos, sin=sin)
        return x

    return run


def blocks_in_groups(call: Call, size: int = 3) -> Layers:
    """A region around every `size` blocks, and one around each block in it."""

    def run(layers: nn.ModuleList, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for start in range(0, len(layers), size):
            x = call(partial(each_block(call), layers[start : start + size]), x, cos, sin)
        return x

    return run


def memory_cases(setting: Setting) -> Iterator[Case]:
    everyone = [engine for engine in engines(setting.device) if engine.preserves_rng]
    shapes: list[tuple[str, Model, Callable[[Call], Layers], list[Engine]]] = [
        ("one region per block", SMALL, each_block, everyone),
        ("arguments by keyword", SMALL, each_block_by_keyword, [e for e in everyone if e.takes_keywords]),
        ("blocks nested in groups of 3", SMALL, blocks_in_groups, [e for e in everyone if e.nests]),
        ("one region per block", replace(SMALL, dropout=0.1), each_block, everyone),
    ]
    for title, model_spec, shape, chosen in shapes:
        model, ids = model_spec.build(setting.device, torch.float32)
        runs: dict[str, Layers] = {PLAIN: one_by_one} | {engine.name: shape(engine.call) for engine in chosen}
        differences = gradient_differences(model, ids, runs)
        readings = {label: live_bytes(model, ids, run) for label, run in runs.items()}
        case = Case(name="memory", title=f"live bytes of a step, {model_spec}, {title}")
        for label, (held, peak) in readings.items():
            case.rows.append(
                {
                    "candidate": label,
                    "held_bytes": held,
                    "peak_bytes": peak,
                    "peak/plain": peak / readings[PLAIN][1],
                    "peak/torch": peak / readings[TORCH][1],
                    "gradient_difference": differences[label],
                }
            )
        yield case


MODELS = {"launch": LAUNCH, "dropout": replace(LAUNCH, dropout=0.1), "compute": COMPUTE}
CHOICES = {
    "region": Choice(measure=region_case, devices=("cpu",), unasked=("cpu",)),
    "saved": Choice(measure=saved_case, devices=("cpu",), unasked=("cpu",)),
    "nested": Choice(measure=nested_case, devices=("cpu",), unasked=("cpu",)),
    "shapes": Choice(measure=shapes_case, devices=("cpu",), unasked=("cpu",)),
    "memory": Choice(measure=memory_cases, unasked=("cpu",)),
    "real": Choice(measure=small_cases),
    "lengths": Choice(measure=length_case),
} | {
    name: Choice(
        measure=partial(model_case, name, model_spec),
        devices=("cuda",),
        unasked=() if name == "compute" else ("cuda",),
    )
    for name, model_spec in MODELS.items()
}


if __name__ == "__main__":
    # torch's reentrant engine says this of nested regions, whose inputs have no gradient in the first forward.
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
    main((__doc__ or "").splitlines()[0], CHOICES, skipped=missing())
