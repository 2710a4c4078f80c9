"""A policy that decides by chance, and the same at every call."""

import zlib

from recollect import Decision, Site


def toss(site: Site, *, seed: int) -> Decision:
    """Decides by a coin that falls the same way for the same site."""
    coin = zlib.crc32(f"{seed} {site.op} {site.call}".encode()) >> 7 & 1
    return Decision.SAVE if coin else Decision.RECOMPUTE
