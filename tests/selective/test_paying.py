"""Where an accelerator would wait for its host anyway, "selective" keeps nothing: that takes as long as to run again.

Such an accelerator is played by the CPU, on which nothing is ever dropped.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import recollect
from recollect import policies
from recollect._selective import learning
from tests.watching import Operators


@pytest.fixture
def _on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "is_on_accelerator", lambda _: True)


def model(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)),) * 3
    return nn.Sequential(*blocks)


def gradients(layers: nn.Module, rows: int = 8) -> list[Tensor]:
    layers.zero_grad()
    x = torch.linspace(-1, 1, rows * 16).reshape(rows, 16)
    layers(x).square().mean().backward()
    return [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]


def flops(layers: nn.Module, rows: int = 8) -> int:
    with FlopCounterMode(display=False) as counter:
        gradients(layers, rows)
    total: int = counter.get_total_flops()
    return total


def applied(policy: object) -> nn.Module:
    layers = model()
    recollect.apply(layers, {"*": policy})  # type: ignore[dict-item]
    return layers


@pytest.mark.usefixtures("_on_an_accelerator")
def test_what_is_tiny_is_recomputed_as_a_whole() -> None:
    layers, expected = applied("selective"), gradients(model())
    for _ in range(4):
        assert all(map(torch.equal, gradients(layers), expected))
    full = applied("full")
    assert flops(layers) == flops(full) > flops(model())
    assert "too small to be worth keeping" in str(recollect.explain(layers))


@pytest.mark.usefixtures("_on_an_accelerator")
def test_what_a_policy_says_outright_is_kept() -> None:
    layers = applied(policies.save_matmuls)
    for _ in range(3):
        gradients(layers)
    assert flops(layers) == flops(model())


@pytest.mark.usefixtures("_on_an_accelerator")
def test_where_sizes_vary_they_may_grow_so_it_keeps() -> None:
    layers, sizes = applied("selective"), (8, 12, 16, 20, 24, 28)
    for rows in (*sizes, *sizes):
        assert all(map(torch.equal, gradients(layers, rows), gradients(model(), rows)))
    assert flops(layers, 28) < flops(applied("full"), 28)


def test_on_a_cpu_it_keeps() -> None:
    layers = applied("selective")
    for _ in range(3):
        gradients(layers)
    assert flops(layers) < flops(applied("full"))


class Choosing(nn.Module):
    """Two experts, of which each row is given to one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(16), nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        weights, choice = self.router(x).softmax(-1).topk(1)
        made = torch.stack([expert(x).tanh() for expert in self.experts], 1)
        chosen: Tensor = x + weights * made.gather(1, choice[..., None].expand(-1, -1, 16)).squeeze(1)
        return chosen


@pytest.mark.usefixtures("_on_an_accelerator")
def test_what_chooses_is_kept_all_the_same() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(Choosing() for _ in range(3)))
    expected = [gradient.clone() for gradient in gradients(layers)]
    recollect.apply(layers, {"*": "selective"})
    for _ in range(4):
        assert all(map(torch.equal, gradients(layers), expected))
    with Operators() as seen:
        gradients(layers)
    assert "topk" not in seen.again
    assert seen.again.count("addmm") == 3 * len(layers)


class Indexing(nn.Module):
    """Scores its rows without gradients, as sparse attention does to choose among them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.up, self.down = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scores = self.query(x) @ self.key(x).T
        weights = scores.topk(2).values.mean(-1, keepdim=True)
        result: Tensor = x + self.down(nn.functional.gelu(self.up(x))) * weights
        return result


def test_what_is_made_without_gradients_is_not_kept_for_its_time() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(Indexing() for _ in range(2)))
    expected = [gradient.clone() for gradient in gradients(layers)]
    recollect.apply(layers, {"*": "selective"})
    for _ in range(4):
        assert all(map(torch.equal, gradients(layers), expected))
    sites = recollect.explain(layers).regions[0].calls[0].sites
    products = [site for site in sites if "mm" in site.what]
    assert any(site.is_kept for site in products)
    untracked = [site for site in products if "without gradients" in site.by]
    assert untracked
    assert not any(site.is_kept for site in untracked)
