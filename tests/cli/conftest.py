"""A folder with code of a user's, and the command line run in this process."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import TRAIN, Done

Invoke = Callable[..., Done]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a `train.py` in it; what is imported from there is forgotten afterwards."""
    (tmp_path / "train.py").write_text(TRAIN, "utf-8")
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if name not in modules and str(getattr(module, "__file__", "") or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def invoke(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run a command in this process."""
    typing_tool = pytest.importorskip("typer.testing")
    from recollect._cli.app import app

    for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args: str) -> Done:
        result: Any = typing_tool.CliRunner().invoke(app, list(args), prog_name="recollect")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Done(result.exit_code, result.stdout, result.stderr)

    return run
