"""Tells the collectives of parameters from those of activations.

A sharded module gathers its parameters when it is called. That must never be kept: it would pin whole parameters, which
is what sharding is there to avoid; when the module is called again, it gathers again. What crosses between ranks on
behalf of activations (dispatch of tokens, a ring of keys and values, sums of partial products) must be kept.

By what an operator is they cannot be told apart, nor by where it runs: tensor parallelism moves activations in the same
module hooks. What tells is who asks. Engines that shard parameters do so in code of their own, which runs between the
call of a module and its `forward`; so the callers of an operator are looked at, up to the nearest call of a module.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import nn

from recollect._core.torch_private.collectives import MODULE_CALLS

_ENGINES = (
    *("torch.distributed.fsdp.", "torch.distributed._composable.", "torch.nn.parallel."),
    *("deepspeed.runtime.zero.", "megatron.core.distributed."),
)
_REGIONS = "recollect._recompute."  # who calls a region's function; not its watchers, which may stand in between
_MOST_FRAMES = 64


def moves_parameters() -> bool:
    """Whether what runs now was asked for by an engine that shards or replicates parameters.

    To be called by a watch, inside the operator. Costs 50 ns for each function on the way to the nearest call of a
    module or of a region.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    for _ in range(_MOST_FRAMES):
        if frame is None or frame.f_code in MODULE_CALLS:
            return False
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_ENGINES):
            return True
        if name.startswith(_REGIONS):
            return False
        frame = frame.f_back
    return False


def is_unit(module: nn.Module, *, itself: bool = True) -> bool:
    """Whether a module gathers its parameters when it is called and frees them afterwards (FSDP, both kinds).

    Args:
        module: to be asked about.
        itself: whether the call of the module is meant, and not only that of its `forward`.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    return isinstance(module, fsdp.FullyShardedDataParallel) or (itself and isinstance(module, fsdp.FSDPModule))
