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
    pass_keeps_graph,
    set_grad_enabled,
    when_pass_ends,
)
from recollect._core.torch_private.nodes import node_runs_in_part
from recollect._recompute.frame import Expiry, Frame, Options
from recollect._recompute.group import Sharing, current_sharing
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
        group = current_sharing()
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
            return self._hand_over(slot, value, pass_id)
        if value is None:  # an inner one, which is in the slot
            value = slot.value
            assert value is not None
        else:
            slot.value, slot.version = value, value._version  # noqa: SLF001
        return value

    def _fetch_again(self, plan: Plan, slot: PlannedSlot, pass_id: int) -> Tensor:
        """A value that was made, or handed over, in this pass or in another one of its group."""
        kept = slot.kept
        if not isinstance(kept, Handed):
            return self._hand_over(slot, None, pass_id)
        again = kept.again() if kept.pass_id == pass_id else None
        if again is not None:
            return again
        group = current_sharing()
        if group is not None and kept.pass_id != pass_id and group.refuses_overlap:
            self._refuse_overlap()
        return self._replay_one(plan, slot)

    def _hand_over(self, slot: PlannedSlot, value: Tensor | None, pass_id: int) -> Tensor:
        """Where the graph is kept: a new value or the slot's own; it goes unless a call of the group needs it again."""
        if value is None:
            assert not isinstance(slot.kept, Handed)
            value = self._checked(slot, slot.kept)
        else:
            slot.version = value._version  # noqa: SLF001
        is_needed_again = current_sharing() is not None and node_runs_in_part()
        slot.kept = value if is_needed_again else Handed(value, pass_id)
        return value

    def _begin_pass(self, plan: Plan, key: Any, group: Sharing | None) -> None:
        self._begin()
        if self.was_filled:
            self._empty()
        self.was_filled = True
        self.is_home = get_ident() == self.thread
        self.keeps_graph = group is not None or pass_keeps_graph()
        self.is_differentiated = self.is_differentiated or torch.is_grad_enabled()
        is_last = self._is_last()
        live = [weak() is not None for weak in self.slots]
        self._replay = self._new_replay(plan, live, self._filler(), is_last=is_last)
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

    def _filler(self) -> Callable[[int, Tensor], None]:
        """What takes the inner saved tensors of a call, which come all at once; holds no frame."""
        slots, keeps_graph = self.slots, self.keeps_graph

        def fill(index: int, value: Tensor) -> None:
            slot = slots[index]()
            if slot is None or slot.kept is not None:
                return
            slot.version = value._version  # noqa: SLF001
            if keeps_graph:
                slot.kept = value
            else:
                slot.value = value

        return fill

    def _new_replay(
        self, plan: Plan, live: list[bool], fill: Callable[[int, Tensor], None], *, is_last: bool
    ) -> Replay:
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
        leaves = self.inputs.materialise(self.name)
        return Replay(self.name, plan, bound, leaves, uses, is_last=is_last, fill=fill)

    def _replay_one(self, plan: Plan, slot: PlannedSlot) -> Tensor:
        """For one slot alone, and keep nothing."""
        inner: dict[int, Tensor] = {}
        replay = self._new_replay(plan, [weak() is slot for weak in self.slots], inner.__setitem__, is_last=False)
        value = self._take_from(replay, slot)
        return inner[slot.index] if value is None else value

    def _take_from(self, replay: Replay, slot: PlannedSlot) -> Tensor | None:
        """The value of a slot, made under what was around forward; None for an inner one, which was given to `fill`.

        Whether that stands as it stood is seen once per pass; only autocast may be switched by a node (`custom_bwd`).
        """
        grad_was_enabled = torch.is_grad_enabled()
        ambient = None
        if not self._is_as_before or any_autocast_enabled():
            ambient = self.around.restore_ambient()
        if grad_was_enabled:
            set_grad_enabled(False)
        try:
            return replay.take(slot.index)
        finally:
            if ambient is not None:
                ambient.close()
            if grad_was_enabled:
                set_grad_enabled(True)

    def expire(self) -> None:
        """The pass is over."""
        super().expire()
        self._replay = None
