"""What `recollect doctor` finds: what this machine has, how fast bytes move on it, and which features work here."""

from dataclasses import dataclass

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from recollect._cli.checks import CHECKS, Accelerator, Check, CheckState, list_devices
from recollect._cli.screen import ShowProgress, make_console
from recollect._core.units import format_bytes
from recollect._profile.links import Link, measure_links

_COLOURS = {
    CheckState.OK: "green",
    CheckState.ABSENT: "dim",
    CheckState.LIMITED: "yellow",
    CheckState.BROKEN: "bold red",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the doctor found.

    Attributes:
        torch: version of torch.
        checks: in the order in which they were made.
        devices: the accelerators.
        links: that were measured.
    """

    torch: str
    checks: tuple[Check, ...]
    devices: tuple[Accelerator, ...]
    links: tuple[Link, ...]


def examine(show: ShowProgress) -> Findings:
    """Make all checks, and measure all links."""
    checks: list[Check] = []
    for done, check in enumerate(CHECKS):
        show(done, len(CHECKS) + 1)
        checks += check()
    show(len(CHECKS), len(CHECKS) + 1)
    links: list[Link] = []
    try:
        links += measure_links()
    except (OSError, RuntimeError) as error:
        found = f"{error}"
        checks.append(
            Check(name="link speeds", state=CheckState.LIMITED, found=found, advice="free some memory or disk")
        )
    return Findings(torch=torch.__version__, checks=tuple(checks), devices=tuple(list_devices()), links=tuple(links))


def print_findings(findings: Findings) -> None:
    """Print the findings as two tables."""
    console = make_console()
    table = Table(title="this machine", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in ("check", "state", "found", "what to do"):
        table.add_column(column, overflow="fold", no_wrap=column in {"check", "state"})
    for check in findings.checks:
        state = Text(check.state.value, style=_COLOURS[check.state])
        table.add_row(check.name, state, Text(check.found), Text(check.advice))
    console.print(table)
    speeds = Table(title="link speeds, measured", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    speeds.add_column("from and to", no_wrap=True)
    speeds.add_column("speed", justify="right", no_wrap=True)
    for link in findings.links:
        speeds.add_row(link.name, format_bytes(round(link.bytes_per_s)) + "/s")
    console.print(speeds)
