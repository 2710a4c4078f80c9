"""The kinds of random generators that a program may hold itself, in a variable or an attribute."""

from __future__ import annotations

import functools
import random
import sys

import torch


def generator_kinds() -> frozenset[type]:
    """Classes of generators; NumPy's only if it was imported. Compare types: torch's answers `isinstance` slowly."""
    return _kinds("numpy.random" in sys.modules)


@functools.lru_cache(maxsize=2)
def _kinds(has_numpy: bool) -> frozenset[type]:  # noqa: FBT001
    kinds: set[type] = {torch.Generator, random.Random}
    if has_numpy:
        numbers = sys.modules["numpy.random"]
        kinds |= {numbers.Generator, numbers.RandomState}
    return frozenset(kinds)
