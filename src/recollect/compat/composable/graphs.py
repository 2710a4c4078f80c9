"""A checkpointed module in code that torch.compile traces: there its forward is the region, and its hooks do nothing.

Dynamo captures a function as a region, and cannot do so with two hooks. So each checkpointed module also has a stand-in
for its forward, which in eager code passes calls on.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.compiler import is_exporting

from recollect._apply.options import Choices
from recollect._apply.stand_in import StandIn
from recollect._core.torch_private.compiler import untraced


class GraphStandIn(StandIn):
    """Calls a module's own forward: as a region of a graph, else as it is."""

    def __init__(self, module: nn.Module, name: str, choices: Choices) -> None:
        super().__init__(module, name, choices)
        self.contexts = choices.options.contexts

    @untraced
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_exporting():
            return super()._call(args, kwargs)
        return self.__wrapped__(*args, **kwargs)
