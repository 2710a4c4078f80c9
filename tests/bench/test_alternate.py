"""Steps that take turns leave the garbage collector as they found it."""

from unittest import mock

import pytest
import torch

from recollect._bench import alternate as module
from recollect._bench.alternate import alternate


@pytest.mark.parametrize("frozen", [0, 5])
def test_what_the_caller_froze_stays_frozen_and_nothing_else(frozen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = mock.Mock()
    collector.get_freeze_count.return_value = frozen
    monkeypatch.setattr(module, "gc", collector)
    alternate({"one": lambda: None}, device=torch.device("cpu"), rounds=1, repeats=1)
    assert collector.freeze.call_count == collector.unfreeze.call_count == (0 if frozen else 1)
