"""What an optimizer holds and does, found out by letting its own code step on fake tensors.

Its state is made by a step before the one that is looked at, as in training. The user's instance is not touched: a
shadow of it steps, with the same options; or, where the user's step calls it, it is a shadow of itself while a context
is entered. Where its code asks for the value of a tensor (how many steps it has made) it is told 2.

How it is used, after backward::

    with shadow_of(optimizer, parameters, on_cuda=True) as shadow:
        for fake, real in shadow.pairs():            # none in a dry step, where parameters are fake already
            capture.storages.alias(fake.untyped_storage(), number of real's storage)
        ...                                          # count shadow.states
        with capture.following() as watch:
            shadow.step(watch)
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from recollect._core.signatures import read_signature
from recollect._core.torch_private.dispatch import DispatchMode, without_dispatch_modes
from recollect._core.torch_private.fake import READ_SCALAR, fake_mode, is_fake
from recollect._core.torch_private.pytree import tree_leaves
from recollect._profile.fakes import Fakes
from recollect._profile.raw import IS_SHADOW
from recollect._profile.snapshot import optimizers_in

OptimizerLike = torch.optim.Optimizer | type[torch.optim.Optimizer]
FakeOf = Callable[[Tensor], Tensor]
_WAS_CALLED = "_opt_called"
_CHANGED = ("step", _WAS_CALLED)
Pair = tuple[Tensor, Tensor]
"""A fake tensor, and the one that it stands for."""

_SLOTS = (("adafactor", 0), ("adam", 2), ("lamb", 2), ("lion", 1), ("rmsprop", 1), ("adagrad", 1), ("momentum", 1))
"""Tensors of a parameter's size that optimizers keep, by what is in their names."""


@dataclass(slots=True, kw_only=True)
class Shadow:
    """An optimizer on fake tensors.

    Attributes:
        name: of the optimizer's class.
        states: its state, as fake tensors.
        notes: what could not be found out, in sentences.
        mode: in which its tensors are fake, if they need one.
        run: steps once; None if that cannot be.
        known: all tensors of it that stand for others, with those.
    """

    name: str
    states: list[Tensor] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mode: AbstractContextManager[Any] = field(default_factory=nullcontext)
    run: Callable[[], object] | None = None
    known: list[Pair] = field(default_factory=list)

    def pairs(self) -> Iterator[Pair]:
        """Fake tensors and the real ones that they stand for: parameters, their gradients, and state there is."""
        return ((fake, real) for fake, real in self.known if fake is not real)

    def step(self, watch: AbstractContextManager[Any] | None = None) -> None:
        """Step once.

        Args:
            watch: a mode to enter around the step.
        """
        if self.run is not None:
            with self.mode, watch or nullcontext(), _Answers():
                self.run()


@contextmanager
def shadow_of(optimizer: OptimizerLike, parameters: Iterable[Tensor], *, on_cuda: bool) -> Generator[Shadow]:
    """Let an optimizer, or one that its class would make with its defaults, step on fake tensors.

    Args:
        optimizer: an instance or a class.
        parameters: that a class is to have; those of an instance are its own. Fake ones are taken as they are, inside
            the mode that made them; of real ones, shapes are looked at, and tensors on ``meta`` stand for them.
        on_cuda: whether it is to do what it would by default do on CUDA.

    >>> from torch import nn
    >>> model = nn.Linear(1024, 1024)
    >>> with shadow_of(torch.optim.AdamW, model.parameters(), on_cuda=True) as shadow:
    ...     sum(state.nbytes for state in shadow.states if state.dim())
    8396800
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        real = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    else:
        name, real = optimizer.__name__, [*parameters]
    shadow = _cast(name, optimizer, real, Fakes(on_meta=True), nullcontext(), on_cuda=on_cuda)
    if shadow.run is None and not any(map(is_fake, real)):  # fused kernels are for devices, which fake tensors have
        shadow = _cast(name, optimizer, real, Fakes(), fake_mode(), on_cuda=on_cuda)
    yield shadow


def _cast(
    name: str,
    optimizer: OptimizerLike,
    real: list[Tensor],
    fakes: Fakes,
    mode: AbstractContextManager[Any],
    *,
    on_cuda: bool,
) -> Shadow:
    shadow = Shadow(name=name, mode=mode)
    with mode:
        shadow.known = [(fakes.of(parameter), parameter) for parameter in real]
        _prepare(shadow, optimizer, fakes.of, on_cuda=on_cuda)
        for fake, parameter in list(shadow.pairs()):
            if parameter.is_leaf and parameter.grad is not None:
                fake.grad = fakes.of(parameter.grad)
                shadow.known.append((fake.grad, parameter.grad))
    return shadow


@contextmanager
def with_fake_parameters(
    optimizer: torch.optim.Optimizer, fake_of: FakeOf, *, on_cuda: bool, note: Callable[[str], object]
) -> Generator[None]:
    """Let an instance step on fake tensors, whoever calls it; it is put back in the end. Inside of a fake mode.

    Optimizers that it has do its work are to be given before it.

    Args:
        optimizer: whose attributes are others inside.
        fake_of: gives the fake tensor for one of its own.
        on_cuda: whether it is to do what it would by default do on CUDA.
        note: is told in a sentence if its state could not be made.
    """
    attributes = vars(optimizer)
    before = dict(attributes)
    step = optimizer.step

    @functools.wraps(step)  # with what a scheduler has noted on it
    def step_with_answers(*args: Any, **kwargs: Any) -> Any:
        with _Answers():
            return step(*args, **kwargs)

    try:
        attributes.update(_attributes_on_fakes(optimizer, fake_of, on_cuda=on_cuda))
        if not _own_states(optimizer):
            with _some_gradients(parameter for group in optimizer.param_groups for parameter in group["params"]):
                failed = _try_step(optimizer)
            if failed is not None:
                note(f"the state of {type(optimizer).__name__} is not counted from the start: {failed}")
        attributes["step"] = step_with_answers
        yield
    finally:
        attributes.clear()
        attributes.update(before)


@contextmanager
def with_shadow_steps(
    optimizer: torch.optim.Optimizer, follow: Callable[[Shadow], object], *, on_cuda: bool
) -> Generator[None]:
    """Let a real step's calls of ``optimizer.step`` be those of a shadow, so that nothing real is written.

    To put parameters and state back after a real call, all of them would have to be copied to the host before it: 6 s
    where the step takes 84 ms (GPT of 355 million parameters on an H200). With a closure, and where the optimizer
    cannot step on fake tensors, it is the real call.

    Args:
        optimizer: whose ``step`` is another inside.
        follow: is given the shadow, to let it step; called with dispatch modes off.
        on_cuda: whether it is to do what it would by default do on CUDA.
    """
    step = optimizer.step

    @functools.wraps(step)
    def step_by_shadow(closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        if closure is not None:
            return step(closure, **options)
        _note_call(optimizer)
        with without_dispatch_modes(), shadow_of(optimizer, (), on_cuda=on_cuda) as shadow:
            if shadow.run is not None:
                return follow(shadow)
        return step(**options)

    with _stepping_by(optimizer, step_by_shadow):
        yield


@contextmanager
def without_steps(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Let an optimizer not step, unless it is given a closure."""
    step = optimizer.step

    @functools.wraps(step)
    def do_not_step(closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        _note_call(optimizer)
        return None if closure is None else step(closure, **options)

    with _stepping_by(optimizer, do_not_step):
        yield


@contextmanager
def _stepping_by(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> Generator[None]:
    """Let ``optimizer.step`` be another inside."""
    attributes = vars(optimizer)
    before = {name: attributes[name] for name in _CHANGED if name in attributes}
    attributes["step"] = step
    try:
        yield
    finally:
        for name in _CHANGED:
            attributes.pop(name, None)
        attributes.update(before)


def _note_call(optimizer: torch.optim.Optimizer) -> None:
    """Note that it was called, as the step that schedulers of learning rates put in place of its own does."""
    vars(optimizer)[_WAS_CALLED] = True


def _try_step(optimizer: torch.optim.Optimizer) -> Exception | None:
    """Step, to make the state; gives what was raised, if anything was."""
    try:
        with torch.no_grad(), _Answers():
            type(optimizer).step(optimizer)
    except Exception as error:
        return error
    return None


def _prepare(shadow: Shadow, optimizer: OptimizerLike, fake_of: FakeOf, *, on_cuda: bool) -> None:
    """Make the optimizer that steps, and its state."""
    parameters = [fake for fake, _ in shadow.known]
    try:
        if isinstance(optimizer, torch.optim.Optimizer):
            copy = _copy_on_fakes(optimizer, fake_of, on_cuda=on_cuda)
            shadow.known += [(fake_of(state), state) for state in _states_of(optimizer)]
        else:
            copy = _copy_on_fakes(_make(optimizer, parameters), fake_of, on_cuda=on_cuda)
    except Exception as error:
        _count_slots(shadow, parameters, f"it could not be built: {error}")
        return
    if not _states_of(copy):
        with _some_gradients(parameters):
            failed = _try_step(copy)
        if failed is not None:
            _count_slots(shadow, parameters, f"it could not step on fake tensors: {failed}")
            return
    shadow.states = _states_of(copy)
    shadow.run = copy.step


def _make(kind: type[torch.optim.Optimizer], parameters: list[Tensor]) -> torch.optim.Optimizer:
    build: Callable[..., torch.optim.Optimizer] = kind
    rate = read_signature(kind).parameters.get("lr")
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    needs_rate = rate is not None and rate.default is inspect.Parameter.empty
    return build(trained, lr=1e-3) if needs_rate else build(trained)


def _copy_on_fakes(optimizer: torch.optim.Optimizer, fake_of: FakeOf, *, on_cuda: bool) -> torch.optim.Optimizer:
    """A copy of an optimizer with fake tensors in place of its own; nobody takes its steps for those of the user's.

    Optimizers that it has do its work are copies too: the user's own would step for real.
    """
    copy: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(copy).update(_attributes_on_fakes(optimizer, fake_of, on_cuda=on_cuda))
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            vars(copy)[name] = _copy_on_fakes(value, fake_of, on_cuda=on_cuda)
    vars(copy)[IS_SHADOW] = True
    return copy


def _attributes_on_fakes(optimizer: torch.optim.Optimizer, fake_of: FakeOf, *, on_cuda: bool) -> dict[str, Any]:
    """The attributes of an optimizer with fake tensors in place of its own, and without hooks."""
    found = {name: value for name, value in vars(optimizer).items() if name != "step"}
    for name, value in found.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            found[name] = OrderedDict()
    groups = [
        {name: value if name != "params" else [fake_of(p) for p in value] for name, value in group.items()}
        for group in optimizer.param_groups
    ]
    for group in groups:
        if on_cuda and _is_foreach_by_default(group):
            group["foreach"] = True
    state: defaultdict[Any, Any] = defaultdict(dict)
    for key, value in optimizer.state.items():
        state[fake_of(key) if isinstance(key, Tensor) else key] = _on_fakes(value, fake_of)
    return {**found, "param_groups": groups, "state": state}


def _is_foreach_by_default(group: dict[str, Any]) -> bool:
    """Whether torch would take all tensors at once on CUDA, where nothing was said."""
    return (
        "foreach" in group
        and group["foreach"] is None
        and not group.get("fused")
        and not group.get("differentiable")
        and not (isinstance(group.get("lr"), Tensor) and not group.get("capturable"))
    )


def _on_fakes(value: Any, fake_of: FakeOf) -> Any:
    if isinstance(value, Tensor):
        return fake_of(value)
    if isinstance(value, dict):
        return {key: _on_fakes(part, fake_of) for key, part in value.items()}
    return [_on_fakes(part, fake_of) for part in value] if isinstance(value, list) else value


def _own_states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]


def _states_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that an optimizer keeps, and those of optimizers that it has do its work."""
    return [state for one in optimizers_in(optimizer) for state in _own_states(one)]


@contextmanager
def _some_gradients(parameters: Iterable[Tensor]) -> Generator[None]:
    """Give parameters that have no gradient one, for a while."""
    given = [parameter for parameter in parameters if parameter.requires_grad and parameter.grad is None]
    for parameter in given:
        parameter.grad = torch.empty_like(parameter)
    try:
        yield
    finally:
        for parameter in given:
            parameter.grad = None


def _count_slots(shadow: Shadow, parameters: list[Tensor], why: str) -> None:
    """Count the state by what optimizers of such a name keep."""
    plain = shadow.name.lower()
    count = next((slots for part, slots in _SLOTS if part in plain), None)
    dtype = torch.uint8 if "8bit" in plain else None
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    shadow.states = [torch.empty_like(p, dtype=dtype) for p in trained for _ in range(count or 0)]
    counted = "taken as 0" if count is None else f"counted as {count} tensors for each parameter, going by its name"
    shadow.notes.append(f"the state of {shadow.name} is {counted}, and its step is left out: {why}")


class _Answers(DispatchMode):
    """Answers where code asks for the value of a fake tensor: 2, for steps that were made, and of a bool False."""

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator, or answer."""
        if func is READ_SCALAR and (args[0].is_meta or is_fake(args[0])):
            dtype = args[0].dtype
            return False if dtype is torch.bool else 2.0 if dtype.is_floating_point else 2
        return func(*args, **kwargs)
