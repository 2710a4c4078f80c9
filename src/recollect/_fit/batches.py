"""How a model, or a step of the user's, is called with a batch: by arguments, by keywords, whole; what a loss gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from recollect._core.argument_text import with_article
from recollect._core.signatures import binds, find_signature, names_arguments
from recollect._core.torch_private.pytree import flatten, unflatten
from recollect._inspect.calling import doubt_trainer, inner_forward, is_lightning, loss_in

_TARGETS = ("labels", "targets", "target", "label", "y")


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """How a model or a step is called.

    Attributes:
        function: the model, or the step.
        args: positional arguments.
        kwargs: keyword arguments.
        loss: makes the loss of the model's output; None if the output is or holds it.
        doubt: what may be wrong with that, in a sentence, for whom the call fails.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] | None = None
    doubt: str = ""

    def lose(self, *, is_trained: bool = True) -> Tensor:
        """Call the model, and give its loss, as one number.

        Raises:
            ValueError: there is none, or, where the model is trained, none with a graph behind it.
        """
        output = self.function(*self.args, **self.kwargs)
        value = loss_in(output, is_trained=is_trained) if self.loss is None else self.loss(output)
        if not isinstance(value, Tensor) or (is_trained and not value.requires_grad):
            message = f"cannot make a loss from {describe(output)}: expected a tensor that requires grad"
            raise ValueError(message)
        return value if value.dim() == 0 else value.sum()


def read_batch(batch: Any, loss: Callable[..., Tensor] | None, model: nn.Module) -> Invocation:
    """How a model is called with a batch, as people have it.

    A mapping gives keywords, a tuple or list arguments, anything else is one argument; if the model's forward takes
    only one, it gets the whole. A loss that takes two arguments is given the model's output and the targets, which the
    model then does not get: the last part of a tuple; of a mapping ``labels`` or the like, the one key that forward
    does not know, or else the whole. Tensors on the CPU go where the model is. A LightningModule without `loss` has its
    ``training_step`` called.

    Raises:
        ValueError: the model's forward cannot be called with it.
    """
    batch = _send(batch, model)
    if loss is None and is_lightning(model):
        step: Callable[..., Any] = model.training_step  # type: ignore[assignment]
        args = (batch, 0) if binds(step, (batch, 0), {}) else (batch,)
        return Invocation(function=step, args=args, doubt=doubt_trainer(model))
    if loss is None or count_arguments(loss) < 2:  # noqa: PLR2004
        return _call_with(model, batch, loss)
    inputs, target = _take_target(batch, model)
    return _call_with(model, inputs, lambda output: loss(output, target))


def read_step(batch: Any, step: Callable[..., Any]) -> Invocation:
    """How a step of the user's is called with a batch: with the whole if it takes it, else with its parts.

    A mapping gives keywords if the step has arguments of these names.

    Raises:
        ValueError: it can be called with neither.

    >>> read_step((1, 2), lambda batch: ...).args, read_step((1, 2), lambda x, y: ...).args
    (((1, 2),), (1, 2))
    """
    forms: list[tuple[tuple[Any, ...], dict[str, Any]]] = [] if batch is None else [((batch,), {})]
    if isinstance(batch, (tuple, list)):
        forms.append((tuple(batch), {}))
    if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        forms.insert(0 if names_arguments(batch, step) else 1, ((), dict(batch)))
    forms.append(((), {}))
    name = getattr(step, "__name__", type(step).__name__)
    for args, kwargs in forms:
        if binds(step, args, kwargs):
            has_parts = len(args) == 1 and args[0] is batch and isinstance(batch, (Mapping, tuple, list))
            doubt = (
                f"recollect.fit called step={name}{_signature_of(step)} with the whole batch, {describe(batch)}: "
                "if it is to get the parts, let it take them without defaults"
            )
            return Invocation(function=step, args=args, kwargs=kwargs, doubt=doubt if has_parts else "")
    message = (
        f"step={name}{_signature_of(step)} cannot be called with this batch, {describe(batch)}: expected a "
        "function that takes the batch, its parts, or nothing"
    )
    raise ValueError(message)


def count_arguments(loss: Callable[..., Any]) -> int:
    """How many positional arguments a loss must be given; 1 where nobody can tell.

    >>> count_arguments(torch.nn.MSELoss()), count_arguments(lambda output: output.sum())
    (2, 1)
    """
    signature = find_signature(loss.forward if isinstance(loss, nn.Module) else loss)
    if signature is None:
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional and one.default is one.empty for one in signature.parameters.values())


def describe(batch: Any) -> str:
    """A batch in a few words.

    >>> describe({"x": torch.ones(2, 3)}), describe((torch.ones(1), 2))
    ("a dict with 'x'", 'a tuple of 2')
    """
    if isinstance(batch, Mapping):
        return f"{with_article(type(batch).__name__)} with {', '.join(map(repr, batch))}"
    if isinstance(batch, (tuple, list)):
        return f"{with_article(type(batch).__name__)} of {len(batch)}"
    return "None" if batch is None else with_article(type(batch).__name__)


def _call_with(model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None) -> Invocation:
    call = Invocation(function=model, loss=loss)
    forward = inner_forward(model)
    if batch is None:
        doubt = f"recollect.fit was given no batch for {type(model).__name__}.forward{_signature_of(forward)}: pass one"
        return replace(call, doubt=doubt)
    if isinstance(batch, Mapping):
        named = all(isinstance(key, str) for key in batch)
        if named and binds(forward, (), dict(batch)):
            return replace(call, kwargs=dict(batch))
    elif isinstance(batch, (tuple, list)) and binds(forward, tuple(batch), {}):
        return replace(call, args=tuple(batch))
    if binds(forward, (batch,), {}) and not names_arguments(batch, forward):
        return replace(call, args=(batch,), doubt=_doubt(model, forward, batch, loss))
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return _call_with(model, batch[0], loss)
    raise ValueError(_refuse(model, forward, batch, loss))


def _doubt(model: nn.Module, forward: Callable[..., Any], batch: Any, loss: Callable[[Any], Tensor] | None) -> str:
    """What to say where a model fails that was given something else than a tensor as its one argument."""
    if isinstance(batch, Tensor):
        return ""
    what = (
        f"recollect.fit gave {type(model).__name__}.forward{_signature_of(forward)} the whole batch, {describe(batch)}"
    )
    if not isinstance(batch, (Mapping, tuple, list)):
        return (
            f"{what}: if it does not take that, pass a tensor, a tuple of arguments, a dict of keywords or a "
            "DataLoader; or step=, a function that runs the step"
        )
    if loss is None:
        return f"{what}: if it has targets, pass loss=, a function of the output and the targets"
    return f"{what}: leave out what the model does not take, or pass step=, a function that runs the step"


def _refuse(model: nn.Module, forward: Callable[..., Any], batch: Any, loss: Callable[[Any], Tensor] | None) -> str:
    what = f"{type(model).__name__}.forward{_signature_of(forward)} cannot be called with {describe(batch)}"
    unknown = _find_unknown(batch, forward) if isinstance(batch, Mapping) else []
    if unknown:
        what += f": it does not take {', '.join(map(repr, unknown))}"
    if loss is None:
        return (
            f"{what}.\n"
            "If the batch has targets, pass loss=, a function of the output and the targets; otherwise pass step="
        )
    return f"{what}.\nLeave out what the model does not take, or pass step=, a function that runs the step"


def _take_target(batch: Any, model: nn.Module) -> tuple[Any, Any]:
    """What of a batch the model gets, and what the loss gets beside the output."""
    if isinstance(batch, Mapping):
        rest = dict(batch)
        unknown = _find_unknown(batch, inner_forward(model))
        named = next((key for key in _TARGETS if key in rest), None)
        if named is None and len(unknown) == 1:
            named = unknown[0]
        return (rest, batch) if named is None else (rest, rest.pop(named))
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        *inputs, last = batch
        if len(inputs) == 1 and isinstance(inputs[0], (Mapping, tuple, list)):
            return inputs[0], last
        return tuple(inputs), last
    return batch, batch


def _find_unknown(batch: Mapping[Any, Any], forward: Callable[..., Any]) -> list[Any]:
    """The keys that forward has no argument for."""
    signature = find_signature(forward)
    if signature is None or any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values()):
        return []
    return [key for key in batch if key not in signature.parameters]


def _signature_of(function: Callable[..., Any]) -> str:
    signature = find_signature(function)
    return "" if signature is None else f"({', '.join(signature.parameters)})"


def _send(batch: Any, model: nn.Module) -> Any:
    """The batch where the model is; mappings that torch does not know become dicts."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type in ("cpu", "meta"):
        return batch
    leaves, spec = flatten([dict(batch) if isinstance(batch, Mapping) else batch])
    moved = [leaf.to(device) if isinstance(leaf, Tensor) and leaf.device.type == "cpu" else leaf for leaf in leaves]
    return unflatten(moved, spec)[0]
