"""APIs that change what a module does, but not its class, names and structure.

Names and behaviour are those of ``torch.distributed._composable``; the registry here is this library's own.
"""

from recollect.compat.composable.checkpoint_activation import checkpoint
from recollect.compat.composable.contract import _get_registry as _get_registry
from recollect.compat.composable.contract import contract, get_registry

__all__ = ["checkpoint", "contract", "get_registry"]
