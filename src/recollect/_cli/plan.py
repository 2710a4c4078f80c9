"""`recollect plan`: profiles a step, plans it for a budget, and writes the plan and a page of all budgets."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import recollect
from recollect._cli.arguments import (
    BudgetOption,
    DeviceOption,
    DryOption,
    DtypeOption,
    MultipleOption,
    OptimizerOption,
    OutOption,
    PageOption,
    QuietOption,
    ScriptArguments,
    SetOption,
    ShardOption,
    StepOption,
    TargetOrProfile,
    TiersOption,
    TracebackOption,
    UnknownOption,
    WorldOption,
    read_values,
)
from recollect._cli.endings import loading
from recollect._cli.planned import PlanFiles, explain_failure, read_budget, read_typed_tiers
from recollect._cli.profiling import ProfileOptions
from recollect._cli.report import read_profile
from recollect._cli.screen import fail, keep_stdout_clean, make_console, show_progress
from recollect._cli.sizing import Question, find_sizes, print_sizes
from recollect._cli.target import Function, find_target
from recollect._core.profiles import Profile


def plan(
    target: TargetOrProfile,
    args: ScriptArguments = None,
    *,
    budget: BudgetOption,
    tiers: TiersOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    optimizer: OptimizerOption = None,
    dry: DryOption = False,
    step: StepOption = 2,
    set_: SetOption = None,
    unknown: UnknownOption = None,
    multiple_of: MultipleOption = 1,
    world: WorldOption = 1,
    shard: ShardOption = "fsdp2",
    out: OutOption = Path("plan.json"),
    html: PageOption = Path("plan.html"),
    traceback: TracebackOption = False,
    quiet: QuietOption = False,
) -> None:
    """Plan a training step for a memory budget: what to keep, what to recompute, and what that costs.

    TARGET is what `recollect profile` takes, or a profile that it has written (`step.json`). The plan is printed, and
    written to plan.json for `recollect.apply`; plan.html shows what other budgets would give. A model whose plain step
    does not fit here is estimated from shapes.

    **For larger machines**: --world says how many devices share parameters, gradients and optimizer state. --unknown
    names a parameter of the function, such as `length` in `make(batch=1, length=4096)`, and finds its largest value
    that fits. Both run nothing. --device takes several devices, separated by commas, and shows what fits on each.

    **Exit codes**: 0 done, 1 no plan fits or the target's code failed, 2 wrong usage.

    **Examples**

        recollect plan train.py:make_model --optimizer AdamW --budget 16GiB
        recollect plan step.json --budget 80% --html budgets.html
        recollect plan train.py:make_model --dry --device H100 --dtype bf16 --budget 90%
        recollect plan train.py:make --device h100,h200 --world 64 --budget 90% --set batch=1 --unknown length
    """
    outputs = PlanFiles.check(out, html, quiet=quiet)
    wanted, sent_to = read_budget(budget), read_typed_tiers(tiers)
    if shard != "fsdp2":
        fail(f"--shard {shard}: expected fsdp2")
    given = read_values(set_)
    options = {"device": device, "dtype": dtype, "optimizer": optimizer, "dry": dry or world > 1, "step": step}
    with contextlib.ExitStack() as stack:
        if outputs.is_piped:
            stack.enter_context(keep_stdout_clean())
        if unknown is not None:
            _check_unknown(unknown, target, given)
            question = Question(unknown=unknown, multiple_of=multiple_of, world=world, budget=wanted, tiers=sent_to)
            seen = _search(target, options, given, question, traceback=traceback, quiet=quiet)
        elif Path(target).suffix == ".json":
            seen = _read(Path(target), {**options, "set": given, "ARGS": args}, world)
        else:
            seen = _take(target, args or [], options, given, world=world, traceback=traceback, quiet=quiet)
        with loading():
            make = recollect.plan
        with show_progress("planning", quiet=quiet) as progress:
            made = explain_failure(lambda: make(seen, budget=wanted, tiers=sent_to, progress=progress))
    outputs.write(made, seen, tiers=sent_to)


def _check_unknown(unknown: str, target: str, given: Mapping[str, int]) -> None:
    if Path(target).suffix == ".json":
        fail(
            f"--unknown {unknown}: {target} is a profile, whose sizes are fixed: name the function that makes the model"
        )
    if unknown in given:
        fail(f"--unknown {unknown}: --set already gives it the value {given[unknown]}; leave one of them out")


def _read(path: Path, given: Mapping[str, Any], world: int) -> Profile:
    from recollect._plan.sharding import shard

    for name, value in given.items():
        if value and name != "step" and not (name == "dry" and world > 1):
            shown = name if name == "ARGS" else f"--{name}"
            fail(f"{shown} would change how a profile is taken, but {path} is already a profile: leave it out")
    return shard(read_profile(path), world)


def _take(
    target: str,
    args: list[str],
    options: Mapping[str, Any],
    given: Mapping[str, int],
    *,
    world: int,
    traceback: bool,
    quiet: bool,
) -> Profile:
    from recollect._plan.sharding import shard

    with loading():
        from recollect._cli.users_code import users_code

        _ = recollect.on_oom  # torch, and all of the library
    taking = ProfileOptions(**options, falls_back=True)
    with (
        show_progress(f"profiling {target}", quiet=quiet) as progress,
        users_code(shows_all=traceback),
        recollect.on_oom(),
    ):
        return shard(taking.take(target, args, progress, given=given), world)


def _search(
    target: str,
    options: Mapping[str, Any],
    given: Mapping[str, int],
    question: Question,
    *,
    traceback: bool,
    quiet: bool,
) -> Profile:
    """The step at the largest size that a plan makes fit, on the first device that it fits on."""
    with loading():
        from recollect._cli.users_code import users_code

        _ = recollect.on_oom  # torch, and all of the library
    devices = [one.strip() for one in str(options["device"] or "").split(",") if one.strip()] or [""]
    ways = [ProfileOptions(**{**options, "dry": True, "device": one or None}) for one in devices]
    found = []
    with users_code(shows_all=traceback):
        function = find_target(target, lets_open=True)
        if not isinstance(function, Function):
            fail(f"--unknown names a parameter of a function, but {target} is a script: name a function in it")
        function = function.give(given)
        for name, one in zip(devices, ways, strict=True):
            with show_progress(f"trying sizes {f'on {name} ' if name else ''}of {target}", quiet=quiet) as progress:
                found.append(find_sizes(function, one, question, progress))
    print_sizes(found, question, given)
    first = next(one for one in found if one.profile is not None)
    if len(found) > 1:
        make_console().print(f"The plan for {first.device}:", markup=False)
    assert first.profile is not None
    return first.profile
