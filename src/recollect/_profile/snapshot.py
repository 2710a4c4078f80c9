"""What a profiled step may change, kept aside before it does and put back after: memory, gradients, optimisers.

Memory is copied to the host just before the first operator that writes into it, so that a step that changes nothing
copies nothing, and the device holds no second copy. Not seen: writes past the operators (through ``numpy`` or raw
pointers), and Python objects other than the tables of modules and optimisers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from recollect._core.torch_private.pytree import tree_leaves
from recollect._profile.storages import Found


class Snapshot:
    """Keeps aside what is about to change; `restore` puts it back."""

    def __init__(self) -> None:
        self._written: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._gradients: dict[int, tuple[ref[Tensor], Tensor | None]] = {}
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._optimizers: dict[int, tuple[torch.optim.Optimizer, dict[Any, Any], list[dict[str, Any]]]] = {}

    def note_module(self, module: nn.Module) -> None:
        """Keep which tensors a module and its parts have, and their gradients."""
        for part in module.modules():
            for table in (part._parameters, part._buffers):  # noqa: SLF001
                self._tables.append((table, dict(table)))
        for parameter in module.parameters():
            self.note_leaf(parameter)

    def note_leaf(self, leaf: Tensor) -> None:
        """Keep the gradient that a tensor has now; the first time counts. The tensor itself is not held."""
        known = self._gradients.get(id(leaf))
        if known is None or known[0]() is not leaf:
            self._gradients[id(leaf)] = (ref(leaf), leaf.grad)

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep an optimiser's state and settings; the first time counts."""
        if id(optimizer) not in self._optimizers:
            state = {key: dict(value) if isinstance(value, dict) else value for key, value in optimizer.state.items()}
            groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
            self._optimizers[id(optimizer)] = (optimizer, state, groups)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self.note_leaf(parameter)

    def before_write(self, found: Iterable[Found]) -> None:
        """These storages are about to be written into."""
        for storage, device in found:
            if id(storage) not in self._written:
                copy = storage.clone() if device.type == "cpu" else storage.cpu()
                self._written[id(storage)] = (storage, copy)

    def clear_gradients(self) -> None:
        """Let the known leaves have no gradient, as after ``zero_grad``; `restore` gives theirs back."""
        for weak, _ in self._gradients.values():
            leaf = weak()
            if leaf is not None:
                leaf.grad = None

    def restore(self) -> None:
        """Put everything back."""
        for storage, copy in self._written.values():
            if storage.nbytes() != copy.nbytes():
                storage.resize_(copy.nbytes())
            storage.copy_(copy)
        for table, before in self._tables:
            if len(table) != len(before) or _differs(table, before):
                table.clear()
                table.update(before)
        for weak, gradient in self._gradients.values():
            leaf = weak()
            if leaf is not None and leaf.grad is not gradient:
                leaf.grad = gradient
        for optimizer, state, groups in self._optimizers.values():
            _restore_optimizer(optimizer, state, groups)


def _differs(table: dict[str, Any], before: dict[str, Any]) -> bool:
    return any(key not in table or table[key] is not value for key, value in before.items())


def _restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[Any, Any], groups: list[dict[str, Any]]) -> None:
    now = optimizer.state
    for key in [key for key in now if key not in state]:
        del now[key]
    for key, value in state.items():
        if isinstance(value, dict) and isinstance(now.get(key), dict):
            now[key].clear()
            now[key].update(value)
        else:
            now[key] = value
    del optimizer.param_groups[len(groups) :]
    for group, before in zip(optimizer.param_groups, groups, strict=False):
        group.clear()
        group.update(before)
    optimizer.param_groups.extend(groups[len(optimizer.param_groups) :])


def tensors_of_optimizer(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimiser's state."""
    return [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]


def name_states(optimizer: torch.optim.Optimizer, paths: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
    """The same, each with a name: ``"embed.weight.exp_avg"``, given the paths of parameters by their ids."""
    for key, values in optimizer.state.items():
        for name, value in values.items() if isinstance(values, dict) else [("", values)]:
            for leaf in tree_leaves(value):
                if isinstance(leaf, Tensor):
                    yield f"{paths.get(id(key), '')}.{name}".strip("."), leaf
