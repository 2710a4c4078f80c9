"""One execution of a region under a policy: learns at the first call of its kind, then runs the lightest way there is.

The first call runs under a dispatch mode, which asks the policy about every site, and under the tape. What it finds
decides how it and later calls are recomputed:

* only blocks are kept: the function runs again and skips them, without any mode (`blocks.py`);
* single operators are kept, and the tape can be believed: what is needed is replayed (`take.py`, `replay.py`);
* single operators are kept, and it cannot: the function runs again under a dispatch mode (`watch.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from recollect._core.authors import Role
from recollect._core.errors import CheckpointError
from recollect._core.pytree import Arguments
from recollect._core.torch_private.ambient import function_mode_depth
from recollect._core.torch_private.collectives import count_collectives
from recollect._core.torch_private.dispatch import without_dispatch_modes
from recollect._core.torch_private.engine import (
    top_hooks,
)
from recollect._recompute.frame import Options, read_meta
from recollect._recompute.oplog import OpLog
from recollect._recompute.rng import sources_by_request
from recollect._recompute.slots import Slot, frame_of
from recollect._recompute.values import digest
from recollect._selective.blocks import Again, Forward
from recollect._selective.ledger import Clerk, Ledger
from recollect._selective.matches import warn_unmatched
from recollect._selective.notes import TALKS_AT_TIMES, Notes
from recollect._selective.pins import pins_within
from recollect._selective.plan import HELD, Bound, Plan
from recollect._selective.planned import PlannedFrame
from recollect._selective.replay import Replay
from recollect._selective.shelf import Shelf, Slipped
from recollect._selective.take import HeldSlot, Take
from recollect._selective.tape import Tape
from recollect._selective.watch import AgainWatch, ChoiceWatch, ForwardWatch

_MOST_BREAKS = 3

__recollect_role__ = Role.REGION


class SelectiveFrame(PlannedFrame):
    """One execution of a region under a policy."""

    __slots__ = (
        "_again",
        "_clerk",
        "_heard",
        "_is_pinned",
        "_ledger",
        "_notes",
        "_take",
        "_tape",
        "_watch",
    )

    def __init__(self, name: str, fn: Callable[..., Any], options: Options, notes: Notes, ledger: Ledger) -> None:
        super().__init__(name, fn, options)
        self._notes, self._ledger = notes, ledger
        self._tape: Tape | None = None
        self._take: Take | None = None
        self._again: Again | None = None
        self._clerk: Clerk | None = None
        self._watch: ForwardWatch | None = None
        self._is_pinned = False
        self._heard = -1  # how many collectives this process had made at entry; -1 where they are seen anyway

    def _make_sides(self, arguments: Arguments) -> tuple[Forward | Take, AbstractContextManager[Any]] | None:
        notes, ledger = self._notes, self._ledger
        hooks = top_hooks(True)  # noqa: FBT003
        is_bare = not (notes.wanted.taps or ledger.blocks or notes.sees_names)
        if is_bare and ledger.is_learned and not (ledger.keeps_ops or notes.talks_at_times):
            if hooks is None or frame_of(hooks[0]) is None:
                self._heard = count_collectives()
                return None  # it keeps nothing: as any frame
        elif ledger.plan is not None and is_bare and self._may_tape():
            self._heard = count_collectives()
            take = self._take = Take(ledger.plan, notes_choices=notes.keeps_defaults)
            take.begin(arguments)
            return take, nullcontext()
        pins = pins_within(hooks)
        shelf = Shelf(self.name, pins)
        scopes: list[str] = []
        self._is_pinned = pins is not None and pins.keys is not None
        is_new = not ledger.is_learned
        watch = again = None
        recorder: Tape | Take | None = None
        if self._may_tape():
            if ledger.plan is None:
                recorder = self._tape = Tape()
            else:
                recorder = self._take = Take(ledger.plan, notes_choices=notes.keeps_defaults)
            recorder.begin(arguments)
        is_exact = self.options.matcher.values is not None
        if pins is not None and self._is_pinned:
            if pins.has_ops:
                watch = ForwardWatch(shelf, pins.decide, own=notes.buffers(), is_exact=is_exact)
                again = AgainWatch(shelf)
        elif is_new or (ledger.keeps_ops and self._take is None) or notes.talks_at_times:
            clerk = self._clerk = Clerk(ledger, notes.places(), scopes, self._tape)
            noting = is_new or bool(ledger.named)
            watch = ForwardWatch(
                shelf,
                clerk.decide,
                notes_makers=noting,
                own=notes.buffers(),
                is_exact=is_exact,
                tracks_memory=is_new or ledger.fills,
            )
            again = AgainWatch(shelf)
        else:
            self._heard = count_collectives()
        self._again = Again(shelf, notes.wanted, ledger, watch=again)
        forward = Forward(
            shelf,
            notes.wanted,
            ledger,
            watch=watch,
            recorder=recorder,
            scopes=scopes,
            generators=sources_by_request(self.options.preserve),
            modules=self.around.modules,
        )
        self._watch = watch
        return forward, self._again

    def _may_tape(self) -> bool:
        """Whether recording is worth it: it must be the only one to pack, and see calls as the user makes them."""
        ledger = self._ledger
        if not ledger.may_tape or (not ledger.is_learned and self._notes.holds_compiled()):
            return False
        if not ledger.is_learned and self._notes.runs_units(self.fn):
            ledger.may_tape, ledger.why_not_taped = False, "it calls FSDP units, whose parameters come and go"
            return False
        if function_mode_depth() or top_hooks(True) is not None:  # noqa: FBT003
            return False
        if self.around.is_captured and (ledger.plan is None or ledger.plan.draws):
            return False  # while a CUDA graph is captured, generators cannot be read, and nothing can be compared
        return self.options.matcher.values is None

    def pack(self) -> Callable[[Tensor], Slot]:
        """The saved-tensor hook of forward: as in any frame, and whoever records is told."""
        if self._take is not None:
            return self._take.packer(self)
        if self._watch is None or self._again is None:
            return super().pack()
        tally = self._again.shelf.tally
        if self._tape is None:
            make = super().pack()

            def mark(tensor: Tensor) -> Slot:
                tally.marks.append(tally.count)
                return make(tensor)

            return mark
        note_saved, slots, add_meta = self._tape.note_saved, self.slots, self.metas.append

        def pack(tensor: Tensor) -> Slot:
            tally.marks.append(tally.count)
            add_meta(read_meta(tensor))
            note_saved(tensor)
            slot = HeldSlot()  # whether it holds its tensor is learned when forward is over
            slot.frame, slot.value, slot.kept, slot.index = self, None, None, len(slots)
            slots.append(ref(slot))
            return slot

        return pack

    def _settle(self, result: Any) -> None:
        super()._settle(result)
        ledger, clerk = self._ledger, self._clerk
        draws, saved = self.around.draws, len(self.slots)
        watch, self._watch = self._watch, None
        if watch is not None:
            ledger.has_backward = ledger.has_backward or watch.saw_backward
            ledger.gathers = ledger.gathers or watch.saw_gather
        if self._again is not None:
            # Without knowing where the generators stood after each block, a region that draws must run them all again.
            self._again.knows_states = (ledger.draws is not False or not draws) and not ledger.has_backward
        ledger.draws = bool(ledger.draws) or draws
        is_as_learned = saved == ledger.saved and not ledger.is_stale
        is_as_learned = is_as_learned and not self._has_talked()
        if self._take is not None:
            is_as_learned = self._settle_take(self._take) and is_as_learned
        if self._is_pinned:
            pass  # what it keeps was decided elsewhere: there is nothing to learn
        elif clerk is None and is_as_learned:
            ledger.unwatched += 1
        elif clerk is None:
            ledger.forget()
        elif clerk.has_asked or not ledger.is_learned:
            ledger.is_learned, ledger.saved = True, saved
            ledger.keeps_ops = any(line.is_kept for line in ledger.lines)
            ledger.fills = any(line.fills for line in ledger.lines)
        if self._tape is not None:
            self._settle_tape(self._tape)
        if self._plan is not None:
            self._again = self.recompute_context = None  # all that is kept is bound
        self._clerk = None

    def _has_talked(self) -> bool:
        """Whether it talked to other processes though it did not when it was learned: that is noted, and breaks a plan.

        What came from them was not kept, so recomputation talks again: on this rank, and on every other that learned
        alike. One that learns at this very call has kept it, and they would wait for each other.
        """
        if self._heard < 0 or count_collectives() == self._heard:
            return False
        if self._ledger.gathers or self._notes.runs_units(self.fn):
            return False  # parameters are gathered where they are needed
        self._notes.note_talk()
        if self._take is not None:
            self._take.why_broken = TALKS_AT_TIMES
        return True

    def fail(self, error: BaseException) -> bool:
        """The function has raised: let go of what was held for learning, then as any frame."""
        if self._tape is not None:
            self._tape.forget()
        if self._take is not None:
            self._take.part()
        return super().fail(error)

    # Learning a plan, and following it.
    def _settle_tape(self, tape: Tape) -> None:
        ledger = self._ledger
        tape.check_versions()
        modules = self.around.modules
        if modules is not None and modules.moves_any(tape.tensors):
            tape.broken("it reads buffers that it updates")  # the next forward moves them on
        if ledger.gathers:
            tape.broken("it gathers parameters, which come and go")
        if not ledger.keeps_ops:
            tape.broken("no single operator is kept")
        if not ledger.may_tape:
            tape.broken("it calls compiled code, which would run uncompiled under a tape")
        if tape.why_broken is None:
            assert self._clerk is not None
            sorts = self._clerk.sort_calls(tape, draws=self.around.draws)
            if tape.why_broken is None:
                self._try(tape, *tape.plan(*sorts))
        ledger.may_tape, ledger.why_not_taped = tape.why_broken is None, tape.why_broken
        if tape.why_broken is None:
            ledger.plan = self._plan
        else:
            self._drop_plan()
        tape.forget()
        self._tape = None

    def _settle_take(self, take: Take) -> bool:
        """Whether the plan was followed."""
        ledger = self._ledger
        take.conclude(self.around.moved_states())
        self._take = None
        choices, bound = take.choices, take.part()
        if take.why_broken is None:
            self._plan, self._bound = take.plan, bound
            self.metas = take.plan.metas
            return True
        self.metas += [None] * (len(self.slots) - len(self.metas))
        if choices and self._again is None:
            self.recompute_context = ChoiceWatch(choices)
        elif choices and self._again is not None:
            self._again.watch = ChoiceWatch(choices)
        self._drop_plan()
        ledger.breaks += 1
        # A region that is never the same is not worth learning again.
        ledger.may_tape = ledger.breaks < _MOST_BREAKS and not self._notes.talks_at_times
        ledger.why_not_taped = take.why_broken
        return False

    def _drop_plan(self) -> None:
        self._plan = self._bound = None
        for slot in self._live():
            slot.value = None
            if isinstance(slot, HeldSlot) and hasattr(slot, "held"):
                del slot.held

    def _try(self, tape: Tape, plan: Plan, bound: Bound) -> None:
        """Replay everything once and compare it, to the bit, with what forward saved."""
        assert self.inputs is not None
        saved = [tensor for tensor, _, _ in tape.saved]
        found: dict[int, Tensor] = {}
        uses = list(plan.uses)
        try:
            with without_dispatch_modes(), torch.no_grad():
                leaves = self.inputs.materialise(self.name)
                replay = Replay(self.name, plan, bound, leaves, uses, is_last=False, fill=found.__setitem__)
                for index, source in enumerate(plan.sources):
                    if source is not HELD and index not in found:
                        value = replay.take(index)
                        if value is not None:
                            found[index] = value
                if not all(_is_same(value, saved[index]) for index, value in found.items()):
                    tape.broken("its replay gives other values")
        except Exception as error:
            tape.broken(f"its replay failed: {error}")
        for slot in self._live():
            if isinstance(slot, HeldSlot) and plan.sources[slot.index] is HELD:
                slot.held = slot.value = saved[slot.index].detach()
                slot.version = slot.held._version  # noqa: SLF001
        self._plan, self._bound = plan, bound

    # Backward, where there is no plan.
    def _begin(self) -> None:
        warn_unmatched(self._notes.given)

    def _run(self, *, last: int, stops_early: bool, is_last: bool = False) -> None:
        """Run the function again; where what was kept does not fit, once more without it.

        Kept operators do not fit if the function did something only once, such as filling a cache; kept blocks, if it
        runs a backward pass itself, through a graph that they were cut out of.
        """
        again = self._again
        self._begin()
        try:
            super()._run(last=last, stops_early=stops_early, is_last=is_last)
        except Slipped:
            assert again is not None
            again.watch = None
        except CheckpointError:
            raise
        except RuntimeError:
            if again is None or not again.has_served:
                raise
            again.knows_states, self._ledger.has_backward = False, True
        else:
            return
        super()._run(last=last, stops_early=stops_early, is_last=is_last)

    def _call(
        self,
        leaves: list[Any],
        pack: Callable[[Tensor], Any],
        log: OpLog | None,
        is_last: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Call the function under these hooks; where operators are served, each must be the one that was kept."""
        watch = self._again.watch if self._again is not None else None
        if isinstance(watch, AgainWatch):
            pack = _checking(pack, watch)
        super()._call(leaves, pack, log, is_last)

    def held_tensors(self) -> list[tuple[str, Any]]:
        """What it holds: arguments, and what is kept."""
        found = super().held_tensors()
        if self._bound is not None:
            found += [("kept", tensor) for tensor in self._bound.held if tensor is not None]
        if self._again is not None:
            found += [("kept", tensor) for call in self._again.shelf.calls.values() for tensor in call.tensors]
        return found

    def _release(self) -> None:
        super()._release()
        self._again = None


def _checking(pack: Callable[[Tensor], Any], watch: AgainWatch) -> Callable[[Tensor], Any]:
    """The hook of a recomputation, which also sees that kept operators are served as they were kept."""
    index = -1

    def checked(tensor: Tensor) -> Any:
        nonlocal index
        index += 1
        watch.check(index)
        return pack(tensor)

    return checked


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.stride() != other.stride():
        return False
    return torch.equal(one, other) or torch.equal(digest(one), digest(other))
