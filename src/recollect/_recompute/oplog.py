"""A log of the operators a function runs, each with its module and source line, and where each saved tensor is made.

Used to explain a mismatch: it costs some tens of microseconds per operator and is never active otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from recollect._core.places import Place, Places
from recollect._core.torch_private.dispatch import DispatchMode
from recollect._core.torch_private.ops import op_name
from recollect._core.torch_private.pytree import tree_leaves

_IGNORED = frozenset({"aten.detach", "aten.lift_fresh"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCall:
    """One operator call."""

    op: str
    inputs: str
    place: Place

    @property
    def key(self) -> tuple[str, str]:
        """What two runs are compared by."""
        return self.op, self.inputs

    @property
    def name(self) -> str:
        """The operator without its overload."""
        return ".".join(self.op.split(".")[:2])


def describe_tensor(tensor: Tensor) -> str:
    """Write a tensor's dtype and shape.

    >>> import torch
    >>> describe_tensor(torch.zeros(8, 16))
    'float32[8, 16]'
    """
    try:
        shape = str(list(tensor.shape))
    except RuntimeError:
        shape = "[nested]"
    return f"{str(tensor.dtype).removeprefix('torch.')}{shape}"


class OpLog(DispatchMode):
    """Logs operators while entered; is told of each saved tensor, in order, through `note_saved`."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self._places = Places(root)
        self.entries: list[LoggedCall] = []
        self.saved: list[tuple[int, str]] = []
        self._unplaced: list[tuple[int, Tensor]] = []
        self._last_made: list[int] = []

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator and log it."""
        name = (op_name(func) or str(func)).removesuffix(".default")
        if name in _IGNORED:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        place = self._places.find(1)
        for index, tensor in self._unplaced:
            if any(tensor is other for other in tensors):
                self.saved[index] = (len(self.entries), "input of")
        self._unplaced.clear()
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._last_made = [id(tensor) for tensor in made]
        self.entries.append(
            LoggedCall(
                op=name,
                inputs=", ".join(describe_tensor(tensor) for tensor in tensors),
                place=place,
            )
        )
        return result

    def note_saved(self, tensor: Tensor) -> None:
        """A tensor is being saved now: by the operator just run if it made it, else by the next one."""
        if self.entries and id(tensor) in self._last_made:
            self.saved.append((len(self.entries) - 1, "output of"))
        else:
            self._unplaced.append((len(self.saved), tensor))
            self.saved.append((len(self.entries), "saved before"))

    @property
    def saw_compiled(self) -> bool:
        """Whether an operator ran inside a function compiled by torch.compile."""
        return self._places.saw_compiled

    def locate(self, index: int) -> str:
        """Say where saved tensor `index` is made: ``input of aten.mul in layers.3.mlp, model.py:41``."""
        if index >= len(self.saved) or not self.entries:
            return "place unknown"
        position, role = self.saved[index]
        if position == len(self.entries):
            position, role = position - 1, "saved after"
        entry = self.entries[position]
        return f"{role} {entry.name}{entry.place}"

    def __exit__(self, *error: Any) -> None:
        """Stop logging and let go of the tensors still waiting for their operator."""
        super().__exit__(*error)
        self._unplaced.clear()


_BEFORE, _AFTER, _WIDTH = 3, 5, 56


def compare_logs(forward: OpLog, again: OpLog) -> str:
    """Two logs side by side, cut around the first difference: at most about twenty lines."""
    ours, theirs = forward.entries, again.entries
    first = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a.key != b.key), min(len(ours), len(theirs))
    )
    if first == len(ours) == len(theirs):
        return f"forward and recomputation ran the same {len(ours)} operators on the same shapes."
    stop = first + _AFTER
    lines = [f"{'':>6} {'forward':<{_WIDTH}} recomputation"]
    start = max(0, first - _BEFORE)
    if start:
        lines.append(f"{'':>6} ... {start} identical operators ...")
    for index in range(start, min(stop, max(len(ours), len(theirs)))):
        mark = ">" if index == first else " "
        cells = [_cell(log, index) for log in (ours, theirs)]
        lines.append(f"{mark}{index:>5} {cells[0]:<{_WIDTH}} {cells[1]}")
    rest = [max(0, len(log) - stop) for log in (ours, theirs)]
    if any(rest):
        lines.append(f"{'':>6} {f'... {rest[0]} more':<{_WIDTH}} ... {rest[1]} more")
    for title, log in (("forward", ours), ("recomputation", theirs)):
        if first < len(log):
            module = log[first].place.module
            lines.append(f"{title}, operator {first}{f' in {module}' if module else ''}, came from:")
            lines.extend(f"    {line}" for line in log[first].place.stack)
    return "\n".join(lines)


def _cell(log: list[LoggedCall], index: int) -> str:
    if index >= len(log):
        return "-"
    entry = log[index]
    text = f"{entry.place.line}  {entry.op}({entry.inputs})"
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
