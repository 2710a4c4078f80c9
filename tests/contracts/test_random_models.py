"""Models of ordinary layers, drawn at random: under any rule, steps of several lengths give the plain gradients.

Recurrent cells make more calls for a longer sequence, experts cut tokens by values, and torch writes in place where
nobody sees it: what a region has learned from one call may not hold for the next.

To hunt: ``RECOLLECT_EXAMPLES=500 pytest tests/contracts/test_random_models.py`` (default 20).
"""

import contextlib
import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import recollect
from recollect import policies

WIDTH, BATCH = 16, 4

# Many of these policies match nothing on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:policy .* this step", "ignore:.*keeps nothing")


class Experts(nn.Module):
    """Each gets the tokens that the router gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.all = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.all):
            rows = (chosen == number).nonzero(as_tuple=True)
            y.index_put_(rows, (expert(x[rows]) * weights[rows][:, None]).to(y.dtype), accumulate=True)
        return x + y


class Average(nn.Module):
    """Takes off a moving average of what it has seen."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.detach().float().mean((0, 1)), alpha=0.1)
        return x - self.mean


class Attention(nn.Module):
    """By torch's own function, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.given(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.1)
        found: Tensor = x + self.out(y.transpose(1, 2).flatten(2))
        return found


class Called(nn.Module):
    """A function of a module's result, or of what it is given."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], part: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.part = function, part

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.part, x)


def scan(_: Any, x: Tensor) -> Tensor:
    state, found = x[:, 0], []
    for step in x.unbind(1):
        state = torch.tanh(state + step)
        found.append(state)
    return torch.stack(found, 1)


def assign(_: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, ::2] = x[:, ::2].sin()
    return y


def mlp(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), activation, nn.Linear(4 * WIDTH, WIDTH))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(nn.GELU()),
    "mlp that writes": lambda: mlp(nn.ReLU(inplace=True)),
    "gated": lambda: Called(lambda part, x: x * torch.sigmoid(part(x)), nn.Linear(WIDTH, WIDTH)),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: Called(lambda part, x: part(x.transpose(1, 2)).transpose(1, 2), nn.BatchNorm1d(WIDTH)),
    "conv": lambda: Called(
        lambda part, x: x + part(x.transpose(1, 2)).transpose(1, 2), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
    ),
    "attention": Attention,
    "heads": lambda: Called(
        lambda part, x: x + part(x, x, x, need_weights=False)[0], nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    ),
    "gru": lambda: Called(lambda part, x: part(x)[0], nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "lstm": lambda: Called(lambda part, x: part(x)[0], nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "dropout": lambda: nn.Dropout(0.1),
    "experts": Experts,
    "average": Average,
    "scan": lambda: Called(scan),
    "assign": lambda: Called(assign),
    "in place": lambda: Called(lambda _, x: (x * 2).add_(x).tanh_()),
    "half": lambda: Called(lambda _, x: torch.cat([x[..., :8].exp().clamp(max=3), x[..., 8:]], -1)),
}


class Block(nn.Module):
    """Layers in a row, perhaps around a residual."""

    def __init__(self, names: list[str], *, has_residual: bool) -> None:
        super().__init__()
        self.layers, self.has_residual = nn.ModuleList(LAYERS[name]() for name in names), has_residual

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        return x + y if self.has_residual else y


RULES: dict[str, Callable[[nn.Module], object]] = {
    "full": recollect.apply,
    "every second": lambda model: recollect.apply(model, every=2),
    "selective": lambda model: recollect.apply(model, "selective"),
    "matrix products": lambda model: recollect.apply(model, policies.save_matmuls),
    "large values": lambda model: recollect.apply(model, policies.save_larger_than(3000)),
    "random values": lambda model: recollect.apply(model, policies.save_random),
    "linear layers": lambda model: recollect.apply(
        model, policies.first_match(policies.save_modules(nn.Linear), policies.save_attention)
    ),
    "all": lambda model: recollect.apply(model, policies.save_all),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a rule, and how it is trained."""

    layers: list[str]
    has_residual: bool
    is_shared: bool
    rule: str
    lengths: list[int]
    backward: str
    has_autocast: bool

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        blocks = [Block(self.layers, has_residual=self.has_residual) for _ in range(2)]
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*blocks, *(blocks if self.is_shared else [])))

    def train(self, model: nn.Module) -> list[Tensor]:
        """The losses and gradients of some steps, and the buffers in the end."""
        found: list[Tensor] = []
        for number, length in enumerate(self.lengths):
            torch.manual_seed(number)
            x = torch.randn(BATCH, length, WIDTH)
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16) if self.has_autocast else contextlib.nullcontext():
                loss = model(x).float().square().mean()
                if self.backward == "two":
                    loss = loss + model(x * 1.5).float().square().mean()
            if self.backward == "retained":
                loss.backward(retain_graph=True)
            loss.backward()
            found += [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]
        return [*found, *model.buffers()]


def is_same(one: list[Tensor], other: list[Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)


cases = st.builds(
    Case,
    layers=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4),
    has_residual=st.booleans(),
    is_shared=st.booleans(),
    rule=st.sampled_from(sorted(RULES)),
    lengths=st.lists(st.sampled_from([12, 16, 20, 24]), min_size=4, max_size=6),
    backward=st.sampled_from(["one", "two", "retained"]),
    has_autocast=st.booleans(),
)


@settings(
    phases=[phase for phase in Phase if phase is not Phase.explain],
    max_examples=int(os.environ.get("RECOLLECT_EXAMPLES", "20")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(case=cases)
def test_steps_of_several_lengths_give_the_plain_gradients(case: Case) -> None:
    model = case.model()
    twin, ours = copy.deepcopy(model), copy.deepcopy(model)
    plain = case.train(model)
    assume(is_same(plain, case.train(twin)))
    with contextlib.suppress(ValueError):  # its blocks are too small to be worth it, or have no such part
        RULES[case.rule](ours)
        assert is_same(case.train(ours), plain)
