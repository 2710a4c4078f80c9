"""`recollect bench`: measures recollect beside what people use instead, and appends what it found to a file."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from recollect._bench.names import MODELS, MODES, SIZES, WITH_LENGTH
from recollect._cli.arguments import QuietOption
from recollect._cli.endings import FAILED, loading
from recollect._cli.report import check_path
from recollect._cli.screen import fail, make_console, say, show_progress
from recollect._core.numbers import format_seconds
from recollect._core.patterns import hint_nearest
from recollect._core.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from recollect._bench.results import Cell, Measured


def bench(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODELS", help=f"Which models: {', '.join(MODELS)}; all by default.", show_default=False
        ),
    ] = None,
    *,
    device: Annotated[str | None, typer.Option("--device", metavar="DEVICE", help="cpu or cuda.")] = None,
    size: Annotated[str | None, typer.Option("--size", metavar="SIZES", help="small, large, or both.")] = None,
    mode: Annotated[str | None, typer.Option("--mode", metavar="MODES", help="eager, compiled, or both.")] = None,
    largest: Annotated[
        str | None,
        typer.Option("--largest", metavar="WHAT", help="batch or length: find the largest that fits --budget."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="BYTES", help="For --largest: the most a step may take.")
    ] = None,
    rounds: Annotated[
        int, typer.Option("--rounds", metavar="N", min=1, help="Rounds, in which each contender takes a turn.")
    ] = 5,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Steps in each turn.")] = 5,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs",
            metavar="N",
            min=0,
            help="Compile the contenders ahead of time, in N processes that share 60% of the device's memory.",
        ),
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A quick look: small sizes, eager, few steps.")] = False,
    limit: Annotated[
        float | None,
        typer.Option(
            "--limit",
            metavar="SECONDS",
            min=0,
            help="Start nothing new after this time: no measurement, and with --largest no contender.",
        ),
    ] = None,
    results: Annotated[
        Path, typer.Option("--results", metavar="FILE", help="File that measurements are appended to.")
    ] = Path("bench.json"),
    again: Annotated[bool, typer.Option("--again", help="Measure again what the file already has.")] = False,
    page: Annotated[
        Path | None,
        typer.Option("--page", metavar="FILE", help="Measure nothing: write tables and plots into this page."),
    ] = None,
    quiet: QuietOption = False,
) -> None:
    """Measure step time against peak memory: recollect at seven budgets next to its rivals.

    Each model, size and mode runs in its own process, in which the contenders take turns. Measurements are appended to
    bench.json. Run the command again to continue where it stopped: what these versions of recollect and torch have
    already measured on this device is not measured again.

    **Exit codes**: 0 done, 1 a measurement failed, 2 wrong usage.

    **Examples**

        recollect bench --quick --device cpu
        recollect bench Llama ResNet --device cuda --mode eager --limit 400
        recollect bench Llama --device cuda --mode compiled --jobs 4
        recollect bench Llama --size large --largest length --budget 40GiB
        recollect bench --page docs/benchmarks.md
    """
    check_path(results, (".json",))
    chosen = [_match(name) for name in models or MODELS]
    with loading():
        import torch

        from recollect._bench.run import find_commit, list_cells
    name, device = _find_device(device)
    if page is not None:
        _write_page(page, results, name, quiet=quiet)
        return
    sizes = _read_list("--size", size or ("small" if quick else "small,large"), SIZES)
    modes = _read_list("--mode", mode or ("eager" if quick or device == "cpu" else "eager,compiled"), MODES)
    budget_bytes = _read_largest(largest, budget)
    if largest is not None:
        modes = [f"largest {largest}"]
        chosen = [model for model in chosen if largest == "batch" or model in WITH_LENGTH]
        if not chosen:
            fail(f"--largest length: only the inputs of {', '.join(WITH_LENGTH)} have a length")
    cells = list_cells(chosen, sizes, modes, device=name, torch=str(torch.__version__), commit=find_commit())
    if quick:
        rounds, repeats = 2, 2
    how = {"device": device, "rounds": rounds, "repeats": repeats, "is_quick": quick, "jobs": jobs}
    how |= {"budget_bytes": budget_bytes}
    _measure(cells, results, how, limit=limit, again=again, quiet=quiet)


def _measure(
    cells: "list[Cell]",
    path: Path,
    how: dict[str, Any],
    *,
    limit: float | None,
    again: bool,
    quiet: bool,
) -> None:
    from recollect._bench.results import Results
    from recollect._bench.run import CellFailedError, append, run_cell

    started = time.monotonic()
    try:
        known = Results.read(path)
    except (OSError, ValueError) as error:
        fail(f"{path}: {error}")
    has_failed = False
    for number, cell in enumerate(cells, 1):
        what = f"{cell.model}, {cell.size}, {cell.mode}"
        found = None if again else known.find(cell, is_quick=bool(how["is_quick"]), budget_bytes=how["budget_bytes"])
        if found is not None and not found.is_partial:
            print_measured(found)
            continue
        left = None if limit is None else limit - (time.monotonic() - started)
        if left is not None and left <= 0:
            say(f"{what}: skipped, the time is up")
            continue
        earlier = found.reaches if found is not None else ()
        with show_progress(f"{what} ({number} of {len(cells)})", quiet=quiet):
            try:
                measured = run_cell(cell, known=[one.contender for one in earlier], limit_s=left, **how)
            except CellFailedError as error:
                say(f"{what}: failed: {error}")
                has_failed = True
                continue
            measured = replace(measured, reaches=(*earlier, *measured.reaches))
            append(path, measured)
        print_measured(measured)
        if measured.is_partial:
            say(f"{what}: the time ran out before every contender was measured; run it again to continue")
    if not quiet and path.exists():
        say(f"measurements are in {path}; to make tables and plots from them: recollect bench --page FILE")
    if has_failed:
        raise typer.Exit(FAILED)


def print_measured(measured: "Measured") -> None:
    """Print what was measured of a cell: for each way also what ours costs at its peak, red where that is more."""
    from recollect._bench.compare import compare

    cell = measured.cell
    look = ", a quick look" if measured.is_quick else ""
    table = Table(
        title=f"{cell.model}, {cell.size}, {cell.mode}{look}: {measured.shape}; {cell.device}, torch {cell.torch}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("way", no_wrap=True)
    if measured.reaches:
        for column in (cell.mode, "peak", "step"):
            table.add_column(column, justify="right", no_wrap=True)
        for one in measured.reaches:
            if not one.failed:
                size = "" if one.peak_bytes is None else format_bytes(one.peak_bytes)
                table.add_row(one.contender, f"{one.value:,}", size, format_seconds(one.step_s))
        _print_table(table, {one.contender: one.failed for one in measured.reaches if one.failed})
        return
    for column in ("peak", "share", "step", "cost", "recollect"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = compare(measured)
    for row in rows:
        figure = row.figure
        if row.cost is None:
            continue
        ours = "" if not row.is_rival else "none" if row.ours is None else f"{row.ours:+.1%}"
        table.add_row(
            figure.contender,
            "" if figure.peak_bytes is None else format_bytes(figure.peak_bytes),
            "" if row.share is None else f"{row.share:.0%}",
            format_seconds(figure.median_s),
            "" if figure.contender == "plain" else f"{row.cost:+.1%}",
            f"[bold red]{ours}[/]" if row.is_lost else ours,
        )
    failed = {row.figure.contender: row.figure.failed or "no figures" for row in rows if row.cost is None}
    _print_table(table, failed)
    if any(row.is_rival for row in rows):
        make_console().print(
            "share: of the plain step's activations. cost: over the plain step's time. recollect: the cost of its "
            "fastest plan that takes no more memory; red where it loses, none where there is no such plan."
        )


def _print_table(table: Table, failed: dict[str, str]) -> None:
    console = make_console(soft_wrap=True)
    console.print(table)
    for contender, why in failed.items():
        console.print(f"  {contender}: {why}", markup=False)


def _write_page(page: Path, results: Path, device: str, *, quiet: bool) -> None:
    from recollect._bench.pages import write_page
    from recollect._bench.results import Results

    check_path(page, (".md",))
    try:
        read = Results.read(results)
        devices = sorted({one.cell.device for one in read.measured})
        shown = device if device in devices or not devices else devices[-1]
        written = write_page(read, page, device=shown)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    except (ImportError, ValueError) as error:
        fail(str(error))
    for path in written if not quiet else ():
        say(f"wrote {path}")


def _match(name: str) -> str:
    by_lower = {model.lower(): model for model in MODELS}
    if name.lower() not in by_lower:
        several = "; write a space between several" if "," in name else hint_nearest(name, MODELS)
        fail(f"unknown model {name}: expected one or more of {', '.join(MODELS)}{several}")
    return by_lower[name.lower()]


def _read_list(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    words = list(known) if words == ["both"] else words
    for word in words:
        if word not in known:
            fail(f"{option} {text}: expected {', '.join(known)}, or both{hint_nearest(word, [*known, 'both'])}")
    return words


def _read_largest(largest: str | None, budget: str | None) -> int:
    if largest is None:
        if budget is not None:
            fail("--budget is for --largest, as in --largest batch --budget 40GiB")
        return 0
    if largest not in ("batch", "length"):
        fail(f"--largest {largest}: expected batch or length{hint_nearest(largest, ('batch', 'length'))}")
    if budget is None:
        fail("--largest needs --budget, as in --budget 40GiB")
    try:
        return parse_bytes(budget)
    except ValueError as error:
        fail(f"--budget: {error}")


def _find_device(wanted: str | None) -> tuple[str, str]:
    """The name of the device, and what torch calls it."""
    import torch

    kind = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        fail(f"--device {kind}: expected cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: torch finds no CUDA device here")
    return (torch.cuda.get_device_name() if kind == "cuda" else "CPU"), kind
