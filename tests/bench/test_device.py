"""Benchmarks on an accelerator: peaks are the allocator's, offloaders take part, and compiled steps have peaks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recollect._bench import cell as cells
from recollect._bench.cell import measure
from tests.bench.test_cell import REQUEST, TINY

pytestmark = pytest.mark.gpu
pytest.importorskip("scipy")

ON_DEVICE = replace(REQUEST, device="cuda")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "SCALES", {("cuda", "Llama", "small"): replace(TINY, batch=256)})


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_every_contender_has_a_peak(mode: str) -> None:
    figures = {one.contender: one for one in measure(replace(ON_DEVICE, cell=replace(REQUEST.cell, mode=mode))).figures}
    missing = {name: one.failed for name, one in figures.items() if not one.rounds_s and "no plan" not in one.failed}
    packages = {"torch_remat", *(name for name in figures if name.startswith("xformers"))}
    assert set(missing) <= packages, missing
    assert all(one.peak_bytes for one in figures.values() if one.rounds_s)
    assert mode == "compiled" or "save_on_cpu" in figures
    assert mode == "compiled" or {"TRL-style offload", "TRL's offload"} & set(figures)


def test_the_largest_batch_is_found_on_a_device() -> None:
    asked = replace(ON_DEVICE, cell=replace(REQUEST.cell, mode="largest batch"), budget_bytes=200 * 2**20)
    found = {one.contender: one for one in measure(asked).reaches}
    assert 0 < found["plain"].value < found["recollect"].value
    assert (found["recollect"].peak_bytes or 0) <= 200 * 2**20
