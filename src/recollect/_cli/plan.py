"""`recollect plan`: profiles a step, plans it for a budget, and writes the plan and a page of all budgets."""

import contextlib
from pathlib import Path
from typing import Any

import recollect
from recollect._cli.arguments import (
    BudgetOption,
    DeviceOption,
    DryOption,
    DtypeOption,
    OptimizerOption,
    OutOption,
    PageOption,
    QuietOption,
    ScriptArguments,
    StepOption,
    Target,
    TiersOption,
    TracebackOption,
)
from recollect._cli.endings import loading
from recollect._cli.planned import Outputs, check_budget, explain_failure
from recollect._cli.report import read_profile
from recollect._cli.screen import fail, keep_stdout_clean, show_progress
from recollect._cli.taking import Options
from recollect._core.profiles import Profile


def plan(
    target: Target,
    args: ScriptArguments = None,
    *,
    budget: BudgetOption,
    tiers: TiersOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    optimizer: OptimizerOption = None,
    dry: DryOption = False,
    step: StepOption = 2,
    out: OutOption = Path("plan.json"),
    html: PageOption = Path("plan.html"),
    traceback: TracebackOption = False,
    quiet: QuietOption = False,
) -> None:
    """Plan a training step for a budget of memory: what is kept, what is recomputed, and what that costs.

    TARGET is what `recollect profile` takes, or a profile that it wrote (`step.json`). The plan is printed and written
    to plan.json, for `recollect.apply`; plan.html shows what every other budget would give. A model whose plain step
    does not fit here is profiled on shapes alone.

    **Exit codes**: 0 done, 1 no plan fits or the code of the target failed, 2 wrong usage.

    **Examples**

        recollect plan train.py:make_model --optimizer AdamW --budget 16GiB
        recollect plan step.json --budget 80% --html budgets.html
        recollect plan train.py:make_model --dry --device H100 --dtype bf16 --budget 90%
    """
    outputs = Outputs.check(out, html, quiet=quiet)
    check_budget(budget, tiers)
    with contextlib.ExitStack() as stack:
        if outputs.is_piped:
            stack.enter_context(keep_stdout_clean())
        if Path(target).suffix == ".json":
            given = {"--device": device, "--dtype": dtype, "--optimizer": optimizer, "--dry": dry, "ARGS": args}
            for name, value in given.items():
                if value:
                    fail(f"{name} says how to take a profile; {target} is one already")
            seen = read_profile(Path(target))
        else:
            options = {"device": device, "dtype": dtype, "optimizer": optimizer, "dry": dry, "step": step}
            seen = _take(target, args or [], options, traceback=traceback, quiet=quiet)
        with loading():
            make = recollect.plan
        with show_progress("planning", quiet=quiet) as progress:
            made = explain_failure(lambda: make(seen, budget=budget, tiers=tiers, progress=progress))
    outputs.write(made, seen, tiers=tiers)


def _take(target: str, args: list[str], options: dict[str, Any], *, traceback: bool, quiet: bool) -> Profile:
    with loading():
        from recollect._cli.users_code import users_code

        _ = recollect.on_oom  # torch, and all of the library
    taking = Options(**options, falls_back=True)
    with (
        show_progress(f"profiling {target}", quiet=quiet) as progress,
        users_code(shows_all=traceback),
        recollect.on_oom(),
    ):
        return taking.take(target, args, progress)
