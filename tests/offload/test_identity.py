"""Which values travel, how often, and as what: identity, views, versions, on a device whose copies come late."""

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._offload.kinds import stretch_of
from recollect._offload.parcels import Parcel, Stayed
from tests.offload.late_lanes import late_session
from tests.offload.packed import chain, made, parcel_of, sent

pytestmark = pytest.mark.usefixtures("collector_off")


def test_views_of_one_storage_travel_once_and_come_back_right() -> None:
    session, lanes = late_session()
    base = made(torch.randn(6, 8))
    views = [base, base.t(), base[2:], base.view(8, 6), base[:, ::2], base.unsqueeze(0).expand(3, 6, 8)]
    with session:
        handles = [session.pack(view) for view in views]
    copies = [view.clone() for view in views]
    kinds = [(view.stride(), view.storage_offset()) for view in views]
    for handle in handles:
        session.transfers.release([parcel_of(handle)])
    del base, views
    back = [session.unpack(handle) for handle in handles]
    assert lanes.outs == 1
    assert all(torch.equal(one, other) for one, other in zip(back, copies, strict=True))
    assert [(view.stride(), view.storage_offset()) for view in back] == kinds


def test_in_one_backward_pass_views_of_one_storage_come_back_once() -> None:
    session, lanes = late_session(in_flight=1)
    x = torch.randn(6, 8, requires_grad=True)
    with session:
        y = x.exp()
        z = (y.t() * y.t()).sum() + (y[3:] * y[3:]).sum()
        z = z + chain(torch.randn(100, requires_grad=True)).sum()
    z.backward()
    sent = [one for one in session._step.kinds if one.size == 6 * 8 * 4]  # type: ignore[union-attr]
    assert len(sent) == 1
    assert lanes.backs <= lanes.outs


def test_a_reused_address_is_another_storage() -> None:
    session, lanes = late_session()
    first = made(torch.ones(1000))
    address = first.data_ptr()
    one = sent(session, first)
    del first
    second = made(torch.full((1000,), 2.0))
    other = sent(session, second)
    assert second.data_ptr() == address or lanes.outs == 2
    assert session.unpack(one)[0] == 1
    assert session.unpack(other)[0] == 2


def test_a_value_saved_again_after_a_write_travels_again() -> None:
    session, lanes = late_session()
    x = made(torch.ones(8))
    one = sent(session, x)
    x.detach().add_(1)
    other = sent(session, x)
    del x
    assert lanes.outs == 2
    assert [int(session.unpack(handle)[0]) for handle in (one, other)] == [1, 2]


def test_a_twin_that_counts_no_writes_travels_again_after_one() -> None:
    session, _ = late_session()
    x = made(torch.randn(16, 16))
    first = sent(session, x)
    assert parcel_of(session.pack(x.detach())) is first  # a twin that counts them
    before = x.detach().clone()
    with torch.no_grad():
        x.add_(1)
    twin, after = x.data, x.detach().clone()
    second = sent(session, twin)
    del x, twin
    assert second is not first
    assert torch.equal(session.unpack(first), before)
    assert torch.equal(session.unpack(second), after)


def test_a_small_part_of_a_large_storage_travels_alone_and_as_well_aligned() -> None:
    session, _ = late_session()
    base = torch.arange(100_000, dtype=torch.float64)
    part = base[70_001:70_101].view(10, 10).t()
    assert stretch_of(part, base.untyped_storage()) == (70_001 * 8 // 256 * 256, 800 + 70_001 * 8 % 256)
    handle = sent(session, part)
    expected = part.clone()
    del base, part
    back = session.unpack(handle)
    assert torch.equal(back, expected)
    assert back.stride() == (1, 10)
    assert back.untyped_storage().data_ptr() % 16 == 0
    assert (back.data_ptr() - 70_001 * 8) % 16 == 0


def test_a_value_with_a_history_leaves_at_once_and_one_without_after_its_operator() -> None:
    # A region saves its input and then nothing more for a whole layer: the copy must run beside that layer.
    session, lanes = late_session()
    made_before, mask = made(torch.ones(2**18)), torch.ones(2**18)
    handles = [session.pack(made_before)]
    assert lanes.outs == 1
    handles.append(session.pack(mask))
    assert lanes.outs == 1
    session.settle()
    del mask
    session.settle()
    assert lanes.outs == 2
    assert len(handles) == 2


def test_small_values_leave_together() -> None:
    session, lanes = late_session()
    batches: list[int] = []
    out = lanes.copy_out
    lanes.copy_out = lambda sent: (batches.append(sum(len(one.targets) for one in sent)), out(sent))  # type: ignore[assignment,method-assign,func-returns-value]
    x = torch.randn(2**14, requires_grad=True)
    with session:
        y = chain(x, 20)
    assert len(batches) <= 3
    assert sum(batches) == lanes.outs >= 20
    y.sum().backward()
    (plain,) = torch.autograd.grad(chain(x, 20).sum(), x)
    assert torch.equal(x.grad, plain)  # type: ignore[arg-type]


def test_parts_of_a_storage_that_count_writes_apart_travel_apart() -> None:
    session, lanes = late_session()
    left, right = made(torch.ones(4, 6)).unsafe_chunk(2, 1)
    one = session.pack(left)
    right.detach().add_(1)
    left.detach()
    other = session.pack(right)
    expected = [left.clone(), right.clone()]
    session.settle()
    for handle in (one, other):
        session.transfers.release([parcel_of(handle)])
    del left, right
    assert all(torch.equal(session.unpack(h), x) for h, x in zip((one, other), expected, strict=True))
    assert lanes.outs == 2


def test_values_that_are_let_go_together_are_waited_for_once() -> None:
    session, lanes = late_session()
    handles = [session.pack(made(torch.ones(2**18))) for _ in range(3)]
    session.transfers.release([parcel_of(handle) for handle in reversed(handles)])
    assert len(lanes.held) == 1
    assert all(mark.is_done for mark in lanes._out)
    assert [float(session.unpack(handle).sum()) for handle in handles] == [2.0**18] * 3


def test_what_a_change_in_place_reaches_before_it_has_left_is_an_error() -> None:
    session, _ = late_session()
    x = torch.randn(8, requires_grad=True)
    with session:
        y = x * 2
        z = y * y
        y.add_(1)
    with pytest.raises(
        recollect.ChangedInputError, match=r"value 0 of the step \(float32\[8\] on cpu\) was changed in"
    ):
        z.sum().backward()


def test_what_was_changed_after_it_had_left_comes_back_as_it_was() -> None:
    session, _ = late_session()
    x = torch.randn(8, requires_grad=True)
    with session:
        y = x * 2
        z = y * y
    session.transfers.release(session._step.live([0]))  # type: ignore[union-attr]
    y.detach().add_(1)
    z.sum().backward()
    assert torch.equal(x.grad, 8 * x)  # type: ignore[arg-type]


def test_a_parameter_changed_before_backward_is_an_error() -> None:
    session, _ = late_session()
    weight = nn.Parameter(torch.randn(4, 4))
    with session:
        y = torch.randn(2, 4, requires_grad=True).mul(1) @ weight
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(recollect.ChangedInputError, match=r"float32\[4, 4\] on cpu\) was changed in place: it is at"):
        y.sum().backward()


def test_parameters_buffers_and_leaf_inputs_never_travel() -> None:
    session, lanes = late_session()
    net = nn.BatchNorm1d(8)
    frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
    scale = torch.randn(16, 8)
    batch = torch.randn(16, 8, requires_grad=True)
    for _ in range(4):
        with session:
            y = (net(batch) * scale) @ frozen.t()
        y.sum().backward()
    assert lanes.outs <= 4 * 2  # the statistics of this batch, which the normalisation saves
    assert session.report().out_bytes <= 2 * 8 * 4


def test_small_values_stay() -> None:
    session, lanes = late_session(min_bytes=64)
    small = session.pack(made(torch.ones(15)))
    large = session.pack(made(torch.ones(16)))
    session.settle()
    assert type(small) is Stayed
    assert type(large) is Parcel
    assert lanes.outs == 1


def test_a_conjugated_value_in_the_place_of_a_plain_one_is_not_taken_for_it() -> None:
    session, _ = late_session()
    w = (torch.randn(16, 16, dtype=torch.complex64) * 0.3).requires_grad_()

    def forward(*, is_conjugated: bool) -> Tensor:
        y = w * 1
        for _ in range(4):
            z = y.conj() if is_conjugated else y
            y = (z * z).sin() + z.imag * z.real
        return y.abs().sum()

    for number in range(8):
        (plain,) = torch.autograd.grad(forward(is_conjugated=number % 2 == 1), w)
        with session:
            loss = forward(is_conjugated=number % 2 == 1)
        (ours,) = torch.autograd.grad(loss, w)
        assert torch.equal(ours, plain)
