"""The engines that benchmarks compare, each called the way its own documentation calls it.

All of them preserve random state and check the metadata of recomputed tensors, except where a name says otherwise.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

import recollect
from recollect._bench.rivals import Call, call_reentrant, call_remat, call_torch, find_package

torch_remat: Any = find_package("torch_remat")
OURS = "recollect"
OURS_WRAPPING = "recollect, wrapped at each call"
TORCH = "torch"
BARE = "bare hooks"
REMAT = "torch_remat"
REMAT_BARE = "torch_remat, no RNG or checks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One way of running a region, and what it can do."""

    name: str
    call: Call
    nests: bool = True
    takes_keywords: bool = True
    preserves_rng: bool = True


def plain(function: Call, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _ours_at_each_call(function: Call, *args: Any, **kwargs: Any) -> Any:
    return recollect.checkpoint(function)(*args, **kwargs)


def ours(**options: Any) -> Call:
    """Our engine; each function is wrapped once, as `recollect.apply` and decorators do."""

    @lru_cache(maxsize=256)
    def region_of(function: Call) -> Call:
        return recollect.checkpoint(function, **options)

    def call(function: Call, *args: Any, **kwargs: Any) -> Any:
        return region_of(function)(*args, **kwargs)

    return call


def ours_keeping(policy: Any) -> Call:
    """Our engine with a policy."""
    return ours(policy=policy)


def torch_keeping(contexts: Callable[[], Any]) -> Call:
    """torch's engine with selective contexts, made anew for each region."""

    def call(function: Call, *args: Any, **kwargs: Any) -> Any:
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return call


def _remat_bare(function: Call, *args: Any, **kwargs: Any) -> Any:
    return torch_remat.checkpoint()(function)(*args, **kwargs)


class _Enough(Exception):  # noqa: N818 (no failure: all that backward asks for is there)
    pass


def _bare_hooks(function: Call, *args: Any, **kwargs: Any) -> Any:
    """The least that hooks can do: handles that are integers, and an early stop; no random state, no checks."""
    inputs = [arg.detach().requires_grad_(arg.requires_grad) if isinstance(arg, torch.Tensor) else arg for arg in args]
    found: list[Any] = []
    count = 0

    def pack(_: torch.Tensor) -> int:
        nonlocal count
        count += 1
        return count - 1

    def pack_again(tensor: torch.Tensor) -> None:
        found.append(tensor)
        if len(found) == count:
            raise _Enough

    def unpack(handle: int) -> torch.Tensor:
        if not found:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack_again, _never), suppress(_Enough):
                function(*inputs, **kwargs)
        result: torch.Tensor = found[handle]
        found[handle] = None
        return result

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return function(*args, **kwargs)


def _never(_: None) -> torch.Tensor:
    raise AssertionError


def engines(device: torch.device) -> list[Engine]:
    """Every engine that can be imported here, ours first."""
    found = [
        Engine(name=OURS, call=ours()),
        Engine(name=OURS_WRAPPING, call=_ours_at_each_call),
        Engine(name=BARE, call=_bare_hooks, nests=False, preserves_rng=False),
        Engine(name=TORCH, call=call_torch),
        Engine(name="torch reentrant", call=call_reentrant, takes_keywords=False),
    ]
    if torch_remat is not None:
        found += [
            Engine(name=REMAT, call=call_remat(torch_remat, device), nests=False),
            Engine(name=REMAT_BARE, call=_remat_bare, nests=False, preserves_rng=False),
        ]
    return found


def missing() -> list[str]:
    """What is left out, in words."""
    return [] if torch_remat is not None else ["torch_remat cannot be imported: skipped"]
