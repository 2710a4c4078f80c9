"""Which saved values something other than autograd holds: a key/value cache, a list, an attribute of a module.

Recomputing does not free them. A profile says when storages were freed, not who held them; so they are told by their
being there long after the backward of the module that made them.
"""

from __future__ import annotations

from recollect._core.calls import Lifetime, Phase
from recollect._core.profiles import Profile

_SLACK = 8  # calls: autograd lets go of what a node saved when the node is done, a few calls after its last use


def find_held(profile: Profile) -> frozenset[int]:
    """The storages that forward makes, that backward reads, and that are still there when it no longer does.

    >>> from recollect._core.calls import OpCall, Saved, Storage, Value
    >>> key = Value(storage=0)
    >>> attend = OpCall(op="attend", module="attn", outputs=(key,))
    >>> back = OpCall(op="back", phase=Phase.BACKWARD, inputs=(key,), forward=0)
    >>> rest = [OpCall(op="rest", phase=Phase.BACKWARD)] * 20
    >>> cached = Storage(bytes=8, made_at=0, freed_at=22)
    >>> saved = (Saved(storage=0, by=0, reader=1),)
    >>> sorted(find_held(Profile(storages=(cached,), calls=(attend, back, *rest), saved=saved)))
    [0]
    """
    calls = profile.calls
    last_use = find_last_uses(profile)
    last_of_module: dict[str, int] = {}
    for number, call in enumerate(calls):
        if call.forward is not None and call.phase is not Phase.FORWARD:
            last_of_module[calls[call.forward].module] = number
    saved = {edge.storage for edge in profile.saved}
    found = set()
    for made in profile.made():
        storage, maker = profile.storages[made.storage], calls[made.call]
        end = profile.timeline.spans[made.storage][1]
        was_seen = storage.freed_at is not None and storage.lifetime is Lifetime.VALUE
        if made.storage in saved and was_seen and end is not None and maker.phase is Phase.FORWARD:
            last = max(last_use.get(made.storage, made.call), last_of_module.get(maker.module, made.call))
            if end > last + 1 + _SLACK:
                found.add(made.storage)
    return frozenset(found)


def find_cached(profile: Profile) -> frozenset[int]:
    """Of those, the entries of a cache of keys and values that was empty: as large as what was put in.

    `recollect.apply` fills no such cache while a model trains, so that recomputing frees them.
    """
    makers = {made.storage: made.call for made in profile.made()}
    found = set()
    for storage in find_held(profile):
        call = profile.calls[makers[storage]]
        if call.op == "aten.cat.default":
            size = profile.storages[storage].bytes
            found |= {storage} if any(value.bytes == size for value in call.inputs) else set()
    return frozenset(found)


def fills_cache(profile: Profile) -> bool:
    """Whether forward seems to fill a cache of keys and values: it puts values behind nothing, to make it grow.

    >>> from recollect._core.calls import OpCall, Storage, Value
    >>> nothing, key, entry = Value(storage=0), Value(storage=1, bytes=8), Value(storage=2, bytes=8)
    >>> grow = OpCall(op="aten.cat.default", inputs=(nothing, key), outputs=(entry,))
    >>> fills_cache(Profile(storages=(Storage(bytes=0), Storage(bytes=8), Storage(bytes=8)), calls=(grow,)))
    True
    """
    return any(
        call.op == "aten.cat.default"
        and call.phase is Phase.FORWARD
        and sorted(value.bytes > 0 for value in call.inputs) == [False, True]
        for call in profile.calls
    )


def find_last_uses(profile: Profile) -> dict[int, int]:
    """The last call that reads each storage."""
    last_use: dict[int, int] = {}
    for number, call in enumerate(profile.calls):
        last_use.update(dict.fromkeys(call.reads, number))
    return last_use
