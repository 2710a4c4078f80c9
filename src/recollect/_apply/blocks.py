"""Which modules of a model are its repeated blocks, where the user names none.

Blocks are modules of one class, several of which are in a ModuleList or Sequential, and each more than a single layer
of torch. The outermost ones are taken: a decoder layer, not the experts inside it. Stages that hold blocks themselves
are not blocks, whether most differ in size (as in Swin), each is a list of many (as in DenseNet), or each is little
more than a list (as in Stable Diffusion XL's U-Net): the blocks inside them are taken. Of lists that are the same and
have parts of different classes (an attention and a mixture of experts), the parts are taken. A stage next to stages
that repeat something counts with all its blocks (as the first of EfficientNet), and what lists blocks that are taken
elsewhere is a stage. Norms are not blocks. Where some blocks hold several products, those with a single one
(projections, transitions) are left out, because recomputing them frees little, unless the model's author marked them
for it. Single blocks in lists of their own, beside a list of blocks in one module, are taken, too (the attention and
the up- and downsampling of a U-Net); of one that is little more than lists of a single block each, those. Where no list
repeats anything, lists of one block are taken, or else siblings of one class under any module (a U-Net written as
``down1``, ``down2``, ...).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from recollect._apply.forwards import is_called

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_NORMS = (  # and what libraries make of them, with an activation inside
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm, nn.InstanceNorm1d,
    nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LayerNorm, nn.RMSNorm,
)  # fmt: skip
_PARAMETRIZATIONS = "parametrizations"
_MARK = "transformers.modeling_layers.GradientCheckpointingLayer"
_MOST = 0.75  # of a module's parameters
_SEVERAL = 2
_MANY = 4  # of one class in a stage make it one, although each has other sizes: DenseNet's layers grow. And of products


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, in the order of its modules; empty if there are none.

    >>> layer = lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> model = nn.Sequential(nn.Embedding(10, 8), nn.Sequential(layer(), layer()), nn.Linear(8, 10))
    >>> [name for name, module in model.named_modules() if module in find_blocks(model)]
    ['1.0', '1.1']
    """
    in_stages: set[nn.Module] = set()
    found = set(
        _search(model, _LISTS, _repeated, in_stages=in_stages)
        or _repeated(_search(model, _LISTS, _any))  # stages of one block each
        or _search(model, (nn.ModuleList,), _any)
    )
    parents = _LISTS if found else (nn.Module,)
    found = found or set(_search(model, parents, _repeated_by_hand))
    # A stage may have only one of what others repeat: the same class counts there too, if it is held in the same way.
    kinds = {type(module) for module in found} - {nn.Sequential}
    of_kinds: Choose = lambda children: [child for child in children if type(child) in kinds]  # noqa: E731
    more = set(_search(model, parents, of_kinds, kinds, in_stages=in_stages))
    inside = {part for block in more - found for part in block.modules()}  # as the experts of a block on its own
    found = (found - inside) | more
    found = _without_stages(found.union(_beside(model, found)))
    found = {module for module in found if _count_products(module) > 1} or found
    found.update(_alone(model, found))
    found = {part for block in found for part in _single_parts(block) or (block,)}
    found.update(_marked(model, found))
    return [module for module in model.modules() if module in found]


def _without_stages(found: set[nn.Module]) -> set[nn.Module]:
    """The same, with what it lists in place of a block that lists blocks of a class that is found outside of it."""
    kinds = {type(module) for module in found if _count_products(module) > 1} - {nn.Sequential}
    listed = {
        module: {
            part
            for each in module.modules()
            if isinstance(each, _LISTS)
            for part in each.children()
            if type(part) in kinds - {type(module)}
        }
        for module in found
    }
    return {block for module in found for block in listed[module] or (module,)}


def _marked(model: nn.Module, found: set[nn.Module]) -> list[nn.Module]:
    """What Transformers' own switch recomputes beside the blocks, such as the convolutions before wav2vec 2.0's.

    The outermost that have no block inside and are in none.
    """
    taken = {part for block in found for part in block.modules()}
    marked: list[nn.Module] = []
    for module in model.modules():
        bases = {f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__}
        if _MARK in bases and module not in taken and found.isdisjoint(module.modules()):
            marked.append(module)
            taken.update(module.modules())
    return marked


def _beside(model: nn.Module, found: set[nn.Module]) -> list[nn.Module]:
    """The blocks in lists that stand beside lists of blocks, in a list."""
    blocks: list[nn.Module] = []
    for holder in model.modules():
        stages = [child for child in holder.children() if type(child) is nn.Sequential]
        if type(holder) in (nn.Sequential, nn.ModuleList) and not found.isdisjoint(
            block for stage in stages for block in stage.children()
        ):
            others = [stage for stage in stages if found.isdisjoint(stage.children())]
            blocks += [child for stage in others for child in _any(list(stage.children()))]
    return blocks


def _alone(model: nn.Module, found: set[nn.Module]) -> list[nn.Module]:
    """The single block of a list that stands beside a list of blocks in one module, as a U-Net's attention.

    With one product, too: what enlarges images between blocks frees what its convolution is given, and runs none again.
    """
    blocks: list[nn.Module] = []
    for holder in model.modules():
        # Not by iteration: a list may hold None, as a stage without attention has it.
        lists = [list(child.children()) for child in holder.children() if type(child) is nn.ModuleList]
        if not found.isdisjoint(block for each in lists for block in each):
            alone = [each[0] for each in lists if len(each) == 1 and found.isdisjoint(each[0].modules())]
            blocks += [block for block in _any(alone) if _count_products(block)]
    return blocks


def _single_parts(module: nn.Module) -> list[nn.Module]:
    """Of a module that is little more than several lists of a single block, each of many products: those blocks.

    Such are the transformers of Stable Video Diffusion: one layer for space, one for time.
    """
    lists = [child for child in module.children() if type(child) is nn.ModuleList]
    parts = _any([part for each in lists if len(each) == 1 for part in each])
    is_list = len(parts) >= _SEVERAL and all(_count_products(part) >= _MANY for part in parts)
    return parts if is_list and _count_elements(*parts) > _MOST * _count_elements(module) else []


def _count_elements(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters() if not is_lazy(p))


def _count_products(module: nn.Module) -> int:
    """How many weights of products it has: of a linear layer or a convolution, not of a norm."""
    return sum(is_lazy(parameter) or parameter.dim() > 1 for parameter in module.parameters())


Choose = Callable[[list[nn.Module]], list[nn.Module]]
"""Picks blocks among the children of a module."""


def _search(
    model: nn.Module,
    parents: tuple[type[nn.Module], ...],
    choose: Choose,
    known: Collection[type[nn.Module]] = (),
    *,
    around: frozenset[nn.Module] = frozenset(),
    in_stages: set[nn.Module] | None = None,
) -> list[nn.Module]:
    """The outermost blocks under parents of these classes; a single one of a class known for blocks is not a stage.

    What is inside of stages is added to `in_stages`.
    """
    found: dict[nn.Module, None] = {}
    seen, in_stages = set(around), set() if in_stages is None else in_stages
    stack = [model]
    while stack:
        module = stack.pop()
        if module in seen or module in found:
            continue
        seen.add(module)
        parts = vars(module).get("_modules", {})
        children = [child for name, child in parts.items() if child is not None and name != _PARAMETRIZATIONS]
        if isinstance(module, parents):
            for blocks in _by_class(choose(children)):
                is_known = len(blocks) == 1 and type(blocks[0]) in known
                if is_known or not _are_stages(blocks, frozenset(seen), in_stage=module in in_stages):
                    found.update(dict.fromkeys(blocks))
                else:
                    in_stages.update(part for stage in blocks for part in stage.modules())
        stack.extend(reversed(children))
    return list(found)


def _by_class(blocks: list[nn.Module]) -> list[list[nn.Module]]:
    groups: dict[type[nn.Module], list[nn.Module]] = {}
    for block in blocks:
        groups.setdefault(type(block), []).append(block)
    return list(groups.values())


def _repeated(children: list[nn.Module]) -> list[nn.Module]:
    """Those of a class that is there more than once; one module that is there several times, too.

    Also the parts of a list that is there more than once, where they differ: an attention and its experts.
    """
    lists = [child for child in children if type(child) in (nn.Sequential, nn.ModuleList) and not _is_block(child)]
    alike = Counter(map(_sizes, lists))
    parts = [_any(list(each.children())) for each in lists if alike[_sizes(each)] > 1]
    different = [part for held in parts if len(held) == len(set(map(type, held))) for part in held]
    candidates = [*(child for child in children if _is_block(child)), *different]
    count = Counter(map(type, candidates))
    return [child for child in candidates if count[type(child)] > 1]


def _repeated_by_hand(children: list[nn.Module]) -> list[nn.Module]:
    """The same of attributes, among which a plain Sequential says nothing: any two parts may be one."""
    return [child for child in _repeated(children) if type(child) is not nn.Sequential]


def _any(children: list[nn.Module]) -> list[nn.Module]:
    """Also of a list that holds one block only."""
    return [child for child in children if _is_block(child)]


def _is_block(module: nn.Module) -> bool:
    """Whether it is more than a list or one layer of torch: it has parts, or a forward of its user's."""
    if not is_called(module) or isinstance(module, _NORMS) or next(module.parameters(), None) is None:
        return False
    if type(module) is nn.Sequential:
        # One that holds blocks is a stage; one of plain layers is a block itself.
        return not any(_is_block(child) for child in module.children())
    kind, parts = type(module), dict(module.named_children())
    parts.pop(_PARAMETRIZATIONS, None)  # its class was made for this module alone, over its own
    bases = set(kind.__mro__[:-1]) - {nn.Module}  # a convolution that standardises its weight is one
    is_layer = any(base.__module__.startswith("torch.nn.modules") for base in bases)
    return bool(parts) or not is_layer or issubclass(kind, nn.RNNBase)


def _are_stages(blocks: list[nn.Module], seen: frozenset[nn.Module], *, in_stage: bool) -> bool:
    """Whether no two of them have the same sizes, while all hold blocks and some of those do; or each lists many.

    In a stage, those that hold blocks of one product only are none: as the layers of Transformers' ResNet and RegNet,
    which list their convolutions. Of four or more that each list several, two may have the same sizes: in the decoder
    of Stable Diffusion's autoencoder two stages of four do. The first block of a stage often has other sizes than the
    rest, so that in a stage of two no sizes are the same.
    """
    listed = [_search(block, _LISTS, _repeated, around=seen) for block in blocks]
    inner = [
        held or _numbered(block) or _search(block, _LISTS, _any, around=seen)
        for block, held in zip(blocks, listed, strict=True)
    ]
    if in_stage and all(_count_products(part) == 1 for held in inner for part in held):
        return False
    if all(len(held) >= _MANY for held in inner) and all(isinstance(block, _LISTS) for block in blocks):
        return True
    if any(_is_list_of_blocks(block, held) for block, held in zip(blocks, inner, strict=True)):
        return True
    repeat = any(
        _most_alike(same) > 1 or len(held) >= _MANY
        for block, held in zip(blocks, inner, strict=True)
        for same in _by_name(block, held)
    )
    differ = len(set(map(_sizes, blocks))) >= len(blocks) - (len(blocks) >= _MANY and all(listed))
    return differ and all(inner) and repeat


def _numbered(module: nn.Module) -> list[nn.Module]:
    """The parts of a module that is a list by names alone (``b1``, ``b2``, ...), if they are blocks of one class."""
    parts = {name: part for name, part in module.named_children() if next(part.parameters(), None) is not None}
    is_list = len({name.rstrip("0123456789") for name in parts}) == 1 and all(name[-1].isdecimal() for name in parts)
    one_class = len(set(map(type, parts.values()))) == 1
    return _any(list(parts.values())) if is_list and one_class else []


def _is_list_of_blocks(module: nn.Module, held: list[nn.Module]) -> bool:
    """Whether it is little more than several blocks of one size, each of many products: experts have three.

    Such are the transformers in the U-Net of Stable Diffusion XL, of up to ten layers each.
    """
    if len(held) < _SEVERAL or _most_alike(held) != len(held) or _count_products(held[0]) < _MANY:
        return False
    return _count_elements(*held) > _MOST * _count_elements(module)


def _by_name(block: nn.Module, held: list[nn.Module]) -> list[list[nn.Module]]:
    """Those of one name, numbers aside: the third of one list and the third of another do not repeat."""
    groups: dict[str, list[nn.Module]] = {}
    for name, module in block.named_modules():
        if module in held:
            groups.setdefault(re.sub(r"\d+", "*", name), []).append(module)
    return list(groups.values())


def _most_alike(blocks: list[nn.Module]) -> int:
    return max(Counter(map(_sizes, blocks)).values(), default=0)


def _sizes(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, None if is_lazy(p) else tuple(p.shape)) for name, p in module.named_parameters())
