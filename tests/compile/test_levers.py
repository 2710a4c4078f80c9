"""Levers in compiled code: the graph is left for them, so that chunks still follow each other; gradients are right."""

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

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
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


@pytest.mark.parametrize("lever", ["chunked_loss", "chunked_mlp"])
def test_levers_are_refused_for_a_model_that_is_compiled_already(lever: str) -> None:
    pytest.importorskip("scipy")
    model: Any = torch.compile(Net(), backend="eager")
    with pytest.raises(ValueError, match=f"lever '{lever}': the model is compiled, and modules inside"):
        recollect.fit(model, TOKENS, budget="min", levers={lever})


def test_a_compiled_block_does_not_keep_the_loss_from_being_chunked() -> None:
    pytest.importorskip("scipy")
    model = Net()
    model.mlp.compile(backend="eager")
    with pytest.raises(ValueError, match="lever 'chunked_mlp': 'mlp' of the model is compiled"):
        recollect.fit(model, TOKENS, budget="min", levers={"chunked_mlp"})
    expected = gradients(model, model)
    with recollect.fit(model, TOKENS, budget="min", levers={"chunked_loss"}) as fitted:
        assert [lever.name for lever in fitted.plan.levers] == ["chunked_loss"]
        torch.testing.assert_close(gradients(model, model), expected)


@pytest.mark.parametrize(("backend", "text"), [("eager", "no plan fits"), ("aot_eager", "has no backward pass")])
def test_a_compiled_model_that_cannot_be_planned_is_to_be_fitted_first(backend: str, text: str) -> None:
    pytest.importorskip("scipy")
    model: Any = torch.compile(Net(), backend=backend)
    with pytest.raises(ValueError, match=text) as caught:
        recollect.fit(model, TOKENS, budget="1KiB")
    assert caught.value.__notes__ == [
        "Modules inside of compiled code cannot be seen: fit the model first, then compile it"
    ]
