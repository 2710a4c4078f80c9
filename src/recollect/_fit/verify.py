"""Checks that levers leave a step's gradients as they are, up to rounding."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch
from torch import nn

from recollect._apply.model import apply
from recollect._core.levers import CHUNKED_MLP, MICRO_BATCHES, PlannedLever
from recollect._core.plans import Plan
from recollect._core.spelling import choose_words, spell_levers
from recollect._fit.attempts import Attempt

_log = logging.getLogger("recollect")

_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
_CLOSE_OTHERWISE = 5e-2
_FLOOR = 0.01  # of all gradients together: those of single parameters may be rounding errors and nothing else
_RANDOM = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def compare_gradients(attempt: Attempt) -> None:
    """Compare how large the gradients are with the levers and without; the step runs where nobody looked before.

    Not done where there is no room for the plain step, and where chunks draw other random numbers; the log says so.
    Processes with parts of the parameters compare those.

    Raises:
        ValueError: the levers change them.
    """
    model = attempt.subject.model
    levers = [lever for lever in attempt.levers if lever.name != MICRO_BATCHES]
    if not levers:
        return
    why = _why_not(model, any(lever.name == CHUNKED_MLP for lever in levers))
    has_both = bool(attempt.gradients and attempt.plain_gradients)
    before = None if why else attempt.plain_gradients if has_both else attempt.run.measure_gradients()
    if before is None:
        _log.info("recollect.fit: gradients with levers were not compared: %s", why or "the plain step does not fit")
        return
    after = attempt.gradients if has_both else _measure_with(attempt, levers)
    if after is None:
        return
    total = math.hypot(*before.values())
    close = max(_CLOSE.get(parameter.dtype, _CLOSE_OTHERWISE) for parameter in model.parameters())
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")) or not attempt.subject.owns_step:
        close = _CLOSE_OTHERWISE  # a step of the user's may cast, too
    for name in {**before, **after}:
        one, two = before.get(name, 0.0), after.get(name, 0.0)
        if not abs(one - two) <= close * (abs(one) + _FLOOR * total):
            names = [lever.name for lever in levers]
            used = choose_words(f"levers {', '.join(map(repr, names))}", spell_levers(names))
            message = (
                f"{used} change the gradient of '{name}': its norm "
                f"is {two:.4g} with them and {one:.4g} without.\n"
                "The model does something that these levers do not support: leave them out"
            )
            raise ValueError(message)


def _measure_with(attempt: Attempt, levers: list[PlannedLever]) -> Mapping[str, float] | None:
    with apply(attempt.subject.model, Plan(levers=tuple(levers))):
        return attempt.run.measure_gradients()


def _why_not(model: nn.Module, is_cut: bool) -> str:  # noqa: FBT001
    if is_cut and any(isinstance(part, _RANDOM) and part.training and part.p for part in model.modules()):
        return "dropout draws different numbers in chunks"
    return ""
