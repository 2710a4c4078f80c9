"""Does recomputation make what forward made? The check of each saved tensor, and the error when it does not.

A `Recorder` receives the saved tensors of one recomputation, fills the frame's live slots with them and compares. It
runs per saved tensor, so it only collects what differs; `conclude` turns that into an error, re-running the function
once more under an operator log to say which operator, module and line are concerned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from recollect._core.errors import MismatchError
from recollect._core.torch_private.engine import next_sequence, sequence_of
from recollect._core.units import count_noun, format_bytes
from recollect._recompute.frame import StopRecomputation, read_meta
from recollect._recompute.oplog import OpLog, compare_logs
from recollect._recompute.values import Evidence, ValueCheck

if TYPE_CHECKING:
    from recollect._recompute.frame import Frame, Meta

Check = Literal["metadata", "values", "none"] | ValueCheck

_SHOWN = 5
_WHY = "The function read something that changed in between: a global, a random generator, or the shape of another input."
_HOW = "To see both operator logs side by side, wrap the step in `recollect.explain_mismatch()`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Matcher:
    """How a region's recomputation is checked against its forward."""

    metadata: bool = True
    values: ValueCheck | None = None

    @classmethod
    def parse(cls, check: Check) -> Matcher:
        """Read the ``check=`` option.

        >>> Matcher.parse("shape")
        Traceback (most recent call last):
        ...
        ValueError: check='shape': expected 'metadata', 'values', 'none' or a recollect.ValueCheck
        """
        if isinstance(check, ValueCheck):
            return cls(values=check)
        if check == "values":
            return cls(values=ValueCheck())
        if check in ("metadata", "none"):
            return cls(metadata=check == "metadata")
        message = f"check={check!r}: expected 'metadata', 'values', 'none' or a recollect.ValueCheck"
        raise ValueError(message)

    def recorder(self, frame: Frame, *, last: int, stops_early: bool, leaves: list[Any]) -> Recorder:
        """What receives the saved tensors of one recomputation of `frame`."""
        return Recorder(frame, last=last, stops_early=stops_early, leaves=leaves)


class Recorder:
    """Receives the saved tensors of one recomputation."""

    __slots__ = ("_count", "_differ", "_evidence", "_frame", "_last", "_leaves", "_metas", "_next")
    __slots__ += ("_over", "_slots", "_stops", "_unfinished", "log")

    def __init__(self, frame: Frame, *, last: int, stops_early: bool, leaves: list[Any]) -> None:
        self._frame = frame
        self._slots = frame.slots
        self._metas: list[Meta] | None = frame.metas if frame.options.matcher.metadata else None
        self._count = len(frame.slots)
        self._last = last
        self._stops = stops_early
        self._leaves = leaves
        self._next = 0
        self._over = False
        self._differ: list[tuple[int, str]] = []
        self._unfinished: list[tuple[int, Tensor]] = []
        values = frame.options.matcher.values
        self._evidence = Evidence(values) if values is not None else None
        self.log = OpLog(frame.options.name) if frame.log is not None else None

    # Runs per saved tensor: 1.1 µs, of which 0.35 for the detach and 0.3 for the comparison.
    def pack(self, tensor: Tensor) -> Tensor:
        """Saved-tensor hook of recomputation: fill the slot of the tensor's number, and stop after the last one."""
        if self._over:
            raise StopRecomputation
        index = self._next
        self._next = index + 1
        if self._evidence is not None or self.log is not None:
            self._observe(tensor)
        if index >= self._count:
            return tensor.detach() if tensor.requires_grad else tensor
        if self._metas is not None and read_meta(tensor) != self._metas[index]:
            self._compare(index, tensor)
        slot = self._slots[index]()
        if tensor.requires_grad:
            if not tensor.is_leaf:
                if self._unfinished and sequence_of(tensor.grad_fn) >= self._unfinished[-1][0]:
                    self._unfinished.clear()
                # Undetached, an output would be held by the node that made it: a cycle that nothing breaks.
                tensor = tensor.detach()
        else:
            self._unfinished.append((next_sequence(), tensor))
        if slot is not None:
            slot.value = tensor
            slot.version = tensor._version  # noqa: SLF001
        if index == self._last and self._stops:
            self._stop()
        return tensor

    def _stop(self) -> None:
        """End the recomputation, at once if the operator that is saving cannot still write into what it saved.

        Inputs are saved before their kernel runs, and RReLU's kernel fills its saved noise. Only a fresh tensor
        without gradient can be such: not one that a later node has been built upon, nor an input or a parameter.
        Where in doubt the function runs on to its next saved tensor or its end.
        """
        modules = self._frame.around.modules
        for _, tensor in self._unfinished:
            if not any(tensor is leaf for leaf in self._leaves) and not (modules is not None and modules.holds(tensor)):
                self._over = True
                return
        raise StopRecomputation

    def _observe(self, tensor: Tensor) -> None:
        if self._evidence is not None:
            self._evidence.note(tensor)
        if self.log is not None:
            self.log.note_saved(tensor)

    def _compare(self, index: int, tensor: Tensor) -> None:
        """The metadata differ: is it more than the version of a tensor that rightly has another one?"""
        assert self._metas is not None
        *was, version = self._metas[index]
        *now, version_now = read_meta(tensor)
        if was == now:
            modules, inputs = self._frame.around.modules, self._frame.inputs
            if (modules is not None and modules.is_copy(tensor)) or (inputs is not None and inputs.are_packed):
                return
            self._differ.append(
                (index, f"was at version {version} in forward and is at version {version_now} in recomputation: it was changed in place in between")
            )
            return
        same_device = was[2] == now[2]
        self._differ.append(
            (
                index,
                f"was {_describe_meta(was)} on {was[2]} in forward and {_describe_meta(now)}"
                f"{'' if same_device else f' on {now[2]}'} in recomputation",
            )
        )

    def conclude(self) -> None:
        """Raise if the recomputation differed.

        Raises:
            MismatchError: it did.
        """
        if self._evidence is not None:
            self._evidence.flush()
            self._compare_values()
        frame = self._frame
        made = self._next
        too_few = made <= self._last
        too_many = not self._stops and made > self._count and not frame.is_open
        if not (self._differ or too_few or too_many):
            return
        name = frame.options.name
        log = self.log if self.log is not None else frame.log_again(self._leaves)
        if too_few or too_many:
            parts = [
                f"region '{name}': forward saved {count_noun(self._count, 'tensor')} and recomputation {made}"
                f"{'' if too_many else f', so saved tensor {made} is missing'}."
            ]
        else:
            (index, text), *rest = self._differ
            parts = [f"region '{name}': saved tensor {index} ({log.locate(index) or 'unknown'}) {text}."]
            parts.extend(f"Also saved tensor {i} ({log.locate(i)}) {t}." for i, t in rest[: _SHOWN - 1])
            if len(rest) >= _SHOWN:
                parts.append(f"And {len(rest) - _SHOWN + 1} more.")
        if self.log is not None and frame.log is not None:
            parts.append(compare_logs(frame.log, self.log))
        else:
            parts.extend((_WHY, _HOW))
        raise MismatchError("\n".join(parts))

    def _compare_values(self) -> None:
        frame = self._frame
        check, forward, again = frame.options.matcher.values, frame.evidence, self._evidence
        assert check is not None
        assert forward is not None
        assert again is not None
        reported = {index for index, _ in self._differ}
        for index in sorted(again.kept.keys() & forward.kept.keys() - reported):
            if check.differs(forward.kept[index], again.kept[index]):
                kept = f" (host copies kept for this check: {format_bytes(forward.host_bytes)})" if forward.host_bytes else ""
                how = "to the bit" if check.is_bitwise else f"beyond rtol={check.rtol or 0}, atol={check.atol or 0}"
                self._differ.append((index, f"has other values in recomputation than in forward, {how}{kept}"))
                break
        self._differ.sort(key=lambda item: item[0])


def _describe_meta(meta: list[Any]) -> str:
    shape, dtype, _ = meta
    return f"{str(dtype).removeprefix('torch.')}{list(shape) if shape is not None else '[nested]'}"
