"""Batches of another length at each step, as padded ones are: what is learned of one length must serve the next."""

import statistics
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
from cases import Case, Setting
from packaged import (
    OURS,
    OURS_SELECTIVE,
    PLAIN,
    SAC,
    VOCAB,
    Size,
    gradients,
    grouped,
    largest_difference,
    prepare,
)

from recollect._bench.alternate import Step, alternate


def backward(model: Any, size: Size, length: int, device: torch.device) -> None:
    ids = torch.arange(size.batch * length, device=device).reshape(size.batch, -1) % VOCAB
    torch.autograd.backward(model(input_ids=ids, labels=ids).loss)


def stepping(model: Any, size: Size, device: torch.device) -> Step:
    """Every call trains on a length that this model has not seen."""
    lengths = count(size.tokens // 2)

    def step() -> None:
        backward(model, size, next(lengths), device)
        model.zero_grad(set_to_none=False)

    return step


def length_case(setting: Setting) -> Iterator[Case]:
    import transformers

    on_cpu = setting.device.type == "cpu"
    size = Size(64, 6, 64, 2) if on_cpu else Size(1024, 6, 1024, 4)
    torch.manual_seed(0)
    config = transformers.Olmo2Config(**grouped(size) | {"max_position_embeddings": 4096})
    model = transformers.Olmo2ForCausalLM(config)
    model.to(setting.device, torch.float32 if on_cpu else torch.bfloat16).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    models = {contender: prepare(model, contender) for contender in (PLAIN, OURS, OURS_SELECTIVE, SAC)}
    steps = {contender: stepping(own, size, setting.device) for contender, own in models.items()}
    for step in steps.values():  # two lengths to learn from; the third is compared, the others come in `alternate`
        step()
        step()
    differences = _compare(models, size, setting.device)
    # All see the same lengths in the same order, so that sums over a round can be compared.
    timings = alternate(
        steps, device=setting.device, rounds=setting.rounds, repeats=setting.repeats, of_round=statistics.fmean
    )
    seen = setting.rounds * (setting.repeats + 1) + 4
    case = Case(name="lengths", title=f"OLMo2, d{size.width} L{size.layers} B{size.batch}, {seen} lengths, one a step")
    for contender, own in timings.items():
        case.rows.append(
            {
                "candidate": contender,
                "median_ms": own.median_s * 1e3,
                "best_ms": own.best_s * 1e3,
                "median/plain": own.median_s / timings[PLAIN].median_s,
                "median/full": own.median_s / timings[OURS].median_s,
                "last/first": own.rounds_s[-1] / own.rounds_s[0],
                "gradient_difference": differences[contender],
            }
        )
    yield case


def _compare(models: dict[str, Any], size: Size, device: torch.device) -> dict[str, float]:
    """The largest difference of any gradient from the plain step's, at a length that comes in no timed step."""
    found = {
        contender: gradients(own, partial(backward, own, size, size.tokens // 2 - 1, device))
        for contender, own in models.items()
    }
    return {contender: largest_difference(own, found[PLAIN]) for contender, own in found.items()}
