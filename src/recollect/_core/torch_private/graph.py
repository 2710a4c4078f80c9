"""What the nodes of an autograd graph hold for backward, read without unpacking anything.

``node._saved_x`` unpacks: it copies what `save_on_cpu` moved away and recomputes what a region forgot. For the same
attribute ``node._raw_saved_x`` gives a ``SavedTensor``, whose ``data`` is the tensor as it was saved, or what a pack
hook gave in its place.

Private names: ``node._raw_saved_*``, ``SavedTensor.data`` and ``.unpack_hook``, ``Tensor._base``.
Would be replaced by: a public way to see what a node has saved, packed or not.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recollect._core.torch_private.pytree import tree_leaves

_RAW = "_raw_saved_"
_FREED = "already been freed"  # in the error of every access to what a backward pass has released
_PYTHON_NODE = torch.autograd.function.BackwardCFunction  # what every node of a custom Function is made from
# `CppFunction` is every C++ node without a Python class of its own; `CopySlices` wraps the node of an in-place
# operator on a view.
_OPAQUE = frozenset({"CppFunction", "CopySlices"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeValue:
    """One value that a node holds."""

    attribute: str
    value: Any  # a tensor, or what a pack hook gave in its place
    unpack_hook: Callable[[Any], Tensor] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContents:
    """What can be said about one node."""

    name: str
    held: tuple[NodeValue, ...]
    is_freed: bool  # a backward pass has released what it had saved
    is_opaque: bool  # it may hold more than can be read from Python


def walk(roots: Iterable[Any]) -> Iterator[Any]:
    """Every node of the graphs behind these nodes, once. Graphs are deeper than Python's stack, so no recursion."""
    pending = list(dict.fromkeys(roots))
    seen = set(pending)  # holds the nodes: their Python objects, and so their identities, live as long as the walk
    while pending:
        node = pending.pop()
        yield node
        for following, _ in reversed(node.next_functions):
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)


def leaf_of(node: Any) -> Tensor | None:
    """The leaf that a node accumulates gradients for; None for any other node."""
    return getattr(node, "variable", None) if type(node).__name__ == "AccumulateGrad" else None


def is_parameter(tensor: Tensor) -> bool:
    """Whether this is a parameter or a view of one; also where it does not require grad."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


@functools.cache  # of C++ nodes, of which torch has a fixed number; holds no class of a user's
def _raw_names_of(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(_RAW))


def _raw_names(kind: Any) -> tuple[str, ...]:
    is_users = issubclass(kind, _PYTHON_NODE)  # all of these save in the same way
    return _raw_names_of(_PYTHON_NODE if is_users else kind)


def read_node(node: Any) -> NodeContents:
    """What a node holds, as it lies there. Runs no hook; the values keep the tensors alive."""
    kind: Any = type(node)
    held: list[NodeValue] = []
    is_freed = False
    is_opaque = kind.__name__ in _OPAQUE
    for name in _raw_names(kind):
        try:
            found = _read_saved(node, name)
        except RuntimeError as error:
            is_freed = is_freed or _FREED in str(error)
            is_opaque = is_opaque or _FREED not in str(error)
        except AttributeError:  # another version of torch
            is_opaque = True
        else:
            held.extend(found)
    if isinstance(node, torch.autograd.function.FunctionCtx):
        held.extend(_read_context(node))
    return NodeContents(name=node.name().rpartition("::")[2], held=tuple(held), is_freed=is_freed, is_opaque=is_opaque)


def _read_saved(node: Any, name: str) -> list[NodeValue]:
    """The values of one attribute.

    Raises:
        RuntimeError: they were released, as the text says.
        AttributeError: this version of torch does not show them.
    """
    raw = getattr(node, name)
    is_list = isinstance(raw, (tuple, list))
    parts = [(saved.data, saved.unpack_hook) for saved in (raw if is_list else [raw])]
    present = [index for index, (value, hook) in enumerate(parts) if value is not None or hook is not None]
    label = name.removeprefix(_RAW)
    label = "saved_tensors" if label == "tensors" else label
    if parts and not present and label != "saved_tensors":
        # Never defined (an absent bias), or released? Only reading tells, and with no hook there nothing is unpacked.
        getattr(node, name.replace("_raw", "", 1))
    return [
        NodeValue(
            attribute=f"{label}[{index}]" if is_list else label, value=parts[index][0], unpack_hook=parts[index][1]
        )
        for index in present
    ]


def _read_context(node: Any) -> Iterator[NodeValue]:
    """Tensors that a custom Function keeps outside of `save_for_backward`, as attributes or for forward mode."""
    for name, value in {**vars(node), "saved_for_forward": getattr(node, "saved_for_forward", None)}.items():
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        for index, tensor in enumerate(tensors):
            yield NodeValue(attribute=name if tensor is value else f"{name}[{index}]", value=tensor, unpack_hook=None)
