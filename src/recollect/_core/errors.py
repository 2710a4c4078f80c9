"""The exceptions of this library, in one tree.

::

    RecollectError
    ├── CheckpointError (RuntimeError)      recomputation cannot be trusted
    │   ├── MismatchError                   it saved different tensors than forward
    │   └── ChangedInputError               something it reads was changed in place since forward
    ├── TransformError (RuntimeError)       a torch.func transform tracks a tensor that the region cannot see
    ├── CaptureError (RuntimeError)         a region draws random numbers in an unprepared CUDA-graph capture
    ├── OffloadError (RuntimeError)         an offloaded value cannot be brought back unchanged
    │   └── TierFullError                   a tier has no room: the value stays where it is
    ├── CompileError (RuntimeError)         this torch lacks what regions in compiled code need
    └── BudgetError (ValueError)            no plan fits the budget

Wrong arguments raise ``ValueError`` or ``TypeError``; helpers that torch has too raise ``RuntimeError``, as there.
"""

from __future__ import annotations

from typing import Self


class RecollectError(Exception):
    """The base class: catch it to catch every exception that recollect defines."""


class CheckpointError(RecollectError, RuntimeError):
    """Recomputation cannot reproduce what forward computed."""


class MismatchError(CheckpointError):
    """Recomputation saved different tensors than forward: the function read something that changed in between.

    To see where, wrap the step in `recollect.explain_mismatch`, which shows both operator logs.
    """


class ChangedInputError(CheckpointError):
    """An input, parameter or buffer of a region was changed in place after forward had read it.

    Use the out-of-place form of the operation, or pass a clone.
    """


class TransformError(RecollectError, RuntimeError):
    """A ``torch.func`` transform tracks a tensor that reaches the region neither as input nor as parameter."""


class CaptureError(RecollectError, RuntimeError):
    """A region draws random numbers inside a CUDA-graph capture that was not prepared with `recollect.graph_rng`."""


class OffloadError(RecollectError, RuntimeError):
    """A value could not be sent to host memory or disk, or could not be brought back unchanged."""


class TierFullError(OffloadError):
    """Raised by a `recollect.Tier` without room for a value, which then stays where it is or goes to the next tier."""


class CompileError(RecollectError, RuntimeError):
    """This version of torch lacks what regions in compiled code need; in eager code they work."""


class BudgetError(RecollectError, ValueError):
    """No plan fits the budget. The message says what sets the smallest peak, and what would lower it.

    Attributes:
        smallest_bytes: the smallest peak that a plan can reach.

    >>> import torch, recollect
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    >>> try:
    ...     fitted = recollect.fit(model, torch.randn(64, 8), budget="1KiB")
    ... except recollect.BudgetError as error:
    ...     print(error.smallest_bytes > 1024)
    True
    """

    def __init__(self, message: str, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes

    def __reduce__(self) -> tuple[type[Self], tuple[str, int]]:
        return type(self), (str(self), self.smallest_bytes)


# Tracebacks name them as users catch them: recollect.BudgetError.
for _error in (
    RecollectError,
    CheckpointError,
    MismatchError,
    ChangedInputError,
    TransformError,
    CaptureError,
    OffloadError,
    TierFullError,
    CompileError,
    BudgetError,
):
    _error.__module__ = "recollect"
del _error
