"""Levers of a plan meet a model: the modules that they are for get a ``forward`` that works in chunks.

Compiled code is left for them, and entered again after: they run as written, so that chunks follow each other. Under
FSDP2 they run where the parameters are whole, between the gathering of a block and its freeing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.compiler import is_exporting

from recollect._apply.instance_forward import InstanceForward
from recollect._apply.targets import Target, by_name
from recollect._core.levers import CHUNKED_LOSS, CHUNKED_MLP, PlannedLever
from recollect._core.sharded import is_gathered, is_sharded
from recollect._core.torch_private.compiler import untraced
from recollect._core.torch_private.sharding import is_managed
from recollect._levers.chunked_forward import call_in_chunks
from recollect._levers.lazy_logits import LazyLogits, compute_without_loss

_log = logging.getLogger("recollect")


class _Lever(InstanceForward):
    """A forward that works in chunks, where it can: as many as given; 0 leaves it to the lever."""

    def __init__(self, module: nn.Module, name: str, chunks: int) -> None:
        super().__init__(module, name)
        self._chunks = chunks
        self._has_told = False

    def _for_copy(self, copied: nn.Module) -> Self:
        return type(self)(copied, self.name, self._chunks)

    def _tell_once(self, why: str) -> None:
        if not self._has_told:
            self._has_told = True
            _log.warning("recollect: the lever on '%s' has no effect: %s", self.name, why)


class LazyHead(_Lever):
    """Gives the output of a linear layer as something that the loss can take in chunks, while the model trains."""

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, later."""
        module = self._owner()
        hidden = args[0] if args else kwargs.get("input")
        weight: Any = module.weight
        is_idle = self.is_removed or is_exporting() or not (module.training and torch.is_grad_enabled())
        if is_idle or not isinstance(hidden, Tensor):
            return self.__wrapped__(*args, **kwargs)
        if is_sharded(weight) or is_sharded(hidden):
            self._tell_once("its parameters are sharded while it runs")
            return self.__wrapped__(*args, **kwargs)
        bias: Any = module.bias
        return LazyLogits(hidden, weight, bias, chunks=self._chunks or None)

    def __repr__(self) -> str:
        return f"<forward of '{self.name}', computed by recollect as the loss needs it>"


class ChunkedForward(_Lever):
    """Runs a module on some tokens at a time."""

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own ``forward``."""
        own: Callable[..., Any] = self.__wrapped__
        is_idle = self.is_removed or is_exporting()
        if is_idle or kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
            return own(*args, **kwargs)
        parameters = list(self._owner().parameters())
        if any(map(is_sharded, (args[0], *parameters))):
            self._tell_once("its parameters are sharded while it runs")
            return own(*args)
        if args[0].dim() < 2:  # noqa: PLR2004
            return own(*args)
        return call_in_chunks(own, parameters, args[0], chunks=self._chunks)

    def __repr__(self) -> str:
        return f"<forward of '{self.name}' in {self._chunks} chunks of recollect>"


class WithGraph(InstanceForward):
    """Lets a module that FSDP gathers return a tensor with a graph: FSDP finds its backward by such tensors."""

    def _for_copy(self, copied: nn.Module) -> Self:
        return type(self)(copied, self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own ``forward``; logits that it returns without their loss are computed."""
        return compute_without_loss(self.__wrapped__(*args, **kwargs))

    def __repr__(self) -> str:
        return f"<forward of '{self.name}', which returns tensors that FSDP can hook>"


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
                yield LazyHead(target.module, target.name, lever.parts)
                yield from _find_gatherers(targets, target)
            elif lever.name == CHUNKED_MLP:
                yield ChunkedForward(target.module, target.name, lever.parts)


def _find_gatherers(targets: Sequence[Target], head: Target) -> Iterator[WithGraph]:
    """What stands in the modules around a head whose parameters FSDP gathers."""
    for target in targets:
        is_around = not target.name or head.name.startswith(f"{target.name}.")
        if is_around and is_gathered(target.chain[-1]):
            yield WithGraph(target.module, target.name)


def why_not(lever: str, module: nn.Module) -> str:
    """Why a lever cannot be used on a module; empty if it can, as far as its class tells."""
    if any(map(is_gathered, module.modules())):
        return "FSDP gathers its parameters separately: shard the whole block around it instead"
    for part in module.modules():
        own = [one for one in vars(part)["_parameters"].values() if one is not None]
        has_shards, is_swapped = any(map(is_sharded, own)), is_managed(vars(part))
        if has_shards and not is_swapped:
            return "tensor parallelism shards its parameters, also while it runs"
        if is_swapped and own and not has_shards:
            return "FSDP1 keeps its parameters inside one flat tensor: use torch.distributed.fsdp.fully_shard instead"
    if lever == CHUNKED_LOSS and type(module).forward is not nn.Linear.forward:
        return f"its class is {type(module).__name__}, and not torch.nn.Linear"
    return ""
