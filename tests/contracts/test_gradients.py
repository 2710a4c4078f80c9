"""Outputs, gradients, buffers and random numbers of a checkpointed step are those of the plain step, to the bit."""

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import recollect
from recollect import compat
from tests.contracts.stepping import (
    Derive,
    by_backward,
    by_backward_to_some,
    by_backward_twice,
    by_double_backward,
    by_grad,
    is_same,
    plain_step,
    run_step,
)
from tests.corpus import CASES, Case
from tests.trying import try_all

Engine = Callable[..., Any]


def nested_twice(fn: Callable[..., Any]) -> Callable[..., Any]:
    return recollect.checkpoint(lambda *args, **kwargs: recollect.checkpoint(fn)(*args, **kwargs))


ENGINES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "native": recollect.checkpoint,
    "to the end": functools.partial(recollect.checkpoint, early_stop=False),
    "values": functools.partial(recollect.checkpoint, check="values"),
    "tolerance": functools.partial(recollect.checkpoint, check=recollect.ValueCheck(atol=0.0, every=2)),
    "unchecked": functools.partial(recollect.checkpoint, check="none"),
    "nested twice": nested_twice,
    "nested directly": lambda fn: recollect.checkpoint(recollect.checkpoint(fn)),
    "compat": lambda fn: functools.partial(compat.checkpoint, fn, use_reentrant=False),
    "compat debug": lambda fn: functools.partial(compat.checkpoint, fn, use_reentrant=False, debug=True),
    "reentrant": lambda fn: functools.partial(compat.checkpoint, fn, use_reentrant=True),
}


def assert_same(case: Case, engine: str, derive: Derive) -> None:
    plain, ours = plain_step(case, derive), run_step(case, ENGINES[engine], derive)
    for what in ("outputs", "gradients", "buffers", "random_states"):
        expected, got = getattr(plain, what), getattr(ours, what)
        assert len(expected) == len(got)
        differing = [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if not is_same(a, b)]
        assert differing == [], f"{what} {differing} differ"


def assert_same_by_all(case: Case, derive: Derive, *, reentrant: bool) -> None:
    engines = [engine for engine in ENGINES if engine != "reentrant" or reentrant]
    try_all(lambda engine: assert_same(case, engine, derive), engines)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("derive", [by_backward, by_backward_twice])
def test_backward_gives_what_the_plain_step_gives(case: Case, derive: Derive) -> None:
    assert_same_by_all(case, derive, reentrant=case.has_reentrant)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("derive", [by_grad, by_backward_to_some])
def test_partial_passes_give_what_the_plain_step_gives(case: Case, derive: Derive) -> None:
    assert_same_by_all(case, derive, reentrant=False)


@pytest.mark.parametrize("case", [case for case in CASES if case.has_double_backward], ids=str)
def test_double_backward_gives_what_the_plain_step_gives(case: Case) -> None:
    assert_same_by_all(case, by_double_backward, reentrant=False)


CALL_AUTOGRAD = ("gradient inside", "backward inside")


@pytest.mark.parametrize("case", [case for case in CASES if not case.name.startswith(CALL_AUTOGRAD)], ids=str)
def test_without_grad_mode_it_is_the_plain_call(case: Case) -> None:
    def without_grad(loss: Tensor, wanted: Sequence[Tensor]) -> list[Any]:
        return [loss.requires_grad, *(tensor.grad for tensor in wanted)]

    with torch.no_grad():
        assert_same(case, "native", without_grad)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_has_gradients_to_compare(case: Case) -> None:
    assert any(grad is not None for grad in plain_step(case, by_backward).gradients)


@pytest.mark.parametrize("change", ["outputs", "gradients", "buffers", "random_states"])
def test_the_comparison_can_fail(change: str) -> None:
    case = next(case for case in CASES if case.name == "batch norm")

    def spoil(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Tensor) -> Tensor:
            y: Tensor = fn(x)
            if change == "outputs":
                return y * 1.0000001
            if change == "gradients":
                return y.view_as(y) + (x.sum() - x.detach().sum()) * 1e-5
            if change == "buffers":
                fn(x)
            else:
                torch.rand(1)
            return y

        return run

    with mock.patch.dict(ENGINES, {"native": spoil}), pytest.raises(AssertionError, match=change):
        assert_same(case, "native", by_backward)
