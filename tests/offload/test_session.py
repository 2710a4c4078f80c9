"""What a session does in a step: when values leave and come back, what it holds and says, on a late device."""

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
from recollect._offload.session import Session
from recollect._offload.streams import Batch
from recollect._offload.tiers import HostTier
from tests.offload.late_lanes import CountingClock, late_session
from tests.offload.packed import chain, made, parcel_of, sent

pytestmark = pytest.mark.usefixtures("collector_off")


def held_bytes(session: Session) -> int:
    """What a session holds, wherever."""
    transfers = session.transfers
    host = 0 if transfers.host is None else transfers.host.pool.used_bytes
    return host + transfers._staging.pool.used_bytes + transfers.leaving_bytes


def test_what_is_still_on_its_way_out_is_taken_back_without_a_round_trip() -> None:
    session, lanes = late_session()
    x = torch.randn(8, requires_grad=True)
    with session:
        y = x.exp()
    y.sum().backward()
    assert (lanes.outs, lanes.backs) == (1, 0)


def test_after_the_first_steps_the_last_values_are_not_sent() -> None:
    session, lanes = late_session(in_flight=200)
    lanes.copy_s = 1e-5
    for _ in range(3):
        x = torch.randn(16, requires_grad=True)
        with session:
            y = chain(x)
        y.sum().backward()
    before = lanes.outs
    with session:
        y = chain(x)
    table = session._step.timetable  # type: ignore[union-attr]
    assert table is not None
    assert table.sends[1]
    assert not table.sends[-1]
    assert lanes.outs - before == sum(table.sends)
    y.sum().backward()


def test_values_are_fetched_before_they_are_asked_for() -> None:
    session, lanes = late_session(in_flight=70)
    x = torch.randn(16, requires_grad=True)
    with session:
        y = chain(x)
    seen: list[int] = []
    node = y.grad_fn
    assert node is not None
    node.register_hook(lambda *_: seen.append(lanes.backs))
    y.sum().backward()
    assert seen[0] >= 1  # of the first node's own value none was needed: it had not left


def test_nothing_is_left_after_backward() -> None:
    session, _ = late_session(in_flight=100)
    for _ in range(5):
        x = torch.randn(16, requires_grad=True)
        with session:
            y = chain(x)
        y.sum().backward()
        del y
        assert held_bytes(session) == 0


def test_nothing_is_left_when_backward_never_comes() -> None:
    session, lanes = late_session()
    x = torch.randn(16, requires_grad=True)
    with session:
        y = chain(x)
    assert held_bytes(session) > 0
    del y
    assert held_bytes(session) == 0
    assert lanes.lent  # copies were under way: the allocator was told to keep the memory until they are done


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_nothing_is_left_after_an_exception(where: str) -> None:
    session, _ = late_session(in_flight=100)
    x = torch.randn(16, requires_grad=True)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    def step() -> None:
        with session:
            y = chain(x)
            if where == "forward":
                fail()
            z = chain(y)
        y.register_hook(fail)
        z.sum().backward()

    with suppress(ZeroDivisionError):
        step()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert held_bytes(session) == 0
    with session:
        y = chain(x)
    y.sum().backward()


def test_a_retained_graph_holds_no_device_memory_between_its_passes() -> None:
    session, _ = late_session(in_flight=100)
    x = torch.randn(16, requires_grad=True)
    with session:
        y = chain(x)
    for _ in range(3):
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        parcels = [parcel for one in session._step.parcels if (parcel := one()) is not None]  # type: ignore[union-attr]
        assert [one for one in parcels if one.returned is not None] == []
    (plain,) = torch.autograd.grad(chain(x).sum(), x)
    assert torch.equal(grad, plain)
    del y, parcels, parcel
    assert held_bytes(session) == 0


def test_a_value_that_somebody_holds_is_not_sent_again() -> None:
    session, lanes = late_session(in_flight=100)
    for step in range(4):
        before = lanes.outs
        x = torch.randn(16, requires_grad=True)
        with session:
            inner = [x.sin()]
            inner.append(inner[-1].exp())
            inner.append(inner[-1].exp())
            y = chain(inner[-1])
        y.sum().backward()
        if step:
            assert lanes.outs - before <= 12
    lesson = session._learner.lessons._all[0]
    assert [value.is_held for value in lesson.values[:3]] == [True, True, False]


def test_the_memory_goes_when_the_computing_stream_has_waited() -> None:
    session, lanes = late_session(in_flight=1)
    x = torch.randn(64, requires_grad=True)
    with session:
        y = x.sin()
        z = y.exp()
        alive = weakref.ref(z.untyped_storage())
        y = z.cos()
        del z
        y = y.exp().exp()
    assert alive() is None
    assert len(lanes.held) >= 1
    y.sum().backward()


def test_memory_is_held_until_the_stream_was_told_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    session, lanes = late_session()
    values = [made(torch.randn(64)) for _ in range(3)]
    storages = [weakref.ref(value.untyped_storage()) for value in values]
    parcels = [session.pack(value) for value in values]
    session.settle()
    del values
    seen: list[bool] = []
    hold = lanes.hold

    def look(stream: Any, mark: Any) -> None:
        seen.append(all(storage() is not None for storage in storages))
        hold(stream, mark)

    monkeypatch.setattr(lanes, "hold", look)
    session.transfers.release(parcels)
    assert seen == [True]
    assert all(storage() is None for storage in storages)


def test_inputs_of_regions_leave_beside_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    # A region hands over its input and saves nothing more: a copy that begins at the next one is not waited for there.
    session, lanes = late_session()
    begun, waits = 0, 0
    hold = lanes.hold

    def layer(x: Tensor) -> Tensor:
        nonlocal begun
        begun = lanes.outs
        return x.sin().exp()

    def hold_in_forward(stream: Any, mark: Any) -> None:
        nonlocal waits
        waits += 1
        assert lanes._out.index(mark) < begun
        hold(stream, mark)

    for _ in range(4):
        y = torch.randn(2**18, requires_grad=True) * 1
        with monkeypatch.context() as patches, session:
            patches.setattr(lanes, "hold", hold_in_forward)
            for _ in range(6):
                y = recollect.checkpoint(layer)(y)
        y.sum().backward()
    assert waits >= 3


def test_what_one_region_gives_and_the_next_one_takes_travels_once() -> None:
    session, lanes = late_session()

    def keep_last(site: recollect.Site) -> recollect.Decision:
        return recollect.Decision.OFFLOAD if site.op.startswith("aten.exp") else recollect.Decision.RECOMPUTE

    def step(first: Callable[[Tensor], Tensor], then: Callable[[Tensor], Tensor]) -> Tensor:
        x = torch.ones(64, requires_grad=True)
        with session:
            y = then(first(x))
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    first, then = recollect.checkpoint(lambda x: x.sin().exp(), policy=keep_last), recollect.checkpoint(torch.cos)
    ours = step(first, then)
    kinds = session._step.kinds  # type: ignore[union-attr]
    assert len(kinds) == 1
    assert lanes.outs <= 1
    assert torch.equal(ours, step(lambda x: x.sin().exp(), torch.cos))


def test_no_more_is_on_its_way_back_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    session, lanes = late_session(in_flight=3 * 64)
    most, flying = 0, 0
    back, hold = lanes.copy_back, lanes.hold

    def copy_back(batches: Sequence[Batch]) -> None:
        nonlocal most, flying
        flying += sum(len(batch.targets) for batch in batches)
        most = max(most, flying)
        back(batches)

    def arrive(stream: Any, mark: Any) -> None:
        nonlocal flying
        flying -= mark in lanes._back
        hold(stream, mark)

    monkeypatch.setattr(lanes, "copy_back", copy_back)
    monkeypatch.setattr(lanes, "hold", arrive)
    for _ in range(5):
        with session:
            y = chain(torch.randn(16, requires_grad=True), 10)
        y.sum().backward()
    assert 1 <= most <= 4  # three, and the one that is asked for


def test_two_sessions_share_a_pool() -> None:
    host = HostTier(limit=2**20)
    sessions = [late_session(host=host)[0] for _ in range(2)]
    errors: list[BaseException] = []

    def train(session: Session) -> None:
        try:
            for _ in range(10):
                x = torch.randn(500, requires_grad=True)
                with session:
                    y = chain(x)
                y.sum().backward()
                (plain,) = torch.autograd.grad(chain(x).sum(), x)
                assert torch.equal(x.grad, plain)  # type: ignore[arg-type]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert host.pool.used_bytes == 0


def test_nothing_is_pinned_after_the_second_step() -> None:
    session, _ = late_session(in_flight=1000)
    assert session.transfers.host is not None
    pool = session.transfers.host.pool
    counts = []
    for _ in range(6):
        x = torch.randn(50_000, requires_grad=True)
        with session:
            y = chain(x)
        y.sum().backward()
        counts.append(pool.allocations)
    assert counts[1:] == [counts[1]] * 5


def test_one_line_is_logged_after_the_first_steps(caplog: pytest.LogCaptureFixture) -> None:
    session, _ = late_session(in_flight=200)
    with caplog.at_level(logging.INFO, logger="recollect"):
        for _ in range(8):
            x = torch.randn(16, requires_grad=True)
            with session:
                y = chain(x)
            y.sum().backward()
    lines = [record.getMessage() for record in caplog.records if "offload to host" in record.getMessage()]
    assert len(lines) == 1
    assert "out and" in lines[0]
    assert "of the copies hidden" in lines[0]


def test_a_warning_says_when_recomputing_would_be_faster() -> None:
    session, lanes = late_session(in_flight=1)
    lanes.stall_s = 0.01
    text = (
        r"offloading to host makes each step wait \d+\.\d ms for copies \(\d+ B out, \d+ B back\); running forward "
        r"again would take about \d+\.\d ms"
    )

    def train() -> None:
        for _ in range(8):
            with session:
                y = chain(torch.randn(16, requires_grad=True))
            y.sum().backward()

    with pytest.warns(UserWarning, match=text) as caught:
        train()
    assert len(caught) == 1
    assert session.report().is_slower_than_recomputing


def test_one_slow_step_alone_is_no_reason_to_warn() -> None:
    session, lanes = late_session(in_flight=1)
    for number in range(8):
        lanes.stall_s = 0.01 if number == 2 else 0.0
        with session:
            y = chain(torch.randn(16, requires_grad=True))
        y.sum().backward()
    assert session._learner.steps == 8


def test_the_disk_tier_really_frees_host_memory(tmp_path: Path) -> None:
    x = torch.randn(4096, requires_grad=True)
    storages = []
    with recollect.offload(tier="disk", directory=tmp_path, in_flight=1, min_bytes=0) as away:
        y = x
        for _ in range(6):
            y = y.exp().clamp(max=1)
            storages.append(weakref.ref(y.untyped_storage()))
    for one in away._session._step.parcels:  # type: ignore[union-attr]
        parcel = one()
        if parcel is not None:
            away._session.transfers.release([parcel])
    assert [storage() for storage in storages[:-1]] == [None] * 5
    assert away._session.transfers.slow.used_bytes >= 5 * 4096 * 4  # type: ignore[union-attr]
    y.sum().backward()


def test_sessions_at_one_place_are_one(tmp_path: Path) -> None:
    reports = []
    for _ in range(3):
        with recollect.offload(tier="disk", directory=tmp_path, min_bytes=0) as away:
            y = chain(torch.randn(64, requires_grad=True))
        y.sum().backward()
        reports.append(away.report().steps)
    assert reports == [1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("compress", [None, "bf16", "fp8"])
def test_compressed_values_come_back_within_their_bound(compress: str | None) -> None:
    session, _ = late_session(compress=compress)
    x = torch.randn(1024)
    back = session.unpack(sent(session, x.clone()))
    bound = {None: 0 * x, "bf16": x.abs() / 256, "fp8": (x.abs() / 16).clamp_min(x.abs().max() / 2**18)}[compress]
    assert bool(((back - x).abs() <= bound).all())


def test_masks_travel_as_bits() -> None:
    session, _ = late_session()
    mask = torch.rand(1001) > 0.5
    expected = mask.clone()
    handle = sent(session, mask)
    assert parcel_of(handle).kind.travel_bytes == 126
    del mask
    assert torch.equal(session.unpack(handle), expected)


def test_a_host_tier_on_a_machine_without_device_says_that_it_frees_nothing() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is a device")
    x = torch.randn(64, requires_grad=True)
    says = pytest.warns(UserWarning, match="moving them to the host tier would free nothing")
    with says, recollect.offload(min_bytes=0):
        y = chain(x)
    y.sum().backward()


def test_values_of_a_device_without_streams_stay() -> None:
    session, _ = late_session()

    def refuse(device: torch.device) -> Any:
        raise NotImplementedError(f"no streams on {device}")

    session.transfers._lanes._make = refuse
    x = torch.randn(16, requires_grad=True)

    def train() -> None:
        with session:
            y = chain(x)
        y.sum().backward()

    with pytest.warns(UserWarning, match="values on cpu stay there: it cannot copy while it computes") as caught:
        train()
    assert len(caught) == 1
    (plain,) = torch.autograd.grad(chain(x).sum(), x)
    assert torch.equal(x.grad, plain)  # type: ignore[arg-type]


def test_a_step_whose_clocks_are_not_one_is_not_learnt_from() -> None:
    session, lanes = late_session(in_flight=100)

    class Apart(CountingClock):
        def seconds(self, start: Any, end: Any) -> float:
            raise RuntimeError("events of two devices")

    lanes.clock = Apart()
    for _ in range(4):
        x = torch.randn(16, requires_grad=True)
        with session:
            y = chain(x)
        y.sum().backward()
        (plain,) = torch.autograd.grad(chain(x).sum(), x)
        assert torch.equal(x.grad, plain)  # type: ignore[arg-type]
    assert session.report().out_bytes > 0
    assert len(session._learner.lessons._all) == 0
