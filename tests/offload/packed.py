"""What a session gave to stand for a saved tensor, looked into."""

from typing import Any

from recollect._offload.parcels import Parcel, View


def parcel_of(packed: Any) -> Parcel:
    """What travels for a saved tensor, which must not be one that stayed."""
    if isinstance(packed, View):
        return packed.parcel
    assert isinstance(packed, Parcel)
    return packed
