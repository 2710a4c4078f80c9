"""Links are measured, leave nothing behind, and leave out what cannot be had."""

import math
from pathlib import Path

import pytest
import torch

from recollect._profile import links
from recollect._profile.links import (
    Link,
    measure_copies,
    measure_disk,
    measure_links,
    measure_memory,
    measure_pinned,
    try_pinning,
)

SMALL = 2**20


def test_copies_inside_host_memory_have_a_speed() -> None:
    link = measure_memory(SMALL)
    assert link.name == "inside host memory"
    assert 0 < link.bytes_per_s < math.inf


def test_a_disk_is_written_and_read_and_left_as_it_was(tmp_path: Path) -> None:
    found = list(measure_disk(tmp_path, SMALL))
    assert [link.name for link in found] == ["to disk", "from disk"]
    assert all(link.bytes_per_s > 0 for link in found)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(measure_disk(tmp_path / "none"))


def test_without_a_device_only_the_host_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    names = [link.name for link in measure_links(folder=tmp_path)]
    assert names == ["inside host memory", "to disk", "from disk"]


def test_copies_to_a_device_that_cannot_pin_are_measured_from_pageable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros

    def refuse(*size: int, pin_memory: bool, dtype: torch.dtype) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("cannot pin")
        return zeros(*size, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", refuse)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    found = list(measure_copies(torch.device("cpu"), SMALL))
    assert [link.name for link in found] == ["host to cpu, pageable", "cpu to host, pageable", "inside cpu"]


def test_the_fastest_copy_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 4.0, 4.0, 5.0, 5.0, 7.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    monkeypatch.setattr(links, "_SHARE_S", 6.0)
    assert links._speed(100, lambda: None) == 100.0


@pytest.mark.parametrize(("most", "can", "pinned"), [(2**30, 2**28, 2**28), (2**20, 2**28, 2**20), (0, 2**28, 0)])
def test_pinning_is_tried_until_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, most: int, can: int, pinned: int
) -> None:
    asked: list[int] = []

    def empty(size: int, *, dtype: torch.dtype, pin_memory: bool) -> None:
        assert pin_memory
        asked.append(size)
        if size > can:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    assert try_pinning(most, most_s=60) == pinned
    assert max(asked, default=0) <= most


@pytest.mark.gpu
def test_every_way_between_host_and_device_is_measured() -> None:
    names = [link.name for link in measure_copies(torch.device("cuda:0"))]
    assert names == [
        "host to cuda:0, pinned",
        "cuda:0 to host, pinned",
        "host to cuda:0, pageable",
        "cuda:0 to host, pageable",
        "inside cuda:0",
    ]
    assert try_pinning(2**26) == 2**26


def test_a_link_is_data() -> None:
    assert Link(name="x", bytes_per_s=1.0) == Link(name="x", bytes_per_s=1.0)


def test_pinned_memory_is_measured_both_ways_and_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory, dtype: zeros(*size, dtype=dtype))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    found = list(measure_pinned(torch.device("cpu"), SMALL))
    assert [link.name for link in found] == ["host to cpu, pinned", "cpu to host, pinned"]
