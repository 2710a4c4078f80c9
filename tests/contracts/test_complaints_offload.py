"""What users of offloading suffered from, by its number in the list the project started from; see `test_complaints`."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._offload.session import Session
from tests.offload.late_lanes import late_session
from tests.offload.packed import parcel_of


def step(session: Session, x: Tensor) -> Tensor:
    with session:
        y = x.exp()
        z = y.t() @ y
    z.sum().backward()
    assert x.grad is not None
    return x.grad


def test_complaint_05_a_transpose_does_not_get_the_copy_of_its_base() -> None:
    # Offloaders knew tensors by address: a transpose has that of its base, and came back with the base's strides.
    session, _ = late_session(in_flight=1)
    for _ in range(4):
        x = torch.randn(16, 16, requires_grad=True)
        ours = step(session, x)
        y = x.exp()
        (plain,) = torch.autograd.grad((y.t() @ y).sum(), x)
        assert torch.equal(ours, plain)


def test_complaint_06_a_value_never_comes_back_before_it_has_left() -> None:
    # The copy back was begun while the copy out was still on its way, and read what the buffer had held before.
    session, lanes = late_session(in_flight=1)
    x = torch.randn(64, requires_grad=True) * 1
    handle = session.pack(x)
    session.settle()
    expected, parcel = x.detach().clone(), parcel_of(handle)
    parcel.alias, parcel.is_leaving = None, False  # let go without waiting, as no release does
    del x
    assert torch.equal(session.unpack(handle), expected)
    assert lanes.backs == 1


def test_complaint_28_no_step_pays_for_pinning_but_the_first() -> None:
    # Each tensor was copied into newly pinned memory: 3 ms each.
    session, _ = late_session(in_flight=2**12)
    assert session.transfers.host is not None
    pool, counts = session.transfers.host.pool, []
    for _ in range(5):
        step(session, torch.randn(64, 64, requires_grad=True))
        counts.append(pool.allocations)
    assert counts[1:] == [counts[1]] * 4


def test_complaint_29_it_is_told_when_offloading_is_slower_than_recomputing() -> None:
    # It was slower and took more memory than recomputation, and nobody said so.
    session, lanes = late_session(in_flight=1)
    lanes.stall_s = 0.02

    def train() -> None:
        for _ in range(8):
            with session:
                y = torch.randn(16, requires_grad=True)
                for _ in range(12):
                    y = y.sin().exp()
            y.sum().backward()

    with pytest.warns(UserWarning, match=r"makes each step wait .* running forward again would take"):
        train()


def test_complaint_42_values_go_to_disk_without_an_edit_of_the_model(tmp_path: Path) -> None:
    # Offloading to host memory or disk needed changes in the model's code.
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)])
    x = torch.randn(64, 32)
    net(x).sum().backward()
    plain = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    net.zero_grad()
    away = recollect.offload(tier="disk", directory=tmp_path, min_bytes=0)
    with recollect.apply(net, {"*": away}):
        net(x).sum().backward()
    ours = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    assert away.report().out_bytes > 0
