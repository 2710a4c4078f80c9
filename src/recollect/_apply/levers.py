"""Levers of a plan meet a model: the modules that they are for get a ``forward`` that works in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from recollect._apply.instance_forward import InstanceForward
from recollect._apply.targets import Target, by_name
from recollect._core.levers import CHUNKED_LOSS, CHUNKED_MLP, PlannedLever
from recollect._core.sharded import is_gathered, is_sharded
from recollect._core.torch_private.sharding import is_managed
from recollect._levers.chunked_forward import call_in_chunks
from recollect._levers.lazy_logits import LazyLogits


class LazyHead(InstanceForward):
    """Gives the output of a linear layer as something that the loss can take in chunks, while the model trains."""

    def __init__(self, module: nn.Module, name: str, chunks: int | None) -> None:
        super().__init__(module, name)
        self._chunks = chunks

    def _for_copy(self, copied: nn.Module) -> Self:
        return type(self)(copied, self.name, self._chunks)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, later."""
        module = self._owner()
        hidden = args[0] if args else kwargs.get("input")
        weight: Any = module.weight
        if (
            self.is_removed
            or is_compiling()
            or not (module.training and torch.is_grad_enabled())
            or not isinstance(hidden, Tensor)
            or is_sharded(weight)
            or is_managed(vars(module))  # FSDP finds the graph by the tensors that a module returns
        ):
            return self.__wrapped__(*args, **kwargs)
        bias: Any = module.bias
        return LazyLogits(hidden, weight, bias, chunks=self._chunks)

    def __repr__(self) -> str:
        return f"<forward of '{self.name}', computed by recollect as the loss needs it>"


class ChunkedForward(InstanceForward):
    """Runs a module on some tokens at a time."""

    def __init__(self, module: nn.Module, name: str, chunks: int) -> None:
        super().__init__(module, name)
        self._chunks = chunks

    def _for_copy(self, copied: nn.Module) -> Self:
        return type(self)(copied, self.name, self._chunks)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own ``forward``."""
        own: Callable[..., Any] = self.__wrapped__
        if self.is_removed or is_compiling() or kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            return own(*args, **kwargs)
        parameters = list(self._owner().parameters())
        if args[0].dim() < 2 or any(map(is_sharded, parameters)):  # noqa: PLR2004
            return own(*args)
        return call_in_chunks(own, parameters, args[0], chunks=self._chunks)

    def __repr__(self) -> str:
        return f"<forward of '{self.name}' in {self._chunks} chunks of recollect>"


def make_levers(targets: Sequence[Target], levers: Sequence[PlannedLever]) -> Iterator[InstanceForward]:
    """What stands in the modules that levers are for; those that concern no module give nothing.

    Raises:
        ValueError: a module is not there, or a lever cannot be used on it.
    """
    names = by_name(targets)
    for lever in levers:
        for path in lever.paths:
            target = names.get(path)
            why = "there is no such module" if target is None else why_not(lever.name, target.chain[-1])
            if target is None or why:
                message = f"lever {lever.name!r} cannot be used on '{path}': {why}"
                raise ValueError(message)
            if lever.name == CHUNKED_LOSS:
                yield LazyHead(target.module, target.name, lever.parts or None)
            elif lever.name == CHUNKED_MLP:
                yield ChunkedForward(target.module, target.name, lever.parts)


def why_not(lever: str, module: nn.Module) -> str:
    """Why a lever cannot be used on a module; empty if it can, as far as its class tells."""
    if any(map(is_gathered, module.modules())) or any(map(is_sharded, module.parameters())):
        return "its parameters are spread over processes"
    if lever == CHUNKED_LOSS and type(module).forward is not nn.Linear.forward:
        return f"a {type(module).__name__} is no torch.nn.Linear"
    return ""
