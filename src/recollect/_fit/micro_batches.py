"""A batch in equal parts, whose gradients add up to those of the whole: exact for losses that are means, or sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from recollect._core.levers import MICRO_BATCHES
from recollect._core.spelling import spell_lever
from recollect._core.torch_private.pytree import flatten, unflatten
from recollect._fit.batches import read_batch
from recollect._inspect.oom.error import read_shortage
from recollect._inspect.surroundings import list_generators
from recollect._recompute.rng import put_back

_OVER_BATCHES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_IGNORED = -100  # the target that cross_entropy leaves out
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
_CLOSE_OTHERWISE = 2e-2


def count_examples(batch: Any) -> int:
    """How many examples a batch has: the first size of its first tensor; 0 if it has none.

    >>> count_examples({"x": torch.ones(8, 3), "scale": torch.tensor(2.0)})
    8
    """
    return next((leaf.shape[0] for leaf in _leaves_of(batch) if isinstance(leaf, Tensor) and leaf.dim()), 0)


def split_batch(batch: Any, parts: int) -> list[Any]:
    """The batch in equal parts: tensors that have an example in each row are cut, all else is in every part.

    Raises:
        ValueError: it cannot be cut into so many equal parts, or they do not count as much as each other.
    """
    examples = count_examples(batch)
    if parts == 1:
        return [batch]
    if examples == 0 or examples % parts:
        message = (
            f"a batch of {examples} cannot be cut into {parts} equal parts: pass a batch whose size is a multiple "
            f"of {parts}"
        )
        raise ValueError(message)
    leaves, spec = flatten([dict(batch) if isinstance(batch, Mapping) else batch])
    cut = [
        leaf.chunk(parts) if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == examples else [leaf] * parts
        for leaf in leaves
    ]
    made = [unflatten([of[part] for of in cut], spec)[0] for part in range(parts)]
    _check_counts(made)
    return made


def find_weight(model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None, parts: int) -> float:
    """What each part's loss is multiplied with: a part of 1 for a mean, 1 for a sum.

    Raises:
        ValueError: the losses of the parts give neither, or the model has layers that look at all of a batch.
    """
    refuse_batch_norms(model)
    states = [(source, source.read()) for source in list_generators()]
    modes = [(part, part.training) for part in model.modules()]
    model.eval()  # what is dropped at random cannot be compared
    try:
        with torch.no_grad():
            whole = read_batch(batch, loss, model).lose(is_trained=False)
            made = split_batch(batch, parts)
            losses = [_lose_part(part, model, loss) for part in made]
    finally:
        for module, training in modes:
            module.training = training
        put_back(states)
    total = sum(one.double().item() for one in losses)
    expected = whole.double().item()
    close = _CLOSE.get(whole.dtype, _CLOSE_OTHERWISE) * max(abs(expected), 1e-12)
    for weight in (1 / parts, 1.0):
        if abs(total * weight - expected) <= close:
            return weight
    message = (
        f"{spell_lever(MICRO_BATCHES)} cannot be used: the loss of the whole batch is {expected:.6g}, but those of "
        f"its {parts} parts are {total / parts:.6g} on average and {total:.6g} in sum. It works only for a "
        "loss that is a mean or a sum over examples"
    )
    raise ValueError(message)


def _lose_part(part: Any, model: nn.Module, loss: Callable[..., Tensor] | None) -> Tensor:
    """The loss of a part of a batch, of which the whole has one.

    Raises:
        ValueError: it fails, as one does that counts on the size of the batch.
    """
    try:
        return read_batch(part, loss, model).lose(is_trained=False)
    except Exception as error:
        if read_shortage(error) is not None:
            raise
        said = str(error).partition("\n")[0]
        message = (
            f"{spell_lever(MICRO_BATCHES)} cannot be used: the step runs with the whole batch, but fails with a part "
            f"of it ({type(error).__name__}: {said}). It works only for a loss that is a mean or a sum over examples"
        )
        raise ValueError(message) from error


def refuse_batch_norms(model: nn.Module) -> None:
    """Refuse a model some layer of which looks at all examples of a batch.

    Raises:
        ValueError: it has one, in train mode.
    """
    for name, module in model.named_modules():
        if isinstance(module, _OVER_BATCHES) and module.training:
            message = (
                f"{spell_lever(MICRO_BATCHES)} cannot be used: '{name}' ({type(module).__name__}) normalizes over the "
                "whole batch, and would normalize over each part instead. Put it in eval mode, or use a norm that "
                "works on each example"
            )
            raise ValueError(message)


def _check_counts(parts: list[Any]) -> None:
    """Refuse targets some of which do not count, if they are more in one part than in another.

    Raises:
        ValueError: they are.
    """
    for leaves in zip(*map(_leaves_of, parts), strict=True):
        if not isinstance(leaves[0], Tensor) or leaves[0].dtype != torch.int64:
            continue
        counts = [int((leaf == _IGNORED).sum()) for leaf in leaves]
        if len(set(counts)) > 1:
            message = (
                f"{spell_lever(MICRO_BATCHES)}: {', '.join(map(str, counts))} targets are {_IGNORED} (ignored) in the "
                "parts of this batch, so their mean losses would need different weights. Pad examples evenly, or sum "
                "the loss"
            )
            raise ValueError(message)


def _leaves_of(batch: Any) -> list[Any]:
    return flatten([dict(batch) if isinstance(batch, Mapping) else batch])[0]
