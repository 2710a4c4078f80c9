"""`recollect fit`: makes a model of the user's fit a budget, by running it; prints prediction beside measurement."""

import contextlib
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import recollect
from recollect._cli.arguments import (
    BudgetOption,
    DtypeOption,
    FunctionTarget,
    LeverOption,
    OptimizerOption,
    OutOption,
    PageOption,
    QuietOption,
    RealDeviceOption,
    TiersOption,
    TracebackOption,
)
from recollect._cli.endings import loading
from recollect._cli.planned import PlanFiles, read_budget, read_typed_tiers
from recollect._cli.profiling import ProfileOptions, gather_step
from recollect._cli.screen import ShowProgress, fail, keep_stdout_clean, show_progress
from recollect._cli.target import Function, find_target
from recollect._core.levers import LEVERS
from recollect._core.patterns import hint_nearest
from recollect._core.signatures import read_signature
from recollect._core.spelling import options_typed

if TYPE_CHECKING:
    from recollect._cli.subject import ProfileArguments


def fit(
    target: FunctionTarget,
    *,
    budget: BudgetOption,
    tiers: TiersOption = None,
    lever: LeverOption = None,
    device: RealDeviceOption = None,
    dtype: DtypeOption = None,
    optimizer: OptimizerOption = None,
    out: OutOption = Path("plan.json"),
    html: PageOption = Path("plan.html"),
    traceback: TracebackOption = False,
    quiet: QuietOption = False,
) -> None:
    """Fit a training step into a budget, and measure it: profile, plan, apply, run, compare, correct.

    TARGET is a function, as for `recollect profile`. Its step runs under the plan; if that takes more than the budget,
    a tighter plan is made. Measured figures are printed next to the predicted ones. The plan is written to plan.json
    for `recollect.apply`, and plan.html shows what other budgets would give.

    **Exit codes**: 0 done, 1 nothing fits or the target's code failed, 2 wrong usage.

    **Examples**

        recollect fit train.py:make_model --optimizer AdamW --device cuda --budget 16GiB
        recollect fit my.package.train:step --budget 80%
        recollect fit train.py:make_model --budget 12GiB --lever chunked_loss --lever micro_batches
    """
    outputs = PlanFiles.check(out, html, quiet=quiet)
    wanted, sent_to = read_budget(budget), read_typed_tiers(tiers)
    for name in lever or ():
        if name not in LEVERS:
            several = "; for several, repeat --lever" if "," in name else hint_nearest(name, LEVERS)
            fail(f"--lever {name}: expected {', '.join(LEVERS)}{several}")
    with loading():
        from recollect._cli.users_code import users_code

        _ = recollect.on_oom  # torch, and all of the library
    options = ProfileOptions(device=device, dtype=dtype, optimizer=optimizer)
    with contextlib.ExitStack() as stack:
        if outputs.is_piped:
            stack.enter_context(keep_stdout_clean())
        progress = stack.enter_context(show_progress(f"fitting {target}", quiet=quiet))
        with users_code(shows_all=traceback), recollect.on_oom():
            found = find_target(target)
            if not isinstance(found, Function):
                fail(
                    f"{target} is a script, but fit has to run steps itself: name a function that returns the model "
                    f"and its inputs, or runs a step, {target}:function. "
                    f"To plan for the script: recollect plan {target}"
                )
            with options_typed():
                fitted = _fit(options, found, progress, budget=wanted, tiers=sent_to, levers=lever or ())
    outputs.write(fitted.plan, fitted.profile, tiers=sent_to)


def _fit(options: ProfileOptions, function: Function, progress: ShowProgress, **how: Any) -> "recollect.Fitted":
    subject, seen = options.find_subject(function)
    with options.surroundings(options.device):
        if subject.is_model:
            batch = _bind_batch(subject, function.name)
            given = {key: subject.options[key] for key in ("loss", "optimizer") if key in subject.options}
            return recollect.fit(subject.what, batch, progress=progress, **given, **how)  # type: ignore[arg-type]
        modules = seen.list_modules()
        if not modules:
            fail(f"{function.name} called no torch.nn.Module, but fit needs one to apply a plan to")
        return recollect.fit(modules[0], step=gather_step(subject, seen), progress=progress, **how)


def _bind_batch(subject: "ProfileArguments", name: str) -> Any:
    """The inputs of a model as one batch: a tuple, or a mapping where some are given by keyword."""
    import torch

    from recollect._inspect.calling import is_lightning, spread

    kwargs = subject.options.get("kwargs", {})
    assert isinstance(subject.what, torch.nn.Module)
    if not kwargs and is_lightning(subject.what) and subject.inputs and "loss" not in subject.options:
        batch, *index = subject.inputs  # what training_step is called with
        return batch if not index or isinstance(index[0], int) else subject.inputs
    inputs, kwargs = spread(subject.what, subject.inputs, kwargs)
    if not kwargs:
        return inputs
    signature = read_signature(subject.what.forward)
    names = signature.bind(*inputs, **kwargs).arguments
    kinds = {signature.parameters[key].kind for key in names if key not in kwargs}
    if kinds & {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL}:
        fail(
            f"{name} returned both positional inputs and keywords, but the model does not take all of them by "
            "keyword: return keywords only"
        )
    by_position = dict(zip(names, inputs, strict=False))
    return {**by_position, **kwargs}
