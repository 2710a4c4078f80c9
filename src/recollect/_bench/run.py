"""Running the benchmarks: which cells are missing, and each in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from recollect import __version__
from recollect._bench.names import MODELS
from recollect._bench.results import Cell, Measured, Results


class CellFailedError(RuntimeError):
    """The process that measured a cell ended without figures; the message has its last words."""


def find_commit() -> str:
    """The commit of this library; its version where there is no repository, or git is not installed."""
    here = Path(__file__).parent
    git = ["git", "-C", str(here)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", "run.py"], capture_output=True, check=True, timeout=10)
        asked = [*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or installed among files of somebody else's
        return __version__


def list_cells(
    models: Iterable[str], sizes: Sequence[str], modes: Sequence[str], *, device: str, torch: str, commit: str
) -> list[Cell]:
    """The cells of a run, in the order in which they are measured.

    >>> [cell.model for cell in list_cells(["GPT", "Llama"], ["small"], ["eager"], device="", torch="", commit="")]
    ['Llama', 'GPT']
    """
    wanted = set(models)
    return [
        Cell(model=model, size=size, mode=mode, device=device, torch=torch, commit=commit)
        for model in MODELS
        if model in wanted
        for mode in modes
        for size in sizes
    ]


def run_cell(cell: Cell, *, timeout_s: float | None = None, **how: Any) -> Measured:
    """Measure a cell in a process of its own.

    Args:
        cell: which.
        timeout_s: after how long to give up.
        how: the other fields of `recollect._bench.cell.Request`.

    Raises:
        CellFailedError: it failed, or took too long.
    """
    asked = json.dumps({"cell": dataclasses.asdict(cell), **how})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        command = [sys.executable, "-m", "recollect._bench.cell", asked, str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            message = f"it took more than {timeout_s:.0f} s"
            raise CellFailedError(message) from None
        if done.returncode != 0 or not out.exists():
            said = done.stderr.strip().rpartition("\n")[2] or "it said nothing"
            message = f"its process ended with code {done.returncode}: {said}"
            raise CellFailedError(message)
        return Results.read(out).measured[0]


def append(path: Path, one: Measured) -> Results:
    """Add a measurement to a file, which is written whole or not at all; others may have written to it meanwhile."""
    results = Results.read(path).plus(one)
    part = path.with_name(f"{path.name}.part")
    part.write_text(results.to_json() + "\n", "utf-8")
    part.replace(path)
    return results
