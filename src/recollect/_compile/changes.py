"""Inputs of the step that it writes into, anywhere: what a region read of them cannot be read again in backward.

The graph holds no writes while it is traced; they are done at its end. That an input is written into after a region is
known when backward is traced, which each of the region's results tells by a hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_slot

from recollect._compile.tags import save_readers
from recollect._core.torch_private.pytree import tree_leaves


class Unchanged:
    """The operands of a region that nobody had written into when it began, with their nodes."""

    def __init__(self, tracer: Any, operands: Sequence[Any]) -> None:
        tensors = [one for one in operands if isinstance(one, FunctionalTensor) and not _is_changed(one)]
        self._nodes = [(one, node) for one in tensors if (node := _node_of(tracer, one)) is not None]

    def watch(self, added: list[Node], results: Any) -> None:
        """Have the readers of those that are written into saved, be it by the region or later."""
        if not self._nodes:
            return

        def look(*_gradients: Any) -> None:
            changed = {node for tensor, node in self._nodes if _is_changed(tensor)}
            if changed:
                save_readers(added, changed)

        look()
        for result in tree_leaves(results):
            # On its node, not on the tensor: on torch 2.11 a hook on a view that is written into ends the process.
            if isinstance(result, Tensor) and result.grad_fn is not None:
                result.grad_fn.register_prehook(look)


def _is_changed(tensor: FunctionalTensor) -> bool:
    return bool(torch._functionalize_has_data_mutation(tensor.elem))  # type: ignore[attr-defined]


def _node_of(tracer: Any, tensor: FunctionalTensor) -> Node | None:
    inner = torch._from_functional_tensor(tensor.elem)
    slot: Any = get_proxy_slot(inner, tracer, None)
    return None if slot is None else slot.proxy.node
