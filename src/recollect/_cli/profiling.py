"""Taking the profile of a target: what options say, read and checked, and how a function or a script is run."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import recollect
from recollect._cli.endings import FAILED
from recollect._cli.screen import ShowProgress, fail, say
from recollect._cli.target import Function, find_target
from recollect._core.calls import Phase
from recollect._core.patterns import hint_nearest
from recollect._core.profiles import Profile

if TYPE_CHECKING:
    import torch

    from recollect._cli.seen import CallLog
    from recollect._cli.subject import ProfileArguments

# Torch, and what needs it, is imported where it is used: help and wrong usage must not wait for it.

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}


class ProfileOptions:
    """How a target is profiled, read from what was given.

    Args:
        device: where to run, or in a dry run what to estimate for.
        dtype: of the model and its inputs.
        optimizer: whose state to count.
        dry: whether to run nothing.
        step: which step of a script to profile.
        falls_back: whether a model for whose plain step there is no room is profiled dry instead.
    """

    def __init__(
        self,
        *,
        device: str | None = None,
        dtype: str | None = None,
        optimizer: str | None = None,
        dry: bool = False,
        step: int = 2,
        falls_back: bool = False,
    ) -> None:
        self.device, self.is_dry, self.step, self._falls_back = device, dry, step, falls_back
        self.dtype = None if dtype is None else _read_dtype(dtype)
        self.optimizer = None if optimizer is None else _read_optimizer(optimizer)
        if device is not None:
            _check_estimate(device) if dry else _check_device(device)

    def take(
        self, target: str, args: list[str], progress: ShowProgress, *, given: Mapping[str, int] | None = None
    ) -> Profile:
        """The profile of a target; a function is given some of its arguments."""
        from recollect._cli.script import profile_script

        found = find_target(target, lets_open=bool(given))
        if given:
            if not isinstance(found, Function):
                fail(f"--set is for functions, but {target} is a script: write its arguments after --")
            found = found.give(given)
        if isinstance(found, Function):
            if args:
                fail(
                    f"{target} is a function, but only scripts take arguments after --: leave out {' '.join(args)}. "
                    "For a function with parameters, recollect plan has --set"
                )
            return self.take_function(found, progress)
        said = {"--device": self.device, "--dtype": self.dtype, "--optimizer": self.optimizer, "--dry": self.is_dry}
        for name, value in said.items():
            if value:
                fail(f"{name} is for functions, but {target} is a script, which runs as written")
        return profile_script(found.path, args, step=self.step, progress=progress)

    def find_subject(self, function: Function) -> tuple[ProfileArguments, CallLog]:
        """What a function gives to profile, where it is to run; and which modules and optimizers were seen at work.

        A step of the user's own has run once afterwards, so that what is made lazily is there.
        """
        from recollect._cli.seen import CallLog
        from recollect._cli.subject import check_function, check_inputs, move_subject, read_subject

        call = function.call
        check_function(function.function, function.name)
        with CallLog() as seen:
            result = self._call(function)
        subject = read_subject(result, call, function.name)
        check_inputs(subject, function.name)
        if self.optimizer is not None:
            subject = replace(subject, options={**subject.options, "optimizer": self.optimizer})
        if not self.is_dry:
            subject = move_subject(subject, self.device, self.dtype)
            if not subject.is_model and subject.what is not call:
                with self.surroundings(self.device), seen:
                    subject.what()
        return subject, seen

    def take_function(self, function: Function, progress: ShowProgress) -> Profile:
        """The profile of what a function gives."""
        subject, seen = self.find_subject(function)
        if subject.is_model:
            return self._take_model(subject, progress)
        if self.is_dry:
            fail(
                f"--dry needs the model itself: let {function.name} return (model, *inputs), or a mapping with 'model'"
            )
        with self.surroundings(self.device):
            step = gather_step(subject, seen)
            taken = recollect.profile(step, name=function.name, progress=progress, **subject.options)
        if all(call.phase is Phase.FORWARD for call in taken.calls):
            fail(_explain_no_backward(function.name, len(taken.calls)), code=FAILED)
        return taken

    def _take_model(self, subject: ProfileArguments, progress: ShowProgress) -> Profile:
        import torch

        from recollect._inspect.oom.error import read_shortage

        if not self.is_dry:
            try:
                return recollect.profile(subject.what, *subject.inputs, progress=progress, **subject.options)
            except RuntimeError as error:
                if not self._falls_back or read_shortage(error) is None:
                    raise
            torch.cuda.empty_cache()
            say("the plain step does not fit here, so it is estimated from shapes")
        here = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = self.dtype if self.is_dry else None  # else it was moved
        options = {**subject.options, "dry": True, "device": self.device or here, "dtype": dtype}
        return recollect.profile(subject.what, *subject.inputs, progress=progress, **options)

    def _call(self, function: Function) -> Any:
        """What the function gives; in a dry run without memory, if it can do without."""
        if self.is_dry:
            try:
                with self.surroundings("meta"):
                    return function.call()
            except (RuntimeError, NotImplementedError) as error:  # it asks tensors for values, which these have not
                say(f"{function.name} needs values, so its tensors take memory: {error}")
        with self.surroundings(None if self.is_dry else self.device):
            return function.call()

    @contextlib.contextmanager
    def surroundings(self, device: str | None) -> Generator[None, None, None]:
        """Let new tensors be on a device, and of the dtype."""
        import torch

        before = torch.get_default_dtype()
        with contextlib.nullcontext() if device is None else torch.device(device):
            if self.dtype is not None:
                torch.set_default_dtype(self.dtype)
            try:
                yield
            finally:
                torch.set_default_dtype(before)


def gather_step(subject: ProfileArguments, seen: CallLog) -> Callable[[], Any]:
    """The step of a subject, with what it was seen to work with where `recollect.profile` looks for it."""
    return functools.partial(_run, subject.what, seen.list_modules(), seen.optimizers)


def _run(step: Callable[[], Any], *works_with: Any) -> Any:
    """Run a step. What it works with stands among the arguments, where `recollect.profile` looks for it."""
    del works_with
    return step()


def _explain_no_backward(name: str, calls: int) -> str:
    if not calls:
        return f"{name} ran no torch operators: name a function that runs a step, or returns a model and its inputs"
    return (
        f"{name} ran {calls} operators but no backward, so nothing is saved for backward: return the loss, run its "
        "backward (`loss.backward()`) inside the function, or return the model and its inputs"
    )


def _read_dtype(name: str) -> torch.dtype:
    import torch

    found = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        known = sorted({*_SHORT_DTYPES, *_SHORT_DTYPES.values()})
        expected = f"expected one of torch's floating-point types: {', '.join(known)}"
        fail(f"--dtype {name}: {expected}{hint_nearest(name, known)}")
    return found


def _check_device(name: str) -> None:
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch built without a device asserts
        reason = str(error).partition("\n")[0]
        fail(
            f"--device {name}: no step can run there: {reason}. For a device that this machine does not have, "
            "`recollect profile` and `recollect plan` can estimate with --dry"
        )


def _check_estimate(name: str) -> None:
    from recollect._profile.dry.roofline import find_device

    if "," in name:
        fail(f"--device {name}: expected one device; several are for `recollect plan --unknown`")
    try:
        find_device(name)
    except ValueError as error:
        fail(f"--device {name}: {error}")


def _read_optimizer(name: str) -> type[torch.optim.Optimizer]:
    import torch

    where, _, what = name.rpartition(":")
    try:
        module = importlib.import_module(where or "torch.optim")
    except ImportError as error:
        fail(f"--optimizer {name}: {error}")
    found = getattr(module, what, None)
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        fail(f"--optimizer {name}: {module.__name__} has no optimizer {what!r}{hint_nearest(what, classes)}")
    return found
