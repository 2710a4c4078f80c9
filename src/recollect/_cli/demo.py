"""`recollect demo`: trains a small GPT plain and with recollect, in several ways, and fits it into a budget.

Under "full" a block forgets what happens inside it during forward and computes it again during backward, dropout masks
included: less memory, more time, and bit for bit the same training. A policy does better: it keeps what attention gave,
which is small and expensive to compute, so that recomputation skips it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

import recollect
from recollect._cli.arguments import STANDARD_OUTPUT
from recollect._cli.endings import loading
from recollect._cli.planned import PlanFiles
from recollect._cli.report import check_path, write_report
from recollect._cli.screen import ShowProgress, make_console, show_progress
from recollect._core.numbers import format_change, format_seconds
from recollect._core.profiles import Profile
from recollect._core.units import count_noun, format_bytes

if TYPE_CHECKING:
    from recollect._cli.small_gpt import Training

BUDGET_PERCENT = 60
PLAIN, FULL, ATTENTION, PRODUCTS = "plain", "full", "attention kept", "products kept too"


def demo(
    *,
    html: Annotated[Path, typer.Option("--html", metavar="FILE", help="File for the report.")] = Path(
        "recollect-demo.html"
    ),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Train a small GPT with and without recollect, then fit it into a budget: compare memory, time and gradients.

    Runs on the CPU in well under a minute, and writes two pages for the browser.

    **Examples**

        recollect demo
        recollect demo --html /tmp/demo.html
    """
    check_path(html, (".html",))
    with loading():
        from recollect._cli.small_gpt import count_steps, train, use_one_thread
    use_one_thread()
    rules = make_rules()
    with show_progress("training", quiet=quiet) as show:
        runs = train(rules, after_step=lambda done: show(done, len(rules) * count_steps()))
    print_runs(runs)
    with show_progress("profiling", quiet=quiet):
        before, after = (profile_run(runs[name], name) for name in (PLAIN, ATTENTION))
    write_report(after, html, against=before, top=20, quiet=True)
    console = make_console(soft_wrap=True)
    console.print("In your own code:  recollect.apply(model, recollect.policies.save_attention)", markup=False)
    console.print(f"Report, '{PLAIN}' against '{ATTENTION}', tensor by tensor: {html.resolve()}", markup=False)
    with show_progress("fitting", quiet=quiet) as show:
        fitted = fit_run(runs[PLAIN], before.peak_bytes * BUDGET_PERCENT // 100, show)
    print_fit(fitted)
    page = html.with_name(f"{html.stem}-plan.html")
    outputs = PlanFiles.check(STANDARD_OUTPUT, page, quiet=True)
    outputs.write_page(fitted.plan, fitted.profile)
    console.print(
        'In your own code:  recollect.fit(model, batch, loss=..., optimizer=..., budget="40GiB")', markup=False
    )
    console.print(f"Page with a slider over all budgets: {page.resolve()}", markup=False)


def make_rules() -> dict[str, Any]:
    """What is applied to the model, which knows nothing of it; its blocks are found."""
    policies = recollect.policies
    return {
        PLAIN: None,
        FULL: "full",
        ATTENTION: policies.save_attention,
        PRODUCTS: policies.first_match(policies.save_attention, policies.save_matmuls),
    }


def profile_run(run: Training, name: str) -> Profile:
    """The profile of one more step of a training."""
    from recollect._cli.small_gpt import find_loss

    inputs = run.batch[:, :-1]
    return recollect.profile(
        run.model, inputs, optimizer=run.optimizer, loss=lambda scores: find_loss(scores, run.batch), name=name
    )


def fit_run(run: Training, budget: int, progress: ShowProgress) -> recollect.Fitted:
    """The model of a training, made to fit a budget."""
    from recollect._cli.small_gpt import find_loss

    batch = (run.batch[:, :-1], run.batch)
    return recollect.fit(run.model, batch, loss=find_loss, optimizer=run.optimizer, budget=budget, progress=progress)


def print_fit(fitted: recollect.Fitted) -> None:
    """Print what a fitted step was predicted to take beside what it took."""
    forecast = fitted.plan.forecast
    assert forecast is not None
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("", "predicted", "measured", ""):
        table.add_column(column, justify="right" if table.columns else "left", no_wrap=True)
    measured = forecast.measured_peak_bytes
    assert measured is not None
    off = measured / forecast.peak_bytes - 1
    table.add_row("peak", format_bytes(forecast.peak_bytes), format_bytes(measured), format_change(off))
    if forecast.measured_step_s is not None:
        off = forecast.measured_step_s / forecast.step_s - 1
        seconds = format_seconds(forecast.step_s), format_seconds(forecast.measured_step_s)
        table.add_row("step", *seconds, format_change(off))
    console = make_console()
    console.print(
        f"Fitted into {format_bytes(forecast.budget_bytes or 0)}, {BUDGET_PERCENT}% of the plain step's "
        f"{format_bytes(forecast.plain_peak_bytes)}"
    )
    console.print(table)
    regions = count_noun(len(fitted.plan.regions), "module")
    console.print(
        f"{regions} recomputed in part. Peak: of everything, parameters and optimizer state included. "
        "Step: time by the clock, which other programs on this machine lengthen."
    )


def print_runs(runs: dict[str, Training]) -> None:
    """Print what the trainings showed, compared with the first of them."""
    plain, *others = runs.values()
    steps = len(plain.losses)
    table = Table(
        title=f"GPT of {len(plain.model.blocks)} blocks, {steps} training steps",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("", "peak", "", "step", "", "last loss", "gradients"):
        table.add_column(column, justify="right" if table.columns else "left", no_wrap=True)
    for name, run in runs.items():
        difference = max((a - b).abs().max().item() for a, b in zip(plain.gradients, run.gradients, strict=True))
        is_plain = run is plain
        table.add_row(
            name,
            f"{run.peak_bytes / 2**20:.1f} MiB",
            "" if is_plain else f"{run.peak_bytes / plain.peak_bytes - 1:+.0%}",
            f"{run.step_s * 1e3:.0f} ms",
            "" if is_plain else f"{run.step_s / plain.step_s - 1:+.0%}",
            f"{run.losses[-1]:.4f}",
            "" if is_plain else f"off by {difference:g}" if difference else "equal",
        )
    console = make_console()
    console.print(table)
    equal = all(run.losses == plain.losses for run in others)
    console.print(f"All {steps} losses are {'equal' if equal else 'NOT equal'}, bit for bit.")
    console.print(
        "Peak: activations and gradients of one step, without parameters and optimizer state. "
        "Step: processor time of the quickest one."
    )
