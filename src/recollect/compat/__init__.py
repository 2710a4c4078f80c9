"""torch's checkpointing API on this library's engine: change the import, keep the code.

Signatures, defaults and error types are those of ``torch.utils.checkpoint``; the wording of errors is ours.
"""

from torch.utils.checkpoint import CheckpointPolicy

from recollect._core.errors import CheckpointError
from recollect._recompute.group import GraphExecGroup
from recollect._recompute.reentrant import CheckpointFunction, check_backward_validity, detach_variable
from recollect.compat.checkpoint import (
    checkpoint,
    noop_context_fn,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)
from recollect.compat.devices import DefaultDeviceType, get_device_states, set_device_states
from recollect.compat.selective import (
    SAC_IGNORED_OPS,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from recollect.compat.sequential import checkpoint_sequential

__all__ = [
    "SAC_IGNORED_OPS",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "GraphExecGroup",
    "SelectiveCheckpointContext",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "get_device_states",
    "noop_context_fn",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
]
