"""What is there before a step: its modules' parameters and buffers, optimizers' state, inputs; counted, and by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from recollect._apply.blocks import find_blocks
from recollect._core.calls import Category
from recollect._core.patterns import plain_path
from recollect._core.places import Places
from recollect._core.profiles import ModuleEntry
from recollect._core.torch_private.pytree import tree_leaves
from recollect._profile.assemble import Known, include_all
from recollect._profile.capture import Capture
from recollect._profile.snapshot import name_states

Optimizers = Sequence[torch.optim.Optimizer]
_COMPILED = "_orig_mod"  # where torch.compile keeps the module that it was given


def unwrap_replicas(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules, those inside of wrappers that hold one replica of a model in their place."""
    return [cast("nn.Module", module.module) if _is_replica(module) else module for module in modules]


def _is_replica(module: nn.Module) -> bool:
    return type(module).__name__ in ("DistributedDataParallel", "DataParallel")


def named_parameters(modules: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of several models."""
    for prefix, module in _named(modules):
        for path, tensor in module.named_parameters():
            yield prefix + plain_path(path), tensor


def named_states(optimizers: Optimizers, modules: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """The state of optimizers, by the parameters that it is of."""
    paths = {id(parameter): path for path, parameter in named_parameters(modules)}
    for optimizer in optimizers:
        yield from name_states(optimizer, paths)


def include_roots(
    capture: Capture, known: Known, *, modules: Sequence[nn.Module], optimizers: Optimizers, inputs: Any
) -> None:
    """Count what is there before the step; what is two things, as a parameter that is an input, is the first of them.

    Args:
        capture: that is about to watch it.
        known: is told what each is.
        modules: of the step.
        optimizers: of the step.
        inputs: tensors in any containers.
    """
    for prefix, module in _named(modules):
        capture.whereabouts.places.learn(module, prefix.rstrip("."))
        buffers = [(prefix + plain_path(path), tensor) for path, tensor in module.named_buffers()]
        include_all(capture, known, buffers, Category.BUFFER)
    include_all(capture, known, named_parameters(modules), Category.PARAMETER)
    include_all(capture, known, named_states(optimizers, modules), Category.OPTIMIZER)
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    include_all(capture, known, ((f"input {at}", leaf) for at, leaf in enumerate(leaves)), Category.INPUT)


def list_modules(places: Places) -> Iterator[ModuleEntry]:
    """The modules that were met, each path once."""
    seen: set[str] = set()
    for module, path in places.modules():
        if path not in seen:
            seen.add(path)
            compiled = next((child for name, child in module.named_children() if name == _COMPILED), module)
            yield ModuleEntry(path=path, kind=type(compiled).__name__)


def list_block_paths(places: Places, modules: Sequence[nn.Module]) -> Iterator[str]:
    """Paths of the models' repeated blocks, of those that were met."""
    paths = {id(module): path for module, path in places.modules()}
    for root in modules:
        for block in find_blocks(root):
            if id(block) in paths:
                yield paths[id(block)]


def _named(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules, with what their paths begin with: nothing, or for the second and later ones their class."""
    for number, module in enumerate(modules):
        yield f"{type(module).__name__}." if number else "", module
