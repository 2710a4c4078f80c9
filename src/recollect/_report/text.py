"""The report as text: tables for a terminal or a pipe, from 80 columns on. Needs rich.

Names come from the user's model: none of them is read as markup, and none reaches the terminal with control characters.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from recollect._core.calls import Category, Phase
from recollect._core.families import Families
from recollect._core.gains import Gain
from recollect._core.numbers import format_flops, format_seconds, format_share
from recollect._core.profiles import Profile
from recollect._core.units import count_noun, format_bytes, list_some
from recollect._report.answer import Answer, answer, fold_gains
from recollect._report.escaping import spell_out
from recollect._report.summary import SavedRow, find_peak, list_modules, list_ops, list_saved, sum_saved
from recollect._report.tree import Branch, fold_modules
from recollect._report.verdict import judge_allocator, judge_peak

_BAR_WIDTH = 24
_MOST_HOLDERS = 3
_WORDS = {Phase.OPTIMIZER: "optimizer"}


def render_text(
    profile: Profile, *, against: Profile | None = None, gains: Sequence[Gain] = (), top: int = 20
) -> RenderableType:
    """The whole report, for `rich.print` or a `rich.console.Console`.

    Args:
        profile: the step.
        against: what it is compared with, as the step before a change.
        gains: what recomputing modules would free, what gives most first.
        top: how many lines a table has at most.

    >>> from rich.console import Console
    >>> Console(width=80).print(render_text(Profile(storages=(), calls=(), name="GPT")))
    GPT: peak 0 B, before the first call
    """
    found = answer(profile, gains)
    parts: list[RenderableType] = [*_headline(profile, found)]
    sections = [
        _suggestions(found),
        _comparison(profile, against) if against is not None else None,
        _judgement(profile),
        _alive(profile),
        _saved(profile, top),
        _modules(profile, top),
        _gains(profile, gains, top),
        _ops(profile, top),
        _rules(profile, top),
        _notes(profile),
    ]
    for section in sections:
        if section is not None:
            parts += ["", section]
    return Group(*parts)


def write_text(
    profile: Profile,
    *,
    against: Profile | None = None,
    gains: Sequence[Gain] = (),
    top: int = 20,
    width: int = 100,
    encoding: str = "utf-8",
) -> str:
    r"""The whole report as plain text: no colours, no spaces at the ends of lines, letters that an encoding has.

    >>> write_text(Profile(storages=(), calls=(), name="GPT"))
    'GPT: peak 0 B, before the first call\n'
    """
    page = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace", newline="")
    console = Console(file=page, width=width, color_system=None, force_terminal=False, force_jupyter=False)
    console.print(render_text(profile, against=against, gains=gains, top=top))
    page.seek(0)
    return "".join(f"{line.rstrip()}\n" for line in page).replace(r"\xb5s", "us")  # µs, spelled out


def show(text: str, style: str = "") -> Text:
    """A text as it is: no markup in it is read, and what would steer a terminal is spelled out."""
    return Text(spell_out(text), style=style, overflow="fold")


# Sections


def _headline(profile: Profile, found: Answer) -> Iterator[RenderableType]:
    peak = find_peak(profile)
    what = " on ".join(filter(None, (profile.name or "step", profile.device)))
    estimated = ", estimated: nothing was run" if profile.is_dry else ""
    yield show(f"{what}: peak {format_bytes(peak.bytes)}{estimated}, {peak.sentence}", "bold")
    if found.fits is not None:
        yield show(found.fit, "green" if found.fits else "red bold")
    if profile.step_s is not None:
        phases = dict.fromkeys(Phase, 0.0)
        for call in profile.calls:
            phases[call.phase] += call.seconds or 0.0
        shown = ", ".join(f"{_word(phase)} {format_seconds(time)}" for phase, time in phases.items() if time)
        clock = f", {profile.clock.value}" if profile.clock is not None else ""
        yield show(f"step {format_seconds(profile.step_s)}{clock}: {shown}")
    if found.fits is None and profile.calls:
        yield show(found.fit, "dim")


def _suggestions(found: Answer) -> RenderableType | None:
    if not found.suggestions:
        return None
    table = Table.grid(padding=(0, 1, 0, 0))
    for number, one in enumerate(found.suggestions, 1):
        table.add_row(f"{number}.", show(f"{one.what}: {one.gives}"))
        table.add_row("", Padding(show(one.code, "cyan"), (0, 0, 0, 2)))
    return _section("what would help, best first", table)


def _judgement(profile: Profile) -> RenderableType | None:
    """What the peak is made of, in sentences."""
    sentences = [*judge_peak(find_peak(profile)), *(judge_allocator(entry) for entry in profile.allocators)]
    return _section("why", *map(show, sentences)) if sentences else None


def _alive(profile: Profile) -> RenderableType | None:
    peak = find_peak(profile)
    if not peak.bytes:
        return None
    table = _table("", ">bytes", ">share", "")
    largest = max(peak.by_category.values())
    for category, size in peak.by_category.items():
        bar = _Bar(size / largest, _COLOURS[category])
        table.add_row(show(category.value), format_bytes(size), format_share(size, peak.bytes), bar)
    if peak.recomputed_bytes:
        share = format_share(peak.recomputed_bytes, peak.bytes)
        table.add_row("of these recomputed", format_bytes(peak.recomputed_bytes), share, "")
    return _section("alive at the peak", table)


def _saved(profile: Profile, top: int) -> RenderableType | None:
    rows = list_saved(profile)
    if not rows:
        return None
    families = Families(profile.modules)
    groups: dict[object, list[SavedRow]] = {}
    for row in rows:
        key = (families.name(row.module), row.op, row.shape, row.dtype, row.bytes, row.source)
        groups.setdefault(key, []).append(row)
    ordered = sorted(groups.values(), key=lambda group: -sum(row.bytes for row in group))
    table = _table(">bytes", ">", "tensor", "made by")
    table.columns[2].no_wrap = True
    for group in ordered[:top]:
        size = format_bytes(sum(row.bytes for row in group))
        tensor = f"{group[0].dtype}{list(group[0].shape)}"
        table.add_row(size, _times(len(group)), show(tensor), show(_describe_maker(group, families)))
    totals = sum_saved(profile)
    title = f"saved for backward: {format_bytes(totals.bytes)} in {count_noun(len(rows), 'tensor')}, largest first"
    reason = show(totals.sentence, "dim") if totals.sentence else None
    return _section(title, reason, table, _left_out(len(ordered) - top))


def _modules(profile: Profile, top: int) -> RenderableType | None:
    branches = fold_modules(list_modules(profile))
    holding = [branch for branch in branches if branch.saved_bytes or branch.parameter_bytes]
    if len(branches) == 1 or not holding:
        return None
    largest = sorted(holding, key=lambda branch: (-branch.saved_bytes, branch.depth))[:top]
    shown = {id(branch) for branch in largest}
    has_times = profile.step_s is not None
    again = any(branch.recompute_s for branch in branches)
    names = [*((">forward", ">backward") if has_times else ()), *((">again",) if again else ())]
    table = _table("module", ">", ">saved", ">parameters", *names)
    for branch in branches:
        if id(branch) in shown:
            times = [branch.forward_s, branch.backward_s, *((branch.recompute_s,) if again else ())]
            table.add_row(
                _label(branch),
                _times(branch.count),
                format_bytes(branch.saved_bytes),
                format_bytes(branch.parameter_bytes),
                *(format_seconds(time) for time in (times if has_times else ())),
            )
    return _section("by module", table, _left_out(len(holding) - len(largest)))


def _ops(profile: Profile, top: int) -> RenderableType | None:
    rows = list_ops(profile)
    if not rows:
        return None
    has_times = profile.step_s is not None
    table = _table("operator", ">calls", ">saved", ">made", *((">time",) if has_times else ()), ">operations")
    for row in rows[:top]:
        table.add_row(
            show(shorten_op(row.op)),
            str(row.calls),
            format_bytes(row.saved_bytes),
            format_bytes(row.made_bytes),
            *((format_seconds(row.seconds),) if has_times else ()),
            format_flops(row.flops) if row.flops else "-",
        )
    return _section("by operator", table, _left_out(len(rows) - top))


def _rules(profile: Profile, top: int) -> RenderableType | None:
    if not profile.rules:
        return None
    table = _table("region", ">", "rule", "decision", ">values", ">bytes")
    for rule in profile.rules[:top]:
        table.add_row(
            show(rule.region),
            _times(rule.regions),
            show(rule.rule),
            rule.decision.value,
            str(rule.values),
            format_bytes(rule.bytes),
        )
    return _section("what each entry of a policy matched", table, _left_out(len(profile.rules) - top))


def _gains(profile: Profile, gains: Sequence[Gain], top: int) -> RenderableType | None:
    if not gains:
        return None
    rows = fold_gains(profile, gains)
    has_times = rows[0].recompute_s is not None
    table = _table("recompute", ">", ">frees", ">costs", ">per GiB", ">peak after")
    for gain in rows[:top]:
        cost, price = (
            (format_seconds(gain.recompute_s), format_seconds(gain.price * 2**30))
            if has_times
            else (format_flops(gain.recompute_flops), format_flops(round(gain.price * 2**30)))
        )
        change = gain.peak_bytes - profile.peak_bytes
        then = f"{format_bytes(gain.peak_bytes)} ({change / profile.peak_bytes:+.0%})" if change else "unchanged"
        path = show(_name_gain(gain))
        table.add_row(path, _times(gain.count), format_bytes(gain.freed_bytes), cost, price, then)
    title = "what recomputing would save, most first, each on its own"
    return _section(title, table, _left_out(len(rows) - top))


def _name_gain(gain: Gain) -> str:
    kept = "" if gain.policy == "full" else f", {gain.policy}"
    return f"{gain.path or 'the model'}{kept}{', every 2nd' if gain.every > 1 else ''}"


def _notes(profile: Profile) -> RenderableType | None:
    if not profile.notes:
        return None
    return _section("notes", *(show(note) for note in profile.notes))


def _comparison(after: Profile, before: Profile) -> RenderableType:
    first, second = find_peak(before), find_peak(after)
    table = _table("", ">before", ">after", ">change")

    def add(name: str, one: int, other: int) -> None:
        change = f"{(other - one) / one:+.1%}" if one else "-"
        table.add_row(show(name), format_bytes(one), format_bytes(other), change if one != other else "same")

    add("peak", first.bytes, second.bytes)
    for category in Category:
        one, other = first.by_category.get(category, 0), second.by_category.get(category, 0)
        if one or other:
            add(f"  {category.value}", one, other)
    add("saved for backward", *(sum(row.bytes for row in list_saved(profile)) for profile in (before, after)))
    times = before.step_s, after.step_s
    if None not in times:
        change = f"{after.step_s / before.step_s - 1:+.1%}" if before.step_s and after.step_s is not None else "-"
        table.add_row("step", format_seconds(times[0]), format_seconds(times[1]), change)
    where = [show(f"peak before: {first.sentence}"), show(f"peak after: {second.sentence}")]
    if before.clock is not after.clock:
        names = [profile.clock.value if profile.clock is not None else "not there" for profile in (before, after)]
        where.append(show(f"times before are {names[0]}, after {names[1]}"))
    return _section("before and after", table, *where)


# Parts of them

_COLOURS = {
    Category.PARAMETER: "blue",
    Category.GRADIENT: "cyan",
    Category.OPTIMIZER: "magenta",
    Category.BUFFER: "white",
    Category.INPUT: "white",
    Category.ACTIVATION: "red",
    Category.LOSS_HEAD: "yellow",
    Category.OFFLOADED: "bright_red",
    Category.LIBRARY: "white",
    Category.OTHER: "white",
    Category.TEMPORARY: "green",
}


@dataclass(frozen=True, slots=True)
class _Bar:
    """A bar, in the letters that the output can take."""

    share: float
    style: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        del console
        width = min(options.max_width, _BAR_WIDTH)
        yield Text(("#" if options.ascii_only else "\N{FULL BLOCK}") * round(self.share * width), style=self.style)


def shorten_op(op: str) -> str:
    """An operator as people call it.

    >>> shorten_op("aten.mm.default"), shorten_op("aten.add.Tensor"), shorten_op("mine.op.default")
    ('mm', 'add.Tensor', 'mine.op')
    """
    return op.removeprefix("aten.").removesuffix(".default")


def _section(title: str, *parts: RenderableType | None) -> RenderableType:
    return Group(show(title, "bold"), *(Padding(part, (0, 0, 0, 2)) for part in parts if part is not None))


def _table(*columns: str) -> Table:
    """A table without lines. Columns whose names start with ``>`` hold numbers: they stand to the right, and whole."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in columns:
        if name.startswith(">"):
            table.add_column(name[1:], justify="right", no_wrap=True)
        else:
            table.add_column(name, overflow="fold")
    return table


def _label(branch: Branch) -> RenderableType:
    """A module and its class; where they do not fit in one line, the class goes below the name."""
    name = branch.label or "(model)"
    return Padding(show(f"{name}  {branch.kind}" if branch.kind else name), (0, 0, 0, 2 * branch.depth))


def _times(count: int) -> str:
    return f"x{count}" if count > 1 else ""


def _describe_maker(group: list[SavedRow], families: Families) -> str:
    """``"mm in layers.*.mlp.up, model.py:31; kept by gelu"``."""
    first = group[0]
    path = families.name(first.module) if len(group) > 1 else first.module
    where = f"{shorten_op(first.op)} in {path}" if path else shorten_op(first.op)
    holders = list(dict.fromkeys(shorten_op(op) for row in group for op in row.holders))
    kept = f"; kept by {list_some(holders, _MOST_HOLDERS)}" if holders else ""
    return ", ".join(filter(None, (where, first.source))) + kept


def _left_out(count: int) -> Text | None:
    return show(f"and {count} more", "dim") if count > 0 else None


def _word(phase: Phase) -> str:
    return _WORDS.get(phase, phase.value)
