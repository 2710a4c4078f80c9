"""What goes wrong on the way: each fault is a clear error that names the value and the tier, or the value stays."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import recollect
from recollect._offload.disk import DiskTier, remove_stale
from recollect._offload.host_memory import aligned_bytes
from recollect._offload.learning import MEASURED_STEPS
from recollect._offload.pinned import PinnedPool
from recollect._offload.streams import Batch
from recollect._offload.tiers import HostTier
from tests.offload.late_lanes import late_session
from tests.offload.leaving import wait_until_left
from tests.offload.packed import parcel_of
from tests.offload.shelf import Shelf


def chain(x: Tensor) -> Tensor:
    for _ in range(4):
        x = x.sin().exp()
    return x


def plain_grad(x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(chain(x).sum(), x)
    return grad


def offloaded(away: Any, x: Tensor) -> Tensor:
    with away:
        y = chain(x)
    wait_until_left(away)
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def test_a_full_disk_leaves_values_in_memory(tmp_path: Path) -> None:
    x = torch.randn(64, requires_grad=True)
    away = recollect.offload(tier="disk", directory=tmp_path, min_bytes=0)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        mock.patch.object(os, "pwrite", full),
        pytest.warns(UserWarning, match=r"tier 'disk' is full\. value \d+ of the step .* stays in memory"),
    ):
        grad = offloaded(away, x)
    assert torch.equal(grad, plain_grad(x))


def test_a_full_disk_behind_a_device_leaves_values_in_host_memory() -> None:
    x = torch.randn(64, requires_grad=True)

    class Broken(Shelf):
        name = "disk"

        def write(self, data: Tensor) -> int:
            raise OSError(errno.EIO, "Input/output error")

    session, _ = late_session(slow=Broken(), in_flight=1)
    with pytest.warns(UserWarning, match=r"tier 'disk' failed: .*Input/output error"):
        grad = offloaded(session, x)
    assert torch.equal(grad, plain_grad(x))
    assert session.transfers._staging.pool.used_bytes == 0


def test_a_disk_limit_leaves_values_in_memory(tmp_path: Path) -> None:
    x = torch.randn(2000, requires_grad=True)
    away = recollect.offload(tier="disk", directory=tmp_path, min_bytes=0, limit="8KiB")
    with pytest.warns(UserWarning, match="tier 'disk' is full"):
        grad = offloaded(away, x)
    assert torch.equal(grad, plain_grad(x))


@pytest.mark.parametrize(
    ("harm", "text"),
    [("truncate", "it was truncated"), ("alter", "are not those that were written")],
)
def test_a_file_that_was_harmed_is_an_error_that_names_value_and_tier(tmp_path: Path, harm: str, text: str) -> None:
    x = torch.randn(3000, requires_grad=True)
    with recollect.offload(tier="disk", directory=tmp_path, min_bytes=0) as away:
        y = chain(x)
    transfers = away._session.transfers
    for one in away._session._step.parcels:  # type: ignore[union-attr]
        parcel = one()
        if parcel is not None:
            transfers.release([parcel])
    (path,) = tmp_path.iterdir()
    with path.open("r+b") as file:
        if harm == "truncate":
            file.truncate(0)
        else:
            file.write(bytes(path.stat().st_size))
    with pytest.raises(recollect.OffloadError, match=rf"value \d+ of the step \(float32\[3000\] on cpu\) .*{text}"):
        y.sum().backward()


def test_a_reached_host_limit_leaves_values_on_the_device() -> None:
    x = torch.randn(2000, requires_grad=True)
    session, lanes = late_session(host=HostTier(limit=16 * 1024))
    with pytest.warns(UserWarning, match=r"the host limit of 16.00 KiB is reached: value \d+ .* stays on cpu"):
        grad = offloaded(session, x)
    assert torch.equal(grad, plain_grad(x))
    assert lanes.outs == 2


def test_behind_a_reached_host_limit_there_may_be_a_disk(tmp_path: Path) -> None:
    x = torch.randn(2000, requires_grad=True)
    tier = DiskTier(tmp_path)
    session, lanes = late_session(host=HostTier(limit=16 * 1024), slow=tier)
    with session:
        y = chain(x)
    assert session._step is not None
    for parcel in session._step.live(session._step.leaving):
        if parcel.written is not None:
            parcel.written.future.result()
            session.transfers.release([parcel])
    assert tier.used_bytes > 0
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, plain_grad(x))
    del y, parcel
    assert tier.used_bytes == 0
    assert lanes.outs == 4


def test_refused_pinning_falls_back_to_pageable_memory_with_one_warning() -> None:
    def refuse(size: int) -> Tensor:
        raise RuntimeError(f"CUDA error: out of memory\ncannot pin {size}")

    pool = PinnedPool(allocate=refuse)
    with pytest.warns(UserWarning, match=r"refused to pin 1.00 MiB of host memory \(CUDA error: out of memory\)"):
        buffer = pool.take(100)
    assert buffer is not None
    assert buffer.bytes.numel() == 100
    assert not pool.is_pinned
    assert pool.take(2**21) is not None  # no second warning


@pytest.mark.parametrize(("way", "text"), [("out", "could not be copied out"), ("back", "could not be copied back")])
def test_a_failed_copy_is_an_error_that_names_value_and_tier(way: str, text: str) -> None:
    session, lanes = late_session(in_flight=1)
    lanes.fails = way
    x = torch.randn(64, requires_grad=True)
    with pytest.raises(
        recollect.OffloadError, match=rf"value \d+ of the step \(float32\[64\] on cpu\) {text}, tier 'host': the device"
    ):
        offloaded(session, x)
    lanes.fails = ""
    assert torch.equal(offloaded(session, x), plain_grad(x))
    assert session.transfers.host is not None
    assert session.transfers.host.pool.used_bytes == 0


def test_of_copies_that_begin_together_those_before_a_failure_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    session, lanes = late_session()
    values = [torch.randn(64).requires_grad_() * 1 for _ in range(3)]
    expected = [value.detach().clone() for value in values]
    session._learner.steps = MEASURED_STEPS  # what is measured travels alone
    parcels = [parcel_of(session.pack(value)) for value in values]
    out = lanes.copy_out

    def fail_at_the_second(batches: Sequence[Batch]) -> None:
        (batch,) = batches
        out(batches)
        batch.begun = 1
        raise RuntimeError("the device fell off the bus")

    monkeypatch.setattr(lanes, "copy_out", fail_at_the_second)
    with pytest.raises(recollect.OffloadError, match=r"value 1 of the step .* could not be copied out"):
        session.settle()
    assert [parcel.is_leaving for parcel in parcels] == [True, False, False]
    assert [parcel.stays for parcel in parcels] == [False, True, True]
    session.transfers.release(parcels)
    del values
    assert all(torch.equal(session.unpack(parcel), value) for parcel, value in zip(parcels, expected, strict=True))
    parcels.clear()
    assert session.transfers.host is not None
    assert session.transfers.host.pool.used_bytes == 0


def test_the_file_is_private_and_gone_after_closing(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    tier = DiskTier(folder)
    assert stat.S_IMODE(tier.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [tier.path] == list(folder.iterdir())
    tier.close()
    tier.close()
    assert list(folder.iterdir()) == []


CRASH = """
import os, signal, sys, torch
from recollect._offload.disk import DiskTier
tier = DiskTier(sys.argv[1])
tier.write(torch.ones(5000, dtype=torch.uint8))
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif sys.argv[2] == "fork":
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    print(tier.path.exists())
"""


def run_script(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(recollect.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source}
    command = [sys.executable, "-c", CRASH, str(folder), how]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    done = run_script(tmp_path, "kill")
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    tier = DiskTier(tmp_path)
    assert list(tmp_path.iterdir()) == [tier.path]
    assert tier.path != left


def test_a_forked_child_leaves_the_file_and_the_end_of_the_process_removes_it(tmp_path: Path) -> None:
    done = run_script(tmp_path, "fork")
    assert done.stdout == "True\n", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_files_of_living_processes_stay(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path)
    (tmp_path / "recollect-of-the-user.txt").write_text("not ours")
    remove_stale(tmp_path)
    assert tier.path.exists()
    assert (tmp_path / "recollect-of-the-user.txt").exists()
    with tier.path.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_disk_without_direct_io_goes_through_the_page_cache(tmp_path: Path) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    with mock.patch.object(os, "open", refuse):
        tier = DiskTier(tmp_path)
    assert not tier.is_direct
    data = torch.randint(0, 255, (20_000_001,), dtype=torch.uint8)
    key = tier.write(data)
    back = torch.zeros_like(data)
    tier.read(key, back)
    assert torch.equal(back, data)


def test_a_shared_directory_among_the_temporary_files_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / f"recollect-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    with (
        mock.patch.object(tempfile, "gettempdir", return_value=str(tmp_path)),
        pytest.raises(PermissionError, match="is not a private directory of this user"),
    ):
        DiskTier()


def test_pools_never_pass_their_limit() -> None:
    pool = PinnedPool(10 * 2**20, aligned_bytes)
    taken = []
    while (buffer := pool.take(3 * 2**20)) is not None:
        taken.append(buffer)
    assert pool.held_bytes <= 10 * 2**20
    assert len(taken) >= 2
    for buffer in taken:
        buffer.give_back()
    assert pool.used_bytes == 0
    pool.trim()
    assert pool.held_bytes == 0
