"""torch's checkpointing API on recollect's engine: change the import, keep the code.

Signatures, defaults and error types are those of ``torch.utils.checkpoint`` and of the wrappers in
``torch.distributed.algorithms``; only the wording of errors differs. The API that adds hooks to modules is in
`recollect.compat.composable`. `install` puts all of it under torch's own names, for code that you cannot edit.
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
from recollect.compat.install import Installation, install, uninstall
from recollect.compat.selective import (
    SAC_IGNORED_OPS,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from recollect.compat.sequential import checkpoint_sequential
from recollect.compat.wrappers import (
    ActivationWrapper,
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)

__all__ = [
    "SAC_IGNORED_OPS",
    "ActivationWrapper",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointImpl",
    "CheckpointPolicy",
    "CheckpointWrapper",
    "DefaultDeviceType",
    "GraphExecGroup",
    "Installation",
    "OffloadWrapper",
    "SelectiveCheckpointContext",
    "apply_activation_checkpointing",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "get_device_states",
    "install",
    "noop_context_fn",
    "offload_wrapper",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
    "uninstall",
]
