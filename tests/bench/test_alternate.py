"""Steps that take turns leave the collector as they found it."""

import gc

import torch

from recollect._bench.alternate import alternate
from tests.collecting import collect_new


def test_what_the_caller_froze_stays_frozen_and_nothing_else() -> None:
    def count() -> int:
        alternate({"one": lambda: None}, device=torch.device("cpu"), rounds=1, repeats=1)
        return gc.get_freeze_count()

    collect_new()
    frozen = gc.get_freeze_count()
    assert 0 < count() <= frozen
    gc.unfreeze()
    assert count() == 0
    collect_new()
