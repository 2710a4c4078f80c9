"""One cell, measured: contenders share parameters, take turns, and have the gradients of the plain step."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from recollect._bench import cell as cells
from recollect._bench import reach
from recollect._bench.ahead import Ahead
from recollect._bench.arena import Arena, Ready
from recollect._bench.cases import SCALES, Case, Scale
from recollect._bench.cell import Request, measure
from recollect._bench.contenders import BUDGET_SHARES, Contender, list_contenders
from recollect._bench.names import MODELS, SIZES, WITH_LENGTH
from recollect._bench.results import Figure
from tests.bench.figures import CELL

pytest.importorskip("scipy")


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))
        self.stem, self.layers, self.head = nn.Linear(16, 16), nn.Sequential(*blocks), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.layers(self.stem(x))).square().mean()
        return loss


def make(batch: int, length: int) -> Case:
    return Case(build=Tiny, inputs=lambda: (torch.randn(batch, length, 16),))


TINY = Scale(make=make, batch=16, length=64, text="tiny", grows=("batch", "length"))
REQUEST = Request(cell=CELL, device="cpu", rounds=1, repeats=1, is_quick=True)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "SCALES", {("cpu", "Llama", "small"): TINY})


def test_every_model_has_both_sizes_for_both_kinds_of_device() -> None:
    assert set(SCALES) == {(kind, model, size) for kind in ("cpu", "cuda") for model in MODELS for size in SIZES}
    assert {model for (_, model, _), scale in SCALES.items() if "length" in scale.grows} == set(WITH_LENGTH)


def test_another_model_of_an_arena_has_the_same_parameters_and_buffers() -> None:
    arena = Arena(TINY.case(), "cpu")
    other = arena.make_model()
    assert all(own is theirs for own, theirs in zip(other.parameters(), arena.model.parameters(), strict=True))
    assert not any(parameter.is_meta for parameter in other.parameters())


@pytest.mark.usefixtures("tiny")
def test_a_cell_has_figures_of_all_contenders_and_reasons_for_those_without() -> None:
    measured = measure(REQUEST)
    figures = {one.contender: one for one in measured.figures}
    assert {"plain", "recollect 75%", "recollect min", "torch full", "torch reentrant", "save_on_cpu"} <= set(figures)
    assert figures["save_on_cpu"].failed == "the step runs in host memory already"
    for one in figures.values():
        assert bool(one.failed) != bool(one.rounds_s)
        if one.rounds_s:
            assert one.gradient_difference == 0.0
            assert one.peak_bytes is not None
    smallest, plain = figures["recollect min"].peak_bytes, figures["plain"].peak_bytes
    assert smallest is not None
    assert plain is not None
    assert smallest < plain
    assert measured.shape == "tiny, batch 16, length 64"


@pytest.mark.usefixtures("tiny")
def test_ours_stays_within_its_budgets_and_takes_what_it_promised() -> None:
    def check(one: Figure) -> None:
        assert one.peak_bytes is not None
        assert one.predicted_peak_bytes is not None
        assert one.peak_bytes == pytest.approx(one.predicted_peak_bytes, rel=0.01)
        assert one.budget_bytes is None or one.peak_bytes <= one.budget_bytes

    ours = [one for one in measure(REQUEST).figures if one.family == "recollect" and one.rounds_s]
    assert ours
    for one in ours:
        check(one)


@pytest.mark.usefixtures("tiny")
def test_a_contender_that_fails_keeps_its_reason_and_the_others_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = list_contenders

    def with_broken(*args: object, **kwargs: object) -> object:
        def prepare(model: nn.Module) -> None:
            raise IndexError("no such thing\nmore of it")

        found = listed(*args, **kwargs)  # type: ignore[arg-type]
        return [replace(one, prepare=prepare) if one.name == "torch full" else one for one in found]

    monkeypatch.setattr(cells, "list_contenders", with_broken)
    figures = {one.contender: one for one in measure(REQUEST).figures}
    assert figures["torch full"].failed == "IndexError: no such thing"
    assert figures["torch reentrant"].rounds_s


@pytest.mark.usefixtures("tiny")
def test_who_finds_the_device_full_of_what_compiles_tries_again_when_that_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare, waits = Arena.prepare, []

    class Compiling(Ahead):
        is_busy = True

        def wait(self) -> None:
            waits.append("for all")

    def fail_first(self: Arena, one: Contender, *, is_compiled: bool) -> Ready:
        if one.name == "torch full" and not waits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return prepare(self, one, is_compiled=is_compiled)

    monkeypatch.setattr(cells, "Ahead", Compiling)
    monkeypatch.setattr(Arena, "prepare", fail_first)
    figures = {one.contender: one for one in measure(REQUEST).figures}
    assert len(waits) == 1
    assert figures["torch full"].rounds_s


@pytest.mark.usefixtures("tiny")
def test_the_largest_batch_of_ours_is_at_least_that_of_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_SKIPPED", ("torch reentrant", "torch every 2nd block", "torch_remat"))
    budget = 2**20
    asked = replace(REQUEST, cell=replace(CELL, mode="largest batch"), budget_bytes=budget)
    found = {one.contender: one for one in measure(asked).reaches}
    assert 0 < found["plain"].value < found["recollect"].value
    for name in ("plain", "recollect", "torch full"):
        peak = found[name].peak_bytes
        assert peak is not None
        assert peak <= budget


@pytest.mark.usefixtures("tiny")
def test_the_largest_leaves_out_what_is_known_and_stops_when_the_time_is_up() -> None:
    asked = replace(REQUEST, cell=replace(CELL, mode="largest batch"), budget_bytes=2**20, limit_s=0.0)
    first = measure(replace(asked, known=("recollect",)))
    assert [one.contender for one in first.reaches] == ["plain"]
    assert first.is_partial


@pytest.mark.usefixtures("tiny")
def test_who_is_not_ready_when_the_time_is_up_has_no_figures_and_the_cell_is_measured_again() -> None:
    measured = measure(replace(REQUEST, limit_s=0.0))
    assert measured.is_partial
    assert measured.plain is not None
    late = {one.contender for one in measured.figures if one.failed == "the time was up"}
    assert {"recollect 75%", "torch full"} <= late


def test_packages_of_rivals_take_part_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    shares, models = [], []

    def wrap(module: nn.Module, *, memory_budget: float) -> nn.Module:
        shares.append(memory_budget)
        return module

    def offload(model: nn.Module) -> AbstractContextManager[None]:
        models.append(model)
        return nullcontext()

    xformers, trl = ModuleType("xformers.checkpoint"), ModuleType("trl.models.activation_offloading")
    vars(xformers)["selective_checkpoint_wrapper"], vars(trl)["get_act_offloading_ctx_manager"] = wrap, offload
    for package in (xformers, trl):
        monkeypatch.setitem(sys.modules, package.__name__, package)
    arena = Arena(TINY.case(), "cpu")
    expected = arena.model(*arena.inputs)
    for one in list_contenders([], torch.device("cuda"), is_compiled=False):
        if one.family in ("xformers", "offload") and one.name != "save_on_cpu":
            model = arena.make_model()
            one.prepare(model)
            with one.around():
                assert torch.equal(model(*arena.inputs), expected)
    assert shares == [share for share in BUDGET_SHARES for _ in range(4)]
    assert [type(model) for model in models] == [Tiny]
