"""Values as forward makes them, and what a session gave to stand for one."""

from typing import Any

from torch import Tensor

from recollect._offload.parcels import Parcel, ParcelView
from recollect._offload.session import Session


def parcel_of(packed: Any) -> Parcel:
    """What travels for a saved tensor, which must not be one that stayed."""
    if isinstance(packed, ParcelView):
        return packed.parcel
    assert isinstance(packed, Parcel)
    return packed


def made(values: Tensor) -> Tensor:
    """A tensor with a history, as forward makes it."""
    return values.requires_grad_() * 1


def chain(x: Tensor, depth: int = 6) -> Tensor:
    """Operators that each save a value as large as `x`."""
    for _ in range(depth):
        x = x.sin().exp()
    return x


def sent(session: Session, tensor: Tensor) -> Parcel:
    """What stands for a tensor that was saved, sent and let go."""
    handle = session.pack(tensor)
    session.settle()
    assert isinstance(handle, Parcel)
    session.transfers.release([parcel_of(handle)])
    return handle
