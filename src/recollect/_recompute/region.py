"""What the user wraps: a function with a name and options, called as a whole or entered and left by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from recollect._core.authors import Role
from recollect._core.errors import CheckpointError
from recollect._core.torch_private.compiler import untraced
from recollect._core.torch_private.functorch import transforms_active
from recollect._recompute.frame import Frame
from recollect._recompute.functional import run_functional
from recollect._recompute.joins import Joining
from recollect._recompute.memory import Memory
from recollect._recompute.rerun import RERUN
from recollect._recompute.way import Options

__recollect_role__ = Role.REGION


class Region:
    """A function whose saved tensors are forgotten and made again when backward asks."""

    __slots__ = ("fn", "joining", "memory", "name", "options")

    def __init__(self, name: str, fn: Callable[..., Any], options: Options) -> None:
        self.name, self.fn, self.options = name, fn, options
        self.memory = Memory()  # or that of earlier regions of the same function
        self.joining: Joining | None = None

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function, for whoever looks through wrappers."""
        return self.fn

    @untraced
    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function as a region; in compiled code the graph breaks here."""
        return self.run(args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `call` does, the compiler aside; with grad mode off it is a plain call."""
        if not torch.is_grad_enabled():
            return self.fn(*args, **kwargs)
        if transforms_active():
            return run_functional(self.name, self.options, self.fn, args, kwargs)
        frame = self.enter(args, kwargs)
        try:
            result = self.fn(*args, **kwargs)
        except BaseException as error:
            if not frame.fail(error):
                raise
            message = (
                f"region '{self.name}': the forward context of context_fn swallowed the function's exception. "
                "Let its __exit__ return False: the region has no result to return"
            )
            raise CheckpointError(message) from error
        frame.leave(result)
        return result

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
        """Begin an execution; its caller runs the function and then calls the frame's `leave` or `fail`."""
        frame = Frame(self.name, self.fn, self.options, RERUN, self.memory, self.joining)
        frame.enter(args, kwargs)
        return frame
