"""Arguments of fit that cannot work are refused before anything runs, with what to write instead."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from recollect._apply.stand_in import stand_in_of
from recollect._apply.targets import find_targets
from recollect._core.argument_text import describe_argument, short_repr, with_article
from recollect._core.torch_private.pytree import tree_leaves
from recollect._core.units import count_noun
from recollect._plan.budget import parse_budget

_log = logging.getLogger("recollect")

ANY_DEVICE = 1 << 60  # bytes: a share of a device is read when it is known which


def refuse_misplaced(misplaced: tuple[object, ...]) -> None:
    """Refuse positional arguments after the batch: most often the parts of a batch.

    Raises:
        TypeError: there are some.
    """
    if misplaced:
        message = (
            f"recollect.fit was given {count_noun(len(misplaced), 'argument')} after the batch: pass a batch of "
            "several parts as one tuple, recollect.fit(model, (x, y), ...), and options by name, as in budget='40GiB'"
        )
        raise TypeError(message)


def check_arguments(
    model: object,
    batch: Any,
    *,
    budget: int | str,
    loss: object,
    step: object,
    optimizer: object,
    recover: bool,
    progress: object,
) -> None:
    """Refuse what cannot work; what may be a mistake goes to the log.

    Raises:
        TypeError: something is not what it is taken for.
        ValueError: it has a value that it cannot have.
    """
    if not isinstance(model, nn.Module):
        found = f"{describe_argument(model)}: pass an instance" if isinstance(model, type) else describe_argument(model)
        message = f"recollect.fit expects a torch.nn.Module first, not {found}"
        raise TypeError(message)
    parse_budget(budget, device_bytes=ANY_DEVICE)
    for name, given in (("loss", loss), ("step", step), ("progress", progress)):
        if given is not None and not callable(given):
            message = f"{name}={short_repr(given)}: expected a function, not {type(given).__name__}"
            raise TypeError(message)
        if isinstance(given, type) and issubclass(given, nn.Module):
            message = f"{name}={given.__name__} is a class: pass an instance, as in {name}={given.__name__}()"
            raise TypeError(message)
    if not isinstance(recover, bool):
        message = f"recover={short_repr(recover)}: expected True or False"
        raise ValueError(message)  # noqa: TRY004 (as for every other option)
    if step is not None and loss is not None:
        message = "recollect.fit: step= runs the whole step, including its loss; pass either step= or loss="
        raise ValueError(message)
    if recover and step is not None:
        message = (
            "recover=True is for Fitted.forward_backward, but step= runs forward and backward itself: leave one of "
            "them out, and pass loss= if the model does not compute its loss"
        )
        raise ValueError(message)
    _check_batch(batch)
    name = type(model).__name__
    _check_regions(model, name)
    _check_devices(model, name, batch, owns_step=step is None)
    _check_optimizer(model, name, optimizer)
    if not model.training:
        _log.warning(
            "recollect.fit: %s is in eval mode, and is fitted that way; in train mode, dropout and batch norms "
            "may take more memory. Call model.train() first",
            name,
        )


def _check_batch(batch: Any) -> None:
    if isinstance(batch, Iterator):
        message = (
            f"batch is {with_article(type(batch).__name__)}, which recollect.fit would use up: pass one batch, the "
            "largest, or the DataLoader itself"
        )
        raise TypeError(message)
    if isinstance(batch, Dataset):
        name = with_article(type(batch).__name__)
        message = f"batch is {name}, which holds examples, not batches: pass a DataLoader of it, or one batch"
        raise TypeError(message)
    if isinstance(batch, (Mapping, tuple, list)) and not batch:
        message = f"batch is an empty {type(batch).__name__}: pass what one step is called with, as large as it gets"
        raise ValueError(message)


def _check_optimizer(model: nn.Module, name: str, optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    trained = {id(parameter) for parameter in model.parameters()}
    if not any(id(one) in trained for group in optimizer.param_groups for one in group["params"]):
        _log.warning(
            "recollect.fit: %s has no parameter of %s, so its state is counted as it is now. If the model was "
            "wrapped, sharded or loaded after the optimizer was made, make the optimizer again",
            type(optimizer).__name__,
            name,
        )


def _check_regions(model: nn.Module, name: str) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        message = f"{name} is compiled by TorchScript and has no Python code to run again: fit the original module"
        raise ValueError(message)  # noqa: TRY004 (a module of any other class would do)
    region = next((target.name for target in find_targets(model) if stand_in_of(target.module) is not None), None)
    if region is not None:
        message = (
            f"'{region}' of {name} is already a region, from recollect.apply or an earlier fit, but a plan is "
            "made from the plain model.\n"
            "Call recollect.remove(model), or remove() on what that call returned, and fit again"
        )
        raise ValueError(message)


def _check_devices(model: nn.Module, name: str, batch: Any, *, owns_step: bool) -> None:
    """Refuse a model without values, and tensors elsewhere; those on the CPU are sent to where the model is."""
    devices = {parameter.device for parameter in model.parameters()}
    if devices == {torch.device("meta")}:
        message = (
            f"recollect.fit has to run {name}, which is on the meta device, where tensors have no values: load it "
            "first.\n"
            "To find out whether it will fit: recollect.plan(recollect.profile(model, ..., dry=True, "
            "device='H100'), budget=...)"
        )
        raise ValueError(message)
    if not owns_step or len(devices) != 1:  # of several devices, the model knows which gets what
        return
    (here,) = devices
    for leaf in tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch):
        if isinstance(leaf, Tensor) and leaf.device not in (here, torch.device("cpu")):
            message = (
                f"batch has a tensor {list(leaf.shape)} on {leaf.device}, but {name} is on {here}: move "
                f"one of them, as in tensor.to('{here}')"
            )
            raise ValueError(message)
