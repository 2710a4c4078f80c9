"""Arguments and options that several commands take: a target, and how it is run."""

from pathlib import Path
from typing import Annotated

import typer

from recollect._cli.screen import fail

STANDARD_OUTPUT = Path("-")
"""What a file is called that is standard output."""

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="What to profile: module:function, path/to/file.py:function, or path/to/script.py."
    ),
]
TargetOrProfile = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="What to plan for: module:function, path/to/file.py:function, path/to/script.py, or a profile, step.json.",
    ),
]
FunctionTarget = Annotated[
    str, typer.Argument(metavar="TARGET", help="What to fit: module:function or path/to/file.py:function.")
]
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments for a script.", show_default=False)
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="Where to run: cpu, cuda, cuda:1. With --dry, the device to estimate for: cuda, H200.",
    ),
]
RealDeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="Where to run: cpu, cuda, cuda:1.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", metavar="DTYPE", help="Data type of the model and its inputs: bf16, fp16, fp32, ..."),
]
OptimizerOption = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        help="Optimizer whose state to count: a class of torch.optim such as AdamW, or module:Class.",
        metavar="NAME",
    ),
]
DryOption = Annotated[
    bool, typer.Option("--dry", help="Run nothing: estimate from shapes. Needs neither the memory nor the device.")
]
StepOption = Annotated[
    int, typer.Option("--step", metavar="N", min=1, help="Which step of a script to profile, counting from 1.")
]
TracebackOption = Annotated[
    bool, typer.Option("--traceback", help="On failure, show recollect's own stack frames too.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no messages.")]
BudgetOption = Annotated[
    str,
    typer.Option(
        "--budget",
        metavar="BUDGET",
        help="The most device memory that the whole step may use: 16GiB, 80%, min (the smallest peak), or fastest (the "
        "plain step).",
    ),
]
TiersOption = Annotated[
    str | None,
    typer.Option(
        "--tiers",
        metavar="TIERS",
        help="Also move values: to host memory (host), to disk (disk), or to disk once the host is full (host,disk).",
    ),
]
LeverOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lever",
        metavar="NAME",
        help="What else the plan may do: chunked_loss, chunked_mlp, micro_batches; may be repeated.",
    ),
]
OutOption = Annotated[
    Path,
    typer.Option("--out", metavar="FILE", help="File for the plan; - prints it to standard output, and nothing else."),
]
PageOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="File for an HTML page to open in a browser.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=N", help="An argument of the function, a whole number; may be repeated."),
]
UnknownOption = Annotated[
    str | None,
    typer.Option(
        "--unknown",
        metavar="NAME",
        help="Find the largest value of this parameter of the function that fits: batch, length. Implies --dry.",
    ),
]
MultipleOption = Annotated[
    int, typer.Option("--multiple-of", metavar="N", min=1, help="Only try multiples of this number.")
]
WorldOption = Annotated[
    int,
    typer.Option("--world", metavar="N", min=1, help="How many devices share the model's state. Implies --dry."),
]
ShardOption = Annotated[
    str, typer.Option("--shard", metavar="HOW", help="How they share it: fsdp2, with each repeated block as a unit.")
]


def read_values(given: list[str] | None) -> dict[str, int]:
    """What ``--set NAME=N`` gives.

    Raises:
        typer.Exit: it has another form; said on standard error.

    >>> read_values(["batch=8", "length=4096"])
    {'batch': 8, 'length': 4096}
    """
    found = {}
    for text in given or []:
        name, _, value = text.partition("=")
        if not name.isidentifier() or not value.strip().lstrip("-").isdecimal():
            fail(f"--set {text}: expected NAME=N, as in --set batch=8")
        found[name] = int(value)
    return found
