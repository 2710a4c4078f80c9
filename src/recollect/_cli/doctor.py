"""`recollect doctor`: says what this machine has, and which features work here."""

from typing import Annotated

import typer

from recollect._cli.endings import FAILED, loading
from recollect._cli.screen import keep_stdout_clean, show_progress
from recollect._core.documents import write_document

_VERSION = 1


def doctor(
    *,
    json: Annotated[bool, typer.Option("--json", help="Write the findings as JSON, and nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Check this machine: what it has, how fast it moves bytes, which features work. Takes a few seconds.

    Ends with exit code 1 if something that recollect needs is broken.

    **Examples**

        recollect doctor
        recollect doctor --json > machine.json
    """
    with loading():
        from recollect._cli.checks import CheckState
        from recollect._cli.findings import examine, print_findings

    with keep_stdout_clean(), show_progress("checking this machine", quiet=quiet) as show:
        findings = examine(show)
    if json:
        typer.echo(write_document(findings, kind="doctor", version=_VERSION))
    else:
        print_findings(findings)
    if any(check.state is CheckState.BROKEN for check in findings.checks):
        raise typer.Exit(FAILED)
