"""Which parameters a function writes itself: layers that set themselves up from their first data, codebooks.

Found out when a module is first used by a region, in each of training and evaluation mode: forward runs under a
dispatch mode that copies a parameter when an operator is about to write into it. So nothing is copied that is not
written, and writes through ``.data``, which move no version, are seen, too. Later calls copy at entry what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from recollect._core.torch_private.dispatch import FAKES, DispatchMode, without_dispatch_modes
from recollect._core.torch_private.pytree import tree_leaves
from recollect._core.torch_private.schemas import written_arguments
from recollect._recompute.changes import address_of
from recollect._recompute.updates import copy_value

# Weakly by module; by training mode, the names of the parameters that it was seen to write, or another for it.
_known: WeakKeyDictionary[nn.Module, dict[bool, set[str]]] = WeakKeyDictionary()

_PLAIN = frozenset({Tensor, nn.Parameter})

Place = tuple[int, str]
"""A parameter: the number of its module in the tree, and its name."""


def find_written(modules: list[nn.Module]) -> list[Place] | None:
    """The parameters that these modules are known to write; None if one of them has not been seen yet.

    Torch's own layers write none (but embeddings with a limit of their norms), so that those need not be seen.
    """
    found: list[Place] = []
    for number, module in enumerate(modules):
        by_mode = _known.get(module)
        names = None if by_mode is None else by_mode.get(module.training)
        if names:
            found += [(number, name) for name in names]
        elif names is None and _may_write(module):
            return None
    return found


def _may_write(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.nn.modules.") or getattr(module, "max_norm", None) is not None


def learn_written(modules: list[nn.Module], written: Iterable[tuple[nn.Module, str]]) -> None:
    """These modules have been seen, and wrote these parameters."""
    for module in modules:
        _known.setdefault(module, {}).setdefault(module.training, set())
    for module, name in written:
        _known.setdefault(module, {}).setdefault(module.training, set()).add(name)


class WriteWatch(DispatchMode):
    """Copies parameters before they are written.

    Args:
        parameters: to look at; those of special classes are left out.

    Attributes:
        is_needed: whether there is one to look at, and none of them is fake.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        plain = {id(one): one for one in parameters if type(one) in _PLAIN}
        self.is_needed = bool(plain) and not any(type(one).__module__ == FAKES for one in parameters)
        with torch.no_grad(), without_dispatch_modes():
            # An alias keeps the memory that a parameter had, if it is given another.
            self._noted = [(one, one.detach(), one._version) for one in plain.values()] if self.is_needed else []  # noqa: SLF001
        self._by_address: dict[int, list[Tensor]] = {}
        for one, _, _ in self._noted:
            self._by_address.setdefault(address_of(one), []).append(one)
        self._by_address.pop(0, None)
        self._copies: dict[int, Tensor] = {}

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator; before, copy the parameters that it writes."""
        for position, name in written_arguments(func):
            written = args[position] if position < len(args) else kwargs.get(name)
            for leaf in tree_leaves(written):
                if isinstance(leaf, Tensor):
                    for one in self._by_address.get(address_of(leaf), ()):
                        if id(one) not in self._copies:
                            self._copies[id(one)] = copy_value(one)
        return func(*args, **kwargs)

    def find(self) -> list[tuple[Tensor, Tensor | None]]:
        """The parameters that were written, each with its value at entry; None where that is lost.

        It is lost where compiled code wrote.
        """
        found: list[tuple[Tensor, Tensor | None]] = []
        for one, alias, version in self._noted:
            copied = self._copies.get(id(one))
            if copied is not None:
                found.append((one, copied))
            elif address_of(one) != address_of(alias):
                found.append((one, alias))
            elif one._version != version:  # noqa: SLF001
                found.append((one, None))
        return found


class Written:
    """Parameters that one call writes, with their values at entry, and what stands for them while it runs again."""

    __slots__ = ("_stand_ins", "_values")

    def __init__(self, values: list[tuple[Tensor, Tensor]]) -> None:
        self._values = values
        self._stand_ins: list[ref[Tensor]] = []

    def others(self, tensors: list[Tensor]) -> list[Tensor]:
        """Those of these tensors that are not among the parameters."""
        known = {id(tensor) for tensor, _ in self._values}
        return [tensor for tensor in tensors if id(tensor) not in known]

    def make_stand_ins(self) -> dict[int, Tensor]:
        """What recomputation reads, and writes, in place of each parameter, by its id."""
        made = {id(tensor): _stand_in(tensor, value) for tensor, value in self._values}
        self._stand_ins = list(map(ref, made.values()))
        return made

    def is_stand_in(self, tensor: Tensor) -> bool:
        """Whether this stood for a parameter in the last recomputation."""
        return any(tensor is weak() for weak in self._stand_ins)


def _stand_in(tensor: Tensor, value: Tensor) -> Tensor:
    copied: Tensor = copy_value(value)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


def copy_written(modules: list[nn.Module], places: list[Place]) -> Written | None:
    """At entry: the parameters that forward is known to write, copied."""
    tensors = (modules[number]._parameters.get(name) for number, name in places)  # noqa: SLF001
    found = {id(tensor): tensor for tensor in tensors if tensor is not None}
    return Written([(tensor, copy_value(tensor)) for tensor in found.values()]) if found else None
