"""`recollect profile`: profiles a step that the user names, prints where its memory goes, and writes it to files."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

import recollect
from recollect._cli.arguments import (
    STANDARD_OUTPUT,
    DeviceOption,
    DryOption,
    DtypeOption,
    OptimizerOption,
    QuietOption,
    ScriptArguments,
    StepOption,
    Target,
    TracebackOption,
)
from recollect._cli.endings import loading, writing_output
from recollect._cli.profiling import ProfileOptions
from recollect._cli.report import check_path, print_report, write_file, write_report
from recollect._cli.screen import fail, keep_stdout_clean, show_progress


def profile(
    target: Target,
    args: ScriptArguments = None,
    *,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    optimizer: OptimizerOption = None,
    dry: DryOption = False,
    step: StepOption = 2,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="File for the profile; - prints it to standard output, and nothing else."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="File for a report to open in a browser.")
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Rows in each table of the text.")] = 20,
    traceback: TracebackOption = False,
    quiet: QuietOption = False,
) -> None:
    """Profile one training step: what is in memory at the peak, and what put it there.

    A **function** is called without arguments. If it has parameters, as `train_step(model, batch)` does, it gets the
    module's variables of the same names. It returns what to profile:

    - a model, or `(model, *inputs)`: its forward and backward; the output is the loss, or is summed to one;
    - a mapping with `model`, `inputs` (a mapping: by keyword), `kwargs`, `loss` (output to loss), `optimizer`, `step`;
    - a function that runs a step, or returns its loss: it runs once, and is profiled when it runs again;
    - anything else, such as a loss: the function itself was the step, and is profiled when it runs again.

    If memory runs out, recollect says what was in memory, and which modules to recompute to make room.

    A **script** runs as a program, with ARGS, until its optimizer has taken its second step (--step). That step
    is profiled, then the script is stopped.

    **Exit codes**: 0 done, 1 the target's code failed or has no step to profile, 2 wrong usage.

    **Examples**

        recollect profile train.py:make_model --optimizer AdamW --html step.html
        recollect profile my.package.train:step --device cuda --json step.json
        recollect profile train.py -- --batch-size 8
        recollect profile train.py:make_model --dry --device H200 --dtype bf16
    """
    for path, ending in ((json, ""), (html, ".html")):
        if path is not None and path != STANDARD_OUTPUT:
            check_path(path, (ending,))
    if html == STANDARD_OUTPUT:
        fail("--html -: a page cannot go to standard output; name a file")
    # The user's code may change the folder.
    page, data = (None if path is None else path.absolute() for path in (html, json))
    with loading():
        from recollect._cli.users_code import users_code

        _ = recollect.on_oom  # torch, and all of the library
    options = ProfileOptions(device=device, dtype=dtype, optimizer=optimizer, dry=dry, step=step)
    with contextlib.ExitStack() as stack:
        if json == STANDARD_OUTPUT:
            stack.enter_context(keep_stdout_clean())
        progress = stack.enter_context(show_progress(f"profiling {target}", quiet=quiet))
        with users_code(shows_all=traceback), recollect.on_oom():
            taken = options.take(target, args or [], progress)
    with contextlib.ExitStack() as stack:  # what cannot be written does not keep the others from being written
        if page is not None:
            stack.callback(write_report, taken, page, against=None, top=top, quiet=quiet, called=html)
        if json == STANDARD_OUTPUT:
            with writing_output():
                sys.stdout.write(taken.to_json() + "\n")
            return
        if data is not None:
            stack.callback(write_file, data, taken.to_json() + "\n", quiet=quiet, called=json)
        print_report(taken, against=None, top=top)
