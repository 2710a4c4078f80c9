"""What users of checkpointing could not see, by its number in the list the project started from: one test or more each.

Each docstring-like comment says the complaint in our words; the test shows that it is no more.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import recollect
from recollect._core.calls import Phase
from recollect._core.profiles import AllocatorEntry, Profile
from recollect._report.summary import find_peak, list_saved
from tests.models import GPT
from tests.report.steps import transformer_step

GIB = 2**30


def read(profile: Profile, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    """The report as it is printed, without its line breaks."""
    capsys.readouterr()
    recollect.report(profile, **options)
    return " ".join(capsys.readouterr().out.split())


class WideGPT(GPT):
    """A GPT whose logits are far larger than all else, and its loss."""

    def __init__(self) -> None:
        super().__init__(layers=3)
        self.head = nn.Linear(16, 4096, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(tokens).flatten(0, 1), tokens.flatten())


class Whole(nn.Module):
    """One region around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Any:
        return recollect.checkpoint(self.model, name="all of it")(tokens)


def tokens(length: int = 64) -> Tensor:
    return torch.randint(0, 32, (2, length), generator=torch.Generator().manual_seed(0))


# "I turned it on and the peak is the same": the peak was not in activations, and nothing said so.


def test_complaint_20_a_peak_in_the_loss_head_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = WideGPT()
    before = recollect.profile(model, tokens())
    recollect.apply(model, {"layers.*": recollect.Decision.RECOMPUTE})
    after = recollect.profile(model, tokens())
    assert after.peak_bytes > 0.7 * before.peak_bytes
    text = read(after, capsys, against=before)
    assert re.search(
        r"peak \d\.\d\d MiB, in (forward|backward)\S* .*\(aten\.\S*softmax\S*, test_complaints_reports\.py:\d+\)", text
    )
    assert "The peak is in the loss head: logits, loss and their gradients are" in text
    assert "Recomputing layers does not lower that. Compute the loss in chunks of tokens" in text


def test_complaint_20_a_peak_in_the_recomputation_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    # One region around everything: all of it is recomputed at once.
    model = GPT()
    before = recollect.profile(model, tokens())
    after = recollect.profile(Whole(model), tokens())
    assert after.peak_bytes > 0.7 * before.peak_bytes
    text = read(after, capsys, against=before)
    assert re.search(
        r"The peak is in the recomputation of region 'all of it', not in what is kept between forward and", text
    )
    assert "Recomputing more regions does not lower it. Make regions smaller" in text


def test_complaint_20_a_peak_in_the_optimizer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)

    def step() -> None:
        model(torch.ones(4, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    profile = recollect.profile(step)
    assert find_peak(profile).phase is Phase.OPTIMIZER
    text = read(profile, capsys)
    assert "in the optimizer's step" in text
    assert "The peak is in the optimizer's step, not in activations: parameters" in text
    assert "`fused=True` or `foreach=False`" in text


def test_complaint_20_where_recomputing_helps_it_says_so_and_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT()
    profile = recollect.profile(model, tokens())
    text = read(profile, capsys)
    assert "is kept by forward for backward: recomputing more lowers it." in text
    told = re.search(r"layers\.\* x4 (\S+ \S+) (\S+ \S+) (\S+ \S+) (\S+ [KM]iB) \((-\d+)%\)", text)
    assert told is not None
    recollect.apply(model, {"layers.*": recollect.Decision.RECOMPUTE})
    after = recollect.profile(model, tokens())
    assert f"peak {told[4]}," in read(after, capsys)


# Fragmentation mistaken for need: the device was full, and the tensors were not the reason.


def test_complaint_23_fragmentation_is_not_mistaken_for_need(capsys: pytest.CaptureFixture[str]) -> None:
    entry = AllocatorEntry(device="cuda:0", peak_bytes=30 * GIB, reserved_bytes=78 * GIB, total_bytes=80 * GIB)
    text = read(dataclasses.replace(transformer_step(), allocators=(entry,)), capsys)
    assert (
        "cuda:0: tensors take at most 30.00 GiB, the allocator holds 78.00 GiB of 80.00 GiB. The 48.00 GiB between "
        "(62%) is fragmentation and cache, not tensors: set PYTORCH_ALLOC_CONF=expandable_segments:True" in text
    )


@pytest.mark.gpu
def test_complaint_23_fragmentation_on_a_device_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    device = torch.accelerator.current_accelerator()
    model, inputs = nn.Linear(1024, 1024, device=device), torch.ones(1024, 1024, device=device)
    recollect.profile(model, inputs)
    pieces = [torch.empty(32 * 2**20, dtype=torch.uint8, device=device) for _ in range(32)]
    held = pieces[::8]  # one block in eight keeps what is around it from going back
    del pieces
    text = read(recollect.profile(model, inputs), capsys)
    assert held
    assert re.search(r"tensors take at most \S+ MiB, the allocator holds \S+ GiB of \S+ GiB", text)
    assert "is fragmentation and cache, not tensors" in text


# "Which activations are stored, by what, how large?": asked since 2018.


def test_complaint_39_saved_tensors_by_size_module_and_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT()
    profile = recollect.profile(model, tokens())
    rows = list_saved(profile)
    sizes = [row.bytes for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    paths = dict(model.named_modules())
    for row in rows:
        assert row.module in paths
        assert re.fullmatch(r"models\.py:\d+", row.source)
        assert row.holders
    text = read(profile, capsys)
    total = sum(sizes)
    assert f"saved for backward: {total / 2**20:.2f} MiB in {len(rows)} tensors, largest first" in text
    assert re.search(
        r"128\.00 KiB x4 float32\[128, 64\] addmm in layers\.\*\.mlp\.0, models\.py:\d+; kept by gelu", text
    )


def test_complaint_39_what_is_listed_is_what_autograd_holds(capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT(dropout=0.0)
    profile = recollect.profile(model, tokens())
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens()).sum()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    expected = sorted(size for place, size in held.items() if place not in own)
    del loss
    assert sorted(row.bytes for row in list_saved(profile)) == expected
    assert "saved for backward" in read(profile, capsys)


def test_complaint_39_the_report_of_32_layers_fits_on_a_few_screens(capsys: pytest.CaptureFixture[str]) -> None:
    profile = recollect.profile(GPT(layers=32), tokens(8))
    capsys.readouterr()
    recollect.report(profile)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 140
    assert max(map(len, lines)) <= 80
    shown = textwrap.dedent("\n".join(lines))
    assert re.search(r"0 \.\.\. 31 +Block +x32", shown)
