"""A step timed as it runs without us, the optimizer's step apart from it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recollect._inspect import plain as plain_module
from recollect._inspect.plain import PlainTimes, time_plainly

CPU = torch.device("cpu")
X = torch.ones(4, 8)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)


def timed(model: nn.Module, optimizer: torch.optim.Optimizer, *, peak_bytes: int = 2**40) -> PlainTimes:
    def run() -> None:
        optimizer.zero_grad()
        model(X).sum().backward()
        optimizer.step()

    return time_plainly(run, rewind=lambda: None, device=CPU, apart=[optimizer], peak_bytes=peak_bytes)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for one in optimizer.state.values() for value in one.values() if isinstance(value, Tensor)]
    return [tensor.clone() for tensor in (*model.parameters(), *states)]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_what_an_optimizer_writes_is_put_back(kind: type[torch.optim.Optimizer], steps_before: int) -> None:
    model = nn.Linear(8, 8)
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    for _ in range(steps_before):
        model(X).sum().backward()
        optimizer.step()
    before = state_of(model, optimizer)
    found = timed(model, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(state_of(model, optimizer), before, strict=False))
    assert found.is_apart
    assert found.optimizer is not None
    assert found.body.wall_s >= found.body.host_s > 0
    assert "step" not in vars(optimizer)


def test_without_room_for_copies_the_optimizer_does_not_step() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    before = state_of(model, optimizer)
    found = timed(model, optimizer, peak_bytes=64)
    assert all(torch.equal(one, other) for one, other in zip(state_of(model, optimizer), before, strict=True))
    assert found.optimizer is None
    assert not optimizer.state


def test_an_optimizer_that_fails_is_put_back() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            super().step()
            raise ZeroDivisionError

    model = nn.Linear(8, 8)
    optimizer = Failing(model.parameters(), lr=0.1)
    before = state_of(model, optimizer)
    with pytest.raises(ZeroDivisionError):
        timed(model, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(state_of(model, optimizer), before, strict=True))
    assert "step" not in vars(optimizer)


def test_a_short_step_is_run_more_often_than_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    rewound: list[int] = []

    def count() -> int:
        time_plainly(lambda: runs.append(1), rewind=lambda: rewound.append(1), device=CPU, apart=(), peak_bytes=0)
        found, runs[:] = len(runs), []
        return found

    assert count() == plain_module._MOST
    monkeypatch.setattr(plain_module, "_SHORT_S", 0.0)
    assert count() == plain_module._FEWEST
    assert len(rewound) == plain_module._MOST + plain_module._FEWEST


def test_backward_is_timed_as_a_part_of_the_step() -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def step() -> None:
        loss = (x @ x).sum()
        loss.backward(retain_graph=True)
        torch.autograd.grad(loss, x)

    backward = torch.autograd.graph._engine_run_backward
    body = time_plainly(step, rewind=lambda: None, device=CPU, apart=(), peak_bytes=0).body
    assert body.backward_s is not None
    assert 0 < body.backward_s < body.host_s
    assert torch.autograd.graph._engine_run_backward is backward
    assert torch.autograd._engine_run_backward is backward  # type: ignore[attr-defined]


def test_a_backward_inside_of_a_backward_is_timed_once_and_a_step_that_fails_leaves_the_engine() -> None:
    class Reentrant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            with torch.enable_grad():
                inner = ctx.saved_tensors[0].detach().requires_grad_()
                torch.autograd.backward((inner * 2).sum())
            return gradient * 2

    x = torch.randn(8, requires_grad=True)

    def step() -> None:
        out: Tensor = Reentrant.apply(x)  # type: ignore[no-untyped-call]
        out.sum().backward()

    body = time_plainly(step, rewind=lambda: None, device=CPU, apart=(), peak_bytes=0).body
    assert body.backward_s is not None
    assert 0 < body.backward_s < body.host_s
    backward = torch.autograd.graph._engine_run_backward
    with pytest.raises(ZeroDivisionError):
        time_plainly(lambda: 1 / 0, rewind=lambda: None, device=CPU, apart=(), peak_bytes=0)
    assert torch.autograd.graph._engine_run_backward is backward
    assert torch.autograd._engine_run_backward is backward  # type: ignore[attr-defined]
