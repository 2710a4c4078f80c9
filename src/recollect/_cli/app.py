"""The commands of the command line, in the order in which help lists them. A new one is a file, and a line here."""

from typing import Annotated

import typer

from recollect import __version__
from recollect._cli.bench import bench
from recollect._cli.demo import demo
from recollect._cli.doctor import doctor
from recollect._cli.endings import end_quietly
from recollect._cli.fit import fit
from recollect._cli.plan import plan
from recollect._cli.profile import profile
from recollect._cli.report import report

app = typer.Typer(
    name="recollect",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _command in (profile, report, plan, fit, bench, doctor, demo):
    app.command()(end_quietly(_command))


def _show_version(is_asked: bool) -> None:  # noqa: FBT001 (typer calls it so)
    if is_asked:
        import torch

        typer.echo(f"recollect {__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def recollect(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Activation memory of PyTorch training: see where it goes, and fit it into a budget.

    Each command explains itself: `recollect COMMAND --help`.

    **Exit codes** of all commands: 0 done; 1 your code failed, nothing fits, or something does not work; 2 wrong usage:
    the command does not accept an option, a target or a file; 130 interrupted.
    """
