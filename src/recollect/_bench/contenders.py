"""The contenders: plain steps, recollect at several budgets, and what people use instead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from recollect._apply.blocks import find_blocks
from recollect._bench.rivals import (
    Call,
    StashingOffloader,
    TrlOffloader,
    call_reentrant,
    call_remat,
    call_selective,
    call_torch,
    find_package,
    plan_by_xformers,
)
from recollect._core.plans import Plan
from recollect._core.torch_private.memory_budget import use_memory_budget

PLAIN, OURS = "plain", "recollect"
COMPILER_SHARES = (0.8, 0.5, 0.3, 0.1)
"""What the compiler's own planner is given."""
BUDGET_SHARES = (0.7, 0.4, 0.2)
"""What xformers' planner is given."""
_MISSING = "not installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way of running a model's step.

    Attributes:
        name: that tables show.
        family: whose it is.
        prepare: changes a model in place, once.
        around: what forward runs in.
        compiling: what the first steps, in which a compiler works, run in.
        options: of the compiler.
        plan: of ours.
        tiers: where plans of ours may send values to.
        absent: why it cannot run here; ``""`` if it can.
    """

    name: str
    family: str = "torch"
    prepare: Callable[[nn.Module], object] = lambda model: None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    compiling: Callable[[], AbstractContextManager[Any]] = nullcontext
    options: Mapping[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    tiers: str | None = None
    absent: str = ""


def list_contenders(ours: Sequence[Contender], device: torch.device, *, is_compiled: bool) -> list[Contender]:
    """All contenders for a mode and a device: the plain step, ours, and the rivals.

    Args:
        ours: see `recollect._bench.ours`.
        device: where steps run.
        is_compiled: whether models are compiled.
    """
    return [Contender(name=PLAIN), *ours, *_list_rivals(device, is_compiled=is_compiled)]


def _list_rivals(device: torch.device, *, is_compiled: bool) -> Iterator[Contender]:
    yield Contender(name="torch full", prepare=_wrapping(_calling(call_torch)))
    yield Contender(name="torch every 2nd block", prepare=_wrapping(_calling(call_torch), every=2))
    yield Contender(name="torch SAC (torchtitan's list)", prepare=_wrapping(_calling(call_selective)))
    if is_compiled:
        for share in COMPILER_SHARES:
            compiling = functools.partial(use_memory_budget, share)
            yield Contender(name=f"activation_memory_budget {share}", compiling=compiling)
        return
    yield Contender(name="torch reentrant", prepare=_wrapping(_calling(call_reentrant)))
    yield _find_remat(device)
    yield from _find_planners(device)
    yield from _list_offloaders(device)


def _find_remat(device: torch.device) -> Contender:
    remat = find_package("torch_remat")
    if remat is None:
        return Contender(name="torch_remat", family="torch_remat", absent=_MISSING)
    return Contender(name="torch_remat", family="torch_remat", prepare=_wrapping(_calling(call_remat(remat, device))))


def _find_planners(device: torch.device) -> Iterator[Contender]:
    xformers = find_package("xformers.checkpoint") if device.type == "cuda" else None
    for share in BUDGET_SHARES:
        name = f"xformers' planner {share}"
        if xformers is None:
            absent = _MISSING if device.type == "cuda" else "its planner measures on CUDA devices only"
            yield Contender(name=name, family="xformers", absent=absent)
        else:
            yield Contender(name=name, family="xformers", prepare=_wrapping(plan_by_xformers(xformers, share)))


def _list_offloaders(device: torch.device) -> Iterator[Contender]:
    if device.type == "cpu":
        for name in ("save_on_cpu", "TRL's offload"):
            yield Contender(name=name, family="offload", absent="the step runs in host memory already")
        return
    yield Contender(name="save_on_cpu", family="offload", around=functools.partial(save_on_cpu, pin_memory=True))
    trl = find_package("trl.models.activation_offloading")
    if trl is None:
        stash = StashingOffloader()  # one for all steps: it has a stream of its own
        yield Contender(name="TRL-style offload", family="offload", around=lambda: stash)
    else:
        theirs = TrlOffloader(trl)
        yield Contender(name="TRL's offload", family="offload", prepare=theirs.prepare, around=theirs.around)


def _wrapping(wrap: Callable[[Call], Call], *, every: int = 1) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        for block in find_blocks(model)[::every]:
            block.forward = wrap(block.forward)

    return prepare


def _calling(call: Call) -> Callable[[Call], Call]:
    return lambda forward: functools.partial(call, forward)
