"""How large the gradients of a model are in a step: levers must leave them as they are, up to rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from recollect._core.sharded import is_sharded


class GradientNorms:
    """The norms of the gradients that parameters get, of what this process has."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._norms: dict[str, Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the gradients of a step that runs meanwhile; those of the last backward count."""
        trained = [(name, one) for name, one in self._model.named_parameters() if one.requires_grad]
        handles = [self._watch(name, parameter) for name, parameter in trained]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def read(self) -> dict[str, float]:
        """The norms by the names of parameters; empty if no step has run."""
        return {name: norm.item() for name, norm in self._norms.items()}

    def _watch(self, name: str, parameter: Any) -> Any:
        if is_sharded(parameter):  # FSDP sets its gradient when it is reduced: autograd has none for it
            return parameter.register_post_accumulate_grad_hook(lambda one: self._note(name, one.grad))
        return parameter.register_hook(lambda grad: self._note(name, grad))

    def _note(self, name: str, grad: Any) -> None:
        self._norms[name] = (grad.to_local() if is_sharded(grad) else grad).detach().float().norm()
