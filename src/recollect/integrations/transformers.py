"""Hugging Face Transformers: one call in place of ``gradient_checkpointing_enable``, and a callback for its Trainer.

Tested with transformers 5.22, peft 0.21 and trl 1.16.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from recollect._apply.handle import Applied
from recollect._apply.model import Rules, apply
from recollect._fit.plan import plan
from recollect._inspect.profile import profile
from recollect._policy.base import PolicyLike
from recollect.integrations.extras import require

if TYPE_CHECKING:
    TrainerCallback = object
    PreTrainedModel: Any = None
else:
    TrainerCallback = require("transformers", extra="transformers").TrainerCallback
    PreTrainedModel = require("transformers", extra="transformers").PreTrainedModel

_log = logging.getLogger("recollect")


def enable(
    model: nn.Module,
    rules: Rules | None = None,
    *,
    policy: PolicyLike | str | None = None,
    every: int | None = None,
    first: int | None = None,
    budget: int | str | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Applied:
    """Make a model of Transformers forget its activations, in place of ``model.gradient_checkpointing_enable()``.

    That switch is turned off if it is on. No cache of keys and values is filled while the model trains. The model may
    be wrapped by PEFT, before or after; embeddings need not require grad for that.

    Args:
        model: a model of Transformers, or one that wraps it: PEFT, DDP, FSDP, torch.compile.
        rules: as for `recollect.apply`; by default all layers are recomputed.
        policy: as for `recollect.apply`.
        every: as for `recollect.apply`.
        first: as for `recollect.apply`.
        budget: in place of rules, the most memory a step may take, as for `recollect.plan`: ``"40GiB"``, ``"80%"``. The
            step is followed on fake tensors first; the state of an optimizer counts only where it exists already.
        inputs: for a budget, a batch: what the model is called with, labels included.

    Returns:
        A handle, which prints what was applied where; its `remove` restores the model.

    Raises:
        TypeError: the model is not one of Transformers.
        ValueError: a budget is given without inputs, or along with rules.
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
    GPT2LMHeadModel fills no key/value cache while it trains; generate() keeps its own.
    >>> tokens = torch.arange(8).reshape(1, 8)
    >>> model(input_ids=tokens, labels=tokens).loss.backward()
    >>> handle.remove()
    """
    found = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not found:
        message = (
            f"enable expects a model of Transformers, and there is none in {type(model).__name__}; "
            "for other models use recollect.apply(model)"
        )
        raise TypeError(message)
    if budget is not None:
        given = {"rules": rules, "policy": policy, "every": every, "first": first}
        rules = _plan_for(found[0], budget, inputs, [name for name, value in given.items() if value is not None])
        policy = every = first = None
    _switch_off(found)
    return apply(model, rules, policy=policy, every=every, first=first)


def _plan_for(model: Any, budget: int | str, inputs: Mapping[str, Any] | None, others: list[str]) -> Any:
    if others:
        message = f"budget={budget!r} finds out what to keep, so {', '.join(others)} cannot be given with it"
        raise ValueError(message)
    if inputs is None:
        message = f"budget={budget!r} needs inputs=, a batch that the model is called with: sizes decide what fits"
        raise ValueError(message)
    _switch_off([model])
    step = dict(inputs)
    if "use_cache" in inspect.signature(model.forward).parameters:
        step["use_cache"] = False
    return plan(profile(model, kwargs=step, dry=True), budget=budget)


def _switch_off(models: list[Any]) -> None:
    """Turn the switch of Transformers off: both together would recompute everything twice."""
    for model in models:
        if model.is_gradient_checkpointing:
            model.gradient_checkpointing_disable()
            _log.info("%s: Transformers' own gradient checkpointing is turned off, ours is on", type(model).__name__)


class RecollectCallback(TrainerCallback):
    """For ``Trainer(callbacks=[...])``, and TRL's trainers: `enable` when training begins, undone when it ends.

    Leave ``gradient_checkpointing`` out of the training arguments; where it is on, it is turned off. If training ends
    by an exception, `recollect.remove` restores the model.

    Args:
        rules: as for `enable`, and so are the following.
        policy: as for `enable`.
        every: as for `enable`.
        first: as for `enable`.
        budget: as for `enable`.
        inputs: for a budget, a batch; by default the first one of the training data.

    Attributes:
        handle: what `enable` returned, while it trains.

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
    ) -> None:
        self._options: dict[str, Any] = {
            "rules": rules, "policy": policy, "every": every, "first": first, "budget": budget, "inputs": inputs,
        }  # fmt: skip
        self.handle: Applied | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by the trainer."""
        del args, state, control
        options, model = dict(self._options), given["model"]
        if options["budget"] is not None and options["inputs"] is None:
            device = next(model.parameters()).device
            options["inputs"] = {
                name: value.to(device) if isinstance(value, torch.Tensor) else value
                for name, value in _first_batch(given["train_dataloader"]).items()
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


def _first_batch(loader: Any) -> Mapping[str, Any]:
    """The first batch of the training data, which training still begins with, as with its random numbers."""
    if loader is None or isinstance(getattr(loader, "dataset", None), IterableDataset):
        message = "budget= needs inputs=, a batch, where the training data is a stream: reading it would lose a batch"
        raise ValueError(message)
    with torch.random.fork_rng():
        batch = next(iter(loader))
    if not isinstance(batch, Mapping):
        message = f"budget= needs inputs=, a batch by name: the training data gives {type(batch).__name__}"
        raise TypeError(message)
    return batch
