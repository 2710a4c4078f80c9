"""What was recomputed is compared with forward when the function has ended: what that must see, in one run."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import recollect
from tests.watching import Counted


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
