"""Profiles of offloaded steps: a category for what travels, the copies as transfers, and tracks for them in reports."""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

import recollect
from recollect._core.calls import Category
from recollect._core.offload_news import listeners
from recollect._core.profiles import Profile
from recollect._report.html import write_html
from recollect._report.trace import write_trace


class Net(nn.Module):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.folder = folder

    def forward(self, x: Tensor) -> Tensor:
        away = recollect.offload(tier="disk", directory=self.folder, min_bytes="16KiB", in_flight="64KiB")
        self.reports = away.report
        with away:
            for layer in self.layers:
                x = layer(x).tanh()
        return x.sum()


def take_profile(folder: Path) -> Profile:
    torch.manual_seed(0)
    return recollect.profile(Net(folder), torch.randn(128, 64))


def test_a_profile_knows_what_was_offloaded(tmp_path: Path) -> None:
    profile = take_profile(tmp_path)
    out = [transfer for transfer in profile.transfers if transfer.is_out]
    back = [transfer for transfer in profile.transfers if not transfer.is_out]
    assert out
    assert back
    assert {transfer.tier for transfer in profile.transfers} == {"disk"}
    assert all(transfer.bytes == 128 * 64 * 4 for transfer in profile.transfers)
    assert all(transfer.start <= transfer.end for transfer in profile.transfers)
    assert all(profile.storages[transfer.storage].category is Category.OFFLOADED for transfer in profile.transfers)
    assert Profile.from_json(profile.to_json()) == profile


def test_reports_show_both_ways_of_the_link(tmp_path: Path) -> None:
    profile = take_profile(tmp_path)
    events = json.loads(write_trace(profile))["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"link out", "link back"} <= tracks
    copies = [event for event in events if event.get("cat") in ("link out", "link back")]
    assert len(copies) == len(profile.transfers)
    assert all(event["dur"] >= 0 for event in copies)
    page = write_html(profile)
    assert '"transfers":{"is_out":[' in page
    assert "class Links" in page


def test_a_profile_without_offload_has_no_such_tracks() -> None:
    profile = recollect.profile(nn.Linear(4, 4), torch.randn(2, 4))
    assert profile.transfers == ()
    assert "link out" not in write_trace(profile)


def test_a_step_that_is_watched_teaches_offloading_nothing(tmp_path: Path) -> None:
    net, x = Net(tmp_path), torch.randn(128, 64)
    net(x).backward()
    with listeners.listening(lambda news: None):
        net(x).backward()
    net(x).backward()
    assert net.reports().steps == 2
