"""Hugging Face Transformers: one call in place of ``gradient_checkpointing_enable``, and a callback for its Trainer.

Tested with transformers 5.22, peft 0.21 and trl 1.16.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import nn
from torch.utils.data import IterableDataset

from recollect._apply.caches import caches_left_out
from recollect._apply.handle import Applied
from recollect._apply.model import Rules, apply, check_request
from recollect._apply.targets import find_targets
from recollect._core.profiles import Profile
from recollect._core.sharded import is_sharded
from recollect._core.spelling import options_of, refuse_unknown
from recollect._fit.arguments import ANY_DEVICE
from recollect._fit.loaders import find_largest
from recollect._fit.plan import plan
from recollect._fit.ranks import Ranks
from recollect._inspect.profile import profile
from recollect._plan.budget import parse_budget
from recollect._plan.tiers import read_tiers
from recollect._policy.base import PolicyLike
from recollect.integrations.extras import require

__all__ = ["RecollectCallback", "enable"]

if TYPE_CHECKING:
    TrainerCallback = object
    PreTrainedModel: Any = None
else:
    TrainerCallback = require("transformers", extra="transformers").TrainerCallback
    PreTrainedModel = require("transformers", extra="transformers").PreTrainedModel

_log = logging.getLogger("recollect")


def enable(  # noqa: PLR0913 (all but the first are for some)
    model: nn.Module,
    rules: Rules | None = None,
    *,
    policy: PolicyLike | str | None = None,
    every: int | None = None,
    first: int | None = None,
    budget: int | str | None = None,
    inputs: Mapping[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | None = None,
    tiers: str | Sequence[str] | None = None,
    **unknown: Never,
) -> Applied:
    """Make a Transformers model recompute its layers; use it instead of ``gradient_checkpointing_enable()``.

    If that switch is on, it is turned off. While the model trains, it fills no key/value cache. You can wrap the model
    with PEFT before or after; its embeddings need not require grad.

    Args:
        model: a Transformers model, or one that holds or wraps it: PEFT, DDP, FSDP, torch.compile, a module of your
            own.
        rules: as for `recollect.apply`; by default all layers are recomputed.
        policy: as for `recollect.apply`.
        every: as for `recollect.apply`.
        first: as for `recollect.apply`.
        budget: instead of rules, the most memory a step may use, as for `recollect.plan`: ``"40GiB"``, ``"80%"``. The
            step is traced on fake tensors first; for a sharded model it runs. Several processes share one plan, so all
            of them must call this.
        inputs: for a budget, a batch: the keyword arguments that the model is called with, labels included.
        optimizer: for a budget, an optimizer or its class; its state counts too.
        tiers: for a budget, where values may be sent, as for `recollect.plan`: ``"host"``, ``"disk"``.
        unknown: there are no other options; torch's are refused with what to write instead.

    Returns:
        A handle that prints what was applied where; its ``remove`` restores the model.

    Raises:
        TypeError: the model is not a Transformers model and holds none, the batch is not a mapping, or an option is
            unknown.
        ValueError: a budget is given without inputs, or together with rules; or an option that only a budget needs is
            given without one.
        BudgetError: no plan fits the budget.

    >>> import torch, transformers
    >>> from recollect.integrations.transformers import enable
    >>> config = transformers.GPT2Config(
    ...     vocab_size=32, n_embd=16, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0
    ... )
    >>> model = transformers.GPT2LMHeadModel(config).train()
    >>> handle = enable(model, policy="selective")
    >>> print(handle)
    recollect.apply: 3 regions in GPT2LMHeadModel
    module             class      what                       rule
    transformer.h.0-2  GPT2Block  recompute under selective  repeated blocks
    GPT2LMHeadModel does not fill a key/value cache in training; generate() still does.
    >>> tokens = torch.arange(8).reshape(1, 8)
    >>> model(input_ids=tokens, labels=tokens).loss.backward()
    >>> handle.remove()
    """
    parts = model.modules() if isinstance(model, nn.Module) else ()
    found = [part for part in parts if isinstance(part, PreTrainedModel)]
    if not found:
        message = (
            f"enable expects a Transformers model, but {type(model).__name__} neither is nor holds one; for other "
            "models use recollect.apply(model)"
        )
        raise TypeError(message)
    if unknown:
        refuse_unknown("enable", unknown, options_of(enable))
    by_hand = {"rules": rules, "policy": policy, "every": every, "first": first}
    _check_options(budget, by_hand, inputs=inputs, optimizer=optimizer, tiers=tiers)
    if budget is None:
        _switch_off(found)
        return apply(model, rules, policy=policy, every=every, first=first)
    if inputs is None:
        message = f"budget={budget!r} needs inputs=, a batch to call the model with: what fits depends on its sizes"
        raise ValueError(message)
    _switch_off(found)
    # What the user calls, PEFT's prompts and adapters included; only DDP's and torch.compile's wrappers are left out.
    inner = find_targets(model)[0].chain[-1]
    ranks = Ranks(inner)
    seen = ranks.together(lambda: _take_profile(inner, inputs, optimizer))
    return apply(inner, ranks.decide(lambda: plan(seen, budget=budget, tiers=tiers)))


def _check_options(budget: int | str | None, by_hand: Mapping[str, Any], **for_budget: Any) -> None:
    """Refuse options that do not go together.

    Raises:
        ValueError: a budget is given along with rules, or what only a budget needs, without one.
        TypeError: the batch is not a mapping.
    """
    given = [name for name, value in (for_budget if budget is None else by_hand).items() if value is not None]
    if given and budget is None:
        message = f"{', '.join(given)}: only used with budget=, which is missing"
        raise ValueError(message)
    if given:
        message = f"budget={budget!r} decides what to keep, so it cannot be combined with {', '.join(given)}"
        raise ValueError(message)
    check_request(**by_hand)
    if budget is not None:
        parse_budget(budget, device_bytes=ANY_DEVICE)
    if for_budget["tiers"] is not None:
        read_tiers(for_budget["tiers"])
    inputs = for_budget["inputs"]
    if inputs is not None and not isinstance(inputs, Mapping):
        message = (
            f"inputs= expects a batch by name, as in {{'input_ids': ..., 'labels': ...}}, not {type(inputs).__name__}"
        )
        raise TypeError(message)


def _take_profile(model: nn.Module, inputs: Mapping[str, Any], optimizer: Any) -> Profile:
    """A step on fake tensors; a real one of a sharded model, whose gathers fake tensors cannot follow."""
    is_dry = not any(map(is_sharded, model.parameters()))
    with caches_left_out([model]):
        return profile(model, kwargs=dict(inputs), optimizer=optimizer, dry=is_dry)


def _switch_off(models: list[Any]) -> None:
    """Turn the switch of Transformers off: both together would recompute everything twice."""
    for model in models:
        if model.is_gradient_checkpointing:
            model.gradient_checkpointing_disable()
            _log.info(
                "%s: Transformers' own gradient checkpointing is turned off, and recollect's is on",
                type(model).__name__,
            )


class RecollectCallback(TrainerCallback):
    """A callback that calls `enable` when training begins, and undoes it when training ends.

    Pass it to a Trainer, or to one of TRL's: ``Trainer(..., callbacks=[RecollectCallback(policy="selective")])``.
    Leave ``gradient_checkpointing`` out of the training arguments; if it is on, the callback turns it off. If training
    ends with an exception, call `recollect.remove(model)` to restore the model.

    Args:
        rules: as for `enable`.
        policy: as for `enable`.
        every: as for `enable`.
        first: as for `enable`.
        budget: as for `enable`; the state of the trainer's optimizer counts.
        inputs: for a budget, a batch; by default the largest of the first 64 batches of the training data.
        tiers: as for `enable`.
        unknown: there are no other options.

    Raises:
        ValueError: an option has an invalid value, or does not go with another.
        TypeError: an option is unknown, or has the wrong type.

    Attributes:
        handle: the handle from `enable`, while the model trains.

    >>> from recollect.integrations.transformers import RecollectCallback
    >>> callback = RecollectCallback(policy="selective")
    """

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        policy: PolicyLike | str | None = None,
        every: int | None = None,
        first: int | None = None,
        budget: int | str | None = None,
        inputs: Mapping[str, Any] | None = None,
        tiers: str | Sequence[str] | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            refuse_unknown("RecollectCallback", unknown, options_of(RecollectCallback))
        by_hand = {"rules": rules, "policy": policy, "every": every, "first": first}
        _check_options(budget, by_hand, inputs=inputs, tiers=tiers)
        self._options: dict[str, Any] = {**by_hand, "budget": budget, "inputs": inputs, "tiers": tiers}
        self.handle: Applied | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by the trainer."""
        del args, state, control
        options, model = dict(self._options), given["model"]
        if options["budget"] is not None:
            options["optimizer"] = given.get("optimizer")
        if options["budget"] is not None and options["inputs"] is None:
            device = next(model.parameters()).device
            options["inputs"] = {
                name: value.to(device) if isinstance(value, torch.Tensor) else value
                for name, value in _find_batch(given["train_dataloader"]).items()
            }
        self._undo()
        self.handle = enable(model, **options)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by the trainer."""
        del args, state, control, given
        self._undo()

    def _undo(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


def _find_batch(loader: Any) -> Mapping[str, Any]:
    """The largest of the first batches; training still begins with the first one, and with the same random numbers."""
    if loader is None or isinstance(getattr(loader, "dataset", None), IterableDataset):
        message = (
            "budget= needs inputs=, a batch: the training data is a stream, and reading from it would lose a batch"
        )
        raise ValueError(message)
    # Accelerate's loaders count their epochs and talk to other processes; the one inside does neither.
    batch = find_largest(getattr(loader, "base_dataloader", loader))
    if not isinstance(batch, Mapping):
        message = (
            "budget= needs inputs=, a batch as a mapping of names to tensors: the training data yields "
            f"{type(batch).__name__}"
        )
        raise TypeError(message)
    return batch
