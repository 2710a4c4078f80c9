"""Out of memory under a plan: everything is put back, the plan is tightened, and the step runs once more."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect

pytest.importorskip("scipy")

X = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Has a buffer that it writes into, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(6))
        self.layers, self.drop = nn.Sequential(*blocks), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
        self.turn += 1
        result: Tensor = self.drop(self.layers(x)).square().mean() / self.turn
        return result


class Failing:
    """Raises as torch does when memory runs out, when gradients come to the second layer, so many times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, *_: Any) -> None:
        if self.times:
            self.times -= 1
            message = "CUDA out of memory. Tried to allocate 2.00 GiB."
            raise torch.OutOfMemoryError(message)


def fit(net: Net, *, recover: bool = True) -> recollect.Fitted:
    budget = int(recollect.profile(net, X).peak_bytes * 0.85)
    return recollect.fit(net, X, budget=budget, recover=recover)


def gradients(net: Net) -> list[Tensor | None]:
    return [None if one.grad is None else one.grad.clone() for one in net.parameters()]


def test_the_step_is_repeated_once_with_the_same_results(caplog: pytest.LogCaptureFixture) -> None:
    net, plain = Net(), Net()
    fitted = fit(net)
    before = fitted.plan
    for _ in range(2):  # the second time there are gradients already
        state = torch.get_rng_state()
        expected = plain(X)
        expected.backward()
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        handle = net.layers[1].register_full_backward_hook(Failing(1))
        loss = fitted.forward_backward(X)
        handle.remove()
        assert torch.equal(loss, expected.detach())
        assert torch.equal(torch.get_rng_state(), after)
        assert net.calls == plain.calls
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)
    assert fitted.plan.peak_bytes < before.peak_bytes
    assert "memory ran out under a plan for" in caplog.text
    fitted.remove()
    assert not any("forward" in vars(module) for module in net.modules())


def test_a_second_failure_is_the_users_with_everything_put_back() -> None:
    net = Net()
    fitted = fit(net)
    fitted.forward_backward(X)
    before, calls, state = gradients(net), net.calls.clone(), torch.get_rng_state()
    net.layers[1].register_full_backward_hook(Failing(2))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fitted.forward_backward(X)
    assert caught.value.__notes__ == [
        ("recollect.fit: memory ran out again under a tighter plan. Gradients are as they were before the step")
    ]
    for one, other in zip(gradients(net), before, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert net.calls == calls
    assert torch.equal(torch.get_rng_state(), state)


def test_where_no_plan_is_tighter_the_step_is_not_repeated() -> None:
    net = Net()
    fitted = recollect.fit(net, X, budget="min", recover=True)
    net.layers[1].register_full_backward_hook(Failing(1))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fitted.forward_backward(X)
    assert caught.value.__notes__[0].startswith("recollect.fit: the step is not repeated: no plan fits")
    assert gradients(net) == [None] * 24


def test_where_an_optimizer_has_stepped_in_backward_the_step_is_not_repeated() -> None:
    net = Net()
    fitted = fit(net)
    weight = net.get_parameter("layers.5.2.weight")
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    net.layers[1].register_full_backward_hook(Failing(1))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fitted.forward_backward(X)
    assert caught.value.__notes__ == [
        ("recollect.fit: the step is not repeated: parameters were changed before memory ran out")
    ]


def test_nothing_is_repeated_unless_asked_for() -> None:
    net = Net()
    fitted = fit(net, recover=False)
    net.layers[1].register_full_backward_hook(Failing(1))
    with pytest.raises(torch.OutOfMemoryError):
        fitted.forward_backward(X)
    assert net.calls == 1
