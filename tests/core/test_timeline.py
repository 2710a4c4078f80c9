"""How long storages live, and the bytes at each call."""

from recollect._core.calls import Category, Lifetime, OpCall, Phase, Storage, Value
from recollect._core.profiles import Profile
from recollect._core.timeline import Timeline


def call(op: str, reads: list[int], makes: list[int], phase: Phase = Phase.FORWARD, workspace_bytes: int = 0) -> OpCall:
    return OpCall(
        op=op,
        phase=phase,
        inputs=tuple(Value(storage=at) for at in reads),
        outputs=tuple(Value(storage=at) for at in makes),
        workspace_bytes=workspace_bytes,
    )


def test_a_value_is_there_from_its_call_to_its_last_use() -> None:
    storages = [Storage(bytes=1, lifetime=Lifetime.STEP), Storage(bytes=10), Storage(bytes=100), Storage(bytes=1000)]
    calls = [call("a", [0], [1]), call("b", [1], [2]), call("c", [2], [3])]
    timeline = Timeline(storages, calls)
    assert timeline.spans == [(-1, None), (0, 2), (1, 3), (2, 3)]
    assert timeline.bytes_at == [11, 111, 1101]
    assert (timeline.held_bytes, timeline.peak_bytes, timeline.peak_call) == (1, 1101, 2)
    assert timeline.alive_at(1) == [0, 1, 2]


def test_what_was_seen_counts_for_more_than_what_uses_say() -> None:
    storages = [
        Storage(bytes=10, made_at=0, freed_at=2),
        Storage(bytes=100, made_at=1),
        Storage(bytes=5, lifetime=Lifetime.STEP, freed_at=1),
    ]
    calls = [call("a", [2], [0]), call("b", [], [1]), call("c", [], [])]
    assert Timeline(storages, calls).bytes_at == [15, 110, 100]


def test_sizes_are_rounded_and_workspaces_and_fixed_memory_added() -> None:
    storages = [Storage(bytes=1, lifetime=Lifetime.STEP), Storage(bytes=513)]
    calls = [call("a", [0], [1], workspace_bytes=7), call("b", [1], [])]
    timeline = Timeline(storages, calls, rounding_bytes=512, fixed_bytes=3)
    assert timeline.bytes_at == [3 + 512 + 1024 + 7, 3 + 512 + 1024]
    assert timeline.held_bytes == 515


def test_memory_on_another_device_does_not_count() -> None:
    storages = [Storage(bytes=1, lifetime=Lifetime.STEP), Storage(bytes=10, device="cpu")]
    assert Timeline(storages, [call("a", [0], [1])]).bytes_at == [1]


def test_what_backward_is_given_is_there_from_its_start() -> None:
    storages = [Storage(bytes=1, lifetime=Lifetime.GIVEN), Storage(bytes=10)]
    calls = [call("a", [], [1]), call("b", [0, 1], [], Phase.BACKWARD)]
    assert Timeline(storages, calls).bytes_at == [10, 11]


def test_bytes_by_category_add_up_to_the_bytes_at_the_call() -> None:
    storages = (
        Storage(bytes=100, lifetime=Lifetime.STEP, category=Category.PARAMETER),
        Storage(bytes=30, category=Category.ACTIVATION),
        Storage(bytes=200),
    )
    calls = (call("a", [0], [1]), call("b", [1], [2], workspace_bytes=5))
    profile = Profile(storages=storages, calls=calls, fixed_bytes=7)
    found = profile.timeline.bytes_by_category(1)
    assert found == {
        Category.TEMPORARY: 205,
        Category.PARAMETER: 100,
        Category.ACTIVATION: 30,
        Category.LIBRARY: 7,
    }
    assert list(found) == [Category.TEMPORARY, Category.PARAMETER, Category.ACTIVATION, Category.LIBRARY]
    assert sum(found.values()) == profile.peak_bytes
    assert profile.timeline.bytes_by_category(-1) == {Category.PARAMETER: 100, Category.LIBRARY: 7}


def test_a_profile_without_calls_peaks_at_what_it_holds() -> None:
    profile = Profile(storages=(Storage(bytes=5, lifetime=Lifetime.STEP),), calls=())
    assert (profile.peak_bytes, profile.timeline.peak_call, profile.step_s) == (5, -1, None)


def test_what_a_backward_that_never_comes_is_given_is_never_there() -> None:
    storages = [Storage(bytes=1, lifetime=Lifetime.GIVEN), Storage(bytes=10)]
    assert Timeline(storages, [call("a", [], [1])]).bytes_at == [10]
