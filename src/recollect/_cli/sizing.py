"""How large a step may be on devices that are not here: `recollect plan --unknown`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from recollect._cli.endings import FAILED
from recollect._cli.screen import ShowProgress, fail, make_console
from recollect._cli.target import Function
from recollect._core.numbers import format_rate, format_seconds
from recollect._core.profiles import Profile
from recollect._core.units import format_bytes

if TYPE_CHECKING:
    from recollect._cli.profiling import ProfileOptions
    from recollect._fit.largest import Largest


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be found out.

    Attributes:
        unknown: the parameter of the function whose largest value is looked for.
        multiple_of: what the value is a multiple of.
        world: how many devices share the state.
        budget: as of `recollect.plan`.
        tiers: likewise.
    """

    unknown: str
    multiple_of: int
    world: int
    budget: int | str
    tiers: str | Sequence[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What fits on one device.

    Attributes:
        device: its name.
        budget_bytes: of it.
        ways: the largest that fits, for each way to run the step.
        profile: of the step at the largest that a plan makes fit; None if nothing does.
    """

    device: str
    budget_bytes: int
    ways: Sequence[Largest]
    profile: Profile | None


def find_sizes(function: Function, options: ProfileOptions, question: Question, progress: ShowProgress) -> Found:
    """Search for the largest value of the unknown on the device of the options.

    Raises:
        typer.Exit: the function has no such parameter, or the budget is none here; said on standard error.
    """
    from recollect._fit.largest import FULL, PLAIN, PLANNED, Sizes
    from recollect._plan.budget import parse_budget
    from recollect._plan.sharding import shard

    tried = itertools.count(1)

    def profile_at(value: int) -> Profile:
        progress(next(tried), None)
        taken = options.take_function(function.give({question.unknown: value}), lambda done, total: None)
        return shard(taken, question.world)

    start = function.give({question.unknown: 1}).find_default(question.unknown) or question.multiple_of
    first = profile_at(start)
    budget_bytes = parse_budget(question.budget, device_bytes=first.capacity_bytes).bytes
    if budget_bytes is None:
        fail(
            f"--budget {question.budget}: to find the largest {question.unknown}, give a number of bytes or a "
            "share, as in 40GiB or 90%"
        )
    sizes = Sizes(profile_at, budget_bytes, tiers=question.tiers, known={start: first})
    ways = [sizes.find_largest(way, start=start, multiple_of=question.multiple_of) for way in (FULL, PLAIN, PLANNED)]
    full, plain, planned = ways
    best = planned.value
    return Found(
        device=first.device,
        budget_bytes=budget_bytes,
        ways=(plain, full, planned),
        profile=sizes.profile(best) if best else None,
    )


def print_sizes(found: Sequence[Found], question: Question, given: Mapping[str, int]) -> None:
    """Print what fits where, a table for each device.

    Raises:
        typer.Exit: nothing fits anywhere; said on standard error.
    """
    said = ", ".join(f"{name} {value:,}" for name, value in given.items())
    shared = f" on each of {question.world} devices under FSDP2" if question.world > 1 else ""
    for one in found:
        table = Table(
            title=f"{one.device}: largest {question.unknown} within {format_bytes(one.budget_bytes)}{shared}"
            f"{f', with {said}' if said else ''}",
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
        )
        table.add_column("way", no_wrap=True)
        for column in (question.unknown, "peak", "step", f"{question.unknown} per second"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in one.ways:
            if not row.value:
                table.add_row(row.way, "none fits")
                continue
            rate = format_rate(row.value / row.step_s) if row.step_s else ""
            size = format_bytes(row.peak_bytes)
            table.add_row(row.way, f"{row.value:,}", size, format_seconds(row.step_s), rate)
        make_console().print(table)
    if all(one.profile is None for one in found):
        fail(f"nothing fits: not even {question.unknown} {question.multiple_of}", code=FAILED)
