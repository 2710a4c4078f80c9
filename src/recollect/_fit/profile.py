"""Profile a step: run it once under the capture, put everything back, and give what was seen as a Profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from recollect._apply.blocks import find_blocks
from recollect._apply.function import name_of
from recollect._core.calls import Category
from recollect._core.graph import AllocatorEntry, ModuleEntry, Profile
from recollect._core.patterns import plain_path
from recollect._core.torch_private.engine import top_hooks
from recollect._core.torch_private.pytree import tree_leaves
from recollect._fit.rules import describe_rules
from recollect._profile.assemble import Known, assemble, include_all
from recollect._profile.capture import Capture
from recollect._profile.search import find_generators, find_modules, find_optimizers
from recollect._profile.snapshot import Snapshot, tensors_of_optimizer
from recollect._profile.timing import timer_for
from recollect._recompute.frame import Frame
from recollect._recompute.rng import (
    Source,
    accelerator,
    accelerator_started,
    put_back,
    source_of,
    source_of_cpu,
    source_of_device,
    sources_by_request,
)
from recollect._recompute.slots import Slot, frame_of
from recollect._selective.replay import replay_here

Optimizer = torch.optim.Optimizer | type[torch.optim.Optimizer]


class StepProfiler:
    """Profiles what runs between `__enter__` and `__exit__`, which may be in different frames of one thread.

    Args:
        modules: whose parameters and buffers are counted, named, and put back.
        optimizers: whose state is.
        inputs: tensors, and containers of them, that the step is given.
        generators: random generators besides torch's, Python's and NumPy's own.
        name: what reports call it.
        restores: whether everything is put back as it was found.
        progress: called now and then with the number of calls so far and, where it is known, of all.

    Attributes:
        profile: what was seen, once it is left without an exception.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        optimizers: list[torch.optim.Optimizer],
        *,
        inputs: Any = (),
        generators: Iterable[torch.Generator] = (),
        name: str = "",
        restores: bool = True,
        progress: Callable[[int, int | None], None] | None = None,
    ) -> None:
        self._modules = [getattr(module, "module", module) if _is_replica(module) else module for module in modules]
        self._optimizers, self._name = optimizers, name
        self._device = _device_of(modules, inputs)
        self._inputs = inputs
        self._restores = restores
        self._snapshot = Snapshot()
        self._frames: set[int] = set()
        self._capture = Capture(
            timer=timer_for(self._device),
            snapshot=self._snapshot if restores else None,
            unfold=self._unfold,
            region_of=region_here,
            replay_of=replay_here,
            progress=None if progress is None else lambda done: progress(done, None),
        )
        self._known = Known(device=self._device)
        self._sources = [*_generators(), *map(source_of, generators)]
        self._states: list[tuple[Source, Any]] = []
        self.profile: Profile
        self.notes: list[str] = []

    def __enter__(self) -> Self:
        self._states = [(source, source.read()) for source in self._sources]
        for module in self._modules:
            self._snapshot.note_module(module)
        for optimizer in self._optimizers:
            self._snapshot.note_optimizer(optimizer)
        try:
            self._include()
            self._start_allocator()
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
                self.profile = self._conclude()
        finally:
            self._put_back()

    def clear_gradients(self) -> None:
        """Begin without gradients, as after ``zero_grad``; the old ones come back in the end."""
        self._snapshot.clear_gradients()

    def _put_back(self) -> None:
        if self._restores:
            self._snapshot.restore()
            put_back(self._states)

    def _include(self) -> None:
        capture, known = self._capture, self._known
        for number, module in enumerate(self._modules):
            prefix = f"{type(module).__name__}." if number else ""
            capture.places.learn(module, prefix.rstrip("."))
            parameters = [(prefix + plain_path(path), tensor) for path, tensor in module.named_parameters()]
            buffers = [(prefix + plain_path(path), tensor) for path, tensor in module.named_buffers()]
            include_all(capture, known, parameters, Category.PARAMETER)
            include_all(capture, known, buffers, Category.BUFFER)
        for optimizer in self._optimizers:
            states = [("", tensor) for tensor in tensors_of_optimizer(optimizer)]
            include_all(capture, known, states, Category.OPTIMIZER)
        leaves = [leaf for leaf in tree_leaves(self._inputs) if isinstance(leaf, Tensor)]
        include_all(capture, known, ((f"input {at}", leaf) for at, leaf in enumerate(leaves)), Category.INPUT)

    def _start_allocator(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _read_allocator(self) -> tuple[AllocatorEntry, ...]:
        if self._device.type != "cuda":
            return ()
        entry = AllocatorEntry(
            device=torch.cuda.get_device_name(self._device),
            peak_bytes=torch.cuda.max_memory_allocated(self._device),
            reserved_bytes=torch.cuda.max_memory_reserved(self._device),
            total_bytes=torch.cuda.get_device_properties(self._device).total_memory,
        )
        return (entry,)

    def _conclude(self) -> Profile:
        capture, known = self._capture, self._known
        entries = list(self._list_modules())
        known.paths = frozenset(entry.path for entry in entries)
        known.blocks = frozenset(self._find_block_paths())
        parts = assemble(capture, known, seconds=lambda raw: capture.timer.seconds(raw.span))
        names = [type(optimizer).__name__ for optimizer in capture.optimizers]
        return Profile(
            storages=parts.storages,
            calls=parts.calls,
            saved=parts.saved,
            device=_describe_device(self._device),
            name=self._name,
            clock=capture.timer.clock,
            rounding_bytes=512 if self._device.type == "cuda" else 1,
            optimizer=", ".join(dict.fromkeys(names)),
            torch=str(torch.__version__),
            modules=tuple(entries),
            rules=describe_rules(self._modules),
            allocators=self._read_allocator(),
            notes=tuple(self.notes),
        )

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


def region_here() -> str:
    """The name of the region that runs here, in forward or in recomputation; ``""`` outside of any."""
    hooks = top_hooks(True)  # noqa: FBT003
    frame: Frame | None = None if hooks is None else frame_of(hooks[0])
    return "" if frame is None else frame.name


def _is_replica(module: nn.Module) -> bool:
    return type(module).__name__ in ("DistributedDataParallel", "DataParallel")


def _device_of(modules: list[nn.Module], inputs: Any) -> torch.device:
    tensors = [next(module.parameters(), None) for module in modules] + tree_leaves(inputs)
    devices = [tensor.device for tensor in tensors if isinstance(tensor, Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def _generators() -> list[Source]:
    """All random generators that a step may draw from without being given one."""
    sources = [source_of_cpu(), *sources_by_request(frozenset({"python", "numpy"}))]
    found = accelerator()
    if found is not None and accelerator_started():
        devices = [torch.device(found[0], index) for index in range(torch.accelerator.device_count())]
        sources += [source for device in devices if (source := source_of_device(device)) is not None]
    return sources


def profile(
    step_or_model: Callable[..., Any],
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Optimizer | None = None,
    name: str | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Profile:
    """Run one step and say where its memory goes, operator by operator.

    Afterwards parameters, buffers, gradients, optimisers and random generators are bit for bit as they were, also if
    the step fails. What the step writes into is copied to the host before; nothing is copied on the device.

    Args:
        step_or_model: a model, whose output is the loss, holds it as ``loss``, or is summed to one; or a function that
            runs a step itself, backward included.
        inputs: what it is called with.
        kwargs: keyword arguments that it is called with.
        loss: makes the loss of the model's output.
        optimizer: an instance or a class; its state is counted. Without one it is taken as 0.
        name: what reports call the profile; by default the name of the class or function.
        progress: called now and then with the number of calls so far, and None.

    Returns:
        The step as data; `recollect.report` shows it.

    Raises:
        ValueError: no loss can be made of the model's output.

    >>> import torch, recollect
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    >>> seen = recollect.profile(model, torch.randn(32, 8))
    >>> seen.name, seen.calls[seen.timeline.peak_call].phase.value
    ('Sequential', 'backward')
    """
    given = dict(kwargs or {})
    values = [*inputs, *given.values()]
    if isinstance(step_or_model, nn.Module):
        modules, optimizers = [step_or_model], []
    else:
        modules = find_modules(step_or_model, values)
        optimizers = find_optimizers(step_or_model, values)
    if isinstance(optimizer, torch.optim.Optimizer) and optimizer not in optimizers:
        optimizers.append(optimizer)
    label = name or name_of(step_or_model)
    with ExitStack() as stack:
        generators = find_generators(step_or_model, values)
        profiler = StepProfiler(
            modules, optimizers, inputs=values, generators=generators, name=label, progress=progress
        )
        stack.enter_context(profiler)
        if isinstance(step_or_model, nn.Module):
            profiler.clear_gradients()
            _train(step_or_model, inputs, given, loss)
        else:
            step_or_model(*inputs, **given)
    return profiler.profile


def _train(
    model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], Tensor] | None
) -> None:
    with torch.enable_grad():
        output = model(*inputs, **kwargs)
        value = _loss_in(output) if loss is None else loss(output)
    if not isinstance(value, Tensor) or not value.requires_grad:
        raise ValueError(_explain_no_loss(model, output, value))
    value.backward() if value.dim() == 0 else value.sum().backward()


def _loss_in(output: Any) -> Tensor | None:
    """The loss that an output is or holds, or the sum of its tensors."""
    held = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(held, Tensor):
        return held
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if tensors and tensors[0].dim() == 0:
        return tensors[0]
    sums = [tensor.sum() for tensor in tensors]
    return sum(sums[1:], sums[0]) if sums else None


def _explain_no_loss(model: nn.Module, output: Any, value: Any) -> str:
    what = type(model).__name__
    if value is None:
        return (
            f"no loss can be made of what {what} gives ({type(output).__name__}): no tensor in it requires grad. Give "
            "`loss=`, a function from the output to the loss; or unfreeze what is to be trained"
        )
    return f"loss= gave {type(value).__name__}, which has no graph behind it: expected a tensor that requires grad"
