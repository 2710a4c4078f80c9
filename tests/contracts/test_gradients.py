"""Outputs, gradients, buffers and random numbers of a checkpointed step are those of the plain step, to the bit."""

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

import recollect
from recollect import compat
from tests.corpus import CASES, Call, Case

Engine = Callable[..., Any]
Derive = Callable[[Tensor, Sequence[Tensor]], list[Any]]


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


# Ways to ask for gradients


def by_backward(loss: Tensor, wanted: Sequence[Tensor]) -> list[Any]:
    torch.autograd.backward(loss)
    return [tensor.grad for tensor in wanted]


def by_backward_twice(loss: Tensor, wanted: Sequence[Tensor]) -> list[Any]:
    torch.autograd.backward(loss, retain_graph=True)
    torch.autograd.backward(loss)
    return [tensor.grad for tensor in wanted]


def by_grad(loss: Tensor, wanted: Sequence[Tensor]) -> list[Any]:
    return list(torch.autograd.grad(loss, wanted, allow_unused=True))


def by_backward_to_some(loss: Tensor, wanted: Sequence[Tensor]) -> list[Any]:
    for tensor in wanted:
        torch.autograd.backward(loss, inputs=[tensor], retain_graph=True)
    return [tensor.grad for tensor in wanted]


def by_double_backward(loss: Tensor, wanted: Sequence[Tensor]) -> list[Any]:
    first = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
    torch.autograd.backward(to_loss(first))
    return [*first, *(tensor.grad for tensor in wanted)]


def to_loss(outputs: Any) -> Tensor:
    """A number that every differentiable output has a nonlinear part in."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in _pytree.tree_leaves(outputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            total = total + real.double().sin().sum()
    return total


class Outcome:
    """All that a step leaves behind, as tensors."""

    def __init__(self, call: Call, outputs: Any, gradients: list[Any]) -> None:
        self.outputs = [leaf for leaf in _pytree.tree_leaves(outputs) if leaf is not None]
        self.gradients = gradients
        self.buffers = call.buffers()
        self.random_states = [generator.get_state() for generator in call.generators()]


def run_step(case: Case, engine: Callable[[Callable[..., Any]], Callable[..., Any]], derive: Derive) -> Outcome:
    torch.manual_seed(0)
    call = case.build()
    fn = engine(call.fn)
    torch.manual_seed(1)
    with case.around():
        outputs = fn(*call.args, **call.kwargs)
    loss = to_loss(outputs)
    torch.rand(1)  # backward does not start where forward ended
    return Outcome(call, outputs, derive(loss, call.parameters()))


@functools.cache
def plain_step(case: Case, derive: Derive) -> Outcome:
    with mock.patch.object(recollect, "checkpoint", lambda fn, **_: fn):
        return run_step(case, lambda fn: fn, derive)


def is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return type(one) is type(other) and bool(one == other)
    if one.dtype != other.dtype or one.stride() != other.stride():
        return False
    return torch.equal(one.resolve_conj(), other.resolve_conj())


def assert_same(case: Case, engine: str, derive: Derive) -> None:
    plain, ours = plain_step(case, derive), run_step(case, ENGINES[engine], derive)
    for what in ("outputs", "gradients", "buffers", "random_states"):
        expected, got = getattr(plain, what), getattr(ours, what)
        assert len(expected) == len(got)
        differing = [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if not is_same(a, b)]
        assert differing == [], f"{what} {differing} differ"


def combinations(allowed: Callable[[str, Case], bool]) -> pytest.MarkDecorator:
    pairs = [(engine, case) for case in CASES for engine in ENGINES if allowed(engine, case)]
    return pytest.mark.parametrize(("engine", "case"), pairs, ids=lambda value: str(value))


def any_engine(engine: str, case: Case) -> bool:
    return engine != "reentrant" or case.has_reentrant


def without_reentry(engine: str, case: Case) -> bool:
    return engine != "reentrant" and bool(case)


@combinations(any_engine)
@pytest.mark.parametrize("derive", [by_backward, by_backward_twice])
def test_backward_gives_what_the_plain_step_gives(engine: str, case: Case, derive: Derive) -> None:
    assert_same(case, engine, derive)


@combinations(without_reentry)
@pytest.mark.parametrize("derive", [by_grad, by_backward_to_some])
def test_partial_passes_give_what_the_plain_step_gives(engine: str, case: Case, derive: Derive) -> None:
    assert_same(case, engine, derive)


@combinations(lambda engine, case: without_reentry(engine, case) and case.has_double_backward)
def test_double_backward_gives_what_the_plain_step_gives(engine: str, case: Case) -> None:
    assert_same(case, engine, by_double_backward)


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
