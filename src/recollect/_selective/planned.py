"""A frame that follows a plan: in backward it replays what is asked for, in place of running its function again."""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from recollect._core.torch_private.ambient import any_autocast_enabled
from recollect._core.torch_private.engine import (
    current_pass,
    get_group,
    pass_keeps_graph,
    set_grad_enabled,
    when_pass_ends,
)
from recollect._recompute.frame import Expiry, Frame, Options
from recollect._recompute.slots import Handed, Slot
from recollect._selective.plan import HELD, Bound, Plan
from recollect._selective.replay import Replay
from recollect._selective.take import HeldSlot, PlannedSlot


class PlannedFrame(Frame):
    """One execution that may have a plan; without one it is as any frame. Subclasses set `_plan` and `_bound`."""

    __slots__ = ("_bound", "_is_as_before", "_plan", "_replay")

    def __init__(self, name: str, fn: Callable[..., Any], options: Options) -> None:
        super().__init__(name, fn, options)
        self._plan: Plan | None = None
        self._bound: Bound | None = None
        self._replay: Replay | None = None
        self._is_as_before = False

    def _begin(self) -> None:
        """A pass asks for the first time: all forwards of the step are over."""

    def _live(self) -> Iterator[PlannedSlot]:
        for weak in self.slots:
            slot = weak()
            if isinstance(slot, PlannedSlot):
                yield slot

    def fetch(self, slot: Slot) -> Tensor:
        """Give the value of a slot, by replay if there is a plan."""
        plan = self._plan
        if plan is None or self.is_open:
            if len(self.metas) < len(self.slots):  # a backward inside the function: it will not go as planned
                self.metas += [None] * (len(self.slots) - len(self.metas))
            return super().fetch(slot)
        assert isinstance(slot, PlannedSlot)
        if plan.sources[slot.index] is HELD:
            assert isinstance(slot, HeldSlot)
            return self._checked(slot, slot.held)
        with self.lock:
            pass_id = current_pass()
            if self.filled_by != pass_id:
                return self._fetch_otherwise(plan, slot, pass_id)
            return self._fetch_now(plan, slot, pass_id)

    def _fetch_otherwise(self, plan: Plan, slot: PlannedSlot, pass_id: int) -> Tensor:
        """The first request of a pass; or one in a group of passes, or from outside of any."""
        if pass_id == -1:
            return self._replay_one(plan, slot)
        group = get_group()
        key = pass_id if group is None else group
        if self.filled_by != key:
            self._begin_pass(plan, key, group)
        return self._fetch_now(plan, slot, pass_id)

    def _fetch_now(self, plan: Plan, slot: PlannedSlot, pass_id: int) -> Tensor:
        """A request of the pass that the replay belongs to."""
        value = slot.value
        if value is not None:
            return value
        if slot.kept is not None:
            return self._fetch_again(plan, slot, pass_id)
        assert self._replay is not None
        value = self._take_from(self._replay, slot)
        if self.keeps_graph:
            slot.kept, slot.value = Handed(value, pass_id), None
        else:
            slot.value, slot.version = value, value._version  # noqa: SLF001
        return value

    def _fetch_again(self, plan: Plan, slot: PlannedSlot, pass_id: int) -> Tensor:
        """A value that was handed over in this pass, or in another one of its group."""
        kept = slot.kept
        assert isinstance(kept, Handed)
        again = kept.again() if kept.pass_id == pass_id else None
        if again is not None:
            return again
        if get_group() is not None and kept.pass_id != pass_id:
            self._refuse_overlap()
        return self._replay_one(plan, slot)

    def _begin_pass(self, plan: Plan, key: Any, group: Any) -> None:
        self._begin()
        if self.was_filled:
            self._empty()
        self.was_filled = True
        self.is_home = get_ident() == self.thread
        self.keeps_graph = group is not None or pass_keeps_graph()
        self.is_differentiated = self.is_differentiated or torch.is_grad_enabled()
        is_last = self._is_last()
        live = [weak() is not None for weak in self.slots]
        self._replay = self._new_replay(plan, live, is_last=is_last)
        ambient = self.around.restore_ambient()
        self._is_as_before = ambient is None and not any_autocast_enabled()
        if ambient is not None:
            ambient.close()
        self.filled_by = key
        if is_last:
            self._release()
        if group is not None:
            group.filled(self)
        elif not is_last:
            when_pass_ends(Expiry(self, key))

    def _new_replay(self, plan: Plan, live: list[bool], *, is_last: bool) -> Replay:
        assert self._bound is not None
        if self.inputs is None:
            self._left_over(PlannedSlot())
        assert self.inputs is not None
        bound = self._bound
        if all(live):
            uses = list(plan.uses)
        else:
            uses = plan.count_uses([index for index, is_live in enumerate(live) if is_live], bound.held)
            if is_last:
                bound.held = [held if count else None for held, count in zip(bound.held, uses, strict=True)]
        leaves, slots = self.inputs.materialise(self.name), self.slots

        def fill(index: int, value: Tensor) -> None:
            slot = slots[index]()
            if slot is not None:
                slot.value, slot.version = value, value._version  # noqa: SLF001

        return Replay(self.name, plan, bound, leaves, uses, is_last=is_last, fill=fill)

    def _replay_one(self, plan: Plan, slot: PlannedSlot) -> Tensor:
        """For one slot alone, and keep nothing."""
        replay = self._new_replay(plan, [weak() is slot for weak in self.slots], is_last=False)
        before = [(live, live.value) for live in self._live()]
        try:
            return self._take_from(replay, slot)
        finally:
            for live, value in before:
                live.value = value

    def _empty(self) -> None:
        for slot in self._live():
            slot.value = slot.kept = None

    def _take_from(self, replay: Replay, slot: PlannedSlot) -> Tensor:
        """The value of a slot, made under what was around forward.

        Whether that stands as it stood is seen once per pass; only autocast may be switched by a node (`custom_bwd`).
        """
        grad_was_enabled = torch.is_grad_enabled()
        ambient = None
        if not self._is_as_before or any_autocast_enabled():
            ambient = self.around.restore_ambient()
        if grad_was_enabled:
            set_grad_enabled(False)
        try:
            value = replay.take(slot.index)
        finally:
            if ambient is not None:
                ambient.close()
            if grad_was_enabled:
                set_grad_enabled(True)
        if value is None:  # an inner one, which is in the slot
            value = slot.value
            assert value is not None
        return value

    def expire(self) -> None:
        """The pass is over."""
        super().expire()
        self._replay = None
