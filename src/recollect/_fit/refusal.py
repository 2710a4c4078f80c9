"""Why no plan fits a budget: what sets the smallest peak, and what would lower it."""

from __future__ import annotations

from recollect._core.calls import Category, Phase, has_cross_entropy
from recollect._core.families import paths_above
from recollect._core.levers import CHUNKED_LOSS
from recollect._core.spelling import choose_words, spell_levers
from recollect._core.units import format_bytes
from recollect._plan.budget import Budget
from recollect._plan.frontier import Point
from recollect._plan.problem import Problem
from recollect._plan.solvers.bound import find_lasting_bytes

_MOST_CATEGORIES = 3
_MUCH = 0.1  # of the smallest peak: other tensors, or a loss head, that take less are not to blame


def describe_call(problem: Problem, number: int) -> str:
    """Where a call is, in words."""
    call = problem.calls[number]
    where = call.module or call.source or "the step itself"
    return f"{where} ({call.op}, {call.phase.value})"


def explain_refusal(problem: Problem, smallest: Point, asked: Budget, margin: int) -> str:
    """Why nothing fits, and what would help."""
    profile = problem.profile
    call = problem.calls[smallest.peak_call]
    kept = f" with {format_bytes(margin)} kept free for what a profile does not see" if margin else ""
    held = profile.timeline.bytes_by_category(smallest.peak_call)
    fixed = {
        category: size
        for category, size in held.items()
        if category not in (Category.ACTIVATION, Category.TEMPORARY, Category.LOSS_HEAD)
    }
    parts = ", ".join(
        f"{category.value} {format_bytes(size)}" for category, size in list(fixed.items())[:_MOST_CATEGORIES]
    )
    levers = choose_words("the `levers` of recollect.fit", "the levers of `recollect fit` (--lever)")
    advice = f"Raise the budget, shrink the batch, or try {levers}"
    lasting, others = find_lasting_bytes(problem), held.get(Category.OTHER, 0)
    if asked.bytes is not None and lasting - others > asked.bytes:
        advice = (
            f"Parameters, gradients and optimizer state alone take {format_bytes(lasting - others)}, and neither a "
            "smaller batch nor levers can change that. Raise the budget, shard the model, or use an optimizer with "
            "less state"
        )
    elif others > _MUCH * smallest.peak_bytes:
        advice = (
            f"{format_bytes(others)} of the peak are other tensors in this process, such as earlier models or copies "
            f"of weights: delete those that you no longer need. Or raise the budget, shrink the batch, or try {levers}"
        )
    elif call.phase is Phase.OPTIMIZER:
        advice = (
            "The peak is in the optimizer's step: use an optimizer with less state or fewer temporaries (fused=True, "
            "foreach=False)"
        )
    elif not any(entry.path for entry in profile.modules):
        advice = (
            "The model has no modules inside that a plan could recompute one by one: make each of its parts a "
            "torch.nn.Module. Or raise the budget, or shrink the batch"
        )
    elif _is_elsewhere(problem, smallest.peak_call):
        advice = (
            f"The peak is in {call.module}, which is not part of the {profile.name or 'model'} that is planned, so "
            "recomputing cannot lower it: pass a module that holds both, such as a torch.nn.ModuleList of them"
        )
    elif held.get(Category.LOSS_HEAD, 0) > _MUCH * smallest.peak_bytes and _is_head(problem, smallest.peak_call):
        fit = choose_words("recollect.fit", "`recollect fit`")
        chunks = f"let {fit} compute the loss in chunks (`{spell_levers([CHUNKED_LOSS])}`), "
        can_chunk = has_cross_entropy(profile.calls)
        advice = f"The peak is in the loss head: {chunks if can_chunk else ''}shrink the batch, or raise the budget"
    wanted = asked.text if asked.bytes is None else format_bytes(asked.bytes)
    return (
        f"no plan fits {wanted}{kept}: the smallest reachable peak is "
        f"{format_bytes(smallest.peak_bytes)}, at {describe_call(problem, smallest.peak_call)}.\n"
        + (f"Whatever is recomputed, these stay: {parts}. " if parts else "")
        + advice
    )


def _is_elsewhere(problem: Problem, number: int) -> bool:
    """Whether a call is made by a module that is no part of the model, as the other half of a GAN."""
    known = {entry.path for entry in problem.profile.modules if entry.path}
    module = problem.calls[number].module
    return bool(module) and known.isdisjoint(paths_above(module))


def _is_head(problem: Problem, number: int) -> bool:
    call = problem.calls[number]
    storages = problem.profile.storages
    if call.phase is Phase.BACKWARD and call.forward is None:
        return False
    return any(storages[value.storage].category is Category.LOSS_HEAD for value in (*call.outputs, *call.inputs))
