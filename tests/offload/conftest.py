"""What tests of offloading on a real device share."""

import gc
from collections.abc import Iterator

import pytest
import torch

from recollect._offload import offload
from recollect._offload.tiers import SharedHosts


@pytest.fixture
def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, 0)


@pytest.fixture
def collector_off() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def own_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory that no other test has: one that failed still holds its graph, and what the graph sent away."""
    monkeypatch.setattr(offload, "shared_hosts", SharedHosts())
