"""What a capture writes down, as it was met: calls and saved storages that `assemble` makes a Profile of."""

from __future__ import annotations

from typing import Any

import torch

from recollect._core.calls import Phase
from recollect._core.operators import Operator

IS_SHADOW = "_recollect_is_shadow"
"""An attribute of optimizers that nobody but `StepProfiler` lets step."""

RawValue = tuple[int, torch.Size | None, torch.dtype]
"""A tensor of a call: the number of its storage, its shape, None if only the storage counts, and its dtype."""


class RawCall:
    """One call of an operator, as it was met. Holds no tensor."""

    __slots__ = (
        "entered",
        "flops",
        "inputs",
        "is_assignment",
        "is_scripted",
        "leaf",
        "module",
        "nth_pass",
        "operator",
        "outputs",
        "phase",
        "region",
        "run",
        "scopes",
        "sequence",
        "source",
        "span",
        "within",
        "workspace_bytes",
        "writes",
    )

    operator: Operator
    phase: Phase
    inputs: list[RawValue]
    outputs: list[RawValue]
    writes: list[int]
    sequence: int
    leaf: int
    module: str
    source: str
    region: str
    scopes: tuple[str, ...]
    flops: int
    span: Any
    run: object
    nth_pass: int
    within: int | None
    entered: str | None
    is_scripted: bool
    is_assignment: bool
    workspace_bytes: int


class RawSaved:
    """A storage that a node of the graph keeps: the node's number, and that of the storage."""

    __slots__ = ("number", "sequence")

    def __init__(self, sequence: int, number: int) -> None:
        self.sequence, self.number = sequence, number
