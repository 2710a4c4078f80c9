"""The cache of `torch.nn.utils.parametrize.cached()`, as a value that can be put back.

Would be replaced by: a public handle on that cache.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from typing import Any

from torch.nn.utils import parametrize

Cache = tuple[int, dict[Any, Any]] | None


def read_cache() -> Cache:
    """The cache in force, copied; None where caching is off, which is all this costs then."""
    depth = parametrize._cache_enabled
    return (depth, dict(parametrize._cache)) if depth else None


def swap_cache(cache: Cache) -> Cache:
    """Put a copy of `cache` in force and give back what was there."""
    previous: Cache = (parametrize._cache_enabled, parametrize._cache)
    depth, entries = cache or (0, {})
    parametrize._cache_enabled, parametrize._cache = depth, dict(entries)
    return previous


def restore_cache(previous: Cache) -> None:
    """Put back the very cache that `swap_cache` gave."""
    assert previous is not None
    parametrize._cache_enabled, parametrize._cache = previous
