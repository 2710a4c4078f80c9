"""Profile a step: run it once under the capture, put everything back, and give what was seen as a Profile."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Never, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from recollect._apply.function import name_of
from recollect._core.argument_text import short_repr
from recollect._core.authors import Role
from recollect._core.profiles import Profile
from recollect._core.reachable import find_holders, find_reachable, find_roots
from recollect._core.spelling import options_of, refuse_unknown
from recollect._core.torch_private.pytree import tree_leaves
from recollect._inspect.calling import doubt_inputs, find_call, spread
from recollect._inspect.others import find_other_bytes
from recollect._inspect.step import Figures, StepProfiler
from recollect._inspect.surroundings import device_of
from recollect._policy.base import takes
from recollect._profile.belongings import Belongings
from recollect._profile.snapshot import optimizers_in, tensors_of_optimizer
from recollect._profile.storage_log import StorageLog
from recollect._selective.knowledge import Learned, learning_apart

__recollect_role__ = Role.RUNNER
_COUNTERS: tuple[type, ...] = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)


def profile(  # noqa: PLR0913 (all but the first are for some)
    step_or_model: Callable[..., Any],
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None = None,
    dry: bool = False,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    name: str | None = None,
    timed: bool = True,
    progress: Callable[[int, int | None], None] | None = None,
    **unknown: Never,
) -> Profile:
    """Run a step and say where its memory and time go, operator by operator.

    The step runs once while recollect watches it, and a few times more for timing. Afterwards, parameters, buffers,
    gradients, optimizers and random generators are restored bit for bit, even if the step fails. So are tensors that a
    step function carries on in your own objects, such as the state of a recurrent net, and numbers, flags, strings and
    small tensors in modules' attributes. Memory that the step writes into is copied to the host for that. Hooks and
    similar things that a model sets up in its first forward stay, as after an ordinary forward. If regions have
    policies, the profile is that of a later training step, and they forget what they learned for it.

    A dry profile runs nothing: it traces the step on fake tensors, which need neither the memory nor the device, and
    estimates. The model may be on ``meta``. If the step reads values, it gets made-up ones, which the profile notes. A
    step whose sizes depend on values cannot be traced.

    Args:
        step_or_model: a model, whose output is the loss, holds it as ``loss``, or is summed; for a LightningModule
            without ``forward``, ``training_step`` is called. Or a function that runs a step itself: if it returns a
            loss and has not run backward, `profile` runs backward.
        inputs: positional arguments for it. A single mapping is passed as keyword arguments if its keys name the
            model's arguments, as batches for Transformers do.
        kwargs: keyword arguments for it.
        loss: a function from the model's output to the loss.
        optimizer: an instance or a class, whose state and step are counted. Without one, and if the step calls none,
            neither counts.
        dry: whether to use fake tensors.
        device: the device that a dry profile estimates for: ``"cuda"``, or a name such as ``"H200"``; by default the
            model's.
        dtype: in a dry profile, the dtype of all floating-point parameters and inputs; by default their own.
        name: what reports call the profile; by default the name of the class or function.
        timed: whether to run the step again for timing. Without it, times are those of the watched step, which are
            longer if the step waits for the host. Pass False for steps that must not run twice.
        progress: a function, called now and then with the number of calls so far and None.
        unknown: there are no other options; the error says which one is probably meant.

    Returns:
        The step as data; `recollect.report` shows it.

    Raises:
        ValueError: the model's output gives no loss; an option does not apply here; the model of a real step is on
            ``meta``; or a dry step asks for values.
        TypeError: the first argument, or `optimizer`, is something else, or an option is unknown.

    >>> import torch, recollect
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    >>> seen = recollect.profile(model, torch.randn(32, 8))
    >>> seen.name, seen.calls[seen.timeline.peak_call].phase.value
    ('Sequential', 'backward')

    Would it fit on a device that you do not have?

    >>> with torch.device("meta"):
    ...     large = torch.nn.Sequential(torch.nn.Linear(8, 2**20), torch.nn.GELU(), torch.nn.Linear(2**20, 1))
    >>> estimate = recollect.profile(large, torch.ones(2**14, 8), dry=True, device="H100")
    >>> round(estimate.peak_bytes / 2**30)
    192
    """
    if unknown:
        name = next(iter(unknown))
        otherwise = f"pass the model's inputs by position, or by name as in kwargs={{{name!r}: ...}}"
        refuse_unknown("recollect.profile", unknown, options_of(profile), otherwise)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        message = f"kwargs={short_repr(kwargs)}: expected a mapping from names to the model's keyword arguments"
        raise TypeError(message)
    doubt = doubt_inputs(step_or_model, inputs, has_keywords=bool(kwargs))
    inputs, given = spread(step_or_model, inputs, kwargs)
    return profile_step(
        step_or_model,
        inputs,
        given,
        loss=loss,
        optimizer=optimizer,
        dry=dry,
        device=device,
        dtype=dtype,
        name=name,
        timed=timed,
        progress=progress,
        doubt="" if given and not kwargs else doubt,
    )


def profile_step(  # noqa: PLR0913 (as above)
    step_or_model: Callable[..., Any],
    inputs: tuple[Any, ...],
    given: dict[str, Any],
    *,
    model: nn.Module | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None = None,
    dry: bool = False,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    name: str | None = None,
    timed: bool = True,
    progress: Callable[[int, int | None], None] | None = None,
    once_more: AbstractContextManager[None] | None = None,
    learned: Learned | None = None,
    doubt: str = "",
) -> Profile:
    """The same as `profile`, for other parts of the library.

    Modules of `model`, if one is given, have the paths that they have in it. In `once_more` a real step that is timed
    runs once more, unwatched. What regions learn in a real step is written to `learned`, for a caller who keeps it.
    Where a model fails, its error is noted with `doubt`, a sentence on what may be wrong with the call.
    """
    _check(step_or_model, inputs, loss, optimizer)
    _check_options(dry=dry, device=device, dtype=dtype, name=name, timed=timed, progress=progress)
    asked = _Asked.of(step_or_model, inputs, given, model, optimizer)
    called = find_call(step_or_model, inputs, loss, doubt)
    make = functools.partial(
        StepProfiler, asked.modules, asked.optimizers, name=name or name_of(step_or_model), progress=progress
    )
    _check_lazy(asked.modules)
    if asked.device.type == "meta" and (not dry or device is None):
        raise ValueError(_refuse_meta(name_of(step_or_model), asked.modules, dry=dry))
    if not dry:
        with learning_apart(learned):
            profiler = make(optimizer=asked.optimizer, inputs=asked.values)
            run = called.bind(inputs, given)
            return profiler.take(
                run,
                is_timed=timed,
                is_cleared=asked.is_model,
                counters=asked.counters,
                belongings=asked.belongings,
                once_more=once_more,
            )
    from recollect._profile.dry.roofline import find_device
    from recollect._profile.dry.step import dry_step  # not at import: fake tensors bring much of torch along

    target = find_device(asked.device if device is None else device)
    other_bytes = 0 if device is not None else asked.find_other_bytes()
    with (
        learning_apart(),
        asked.kept_belongings(),
        dry_step(
            asked.modules,
            (inputs, given),
            device=target,
            dtype=dtype,
            optimizers=asked.optimizers,
            counters=asked.counters,
            holders=find_holders(step_or_model, asked.values),
            step=step_or_model,
        ) as fakes,
    ):
        inputs, given = fakes.values
        profiler = make(optimizer=asked.optimizer, inputs=(inputs, given), dry=fakes)
        return profiler.take(called.bind(inputs, given), other_bytes=other_bytes)


def measure_step(
    step_or_model: Callable[..., Any],
    inputs: tuple[Any, ...],
    given: dict[str, Any],
    *,
    model: nn.Module | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None = None,
    progress: Callable[[int, int | None], None] | None = None,
    learned: Learned | None = None,
) -> Figures:
    """What a step takes on a CUDA device once it has settled: for whoever knows from a profile what it does.

    The arguments are those of `profile_step`; the optimizer's state counts if it is there.
    """
    asked = _Asked.of(step_or_model, inputs, given, model, optimizer)
    called = find_call(step_or_model, inputs, loss)
    with learning_apart(learned):
        profiler = StepProfiler(asked.modules, asked.optimizers, inputs=asked.values, progress=progress)
        run = called.bind(inputs, given)
        return profiler.measure(run, is_cleared=asked.is_model, counters=asked.counters, belongings=asked.belongings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What is profiled, and what it works with.

    Attributes:
        modules: the outermost ones, the user's model first.
        optimizers: those that step.
        optimizer: the one whose state is counted, if the caller named one.
        values: the arguments.
        counters: see `StepProfiler.take`.
        belongings: what the user's step keeps in the user's objects.
        is_model: whether the step is one call of a model.
    """

    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None
    values: list[Any]
    counters: list[object]
    belongings: Belongings
    is_model: bool

    @classmethod
    def of(
        cls,
        step_or_model: Callable[..., Any],
        inputs: tuple[Any, ...],
        given: dict[str, Any],
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None,
    ) -> Self:
        """Find all of it."""
        values = [*inputs, *given.values()]
        outermost = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else []
        if isinstance(step_or_model, nn.Module):
            modules = [step_or_model]
        else:
            modules = _put_first(model, find_roots(step_or_model, values))
            outermost = [*find_reachable(torch.optim.Optimizer, step_or_model, values), *outermost]
        counters: list[object] = []
        for kind in _COUNTERS:
            counters += find_reachable(kind, step_or_model, values)
        return cls(
            modules=modules,
            optimizers=list(dict.fromkeys(one for outer in outermost for one in optimizers_in(outer))),
            optimizer=optimizers_in(optimizer)[-1] if isinstance(optimizer, torch.optim.Optimizer) else optimizer,
            values=values,
            counters=counters,
            belongings=Belongings(find_holders(step_or_model, values, of_user=True)),
            is_model=isinstance(step_or_model, nn.Module),
        )

    @contextmanager
    def kept_belongings(self) -> Generator[None]:
        """What the user's step keeps in the user's objects is put back in the end."""
        try:
            yield
        finally:
            self.belongings.put_back()

    def find_other_bytes(self) -> int:
        """What is on the device before it runs, beside its modules, optimizers and arguments."""
        log = StorageLog()
        for module in self.modules:
            for tensor in (*module.parameters(), *module.buffers()):
                log.include(tensor)
        for optimizer in self.optimizers:
            for tensor in tensors_of_optimizer(optimizer):
                log.include(tensor)
        for leaf in tree_leaves(self.values):
            if isinstance(leaf, Tensor):
                log.include(leaf)
        gradients = (tensor.grad for module in self.modules for tensor in module.parameters())
        return find_other_bytes(self.device, log, (gradient for gradient in gradients if gradient is not None))

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return device_of(self.modules, self.values)


def _check(step_or_model: object, inputs: tuple[object, ...], loss: object, optimizer: object) -> None:
    what = short_repr(step_or_model)
    if any(isinstance(value, DataLoader) for value in inputs):
        message = "recollect.profile expects the arguments of one step, not a DataLoader: pass a batch of it. "
        message += "recollect.fit takes DataLoaders"
        raise TypeError(message)
    if not callable(step_or_model):
        message = f"recollect.profile expects a model or a function that runs a step, not {what}"
        raise TypeError(message)
    if isinstance(step_or_model, type):
        message = f"recollect.profile expects a model, not its class {step_or_model.__name__}: pass an instance"
        raise TypeError(message)
    if inspect.iscoroutinefunction(step_or_model) or inspect.isgeneratorfunction(step_or_model):
        message = (
            f"recollect.profile expects a function that runs a step when it is called; calling {what} only starts one"
        )
        raise TypeError(message)
    if loss is not None and not callable(loss):
        message = f"loss={short_repr(loss)}: expected a function from the model's output to the loss"
        raise TypeError(message)
    if loss is not None and not takes(loss.forward if isinstance(loss, nn.Module) else loss, 1):
        message = (
            f"loss={short_repr(loss)} cannot be called with the model's output alone, as recollect.profile does.\n"
            "Give it the targets: loss=lambda output: your_loss(output, targets). recollect.fit takes both as "
            "(inputs, targets)"
        )
        raise TypeError(message)
    if loss is not None and not isinstance(step_or_model, nn.Module):
        message = f"loss= is for models: {what} is a function, which returns a loss or runs its backward"
        raise ValueError(message)
    is_class = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    if optimizer is not None and not is_class and not isinstance(optimizer, torch.optim.Optimizer):
        message = (
            f"optimizer={short_repr(optimizer)}: expected an optimizer of torch.optim, an instance or a class"
            + _hint_optimizer(optimizer)
        )
        raise TypeError(message)
    if torch.is_inference_mode_enabled():
        message = "recollect.profile runs a training step, but inference mode is on: leave torch.inference_mode() first"
        raise ValueError(message)


def _hint_optimizer(given: object) -> str:
    """What to end an error with that refuses something beside an optimizer, with the optimizers in it."""
    if isinstance(given, (list, tuple)) and all(isinstance(one, torch.optim.Optimizer) for one in given):
        return (
            "; several optimizers step in a function of yours: pass one that runs the whole step, as "
            "recollect.profile(step, batch) or recollect.fit(model, batch, step=step, ...)"
        )
    inside = getattr(given, "optimizer", None)
    return f"; pass its optimizer, {type(inside).__name__}" if isinstance(inside, torch.optim.Optimizer) else ""


def _check_options(
    *, dry: object, device: object, dtype: object, name: object, timed: object, progress: object
) -> None:
    for option, flag in (("dry", dry), ("timed", timed)):
        if not isinstance(flag, bool):
            message = f"{option}={short_repr(flag)}: expected True or False"
            raise ValueError(message)  # noqa: TRY004 (as for every other option)
    if not dry and (device is not None or dtype is not None):
        given = f"device={short_repr(device)}" if device is not None else f"dtype={short_repr(dtype)}"
        message = f"{given} only works with dry=True: a real step runs on the model's own device and in its own dtype"
        raise ValueError(message)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        message = f"dtype={short_repr(dtype)}: expected a floating-point dtype, such as torch.bfloat16"
        raise TypeError(message)
    if name is not None and not isinstance(name, str):
        message = f"name={short_repr(name)}: expected a string, the name of the profile in reports"
        raise TypeError(message)
    if progress is not None and not callable(progress):
        message = f"progress={short_repr(progress)}: expected a function of the number of calls so far"
        raise TypeError(message)


def _put_first(model: nn.Module | None, roots: list[nn.Module]) -> list[nn.Module]:
    """The modules of a step, with one of them, wherever it is, before the others: its parts are named after it."""
    if model is None:
        return roots
    others = [root for root in roots if root is not model and not _is_wrapper_of(root, model)]
    return [model, *others]


def _is_wrapper_of(root: nn.Module, model: nn.Module) -> bool:
    """Whether a module does nothing but to hold another, as torch.compile's and DDP's do."""
    return [*root.children()] == [model] and next(root.parameters(recurse=False), None) is None


def _refuse_meta(name: str, modules: list[nn.Module], *, dry: bool) -> str:
    """What to say of a step that cannot run, or of one that is to be estimated for nobody knows which device."""
    is_model = any(parameter.is_meta for module in modules for parameter in module.parameters())
    what = name if is_model or not modules else f"an input of {name}"
    start = f"{what} is on the meta device, where tensors have no values"
    if dry:
        return f"{start}: pass the device to estimate for, as in device='H100'"
    move = "" if is_model or not modules else ", or move the input to the model's device"
    return f"{start}: only a dry profile is possible: pass dry=True{move}"


def _check_lazy(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        for path, parameter in module.named_parameters():
            if is_lazy(parameter):
                message = (
                    f"parameter '{path}' of {type(module).__name__} is lazy: the first call creates it, and that "
                    "cannot be undone. Call the model once before you profile it"
                )
                raise ValueError(message)
