"""What commands show: results on standard output; messages, errors and progress on standard error."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Generator
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from recollect._cli.endings import WRONG_USAGE

ShowProgress = Callable[[int, int | None], None]
"""Takes how much is done, and of how much, if that is known."""

_PATIENCE_S = 1.0


def make_console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """A console that shows text as it is: ``module:Class:`` would come out as an emoji otherwise.

    >>> make_console().print("no module named x:x:")
    no module named x:x:
    """
    return Console(stderr=stderr, soft_wrap=soft_wrap, highlight=False, emoji=False)


def say(message: str) -> None:
    """Write a message to standard error, for people: colour and markup only where there is a terminal."""
    make_console(stderr=True, soft_wrap=True).print(message, markup=False)


def fail(message: str, *, code: int = WRONG_USAGE) -> NoReturn:
    """Say what is wrong and end the command.

    Raises:
        typer.Exit: always.
    """
    console = make_console(stderr=True, soft_wrap=True)
    console.print("[bold red]error:[/]", end=" ")
    console.print(message, markup=False)
    raise typer.Exit(code)


@contextlib.contextmanager
def show_progress(what: str, *, quiet: bool = False) -> Generator[ShowProgress, None, None]:
    """Show on standard error how far something is, once it has taken a second. It is gone at the end.

    Shows nothing where standard error is not a terminal.

    Args:
        what: that is done, as the bar says it.
        quiet: whether to show nothing at all.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    bar = Progress(
        *columns,
        TimeElapsedColumn(),
        console=make_console(stderr=True),
        transient=True,
        # What is printed meanwhile goes above the bar; a file that takes the output must not lose it to the terminal.
        redirect_stdout=sys.stdout.isatty(),
    )
    task = bar.add_task(what, total=None)
    patience = threading.Timer(_PATIENCE_S, bar.start)
    patience.daemon = True
    patience.start()
    try:
        yield lambda done, total: bar.update(task, completed=done, total=total)
    finally:
        patience.cancel()
        patience.join()
        bar.stop()


@contextlib.contextmanager
def keep_stdout_clean() -> Generator[None, None, None]:
    """Send what anybody writes to standard output to standard error instead, programs that are started included."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, ValueError):  # no file behind it, as in tests
            sys.stdout.flush()
            number = sys.stdout.fileno()
            kept = os.dup(number)
            os.dup2(sys.stderr.fileno(), number)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, number)
            stack.callback(sys.stdout.flush)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield
