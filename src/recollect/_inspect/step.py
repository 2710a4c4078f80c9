"""Profiles one step as it runs: what stands around the capture, before and after it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn

from recollect._apply.blocks import find_blocks
from recollect._core.calls import Category, OpCall, Phase, Storage
from recollect._core.patterns import plain_path
from recollect._core.profiles import AllocatorEntry, Clock, ModuleEntry, Profile, RuleEntry
from recollect._core.torch_private.engine import top_hooks
from recollect._core.torch_private.pytree import tree_leaves
from recollect._inspect.rules import describe_rules
from recollect._profile.assemble import Known, assemble, include_all
from recollect._profile.capture import Capture
from recollect._profile.snapshot import Snapshot, name_states
from recollect._profile.storage_log import BEFORE
from recollect._profile.timing import NoTimer, timer_for
from recollect._recompute.frame import Frame
from recollect._recompute.rng import (
    Source,
    accelerator,
    accelerator_started,
    put_back,
    source_of_cpu,
    source_of_device,
    sources_by_request,
)
from recollect._recompute.slots import Slot, frame_of
from recollect._selective.replay import replay_here

if TYPE_CHECKING:
    from recollect._profile.dry.step import DryStep
    from recollect._profile.dry.translate import Translation
    from recollect._profile.optimizer import Kind, Shadow

_NEVER = 10**9
_CUDA_ROUNDING = 512


class StepProfiler:
    """Profiles what runs between `__enter__` and `__exit__`, which may be in different frames of one thread.

    Args:
        modules: whose parameters and buffers are counted, named, and put back.
        optimizers: whose state is.
        inputs: tensors that the step is given, in any containers.
        name: what reports call it.
        optimizer: what to count the state of, and to let step on fake tensors, if no optimiser steps in between.
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
        optimizer: Kind | None = None,
        dry: DryStep | None = None,
        restores: bool = True,
        progress: Callable[[int, int | None], None] | None = None,
    ) -> None:
        self._modules = [cast("nn.Module", module.module) if _is_replica(module) else module for module in modules]
        self._optimizers, self._optimizer, self._dry, self._name = optimizers, optimizer, dry, name
        self._device = device_of(self._modules, inputs)
        self._inputs = inputs
        self._restores = restores and dry is None
        self._is_cuda = self._device.type == "cuda" if dry is None else dry.device.is_cuda
        self._memory_model = _memory_model_of(self._device) if dry is None else dry
        self._snapshot = Snapshot()
        self._frames: set[int] = set()
        self._capture = Capture(
            timer=timer_for(self._device) if dry is None else NoTimer(),
            snapshot=self._snapshot if self._restores else None,
            unfold=self._unfold,
            region_of=region_here,
            replay_of=replay_here,
            workspace=None if self._memory_model is None else self._memory_model.workspace_bytes,
            progress=None if progress is None else lambda done: progress(done, None),
        )
        self._known = Known(device=self._device)
        self._states: list[tuple[Source, Any]] = []
        self._notes: list[str] = []
        self._stepped: list[str] = []
        self._shadows: list[Shadow] = []
        self._stack = ExitStack()
        self._rules: tuple[RuleEntry, ...] = ()
        self.profile: Profile

    def __enter__(self) -> Self:
        self._states = [(source, source.read()) for source in _generators()]
        try:
            self._stack.enter_context(quick_collections())
            self._rules = describe_rules(self._modules)
            if self._restores:
                self._note()
            self._include()
            if self._restores and self._is_cuda:
                self._shadow_optimizers()
            if self._dry is None and self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
            self._capture.__enter__()
        except BaseException:
            self._put_back()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._capture.__exit__(kind, error, trace)
            if error is None:
                allocators = self._read_allocator()
                seconds = self._capture.timer.seconds
                spans = [None if raw.span is None else seconds(raw.span) for raw in self._capture.calls]
                self._step_on_fakes()
                self.profile = self._conclude(spans, allocators)
        finally:
            self._put_back()
            self._let_go()

    def _let_go(self) -> None:
        """Hold nothing of the step any more, without waiting for the garbage collector: some of it hangs in circles."""
        del self._capture, self._snapshot, self._modules, self._optimizers, self._inputs, self._known, self._shadows

    def _note(self) -> None:
        for module in self._modules:
            self._snapshot.note_module(module)
        for optimizer in self._optimizers:
            self._snapshot.note_optimizer(optimizer)

    def clear_gradients(self) -> None:
        """Begin without gradients, as after ``zero_grad``; the old ones come back in the end."""
        self._snapshot.clear_gradients()

    def _shadow_optimizers(self) -> None:
        """Let the optimisers step on fake tensors: copying what they write to the host takes longer than the step."""
        from recollect._profile.optimizer import with_shadow_steps

        for optimizer in self._optimizers:
            self._stack.enter_context(with_shadow_steps(optimizer, self._follow, on_cuda=True))

    def _put_back(self) -> None:
        try:
            self._put_back_once()
        except BaseException:  # an interrupt; what was put back stays so when it is put back again
            self._put_back_once()
            raise

    def _put_back_once(self) -> None:
        self._stack.close()
        if self._restores:
            self._snapshot.restore()
        put_back(self._states)

    def _include(self) -> None:
        capture, known = self._capture, self._known
        for prefix, module in self._named_roots():
            capture.places.learn(module, prefix.rstrip("."))
            buffers = [(prefix + plain_path(path), tensor) for path, tensor in module.named_buffers()]
            include_all(capture, known, buffers, Category.BUFFER)
        include_all(capture, known, self._named_parameters(), Category.PARAMETER)
        paths = {id(parameter): path for path, parameter in self._named_parameters()}
        for optimizer in self._optimizers:
            include_all(capture, known, name_states(optimizer, paths), Category.OPTIMIZER)
        leaves = [leaf for leaf in tree_leaves(self._inputs) if isinstance(leaf, Tensor)]
        include_all(capture, known, ((f"input {at}", leaf) for at, leaf in enumerate(leaves)), Category.INPUT)

    def _named_roots(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules, with what their paths begin with: nothing, or for the second and later ones their class."""
        for number, module in enumerate(self._modules):
            yield f"{type(module).__name__}." if number else "", module

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, module in self._named_roots():
            for path, tensor in module.named_parameters():
                yield prefix + plain_path(path), tensor

    def _step_on_fakes(self) -> None:
        """Let the given optimiser step, if none did: its state counts from before the step, its calls come last."""
        optimizer = self._optimizer
        if self._capture.optimizers or self._stepped:
            return
        if optimizer is None:
            self._notes.append("no optimizer was given: its state is taken as 0, and its step is left out")
            return
        from recollect._profile.optimizer import shadow_of  # not at import: fake tensors bring much of torch along

        parameters = [parameter for _, parameter in self._named_parameters()]
        with shadow_of(optimizer, parameters, on_cuda=self._is_cuda) as shadow:
            self._follow(shadow)

    def _follow(self, shadow: Shadow) -> None:
        """Let an optimiser's shadow step, whose state was there before and stays."""
        capture = self._capture
        self._shadows.append(shadow)
        for fake, real in shadow.pairs():
            for number in capture.include(real):
                capture.storages.alias(fake.untyped_storage(), number)
        for state in shadow.states:
            number = capture.storages.number(state.untyped_storage(), state.device, BEFORE, is_given=True)
            self._known.add([number], Category.OPTIMIZER, "")
        with capture.following() as watch:
            shadow.step(watch)
        self._stepped.append(shadow.name)
        self._notes += shadow.notes
        if self._dry is None and not shadow.notes:
            self._notes.append(f"the step of {shadow.name} was not run: its memory and time are estimated")

    def _read_allocator(self) -> tuple[AllocatorEntry, ...]:
        if self._device.type != "cuda" or self._dry is not None:
            return ()
        entry = AllocatorEntry(
            device=torch.cuda.get_device_name(self._device),
            peak_bytes=torch.cuda.max_memory_allocated(self._device),
            reserved_bytes=torch.cuda.max_memory_reserved(self._device),
            total_bytes=torch.cuda.get_device_properties(self._device).total_memory,
        )
        return (entry,)

    def _conclude(self, seconds: list[float | None], allocators: tuple[AllocatorEntry, ...]) -> Profile:
        capture, known, dry = self._capture, self._known, self._dry
        model = self._memory_model
        entries = list(self._list_modules())
        known.paths = frozenset(entry.path for entry in entries)
        known.blocks = frozenset(self._find_block_paths())
        parts = assemble(capture, known, seconds)
        rules = describe_rules(self._modules)
        self._notes += self._limits(rules)
        names = [*self._stepped, *(type(optimizer).__name__ for optimizer in capture.optimizers)]
        return Profile(
            storages=parts.storages,
            calls=tuple(self._estimate(parts.calls, parts.storages)),
            saved=parts.saved,
            device=describe_device(self._device) if dry is None else dry.device.name,
            name=self._name,
            clock=capture.timer.clock or Clock.ROOFLINE,
            is_dry=dry is not None,
            rounding_bytes=_CUDA_ROUNDING if self._is_cuda else 1,
            capacity_bytes=max((entry.total_bytes for entry in allocators), default=0)
            if dry is None
            else dry.device.memory_bytes,
            fixed_bytes=0 if model is None else model.fixed_bytes,
            optimizer=", ".join(dict.fromkeys(names)),
            torch=str(torch.__version__),
            modules=tuple(entries),
            rules=rules,
            allocators=allocators,
            notes=(*self._notes, *(() if dry is None else dry.notes)),
        )

    def _estimate(self, calls: Iterable[OpCall], storages: Sequence[Storage]) -> Iterator[OpCall]:
        """The calls, those that were not run with the time that they would take, where the device is known."""
        from recollect._profile.dry.roofline import estimate_s, find_device

        device = None if self._dry is None else self._dry.device
        if device is None:
            with suppress(ValueError):
                device = find_device(self._device)
        matmul = "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
        for call in calls:
            if call.seconds is None and device is not None:
                seconds = estimate_s(call, device, storages, float32_matmul=matmul)
                yield replace(call, seconds=seconds)
            else:
                yield call

    def _limits(self, rules: tuple[RuleEntry, ...]) -> Iterator[str]:
        """What keeps this profile from being that of a usual step, in sentences."""
        if self._dry is not None and rules:
            yield "regions under policies hold more on fake tensors than in real steps, in which they learn"
        elif len(rules) > len(self._rules):
            yield "regions ran for the first time under their policies and learned: later steps take less"
        if not any(call.phase is Phase.BACKWARD for call in self._capture.calls):
            yield "no backward ran: what would be kept for it is not known"
        missed = self._snapshot.count_missed() if self._restores else 0
        if missed:
            yield (
                f"of the parameters and buffers {missed} changed past the profiler, as on another thread: they are not "
                "put back, and what runs there is not seen"
            )
        if self._capture.saw_torch_checkpoint:
            yield "torch.utils.checkpoint recomputes here: what it keeps to do so is not among what is saved"
        if any(map(_is_compiled, self._modules)) and self._dry is None:
            yield "compiled code is seen from outside: of what it does, only the operators that it calls at run time"

    def _list_modules(self) -> Iterator[ModuleEntry]:
        seen: set[str] = set()
        for module, path in self._capture.places.modules():
            if path not in seen:
                seen.add(path)
                yield ModuleEntry(path=path, kind=type(module).__name__)

    def _find_block_paths(self) -> Iterator[str]:
        paths = {id(module): path for module, path in self._capture.places.modules()}
        for root in self._modules:
            for block in find_blocks(root):
                if id(block) in paths:
                    yield paths[id(block)]

    def _unfold(self, value: Any) -> Iterator[Tensor]:
        """The tensors behind what hooks made of a saved one; of a region what it holds, when it is first met."""
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                yield leaf
            elif isinstance(leaf, Slot):
                yield from self._unfold_slot(leaf)

    def _unfold_slot(self, slot: Slot) -> Iterator[Tensor]:
        held = slot.value if slot.value is not None else slot.kept
        if isinstance(held, Tensor):
            yield held
        if id(slot.frame) not in self._frames:
            self._frames.add(id(slot.frame))
            for _, value in slot.frame.held_tensors():
                yield from self._unfold(value)


def _memory_model_of(device: torch.device) -> Translation | None:
    """What is known of workspaces and rounding on a device; nothing of the host."""
    if device.type != "cuda":
        return None
    from recollect._profile.dry.translate import workspaces_on

    return workspaces_on(device)


@contextmanager
def quick_collections() -> Iterator[None]:
    """Let the garbage collector look at young objects only: what a profile notes makes it run more often.

    Measured: up to 0.15 s of a 0.45 s profile, each time that it looks through all of torch.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def region_here() -> str:
    """The name of the region that runs here, in forward or in recomputation; ``""`` outside of any."""
    hooks = top_hooks(True)  # noqa: FBT003
    frame: Frame | None = None if hooks is None else frame_of(hooks[0])
    return "" if frame is None else frame.name


def _is_compiled(module: nn.Module) -> bool:
    return any(
        type(part).__name__ == "OptimizedModule" or vars(part).get("_compiled_call_impl") is not None
        for part in module.modules()
    )


def _is_replica(module: nn.Module) -> bool:
    return type(module).__name__ in ("DistributedDataParallel", "DataParallel")


def device_of(modules: Sequence[nn.Module], inputs: Any) -> torch.device:
    """The device that a step runs on: that of its parameters and inputs; the CPU only if all are there."""
    tensors = [next(module.parameters(), None) for module in modules] + tree_leaves(inputs)
    devices = [tensor.device for tensor in tensors if isinstance(tensor, Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def describe_device(device: torch.device) -> str:
    """What reports call a device that is here."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def _generators() -> list[Source]:
    """All random generators that a step may draw from without being given one."""
    sources = [source_of_cpu(), *sources_by_request(frozenset({"python", "numpy"}))]
    found = accelerator()
    if found is not None and accelerator_started():
        devices = [torch.device(found[0], index) for index in range(torch.accelerator.device_count())]
        sources += [source for device in devices if (source := source_of_device(device)) is not None]
    return sources
