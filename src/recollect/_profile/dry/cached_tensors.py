"""Fake tensors that functions keep by `functools.lru_cache`, as models do with tables of positions.

A later step would be given them. Such a cache is emptied: its function computes again what it is asked for.
"""

from __future__ import annotations

import functools
import gc
import sys
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from recollect._core.reachable import read_cell
from recollect._core.torch_private.fake import is_fake

_Cached = type(functools.lru_cache(int))
_HOLDERS = (dict, list, tuple)
_ENTRY = "_lru_list_elem"  # what a cache of limited size holds its results in


class CachedTensors:
    """How often each cached function had been run when this was made; 0.1 s with all of Transformers imported."""

    def __init__(self) -> None:
        self._before = {id(cached): (cached, cached.cache_info().misses) for cached in _list_cached()}

    def let_go(self) -> None:
        """Empty the caches that have fake tensors by now."""
        for cached in _list_cached():
            _, misses = self._before.get(id(cached), (None, 0))
            if cached.cache_info().misses != misses and _has_fake(cached):
                cached.cache_clear()


def _list_cached() -> list[Any]:
    found = [thing for thing in gc.get_objects() if type(thing) is _Cached]
    return found + _list_frozen() if gc.get_freeze_count() else found


def _list_frozen() -> list[Any]:
    """Cached functions of modules and classes, which the collector does not show if the user has frozen what there is.

    Those inside of another decorator's function, too.
    """
    found: dict[int, Any] = {}
    for module in list(sys.modules.values()):
        names = list(vars(module).values()) if type(module) is ModuleType else []
        kinds = [value for value in names if issubclass(type(value), type)]  # asks nothing of objects that pretend
        for value in [*names, *(part for kind in kinds for part in vars(kind).values())]:
            cells = (value.__closure__ or ()) if type(value) is FunctionType else ()
            inside = [part for cell in cells for part in read_cell(cell)]
            found.update((id(part), part) for part in (value, *inside) if type(part) is _Cached)
    return list(found.values())


def _has_fake(cached: Any) -> bool:
    seen: set[int] = set()
    waiting = [cached]
    while waiting:
        for part in gc.get_referents(waiting.pop()):
            if isinstance(part, Tensor):
                if is_fake(part):
                    return True
            elif id(part) not in seen and (isinstance(part, _HOLDERS) or type(part).__name__ == _ENTRY):
                seen.add(id(part))
                waiting.append(part)
    return False
