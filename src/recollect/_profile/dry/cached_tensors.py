"""Fake tensors that functions keep by `functools.lru_cache`, as models do with tables of positions.

A later step would be given them. Such a cache is emptied: its function computes again what it is asked for.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from recollect._core.reachable import find_reachable
from recollect._core.torch_private.fake import is_fake

_Cached = type(functools.lru_cache(int))
_HOLDERS = (dict, list, tuple)
_NOT_SEARCHED = ("builtins", "torch.nn.modules.", "recollect.")


class CachedTensors:
    """The cached functions that a step can call, and how often each had run when this was made.

    Looked at are the functions that the step leads to, and those of the modules' classes.
    """

    def __init__(self, modules: Iterable[nn.Module], step: Callable[..., Any] | None = None) -> None:
        called = [*_methods_of(modules), *([] if step is None or isinstance(step, nn.Module) else [step])]
        found = find_reachable(_Cached, _do_nothing, called)
        inner = find_reachable(_Cached, _do_nothing, [getattr(cached, "__wrapped__", None) for cached in found])
        self._before = [(cached, cached.cache_info().misses) for cached in dict.fromkeys([*found, *inner])]

    def let_go(self) -> None:
        """Empty the caches that have got fake tensors since."""
        for cached, misses in self._before:
            if cached.cache_info().misses != misses and _has_fake(cached):
                cached.cache_clear()


def _methods_of(modules: Iterable[nn.Module]) -> Iterator[Any]:
    kinds = dict.fromkeys(kind for module in modules for part in module.modules() for kind in type(part).__mro__)
    for kind in kinds:
        if not kind.__module__.startswith(_NOT_SEARCHED):
            for value in vars(kind).values():
                yield value.fget if isinstance(value, property) else value


def _do_nothing() -> None:
    pass


def _has_fake(cached: Any) -> bool:
    seen: set[int] = set()
    waiting = [cached]
    while waiting:
        for part in gc.get_referents(waiting.pop()):  # results among them
            if isinstance(part, Tensor):
                if is_fake(part):
                    return True
            elif id(part) not in seen and isinstance(part, _HOLDERS):
                seen.add(id(part))
                waiting.append(part)
    return False
