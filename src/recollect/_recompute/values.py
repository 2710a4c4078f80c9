"""Evidence of what forward saved, by value: digests for a bitwise check, host copies for one with a tolerance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recollect._core.torch_private.dispatch import without_dispatch_modes
from recollect._core.torch_private.engine import next_sequence, sequence_of

_CHUNK = 1 << 20
_WORD = 8
_MULTIPLIER = 6364136223846793005  # odd, so that no two numbers become one


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCheck:
    """Compare saved tensors by value, not only by shape; pass it as ``check=`` to `recollect.checkpoint`.

    Without a tolerance the check is bitwise, and a 16-byte digest per tensor is all that is kept. With one, copies
    on the host are kept until backward; a mismatch says how many bytes they took. ``check="values"`` is
    ``check=ValueCheck()``.

    Args:
        rtol: relative tolerance; None for bitwise.
        atol: absolute tolerance; None for bitwise.
        every: check only every n-th saved tensor.

    >>> from recollect import ValueCheck
    >>> ValueCheck(atol=1e-3, every=4)
    ValueCheck(rtol=None, atol=0.001, every=4)
    >>> ValueCheck(every=0)
    Traceback (most recent call last):
    ...
    ValueError: ValueCheck(every=0): expected a whole number of at least 1
    """

    rtol: float | None = None
    atol: float | None = None
    every: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if not isinstance(self.every, int) or self.every < 1:
            message = f"ValueCheck(every={self.every!r}): expected a whole number of at least 1"
            raise ValueError(message)
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and value >= 0):
                message = f"ValueCheck({name}={value!r}): expected a number of at least 0"
                raise ValueError(message)

    @property
    def is_bitwise(self) -> bool:
        """Whether values must be equal to the bit."""
        return self.rtol is None and self.atol is None

    def evidence(self, tensor: Tensor) -> Tensor:
        """What to keep of a tensor in forward."""
        if self.is_bitwise:
            return digest(tensor)
        return tensor.detach().to("cpu", copy=True)

    def differs(self, one: Tensor, other: Tensor) -> bool:
        """Whether two pieces of evidence differ; waits for the device."""
        if self.is_bitwise or not (one.is_floating_point() or one.is_complex()) or one.shape != other.shape:
            return not torch.equal(one, other)
        return not torch.allclose(one, other, rtol=self.rtol or 0.0, atol=self.atol or 0.0, equal_nan=True)


class Evidence:
    """The values a run saved, by number; each tensor is looked at when the operator that saved it is done.

    Inputs are saved before their kernel runs, and RReLU's kernel fills its saved noise: a tensor without gradient
    waits until one made by a later node is saved, or the run is over. Left out: workspaces of bytes, which kernels
    (oneDNN's LSTM) save partly unwritten.

    Args:
        check: what to keep, and how to compare it.
        forward: what forward has shown, in recomputation. That may run on another thread, whose nodes are numbered on
            their own: which come later is known from forward.
    """

    __slots__ = ("_check", "_count", "_forward", "_waiting", "host_bytes", "kept", "later")

    def __init__(self, check: ValueCheck, forward: Evidence | None = None) -> None:
        self._check, self._forward = check, forward
        self._count = 0
        self.later: set[int] = set()  # the tensors that were made by a later node than those that waited
        self._waiting: list[tuple[int, int, Tensor]] = []
        self.kept: dict[int, Tensor] = {}
        self.host_bytes = 0

    def note(self, tensor: Tensor) -> None:
        """A tensor is being saved."""
        index = self._count
        self._count += 1
        if self._waiting and self._is_later(index, tensor):
            self.flush()
        if index % self._check.every or tensor.dtype is torch.uint8:
            return
        if tensor.requires_grad:
            self._keep(index, tensor)
        else:
            self._waiting.append((next_sequence(), index, tensor))

    def _is_later(self, index: int, tensor: Tensor) -> bool:
        """Whether a later node made this tensor than saved those that wait."""
        if self._forward is not None:
            return index in self._forward.later
        is_later = tensor.grad_fn is not None and sequence_of(tensor.grad_fn) >= self._waiting[-1][0]
        if is_later:
            self.later.add(index)
        return is_later

    def flush(self) -> None:
        """The operators that saved the waiting tensors are done."""
        for _, index, tensor in self._waiting:
            self._keep(index, tensor)
        self._waiting.clear()

    def _keep(self, index: int, tensor: Tensor) -> None:
        with torch.no_grad(), without_dispatch_modes():  # a policy or a counter around must not see these
            kept = self.kept[index] = self._check.evidence(tensor)
        if not self._check.is_bitwise:
            self.host_bytes += kept.untyped_storage().nbytes()


def _as_words(tensor: Tensor) -> Tensor:
    """The bits of a tensor in order: as words of 8 bytes if they are that many, else as bytes."""
    if tensor.is_nested:
        tensor = torch.cat([part.reshape(-1) for part in tensor.unbind()])
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if not flat.numel():
        return flat.new_empty(0, dtype=torch.int64)
    if flat.numel() * flat.element_size() % _WORD:
        return flat.view(torch.uint8)
    is_aligned = not flat.storage_offset() * flat.element_size() % _WORD
    return (flat if is_aligned else flat.clone()).view(torch.int64)


def digest(tensor: Tensor) -> Tensor:
    """Two 64-bit sums over the bits, on the tensor's device: equal bits in equal order give equal digests.

    The second sum scrambles each word with a number that looks random and belongs to its place: exchanged values are
    seen, and changes that follow a pattern (signs, say) do not cancel out. Works in pieces of at most 8 MiB to keep its
    own memory small; arithmetic is modulo 2**64.

    >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    >>> torch.equal(digest(a), digest(a.clone())), torch.equal(digest(a), digest(b))
    (True, False)
    """
    data = _as_words(tensor)
    total = torch.zeros(2, dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), _CHUNK):
        words = data[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start + 1, start + words.numel() + 1, device=data.device)
        total += torch.stack((words.sum(), _scramble(_scramble(places).bitwise_xor_(words)).sum()))
    return total


def _scramble(numbers: Tensor) -> Tensor:
    """Whole numbers that look random, one for each; overwrites those it is given."""
    for _ in range(2):
        numbers *= _MULTIPLIER
        numbers ^= numbers >> 29
    return numbers
