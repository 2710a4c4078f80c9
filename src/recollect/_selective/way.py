"""The way of a region under a policy: learns at the first call of its kind, then runs the lightest way there is.

The first call runs under a dispatch mode, which asks the policy about every site, and is recorded. What that finds
decides how it and later calls are recomputed:

* only blocks are kept: the function runs again and skips them, without any mode (`blocks.py`);
* single operators are kept, and a program of the recording can be believed: what is needed is
  replayed (`following.py`, `replay_way.py`);
* single operators are kept, and it cannot: the function runs again and is served those (`serving.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from torch import Tensor

from recollect._core.authors import Role
from recollect._core.operators import operator_of
from recollect._core.pytree import Arguments
from recollect._core.torch_private.ambient import has_foreign_function_modes
from recollect._core.torch_private.collectives import count_collectives, process_groups
from recollect._core.torch_private.compiler import untraced
from recollect._core.torch_private.dispatch import dispatch_mode_depth, is_watched
from recollect._core.torch_private.engine import top_hooks
from recollect._offload.offload import offload_decided
from recollect._recompute.frame import Frame
from recollect._recompute.handles import frame_of
from recollect._recompute.rng import host_sources
from recollect._recompute.way import Hooks, Pack, Sides
from recollect._selective.asking import Asker
from recollect._selective.blocks import Forward
from recollect._selective.decisions import Decisions
from recollect._selective.following import Following
from recollect._selective.keeping_mode import KeepingMode
from recollect._selective.kept_calls import KeptCalls
from recollect._selective.knowledge import TALKS_AT_TIMES, Knowledge, are_apart
from recollect._selective.learning import drop_what_does_not_pay, learn_program
from recollect._selective.nested import kept_inside
from recollect._selective.program import Bound, Program
from recollect._selective.recording import Recording
from recollect._selective.replay_way import Replaying
from recollect._selective.served_way import ServedWay, marking
from recollect._selective.serving import Serving
from recollect._selective.serving_blocks import Again
from recollect._selective.serving_mode import ChoiceMode, ServingMode
from recollect._selective.tensor_classes import TensorClasses, tensor_classes
from recollect._selective.unmatched import warn_unmatched

T = TypeVar("T")

_MOST_BREAKS = 3
_CALLS_UNTIL_RETRY = 64

__recollect_role__ = Role.REGION


class SelectiveWay(ServedWay):
    """One execution under a policy, until its forward is over and, where it has no program, beyond."""

    __slots__ = (
        *("_again", "_asker", "_heard", "_is_decided_outside", "_decisions", "_knowledge"),
        *("_serving", "_following", "_recording", "_mode"),
    )

    def __init__(self, knowledge: Knowledge, decisions: Decisions) -> None:
        self._knowledge, self._decisions = knowledge, decisions
        self._recording: Recording | None = None
        self._following: Following | None = None
        self._again: Again | None = None
        self._serving: Serving | None = None
        self._asker: Asker | None = None
        self._mode: KeepingMode | None = None
        self._is_decided_outside = False
        self._heard = -1  # how many collectives this process had made at entry; -1 where they are seen anyway

    def begin(self, frame: Frame, arguments: Arguments) -> tuple[Sides | None, Pack]:
        """What forward and recomputation run under, and the pack hook of forward."""
        hooks = top_hooks(True)  # noqa: FBT003
        if not (self._knowledge.wanted.seen or self._decisions.blocks or self._knowledge.sees_names):
            quick = self._begin_quickly(frame, arguments, hooks)
            if quick is not None:
                self._heard = count_collectives()
                return quick
        return self._make_sides(frame, arguments, hooks), self._packer(frame)

    def _begin_quickly(
        self, frame: Frame, arguments: Arguments, hooks: Hooks | None
    ) -> tuple[Sides | None, Pack] | None:
        """The same for what is learned and keeps single operators alone, or nothing; None for all else."""
        knowledge, decisions = self._knowledge, self._decisions
        if decisions.is_learned and not (decisions.keeps_ops or knowledge.talks_at_times):
            is_alone = hooks is None or frame_of(hooks[0]) is None
            return (None, frame.pack()) if is_alone else None
        if decisions.program is not None and self._may_record(frame):
            following = self._following = self._follow(decisions.program)
            following.begin(arguments)
            return (following, nullcontext()), following.packer(frame)
        if hooks is None and self._may_serve(frame):
            assert decisions.wanted is not None
            preserves = "torch" in frame.around.preserved
            serving = self._serving = Serving(
                frame.name, decisions.wanted, decisions.unneeded, frame.handles, preserves=preserves
            )
            return (serving.forward, serving), frame.pack()
        return None

    def _follow(self, program: Program) -> Following:
        return Following(program, _tensor_classes(), notes_choices=self._knowledge.keeps_defaults)

    def _make_sides(self, frame: Frame, arguments: Arguments, hooks: Hooks | None) -> Sides:
        knowledge, decisions = self._knowledge, self._decisions
        inside = kept_inside(hooks)
        kept_calls = KeptCalls(frame.name, inside, preserves="torch" in frame.around.preserved)
        scopes: list[str] = []
        self._is_decided_outside = inside is not None and inside.keys is not None
        is_new = not decisions.is_learned
        mode = again = None
        recorder: Recording | Following | None = None
        if self._may_record(frame):
            if decisions.program is None:
                recorder = self._recording = Recording(
                    _tensor_classes(), holds_all=knowledge.sees_names, keeps_casts=knowledge.policy.keeps_casts
                )
            else:
                recorder = self._following = self._follow(decisions.program)
            recorder.begin(arguments)
        is_exact = frame.options.matcher.values is not None
        if inside is not None and self._is_decided_outside:
            if inside.has_ops:
                mode = KeepingMode(kept_calls, inside.decide, own=knowledge.buffers(), is_exact=is_exact)
                again = ServingMode(kept_calls)
        elif decisions.keeps_ops and recorder is None and inside is None and self._may_intercept():
            own = knowledge.buffers() if decisions.blocks else frozenset()
            mode = KeepingMode(
                kept_calls,
                decisions.decide,
                own=own,
                is_exact=is_exact,
                ops=decisions.ops if decisions.is_proven else decisions.ops_to_prove(),
                saved=frame.handles,
                proves=not decisions.is_proven,
            )
            again = ServingMode(kept_calls, ops=decisions.ops)
            self._heard = count_collectives()
        elif is_new or (decisions.keeps_ops and self._following is None) or knowledge.talks_at_times:
            asker = self._asker = Asker(
                decisions, knowledge.places(), scopes, self._recording, is_planned=knowledge.replays is True
            )
            noting = knowledge.sees_names and (is_new or bool(decisions.named))
            mode = KeepingMode(
                kept_calls,
                asker.decide,
                notes_makers=noting,
                own=knowledge.buffers(),
                is_exact=is_exact,
                tracks_memory=is_new or decisions.fills,
                note_copy=None if self._recording is None else self._recording.note_copy,
            )
            again = ServingMode(kept_calls)
        else:
            self._heard = count_collectives()
        self._again = Again(kept_calls, knowledge.wanted, decisions, mode=again)
        forward = Forward(
            kept_calls,
            knowledge.wanted,
            decisions,
            mode=mode,
            recorder=recorder,
            scopes=scopes,
            generators=(*host_sources(frame.around.preserved - {"torch"}), *frame.around.own_generators),
            modules=frame.around.modules,
        )
        self._mode = mode
        return forward, self._again

    def _may_intercept(self) -> bool:
        """Whether it is enough to see some operators. What is not proven yet is proven where nobody looks on."""
        decisions = self._decisions
        if decisions.ops is None or self._knowledge.talks_at_times:
            return False
        return decisions.is_proven or not dispatch_mode_depth()

    def _may_serve(self, frame: Frame) -> bool:
        """Whether all that is kept is plain, and nobody looks on who must not miss what runs."""
        decisions = self._decisions
        return (
            decisions.is_learned
            and decisions.is_proven
            and bool(decisions.wanted)
            and not (self._knowledge.talks_at_times or dispatch_mode_depth() or frame.around.is_captured)
            and frame.options.matcher.values is None
        )

    def _may_record(self, frame: Frame) -> bool:
        """Whether recording is worth it: it must be the only one to pack, and see calls as the user makes them."""
        decisions = self._decisions
        if not decisions.may_record:
            return False
        if self._knowledge.replays is False:
            decisions.may_record, decisions.why_no_program = False, "the plan says so"
            return False
        if not decisions.is_learned and self._knowledge.runs_units(frame.fn):
            decisions.may_record, decisions.why_no_program = (
                False,
                "it calls FSDP units, whose parameters are gathered and freed",
            )
            return False
        if has_foreign_function_modes() or top_hooks(True) is not None or is_watched():  # noqa: FBT003
            return False
        if frame.around.is_captured and (decisions.program is None or decisions.program.draws):
            return False  # while a CUDA graph is captured, generators cannot be read, and nothing can be compared
        return frame.options.matcher.values is None

    def _packer(self, frame: Frame) -> Pack:
        """The saved-tensor hook of forward: as of any frame, and whoever records is told."""
        if self._following is not None:
            return self._following.packer(frame)
        make = frame.pack()
        if self._mode is None or self._again is None or self._mode.ops is not None:
            return make
        if self._recording is not None:
            make = _telling(self._recording.note_saved, make)
        return marking(make, self._again.kept_calls.tally)

    def settle(self, frame: Frame) -> None:
        """After forward: what was learned, and by which way the values will come back."""
        decisions, asker = self._decisions, self._asker
        mode, self._mode = self._mode, None
        if mode is not None:
            decisions.has_backward = decisions.has_backward or mode.saw_backward
            decisions.gathers = decisions.gathers or mode.saw_gather
        draws = frame.around.draws
        if self._serving is not None and draws and not decisions.draws:
            self._serving.serve_nothing()  # something draws that drew nothing before, perhaps one that was kept
            decisions.is_stale = True
        if self._again is not None:
            # Without knowing where the generators stood after each block, a region that draws must run them all again.
            self._again.knows_states = (decisions.draws is not False or not draws) and not decisions.has_backward
        decisions.draws = bool(decisions.draws) or draws
        is_as_learned = self._is_as_learned(frame, mode)
        if not is_as_learned:
            self._doubt(mode)
        if self._is_decided_outside:
            pass  # what it keeps was decided elsewhere: there is nothing to learn
        elif asker is None:
            self._note_unwatched(mode, is_as_learned=is_as_learned)
        elif asker.has_asked or not decisions.is_learned:
            decisions.learn(
                saved=len(frame.handles), kept=self._count_kept(), sees_all=self._must_see_all(frame, asker, mode)
            )
        if self._recording is not None:
            self._settle_recording(frame, self._recording)
        if frame.way is not self:
            frame.recompute_context = None  # all that is kept is bound
        self._asker = self._again = self._serving = None

    def _doubt(self, mode: KeepingMode | None) -> None:
        """Another way was taken than learned: calls may have other numbers, and nothing is proven of what was kept.

        One may have been written into that is held as it is. What was chosen is still what was chosen.
        """
        if self._serving is not None:
            self._serving.serve_choices()
        elif self._again is not None and mode is not None and mode.ops is not None and not mode.proves:
            self._again.kept_calls.keep_choices()

    def _must_see_all(self, frame: Frame, asker: Asker, mode: KeepingMode | None) -> bool:
        """Whether it is not enough to intercept what is kept.

        Values are kept by name, or tensors wrap others; a higher-order operator cannot be intercepted; a region inside,
        under a policy of its own, must see an operator before this one serves it.
        """
        saw_wrappers = mode is not None and mode.saw_wrappers
        if saw_wrappers or self._knowledge.sees_names or asker.saw_higher_order or getattr(frame, "nested", None):
            return True
        return bool(process_groups()) and self._may_talk(frame)  # there nothing is left to what one rank has proven

    def _may_talk(self, frame: Frame) -> bool:
        """Whether it was seen to talk to other processes, or does so where nobody sees it."""
        decisions = self._decisions
        if decisions.gathers or decisions.blocks or self._knowledge.runs_units(frame.fn):
            return True
        return any(operator_of(line.key).is_collective for line in decisions.lines)

    def _note_unwatched(self, mode: KeepingMode | None, *, is_as_learned: bool) -> None:
        """A call that was not learned from."""
        decisions = self._decisions
        if not is_as_learned:
            decisions.forget()
            return
        if mode is not None and mode.proves:
            decisions.note_proof(mode.count_calls)
        decisions.unwatched += 1
        if decisions.breaks >= _MOST_BREAKS and decisions.unwatched % _CALLS_UNTIL_RETRY == 0:
            decisions.breaks, decisions.may_record = 0, not self._knowledge.talks_at_times

    def _is_as_learned(self, frame: Frame, mode: KeepingMode | None) -> bool:
        """Whether it went the way that was learned."""
        decisions = self._decisions
        is_as_learned = len(frame.handles) == decisions.saved and not decisions.is_stale
        is_as_learned = is_as_learned and not self._has_talked(frame)
        if self._serving is not None or (mode is not None and mode.ops is not None and not decisions.is_varying):
            is_as_learned = is_as_learned and self._count_kept() == decisions.kept
        return (
            is_as_learned
            if self._following is None
            else self._settle_following(frame, self._following) and is_as_learned
        )

    def _count_kept(self) -> int:
        """How many operators were kept, those included that need not be held."""
        if self._serving is not None:
            return self._serving.forward.count_wanted
        return 0 if self._again is None else self._again.kept_calls.tally.count

    def _has_talked(self, frame: Frame) -> bool:
        """Whether it talked to other processes though it had not when it was learned: noted, and breaks a program.

        What came from them was not kept, so recomputation talks again: on this rank, and on every other that learned
        the same. One that learns at this very call has kept it, and they would wait for each other.
        """
        if self._heard < 0 or count_collectives() == self._heard:
            return False
        if self._decisions.gathers or self._knowledge.runs_units(frame.fn):
            return False  # parameters are gathered where they are needed
        self._knowledge.note_talk()
        if self._following is not None:
            self._following.why_broken = TALKS_AT_TIMES
        return True

    # Learning a program, and following it.
    def _settle_recording(self, frame: Frame, recording: Recording) -> None:
        decisions = self._decisions
        found = learn_program(frame, recording, self._knowledge, decisions, self._asker)
        decisions.may_record, decisions.why_no_program = recording.why_broken is None, recording.why_broken
        if found is not None:
            decisions.program, bound = found
            self._replay(frame, decisions.program, bound)
        elif decisions.is_learned and decisions.keeps_ops:
            drop_what_does_not_pay(frame, decisions)
        recording.forget()
        self._recording = None

    def _settle_following(self, frame: Frame, following: Following) -> bool:
        """Whether the program was followed."""
        decisions = self._decisions
        following.conclude(frame.around.moved_states())
        self._following = None
        choices, bound = following.choices, following.part()
        if following.why_broken is None:
            self._replay(frame, following.program, bound)
            frame.metas = following.program.metas
            return True
        frame.metas += [None] * (len(frame.handles) - len(frame.metas))
        if choices and self._again is None:
            frame.recompute_context = ChoiceMode(choices)
        elif choices and self._again is not None:
            self._again.mode = ChoiceMode(choices)
        frame.held = None
        decisions.breaks += 1
        # A region that is never the same is not worth learning again, for a while.
        decisions.may_record = decisions.breaks < _MOST_BREAKS and not self._knowledge.talks_at_times
        decisions.why_no_program = following.why_broken
        return False

    def _replay(self, frame: Frame, program: Program, bound: Bound) -> None:
        """Let a frame replay; of what it keeps, some lives elsewhere from now on."""
        if program.sent:
            away = offload_decided()
            bound.send(program.sent, away.hooks)
            away.settle()
        frame.way = Replaying(program, bound, self._begin_pass)

    # Backward, where there is no program.
    def _begin_pass(self) -> None:
        """A pass asks for the first time: all forwards of the step are over."""
        warn_unmatched(self._knowledge.given)

    def _served_or_not(self, frame: Frame, run: Callable[[], T]) -> T:
        frame.metas += [None] * (len(frame.handles) - len(frame.metas))  # of a program that is not followed after all
        self._begin_pass()
        return super()._served_or_not(frame, run)


def _tensor_classes() -> TensorClasses:
    """Of fake tensors only what is learned apart is recorded: it cannot be compared, so no real call may follow it."""
    return tensor_classes(may_be_fake=are_apart())


def _telling(note_saved: Callable[[Tensor], None], pack: Pack) -> Pack:
    """The pack hook of a forward that is recorded."""

    @untraced
    def tell(tensor: Tensor) -> Any:
        note_saved(tensor)
        return pack(tensor)

    return tell
