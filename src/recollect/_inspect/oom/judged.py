"""What would make a step fit that ran out of memory: choices judged by the whole step, followed on fake tensors.

The model is called again as it was, dry, so that what comes after the failure is seen too, backward included. Each
choice is then judged by the step's peak under it. It is enough if that, with what else is alive and an allowance for
fragmentation, is less than there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recollect._core.calls import Category
from recollect._core.gains import Gain
from recollect._core.profiles import Profile
from recollect._inspect.calling import held_loss, loss_in
from recollect._inspect.profile import profile as take_profile
from recollect._inspect.report import find_all_gains
from recollect._profile.given_arguments import GivenArguments
from recollect._report.answer import write_code

ALLOWANCE = 0.05
"""Of what there is: for fragmentation."""
_MOST = 5
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A way to need less memory, judged by the whole step.

    Attributes:
        what: it does, in words.
        code: the line to write, with ``model`` for the model.
        peak_bytes: the step's peak then, with what else is alive.
        recompute_s: how much longer the step takes; None if nobody knows.
        is_enough: whether it fits; None where something of the step was not seen, as a loss outside of the model.
    """

    what: str
    code: str
    peak_bytes: int
    recompute_s: float | None
    is_enough: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How a step that failed would do.

    Attributes:
        capacity_bytes: what there is for it.
        plain_bytes: what it needs as it is.
        choices: best first: what is enough, the least to run again first; then what needs least.
    """

    capacity_bytes: int
    plain_bytes: int
    choices: tuple[Judged, ...]


def judge(
    model: nn.Module,
    given: GivenArguments,
    *,
    device: str,
    capacity_bytes: int,
    beside_bytes: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
) -> Judgement:
    """Follow a step on fake tensors and judge what would make it fit.

    Args:
        model: that was called.
        given: with this.
        device: whose name `recollect.profile` knows.
        capacity_bytes: what the process can have there.
        beside_bytes: what else is alive there, of no part of the step.
        optimizer: that trains it.

    Raises:
        Exception: the step cannot be followed on fake tensors.
    """
    has_loss = True

    def find_loss(output: Any) -> Tensor:
        nonlocal has_loss
        has_loss = (isinstance(output, Tensor) and output.dim() == 0) or isinstance(held_loss(output), Tensor)
        found = loss_in(output)
        assert found is not None
        return found

    args, kwargs = given.again()
    with given.autocast():
        seen = take_profile(model, *args, kwargs=kwargs, loss=find_loss, dry=True, device=device, optimizer=optimizer)
    counted = sum(storage.bytes for storage in seen.storages if storage.category is Category.INPUT)
    beside = max(0, beside_bytes - counted)
    limit = int(capacity_bytes * (1 - ALLOWANCE))
    choices = [
        Judged(
            what=what,
            code=code,
            peak_bytes=peak + beside,
            recompute_s=seconds,
            is_enough=(peak + beside <= limit) and (True if has_loss and is_sure else None),
        )
        for what, code, peak, seconds, is_sure in _list_choices(seen)
    ]
    choices.sort(key=_order)
    if choices and choices[0].is_enough is not False:
        given_too = "".join(
            f", {name}={name}" for name, is_there in (("loss", not has_loss), ("optimizer", optimizer)) if is_there
        )
        choices.insert(0, _fit_into(limit, choices[0], given_too))
    return Judgement(
        capacity_bytes=capacity_bytes, plain_bytes=seen.peak_bytes + beside, choices=tuple(choices[:_MOST])
    )


def _fit_into(budget_bytes: int, best: Judged, given_too: str) -> Judged:
    """`fit` for what there is: its plan has every other choice among its own, and takes no longer than the best.

    Its budget is for all that the process has on the device, what else is alive there included.
    """
    unit, size = next(((unit, size) for unit, size in _UNITS if budget_bytes >= 10 * size), _UNITS[-1])
    budget = f"{budget_bytes // size}{unit}"
    return Judged(
        what=f"let a plan choose within {budget}",
        code=f'recollect.fit(model, batch{given_too}, budget="{budget}")',
        peak_bytes=budget_bytes // size * size,
        recompute_s=best.recompute_s,
        is_enough=best.is_enough,
    )


def _order(choice: Judged) -> tuple[int, float]:
    """What is enough first, of that what costs least; then what may be; then what needs least."""
    if choice.is_enough:
        return 0, choice.recompute_s or 0.0
    return (1, choice.recompute_s or 0.0) if choice.is_enough is None else (2, float(choice.peak_bytes))


def _list_choices(seen: Profile) -> Iterator[tuple[str, str, int, float | None, bool]]:
    """All blocks, every second, selective, offload: what people use; and the best of all others."""
    gains = [gain for gain in find_all_gains(seen) if gain.peak_bytes < seen.peak_bytes]
    blocks = [gain for gain in gains if gain.count > 1 and gain.path.rpartition(".")[2] == "*"]
    whole = max((gain for gain in blocks if gain.policy == "full" and gain.every == 1), key=_freed, default=None)
    chosen: list[Gain] = []
    if whole is not None:
        chosen = [gain for gain in blocks if gain.path == whole.path and gain.kind == whole.kind]
    others = [gain for gain in gains if gain not in chosen and gain.count > 1]
    if others:
        chosen.append(min(others, key=lambda gain: gain.peak_bytes))
    for gain in chosen or gains[:2]:
        yield _describe(gain), write_code(gain, seen), gain.peak_bytes, gain.recompute_s, True
    if whole is not None:
        # Values come back a block or two before backward does: about two blocks' more than recomputing takes.
        peak = min(seen.peak_bytes, whole.peak_bytes + 2 * whole.freed_bytes // whole.count)
        code = write_code(whole, seen).replace('"full"', "recollect.Decision.OFFLOAD")
        yield f"move what {whole.path} ({whole.count} {whole.kind}) saves to host memory", code, peak, None, False


def _freed(gain: Gain) -> int:
    return gain.freed_bytes


def _describe(gain: Gain) -> str:
    every = ", every second" if gain.every > 1 else ""
    keeps = f', "{gain.policy}"' if gain.policy != "full" else ""
    many = f"{gain.count} " if gain.count > 1 else ""
    return f"recompute {gain.path} ({many}{gain.kind}{every}{keeps})"
