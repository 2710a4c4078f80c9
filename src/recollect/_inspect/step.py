"""Profiles one step as it runs: what stands around the capture, before and after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from recollect._apply.caches import caches_left_out
from recollect._core.calls import Storage
from recollect._core.held import fills_cache
from recollect._core.profiles import AllocatorEntry, Clock, Profile, RuleEntry
from recollect._core.torch_private.engine import top_hooks
from recollect._inspect.costs import cost_calls
from recollect._inspect.limits import list_limits
from recollect._inspect.optimizer_steps import OptimizerSteps
from recollect._inspect.others import LEAST_BYTES, as_storage, find_other_bytes
from recollect._inspect.packed import Packed
from recollect._inspect.plain import PlainTimes, time_plainly
from recollect._inspect.roots import (
    include_roots,
    list_block_paths,
    list_modules,
    unwrap_replicas,
)
from recollect._inspect.rules import describe_rules
from recollect._inspect.surroundings import (
    describe_device,
    device_of,
    known_device,
    memory_model_of,
    quick_collections,
    read_allocator,
)
from recollect._inspect.undo import Undo
from recollect._profile.allocations import meter_on
from recollect._profile.assemble import Known, assemble
from recollect._profile.belongings import Belongings
from recollect._profile.capture import Capture
from recollect._profile.snapshot import tensors_of_optimizer
from recollect._profile.timing import NoTimer, Span, timer_for
from recollect._recompute.frame import Frame
from recollect._recompute.handles import frame_of
from recollect._selective.knowledge import all_knowledge
from recollect._selective.replay import replay_here

if TYPE_CHECKING:
    from recollect._profile.dry.step import DryStep
    from recollect._profile.optimizer import OptimizerLike

_REHEARSALS = 2  # after a first step, which is watched; regions under policies replay from the fourth call on at latest
_CUDA_ROUNDING = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a step on a device took, by its allocator and by the clock.

    Attributes:
        peak_bytes: the most that was in use.
        step_s: how long it took, without optimizers; None if it could not be run again.
        state_bytes: of optimizers, which was there throughout.
    """

    peak_bytes: int
    step_s: float | None
    state_bytes: int


class StepProfiler:
    """Profiles a step: what `take` runs, or what runs between `__enter__` and `__exit__`, in any frames of one thread.

    Args:
        modules: whose parameters and buffers are counted, named, and put back.
        optimizers: whose state is.
        inputs: tensors that the step is given, in any containers.
        name: what reports call it.
        optimizer: what to count the state of, and to let step on fake tensors, if no optimizer steps in between.
        dry: what the step runs on, if its tensors are fake.
        restores: whether everything is put back as it was found.
        progress: called now and then with the number of calls so far and, where it is known, of all.

    Attributes:
        profile: what was seen, once it is left without an exception.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        inputs: Any = (),
        name: str = "",
        optimizer: OptimizerLike | None = None,
        dry: DryStep | None = None,
        restores: bool = True,
        progress: Callable[[int, int | None], None] | None = None,
    ) -> None:
        self._modules = unwrap_replicas(modules)
        self._optimizers, self._optimizer, self._dry, self._name = optimizers, optimizer, dry, name
        self._device = device_of(self._modules, inputs)
        self._inputs, self._progress = inputs, progress
        self._is_cuda = self._device.type == "cuda" if dry is None else dry.device.is_cuda
        self._memory_model = memory_model_of(self._device) if dry is None else dry
        self._meter = meter_on(self._device) if dry is None else None
        self._undo = Undo(is_on=restores and dry is None, dry=dry)
        self._stack = ExitStack()
        self._rules: tuple[RuleEntry, ...] = ()
        self._allocators: tuple[AllocatorEntry, ...] = ()
        self._spans: list[Span | None] = []
        self._plain: PlainTimes | None = None
        self._other_bytes = 0
        self._begin()
        self.profile: Profile

    def _begin(self) -> None:
        """Nothing was seen yet."""
        progress = self._progress
        self._capture = Capture(
            timer=timer_for(self._device) if self._dry is None else NoTimer(),
            snapshot=self._undo.snapshot if self._undo.is_on else None,
            unfold=Packed().tensors,
            region_of=region_here,
            replay_of=replay_here,
            workspace=None if self._memory_model is None else self._memory_model.workspace_bytes,
            meter=self._meter,
            progress=None if progress is None else lambda done: progress(done, None),
        )
        self._known = Known(device=self._device)
        self._notes: list[str] = []
        self._steps = OptimizerSteps(
            self._capture,
            self._known,
            modules=self._modules,
            optimizers=self._optimizers,
            kind=self._optimizer,
            is_cuda=self._is_cuda,
            is_dry=self._dry is not None,
        )

    def take(
        self,
        step: Callable[[], object],
        *,
        is_timed: bool = True,
        is_cleared: bool = False,
        counters: Iterable[object] = (),
        belongings: Belongings | None = None,
        once_more: AbstractContextManager[None] | None = None,
        other_bytes: int = 0,
    ) -> Profile:
        """Profile a step as it is when it has run some times: regions under policies know their ways by then.

        Args:
            step: runs it; is called several times, and everything it changes is put back in between.
            is_timed: whether to run it again unwatched, for its time; not where nothing is run.
            is_cleared: whether it begins without gradients, as after ``zero_grad``.
            counters: what else knows how many steps there were: schedulers of learning rates, scalers of losses.
            belongings: what the step keeps in the user's objects.
            once_more: in which a step that could be timed runs once more.
            other_bytes: what is on the device that a dry step does not use; a real one asks the allocator.
        """
        self._other_bytes = other_bytes
        self._undo.expect(is_cleared=is_cleared, counters=counters, belongings=belongings)
        with self._opened():
            self._watch(step)
            if all_knowledge():
                self._rehearse(step)
                self._undo.rewind()
                self._begin()
                self._watch(step)
            if is_timed and self._undo.is_on:
                self._plain = self._time(step)
                if once_more is not None and self._plain is not None:
                    with once_more:
                        self._run_again(step)
            self.profile = self._conclude()
            if fills_cache(self.profile) and (is_timed or not self._undo.is_on):
                self.profile = replace(self.profile, under_regions=self._take_uncached(step))
        return self.profile

    def measure(
        self,
        step: Callable[[], object],
        *,
        is_cleared: bool = False,
        counters: Iterable[object] = (),
        belongings: Belongings | None = None,
    ) -> Figures:
        """What a step takes when it has run some times, where a device's allocator tells: a profile takes longer.

        Optimizers do not step. The first run is watched, for what it writes and is to be put back.

        Args:
            step: as in `take`.
            is_cleared: as in `take`.
            counters: as in `take`.
            belongings: as in `take`.
        """
        self._undo.expect(is_cleared=is_cleared, counters=counters, belongings=belongings)
        with self._opened():
            self._watch(step)
            if all_knowledge():
                self._rehearse(step)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._run_again(step)
            peak_bytes = torch.cuda.max_memory_allocated(self._device)
            plain = self._time(step)
            states = (tensor.nbytes for one in self._optimizers for tensor in tensors_of_optimizer(one))
            return Figures(
                peak_bytes=peak_bytes, step_s=None if plain is None else plain.body.wall_s, state_bytes=sum(states)
            )

    def _rehearse(self, step: Callable[[], object]) -> None:
        """Run it until regions under policies know their ways."""
        for _ in range(_REHEARSALS):
            self._run_again(step)

    def _run_again(self, step: Callable[[], object]) -> None:
        """Run a step unwatched, which begins as the first one did."""
        self._undo.rewind()
        # Nothing could put back what optimizers of a device write.
        is_left_out = self._undo.is_on and self._is_cuda
        with self._steps.left_out() if is_left_out else self._undo.steps_kept_aside(self._optimizers):
            step()

    def _take_uncached(self, step: Callable[[], object]) -> Profile | None:
        """The step as it runs under regions, without a cache of keys and values; None if it has none to leave out."""
        self._undo.rewind()
        self._begin()
        with caches_left_out(self._modules) as count:
            if not count:
                return None
            self._watch(step)
        return self._conclude()

    def _watch(self, step: Callable[[], object]) -> None:
        """Run a step under the capture."""
        self._start()
        try:
            step()
        except BaseException as error:
            self._capture.__exit__(type(error), error, error.__traceback__)
            raise
        self._stop()

    def __enter__(self) -> Self:
        self._leaving = self._opened()
        self._leaving.__enter__()
        try:
            self._start()
        except BaseException as error:
            self._leaving.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._stop()
                self.profile = self._conclude()
            else:
                self._capture.__exit__(kind, error, trace)
        finally:
            self._leaving.__exit__(kind, error, trace)

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """What is changed inside is put back in the end."""
        try:
            self._stack.enter_context(quick_collections())
            self._undo.note(self._modules, self._optimizers)
            yield
        finally:
            self._put_back()
            self._let_go()

    def _start(self) -> None:
        self._rules = describe_rules(self._modules)
        self._undo.clear_gradients()
        include_roots(
            self._capture, self._known, modules=self._modules, optimizers=self._optimizers, inputs=self._inputs
        )
        if self._dry is None and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        if self._meter is not None:
            self._meter.start()
        self._shadowing = self._steps.begin_shadowing() if self._undo.is_on and self._is_cuda else ExitStack()
        self._stack.push(self._shadowing)
        self._capture.__enter__()

    def _stop(self) -> None:
        capture = self._capture
        capture.__exit__(None, None, None)
        self._shadowing.close()
        self._allocators = read_allocator(self._device, self._meter) if self._dry is None else ()
        self._spans = [None if raw.span is None else capture.timer.read(raw.span) for raw in capture.calls]
        if self._undo.is_on:
            for module in self._modules:
                self._undo.snapshot.note_set_up(module)
        self._steps.count_new_states()
        self._steps.step_if_none_did()
        if self._dry is None:
            self._other_bytes = self._find_other_bytes()

    def _find_other_bytes(self) -> int:
        """What the step does not use and is there: asked after it, because a first step makes libraries' workspaces."""
        fixed_bytes = 0 if self._memory_model is None else self._memory_model.fixed_bytes
        return find_other_bytes(self._device, self._capture.storages, self._undo.snapshot.gradients(), fixed_bytes)

    def _time(self, step: Callable[[], object]) -> PlainTimes | None:
        """Time the step unwatched; a step that cannot be run again is left at what was seen."""
        try:
            with nullcontext() if self._is_cuda else self._undo.steps_kept_aside(self._optimizers):
                return time_plainly(
                    step,
                    rewind=self._undo.rewind,
                    device=self._device,
                    apart=self._optimizers if self._is_cuda else (),
                    peak_bytes=max((entry.peak_bytes for entry in self._allocators), default=0),
                )
        except Exception as error:
            what = f"{type(error).__name__}: {error}".strip(": ").partition("\n")[0]
            note = f"the step could not be run again ({what}): times are those of the profiled step, which runs slower"
            self._notes.append(note)
            return None

    def _let_go(self) -> None:
        """Hold nothing of the step any more, without waiting for the garbage collector: some of it hangs in circles."""
        del self._capture, self._undo, self._modules, self._optimizers, self._inputs, self._known, self._steps

    def _put_back(self) -> None:
        try:
            self._put_back_once()
        except BaseException:  # an interrupt; what was put back stays so when it is put back again
            self._put_back_once()
            raise

    def _put_back_once(self) -> None:
        self._stack.close()
        self._undo.put_back()

    def _conclude(self) -> Profile:
        capture, known, dry = self._capture, self._known, self._dry
        model = self._memory_model
        places = capture.whereabouts.places
        entries = list(list_modules(places))
        known.paths = frozenset(entry.path for entry in entries)
        known.blocks = frozenset(list_block_paths(places, self._modules))
        parts = assemble(capture, known, self._spans)
        rules = describe_rules(self._modules)
        self._notes += list_limits(
            capture,
            self._modules,
            before=self._rules,
            after=rules,
            missed=self._undo.snapshot.count_missed() if self._undo.is_on else 0,
            is_dry=dry is not None,
        )
        names = [*self._steps.names, *(type(optimizer).__name__ for optimizer in capture.optimizers)]
        fixed_bytes = 0 if model is None else model.fixed_bytes
        return Profile(
            storages=(*parts.storages, *self._list_others(fixed_bytes)),
            calls=tuple(
                cost_calls(
                    parts.calls,
                    parts.storages,
                    known_device(self._device) if dry is None else dry.device,
                    self._plain,
                    None if dry is None else dry.host_costs,
                )
            ),
            saved=parts.saved,
            transfers=parts.transfers,
            received=parts.received,
            device=describe_device(self._device) if dry is None else dry.device.name,
            name=self._name,
            clock=capture.timer.clock or Clock.ROOFLINE,
            is_dry=dry is not None,
            rounding_bytes=_CUDA_ROUNDING if self._is_cuda else 1,
            capacity_bytes=max((entry.total_bytes for entry in self._allocators), default=0)
            if dry is None
            else dry.device.memory_bytes,
            fixed_bytes=fixed_bytes,
            optimizer=", ".join(dict.fromkeys(names)),
            torch=str(torch.__version__),
            modules=tuple(entries),
            rules=rules,
            allocators=self._allocators,
            notes=(*self._steps.notes, *self._notes, *(() if dry is None else dry.notes)),
        )

    def _list_others(self, fixed_bytes: int) -> list[Storage]:
        """What the step does not use. The allocator tells of libraries' workspaces, too, which a dry profile counts."""
        if self._dry is None:
            return [as_storage(self._other_bytes)] if self._other_bytes else []
        other_bytes = self._other_bytes - fixed_bytes
        return [as_storage(other_bytes)] if other_bytes >= LEAST_BYTES else []


def region_here() -> str:
    """The name of the region that runs here, in forward or in recomputation; ``""`` outside of any."""
    hooks = top_hooks(True)  # noqa: FBT003
    frame: Frame | None = None if hooks is None else frame_of(hooks[0])
    return "" if frame is None else frame.name
