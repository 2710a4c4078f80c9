"""Modules that draw from Python's or NumPy's generators are recomputed with the numbers that forward drew."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect

np = pytest.importorskip("numpy")

RULES: dict[str, Any] = {"full": None, "selective": "selective", "a policy": recollect.policies.save_matmuls}


class Drawing(nn.Module):
    """Scales by numbers that torch knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        scale = random.random() + float(np.random.rand()) if self.training else 1.0
        found: Tensor = x + self.down(self.up(x * scale).relu())
        return found


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Drawing() for _ in range(3)))


def step(model: nn.Module, seed: int) -> list[Tensor]:
    random.seed(seed)
    np.random.seed(seed)
    model.zero_grad()
    model(torch.ones(4, 8)).square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [*(grad.clone() for grad in grads if grad is not None), torch.tensor([random.random()])]


@pytest.fixture(autouse=True)
def states_kept() -> Any:
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_those_of_the_plain_step_from_the_first_on(rule: str) -> None:
    plain, model = make(), make()
    with recollect.apply(model, RULES[rule]):
        for seed in range(4):
            assert all(map(torch.equal, step(model, seed), step(plain, seed)))


def test_a_mode_in_which_nothing_is_drawn_says_nothing_of_the_other() -> None:
    plain, model = make(), make()
    with recollect.apply(model):
        step(model.eval(), 0)
        assert all(map(torch.equal, step(model.train(), 1), step(plain, 1)))
        assert all(map(torch.equal, step(model, 2), step(plain, 2)))


def test_what_the_user_said_is_done() -> None:
    plain, model = make(), make()
    with recollect.apply(model, {Drawing: {"preserve_rng": {"torch", "numpy"}}}):
        found, expected = step(model, 0), step(plain, 0)
    assert not all(map(torch.equal, found, expected))
