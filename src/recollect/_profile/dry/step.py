"""A step without memory: modules, optimizers and inputs whose tensors are fake while a context is entered.

How it is used::

    with dry_step(modules, (inputs, kwargs), device=find_device("H200"), optimizers=optimizers) as dry:
        inputs, kwargs = dry.values
        with Capture(..., snapshot=None, workspace=dry.workspace_bytes) as capture:
            ...  # the step; `modules` have fake parameters and buffers now

All fake tensors are on the CPU, whatever the device is that is asked about: autograd on fake CUDA tensors needs a torch
that was built with CUDA. What differs there is translated, see `translate`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import PurePath
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from recollect._core.authors import is_of_user
from recollect._core.operators import Operator
from recollect._core.torch_private.fake import (
    DATA_ERRORS,
    UNKNOWN_ERRORS,
    fake_mode,
    formatted_as_numbers,
    is_fake,
    operator_in,
    tables_of,
    without_log,
)
from recollect._core.torch_private.modules import needless_conversions_left_out
from recollect._profile.belongings import Belongings
from recollect._profile.contents import CONTAINERS, Contents
from recollect._profile.dry.answers import Answers
from recollect._profile.dry.cached_tensors import CachedTensors
from recollect._profile.dry.host import HostCosts
from recollect._profile.dry.known import note_value
from recollect._profile.dry.listed_tensors import ListedTensors
from recollect._profile.dry.loose_tensors import LooseTensors
from recollect._profile.dry.roofline import Device, find_host_costs
from recollect._profile.dry.translate import Translation, translated
from recollect._profile.fakes import Fakes
from recollect._profile.optimizer import with_fake_parameters

_MOST_ANSWERS = 3
_DEEPEST = 6  # of what counters have
_SIZES_UNKNOWN = ("shape_env must not be None",)  # torch 2.13
_DEVICES_DIFFER = ("found two different devices", "found at least two devices")  # torch 2.11, 2.13


class DryStep:
    """What a step needs to run without memory.

    Attributes:
        values: what was given, with fake tensors in place of real ones.
        device: that is asked about.
        host_costs: what the host takes to launch its kernels; None where it runs them itself.
        fixed_bytes: as in Profile; to be read after the step.
        notes: what was assumed, in sentences; to be read after the step.
    """

    def __init__(
        self,
        values: Any,
        device: Device,
        *,
        host_costs: HostCosts | None = None,
        modules: Sequence[nn.Module] = (),
        translation: Translation | None = None,
        notes: Sequence[str] = (),
        answers: Sequence[str] = (),
    ) -> None:
        self.values, self.device, self.host_costs = values, device, host_costs
        self._modules, self._translation = modules, translation
        self._notes, self._answers = notes, answers  # grow while the step runs

    def clear_gradients(self) -> None:
        """Let the modules' parameters have no gradients, as at the start."""
        for module in self._modules:
            module.zero_grad(set_to_none=True)

    @property
    def fixed_bytes(self) -> int:
        """What libraries hold on the device beside the storages."""
        return 0 if self._translation is None else self._translation.fixed_bytes

    @property
    def notes(self) -> list[str]:
        """What was assumed, in sentences."""
        return [*self._notes, *self._answers, *(() if self._translation is None else self._translation.notes)]

    def workspace_bytes(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        """Bytes that an operator takes and gives back while it runs on the device."""
        return 0 if self._translation is None else self._translation.workspace_bytes(operator, args, kwargs, result)


@contextmanager
def dry_step(
    modules: Sequence[nn.Module],
    values: Any,
    *,
    device: Device,
    dtype: torch.dtype | None = None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    counters: Iterable[object] = (),
    holders: Iterable[Any] = (),
    step: Callable[..., Any] | None = None,
) -> Generator[DryStep]:
    """Let modules, optimizers and values have fake tensors; puts everything back, also after errors.

    Tensors may be on any device, ``meta`` included. Those that are one, or share memory, do so as fakes. Fake
    parameters have no gradient and no hooks. Put back are the modules' parameters, buffers and attributes, lists and
    dicts among them, the optimizers' groups and state, counters, and what fake tensors have replaced elsewhere.

    Args:
        modules: whose parameters, buffers, and tensors among attributes are fake inside.
        values: inputs of the step, in any containers.
        device: that is asked about.
        dtype: of all parameters, buffers and values that are floating-point; None: as they are.
        optimizers: whose groups and state are fake inside; state that is yet to be made is made.
        counters: schedulers of learning rates, scalers of losses: their attributes are put back.
        holders: where else the step may leave fake tensors, see `find_holders`.
        step: what is called inside: functions that it calls may cache fake tensors, as may those of the modules.

    Raises:
        ValueError: a lazy parameter; a tensor that is not plain; or, out of the step, a value of a tensor is asked for
            or an operator has no fake one.

    >>> from recollect._profile.dry.roofline import find_device
    >>> with torch.device("meta"):
    ...     model = nn.Linear(2**20, 2**20)
    >>> with dry_step([model], torch.ones(2, 2**20), device=find_device("cpu")) as dry:
    ...     model(dry.values).shape
    torch.Size([2, 1048576])
    >>> model.weight.device
    device(type='meta')
    """
    fakes = Fakes(dtype)
    notes = [f"estimated for {device.name} on fake tensors: nothing was run"]
    host_costs = find_host_costs(device)
    with ExitStack() as stack:
        _leave_compiled_code_as_written(stack)
        _let_transformers_look_at_values(stack)
        before = Contents()
        for module in modules:
            for part in module.modules():
                before.note(vars(part), depth=1)
        for counter in counters:
            before.note(vars(counter), depth=_DEEPEST)
        stack.callback(before.restore)
        # Or later steps would compute with fakes, silently.
        stack.callback(Belongings(holders, only_fakes=True).put_back)
        stack.callback(CachedTensors(modules, step).let_go)
        mode = fake_mode()
        answers: list[str] = []
        stack.enter_context(_explained(modules, answers))
        stack.enter_context(without_log())
        stack.enter_context(mode)
        stack.enter_context(needless_conversions_left_out(is_fake))
        stack.enter_context(formatted_as_numbers())
        for module in modules:
            _replace(module, fakes)
        given = fakes.of_all(values)
        for real, fake in fakes.pairs():
            note_value(fake, real)
        for optimizer in optimizers:
            faked = with_fake_parameters(optimizer, fakes.of, on_cuda=device.is_cuda, note=notes.append)
            stack.enter_context(faked)
        translation = stack.enter_context(translated(device)) if device.is_cuda else None
        stack.enter_context(Answers(lambda said: None if said in answers else answers.append(said)))
        stack.enter_context(LooseTensors(fakes))
        stack.enter_context(ListedTensors())
        yield DryStep(
            given, device, host_costs=host_costs, modules=modules, translation=translation, notes=notes, answers=answers
        )


def _leave_compiled_code_as_written(stack: ExitStack) -> None:
    if "torch._dynamo" in sys.modules:
        stack.enter_context(torch.compiler.set_stance("force_eager"))


def _let_transformers_look_at_values(stack: ExitStack) -> None:
    """Transformers takes fake tensors for a sign that it is compiled, and then asks no mask whether it is needed."""
    package: Any = sys.modules.get("transformers.utils.import_utils")
    if hasattr(package, "is_fake_tensor"):
        stack.callback(setattr, package, "is_fake_tensor", package.is_fake_tensor)
        package.is_fake_tensor = lambda _: False


def _replace(root: nn.Module, fakes: Fakes) -> None:
    for module in root.modules():
        for table in tables_of(module):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = fakes.of(tensor)
        attributes = vars(module)
        for name, value in list(attributes.items()):
            if isinstance(value, Tensor):
                attributes[name] = fakes.of(value)
            elif type(value) in CONTAINERS and not name.startswith("_"):
                attributes[name] = fakes.of_all(value) if type(value) is not set else value


@contextmanager
def _explained(modules: Iterable[nn.Module], answers: Sequence[str]) -> Generator[None]:
    """Say of errors that only fake tensors raise what they mean, and of others what the step was told before."""
    try:
        with _noted(answers):
            yield
    except DATA_ERRORS as error:
        what = operator_in(error)
        message = (
            f"{what} {_locate(error, modules)}needs the values of a tensor, but in a dry profile tensors have no "
            "values. What is read there (.item(), .tolist(), a size) decides how much memory the step takes. "
            "Profile a real step: dry=False"
        )
        raise ValueError(message) from error
    except UNKNOWN_ERRORS as error:
        what = operator_in(error) or str(error)
        message = (
            f"{what} {_locate(error, modules)}does not support fake tensors, so a dry profile cannot know what it "
            "returns. Register a fake implementation (torch.library.register_fake), or profile a real step: "
            "dry=False"
        )
        raise ValueError(message) from error
    except AssertionError as error:
        if not any(said in str(error) for said in _SIZES_UNKNOWN):
            raise
        message = (
            f"{_locate(error, modules)}makes a nested tensor, whose sizes are values, but in a dry profile tensors "
            "have no values. Profile a real step: dry=False"
        )
        raise ValueError(message) from error
    except RuntimeError as error:
        if not _is_about_values(error):
            raise
        if any(said in str(error) for said in _DEVICES_DIFFER):
            message = (
                f"{_locate(error, modules)}said '{_first_line(error)}': the step uses a tensor that is neither an "
                "input nor in a module, and is on another device. Pass it as an input, or profile a real step: "
                "dry=False"
            )
            raise ValueError(message) from error
        said = f"{_locate(error, modules)}said '{_first_line(error)}': in a dry profile"
        if "numpy" in str(error):
            message = f"{said} tensors have no values. Profile a real step: dry=False"
        else:
            message = (
                f"{said} modules cannot be converted. Convert them before the step, or profile a real one: dry=False"
            )
        raise ValueError(message) from error


@contextmanager
def _noted(answers: Sequence[str]) -> Generator[None]:
    try:
        yield
    except Exception as error:
        if answers and not isinstance(error, (*DATA_ERRORS, *UNKNOWN_ERRORS)):
            said = "".join(f"\n  {answer}" for answer in answers[-_MOST_ANSWERS:])
            error.add_note(
                f"The cause may be what a dry profile has to assume; a real one (dry=False) assumes nothing:{said}"
            )
        raise


def _is_about_values(error: RuntimeError) -> bool:
    said = str(error)
    return any(part in said for part in (".numpy() is not supported", "Couldn't swap", *_DEVICES_DIFFER))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _locate(error: BaseException, modules: Iterable[nn.Module]) -> str:
    """``"in layers.3 (model.py:41) "``: the innermost module that was running, and the user's line."""
    names = {id(part): name or type(part).__name__ for root in modules for name, part in root.named_modules()}
    module = source = ""
    for frame in _frames(error.__traceback__):
        here = frame.tb_frame.f_locals.get("self")
        module = names.get(id(here), module)
        code = frame.tb_frame.f_code
        if is_of_user(code, frame.tb_frame.f_globals):
            source = f"{PurePath(code.co_filename).name}:{traceback.extract_tb(frame, limit=1)[0].lineno}"
    if module and source:
        return f"in {module} ({source}) "
    return f"in {module} " if module else f"({source}) " if source else ""


def _frames(found: TracebackType | None) -> Iterator[TracebackType]:
    while found is not None:
        yield found
        found = found.tb_next
