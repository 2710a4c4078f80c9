"""What a report says first: does it fit, where is the peak, what would help, and the line to paste."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest
import torch
from torch import nn

import recollect
from recollect._apply.rules import parse_value
from recollect._core.calls import Category, Lifetime, OpCall, Phase, Storage, Value
from recollect._core.gains import Gain
from recollect._core.profiles import AllocatorEntry, ModuleEntry, Profile
from recollect._plan.gains import find_gains
from recollect._report.answer import answer, choose_gains
from recollect._report.summary import sum_saved
from recollect._report.text import write_text
from tests.report.steps import transformer_step

STEP = transformer_step(8, tokens=1024, vocabulary=64)
BLOCKS = Gain(path="layers.*", kind="Block", count=8, freed_bytes=9, peak_bytes=40, recompute_s=4.0, recompute_flops=4)


def test_a_step_that_does_not_fit_says_by_how_much() -> None:
    found = answer(replace(STEP, device="NVIDIA H200", capacity_bytes=2**25))
    assert found.fits is False
    assert found.fit == "It does not fit: the peak is 35.56 MiB, 3.56 MiB more than the 32.00 MiB of NVIDIA H200."
    assert answer(replace(STEP, is_dry=True, capacity_bytes=2**25)).fit.startswith("It would not fit: ")


def test_a_step_that_fits_says_what_is_to_spare() -> None:
    found = answer(replace(STEP, device="NVIDIA H200", capacity_bytes=2**26))
    assert found.fits is True
    assert found.fit == "It fits: the peak is 35.56 MiB of the 64.00 MiB of NVIDIA H200, 44% to spare."
    assert answer(replace(STEP, is_dry=True, capacity_bytes=2**26)).fit.startswith("It would fit: ")


def test_where_nobody_knows_what_the_device_has_the_way_to_find_out_is_named() -> None:
    found = answer(STEP)
    assert found.fits is None
    assert found.fit == (
        'To see if it fits on a GPU, estimate it for one: recollect.profile(..., dry=True, device="H100").'
    )


def test_the_best_suggestions_are_the_cheapest_that_fits_and_then_what_gives_most_for_its_price() -> None:
    half = replace(BLOCKS, every=2, count=4, peak_bytes=60, recompute_s=2.0)
    cheap = replace(BLOCKS, path="layers.*.mlp", peak_bytes=55, recompute_s=1.0)
    least = replace(BLOCKS, path="layers.*.norm", peak_bytes=95, recompute_s=0.1)
    gains = [half, least, BLOCKS, cheap]
    # `half` gives less than `cheap` and costs more; `least` gives too little.
    assert choose_gains(gains, 100) == [BLOCKS, cheap]
    assert choose_gains(gains, 100, 70) == [cheap, BLOCKS]
    assert choose_gains(gains, 100, 50)[0] == BLOCKS
    assert choose_gains(gains, 100, 10)[0] == BLOCKS  # nothing fits: what gives most
    assert choose_gains([replace(BLOCKS, peak_bytes=99)], 100) == []


def test_one_of_many_identical_layers_is_not_suggested_for_itself() -> None:
    found = answer(STEP, find_gains(STEP))
    assert 0 < len(found.suggestions) <= 3
    assert all("layers.0" not in one.code for one in found.suggestions)


@pytest.mark.parametrize(
    ("gain", "code"),
    [
        (BLOCKS, 'recollect.apply(model, {"layers.*": "full"})'),
        (replace(BLOCKS, every=2, count=4), 'recollect.apply(model, {"layers.*": "full"}, every=2)'),
        (replace(BLOCKS, policy="selective"), 'recollect.apply(model, {"layers.*": "selective"})'),
        (replace(BLOCKS, path="head", kind="Linear", count=1), 'recollect.apply(model, {"head": "full"})'),
        (replace(BLOCKS, path='a"b', kind="Linear", count=1), 'recollect.apply(model, {"a\\"b": "full"})'),
        (replace(BLOCKS, path="", count=1), "recollect.checkpoint(model)(inputs)"),
    ],
)
def test_a_suggestion_is_a_line_to_paste(gain: Gain, code: str) -> None:
    [one] = answer(replace(STEP, capacity_bytes=1), [replace(gain, peak_bytes=2**20)]).suggestions
    assert one.code == code
    ast.parse(one.code)


def test_a_pattern_that_would_match_other_modules_becomes_a_regular_expression() -> None:
    more = replace(STEP, modules=(*STEP.modules, ModuleEntry(path="layers.extra", kind="Other")))
    [one] = answer(more, [replace(BLOCKS, peak_bytes=2**20)]).suggestions
    assert one.code == r'recollect.apply(model, {r"re:layers\.\d+": "full"})'


def test_the_lines_do_what_they_promise() -> None:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True, dropout=0.0) for _ in range(6)]
    model, inputs = nn.Sequential(*layers), torch.randn(16, 64, 32)
    choices, _ = parse_value("selective")
    assert choices is not None
    assert choices.policy is not None
    before = recollect.profile(model, inputs)
    found = answer(before, find_gains(before, policies={"selective": choices.policy}))
    assert found.suggestions
    for one in found.suggestions:
        handle = eval(one.code, {"recollect": recollect, "model": model})
        for _ in range(3):
            model(inputs).sum().backward()
        after = recollect.profile(model, inputs)
        handle.remove()
        assert one.peak_bytes is not None
        assert after.peak_bytes <= 1.1 * one.peak_bytes, one
        assert one.peak_bytes < before.peak_bytes


def test_a_peak_in_the_optimizer_is_not_answered_with_recomputation_first() -> None:
    calls = (OpCall(op="aten._foreach_mul", phase=Phase.OPTIMIZER, outputs=(Value(storage=0),)),)
    step = Profile(storages=(Storage(bytes=8),), calls=calls, optimizer="AdamW")
    assert answer(step).suggestions[0].code == "torch.optim.AdamW(model.parameters(), fused=True)"


def test_a_large_loss_head_is_computed_in_chunks_if_it_is_a_cross_entropy() -> None:
    call, loss = OpCall(op="aten.mm", module="head", outputs=(Value(storage=0),)), OpCall(op="aten.nll_loss_forward")
    storages = (Storage(bytes=8, category=Category.LOSS_HEAD, lifetime=Lifetime.RETURNED),)
    [one] = answer(Profile(storages=storages, calls=(call, loss))).suggestions
    assert one.gives == "the loss head is 8 B of the peak"
    ast.parse(one.code)
    assert not answer(Profile(storages=storages, calls=(call, OpCall(op="aten.mse_loss")))).suggestions


def test_fragmentation_is_answered_by_the_allocators_option() -> None:
    entry = AllocatorEntry(device="cuda:0", peak_bytes=2**30, reserved_bytes=2**31, total_bytes=2**34)
    found = answer(replace(STEP, allocators=(entry,)))
    assert [one.code for one in found.suggestions] == ["PYTORCH_ALLOC_CONF=expandable_segments:True python train.py"]
    assert found.suggestions[0].gives == "1.00 GiB of cuda:0 is reserved and not used"


def test_what_a_cache_holds_is_named_with_the_way_to_turn_it_off() -> None:
    spans = STEP.timeline.spans
    keys = {made.storage for made in STEP.made() if STEP.calls[made.call].module.endswith("attn.qkv")}
    storages = tuple(
        replace(storage, made_at=spans[at][0], freed_at=len(STEP.calls)) if at in keys else storage
        for at, storage in enumerate(STEP.storages)
    )
    found = answer(replace(STEP, storages=storages))
    [one] = [one for one in found.suggestions if "cache" in one.what]
    assert one.code == "model.config.use_cache = False"
    assert one.gives.startswith("6.00 MiB of what forward saves is also held by a cache or a list")
    assert not any("cache" in one.what for one in answer(STEP).suggestions)


def test_saved_tensors_of_several_passes_are_explained() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    batches = [torch.randn(256, 16) for _ in range(4)]

    def step() -> None:
        for batch in batches:
            model(batch).sum().backward()

    one, four = recollect.profile(model, batches[0]), recollect.profile(step)
    totals = sum_saved(four)
    assert totals.passes == 4
    assert totals.bytes == 4 * sum_saved(one).bytes > four.peak_bytes
    assert totals.most_bytes == sum_saved(one).bytes
    assert "over 4 forward passes; each frees its own before the next, at most 128.00 KiB at a time" in " ".join(
        write_text(four).split()
    )
    assert sum_saved(one).sentence == ""
