"""How to run one step of what the user passed, and where to find its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from recollect._core.argument_text import with_article
from recollect._core.authors import Role
from recollect._core.signatures import binds, names_arguments, read_signature
from recollect._core.torch_private.engine import has_run, marking_passes
from recollect._core.torch_private.pytree import tree_leaves
from recollect._levers.lazy_logits import LazyLogits

__recollect_role__ = Role.RUNNER

_LIGHTNING = ("lightning", "pytorch_lightning")


Run = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """A function that the user gives to run a step."""

    function: Callable[..., Any]

    def bind(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
        """What runs the step, and its backward if it returns a loss and has not run backward from that.

        It may have run others: of an auxiliary loss, or for a gradient penalty. The first run tells.
        """
        runs_backward: bool | None = None

        def run() -> None:
            nonlocal runs_backward
            with marking_passes() if runs_backward is None else nullcontext():
                result = self.function(*inputs, **kwargs)
            loss = find_returned_loss(result)
            if runs_backward is None:
                runs_backward = loss is not None and not has_run(loss.grad_fn)
            if runs_backward and loss is not None:
                del result
                loss.backward()

        return run


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A model, how its loss is made, and what may be wrong with how it is called, in a sentence."""

    model: nn.Module
    forward: Callable[..., Any]
    loss: Callable[[Any], Tensor] | None
    doubt: str = ""

    def bind(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
        """What runs forward and backward."""

        def run() -> None:
            with torch.enable_grad():
                try:
                    output = self.forward(*inputs, **kwargs)
                except (AttributeError, RuntimeError, TypeError) as error:
                    if self.doubt:
                        error.add_note(self.doubt)
                    raise
                value = loss_in(output) if self.loss is None else self.loss(output)
            if not isinstance(value, Tensor) or not value.requires_grad:
                raise ValueError(_explain_no_loss(self.model, output, value, is_given=self.loss is not None))
            value.backward() if value.dim() == 0 else value.sum().backward()

        return run


def find_call(
    step_or_model: Callable[..., Any], inputs: tuple[Any, ...], loss: Callable[[Any], Tensor] | None, doubt: str = ""
) -> StepCall | ModelCall:
    """What is to be called for a step; `doubt` says what may be wrong with that."""
    if not isinstance(step_or_model, nn.Module):
        return StepCall(function=step_or_model)
    forward: Callable[..., Any] = step_or_model
    if not has_forward(step_or_model) and callable(step := getattr(step_or_model, "training_step", None)):
        forward, doubt = _with_index(step, inputs), doubt_trainer(step_or_model)
    return ModelCall(model=step_or_model, forward=forward, loss=loss, doubt=doubt)


def inner_forward(model: nn.Module) -> Callable[..., Any]:
    """The forward that gets a model's arguments in the end: wrappers for several devices take anything."""
    inner = model.module if isinstance(model, DistributedDataParallel | DataParallel) else model
    forward: Callable[..., Any] = inner.forward
    return forward


def spread(
    model: Any, inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for a model: a batch that maps the names of its arguments is spread over them.

    >>> class Model(nn.Module):
    ...     def forward(self, ids, mask=None):
    ...         return ids
    >>> spread(Model(), ({"ids": 1},), None), spread(Model(), ({"other": 1},), None)
    (((), {'ids': 1}), (({'other': 1},), {}))
    """
    batch = inputs[0] if len(inputs) == 1 and not kwargs else None
    if isinstance(batch, Mapping) and isinstance(model, nn.Module) and has_forward(model):
        forward = inner_forward(model)
        is_named = all(isinstance(key, str) for key in batch)
        if is_named and names_arguments(batch, forward) and binds(forward, (), batch):
            return (), dict(batch)
    return inputs, dict(kwargs or {})


def doubt_inputs(model: Any, inputs: tuple[Any, ...], *, has_keywords: bool) -> str:
    """What to say where a model fails that was given a whole batch as one argument, or nothing; else nothing."""
    if not inputs and not has_keywords and isinstance(model, nn.Module) and not _runs_bare(model):
        return (
            f"recollect.profile was given no inputs for {type(model).__name__}: write recollect.profile(model, *inputs)"
        )
    batch = inputs[0] if len(inputs) == 1 else None
    if not isinstance(batch, (tuple, list, dict)):
        return ""
    got = f"{type(model).__name__}.forward got the {type(batch).__name__} as its only argument"
    if isinstance(batch, dict):  # one whose keys are its arguments was spread over them
        keys = ", ".join(map(repr, batch))
        what = "leave out what it does not take, or pass a function that runs the step"
        return f"{got}: its keys, {keys}, are not the names of its arguments. To profile it, {what}"
    return f"{got}. If it takes what is in it, write recollect.profile(model, *batch)"


def _runs_bare(model: nn.Module) -> bool:
    """Whether forward can be called without arguments, as far as its signature says."""
    try:
        read_signature(model.forward).bind()
    except TypeError:
        return False
    except ValueError:  # there is none to read
        return True
    return True


def has_forward(module: nn.Module) -> bool:
    """Whether a module's class has a forward of its own, neither torch's placeholder nor Lightning's.

    >>> has_forward(nn.Linear(1, 1)), has_forward(nn.ModuleList())
    (True, False)
    """
    owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
    return "forward" in vars(module) or (owner is not nn.Module and owner.__module__.split(".")[0] not in _LIGHTNING)


def is_lightning(module: nn.Module) -> bool:
    """Whether a module is a LightningModule with a step of its own."""
    bases = (base for base in type(module).__mro__ if "training_step" in vars(base))
    owner = next(bases, None)
    lightning = any(base.__module__.split(".")[0] in _LIGHTNING for base in type(module).__mro__)
    return lightning and owner is not None and owner.__module__.split(".")[0] not in _LIGHTNING


def doubt_trainer(module: nn.Module) -> str:
    """What to say where the step of a LightningModule fails that has no Trainer; nothing if it has one."""
    if getattr(module, "_trainer", None) is not None:
        return ""
    return (
        f"recollect called {type(module).__name__}.training_step without a Trainer: if it needs one, as manual "
        "optimization does, pass a function that computes the loss with this module instead. recollect.fit takes it as "
        "step="
    )


def _with_index(step: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[..., Any]:
    """A ``training_step(batch, batch_idx)`` that may be called with the batch alone."""
    try:
        read_signature(step).bind(*inputs)
    except TypeError:
        return lambda *args, **kwargs: step(*args, 0, **kwargs)
    return step


def find_returned_loss(result: Any) -> Tensor | None:
    """The loss that a step returns: a number with a graph, as ``loss``, first among others, or the only one."""
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    held = held_loss(first)
    found = first if held is None else held
    if _is_loss(found):
        return found
    numbers = [leaf for leaf in tree_leaves(result) if _is_loss(leaf)]
    return numbers[0] if len(numbers) == 1 else None


def _is_loss(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.requires_grad and value.numel() == 1 and value.grad_fn is not None


def held_loss(output: Any) -> Any:
    """What an output calls its loss; None if nothing."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def loss_in(output: Any, *, is_trained: bool = True) -> Tensor | None:
    """The loss that a model's output is or holds, or the sum of its tensors: of those with gradients, in training."""
    held = held_loss(output)
    if isinstance(held, Tensor):
        return held
    found = (leaf.compute() if isinstance(leaf, LazyLogits) else leaf for leaf in tree_leaves(output))
    leaves = [leaf for leaf in found if isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in leaves if leaf.requires_grad or (not is_trained and leaf.is_floating_point())]
    if tensors and tensors[0].dim() == 0 and not tensors[0].is_complex():
        return tensors[0]
    sums = [(torch.view_as_real(tensor) if tensor.is_complex() else tensor).sum() for tensor in tensors]
    return sum(sums[1:], sums[0]) if sums else None


def _explain_no_loss(model: nn.Module, output: Any, value: Any, *, is_given: bool) -> str:
    what = type(model).__name__
    untrained = explain_untrained(model)
    if not is_given:
        start = f"cannot make a loss from what {what} returns ({type(output).__name__}): no tensor in it requires grad"
        return (
            f"{start}, {untrained}" if untrained else f"{start}. Pass `loss=`, a function from the output to the loss"
        )
    given = "None" if value is None else with_article(type(value).__name__)
    start = f"loss= returned {given}, which has no graph behind it"
    if untrained and isinstance(value, Tensor):
        return f"{start}, {untrained}"
    return f"{start}: expected a tensor that requires grad. Return the loss itself, neither detached nor as a number"


def explain_untrained(model: nn.Module) -> str:
    """Why no loss of this model has a graph, whatever it is, and what to do; nothing if it trains something.

    >>> explain_untrained(nn.ReLU()), explain_untrained(nn.Linear(1, 1))
    ('because ReLU has no parameters. Pass the model that is trained', '')
    """
    what, parameters = type(model).__name__, list(model.parameters())
    if not parameters:
        return f"because {what} has no parameters. Pass the model that is trained"
    if any(parameter.requires_grad for parameter in parameters):
        return ""
    return (
        f"because all parameters of {what} are frozen. Unfreeze what you want to train: parameter.requires_grad_(True)"
    )
