"""The solver answers whatever the units of a problem are, and prints nothing."""

import random
import warnings
from typing import Any

import pytest

from recollect._plan.solvers.highs import Model

pytest.importorskip("scipy")


def solve(seed: int) -> list[float] | None:
    """Keep or make again: values of a few bytes to 100 GB, some of which are made of others."""
    draw = random.Random(seed)
    model, count = Model(), draw.randint(5, 60)
    kept = [model.add(0.0) for _ in range(count)]
    again = [model.add(draw.random() * 10 ** draw.uniform(-6, 0)) for _ in range(count)]
    sizes = [float(int(10 ** draw.uniform(0, 11))) for _ in range(count)]
    limit = model.require(dict(zip(kept, sizes, strict=True)))
    for own in range(count):
        model.require({kept[own]: 1.0, again[own]: 1.0}, at_least=1.0)
        for other in draw.sample(range(own), min(own, draw.randint(0, 3))):
            model.require({kept[other]: 1.0, again[other]: 1.0, again[own]: -1.0}, at_least=0.0)
    return model.solve(limits={limit: float(int(sum(sizes) * draw.random()))})


@pytest.mark.parametrize("seed", [*range(20), 407, 409, 607, 804, 894])  # the last five had none
def test_a_problem_with_bytes_of_all_sizes_has_an_answer_and_nothing_is_printed(
    seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert solve(seed) is not None  # to make all again is always possible
    assert capfd.readouterr() == ("", "")


@pytest.mark.filterwarnings("ignore:Unrecognized options detected")
def test_a_program_starts_no_threads_beside_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS took half the processors for each thread that called it, and spent more on that than on the program."""
    from scipy import optimize

    milp, given = optimize.milp, list[int]()

    def note(*args: Any, options: dict[str, Any], **others: Any) -> Any:
        given.append(options["threads"])
        return milp(*args, options=options, **others)

    monkeypatch.setattr(optimize, "milp", note)
    assert solve(0) is not None
    assert given == [1]


def test_a_program_warns_of_nothing_and_changes_the_filters_of_warnings_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert solve(0) is not None
        before = list(warnings.filters)
        assert solve(1) is not None
        assert list(warnings.filters) == before
