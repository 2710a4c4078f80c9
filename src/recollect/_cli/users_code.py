"""Running code of the user's: when it fails, its traceback is shown without the frames of this library."""

import contextlib
import importlib
import traceback
from collections.abc import Generator
from pathlib import Path

import typer

from recollect._cli.endings import FAILED
from recollect._cli.screen import fail, say
from recollect._core.authors import is_ours, is_users_file

_LOADERS = ("<frozen importlib", "<frozen runpy", str(Path(importlib.__file__).parent))
_OUR_WORDS = (ValueError, TypeError, ImportError, RuntimeError)
"""Errors whose message explains them, where this library raises them."""


@contextlib.contextmanager
def users_code(*, shows_all: bool = False) -> Generator[None, None, None]:
    """End the command with code 1 if what runs inside fails, and show where.

    What this library itself says about the user's step is shown as a message. An error that is neither the user's nor
    explained is a bug of ours, and shows all its frames.

    Args:
        shows_all: whether tracebacks include the frames of this library.
    """
    try:
        yield
    except typer.Exit:
        raise
    except SystemExit as error:
        fail(f"the profiled code ended the process with sys.exit({error.code!r})", code=FAILED)
    except Exception as error:
        if not shows_all and _is_our_message(error):
            fail(str(error), code=FAILED)
        say(format_failure(error, shows_all=shows_all))
        raise typer.Exit(FAILED) from None


def format_failure(error: BaseException, *, shows_all: bool = False) -> str:
    """The traceback of an error, and of those that led to it, without frames of this library and of Python's loaders.

    >>> format_failure(ValueError("no traceback: it was never raised"))
    'ValueError: no traceback: it was never raised'
    """
    shown = traceback.TracebackException.from_exception(error)
    if not shows_all:
        _leave_out(shown, error)
    return "".join(shown.format()).rstrip()


def _leave_out(shown: traceback.TracebackException, error: BaseException) -> None:
    theirs = [frame for frame in shown.stack if not _is_in_between(frame.filename)]
    if theirs or isinstance(error, SyntaxError):  # otherwise the failure is ours, and only its frames say where
        shown.stack = traceback.StackSummary.from_list(theirs)
    for led_there, earlier in ((shown.__cause__, error.__cause__), (shown.__context__, error.__context__)):
        if led_there is not None and earlier is not None:
            _leave_out(led_there, earlier)


def _is_in_between(file: str) -> bool:
    return is_ours(file) or file.startswith(_LOADERS)


def _is_our_message(error: Exception) -> bool:
    """Whether this library raised it, and no code of the user's was on the way there."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return isinstance(error, _OUR_WORDS) and is_ours(files[-1]) and not any(map(is_users_file, files))
