"""The native form: `checkpoint` as a transform of a function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling, is_exporting

from recollect._apply.caches import cache_classes, without_cache
from recollect._apply.options import OPTIONS, parse_choices, warn_if_nothing_kept
from recollect._core.argument_text import describe_argument, short_repr
from recollect._core.scope import override
from recollect._core.spelling import refuse_unknown
from recollect._core.torch_private.torchscript import is_tracing
from recollect._core.units import count_noun
from recollect._offload.offload import Offload, TierLike
from recollect._policy.base import PolicyLike
from recollect._recompute.match import Check

P = ParamSpec("P")
T = TypeVar("T")


@overload
def checkpoint(
    fn: Callable[P, T],
    *,
    policy: PolicyLike | str | None = ...,
    name: str | None = ...,
    preserve_rng: bool | Iterable[str] = ...,
    early_stop: bool = ...,
    check: Check = ...,
    offload_inputs: bool = ...,
    offload_to: TierLike | Offload | None = ...,
) -> Callable[P, T]: ...


@overload
def checkpoint(
    fn: None = None,
    *,
    policy: PolicyLike | str | None = ...,
    name: str | None = ...,
    preserve_rng: bool | Iterable[str] = ...,
    early_stop: bool = ...,
    check: Check = ...,
    offload_inputs: bool = ...,
    offload_to: TierLike | Offload | None = ...,
) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


def checkpoint(
    fn: Callable[..., Any] | None = None,
    *misplaced: Any,
    policy: PolicyLike | str | None = None,
    name: str | None = None,
    preserve_rng: bool | Iterable[str] = True,
    early_stop: bool = True,
    check: Check = "metadata",
    offload_inputs: bool = False,
    offload_to: TierLike | Offload | None = None,
    **unknown: Any,
) -> Callable[..., Any]:
    """Wrap a function or module so that forward drops its activations and backward recomputes them.

    Call the result as you would call the function; gradients, outputs and random numbers are those of the plain call.
    The result is a function even for a module: keep the module itself as an attribute of your model.

    Between forward and backward it keeps the function's arguments, the random states that it advanced, and small copies
    of buffers that it updated. With grad mode off it is a plain call. `torch.func` transforms do not allow saved-tensor
    hooks: inside them, recollect compares outputs instead of saved tensors, and `early_stop` has no effect.

    Args:
        fn: a function, method or module. Without it, `checkpoint` returns a decorator with these options.
        misplaced: must be empty; pass the function's arguments to the function that is returned.
        policy: which values to keep: a function from a `Site` to a `Decision`, one of `recollect.policies`, or
            ``"selective"``. None and ``"full"`` keep nothing, except the results of collectives where several
            processes train together.
        name: what errors and reports call the region; by default the function's name.
        preserve_rng: True to draw the same random numbers again (torch's CPU generator, those of the devices in use
            and any `torch.Generator` among the arguments; Python's and NumPy's; generators that the function or its
            modules hold), False not to, or a collection of ``"torch"``, ``"python"`` and ``"numpy"``.
        early_stop: stop recomputation as soon as backward has everything it needs.
        check: how recomputation is compared with forward: ``"metadata"`` (shape, dtype, device of each saved tensor),
            ``"values"`` or a `ValueCheck`, or ``"none"``.
        offload_inputs: whether the function's arguments, and what a policy keeps, wait elsewhere between forward and
            backward, as with `recollect.offload`. In compiled code they can only go to pinned host memory.
        offload_to: where they wait: ``"host"`` (the default), ``"disk"``, another tier, or a `recollect.offload`.
            Values that a policy decides to offload go there too.
        unknown: there are no other options; torch's are refused with what to write instead.

    Raises:
        ValueError: an option has an invalid value.
        TypeError: `fn` is not callable, the function's arguments were passed along with it, or an option is unknown.

    >>> import torch, recollect
    >>> block = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    >>> x = torch.randn(2, 4)
    >>> recollect.checkpoint(block)(x).sum().backward()
    >>> block[0].weight.grad.shape
    torch.Size([16, 4])

    With a policy, some values are kept, so that recomputation skips what made them:

    >>> keep_matmuls = recollect.checkpoint(block, policy=recollect.policies.save_matmuls)
    >>> keep_matmuls(x).sum().backward()

    As a decorator, with options:

    >>> @recollect.checkpoint(name="attention", check="values")
    ... def attention(q, k, v, *, debug=False):
    ...     return torch.nn.functional.scaled_dot_product_attention(q, k, v)
    >>> q = torch.randn(1, 2, 8, 4, requires_grad=True)
    >>> attention(q, q, q, debug=True).sum().backward()

    Invalid options are refused:

    >>> recollect.checkpoint(block, check="shapes")
    Traceback (most recent call last):
    ...
    ValueError: check='shapes': expected 'metadata', 'values', 'none' or a recollect.ValueCheck
    """
    if misplaced:
        message = (
            f"recollect.checkpoint was given {count_noun(len(misplaced), 'argument')} in addition to the function: "
            "arguments go to the function that it returns.\n"
            "Write recollect.checkpoint(fn)(*args), or use recollect.compat.checkpoint(fn, *args, "
            "use_reentrant=False)."
        )
        raise TypeError(message)
    if unknown:
        otherwise = "pass the function's own arguments to what checkpoint returns, as in "
        otherwise += "recollect.checkpoint(fn)(x, name=value)"
        refuse_unknown("recollect.checkpoint", unknown, (*OPTIONS, "name"), otherwise)
    if fn is None:
        return functools.partial(
            checkpoint,
            policy=policy,
            name=name,
            preserve_rng=preserve_rng,
            early_stop=early_stop,
            check=check,
            offload_inputs=offload_inputs,
            offload_to=offload_to,
        )
    if not isinstance(fn, FunctionType) or fn.__code__.co_flags & _STARTS_ONLY:
        _check_others(fn)
    choices = parse_choices(
        policy=policy,
        preserve_rng=preserve_rng,
        early_stop=early_stop,
        check=check,
        offload_inputs=offload_inputs,
        offload_to=offload_to,
    ).suited(_module_of(fn))
    name = name_of(fn) if name is None else _check_name(name)
    call, checked = choices.region(name, fn).call, choices.policy
    elsewhere, sends = choices.elsewhere, choices.sends
    tally, caches = choices.tally, cache_classes()
    may_cache = bool(caches) and _module_of(fn) is not None

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if may_cache:  # the module is looked up here: a second way to it would confuse Dynamo
            args, kwargs = without_cache(_module_of(fn), caches, args, kwargs)
        if is_dynamo_compiling() or is_exporting():
            from recollect._apply.in_graph import call_in_graph

            return call_in_graph(name, fn, checked, args, kwargs, None, elsewhere, sends)
        result = fn(*args, **kwargs) if is_tracing() else call(args, kwargs)  # what TorchScript takes down is plain
        if tally is not None:
            warn_if_nothing_kept(tally, f"region '{name}'")
        return result

    # Half the cost of functools.update_wrapper, which matters where a model wraps its blocks at each call.
    wrapper.__wrapped__ = fn  # type: ignore[attr-defined]
    if isinstance(fn, FunctionType):
        wrapper.__name__, wrapper.__qualname__ = fn.__name__, fn.__qualname__
        wrapper.__module__, wrapper.__doc__ = fn.__module__, fn.__doc__
    return wrapper


_STARTS_ONLY = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _check_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        message = f"name={short_repr(name)}: expected a string, the name of the region in errors and reports"
        raise ValueError(message)
    return name


def _check_others(fn: Any) -> None:
    """Refuse what cannot be called, does not compute when it is called, or not in Python.

    Raises:
        TypeError: it is nothing to call, a class, or a function that only starts something.
        ValueError: it is compiled by TorchScript, or a container of modules.
    """
    if not callable(fn):
        message = f"recollect.checkpoint expects a function or module first, not {describe_argument(fn)}; "
        message += "call it as recollect.checkpoint(fn)(*args)"
        raise TypeError(message)
    if isinstance(fn, type):
        message = (
            f"recollect.checkpoint expects a function or module first, not the class {fn.__name__}: calling a class "
            "only makes an object.\n"
            f"Pass an instance, as in recollect.checkpoint({fn.__name__}(...)), or decorate its forward."
        )
        raise TypeError(message)
    if isinstance(fn, FunctionType):
        message = f"recollect.checkpoint expects a function that computes when it is called; calling {fn.__name__} only"
        message += " starts a generator or coroutine"
        raise TypeError(message)
    why = ""
    if isinstance(fn, torch.jit.ScriptModule):
        why = "it is compiled by TorchScript and has no Python code to run again: use the original module"
    elif isinstance(fn, nn.ModuleList | nn.ModuleDict):
        why = "it holds modules and has no forward: pass one of them, or use recollect.apply(model)"
    if why:
        message = f"{type(fn).__name__} cannot be made a region: {why}"
        raise ValueError(message)


def _module_of(fn: Callable[..., Any]) -> nn.Module | None:
    """The module that a function is, or is a method of."""
    owner = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def name_of(fn: Callable[..., Any]) -> str:
    """What to call a function's region when its user did not say.

    >>> import torch
    >>> name_of(torch.nn.Linear(1, 1)), name_of(torch.sin), name_of(functools.partial(name_of))
    ('Linear', 'sin', 'name_of')
    """
    if type(fn) is FunctionType:
        return fn.__name__
    while isinstance(fn, functools.partial):
        fn = fn.func
    owner = getattr(fn, "__self__", None)
    if owner is not None and fn.__name__ in ("forward", "__call__", "_call_impl", "_wrapped_call_impl"):
        fn = owner
    return str(getattr(fn, "__name__", None) or type(fn).__name__)


def explain_mismatch() -> AbstractContextManager[Any]:
    """Log the operators of every region called inside, so that a mismatch shows forward and recomputation side by side.

    Wrap the whole step, forward included. Each operator takes some tens of microseconds longer; use it to find a
    mismatch, then remove it.

    >>> import torch, recollect
    >>> shape = [2]
    >>> x = torch.ones(2, requires_grad=True)
    >>> with recollect.explain_mismatch():
    ...     y = recollect.checkpoint(lambda x: (x * torch.ones(shape[0])).exp(), name="f")(x)
    ...     shape[0] = 1
    ...     y.sum().backward()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    recollect.MismatchError: region 'f': saved tensor 0 ...
    """
    return nullcontext() if is_dynamo_compiling() else override(explain=True)
