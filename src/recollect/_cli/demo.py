"""`recollect demo`: trains a small GPT plain, with recollect and under a policy; compares them and writes a report.

The checkpointed model forgets what happens inside a block during forward and computes it again during backward, dropout
masks included: less memory, more time, and bit for bit the same training. The policy keeps what is dear to compute, the
products and attention: some of the memory for some of the time.
"""

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

import recollect
from recollect import policies
from recollect._cli.report import check_path, write_report
from recollect._cli.screen import make_console, show_progress
from recollect._cli.small_gpt import LAYERS, STEPS, Run, find_loss, train
from recollect._core.profiles import Profile

DEAR = policies.first_match(policies.save_matmuls, policies.save_attention)

RULES: dict[str, Any] = {"plain": None, "recollect": "full", "with policy": DEAR}
"""What is applied to the model, which knows nothing of it; its blocks are found."""


def demo(
    *,
    html: Annotated[Path, typer.Option("--html", metavar="FILE", help="File for the report.")] = Path(
        "recollect-demo.html"
    ),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Train a small GPT plain, with recollect and under a policy: time, memory, gradients; then a report to open.

    Runs on the CPU in well under a minute.

    **Examples**

        recollect demo
        recollect demo --html /tmp/demo.html
    """
    check_path(html, (".html",))
    runs: dict[str, Run] = {}
    with show_progress("training", quiet=quiet) as show:
        steps = itertools.count(1)
        for name, rules in RULES.items():
            runs[name] = train(rules, after_step=lambda: show(next(steps), len(RULES) * STEPS))
    print_runs(runs)
    with show_progress("profiling", quiet=quiet):
        before, after = (profile_run(runs[name], name) for name in ("plain", "recollect"))
    write_report(after, html, against=before, top=20, quiet=True)
    make_console(soft_wrap=True).print(
        f"The report compares plain with recollect, value by value: {html.resolve()}", markup=False
    )


def profile_run(run: Run, name: str) -> Profile:
    """The profile of one more step of a training."""
    inputs = run.batch[:, :-1]
    return recollect.profile(
        run.model, inputs, optimizer=run.optimizer, loss=lambda scores: find_loss(scores, run.batch), name=name
    )


def print_runs(runs: dict[str, Run]) -> None:
    """Print what the trainings showed, compared with the first of them."""
    plain, *others = runs.values()
    table = Table(title=f"GPT of {LAYERS} blocks, {STEPS} training steps", title_justify="left")
    for column in ("", "step time", "peak live bytes", "first loss", "last loss", "gradient difference"):
        table.add_column(column, justify="right" if column else "left")
    for name, run in runs.items():
        difference = max((a - b).abs().max().item() for a, b in zip(plain.gradients, run.gradients, strict=True))
        table.add_row(
            name,
            f"{run.step_s * 1e3:.0f} ms",
            f"{run.peak_bytes / 2**20:.1f} MiB",
            f"{run.losses[0]:.4f}",
            f"{run.losses[-1]:.4f}",
            "" if run is plain else f"{difference:g}",
        )
    console = make_console()
    console.print(table)
    for name, run in list(runs.items())[1:]:
        memory, duration = run.peak_bytes / plain.peak_bytes, run.step_s / plain.step_s
        console.print(f"{name}: {1 - memory:.0%} less memory for {duration - 1:.0%} more time")
    equal = all(run.losses == plain.losses for run in others)
    console.print(f"All {len(plain.losses)} losses are {'equal' if equal else 'NOT equal'}.")
    console.print("Peak live bytes: activations and gradients of one step, without parameters and optimiser state.")
