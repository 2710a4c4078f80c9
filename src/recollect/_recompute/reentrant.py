"""The reentrant engine: forward without a graph, an inner backward in backward.

Kept because code depends on it; the other engine does everything it does and more. What it cannot do: keyword
arguments, `torch.autograd.grad`, ``inputs=``, and inputs none of which requires grad.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from recollect._core.authors import Role
from recollect._core.errors import MismatchError
from recollect._core.pytree import Arguments
from recollect._core.torch_private.compiler import untraced
from recollect._core.torch_private.engine import pass_is_whole
from recollect._core.units import count_noun
from recollect._recompute.rng import parse_preserve
from recollect._recompute.surroundings import Surroundings

__recollect_role__ = Role.REGION


def detach_variable(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Detach tensors from their graph; whether they require grad stays the same, and other values pass through.

    >>> import torch
    >>> x = torch.ones(1, requires_grad=True) * 2
    >>> y, n = detach_variable((x, 3))
    >>> y.requires_grad, y.is_leaf, n
    (True, True, 3)
    """
    if not isinstance(inputs, tuple):
        message = f"detach_variable expects a tuple of values, not {type(inputs).__name__}"
        raise RuntimeError(message)  # noqa: TRY004 (torch's type)
    return tuple(
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value for value in inputs
    )


def check_backward_validity(inputs: Iterable[Any]) -> None:
    """Warn if no input requires grad: the reentrant engine then gives no gradient to anything inside.

    >>> import torch, warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     check_backward_validity([torch.ones(1)])
    >>> len(caught)
    1
    """
    _warn_if_cut_off(inputs, stacklevel=3)


def _warn_if_cut_off(inputs: Iterable[Any], stacklevel: int) -> None:
    if not any(value.requires_grad for value in inputs if isinstance(value, Tensor)):
        warnings.warn(
            "none of the inputs of this reentrant checkpoint requires grad, so nothing inside it gets a gradient; "
            "use use_reentrant=False, which needs no such input",
            stacklevel=stacklevel,
        )


class CheckpointFunction(torch.autograd.Function):
    """The autograd Function of the reentrant engine: ``CheckpointFunction.apply(fn, preserve_rng_state, *args)``."""

    @staticmethod
    def forward(ctx: Any, run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:  # noqa: FBT001
        """Run the function without a graph, and keep its inputs."""
        _warn_if_cut_off(args, stacklevel=5)  # the caller of `checkpoint`, beyond it and two frames of `apply`
        ctx.run_function = run_function
        ctx.around = Surroundings("reentrant", run_function, Arguments(args, {}), parse_preserve(preserve_rng_state))
        ctx.inputs = [None if isinstance(value, Tensor) else value for value in args]
        ctx.places = [i for i, value in enumerate(args) if isinstance(value, Tensor)]
        ctx.save_for_backward(*(args[i] for i in ctx.places))
        try:
            with torch.no_grad(), ctx.around.forward():
                outputs = run_function(*args)
        except BaseException:
            ctx.around.abandon()
            raise
        ctx.around.settle()
        return outputs

    @staticmethod
    @untraced  # by compiled autograd, which would break its graph at every step of the engine
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Run the function again with a graph, and backward through it."""
        if not pass_is_whole():
            message = (
                "the reentrant checkpoint does not work with torch.autograd.grad() or backward(inputs=...); "
                "use use_reentrant=False"
            )
            raise RuntimeError(message)
        inputs = list(ctx.inputs)
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            inputs[place] = tensor
        detached = detach_variable(tuple(inputs))
        outputs = ctx.around.rerun(ctx.run_function, *detached)
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        if len(outputs) != len(gradients):
            message = (
                f"a reentrant checkpoint returned {count_noun(len(gradients), 'output')} in forward and {len(outputs)} "
                "in recomputation.\n"
                "The function read something that changed in between. use_reentrant=False gives a more detailed error."
            )
            raise MismatchError(message)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if isinstance(output, Tensor) and output.requires_grad
        ]
        if not pairs:
            message = (
                "none of the outputs of this reentrant checkpoint requires grad, so there is nothing to run backward "
                "through; use use_reentrant=False, or remove the checkpoint"
            )
            raise RuntimeError(message)
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        return (None, None, *(value.grad if isinstance(value, Tensor) else None for value in detached))
