"""When values that are sent away take no memory: the planner's times are those of the executor's timetable."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recollect._core.timetables import SeenValue, Speeds, make_timetable
from recollect._plan.journeys import find_absences

SPEED = 10.0
sizes = st.lists(st.integers(13, 40), min_size=1, max_size=12)  # none so small that it waits for others


@settings(max_examples=60, deadline=None)
@given(
    sizes=sizes,
    gap=st.integers(1, 6),
    between=st.integers(0, 30),
    in_flight=st.integers(20, 200),
    passes=st.lists(st.integers(0, 60), max_size=6),
)
def test_memory_is_let_go_and_taken_again_when_the_timetable_has_it(
    sizes: list[int], gap: int, between: int, in_flight: int, passes: list[int]
) -> None:
    count = len(sizes)
    made = [float(gap * at) for at in range(count)]
    used = [made[-1] + between + 2.0 * gap * (count - at) for at in range(count)]
    values = [SeenValue(bytes=size, made_s=m, used_s=u) for size, m, u in zip(sizes, made, used, strict=True)]
    passes_s = sorted(at + 0.5 for at in passes if at < made[-1] + between)
    speeds = Speeds(out=SPEED, back=SPEED)
    table = make_timetable(values, speeds, in_flight=in_flight, waits=True, passes_s=passes_s)
    absences, waits_s = find_absences(values, SPEED, in_flight, passes_s)
    assert waits_s >= 0
    released = {number: made[place] for place, numbers in table.releases.items() for number in numbers}
    released |= {number: passes_s[place] for place, numbers in table.passes.items() for number in numbers if place >= 0}
    fetched = {
        number: used[place] if place >= 0 else used[-1]
        for place, numbers in table.fetches.items()
        for number in numbers
    }
    for number, absence in enumerate(absences):
        if table.sends[number]:
            if number in released:
                assert absence.gone_s == pytest.approx(released[number])
            else:
                assert absence.gone_s >= min(used)  # in backward
            assert absence.back_s == pytest.approx(max(fetched[number], absence.gone_s))
        else:
            assert absence.gone_s == absence.back_s


def test_copies_on_their_way_hold_their_memory() -> None:
    """Of ten values that are saved one after the other, the link is two behind."""
    values = [SeenValue(bytes=10, made_s=float(at), used_s=40.0 - at) for at in range(10)]
    absences, waits_s = find_absences(values, bytes_per_s=10.0, in_flight_bytes=160)
    assert absences[0].gone_s == 1.0
    assert absences[0].back_s == pytest.approx(38.0, abs=1.0)
    slower, _ = find_absences(values, bytes_per_s=5.0, in_flight_bytes=160)
    assert slower[0].gone_s == 2.0
    assert all(one.gone_s >= other.gone_s for one, other in zip(slower, absences, strict=True))
    assert waits_s <= 1.0


def test_where_too_much_is_on_its_way_the_step_waits() -> None:
    values = [SeenValue(bytes=10, made_s=0.1 * at, used_s=100.0 - at) for at in range(10)]
    waits = [find_absences(values, 5.0, most, passes_s=[50.0])[1] for most in (10, 50, 1000)]
    assert waits[0] > waits[1] > waits[2] == 0


def test_without_a_place_to_look_the_last_value_waits_for_those_before_it() -> None:
    values = [SeenValue(bytes=10, made_s=float(at), used_s=100.0 - at) for at in range(3)]
    away, waits_s = find_absences(values, bytes_per_s=1.0)
    assert waits_s == 18.0  # the second has left at 20.0, and the last is saved at 2.0
    assert [one.gone_s for one in away[:2]] == [2.0, 2.0]
    away, waits_s = find_absences(values, bytes_per_s=1.0, passes_s=[25.0])
    assert waits_s == 0.0
    assert [one.gone_s for one in away[:2]] == [25.0, 25.0]
