"""Whether a tensor is spread over processes, and whether FSDP gathers and frees a module's parameters by itself.

Imports nothing of torch.distributed: whoever has such a tensor or module has imported its class.
"""

from __future__ import annotations

import sys

from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor: what this process has of it is not all.

    >>> import torch
    >>> is_sharded(torch.ones(1))
    False
    """
    found = sys.modules.get("torch.distributed.tensor")
    return found is not None and isinstance(tensor, found.DTensor)


def is_gathered(module: nn.Module) -> bool:
    """Whether a kind of FSDP gathers the parameters of just this module before it runs, and frees them after."""
    found = sys.modules.get("torch.distributed.fsdp")
    return found is not None and isinstance(module, (found.FSDPModule, found.FullyShardedDataParallel))
