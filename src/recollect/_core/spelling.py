"""How options are written in messages, as arguments in Python or as they are typed; and those that do not exist."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from recollect._core.argument_text import short_repr
from recollect._core.patterns import did_you_mean, nearest, quote_all

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


# What torch calls its options, and what to write here.
_TORCHS = {
    "use_reentrant": "leave it out; there is only one engine (recollect.compat.checkpoint has torch's two)",
    "preserve_rng_state": "write preserve_rng=",
    "determinism_check": "write check='metadata' for 'default', or check='none'",
    "context_fn": "write policy=, as in policy=recollect.policies.save_matmuls",
    "debug": "wrap the step in `with recollect.explain_mismatch():`",
    "gradient_checkpointing_kwargs": "leave it out",
    "pin_memory": "leave it out; host memory is always pinned",
}
_OTHERS = {
    **dict.fromkeys(("budget", "levers"), "use recollect.fit"),
    **{option: f"use recollect.apply(model, {option}=...)" for option in ("rules", "policy", "every", "first")},
}


def refuse_unknown(caller: str, unknown: Mapping[str, Any], options: Iterable[str], otherwise: str = "") -> None:
    """Refuse options that do not exist, and say what to write instead.

    Python itself says only that there is no such argument, before 3.13 without a guess which one is meant. Functions
    that take ``**unknown: Never`` for this keep their signatures for type checkers.

    Args:
        caller: the function they were given to.
        unknown: what was given.
        options: those that exist.
        otherwise: what to say of a name that is like none of them; by default which ones exist.

    Raises:
        TypeError: there is one.

    >>> refuse_unknown("recollect.checkpoint", {"use_reentrant": False}, ["policy"])
    Traceback (most recent call last):
    ...
    TypeError: recollect.checkpoint has no option use_reentrant=False: leave it out; there is only one engine
    (recollect.compat.checkpoint has torch's two)
    """
    known = list(options)
    for name, value in unknown.items():
        near = nearest(name, known)
        hint = _TORCHS.get(name) or _OTHERS.get(name) or (did_you_mean(near) if near else otherwise)
        message = f"{caller} has no option {name}={short_repr(value)}: {hint or f'it takes {quote_all(known)}'}"
        raise TypeError(message)


def options_of(function: Callable[..., Any]) -> list[str]:
    """The names of what a function takes by name.

    >>> options_of(spell_lever)
    ['name']
    """
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [one.name for one in inspect.signature(function).parameters.values() if one.kind in named]
