"""The simulator agrees with a machine that keeps, frees and remakes, and recomputation comes as late as it can."""

import itertools
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recollect._core.calls import Lifetime, OpCall, Phase, Storage, Value
from recollect._core.profiles import Profile
from recollect._plan.simulate import Simulation, Simulator, Step, simulate
from tests.plan.steps import call, chain, steps

KEPT = st.sets(st.integers(0, 40))


def run_by_hand(profile: Profile, order: tuple[Step, ...], kept: Collection[int]) -> list[int]:
    """Bytes during each step, by asking at each step, of each block of memory, whether a later step reads it."""
    first_backward = next((at for at, step in enumerate(order) if in_backward(profile, step)), len(order))
    blocks = {
        (storage, "there"): one.bytes for storage, one in enumerate(profile.storages) if is_of(one, Lifetime.STEP)
    }
    used = []
    for at, step in enumerate(order):
        op = profile.calls[step.call]
        if at == first_backward:
            blocks.update(
                {
                    (storage, "there"): one.bytes
                    for storage, one in enumerate(profile.storages)
                    if is_of(one, Lifetime.GIVEN)
                }
            )
        names = {storage for storage, _ in blocks}
        assert op.reads <= names, "a step reads what is gone"
        passing = op.workspace_bytes
        for storage in {value.storage for value in op.outputs} - op.reads:
            if storage in names or is_dead_duplicate(profile, storage, kept, at, first_backward):
                passing += profile.storages[storage].bytes
            else:
                blocks[storage, f"made at {at}"] = profile.storages[storage].bytes
        used.append(sum(blocks.values()) + passing)
        for storage, name in list(blocks):
            if not stays(profile, storage) and not is_read_later(profile, order, storage, at, first_backward, kept):
                del blocks[storage, name]
    return used


def in_backward(profile: Profile, step: Step) -> bool:
    return step.again or profile.calls[step.call].phase is Phase.BACKWARD


def is_of(storage: Storage, lifetime: Lifetime) -> bool:
    return storage.lifetime is lifetime


def stays(profile: Profile, storage: int) -> bool:
    return profile.storages[storage].lifetime in (Lifetime.STEP, Lifetime.RETURNED)


def is_dead_duplicate(profile: Profile, storage: int, kept: Collection[int], at: int, first_backward: int) -> bool:
    """Whether it was there for backward, is done with, and is made once more beside what is wanted."""
    return (
        at >= first_backward
        and storage in kept
        and profile.storages[storage].lifetime is Lifetime.VALUE
        and any(made.storage == storage and made.call < profile.forward_count for made in profile.made())
    )


def is_read_later(
    profile: Profile, order: tuple[Step, ...], storage: int, at: int, first_backward: int, kept: Collection[int]
) -> bool:
    """Whether a step after this one reads the block: one of forward that is not kept is no good to backward."""
    last = first_backward if at < first_backward and storage not in kept else len(order)
    return any(storage in profile.calls[step.call].reads for step in order[at + 1 : last])


@given(steps(), KEPT)
def test_bytes_are_those_of_a_machine_that_keeps_what_a_later_step_reads(profile: Profile, kept: set[int]) -> None:
    simulation = simulate(profile, kept)
    assert list(simulation.bytes_at) == run_by_hand(profile, simulation.steps, kept)


@given(steps(), KEPT)
def test_every_call_runs_once_in_its_order_and_only_forward_calls_run_again_once(
    profile: Profile, kept: set[int]
) -> None:
    order = Simulator(profile).schedule(kept)
    assert [step.call for step in order if not step.again] == list(range(len(profile.calls)))
    again = [step.call for step in order if step.again]
    assert len(set(again)) == len(again)
    assert all(number < profile.forward_count for number in again)


@given(steps(), KEPT)
def test_what_is_made_again_is_needed_by_the_backward_call_right_after_it(profile: Profile, kept: set[int]) -> None:
    order = Simulator(profile).schedule(kept)
    wanted: frozenset[int] = frozenset()
    for step in reversed(order):
        op = profile.calls[step.call]
        if step.again:
            assert wanted & {value.storage for value in op.outputs}
            wanted |= op.reads
        else:
            wanted = op.reads


@given(steps())
def test_keeping_all_recomputes_nothing_and_saves_what_backward_reads(profile: Profile) -> None:
    everything = simulate(profile, range(len(profile.storages)))
    assert everything.recomputed_calls == ()
    assert (everything.recomputed_flops, everything.recomputed_s) == (0, 0)
    read = frozenset[int]().union(*(op.reads for op in profile.calls[profile.forward_count :]))
    made = [made.storage for made in profile.made() if made.call < profile.forward_count]
    assert everything.saved_bytes == sum(
        profile.storages[storage].bytes for storage in made if storage in read or stays(profile, storage)
    )


@given(steps(), KEPT)
def test_what_lives_through_the_step_only_shifts_the_bytes(profile: Profile, kept: set[int]) -> None:
    more = Profile(storages=(*profile.storages, Storage(bytes=100, lifetime=Lifetime.STEP)), calls=profile.calls)
    before, after = simulate(profile, kept), simulate(more, kept)
    assert after.bytes_at == tuple(used + 100 for used in before.bytes_at)
    assert after.held_bytes == before.held_bytes + 100
    assert after.saved_bytes == before.saved_bytes


def test_a_chain_kept_whole_peaks_where_forward_ends() -> None:
    plain = simulate(chain(4), kept=range(1, 5))
    # the input, three links that backward reads, the given gradient and the one being made
    assert plain.bytes_at == (2, 3, 4, 5, 6, 5, 4, 3)
    assert (plain.saved_bytes, plain.held_bytes, plain.peak_bytes, plain.peak_step) == (3, 1, 6, 4)
    assert plain.backward_peak_bytes == 6


def test_a_chain_forgotten_whole_is_made_again_at_its_first_use() -> None:
    forgotten = simulate(chain(4), kept=())
    assert forgotten.saved_bytes == 0
    assert [(step.call, step.again) for step in forgotten.steps[4:]] == [
        (0, True), (1, True), (2, True), (4, False), (5, False), (6, False), (7, False),
    ]  # fmt: skip
    assert (forgotten.recomputed_flops, forgotten.recomputed_s) == (3, 1.5)
    assert forgotten.bytes_at == (2, 3, 3, 3, 3, 4, 5, 6, 5, 4, 3)


def test_recomputation_comes_block_by_block_where_a_link_between_is_kept() -> None:
    halved = simulate(chain(4), kept={2})
    assert halved.recomputed_calls == (2, 0)
    assert halved.bytes_at == (2, 3, 3, 4, 4, 5, 4, 3, 4, 3)  # lower than 6, for two calls instead of three


def test_several_outputs_are_made_again_together_and_a_kept_one_is_dropped_at_once() -> None:
    storages = (
        Storage(bytes=1, lifetime=Lifetime.STEP), Storage(bytes=10), Storage(bytes=100), Storage(bytes=0),
    )  # fmt: skip
    both = call("split", [0], [1, 2])
    profile = Profile(
        storages=storages, calls=(both, call("b", [1], [], Phase.BACKWARD), call("b", [2], [], Phase.BACKWARD))
    )
    assert simulate(profile, kept={2}).bytes_at == (111, 211, 111, 101)
    assert simulate(profile, kept=()).bytes_at == (111, 111, 111, 101)


def test_a_storage_written_in_place_is_made_again_by_all_its_writers() -> None:
    relu = OpCall(op="relu_", inputs=(Value(storage=1),), outputs=(Value(storage=1),), writes=(1,))
    profile = Profile(
        storages=(Storage(bytes=1, lifetime=Lifetime.STEP), Storage(bytes=10)),
        calls=(call("mm", [0], [1]), relu, call("b", [1], [], Phase.BACKWARD)),
    )
    assert simulate(profile, kept=()).recomputed_calls == (0, 1)
    assert simulate(profile, kept=()).bytes_at == (11, 11, 11, 11, 11)


def test_seconds_are_unknown_as_soon_as_one_call_has_none() -> None:
    profile = Profile(
        storages=(Storage(bytes=1, lifetime=Lifetime.STEP), Storage(bytes=1)),
        calls=(
            OpCall(op="sin", inputs=(Value(storage=0),), outputs=(Value(storage=1),)),
            call("b", [1], [], Phase.BACKWARD),
        ),
    )
    assert simulate(profile, kept=()).recomputed_s is None
    assert simulate(profile, kept={1}).recomputed_s == 0


def test_a_schedule_that_reads_what_is_gone_is_refused() -> None:
    profile = chain(2)
    with pytest.raises(ValueError, match=r"step 2 \(f_backward\) reads storage 1, which is not in memory"):
        Simulator(profile).measure([Step(call=number) for number in range(4)], kept=())


def test_a_step_without_calls_holds_what_is_there() -> None:
    nothing = simulate(Profile(storages=(Storage(bytes=5, lifetime=Lifetime.STEP),), calls=()), kept=())
    assert (nothing.peak_bytes, nothing.backward_peak_bytes) == (5, 5)


def test_a_step_whose_forward_goes_on_after_backward_is_not_judged() -> None:
    profile = Profile(
        storages=(Storage(bytes=1, lifetime=Lifetime.STEP),),
        calls=(call("b", [0], [], Phase.BACKWARD), call("f", [0], [])),
    )
    with pytest.raises(
        ValueError, match=r"call 1 \(f\) belongs to forward and comes after backward has begun: only a step"
    ):
        Simulator(profile)


def best_within(profile: Profile, budget: int, choices: Collection[int]) -> Simulation | None:
    """The least recomputation within a peak, by trying every set of kept values."""
    judge = Simulator(profile)
    tried = (judge.run(kept) for size in range(len(choices) + 1) for kept in itertools.combinations(choices, size))
    fitting = [one for one in tried if one.peak_bytes <= budget]
    return min(fitting, key=lambda one: (one.recomputed_flops, one.peak_bytes), default=None)


@pytest.mark.parametrize(
    ("length", "budget", "flops"),
    # Of nine links eight values are needed. Each byte less costs one call, until the longest stretch to be made again
    # and what is kept beside it weigh the same: there single recomputation ends, as the square root says.
    [(9, 11, 0), (9, 10, 1), (9, 9, 2), (9, 8, 3), (9, 7, 4), (9, 6, 5), (9, 5, None)],
)
def test_the_best_of_all_keep_sets_of_a_chain_trades_calls_for_bytes(length: int, budget: int, flops: int) -> None:
    best = best_within(chain(length), budget, range(1, length + 1))
    assert (best and best.recomputed_flops) == flops


@given(steps(most=4), st.integers(0, 40))
def test_no_keep_set_beats_the_best_and_a_larger_budget_never_costs_more(profile: Profile, budget: int) -> None:
    choices = [made.storage for made in profile.made() if made.call < profile.forward_count]
    tight, loose = best_within(profile, budget, choices), best_within(profile, budget + 5, choices)
    if tight is not None:
        assert loose is not None
        assert loose.recomputed_flops <= tight.recomputed_flops
