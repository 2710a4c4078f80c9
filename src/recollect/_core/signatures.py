"""Signatures of users' functions. Python 3.14 evaluates annotations only when they are read, and then some fail."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any


def read_signature(function: Callable[..., Any]) -> inspect.Signature:
    """As `inspect.signature`, for functions whose annotations name what is imported only for type checkers, too.

    Raises:
        ValueError: the function has none, as some builtins.
        TypeError: it is not a function, or its signature cannot be read.

    >>> read_signature(lambda x, *, scale=1: x * scale)
    <Signature (x, *, scale=1)>
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def find_signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """The same; None where none can be read."""
    try:
        return read_signature(function)
    except (TypeError, ValueError):
        return None


def binds(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function can be called so; yes, where nobody can tell.

    >>> binds(lambda x: x, (1,), {}), binds(lambda x: x, (), {"y": 1})
    (True, False)
    """
    signature = find_signature(function)
    if signature is None:
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def names_arguments(batch: object, function: Callable[..., Any]) -> bool:
    """Whether some keys of a mapping are arguments of a function: then it is not meant as one of them.

    >>> names_arguments({"x": 1}, lambda x: x), names_arguments({"x": 1}, lambda batch: batch)
    (True, False)
    """
    signature = find_signature(function)
    return isinstance(batch, Mapping) and signature is not None and any(key in signature.parameters for key in batch)


def read_annotations(function: object) -> dict[str, Any]:
    """The annotations of a function; none where they cannot be evaluated.

    >>> read_annotations(read_signature)["return"], read_annotations(5)
    ('inspect.Signature', {})
    """
    try:
        return getattr(function, "__annotations__", {})
    except NameError:
        return {}
