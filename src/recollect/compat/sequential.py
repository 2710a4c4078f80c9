"""`checkpoint_sequential`: a chain of modules cut in segments, all but the last checkpointed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from recollect._core.argument_text import describe_argument
from recollect.compat.checkpoint import checkpoint


def checkpoint_sequential(
    functions: nn.Sequential | nn.ModuleList | Iterable[Callable[..., Any]],
    segments: int,
    input: Any,  # noqa: A002 (torch's name)
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run a chain of functions in segments; each segment but the last forgets its activations.

    Args:
        functions: a Sequential, ModuleList or list, each called with the result of the one before.
        segments: how many pieces to cut it into, from 1 to the number of functions.
        input: what the first function is called with.
        use_reentrant: as in `checkpoint`.
        kwargs: ``preserve_rng_state`` (default True).

    Raises:
        ValueError: `segments` is out of range, or an unknown keyword.

    >>> import torch
    >>> from recollect.compat import checkpoint_sequential
    >>> chain = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
    >>> x = torch.ones(2, 4, requires_grad=True)
    >>> checkpoint_sequential(chain, 3, x, use_reentrant=False).sum().backward()
    >>> checkpoint_sequential(chain, 7, x, use_reentrant=False)
    Traceback (most recent call last):
    ...
    ValueError: segments=7: expected a whole number from 1 to 6, the number of functions
    """
    if use_reentrant is None:
        warnings.warn(
            "checkpoint_sequential was called without use_reentrant: True is assumed, as in torch. "
            "Pass use_reentrant=False, which has fewer limits, or use_reentrant=True to keep this behaviour.",
            stacklevel=2,
        )
        use_reentrant = True
    preserve = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        message = f"unexpected keyword arguments: {', '.join(sorted(kwargs))}; expected preserve_rng_state"
        raise ValueError(message)
    if isinstance(functions, Tensor) or not isinstance(functions, Iterable):
        message = "checkpoint_sequential expects a Sequential or a list of functions first, not "
        message += describe_argument(functions)
        raise TypeError(message)
    chain: Sequence[Callable[..., Any]] = list(functions)
    if not chain:
        message = "checkpoint_sequential needs at least one function, but got none"
        raise ValueError(message)
    if isinstance(segments, bool) or not isinstance(segments, int) or not 1 <= segments <= len(chain):
        message = f"segments={segments!r}: expected a whole number from 1 to {len(chain)}, the number of functions"
        raise ValueError(message)
    size = len(chain) // segments
    value = input
    for start in range(0, size * (segments - 1), size):
        value = checkpoint(
            _run_segment(chain[start : start + size]), value, use_reentrant=use_reentrant, preserve_rng_state=preserve
        )
    return _run_segment(chain[size * (segments - 1) :])(value)


def _run_segment(functions: Sequence[Callable[..., Any]]) -> Callable[[Any], Any]:
    def segment(value: Any) -> Any:
        for function in functions:
            value = function(value)
        return value

    return segment
