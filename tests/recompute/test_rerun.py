"""What was recomputed is compared with forward when the function has ended: what that must see, in one run."""

import gc
from collections.abc import Callable
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import recollect
from tests.watching import Counted, Seen


def leaf() -> Tensor:
    return torch.linspace(-1, 1, 4, requires_grad=True)


def write_after_saving(x: Tensor) -> Tensor:
    h = x * 2
    y = h.sin()
    h.add_(1)
    return y.exp()


def test_a_tensor_that_is_written_into_after_it_was_saved_is_refused_at_every_call() -> None:
    region = recollect.checkpoint(write_after_saving)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="was changed in place after it had been saved"):
            region(leaf()).sum().backward()


def test_copies_of_an_input_that_was_written_into_cost_no_further_run() -> None:
    fn = Counted(lambda x: x.sin().exp())
    x = leaf() * 1
    x.mul_(2)
    with save_on_cpu():
        recollect.checkpoint(fn)(x).sum().backward()
    assert fn.calls == 2


def write_once_more_when_recomputing(x: Tensor) -> Tensor:
    h = x * 2
    for _ in range(2 if recollect.is_recomputing() else 1):
        h.mul_(1)
    return h.sin()


def test_versions_that_rightly_differ_cost_no_further_run() -> None:
    fn = Counted(write_once_more_when_recomputing)
    region, calls = recollect.checkpoint(fn), []
    for _ in range(3):
        x = leaf()
        region(x).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, 2 * (2 * x.detach()).cos())
        calls.append(fn.calls)
    assert calls == [2, 4, 6]


class PutsAway:
    """Keeps what it was called with."""

    def __init__(self) -> None:
        self.seen = Seen[Tensor]()

    def __call__(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x.exp().sin().cos()


def test_an_input_that_the_function_puts_away_stays_whole() -> None:
    fn, x = PutsAway(), leaf() * 1
    recollect.checkpoint(fn)(x).sum().backward()
    forward, again = fn.seen
    assert forward is x
    assert torch.equal(again, x)


def test_an_input_that_a_put_away_view_shares_stays_whole() -> None:
    views, x = Seen[Tensor](), leaf() * 1

    def fn(x: Tensor) -> Tensor:
        views.append(x[1:].detach())
        return x.exp().sin().cos()

    recollect.checkpoint(fn)(x).sum().backward()
    assert torch.equal(views[1], x[1:].detach())


def test_a_function_may_run_backward_through_what_it_has_computed() -> None:
    def fn(x: Tensor) -> Tensor:
        energy = x.exp().sin().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force.cos() * x

    def gradient_of(run: Callable[[Tensor], Tensor]) -> Tensor:
        x = leaf()
        return torch.autograd.grad(run(x * 1).sum(), x)[0]

    assert torch.equal(gradient_of(fn), gradient_of(recollect.checkpoint(fn)))


def test_a_graph_of_recomputation_that_is_put_away_is_refused_in_words() -> None:
    states, x = Seen[Tensor](), leaf()

    def fn(x: Tensor) -> Tensor:
        states.append(x.exp())
        return states[-1].sin().cos()

    recollect.checkpoint(fn)(x * 1).sum().backward()
    with pytest.raises(recollect.CheckpointError, match="whose values are gone"):
        states[1].sum().backward()


def test_a_failed_recomputation_leaves_nothing_behind() -> None:
    alive = list[ref[Tensor]]()

    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        if recollect.is_recomputing():
            alive.append(ref(y))
            message = "halt"
            raise ValueError(message)
        return y.sin().cos()

    loss = recollect.checkpoint(fn)(leaf() * 1).sum()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="halt"):
            loss.backward()
        assert alive[0]() is None
    finally:
        gc.enable()
