"""A watch for recomputation: nothing that was changed in place since forward may be read.

By memory, because what is read may be another object: a view, or what a sharding engine makes of a shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from recollect._core.errors import ChangedInputError
from recollect._core.torch_private.dispatch import FAKES, DispatchMode
from recollect._core.torch_private.pytree import tree_leaves

_PLAIN = frozenset({Tensor, nn.Parameter})


class ChangedWatch(DispatchMode):
    """Raises when an operator reads a tensor that was changed in place since forward."""

    def __init__(self, region: str, changed: list[tuple[Tensor, str]]) -> None:
        super().__init__()
        self._region = region
        self._changed = {address: what for tensor, what in changed for address in addresses_of(tensor)}

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator unless it reads what was changed."""
        for leaf in tree_leaves((args, kwargs)):
            found = addresses_of(leaf) if isinstance(leaf, Tensor) else ()
            what = next((self._changed[address] for address in found if address in self._changed), None)
            if what is not None:
                message = (
                    f"region '{self._region}': {what} was changed in place between forward and recomputation, which "
                    "would read the new value.\n"
                    "An optimizer step or another update ran before this backward; or the module updated it in its "
                    "own forward, for the first time.\n"
                    "Run backward before the update. If a module updates its own state, register it with "
                    "`recollect.register_state`."
                )
                raise ChangedInputError(message)
        return func(*args, **kwargs)


def address_of(tensor: Tensor) -> int:
    """Where a tensor's bytes begin; 0 if it has none of its own. Of a fake one, what tells its storage from others."""
    try:
        storage = tensor.untyped_storage()
        return id(storage) if type(tensor).__module__ == FAKES else storage.data_ptr()
    except (RuntimeError, NotImplementedError):  # no storage of its own
        return 0


def addresses_of(tensor: Tensor) -> list[int]:
    """Where a tensor's bytes lie: those of a wrapper (a sharded tensor) in what it wraps."""
    if type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # not only tensors
        return [address for part in parts if isinstance(part, Tensor) for address in addresses_of(part)]
    address = address_of(tensor)
    return [address] if address else []
