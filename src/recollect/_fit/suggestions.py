"""Which levers nobody asked for a refused step could use, so that the refusal can name them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recollect._apply.targets import find_targets
from recollect._core.calls import Category, Phase, has_cross_entropy
from recollect._core.levers import CHUNKED_LOSS, CHUNKED_MLP, MICRO_BATCHES
from recollect._core.profiles import Profile
from recollect._core.spelling import spell_levers
from recollect._fit.levers import Asked, SeenInputs, list_candidates, plan_levers
from recollect._fit.micro_batches import count_examples, refuse_batch_norms
from recollect._levers.chunked_forward import TOKENS


def suggest_levers(model: nn.Module, seen: Profile, asked: Asked, batch: Any, *, owns_step: bool) -> str:
    """The levers that can be used here and were not asked for, in a sentence; empty if there are none.

    Args:
        model: whose modules they would be for.
        seen: the plain step.
        asked: what was asked for.
        batch: as the user gave it.
        owns_step: whether it is the model that is called, and not a step of the user's.
    """
    named = list(_list_usable(model, seen, asked, batch, owns_step=owns_step))
    return f"Also possible here: {spell_levers(named)}" if named else ""


def _list_usable(model: nn.Module, seen: Profile, asked: Asked, batch: Any, *, owns_step: bool) -> Iterator[str]:
    wished: dict[str, None] = {name: None for name in (CHUNKED_LOSS, CHUNKED_MLP) if name not in asked}
    if not has_cross_entropy(seen.calls):
        wished.pop(CHUNKED_LOSS, None)
    yield from plan_levers(model, seen, _read_inputs(model, seen, wished), wished)
    if MICRO_BATCHES not in asked and owns_step and count_examples(batch) > 1:
        try:
            refuse_batch_norms(model)
        except ValueError:
            return
        yield MICRO_BATCHES


def _read_inputs(model: nn.Module, seen: Profile, wished: Asked) -> SeenInputs:
    """What candidates were called with, as far as the profile tells: what their first call reads, without parameters.

    A module that is called in another way does not run on that, so no lever can be used on it.
    """
    found = SeenInputs()
    candidates = set(list_candidates(model, wished))
    paths = {target.name: target.chain[-1] for target in find_targets(model) if target.chain[-1] in candidates}
    for call in seen.calls[: seen.forward_count]:
        if call.phase is not Phase.FORWARD:
            continue
        for path, module in paths.items():
            if module not in found.seen and (call.module == path or call.module.startswith(f"{path}.")):
                device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
                found.seen[module] = next(
                    (
                        (torch.Size(value.shape), getattr(torch, value.dtype), device)
                        for value in call.inputs
                        if seen.storages[value.storage].category is not Category.PARAMETER
                        and value.shape is not None
                        and len(value.shape) >= -TOKENS
                    ),
                    None,
                )
    return found
