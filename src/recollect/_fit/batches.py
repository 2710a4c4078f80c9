"""What a batch is to a model: arguments, keywords, the largest of a loader; and what a loss is given."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from recollect._core.torch_private.pytree import flatten, tree_leaves, unflatten

_MOST_BATCHES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How a model or a step is called.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        loss: makes the loss of the model's output; None if the output is or holds it.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] | None = None


def read_batch(batch: Any, loss: Callable[..., Tensor] | None, model: nn.Module) -> Call:
    """How a model is called with a batch, as people have it.

    A mapping gives keywords, a tuple or list arguments, a DataLoader its largest batch (of the first 64). A loss that
    takes two arguments is given the model's output and the batch's last part, which the model then does not get.
    """
    if isinstance(batch, DataLoader):
        batch = _find_largest(batch, model)
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
        if loss is not None and count_arguments(loss) > 1:
            named = next((key for key in ("labels", "targets", "target", "label", "y") if key in kwargs), None)
            if named is not None:
                target = kwargs.pop(named)
                return Call(kwargs=kwargs, loss=lambda output: loss(output, target))
        return Call(kwargs=kwargs, loss=loss)
    args = tuple(batch) if isinstance(batch, (tuple, list)) else () if batch is None else (batch,)
    if loss is not None and len(args) > 1 and count_arguments(loss) > 1:
        *inputs, last = args
        return Call(args=tuple(inputs), loss=lambda output: loss(output, last))
    return Call(args=args, loss=loss)


def count_arguments(loss: Callable[..., Any]) -> int:
    """How many positional arguments a loss must be given; 1 where nobody can tell.

    >>> count_arguments(torch.nn.MSELoss()), count_arguments(lambda output: output.sum())
    (2, 1)
    """
    try:
        parameters = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional and one.default is one.empty for one in parameters)


def _find_largest(loader: DataLoader[Any], model: nn.Module) -> Any:
    """The batch with the most elements, where the model is. Random numbers that loading draws are put back."""
    with torch.random.fork_rng(devices=[]):
        batches = list(itertools.islice(iter(loader), _MOST_BATCHES))
    if not batches:
        message = "the DataLoader gives no batch"
        raise ValueError(message)
    largest = max(batches, key=lambda one: sum(leaf.numel() for leaf in tree_leaves(one) if isinstance(leaf, Tensor)))
    device = next((parameter.device for parameter in model.parameters()), None)
    leaves, spec = flatten([largest])
    if device is not None:
        leaves = [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return unflatten(leaves, spec)[0]
