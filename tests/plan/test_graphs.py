"""What a compiled graph keeps within a budget, on steps written by hand."""

from dataclasses import replace

import pytest

from recollect._core.calls import Lifetime, OpCall, Phase, Storage, Value
from recollect._core.profiles import Profile
from recollect._plan.fusing import find_saved
from recollect._plan.graphs import _leave_room, find_keep_set
from recollect._plan.keep_set_search import Judge

pytest.importorskip("scipy")
SMALL, LARGE = 1000, 100_000


def make_step(sizes: list[int]) -> Profile:
    """Each value is looked up by the one before it, and backward reads them all, the last one first."""
    storages = [Storage(bytes=SMALL, lifetime=Lifetime.STEP), *(Storage(bytes=size) for size in sizes)]
    gradients = [Storage(bytes=8) for _ in sizes]
    values = [Value(storage=at, shape=(one.bytes,), bytes=one.bytes) for at, one in enumerate(storages + gradients)]
    made = values[1 : len(sizes) + 1]
    forward = [
        OpCall(op="aten.embedding.default", inputs=(given,), outputs=(out,), call=number)
        for number, (given, out) in enumerate(zip(values, made, strict=False))
    ]
    backward = [
        OpCall(op="aten.sort.default", phase=Phase.BACKWARD, inputs=(saved,), outputs=(gradient,))
        for saved, gradient in zip(reversed(made), values[len(storages) :], strict=True)
    ]
    step = Profile(storages=(*storages, *gradients), calls=(*forward, *backward))
    return Profile(storages=step.storages, calls=step.calls, saved=tuple(find_saved(step)))


@pytest.mark.parametrize("room", [0, 2, 4, 8])
def test_the_largest_value_is_kept_where_dropping_it_lowers_no_peak(room: int) -> None:
    """It is in memory when backward begins, whether it was kept or made again."""
    sizes = [SMALL * (1 + number % 3) for number in range(12)]
    step = make_step([*sizes, LARGE, SMALL])
    found = find_keep_set(step, find_keep_set(step, None).peak_bytes + room * SMALL)
    assert len(sizes) not in found.simulation.recomputed_calls
    assert found.simulation.recomputed_calls


def make_attentive_step(layers: int = 6) -> Profile:
    """Layers that end with an operator of two results: a large one, and a seed that backward reads, too."""
    storages, forward, backward = [Storage(bytes=SMALL, lifetime=Lifetime.STEP)], [], []

    def value(size: int) -> Value:
        storages.append(Storage(bytes=size))
        return Value(storage=len(storages) - 1, shape=(size,), bytes=size)

    given = Value(storage=0, shape=(SMALL,), bytes=SMALL)
    for _ in range(layers):
        wide, mixed, seed, out = value(4 * SMALL), value(2 * SMALL), value(8), value(SMALL)
        forward += [
            OpCall(op="aten.mm.default", inputs=(given,), outputs=(wide,), flops=10**9),
            OpCall(op="aten.attention.default", inputs=(wide,), outputs=(mixed, seed), flops=10**9),
            OpCall(op="aten.mm.default", inputs=(mixed,), outputs=(out,), flops=10**9),
        ]
        read = (wide, mixed, seed, given)
        backward.append(OpCall(op="aten.sort.default", phase=Phase.BACKWARD, inputs=read, outputs=(value(8),)))
        given = out
    step = Profile(storages=tuple(storages), calls=(*forward, *reversed(backward)))
    numbered = tuple(replace(call, call=number) for number, call in enumerate(step.calls))
    return replace(step, calls=numbered, saved=tuple(find_saved(step)))


def test_results_of_one_operator_are_kept_together_or_not_at_all() -> None:
    """A graph that keeps the small one keeps the large one, whatever was planned: then it takes more memory."""
    step = make_attentive_step()
    judge = Judge(step, None)
    attention = [call for call in step.calls[: step.forward_count] if "attention" in call.op]
    seeds = frozenset(call.outputs[1].storage for call in attention)
    results = frozenset(call.outputs[0].storage for call in attention)
    assert judge(seeds).kept == frozenset()
    assert judge(results).kept == judge(results | seeds).kept == results | seeds
    assert judge(seeds | {attention[-1].inputs[0].storage}).kept.isdisjoint(seeds)


def test_a_compilers_copies_of_inputs_leave_no_less_room() -> None:
    """They are its own: what cannot be foreseen is a part of all that it makes."""
    step = make_step([SMALL])
    copied = replace(step, storages=(*step.storages, step.storages[0]))
    assert _leave_room(copied, 10 * SMALL) == _leave_room(step, 10 * SMALL) == 10 * SMALL - 9 * SMALL * 5 // 100
