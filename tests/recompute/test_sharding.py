"""What sharding engines do to a module's parameters between forward and backward, without an engine.

With real ones: tests/distributed.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import recollect
from recollect._recompute.changes import addresses_of
from tests.watching import Seen, backward


class Reading(nn.Linear):
    """Notes the weight that each call reads."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.read = Seen[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.read.append(self.weight)
        return super().forward(x.sin()).exp()


def swap_weight(module: Reading) -> nn.Parameter:
    """What an engine does after forward: another object stands for the same weight."""
    other = nn.Parameter(module.weight.detach().clone())
    module._parameters["weight"] = other
    return other


def test_a_parameter_that_someone_replaced_is_put_back_for_recomputation() -> None:
    module = Reading()
    loss = recollect.checkpoint(module)(torch.ones(1, 3, requires_grad=True)).sum()
    other = swap_weight(module)
    backward(loss)
    assert module.read[1] is module.read[0]
    assert module.weight is other


def test_a_parameter_that_fsdp_replaced_is_left_to_it() -> None:
    module = Reading()
    vars(module)["_is_fsdp_managed_module"] = True
    loss = recollect.checkpoint(module)(torch.ones(1, 3, requires_grad=True)).sum()
    other = swap_weight(module)
    backward(loss)
    assert module.read[1] is other
    assert module.weight is other


def test_a_buffer_that_was_replaced_is_put_back_in_fsdp_s_modules_too() -> None:
    module = nn.BatchNorm1d(3).eval()
    vars(module)["_is_fsdp_managed_module"] = True
    x = torch.ones(1, 3, requires_grad=True)
    expected = torch.autograd.grad(module(x).exp().sum(), x)
    loss = recollect.checkpoint(lambda x: module(x).exp())(x).sum()
    module._buffers["running_var"] = torch.full((3,), 9.0)
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected[0])


def test_a_module_that_has_lost_a_parameter_does_not_shift_those_of_others() -> None:
    modules = first, _, third = Reading(), Reading(), Reading()
    loss = recollect.checkpoint(nn.Sequential(*modules))(torch.ones(1, 3, requires_grad=True)).sum()
    bias = first._parameters.pop("bias")
    object.__setattr__(first, "bias", bias)  # read as before, no longer registered
    other = swap_weight(third)
    backward(loss)
    assert all(module.read[1] is module.read[0] for module in modules)
    assert third.weight is other
    assert list(first._parameters) == ["weight"]


def test_a_changed_weight_is_known_by_what_a_wrapper_wraps() -> None:
    one, other = torch.ones(3), torch.zeros(3)
    assert addresses_of(TwoTensor(one, other)) == [one.data_ptr(), other.data_ptr()]
    assert addresses_of(one[1:]) == [one.data_ptr()]
    assert addresses_of(torch.empty(0)) == []
    assert addresses_of(torch.ones(2).to_sparse()) == []


def test_a_wrapped_weight_that_was_changed_before_backward_is_refused() -> None:
    weight = nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    module = nn.ParameterList([weight])
    x = torch.ones(3, requires_grad=True)
    loss = recollect.checkpoint(lambda x: (x * module[0].sin()).exp())(x)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(recollect.ChangedInputError, match="parameter '0' of ParameterList was changed in place"):
        torch.autograd.backward(loss, torch.ones_like(loss))
