"""The copy that a parcel is to make: from which memory to which, after what, and through what."""

from __future__ import annotations

from torch import Tensor

from recollect._offload.kinds import bytes_of
from recollect._offload.parcels import Parcel
from recollect._offload.pinned import Buffer
from recollect._offload.streams import Copy, Times


def make_copy_out(parcel: Parcel, alias: Tensor, buffer: Buffer, times: Times | None) -> Copy:
    """From a device, where `alias` is the value, to a buffer of the host."""
    kind = parcel.kind
    if kind.is_dense:
        return Copy(buffer.shaped(kind), alias, parcel.stream, buffer.busy, times)
    flat = bytes_of(alias.untyped_storage(), kind.start, kind.size)
    through = None if kind.codec is None else kind.codec.encode
    return Copy(buffer.bytes, flat, parcel.stream, buffer.busy, times, through)


def make_copy_back(parcel: Parcel, stream: object, buffer: Buffer, times: Times | None) -> Copy:
    """From a buffer of the host to new memory of the device, made for `stream`."""
    kind = parcel.kind
    after = () if parcel.out is None or stream is parcel.met else (parcel.out,)
    target = kind.make()
    if kind.is_dense:
        return Copy(target, buffer.shaped(kind), stream, after, times)
    codec = kind.codec
    through = None if codec is None else lambda small: codec.decode(small, kind.size)
    return Copy(target, buffer.bytes[: kind.travel_bytes], stream, after, times, through)
