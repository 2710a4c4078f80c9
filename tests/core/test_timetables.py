"""The timetable: what is sent, when its memory is let go, and when its way back begins. Plain numbers."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recollect._core.timetables import LINK_SHARE, SeenValue, Speeds, Timetable, make_timetable
from tests.offload.simulated import simulate

EVEN = Speeds(out=100.0, back=100.0)


def layers(count: int = 10, size: int = 10, *, forward_s: float = 1.0, backward_s: float = 2.0) -> list[SeenValue]:
    """A step in which each layer saves a value, used in the reverse order."""
    return [
        SeenValue(
            bytes=size,
            made_s=forward_s * at / (count - 1),
            used_s=forward_s + backward_s * (count - at) / count,
        )
        for at in range(count)
    ]


def hidden(values: list[SeenValue], speeds: Speeds = EVEN, **options: int) -> Timetable:
    return make_timetable(values, speeds, in_flight=10**9, waits=False, **options)  # type: ignore[arg-type]


def test_what_is_hidden_is_what_the_link_carries_beside_forward() -> None:
    table = hidden(layers(size=30))
    assert 0.6 * LINK_SHARE * 100 <= table.sent_bytes <= LINK_SHARE * 100
    assert table.sends[:3] == (True, True, True)
    assert not any(table.sends[4:])


def test_values_with_the_longest_time_to_their_use_win() -> None:
    values = layers(20, size=20)
    table = hidden(values)
    sent = [value for value, is_sent in zip(values, table.sends, strict=True) if is_sent]
    stayed = [value for value, is_sent in zip(values, table.sends, strict=True) if not is_sent]
    shortest = min((value.used_s or 0) - value.made_s for value in sent)
    assert all((value.used_s or 0) - value.made_s <= shortest for value in stayed)


def test_what_somebody_holds_or_has_no_room_stays() -> None:
    values = [SeenValue(bytes=10, made_s=0.0, used_s=9.0, is_held=True), *layers()]
    assert not hidden(values).sends[0]
    assert hidden(layers(), most_bytes=25).sent_bytes == 20
    table = make_timetable(layers(), EVEN, in_flight=10, waits=True, has_room=[False, True] * 5)
    assert not any(table.sends[::2])


def test_a_value_that_backward_never_asked_for_is_sent_and_not_fetched() -> None:
    values = [SeenValue(bytes=10, made_s=0.0, used_s=None), *layers()]
    table = hidden(values)
    assert table.sends[0]
    assert 0 not in table.order
    assert 0 not in itertools.chain(*table.fetches.values())


def test_everything_is_sent_if_the_step_may_wait_but_the_last() -> None:
    table = make_timetable(layers(size=100), EVEN, in_flight=100, waits=True)
    assert all(table.sends[:8])
    assert not table.sends[-1]


MIB = 2**20
LINK = Speeds(out=55e9, back=55e9)


def region_inputs() -> tuple[list[SeenValue], float]:
    """A step whose 16 layers are regions (d2048, 16,384 tokens, on an H200), and when its memory is at its peak.

    Each region saves its input, the last norm and the head theirs, and the loss 2 GB. Memory is at its peak while the
    gradient of the loss is computed.
    """
    layer_s, back_s, forward_s = 4.5e-3, 13e-3, 80e-3
    made = [(layer_s * at, forward_s + 9.3e-3 + back_s * (15 - at)) for at in range(16)]
    made += [(16 * layer_s, forward_s + 9e-3), (16 * layer_s + 1e-4, forward_s + 2e-3)]
    inputs = [SeenValue(bytes=64 * MIB, made_s=made_s, used_s=used_s) for made_s, used_s in made]
    loss = SeenValue(bytes=2000 * MIB, made_s=forward_s - 1e-3, used_s=forward_s)
    return [*inputs, loss], forward_s + 1e-3


@pytest.mark.parametrize("slower", [1.0, 1.1, 1.2])
@pytest.mark.parametrize("waits", [False, True])
def test_inputs_of_regions_are_away_at_the_peak_and_the_step_never_waits(waits: bool, slower: float) -> None:
    values, peak_s = region_inputs()
    table = make_timetable(values, LINK, in_flight=2**30, waits=waits)
    step = simulate(values, table, LINK, slower=slower)
    assert step.stall_s == 0
    assert table.sent_bytes >= 16 * 64 * MIB
    assert sum(value.bytes for value in values) - step.bytes_at(values, peak_s) == table.sent_bytes


def test_what_must_come_back_with_the_beginning_of_backward_is_not_sent() -> None:
    values, _ = region_inputs()
    table = make_timetable(values, LINK, in_flight=2**30, waits=True)
    assert [number for number, is_sent in enumerate(table.sends) if not is_sent] == [17, 18]  # of the head, of the loss


def test_a_link_that_is_slower_than_backward_carries_all_the_same() -> None:
    values, _ = region_inputs()
    table = make_timetable(values, Speeds(out=1e9, back=1e9), in_flight=2**30, waits=True)
    assert all(table.sends[:14])


@pytest.mark.parametrize("slower", [1.0, 1.05])
def test_what_is_hidden_stays_hidden_on_a_link_that_is_a_little_slower(slower: float) -> None:
    values = layers(100, size=2**28, forward_s=0.08, backward_s=0.15)
    table = make_timetable(values, LINK, in_flight=2**30, waits=False)
    assert simulate(values, table, LINK, slower=slower).stall_s == 0
    assert table.sent_bytes >= 0.85 * LINK.out * 0.08


@pytest.mark.parametrize("waits", [False, True])
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    out=st.floats(1.0, 1e4),
    back=st.floats(1.0, 1e4),
    in_flight=st.integers(1, 200),
)
def test_timetables_hold_together(waits: bool, sizes: list[int], out: float, back: float, in_flight: int) -> None:
    count = len(sizes)
    values = [SeenValue(bytes=size, made_s=float(at), used_s=float(2 * count - at)) for at, size in enumerate(sizes)]
    table = make_timetable(values, Speeds(out=out, back=back), in_flight=in_flight, waits=waits)
    sent = [at for at, is_sent in enumerate(table.sends) if is_sent]
    assert sorted(itertools.chain(*table.releases.values())) == sent
    assert all(at >= one for at, ones in table.releases.items() for one in ones)
    assert sorted(table.order) == sent
    assert sorted(itertools.chain(*table.fetches.values())) == sent
    uses = {at: value.used_s for at, value in enumerate(values)}
    for begins, ones in table.fetches.items():
        assert all(begins in (-1, one) or (uses[begins] or 0) <= (uses[one] or 0) for one in ones)
    if not waits and sent:  # each way back begins early enough for all that come before it
        assert table.sent_bytes / out <= count
