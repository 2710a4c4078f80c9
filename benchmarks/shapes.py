"""Regions around code of the shapes that users write: closures, helpers, blocks with settings and collections.

Whatever a function may read is noted at every call, so these show what that costs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_HELPERS = 40


class Settings:
    """What many a block holds besides its layers."""

    def __init__(self) -> None:
        self.width, self.name = 8, "block"
        self.by_name: dict[str, Any] = {"gain": 1.0, "sizes": [1, 2]}


class Block(nn.Module):
    """Two layers and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x))) * self.scale
        return out


class BlockWithSettings(Block):
    """The same, with an object and collections among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.settings, self.cache = Settings(), None
        self.sizes, self.names = [1, 2], {"first": 0}


def shapes() -> dict[str, Callable[[Tensor], Tensor]]:
    """One function of each shape, by what it is."""
    torch.manual_seed(0)
    layer, block, with_settings = nn.Linear(8, 8), Block(), BlockWithSettings()
    return {
        "closure over a layer": lambda x: torch.tanh(layer(x)),
        "block": block,
        "block with settings": with_settings,
        f"function with {_HELPERS} helpers": _with_helpers(),
    }


def _with_helpers() -> Callable[[Tensor], Tensor]:
    count = _HELPERS
    lines = [
        f"def helper_{n}(x): return helper_{n + 1}(x) if DEEP else helper_{n * 7 % count}(x)" for n in range(count)
    ]
    lines.append(f"def helper_{count}(x): return x.tanh()")
    lines.append(f"def function(x): return helper_{count - 2}(x) if DEEP else helper_0(x)")
    names: dict[str, Any] = {"__name__": "__main__", "DEEP": True}
    exec("\n".join(lines), names)
    function: Callable[[Tensor], Tensor] = names["function"]
    return function
