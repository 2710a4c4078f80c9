"""Making what travels smaller: masks to bits, which loses nothing; floating point to fewer bits, only when asked.

A codec turns the bytes of a value into fewer on the device they are on, and back. Error bounds of the lossy ones, for a
finite value x of a tensor whose largest magnitude is m: bfloat16 ``|x| / 256``; float8 (e4m3, scaled by m)
``max(|x| / 16, m / 2**18)``.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from recollect._core.patterns import hint_nearest

_BITS = 8


class Codec(Protocol):
    """A way to write a value in fewer bytes.

    Attributes:
        name: for reports.
    """

    name: str

    def encoded_bytes(self, size: int) -> int:
        """How many bytes become of `size`."""

    def encode(self, data: Tensor) -> Tensor:
        """Flat bytes in, fewer flat bytes out, on the same device."""

    def decode(self, data: Tensor, size: int) -> Tensor:
        """The inverse: `size` flat bytes."""


class Bits:
    """Eight booleans to a byte. Lossless: torch keeps a boolean in a byte that is 0 or 1.

    >>> mask = torch.tensor([1, 0, 1, 1, 0, 0, 0, 0, 1], dtype=torch.uint8)
    >>> Bits().encode(mask).tolist()
    [13, 1]
    >>> torch.equal(Bits().decode(Bits().encode(mask), 9), mask)
    True
    """

    name = "bits"

    def encoded_bytes(self, size: int) -> int:
        """An eighth, rounded up."""
        return -(-size // _BITS)

    def encode(self, data: Tensor) -> Tensor:
        """Pack."""
        whole = self.encoded_bytes(data.numel())
        if data.numel() != whole * _BITS:
            data = torch.nn.functional.pad(data, (0, whole * _BITS - data.numel()))
        columns = data.view(whole, _BITS)
        packed = columns[:, 0].clone()
        for bit in range(1, _BITS):
            packed |= columns[:, bit] << bit
        return packed

    def decode(self, data: Tensor, size: int) -> Tensor:
        """Unpack."""
        bits = torch.empty((data.numel(), _BITS), dtype=torch.uint8, device=data.device)
        for bit in range(_BITS):
            torch.bitwise_and(data >> bit, 1, out=bits[:, bit])
        return bits.view(-1)[:size]


class Half:
    """float32 as bfloat16: half the bytes, 8 bits of precision.

    >>> Half().decode(Half().encode(torch.tensor([1.0, 1.001]).view(torch.uint8)), 8).view(torch.float32)
    tensor([1., 1.])
    """

    name = "bf16"

    def encoded_bytes(self, size: int) -> int:
        """Half."""
        return size // 2

    def encode(self, data: Tensor) -> Tensor:
        """Round."""
        return data.view(torch.float32).to(torch.bfloat16).view(torch.uint8)

    def decode(self, data: Tensor, size: int) -> Tensor:
        """Widen."""
        del size
        return data.view(torch.bfloat16).to(torch.float32).view(torch.uint8)


class Quarter:
    """float32 as float8 (e4m3) with one scale for the tensor: a quarter of the bytes, 4 bits of precision.

    >>> Quarter().decode(Quarter().encode(torch.tensor([448.0, -3.3]).view(torch.uint8)), 8).view(torch.float32)
    tensor([448.0000,  -3.2500])
    """

    name = "fp8"
    _SCALE_BYTES = 16  # its own 4, and what keeps the rest aligned
    _LARGEST = 448.0

    def encoded_bytes(self, size: int) -> int:
        """A quarter, and the scale."""
        return size // 4 + self._SCALE_BYTES

    def encode(self, data: Tensor) -> Tensor:
        """Scale and round."""
        values = data.view(torch.float32)
        largest = values.abs().amax()
        scale = torch.where((largest > 0) & largest.isfinite(), largest / self._LARGEST, 1.0).to(torch.float32)
        small = (values / scale).to(torch.float8_e4m3fn).view(torch.uint8)
        head = scale.reshape(1).view(torch.uint8)
        return torch.cat([head, head.new_zeros(self._SCALE_BYTES - head.numel()), small])

    def decode(self, data: Tensor, size: int) -> Tensor:
        """Widen and scale."""
        del size
        scale = data[:4].clone().view(torch.float32)
        return (data[self._SCALE_BYTES :].view(torch.float8_e4m3fn).to(torch.float32) * scale).view(torch.uint8)


_LOSSY: dict[str, Codec] = {"bf16": Half(), "fp8": Quarter()}
_MASKS = Bits()


class Compression:
    """Which codec a value gets.

    Args:
        lossy: ``"bf16"`` or ``"fp8"`` for float32 values; None to lose nothing.

    Raises:
        ValueError: there is no such codec.

    >>> Compression("zip")
    Traceback (most recent call last):
    ...
    ValueError: compress='zip': expected None (nothing is lost), 'bf16' or 'fp8' (float32 values are rounded)
    """

    __slots__ = ("_lossy",)

    def __init__(self, lossy: str | None = None) -> None:
        if lossy is not None and lossy not in _LOSSY:
            known = " or ".join(map(repr, _LOSSY))
            message = f"compress={lossy!r}: expected None (nothing is lost), {known} (float32 values are rounded)"
            message += hint_nearest(lossy, _LOSSY)
            raise ValueError(message)
        self._lossy = None if lossy is None else _LOSSY[lossy]

    def codec_for(self, dtype: torch.dtype, size: int) -> Codec | None:
        """The codec of a value of this dtype and number of bytes; None for one that travels as it is."""
        if dtype is torch.bool:
            return _MASKS
        if dtype is torch.float32 and size % 16 == 0:
            return self._lossy
        return None
