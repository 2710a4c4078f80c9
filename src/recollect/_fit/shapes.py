"""Which plan is in force on a model, by the shapes that it is called with; a safe one for shapes that nobody tried."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from recollect._apply.handle import Applied
from recollect._apply.model import apply
from recollect._apply.watches import ForwardWatch
from recollect._core.levers import MICRO_BATCHES
from recollect._core.plans import Plan
from recollect._core.torch_private.pytree import tree_leaves

_log = logging.getLogger("recollect")

_WITH_LARGEST = "Fit it with its largest batch, or with several: recollect.fit(model, [batch, larger_batch], ...)"
_WITH_SAME_INPUTS = "Fit it with the same inputs, or with several: recollect.fit(model, [batch, other_batch], ...)"
_IN_PARTS = "It was fitted to run in micro-batches: fitted.forward_backward(batch) cuts the batch and runs them"

Shapes = tuple[tuple[int, ...], ...]
"""Of the tensors that a model is called with, but for single numbers."""


def shapes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes:
    """The shapes of all tensors among arguments; those of keywords in the order of their names.

    Single numbers are left out: a trainer's count of the targets makes no call larger.
    """
    leaves = tree_leaves([list(args), [kwargs[name] for name in sorted(kwargs)]])
    return tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())


def covers(known: Shapes, asked: Shapes) -> bool:
    """Whether nothing of what is asked for is larger than what is known.

    >>> covers(((8, 512),), ((4, 512),)), covers(((8, 512),), ((2, 1024),))
    (True, False)
    """
    return are_alike(known, asked) and all(
        size <= most for one, other in zip(known, asked, strict=True) for size, most in zip(other, one, strict=True)
    )


def are_alike(one: Shapes, other: Shapes) -> bool:
    """Whether they are as many tensors, of as many dimensions each.

    >>> are_alike(((8, 512),), ((2, 1024),)), are_alike(((8, 512), (8, 512)), ((8, 512),))
    (True, False)
    """
    return [len(shape) for shape in one] == [len(shape) for shape in other]


@dataclass(slots=True, kw_only=True)
class SeenShapes:
    """The shapes that a model was called with while it was watched."""

    shapes: set[Shapes] = field(default_factory=set)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Note them meanwhile."""
        handle = model.register_forward_pre_hook(self._note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _note(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.shapes.add(shapes_of(args, kwargs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A plan, and the shapes that it was measured with."""

    shapes: frozenset[Shapes]
    plan: Plan

    def covers(self, asked: Shapes) -> bool:
        """Whether it was measured with something at least as large."""
        return any(covers(known, asked) for known in self.shapes)


class PlanSwitch(ForwardWatch):
    """Looks at each training call of a model before it runs, and puts the plan in force that is for its shapes.

    A hook of the model's, which holds no reference to it. Copies of the model, deep or pickled, keep the regions that
    were in force, without the switch.

    Args:
        buckets: plans with their shapes; the first that covers a call is taken.
        safe: for calls that none covers: the plan with the smallest peak.
    """

    def __init__(self, buckets: Sequence[Bucket] = (), safe: Plan | None = None) -> None:
        self._buckets, self._safe = tuple(buckets), safe
        self._ready: dict[int, tuple[Plan, Applied]] = {}  # by the id of a plan: its regions; one plan's are in place
        self._current: Plan | None = None
        self._handle: RemovableHandle | None = None
        self._has_told = False
        self.is_removed = False

    def start(self, model: nn.Module, current: Plan, ready: Iterable[tuple[Plan, Applied]]) -> Self:
        """Watch a model on which one of several plans is in force; the regions of the others wait."""
        self._ready, self._current = {id(plan): (plan, applied) for plan, applied in ready}, current
        self._handle = model.register_forward_pre_hook(self, with_kwargs=True, prepend=True)
        return self

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called by torch before the model runs."""
        if is_compiling() or self.is_removed or self._safe is None or not (model.training and torch.is_grad_enabled()):
            return
        asked = shapes_of(args, kwargs)
        if not asked or self.finds_it_removed():
            return
        wanted = next((bucket.plan for bucket in self._buckets if bucket.covers(asked)), self._safe)
        if wanted is self._safe and not self._has_told:
            self._has_told = True
            is_larger = any(are_alike(known, asked) for bucket in self._buckets for known in bucket.shapes)
            is_cut = any(lever.name == MICRO_BATCHES for lever in wanted.levers)
            _log.warning(
                "recollect.fit: %s was called with %s, %s it was fitted with: it now runs under the plan with the "
                "smallest peak, and whether that fits was not measured. %s",
                type(model).__name__,
                ", ".join(map(str, map(list, asked))),
                "larger than anything" if is_larger else "other inputs than",
                _IN_PARTS if is_cut else _WITH_LARGEST if is_larger else _WITH_SAME_INPUTS,
            )
        self.put(model, wanted)

    def put(self, model: nn.Module, plan: Plan) -> None:
        """Put a plan in force; the regions of the one before wait, with what they have learned."""
        if plan is self._current or self._current is None or self.finds_it_removed():
            return
        self._ready[id(self._current)][1].pause()
        if id(plan) in self._ready:
            self._ready[id(plan)][1].resume()
        else:
            self._ready[id(plan)] = (plan, apply(model, plan))
        self._current = plan

    def finds_it_removed(self) -> bool:
        """Whether `recollect.remove` has taken the regions away: the model is to be plain."""
        if self._current is not None and self._ready[id(self._current)][1].is_removed:
            self.is_removed = True
        return self.is_removed

    def replace(self, model: nn.Module, old: Plan, new: Plan) -> None:
        """Let a plan have the place of another one, for good."""
        self._buckets = tuple(
            Bucket(shapes=bucket.shapes, plan=new if bucket.plan is old else bucket.plan) for bucket in self._buckets
        )
        self.put(model, new)
        if self._current is not old:
            self._ready.pop(id(old), None)

    @property
    def current(self) -> Plan | None:
        """The plan that is in force."""
        return self._current

    def remove(self) -> None:
        """Take the plan away, and look no more."""
        self.is_removed = True
        if self._handle is not None:
            self._handle.remove()
        for _, applied in self._ready.values():
            applied.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> PlanSwitch:
        return PlanSwitch()

    def __reduce__(self) -> tuple[type[PlanSwitch], tuple[()]]:
        return PlanSwitch, ()
