"""How options are written in messages: as arguments in Python, or as they are typed on the command line."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar

_is_typed: ContextVar[bool] = ContextVar("recollect_options_are_typed", default=False)


@contextmanager
def options_typed() -> Generator[None]:
    """Inside, messages name options as they are typed on the command line."""
    token = _is_typed.set(True)
    try:
        yield
    finally:
        _is_typed.reset(token)


def choose_words(python: str, typed: str) -> str:
    """What a message says to whoever writes Python, or types a command."""
    return typed if _is_typed.get() else python


def spell_levers(names: Iterable[str]) -> str:
    """Levers, as they are asked for.

    >>> spell_levers(["chunked_loss", "micro_batches"])
    "levers={'chunked_loss', 'micro_batches'}"
    >>> with options_typed():
    ...     spell_levers(["chunked_loss", "micro_batches"])
    '--lever chunked_loss --lever micro_batches'
    """
    listed = list(names)
    python = f"levers={{{', '.join(map(repr, listed))}}}"
    return choose_words(python, " ".join(f"--lever {name}" for name in listed))


def spell_lever(name: str) -> str:
    """One lever that was asked for.

    >>> spell_lever("micro_batches")
    "lever 'micro_batches'"
    """
    return choose_words(f"lever {name!r}", f"--lever {name}")
