"""One call that says whether a tensor is like another."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from recollect._core.torch_private.guards import make_guard

DIFFERENT: dict[str, Callable[[Tensor], Tensor]] = {
    "shape": lambda x: x[:2],
    "strides": lambda x: x.t().contiguous().t(),
    "dtype": lambda x: x.to(torch.complex128),
    "device": lambda x: x.to("meta"),
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "conjugated": lambda x: x.conj(),
    "layout": lambda x: x.to_sparse(),
    "class": lambda x: torch.nn.Parameter(x, requires_grad=False),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_tensor_that_differs_is_refused(what: str) -> None:
    x = torch.randn(4, 3, dtype=torch.complex64)
    guard = make_guard(x)
    assert guard(torch.randn(4, 3, dtype=torch.complex64))
    assert not guard(DIFFERENT[what](x))


def test_a_negated_tensor_is_refused() -> None:
    x = torch.randn(4, dtype=torch.complex64)
    negated = x.conj().imag
    assert negated.is_neg()
    assert not make_guard(x.imag)(negated)


def test_it_holds_no_tensor() -> None:
    x = torch.randn(4)
    gone = weakref.ref(x)
    guard = make_guard(x)
    del x
    assert gone() is None
    assert guard(torch.randn(4))
