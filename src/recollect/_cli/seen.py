"""Which modules and optimizers code works with, seen while it runs: whatever it keeps them in."""

import contextlib
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook


class CallLog:
    """Notes the modules that are called and the optimizers that make a step, while entered.

    Attributes:
        optimizers: in the order of their first step.
        steps: how many the first of them made.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> with CallLog() as seen:
    ...     _ = model(torch.ones(2))
    >>> seen.list_modules()
    [Sequential(
      (0): Linear(in_features=2, out_features=2, bias=True)
    )]
    """

    def __init__(self) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self.steps = 0
        self._modules: dict[int, nn.Module] = {}
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._hooks.callback(register_module_forward_pre_hook(self._note_module).remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._note_step).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()

    def list_modules(self) -> list[nn.Module]:
        """The outermost modules, that with the most parameters first."""
        parts = {id(part) for one in self._modules.values() for part in one.modules() if part is not one}
        outermost = [one for key, one in self._modules.items() if key not in parts]
        return sorted(outermost, key=_count_parameters, reverse=True)

    def _note_module(self, module: nn.Module, _: Any) -> None:
        self._modules.setdefault(id(module), module)

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        self.steps += optimizer is self.optimizers[0]


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
