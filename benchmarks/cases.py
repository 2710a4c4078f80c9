"""A benchmark: named cases, measured in one setting, shown as tables and written as JSON by one command line."""

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from devices import refuse_missing
from peers import OURS
from rich.console import Console
from rich.table import Table

from recollect._bench.alternate import Step, Timing, alternate
from recollect._bench.run import find_commit

Row = dict[str, str | float | int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One table: what was measured, and a row for each candidate."""

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how thoroughly to measure.

    Attributes:
        device: where.
        rounds: how often everyone has a turn.
        repeats: steps in a turn.
        is_quick: whether a look is enough.
        limit_s: when to begin nothing new, in benchmarks that heed it.
        jobs: processes that prepare candidates, likewise.
        only: parts of the names of those that are wanted, likewise; all of them if there are none.
    """

    device: torch.device
    rounds: int
    repeats: int
    is_quick: bool = False
    limit_s: float | None = None
    jobs: int = 0
    only: tuple[str, ...] = ()

    def alternate(self, steps: dict[str, Step]) -> dict[str, Timing]:
        """On an accelerator the median of each round, among the tiny costs of the CPU its best."""
        of_round = min if self.device.type == "cpu" else statistics.median
        return alternate(steps, device=self.device, rounds=self.rounds, repeats=self.repeats, of_round=of_round)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What `--case` can name: how it is measured, where that makes sense, and where it is done unasked."""

    measure: Callable[[Setting], Iterable[Case]]
    devices: tuple[str, ...] = ("cpu", "cuda")
    unasked: tuple[str, ...] = ()


def main(about: str, choices: Mapping[str, Choice], *, skipped: Sequence[str] = ()) -> None:
    """The command line of a benchmark.

    Args:
        about: what it measures, in a line.
        choices: its cases by name, in the order they are measured in.
        skipped: what is left out here, in words.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", action="append", choices=list(choices), help="may be repeated")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a measurement")
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="begin nothing new after that (compiled.py, real_models.py)"
    )
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile ahead (compiled.py)")
    parser.add_argument("--only", action="append", default=[], help="candidates, or models, whose names hold this")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there too")
    options = parser.parse_args()
    refuse_missing(parser, options.device)
    names = options.case or [name for name, choice in choices.items() if options.device in choice.unasked]
    elsewhere = [name for name, choice in choices.items() if options.device not in choice.devices]
    if not set(elsewhere).isdisjoint(names):
        parser.error(f"{', '.join(elsewhere)} are not measured with --device {options.device}")

    torch.set_num_threads(1)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    rounds, repeats = (3, 5) if options.quick else (15, 20) if device.type == "cpu" else (20, 3)
    setting = Setting(
        device=device,
        rounds=rounds,
        repeats=repeats,
        is_quick=options.quick,
        limit_s=options.limit,
        jobs=options.jobs,
        only=tuple(options.only),
    )

    console = Console(width=160)
    here = environment(device)
    console.print(", ".join(f"{key} {value}" for key, value in here.items()), *skipped, sep="\n")
    cases = []
    for name in names:
        for case in choices[name].measure(setting):
            show(console, case)
            cases.append(asdict(case))
            if options.json:  # after each: whoever ends it has what was measured by then
                written = {
                    "environment": here,
                    "rounds": rounds,
                    "repeats": repeats,
                    "skipped": skipped,
                    "cases": cases,
                }
                options.json.write_text(json.dumps(written, indent=2) + "\n")


def show(console: Console, case: Case) -> None:
    columns = list(dict.fromkeys(column for row in case.rows for column in row))
    table = Table(title=case.title, title_justify="left")
    for column in columns:
        is_text = any(isinstance(row.get(column), str) for row in case.rows)
        table.add_column(column.replace("_", " "), justify="left" if is_text else "right")
    for row in case.rows:
        is_ours = str(row.get("candidate")).startswith(OURS)
        table.add_row(*(shown(column, row.get(column)) for column in columns), style="bold" if is_ours else None)
    console.print(table)


def shown(column: str, value: str | float | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if column.endswith("_bytes"):
        return f"{value / 2**20:,.2f} MiB"
    if column == "gradient_difference":
        return f"{value:.1e}" if value else "0"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def environment(device: torch.device) -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    versions = {"torch": torch.__version__, "python": platform.python_version(), "recollect": find_commit()}
    return versions | {"device": name}
