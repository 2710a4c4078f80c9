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
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments for a script.", show_default=False)
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="Where to run: cpu, cuda, cuda:1. With --dry what to estimate for: cuda, H200.",
    ),
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
    bool, typer.Option("--dry", help="Run nothing: estimate from shapes, without the memory and the device.")
]
StepOption = Annotated[
    int, typer.Option("--step", metavar="N", min=1, help="Which step of a script to profile, from 1.")
]
TracebackOption = Annotated[
    bool, typer.Option("--traceback", help="If something fails, show the frames of recollect, too.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no messages.")]
BudgetOption = Annotated[
    str,
    typer.Option(
        "--budget",
        metavar="BUDGET",
        help="The most that the whole step may take of the device: 16GiB, 80%, min (the smallest), fastest.",
    ),
]
TiersOption = Annotated[
    str | None, typer.Option("--tiers", metavar="TIER", help="host: values may also wait in host memory.")
]
LeverOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lever",
        metavar="NAME",
        help="What may be done beyond values: chunked_loss, chunked_mlp, micro_batches; may be repeated.",
    ),
]
OutOption = Annotated[
    Path, typer.Option("--out", metavar="FILE", help="File for the plan; - for standard output, and no text.")
]
PageOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="File for a page to open in a browser.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=N", help="A whole number that the function is called with; may be repeated."),
]
UnknownOption = Annotated[
    str | None,
    typer.Option(
        "--unknown",
        metavar="NAME",
        help="Look for the largest value of this parameter of the function that fits: batch, length. Implies --dry.",
    ),
]
MultipleOption = Annotated[
    int, typer.Option("--multiple-of", metavar="N", min=1, help="What the unknown is a multiple of.")
]
WorldOption = Annotated[
    int,
    typer.Option("--world", metavar="N", min=1, help="How many devices share the model's state. Implies --dry."),
]
ShardOption = Annotated[
    str, typer.Option("--shard", metavar="HOW", help="How they share it: fsdp2, each repeated block a unit.")
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
