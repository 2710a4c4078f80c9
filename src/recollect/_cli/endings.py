"""How commands end: their exit codes, and what is quiet because the user meant it."""

import functools
import os
import sys
from collections.abc import Callable
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
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None
        except BrokenPipeError:
            # What is still buffered would raise once more when the interpreter closes the stream.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(PIPE_CLOSED) from None
        return result

    return ended
