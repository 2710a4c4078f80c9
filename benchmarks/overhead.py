"""What a region costs, for us and for our neighbours: time, saved tensors, nesting, memory.

    python benchmarks/overhead.py --device cpu                      # tiny tensors, one thread: the fixed costs
    python benchmarks/overhead.py --device cuda --json overhead.json  # a whole training step, launch-bound
    python benchmarks/overhead.py --device cuda --case compute        # the same, compute-bound

All candidates take turns in one process. The floor is a plain step and one plain forward: what recomputing everything
costs with an engine that costs nothing. `--quick` takes fewer rounds. Needs `rich`; run it with `src` importable.
"""

import argparse
import json
import platform
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from alternate import Step, Timing, alternate
from llama_like import Layers, LlamaLike, one_by_one
from peers import OURS, TORCH, Call, Engine, engines, missing, plain
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from recollect._profile.memory import LiveBytes

Row = dict[str, str | float | int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One table: what was measured, and a row for each candidate."""

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how thoroughly to measure."""

    device: torch.device
    rounds: int
    repeats: int

    def alternate(self, steps: dict[str, Step]) -> dict[str, Timing]:
        """On an accelerator the median of each round, among the tiny costs of the CPU its best."""
        of_round = min if self.device.type == "cpu" else statistics.median
        return alternate(steps, device=self.device, rounds=self.rounds, repeats=self.repeats, of_round=of_round)


# A whole step of a model, on an accelerator.


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    dim: int
    layers: int
    tokens: int
    batch: int = 4
    vocab: int = 32000
    dropout: float = 0.0

    def __str__(self) -> str:
        dropout = f", dropout {self.dropout}" if self.dropout else ""
        return f"d{self.dim} L{self.layers} T{self.tokens} B{self.batch}{dropout}"

    def build(self, device: torch.device, dtype: torch.dtype) -> tuple[LlamaLike, Tensor]:
        torch.manual_seed(0)
        model = LlamaLike(self.dim, self.layers, self.tokens, vocab=self.vocab, dropout=self.dropout)
        model.to(device, dtype)
        for parameter in model.parameters():  # allocated once, so that peaks are above parameters and gradients
            parameter.grad = torch.zeros_like(parameter)
        return model, torch.randint(self.vocab, (self.batch, self.tokens), device=device)


def each_block(call: Call) -> Layers:
    def run(layers: nn.ModuleList, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in layers:
            x = call(layer, x, cos, sin)
        return x

    return run


def train(model: LlamaLike, ids: Tensor, run: Layers) -> None:
    model.zero_grad(set_to_none=False)
    torch.autograd.backward(model(ids, run))


def gradients(model: LlamaLike, ids: Tensor, run: Layers) -> list[Tensor]:
    torch.manual_seed(1)
    train(model, ids, run)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def largest_difference(left: list[Tensor], right: list[Tensor]) -> float:
    return max((a.float() - b.float()).abs().max().item() for a, b in zip(left, right, strict=True))


def model_case(name: str, model_spec: Model, setting: Setting) -> Case:
    model, ids = model_spec.build(setting.device, torch.bfloat16)
    candidates = [engine for engine in engines(setting.device) if engine.preserves_rng or not model_spec.dropout]
    runs: dict[str, Layers] = {"plain": one_by_one} | {engine.name: each_block(engine.call) for engine in candidates}
    expected = gradients(model, ids, one_by_one)
    differences = {label: largest_difference(gradients(model, ids, run), expected) for label, run in runs.items()}
    del expected

    held_bytes = torch.accelerator.memory_allocated(setting.device)
    steps: dict[str, Step] = {label: partial(train, model, ids, run) for label, run in runs.items()}
    timings = setting.alternate({"forward": partial(model, ids), **steps})
    floor = timings["plain"].plus(timings["forward"])
    case = Case(name=name, title=f"{model_spec}, bf16, one region per block: a training step")
    case.rows.append({"candidate": "floor (plain + forward)", **time_columns(floor, floor, timings)})
    for label in runs:
        peak_bytes = (timings[label].peak_bytes or 0) - held_bytes
        torch_peak_bytes = (timings[TORCH].peak_bytes or 0) - held_bytes
        case.rows.append(
            {
                "candidate": label,
                **time_columns(timings[label], floor, timings),
                "peak_bytes": peak_bytes,
                "peak/torch": peak_bytes / torch_peak_bytes,
                "gradient_difference": differences[label],
            }
        )
    return case


def time_columns(timing: Timing, floor: Timing, timings: dict[str, Timing]) -> Row:
    """The best round, as in the tables this model was made for; the median beside it shows the noise."""
    return {
        "median_ms": timing.median_s * 1e3,
        "best_ms": timing.best_s * 1e3,
        "best/floor": timing.best_s / floor.best_s,
        "best/plain": timing.best_s / timings["plain"].best_s,
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
        x = call(partial(nested, call, depth - 1), x)
    return x.tanh()


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


def region_case(setting: Setting) -> Case:
    found = costs({"": lambda _: tanh}, engines(setting.device), 64, setting)
    title = "one region of one saved tensor (64 in a graph): cost beyond the floor"
    return cost_case("region", title, {engine: cost for (_, engine), cost in found.items()})


def saved_case(setting: Setting) -> Case:
    few, many = 4, 64
    chosen = engines(setting.device)
    found = costs({"few": lambda _: partial(sines, few), "many": lambda _: partial(sines, many)}, chosen, 16, setting)
    slopes = {
        engine.name: found["many", engine.name].minus(found["few", engine.name]).times(1 / (many - few))
        for engine in chosen
    }
    return cost_case("saved", f"one more saved tensor (slope from {few} to {many} in a region)", slopes)


def nested_case(setting: Setting) -> Case:
    depth = 3
    chosen = [engine for engine in engines(setting.device) if engine.nests]
    found = costs({"": lambda call: partial(nested, call, depth)}, chosen, 16, setting)
    title = f"{depth} nested regions of one saved tensor each: cost beyond the floor"
    return cost_case("nested", title, {engine: cost for (_, engine), cost in found.items()})


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


def live_bytes(model: LlamaLike, ids: Tensor, run: Layers) -> tuple[int, int]:
    """Bytes held between forward and backward, and at the peak, above parameters and gradients."""
    train(model, ids, run)  # whatever an engine sets up once is not the step's
    model.zero_grad(set_to_none=False)
    with LiveBytes() as meter:
        loss = model(ids, run)
        held_bytes = meter.live_bytes
        torch.autograd.backward(loss)
    return held_bytes, meter.peak_bytes


def memory_cases(setting: Setting) -> Iterator[Case]:
    everyone = [engine for engine in engines(setting.device) if engine.preserves_rng]
    small = Model(dim=128, layers=6, tokens=64, batch=2, vocab=256)
    shapes: list[tuple[str, Model, Callable[[Call], Layers], list[Engine]]] = [
        ("one region per block", small, each_block, everyone),
        ("arguments by keyword", small, each_block_by_keyword, [e for e in everyone if e.takes_keywords]),
        ("blocks nested in groups of 3", small, blocks_in_groups, [e for e in everyone if e.nests]),
        ("one region per block", Model(**(asdict(small) | {"dropout": 0.1})), each_block, everyone),
    ]
    for title, model_spec, shape, chosen in shapes:
        model, ids = model_spec.build(setting.device, torch.float32)
        runs = {"plain": one_by_one} | {engine.name: shape(engine.call) for engine in chosen}
        expected = gradients(model, ids, one_by_one)
        readings = {label: live_bytes(model, ids, run) for label, run in runs.items()}
        case = Case(name="memory", title=f"live bytes of a step, {model_spec}, {title}")
        for label, (held, peak) in readings.items():
            case.rows.append(
                {
                    "candidate": label,
                    "held_bytes": held,
                    "peak_bytes": peak,
                    "peak/plain": peak / readings["plain"][1],
                    "peak/torch": peak / readings[TORCH][1],
                    "gradient_difference": largest_difference(gradients(model, ids, runs[label]), expected),
                }
            )
        yield case


LAUNCH = Model(dim=1024, layers=24, tokens=1024)
MODELS = {
    "launch": LAUNCH,
    "dropout": Model(**(asdict(LAUNCH) | {"dropout": 0.1})),
    "compute": Model(dim=2048, layers=16, tokens=4096),
}
FIXED_COSTS = {"region": region_case, "saved": saved_case, "nested": nested_case}
DEFAULT = {"cpu": [*FIXED_COSTS, "memory"], "cuda": ["launch", "dropout"]}


def measure(name: str, setting: Setting) -> Iterator[Case]:
    if name in MODELS:
        yield model_case(name, MODELS[name], setting)
    elif name == "memory":
        yield from memory_cases(setting)
    else:
        yield FIXED_COSTS[name](setting)


def show(console: Console, case: Case) -> None:
    columns = list(dict.fromkeys(column for row in case.rows for column in row))
    table = Table(title=case.title, title_justify="left")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="left" if column == "candidate" else "right")
    for row in case.rows:
        style = "bold" if row["candidate"] == OURS else None
        table.add_row(*(shown(column, row.get(column)) for column in columns), style=style)
    console.print(table)


def shown(column: str, value: str | float | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if column.endswith("_bytes"):
        return f"{value / 2**20:,.2f} MiB"
    if column == "gradient_difference":
        return f"{value:.1e}" if value else "0"
    return f"{value:.3f}"


def environment(device: torch.device) -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {"torch": torch.__version__, "python": platform.python_version(), "device": name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", action="append", choices=[*FIXED_COSTS, "memory", *MODELS], help="may be repeated")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a measurement")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there too")
    options = parser.parse_args()

    torch.set_num_threads(1)
    # torch's reentrant engine says this of nested regions, whose inputs have no gradient in the first forward.
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    names = options.case or DEFAULT[options.device]
    elsewhere = MODELS if device.type == "cpu" else FIXED_COSTS
    if not elsewhere.keys().isdisjoint(names):
        parser.error(f"{', '.join(elsewhere)} are not measured with --device {options.device}")
    rounds, repeats = (3, 5) if options.quick else (15, 20) if device.type == "cpu" else (6, 10)
    setting = Setting(device=device, rounds=rounds, repeats=repeats)

    console = Console(width=140)
    about = environment(device)
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), *missing(), sep="\n")
    cases = []
    for name in names:
        for case in measure(name, setting):
            show(console, case)
            cases.append(asdict(case))
    if options.json:
        written = {"environment": about, "rounds": rounds, "repeats": repeats, "skipped": missing(), "cases": cases}
        options.json.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
