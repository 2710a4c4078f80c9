"""What commands that plan print and write: the table, the plan as JSON, the page."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from recollect._cli.arguments import STANDARD_OUTPUT
from recollect._cli.endings import FAILED, writing_output
from recollect._cli.report import check_path, write_file
from recollect._cli.screen import fail, say, show_progress
from recollect._core.errors import RecollectError
from recollect._core.plans import Plan
from recollect._core.profiles import Profile
from recollect._core.spelling import options_typed

T = TypeVar("T")

_FEWEST_BYTES = 1024  # less is a number whose unit was forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFiles:
    """Where a plan goes.

    Attributes:
        out: file for the plan; ``-`` for standard output.
        html: file for the page; None for none.
        quiet: whether to say nothing else.
        places: the absolute paths of both: the user's code may change the folder.
    """

    out: Path
    html: Path | None
    quiet: bool
    places: tuple[Path, Path | None]

    @classmethod
    def check(cls, out: Path, html: Path | None, *, quiet: bool) -> Self:
        """Where a plan is to go, checked before the work is done.

        Raises:
            typer.Exit: a file cannot be written; said on standard error.
        """
        if out != STANDARD_OUTPUT:
            check_path(out, (".json",))
        if html == STANDARD_OUTPUT:
            fail("--html -: a page cannot go to standard output; name a file")
        if html is not None:
            check_path(html, (".html",))
        return cls(out=out, html=html, quiet=quiet, places=(out.absolute(), None if html is None else html.absolute()))

    @property
    def is_piped(self) -> bool:
        """Whether standard output is for the plan alone."""
        return self.out == STANDARD_OUTPUT

    def write(self, plan: Plan, profile: Profile, *, tiers: str | Sequence[str] | None) -> None:
        """Print the plan, and write it and its page; what cannot be written does not keep the others from it."""
        out, _ = self.places
        with ExitStack() as stack:
            if self.html is not None:
                stack.callback(self.write_page, plan, profile, tiers=tiers)
            with writing_output():
                sys.stdout.write(f"{plan.to_json() if self.is_piped else plan}\n")
            if not self.is_piped:
                stack.callback(write_file, out, plan.to_json() + "\n", quiet=self.quiet, called=self.out)
        if not self.is_piped and not self.quiet:
            say(f'to use it: recollect.apply(model, recollect.Plan.from_json(open("{self.out}").read()))')

    def write_page(self, plan: Plan, profile: Profile, *, tiers: str | Sequence[str] | None = None) -> None:
        """Write the page of a plan alone."""
        from recollect._fit.alternatives import list_alternatives
        from recollect._fit.work import find_margin_share
        from recollect._report.plan_html import write_plan_html

        _, html = self.places
        assert html is not None
        with show_progress(f"writing {self.html}", quiet=self.quiet):
            offered = list_alternatives(profile, tiers=tiers)
            page = write_plan_html(plan, profile, offered, margin_share=find_margin_share(profile))
        write_file(html, page, quiet=self.quiet, called=self.html)


def explain_failure(work: Callable[[], T]) -> T:
    """What the work gives, which is this library's own: no code of the user's runs in it.

    Raises:
        typer.Exit: it fails, for reasons that its message explains; said on standard error.
    """
    try:
        with options_typed():
            return work()
    except ImportError as error:
        fail(str(error))
    except (RecollectError, ValueError) as error:
        fail(str(error), code=FAILED)


def read_budget(budget: str) -> int | str:
    """The budget that was written, bytes without a unit as a number.

    Raises:
        typer.Exit: said on standard error.
    """
    from recollect._plan.budget import parse_budget

    wanted = int(budget) if budget.strip().isdecimal() else budget
    try:
        parse_budget(wanted, device_bytes=1)
    except ValueError as error:
        fail(f"--budget: {error}")
    if isinstance(wanted, int) and wanted < _FEWEST_BYTES:
        fail(f"--budget {budget} means {wanted} bytes, which no step can run in: to say GiB, write {wanted}GiB")
    return wanted


def read_typed_tiers(text: str | None) -> str | tuple[str, ...] | None:
    """The tiers that were written, as `recollect.plan` takes them.

    Raises:
        typer.Exit: there are no such tiers; said on standard error.
    """
    from recollect._plan.tiers import parse_typed, read_tiers

    if text is None:
        return None
    tiers = parse_typed(text)
    try:
        with options_typed():
            read_tiers(tiers)
    except ValueError as error:
        fail(str(error))
    return tiers
