"""How commands end: their exit codes, and endings that are not errors, such as an interrupt or a closed pipe."""

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

OK = 0
FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130
PIPE_CLOSED = 141
"""128 and the number of the signal, as shells report it."""


def end_quietly(command: Callable[P, R]) -> Callable[P, R]:
    """Let a command end without a traceback when it is interrupted, or when nobody reads its output any more.

    >>> def interrupted():
    ...     raise KeyboardInterrupt
    >>> end_quietly(interrupted)()
    Traceback (most recent call last):
    ...
    SystemExit: 130
    """

    @functools.wraps(command)
    def ended(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            result = command(*args, **kwargs)
            with writing_output():
                pass
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None
        except BrokenPipeError:
            _discard_output()
            raise SystemExit(PIPE_CLOSED) from None
        return result

    return ended


@contextlib.contextmanager
def loading() -> Generator[None, None, None]:
    """Let an interrupt end the process at once while libraries are loaded: there is nothing to clean up yet.

    As an exception it would come up inside whatever is being imported, and some of that prints or swallows it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, as in the background of a shell, or somebody else's
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def writing_output() -> Generator[None, None, None]:
    """End the command with code 1, and say why, if what is written to standard output inside does not get there.

    That nobody reads it any more is left to `end_quietly`.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_output()
        sys.stderr.write(f"error: standard output cannot be written: {error.strerror or error}\n")
        raise SystemExit(FAILED) from None


def _discard_output() -> None:
    """Let what is still buffered go nowhere: it would raise once more when the interpreter closes the stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
