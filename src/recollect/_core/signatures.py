"""Signatures of users' functions. Python 3.14 evaluates annotations only when they are read, and then some fail."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any


def read_signature(function: Callable[..., Any]) -> inspect.Signature:
    """As `inspect.signature`, for functions whose annotations name what is imported only for type checkers, too.

    Raises:
        ValueError: the function has none, as some builtins.
        TypeError: it is no function, or no signature can be read from it.

    >>> read_signature(lambda x, *, scale=1: x * scale)
    <Signature (x, *, scale=1)>
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def read_annotations(function: object) -> dict[str, Any]:
    """The annotations of a function; none where they cannot be evaluated.

    >>> read_annotations(read_signature)["return"], read_annotations(5)
    ('inspect.Signature', {})
    """
    try:
        return getattr(function, "__annotations__", {})
    except NameError:
        return {}
