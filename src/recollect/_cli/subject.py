"""What to profile: the model, inputs and options that the user's function returns."""

import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from recollect._cli.screen import fail
from recollect._core.argument_text import with_article
from recollect._core.patterns import hint_nearest, quote_all
from recollect._core.signatures import read_signature
from recollect._inspect.calling import is_lightning
from recollect._policy.base import takes

_KEYS = ("model", "inputs", "kwargs", "optimizer", "loss", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileArguments:
    """Arguments of `recollect.profile`.

    Attributes:
        what: a model, or a function that runs a step.
        inputs: of the model.
        options: named arguments: `kwargs`, `optimizer`, `loss`.
    """

    what: nn.Module | Callable[[], Any]
    inputs: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_model(self) -> bool:
        """Whether it is a model, and not a step of the user's own."""
        return isinstance(self.what, nn.Module)


def read_subject(result: Any, function: Callable[[], Any], name: str) -> ProfileArguments:
    """What a function means by its result.

    A module, or a tuple or list that starts with one, is a model and its inputs. A mapping with a model or a step names
    them. Another callable runs a step. With anything else the function itself was a step, and is to run once more.

    Raises:
        typer.Exit: a mapping has keys that mean nothing, or lacks a model; or a step is not a function, or does not run
            when it is called; said on standard error.

    >>> def make():
    ...     return nn.Linear(2, 1), Tensor([1.0, 2.0])
    >>> read_subject(make(), make, "train:make").inputs
    (tensor([1., 2.]),)
    >>> read_subject(None, make, "train:make").what is make
    True
    """
    if isinstance(result, nn.Module):
        return ProfileArguments(what=result)
    if isinstance(result, (tuple, list)) and result and isinstance(result[0], nn.Module):
        return ProfileArguments(what=result[0], inputs=tuple(result[1:]))
    if isinstance(result, Mapping) and _names_something(result):
        return _read_mapping(result, name)
    if callable(result):
        check_function(result, f"what {name} returned")
        return ProfileArguments(what=result)
    return ProfileArguments(what=function)


def check_inputs(subject: ProfileArguments, name: str) -> None:
    """Refuse a model that comes without the inputs that its forward needs.

    Raises:
        typer.Exit: said on standard error.
    """
    if not subject.is_model or subject.inputs or subject.options.get("kwargs"):
        return
    assert isinstance(subject.what, nn.Module)
    if takes(subject.what.forward, 0) or is_lightning(subject.what):
        return
    kind = with_article(type(subject.what).__name__)
    needed = ", ".join(read_signature(subject.what.forward).parameters)
    fail(f"{name} returned a model, {kind}, without its inputs, ({needed}): let it return (model, *inputs)")


def check_function(function: Callable[..., Any], name: str) -> None:
    """Refuse a function that does not run when it is called.

    Raises:
        typer.Exit: said on standard error.
    """
    kinds = {
        "a coroutine": inspect.iscoroutinefunction(function),
        "a generator": inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function),
    }
    for kind, is_it in kinds.items():
        if is_it:
            how = "calls asyncio.run(...)" if kind == "a coroutine" else "loops over it"
            fail(f"{name} is {kind}, which does nothing when it is called: name a function that {how}")


def _names_something(given: Mapping[str, Any]) -> bool:
    """Whether it can be meant as a description: results of a step are mappings, too."""
    return "model" in given or "step" in given or any(isinstance(value, nn.Module) for value in given.values())


def _read_mapping(given: Mapping[str, Any], name: str) -> ProfileArguments:
    unknown = [key for key in given if key not in _KEYS]
    if unknown:
        given_keys = f"{name} returned a mapping with {quote_all(unknown)}"
        fail(f"{given_keys}; known keys are {', '.join(_KEYS)}{hint_nearest(unknown[0], _KEYS)}")
    model, step, inputs = given.get("model"), given.get("step"), given.get("inputs", ())
    if step is None and not isinstance(model, nn.Module):
        fail(f"{name} returned a mapping without a model: expected 'model', a torch.nn.Module, or 'step', a function")
    options = {key: given[key] for key in ("kwargs", "optimizer", "loss") if key in given}
    if step is not None:
        if not callable(step):
            fail(
                f"{name} returned a mapping whose 'step' is {reprlib.repr(step)}: expected a function without arguments"
            )
        check_function(step, f"'step' of what {name} returned")
        return ProfileArguments(what=step, options=options)
    assert isinstance(model, nn.Module)
    if isinstance(inputs, Mapping):
        return ProfileArguments(what=model, options={**options, "kwargs": {**inputs, **options.get("kwargs", {})}})
    is_several = isinstance(inputs, Sequence) and not isinstance(inputs, (str, Tensor))
    return ProfileArguments(what=model, inputs=tuple(inputs) if is_several else (inputs,), options=options)


def move_subject(subject: ProfileArguments, device: str | None, dtype: torch.dtype | None) -> ProfileArguments:
    """The subject with its model and inputs on a device and of a dtype; a step of the user's own is left as it is.

    >>> moved = move_subject(ProfileArguments(what=nn.Linear(2, 1), inputs=(torch.ones(2),)), "cpu", torch.bfloat16)
    >>> moved.inputs
    (tensor([1., 1.], dtype=torch.bfloat16),)
    """
    if not isinstance(subject.what, nn.Module) or (device is None and dtype is None):
        return subject

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device=device, dtype=dtype if value.is_floating_point() else None)
        if isinstance(value, (tuple, list)):
            return type(value)(move(item) for item in value)
        return {key: move(item) for key, item in value.items()} if isinstance(value, Mapping) else value

    model = subject.what.to(device=device, dtype=dtype)
    options = {key: move(value) if key == "kwargs" else value for key, value in subject.options.items()}
    return ProfileArguments(what=model, inputs=tuple(move(value) for value in subject.inputs), options=options)
