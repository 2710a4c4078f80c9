"""Profiles one step of a training script as it runs, and stops the script after it.

What counts as a step is told by the optimizer: step 2 begins with the first module that is called after the optimizer's
first step, and ends with its second. A script that calls no module has its step 2 begin where the first one ends. By
default it is the second that is profiled: only then is the optimizer's state there.
"""

import contextlib
import runpy
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from recollect._cli.endings import FAILED
from recollect._cli.screen import ShowProgress, fail
from recollect._cli.seen import CallLog
from recollect._core.profiles import Profile
from recollect._inspect.step import StepProfiler

_LOOK_AGAIN_S = 0.05
_STOPPED_S = 5.0  # within which a thread that is stopped has ended


class _StepTakenError(BaseException):
    """Ends the script from within; no `except Exception` of the user's stops it.

    What catches it all the same meets it again after the next step.
    """


def profile_script(path: Path, args: Sequence[str], *, step: int = 2, progress: ShowProgress | None = None) -> Profile:
    """Run a script as a program until the end of a step, and profile that step.

    Args:
        path: of the script.
        args: it finds in `sys.argv`.
        step: which, from 1.
        progress: called now and then with the number of operators so far, and None.

    Raises:
        typer.Exit: the script ended before; said on standard error.
    """
    watch = _StepWatch(step, name=path.name, progress=progress)
    with watch.watching(), _as_program(path, args), _threads() as list_threads:
        try:
            runpy.run_path(str(path), run_name="__main__")
        except _StepTakenError:
            pass
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        except Exception:
            if watch.profile is None:  # otherwise it was raised while the script was being stopped
                raise
        while watch.profile is None and (running := list_threads()):  # as Python waits for them
            running[0].join(_LOOK_AGAIN_S)
        watch.wait_for_end()
    if watch.profile is None:
        fail(_explain_end(path, watch.seen.steps, step), code=FAILED)
    return watch.profile


def _explain_end(path: Path, steps: int, wanted: int) -> str:
    if not steps:
        return (
            f"{path} ended without an optimizer step, so there is nothing to profile: name a function that runs a "
            f"step, {path}:function"
        )
    if steps >= wanted:
        return (
            f"{path} called no torch.nn.Module in step {wanted}, but a step begins where one is first called: "
            f"{'pass `--step 2`, or ' * (wanted == 1)}name a function that runs a step, {path}:function"
        )
    return (
        f"{path} ended after {steps} optimizer step{'s' * (steps != 1)}, before step {wanted}, which was to "
        f"be profiled: pass `--step {steps}`, or let it run longer"
    )


class _StepWatch:
    """Waits for a step of a script that runs, and profiles it.

    The optimizer's hooks count, and the first module that is called afterwards begins: what a script does between its
    steps is no part of them. Where none was called before, a hook of the one optimizer begins: the profiler adds hooks
    of all optimizers, which cannot be done while these run, and those of the one run before.

    Attributes:
        profile: of the step, once it was made.
    """

    def __init__(self, step: int, *, name: str, progress: ShowProgress | None) -> None:
        self.profile: Profile | None = None
        self.seen = CallLog()
        self._step, self._name, self._progress = step, name, progress
        self._profiler: StepProfiler | None = None
        self._has_begun = False
        self._thread = 0  # of the training: profilers are entered and left on one
        self._hooks = contextlib.ExitStack()

    @contextlib.contextmanager
    def watching(self) -> Generator[None, None, None]:
        """Watch what runs inside."""
        with self.seen, self._hooks:
            self._hooks.callback(register_module_forward_pre_hook(self._before_module).remove)
            self._hooks.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            try:
                yield
            finally:
                if self._profiler is not None and self._thread == threading.get_ident():
                    unfinished = _StepTakenError()
                    self._profiler.__exit__(type(unfinished), unfinished, None)

    def wait_for_end(self) -> None:
        """Let the thread of the training end where it is another: what stops it is shown by whoever shows errors then.

        It need not end: it may catch what stops it.
        """
        for one in threading.enumerate():
            if one.ident == self._thread and one is not threading.current_thread():
                one.join(_STOPPED_S)

    def _before_module(self, _: nn.Module, inputs: Any) -> None:
        is_training = self._thread in (0, threading.get_ident())
        if not self._has_begun and is_training and self.seen.steps >= self._step - 1:
            self._begin(inputs)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        first = next(iter(self.seen.optimizers), optimizer)
        if self._has_begun or optimizer is not first:
            return
        self._thread = threading.get_ident()
        if self.seen.steps == self._step - 2 and not self.seen.list_modules():
            self._hooks.callback(optimizer.register_step_post_hook(self._begin_without_module).remove)

    def _begin_without_module(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._has_begun:
            self._begin([group["params"] for group in optimizer.param_groups], optimizer)

    def _begin(self, inputs: Any, *optimizers: torch.optim.Optimizer) -> None:
        self._has_begun, self._thread = True, threading.get_ident()
        profiler = StepProfiler(
            self.seen.list_modules(),
            list(dict.fromkeys((*self.seen.optimizers, *optimizers))),
            inputs=inputs,
            name=self._name,
            restores=False,
            progress=self._progress,
        )
        self._profiler = profiler.__enter__()
        # Added after the profiler's own, so that it has seen the step when this ends it.
        self._hooks.callback(register_optimizer_step_post_hook(self._finish).remove)

    def _finish(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.profile is None:
            if optimizer is not self.seen.optimizers[0] or self.seen.steps < self._step:
                return
            profiler, self._profiler = self._profiler, None
            assert profiler is not None
            profiler.__exit__(None, None, None)
            self.profile = profiler.profile
        raise _StepTakenError


@contextlib.contextmanager
def _threads() -> Generator[Callable[[], list[threading.Thread]], None, None]:
    """Let threads that are begun inside be stopped without a word. Gives what lists those that Python waits for."""
    before, show = threading.enumerate(), threading.excepthook

    def show_others(args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, _StepTakenError):
            show(args)

    threading.excepthook = show_others
    try:
        yield lambda: [one for one in threading.enumerate() if one not in before and not one.daemon]
    finally:
        threading.excepthook = show


@contextlib.contextmanager
def _as_program(path: Path, args: Sequence[str]) -> Generator[None, None, None]:
    """Let `sys` look as it does to a script that Python was given."""
    argv, before = sys.argv, list(sys.path)
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, before
