"""Which modules of a model are its repeated blocks, for those who give no names.

Blocks are what a ModuleList or Sequential holds several of, of one class, each more than a single layer of torch. The
outermost such are taken: a decoder layer, not the experts inside it. Stages that hold blocks themselves, each stage of
other sizes (as in Swin), are passed through to the blocks. Where no list repeats anything, siblings of one class under
any module are taken (a U-Net written as ``down1``, ``down2``, ...).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Hold modules and are never called themselves."""

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, in the order of its modules; empty if there are none.

    >>> layer = lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> model = nn.Sequential(nn.Embedding(10, 8), nn.Sequential(layer(), layer()), nn.Linear(8, 10))
    >>> [name for name, module in model.named_modules() if module in find_blocks(model)]
    ['1.0', '1.1']
    """
    return _search(model, _LISTS) or _search(model, (nn.Module,))


def _search(model: nn.Module, parents: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    """The outermost groups of repeated children under parents of these classes."""
    found: dict[nn.Module, None] = {}
    seen: set[nn.Module] = set()
    stack = [model]
    while stack:
        module = stack.pop()
        if module in seen or module in found:
            continue
        seen.add(module)
        children = list(dict.fromkeys(module.children()))
        if isinstance(module, parents):
            blocks = _repeated(children)
            if blocks and not _are_stages(blocks):
                found.update(dict.fromkeys(blocks))
        stack.extend(reversed(children))
    return [module for module in model.modules() if module in found]


def _repeated(children: Iterable[nn.Module]) -> list[nn.Module]:
    candidates = [child for child in children if _is_block(child)]
    count = Counter(map(type, candidates))
    return [child for child in candidates if count[type(child)] > 1]


def _is_block(module: nn.Module) -> bool:
    """Whether it is more than a list or one layer of torch: it has parts, or a forward of its user's."""
    if isinstance(module, CONTAINERS) or next(module.parameters(), None) is None:
        return False
    if type(module) is nn.Sequential:
        # One that holds blocks is a stage; one of plain layers is a block itself.
        return not any(_is_block(child) for child in module)
    kind, parts = type(module), dict(module.named_children())
    if parts.pop("parametrizations", None) is not None:
        kind = kind.__mro__[1]  # a class made for this module alone, over its own
    return bool(parts) or not kind.__module__.startswith("torch.nn.modules")


def _are_stages(blocks: list[nn.Module]) -> bool:
    """Whether no two of them are alike in their sizes, and each holds blocks of its own."""
    alike = Counter(map(_sizes, blocks))
    return max(alike.values()) == 1 and all(_search(block, _LISTS) for block in blocks)


def _sizes(module: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
