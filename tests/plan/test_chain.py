"""Options of a chain: what fits together is found, and is the quickest, judged by trying everything."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recollect._plan.options import PLAIN, Weighed
from recollect._plan.solvers.chain import can_fit, choose_options

pytest.importorskip("numpy")

OPTIONS = st.builds(
    Weighed,
    option=st.just(PLAIN),
    freed_bytes=st.integers(-2, 20),
    forward_bytes=st.integers(0, 60),
    backward_bytes=st.integers(0, 60),
    again_s=st.integers(0, 20).map(float),
)
CHAINS = st.lists(st.lists(OPTIONS, min_size=1, max_size=3), min_size=1, max_size=5)


def fits(chosen: Sequence[Weighed], rest_bytes: int, budget_bytes: int) -> bool:
    freed = 0
    for one in chosen:
        if max(one.forward_bytes, one.backward_bytes) - freed > budget_bytes:
            return False
        freed += one.freed_bytes
    return rest_bytes - freed <= budget_bytes


def list_fitting(chain: Sequence[Sequence[Weighed]], rest_bytes: int, budget_bytes: int) -> list[float]:
    every = itertools.product(*chain)
    return [sum(one.again_s for one in chosen) for chosen in every if fits(chosen, rest_bytes, budget_bytes)]


@given(chain=CHAINS, rest_bytes=st.integers(0, 60), budget_bytes=st.integers(0, 60))
def test_something_fits_if_what_frees_most_does(chain: list[list[Weighed]], rest_bytes: int, budget_bytes: int) -> None:
    assert can_fit(chain, rest_bytes, budget_bytes) == bool(list_fitting(chain, rest_bytes, budget_bytes))


@given(chain=CHAINS, rest_bytes=st.integers(0, 60), budget_bytes=st.integers(0, 60))
def test_the_quickest_that_fits_is_chosen(chain: list[list[Weighed]], rest_bytes: int, budget_bytes: int) -> None:
    """Of numbers this small every byte counts: nothing is rounded."""
    chain = [[replace(one, freed_bytes=max(0, one.freed_bytes)) for one in options] for options in chain]
    found = choose_options(chain, rest_bytes, budget_bytes)
    fitting = list_fitting(chain, rest_bytes, budget_bytes)
    assert (found is not None) == bool(fitting)
    if found is not None:
        assert fits(found, rest_bytes, budget_bytes)
        assert sum(one.again_s for one in found) == min(fitting)
