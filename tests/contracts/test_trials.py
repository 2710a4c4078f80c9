"""Training after a trial, a profile or a fit, goes on as if there had been none, whatever a model counts."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import recollect
from tests.naming import name_of
from tests.trying import try_all


def batch_for(model: nn.Module) -> Tensor:
    device = next(model.parameters()).device
    return torch.linspace(-1, 1, 128).reshape(8, 16).to(device)


class Layer(nn.Module):
    """A layer to put something beside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(self.change(torch.tanh(self.up(x))))
        return found

    def change(self, x: Tensor) -> Tensor:
        return x


class ActNorm(Layer):
    """Takes its bias and scale from the first batch, and knows by a flag that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.scale = nn.Parameter(torch.zeros(256)), nn.Parameter(torch.ones(256))
        self.is_initialised = False

    def change(self, x: Tensor) -> Tensor:
        if not self.is_initialised:
            self.bias.data.copy_(-x.detach().mean(0))
            self.scale.data.copy_(1 / (x.detach().std(0) + 1))
            self.is_initialised = True
        return (x + self.bias) * self.scale


class ActNormByText(ActNorm):
    def __init__(self) -> None:
        super().__init__()
        self.state = "new"

    def change(self, x: Tensor) -> Tensor:
        self.is_initialised = self.state == "ready"
        self.state = "ready"
        return super().change(x)


class ActNormByBuffer(Layer):
    is_initialised: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(256))
        self.register_buffer("is_initialised", torch.zeros(()))

    def change(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.bias.copy_(torch.where(self.is_initialised > 0, self.bias, -x.mean(0)))
            self.is_initialised.fill_(1)
        return x + self.bias


class DropBlock(Layer):
    """Drops more from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.share = 0, 0.0

    def change(self, x: Tensor) -> Tensor:
        self.step += 1
        self.share = min(0.5, self.share + 0.05)
        return x * (torch.rand_like(x) >= self.share) / (1 + 0.1 * self.step)


class Codebook(Layer):
    codes: Tensor
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 4 * 256).reshape(4, 256))
        self.register_buffer("counts", torch.ones(4))
        self.is_started = False

    def change(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if not self.is_started:
                self.codes.copy_(x[:4])
                self.is_started = True
            nearest = torch.cdist(x, self.codes).argmin(1)
            chosen = nn.functional.one_hot(nearest, 4).float()
            self.counts = 0.9 * self.counts + 0.1 * chosen.sum(0)
            self.codes.mul_(0.9).add_(chosen.T @ x / self.counts[:, None], alpha=0.1)
        return x + (self.codes[nearest] - x).detach()


class Carrying(Layer):
    """Carries a state on, in attributes that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.pair = torch.zeros(256), (torch.zeros(256), 0)
        self.mean: float | None = None
        self.means: list[float] = []

    def change(self, x: Tensor) -> Tensor:
        total, count = self.pair
        self.pair = (total + x.detach().sum(0), count + 1)
        self.last = 0.5 * self.last + 0.5 * x.detach().mean(0)
        self.mean = float(x.detach().mean()) if self.mean is None else 0.9 * self.mean
        self.means.append(self.mean)
        return x + self.last + total / (count + 1) + sum(self.means)


class Hooked(Layer):
    """Has hooks of the model's own beside it, so that some of its flags stay."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.step, self.is_hooked = ActNorm(), 0, False

    def change(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            for part in (self.norm, self.norm.up):
                part.register_forward_hook(lambda module, args, output: output * 1.5)
            self.is_hooked = True
        self.step += 1
        found: Tensor = self.norm(x[:, :16]).repeat(1, 16) * (1 + 0.1 * self.step)
        return found


LAYERS = (ActNorm, ActNormByText, ActNormByBuffer, DropBlock, Codebook, Carrying, Hooked)


def by_profile(model: nn.Module, _: torch.optim.Optimizer) -> None:
    recollect.profile(model, batch_for(model))


def by_one_run(model: nn.Module, _: torch.optim.Optimizer) -> None:
    recollect.profile(model, batch_for(model), timed=False)


def by_profile_of_a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    recollect.profile(lambda: train(model, optimizer, 1))


def by_failure(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def step() -> None:
        train(model, optimizer, 1)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        recollect.profile(step)


def by_dry_profile(model: nn.Module, _: torch.optim.Optimizer) -> None:
    recollect.profile(model, batch_for(model), dry=True)


def by_fit(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pytest.importorskip("scipy")
    recollect.fit(model, batch_for(model), budget="1GiB", optimizer=optimizer)


def by_fit_of_a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pytest.importorskip("scipy")
    recollect.fit(model, step=lambda: train(model, optimizer, 1), budget="1GiB")


TRIALS = (by_profile, by_one_run, by_profile_of_a_step, by_failure, by_dry_profile, by_fit, by_fit_of_a_step)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[list[Tensor]]:
    """The loss and the gradients of each step."""
    found, batch = [], batch_for(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        found.append([loss.detach(), *gradients])
        optimizer.step()
    return found


def make(layer: type[Layer], device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(layer(), layer(), nn.Linear(16, 16))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("trial", TRIALS, ids=name_of)
def test_training_after_a_trial_is_training_without(
    trial: Callable[[nn.Module, torch.optim.Optimizer], None], device: str
) -> None:
    def check(variant: tuple[type[Layer], int]) -> None:
        layer, steps_before = variant
        plain, optimizer = make(layer, device)
        train(plain, optimizer, steps_before)
        expected = train(plain, optimizer, 5)
        model, optimizer = make(layer, device)
        train(model, optimizer, steps_before)
        trial(model, optimizer)
        for one, other in zip(train(model, optimizer, 5), expected, strict=True):
            assert all(map(torch.equal, one, other))
            assert all(value.isfinite().all() for value in one)

    try_all(check, itertools.product(LAYERS, (0, 2)))
