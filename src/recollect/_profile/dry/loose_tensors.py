"""Tensors that a dry step brings along itself, in a closure or a global: fakes stand for them too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from recollect._core.operators import tensors_in
from recollect._core.pytree import Arguments
from recollect._core.torch_private.dispatch import DispatchMode
from recollect._core.torch_private.fake import is_fake
from recollect._profile.dry.known import note_value
from recollect._profile.fakes import Fakes


class LooseTensors(DispatchMode):
    """Gives operators fakes in place of tensors on other devices than fakes are on.

    Those on the CPU the mode of fake tensors takes as they are.
    """

    def __init__(self, fakes: Fakes) -> None:
        super().__init__()
        self._fakes = fakes

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator."""
        if any(map(_is_loose, tensors_in(args, kwargs))):
            arguments = Arguments(args, kwargs)
            leaves = [self._fake(leaf) if isinstance(leaf, Tensor) else leaf for leaf in arguments.leaves]
            given, kwargs = arguments.rebuild(leaves)
            args = tuple(given)
        return func(*args, **kwargs)

    def _fake(self, tensor: Tensor) -> Tensor:
        if not _is_loose(tensor):
            return tensor
        fake = self._fakes.of(tensor)
        note_value(fake, tensor)
        return fake


def _is_loose(tensor: Tensor) -> bool:
    return not is_fake(tensor) and not tensor.is_cpu  # where a fake is, is an operator to all modes
