"""Levers in compiled code: the graph is left for them, so that chunks still follow each other; gradients are right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import recollect
from recollect._core.levers import PlannedLever

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks, and hides its warning otherwise

WORDS = 128
TOKENS = torch.randint(0, WORDS, (2, 32), generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A part that treats every token by itself, and a head larger than that."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 16)
        self.mlp = nn.Sequential(nn.Linear(16, hidden), nn.GELU(), nn.Linear(hidden, 16))
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        logits: Any = self.head(x + self.mlp(x)).float()
        return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), tokens[:, 1:].reshape(-1))


def gradients(model: nn.Module, call: Any) -> list[Tensor]:
    model.zero_grad()
    call(TOKENS).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(("name", "path", "lowers"), [("chunked_loss", "head", 0.7), ("chunked_mlp", "mlp", 0.95)])
def test_a_lever_works_in_compiled_code(name: str, path: str, lowers: float) -> None:
    model = Net()
    expected = gradients(model, model)
    plain = recollect.profile(model, TOKENS, timed=False).peak_bytes
    with recollect.apply(model, recollect.Plan(levers=(PlannedLever(name=name, paths=(path,), parts=4),))):
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            torch.testing.assert_close(gradients(model, compiled), expected)
        model.zero_grad()
        assert recollect.profile(compiled, TOKENS, timed=False).peak_bytes < lowers * plain


LEVERS: dict[str, tuple[dict[str, Any], float]] = {
    "values": ({}, 0.9),
    "chunked_loss": ({"chunked_loss": "head"}, 0.7),
    "chunked_mlp": ({"chunked_mlp": "mlp"}, 0.7),
    "micro_batches": ({"micro_batches": 2}, 0.75),
}
"""What a budget needs, and the budget as a share of the plain step's peak."""


def net_for(name: str) -> Net:
    return Net(hidden=512 if name == "chunked_mlp" else 64)


def compiled_as_a_whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="aot_eager")
    return model


def check_fit(model: nn.Module, call: Any, name: str, compiled_after: Callable[[], None] = lambda: None) -> None:
    """Fit a model with what a budget needs, and train it for a step."""
    other = net_for(name)
    expected = gradients(other, other)
    levers, share = LEVERS[name]
    budget = int(share * recollect.profile(other, TOKENS, timed=False).peak_bytes)
    with recollect.fit(call, TOKENS, budget=budget, levers=levers) as fitted:
        assert tuple(lever.name for lever in fitted.plan.levers) == tuple(levers)
        assert fitted.plan.regions or levers
        compiled_after()
        model.zero_grad()
        fitted.forward_backward(TOKENS)
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients(model, call), expected)


def compiled_in_parts(model: Any) -> Any:
    """As torchtitan and others do it: blocks are replaced by what torch.compile returns."""
    model.mlp = torch.compile(model.mlp, backend="aot_eager")
    return model


@pytest.mark.parametrize("compiled", [compiled_as_a_whole, compiled_in_place, compiled_in_parts])
@pytest.mark.parametrize("name", LEVERS)
def test_a_model_that_is_compiled_already_is_fitted_as_it_is_written(name: str, compiled: Any) -> None:
    pytest.importorskip("scipy")
    model = net_for(name)
    check_fit(model, compiled(model), name)


@pytest.mark.parametrize("name", LEVERS)
def test_a_fitted_model_is_compiled_after(name: str) -> None:
    pytest.importorskip("scipy")
    model = net_for(name)
    check_fit(model, model, name, lambda: model.compile(backend="aot_eager"))
