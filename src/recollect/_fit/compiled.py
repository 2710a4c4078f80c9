"""Models that torch.compile has compiled before they are fitted: planned as they are written, measured as they run.

Inside of compiled code no module and no operator can be seen. But it is traced anew once its modules are regions, so it
can be planned by a step that runs as it is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from recollect._apply.targets import find_targets


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Run the model's compiled parts, if it has some, uncompiled meanwhile."""
    if not _is_compiled(model):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def hides_memory(model: nn.Module) -> bool:
    """Whether memory that its compiled code takes cannot be seen: only an accelerator's allocator knows of it."""
    return _is_compiled(model) and all(parameter.device.type == "cpu" for parameter in model.parameters())


def _is_compiled(model: nn.Module) -> bool:
    return any(
        target.is_compiled or vars(target.chain[-1]).get("_compiled_call_impl") is not None
        for target in find_targets(model)
    )
