"""Copies of values to other tiers and back, as offloading tells of them: their memory is of no operator's making."""

from __future__ import annotations

from recollect._core.calls import Transfer
from recollect._core.offload_news import Move, News
from recollect._profile.storage_log import StorageLog


class Travels:
    """Writes down what travels.

    Args:
        storages: those of the step; callers hold the lock of whoever else writes there, and have settled them.

    Attributes:
        offloaded: numbers of storages that were sent to another tier, or came back from one.
        transfers: the copies that ended, in that order.
    """

    def __init__(self, storages: StorageLog) -> None:
        self.offloaded: set[int] = set()
        self.transfers: list[Transfer] = []
        self._storages = storages
        self._begun: dict[int, tuple[int, int, News]] = {}

    def hear(self, news: News, at: int) -> None:
        """A copy begins or ends before call `at`."""
        if news.move in (Move.LEAVES, Move.RETURNS):
            number = self._storages.number(news.storage, news.storage.device, at)
            self.offloaded.add(number)
            self._begun[news.value] = (number, at, news)
        elif (begun := self._begun.pop(news.value, None)) is not None:
            number, start, first = begun
            is_out = first.move is Move.LEAVES
            found = Transfer(storage=number, bytes=news.bytes, is_out=is_out, start=start, end=at, tier=news.tier)
            self.transfers.append(found)
