"""`recollect profile`: profiles a step that the user names, prints where its memory goes, and writes it to files."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import recollect
from recollect._cli.endings import FAILED, loading, writing_output
from recollect._cli.report import check_path, print_report, write_file, write_report
from recollect._cli.screen import ShowProgress, fail, keep_stdout_clean, say, show_progress
from recollect._cli.target import Function, find_target
from recollect._core.calls import Phase
from recollect._core.profiles import Profile

if TYPE_CHECKING:
    import torch

# Torch, and what needs it, is imported where it is used: help and wrong usage must not wait for it.

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}
_STANDARD_OUTPUT = Path("-")


def profile(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="What to profile: module:function, path/to/file.py:function, or path/to/script.py."
        ),
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments for a script.", show_default=False)
    ] = None,
    *,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="Where to run: cpu, cuda, cuda:1. With --dry what to estimate for: cuda, H200.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="DTYPE", help="Data type of the model and its inputs: bf16, fp16, fp32, ..."),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer",
            help="Optimizer whose state to count: a class of torch.optim such as AdamW, or module:Class.",
            metavar="NAME",
        ),
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry", help="Run nothing: estimate from shapes, without the memory and the device.")
    ] = False,
    step: Annotated[
        int, typer.Option("--step", metavar="N", min=1, help="Which step of a script to profile, from 1.")
    ] = 2,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="File for the profile; - for standard output, and no text."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="File for a report to open in a browser.")
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Rows of each table of the text.")] = 20,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="If something fails, show the frames of recollect, too.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no messages.")] = False,
) -> None:
    """Profile one training step: what is in memory at the peak, and what put it there.

    A **function** is called without arguments, or with variables of its module that have their names:
    `train_step(model, batch)`. It returns what to profile:

    - a model, or `(model, *inputs)`: forward and backward of the model, whose output is the loss or is summed to one;
    - a mapping with `model`, `inputs` (a mapping: by keyword), `kwargs`, `loss` (output to loss), `optimizer`, `step`;
    - a function that runs a step, or returns its loss: it runs once, and is profiled while it runs again;
    - anything else, such as a loss: the function itself was the step, and is profiled while it runs again.

    If memory runs out, it says what was alive and which modules, recomputed, would have made room.

    A **script** runs as a program, with ARGS, until its optimizer has made its second step (--step). That step
    is profiled, then the script is stopped.

    **Exit codes**: 0 done, 1 the code of the target failed or has no step to profile, 2 wrong usage.

    **Examples**

        recollect profile train.py:make_model --optimizer AdamW --html step.html
        recollect profile my.package.train:step --device cuda --json step.json
        recollect profile train.py -- --batch-size 8
        recollect profile train.py:make_model --dry --device H200 --dtype bf16
    """
    for path, ending in ((json, ""), (html, ".html")):
        if path is not None and path != _STANDARD_OUTPUT:
            check_path(path, (ending,))
    if html == _STANDARD_OUTPUT:
        fail("--html -: a page cannot go to standard output; give a file")
    # The user's code may change the folder.
    page, data = (None if path is None else path.absolute() for path in (html, json))
    with loading():
        from recollect._cli.users_code import users_code

        _ = recollect.on_oom  # torch, and all of the library
    options = _Options(device=device, dtype=dtype, optimizer=optimizer, dry=dry, step=step)
    with contextlib.ExitStack() as stack:
        if json == _STANDARD_OUTPUT:
            stack.enter_context(keep_stdout_clean())
        progress = stack.enter_context(show_progress(f"profiling {target}", quiet=quiet))
        with users_code(shows_all=traceback), recollect.on_oom():
            taken = options.take(target, args or [], progress)
    with contextlib.ExitStack() as stack:  # what cannot be written does not keep the others from being written
        if page is not None:
            stack.callback(write_report, taken, page, against=None, top=top, quiet=quiet, called=html)
        if json == _STANDARD_OUTPUT:
            with writing_output():
                sys.stdout.write(taken.to_json() + "\n")
            return
        if data is not None:
            stack.callback(write_file, data, taken.to_json() + "\n", quiet=quiet, called=json)
        print_report(taken, against=None, top=top)


class _Options:
    """How a target is profiled, read from what was given."""

    def __init__(self, *, device: str | None, dtype: str | None, optimizer: str | None, dry: bool, step: int) -> None:
        self.device, self.is_dry, self.step = device, dry, step
        self.dtype = None if dtype is None else _read_dtype(dtype)
        self.optimizer = None if optimizer is None else _read_optimizer(optimizer)
        if device is not None:
            _check_estimate(device) if dry else _check_device(device)

    def take(self, target: str, args: list[str], progress: ShowProgress) -> Profile:
        """The profile of a target."""
        from recollect._cli.script import profile_script

        found = find_target(target)
        if isinstance(found, Function):
            if args:
                fail(f"{target} is a function and takes no arguments, not {' '.join(args)}; only scripts do")
            return self._take_function(found, progress)
        given = {"--device": self.device, "--dtype": self.dtype, "--optimizer": self.optimizer, "--dry": self.is_dry}
        for name, value in given.items():
            if value:
                fail(f"{name} says how to run a function; {target} is a script, which runs as written")
        return profile_script(found.path, args, step=self.step, progress=progress)

    def _take_function(self, function: Function, progress: ShowProgress) -> Profile:
        import torch

        from recollect._cli.seen import Seen
        from recollect._cli.subject import check_function, move_subject, read_subject

        check_function(function.call, function.name)
        with Seen() as seen:
            result = self._call(function)
        subject = read_subject(result, function.call, function.name)
        options = {**subject.options, **({} if self.optimizer is None else {"optimizer": self.optimizer})}
        if isinstance(subject.what, torch.nn.Module):
            if self.is_dry:
                here = "cuda" if torch.cuda.is_available() else "cpu"
                options |= {"dry": True, "device": self.device or here, "dtype": self.dtype}
            else:
                subject = move_subject(subject, self.device, self.dtype)
            return recollect.profile(subject.what, *subject.inputs, progress=progress, **options)
        if self.is_dry:
            fail(f"--dry needs the model itself: let {function.name} return (model, *inputs), or a mapping")
        with self._surroundings(self.device):
            if subject.what is not function.call:
                with seen:
                    subject.what()
            step = functools.partial(_run, subject.what, seen.list_modules(), seen.optimizers)
            taken = recollect.profile(step, name=function.name, progress=progress, **options)
        if all(call.phase is Phase.FORWARD for call in taken.calls):
            fail(_explain_no_backward(function.name, len(taken.calls)), code=FAILED)
        return taken

    def _call(self, function: Function) -> Any:
        """What the function gives; in a dry run without memory, if it can do without."""
        if self.is_dry:
            try:
                with self._surroundings("meta"):
                    return function.call()
            except (RuntimeError, NotImplementedError) as error:  # it asks tensors for values, which these have not
                say(f"{function.name} needs values, so its tensors take memory: {error}")
        with self._surroundings(None if self.is_dry else self.device):
            return function.call()

    @contextlib.contextmanager
    def _surroundings(self, device: str | None) -> Generator[None, None, None]:
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


def _run(step: Callable[[], Any], *works_with: Any) -> Any:
    """Run a step. What it works with stands among the arguments, where `recollect.profile` looks for it."""
    del works_with
    return step()


def _explain_no_backward(name: str, calls: int) -> str:
    if not calls:
        return f"{name} ran no operator of torch: name a function that runs a step, or returns a model and its inputs"
    return (
        f"{name} ran {calls} operators and no backward, so nothing is kept for one: return the loss, run its backward "
        "(`loss.backward()`) inside the function, or return the model and its inputs"
    )


def _read_dtype(name: str) -> torch.dtype:
    import torch

    found = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        known = sorted({*_SHORT_DTYPES, *_SHORT_DTYPES.values()})
        fail(f"--dtype {name}: expected a floating-point type of torch, one of {', '.join(known)}")
    return found


def _check_device(name: str) -> None:
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch built without a device asserts
        reason = str(error).partition("\n")[0]
        fail(f"--device {name}: no step can run there: {reason}; --dry estimates for a device that is not here")


def _check_estimate(name: str) -> None:
    from recollect._profile.dry.roofline import find_device

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
        near = difflib.get_close_matches(what, classes, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        fail(f"--optimizer {name}: {module.__name__} has no optimizer {what!r}{hint}")
    return found
