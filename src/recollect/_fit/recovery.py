"""What forward and backward change, kept aside, so that they can run again after memory ran out in their midst."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn

from recollect._core.torch_private.versions import version_of
from recollect._inspect.surroundings import list_generators
from recollect._profile.attributes import Attributes
from recollect._recompute.rng import Source, put_back


class Recovery:
    """Gradients, buffers, random generators and what modules count, as they are now; `restore` puts them back.

    Gradients that there are, and buffers, are copied to the host; after ``zero_grad()`` there are none. Parameters are
    not copied: if they were written into, as by an optimizer that steps in backward, nothing can be run again.

    Args:
        model: whose they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [(one, version_of(one)) for one in model.parameters()]
        self._gradients = [(one, one.grad, _copy(one.grad)) for one, _ in self._parameters]
        self._buffers = [(buffer, version_of(buffer), _copy(buffer)) for buffer in model.buffers()]
        self._attributes = Attributes()
        for part in model.modules():
            self._attributes.note(part)
        self._states: list[tuple[Source, Any]] = [(source, source.read()) for source in list_generators()]

    @property
    def has_stepped(self) -> bool:
        """Whether a parameter was written into since."""
        return any(version_of(parameter) != version for parameter, version in self._parameters)

    def restore(self) -> None:
        """Put everything back, and free what the failed run has left."""
        written = {id(buffer) for buffer, version, _ in self._buffers if version_of(buffer) != version}
        self._attributes.settle(lambda part: any(id(one) in written for one in part.buffers(recurse=False)))
        self._attributes.restore()
        with torch.no_grad():
            for parameter, gradient, copied in self._gradients:
                if gradient is not None and copied is not None:
                    gradient.copy_(copied)
                parameter.grad = gradient
            for buffer, _, copied in self._buffers:
                if copied is not None:
                    buffer.copy_(copied)
        put_back(self._states)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", copy=True)
