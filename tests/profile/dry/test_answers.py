"""What a dry step is told where it asks for values."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import recollect
from recollect._profile.dry.roofline import find_device
from recollect._profile.dry.step import dry_step

CPU = find_device("cpu")
MASK = torch.tensor([True, False, True])

ANSWERS: dict[str, tuple[Callable[[Tensor], Any], Any, str]] = {
    "a float": (lambda x: x.sum().item(), 1.0, "a number"),
    "floats": (lambda x: x[0].tolist(), [1.0] * 4, "a number"),
    "a condition": (lambda x: 1 if x.sum() > 0 else 2, 2, "a condition"),
    "a check": (lambda x: bool((x > 0).all()), True, "a check with all()"),
    "an alarm": (lambda x: bool((x > 0).any()), False, "a condition"),
    "a distribution": (
        lambda x: torch.distributions.Normal(x, x.exp(), validate_args=True).mean.shape,
        (3, 4),
        "a check with all()",
    ),  # Dynamo turns the check off where it was used
    "whether to drop": (lambda x: bool(x.dim() == 2 and torch.rand(1) > 0.1), True, "a random number"),
    "whether to keep": (lambda x: bool(x.dim() == 2 and torch.rand([]) < 0.1), False, "a random number"),
    "equality": (lambda x: torch.equal(x, x + 1), False, "a comparison of two tensors"),
    "NaN": (lambda x: bool(x.isnan().sum() == 0), True, "a test for NaN"),
    "infinity": (lambda x: bool(torch.isfinite(x).all()), True, "a test for NaN"),
    "a mask as index": (lambda x: x[x > 0].shape, (12,), "a mask"),
    "a mask of rows as index": (lambda x: x[x[:, 0] > 0].shape, (3, 4), "a mask"),
    "where": (lambda x: [part.shape for part in torch.where(x > 0)], [(12,), (12,)], "a mask"),
    "masked_select": (lambda x: x.masked_select(x > 0).shape, (12,), "a mask"),
    "unique": (lambda x: x.unique().shape, (12,), "the input of unique"),
    "bincount": (lambda x: x[0].long().bincount(minlength=5).shape, (5,), "the input of bincount"),
    "targets of ctc_loss": (
        lambda x: (
            functional.ctc_loss(
                x[:, None].log_softmax(-1), x[:1, :2].long(), torch.tensor([3]), x[0, :1].long(), reduction="none"
            ).shape
        ),
        (1,),
        "the length of ctc_loss's longest target",
    ),
    "how often a mask is true": (lambda x: (x > 0).sum(1).tolist(), [4] * 3, "the count of a mask"),
    "an array": (lambda x: np.asarray(x[0]).tolist(), [1.0] * 4, "a number"),
    "an index": (lambda x: x[0].topk(1).indices[0].item(), 0, "an index"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_what_changes_memory_little_is_answered_and_noted(case: str) -> None:
    ask, answer, what = ANSWERS[case]
    with dry_step([], torch.ones(3, 4), device=CPU) as dry:
        assert ask(dry.values) == answer
        noted = [note for note in dry.notes if note.startswith(what)]
    assert len(noted) == 1
    assert "at test_answers.py:" in noted[0]
    assert "has no value in a dry profile: taken as" in noted[0]


def test_what_a_step_was_told_is_said_where_it_fails_afterwards() -> None:
    def check(x: Tensor) -> Tensor:
        assert x.sum() > 0, "positive only"
        return x.sum()

    with pytest.raises(AssertionError, match="positive only") as error:
        recollect.profile(check, torch.ones(3, requires_grad=True), dry=True)
    [note] = error.value.__notes__
    assert note.startswith(
        "The cause may be what a dry profile has to assume; a real one (dry=False) assumes nothing:\n  a condition at "
    )
    assert "taken as False" in note


def test_an_expert_chosen_by_number_gets_as_many_tokens_as_on_average() -> None:
    with dry_step([], torch.rand(6, 8), device=CPU) as dry:
        chosen = dry.values.topk(2, dim=-1).indices
        mask = chosen.view(-1).clone() == 3
        assert dry.values.repeat_interleave(2, dim=0)[mask].shape == (2, 8)  # 12 choices among 8, rounded up
        assert [part.shape[0] for part in torch.where(chosen == 3)] == [2, 2]
        assert int(mask.sum()) == 2
        assert bool(mask.any())
        assert not bool((dry.values > 2).any())
        assert dry.values[dry.values.argmax(dim=-1) == 1].shape == (1, 8)
        assert any("true in 12.5%, as often as on average" in note for note in dry.notes)
        assert any("a check with any()" in note for note in dry.notes)


def test_a_one_hot_mask_is_true_as_often_as_it_is_on_average() -> None:
    with dry_step([], torch.zeros(64, 2), device=CPU) as dry:
        hot = functional.one_hot(dry.values.long(), num_classes=8).permute(2, 1, 0)
        positions, tokens = torch.where(hot[3])
    assert positions.shape == tokens.shape == (16,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grouped_products_of_any_dtype_have_their_shape(dtype: torch.dtype) -> None:
    x, w = torch.ones(16, 32, dtype=dtype), torch.ones(4, 32, 64, dtype=dtype)
    ends = torch.tensor([4, 8, 12, 16], dtype=torch.int32)
    with dry_step([], (x, w, ends), device=CPU) as dry:
        one, other, offs = dry.values
        assert torch._grouped_mm(one, other, offs=offs).shape == (16, 64)


class Experts(nn.Module):
    """Routed token by token, in a loop over those that are hit."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(16, experts)
        self.up = nn.Parameter(torch.randn(experts, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).topk(1).indices
        mask = functional.one_hot(chosen, num_classes=len(self.up)).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            _, tokens = torch.where(mask[expert[0]])
            out = out.index_add(0, tokens, x[tokens] @ self.up[expert[0]])
        return out


def test_experts_in_a_loop_take_about_what_they_take_in_a_real_step() -> None:
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(256, 16)
    real, dry = (recollect.profile(model, x, dry=dry) for dry in (False, True))
    assert dry.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)


class Mixture(nn.Module):
    """Experts that are modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))


class LoopOverThoseHit(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        mask = functional.one_hot(chosen, num_classes=4).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            place, tokens = torch.where(mask[number].squeeze(0))
            out.index_add_(0, tokens, self.experts[number](x[tokens]) * weights[tokens, place, None])
        return x + out


class LoopOverMasks(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens = (chosen == number).any(-1)
            if tokens.any():
                out[tokens] += expert(x[tokens]) * (weights * (chosen == number))[tokens].sum(-1, keepdim=True)
        return x + out


@pytest.mark.parametrize("kind", [LoopOverThoseHit, LoopOverMasks])
def test_each_expert_of_a_loop_is_run_and_has_gradients(kind: type[Mixture]) -> None:
    model, x = nn.Sequential(*(kind() for _ in range(4))), torch.randn(64, 16)
    with recollect.apply(model, {"*": "full"}):
        real, dry = (recollect.profile(model, x, dry=dry, loss=Tensor.sum) for dry in (False, True))
    assert dry.peak_bytes == pytest.approx(real.peak_bytes, rel=0.03)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(4, 8, 16).transpose(1, 2),
    "permuted": lambda: torch.randn(4, 6, 6, 8).permute(0, 3, 2, 1),
    "channels last": lambda: torch.randn(4, 8, 6, 6).contiguous(memory_format=torch.channels_last),
    "as it is": lambda: torch.randn(4, 8, 6),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_norm_lays_its_results_out_as_its_kernel_does(layout: str) -> None:
    def strides(x: Tensor) -> tuple[Any, Any]:
        x.requires_grad_()
        norm = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[x.dim()](x.shape[1])
        out = norm(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        return out.stride(), grad.stride()

    x = LAYOUTS[layout]()
    expected = strides(x)
    with dry_step([], x.detach(), device=CPU) as dry:
        assert strides(dry.values) == expected


def test_views_have_the_strides_that_their_kernel_gives_where_a_size_is_one() -> None:
    """A table of positions for images of another size: its gradient is copied, because its channels are not last."""

    def strides(table: Tensor) -> Any:
        table.requires_grad_()
        images = functional.interpolate(table.reshape(1, 4, 4, 8).permute(0, 3, 1, 2), size=(2, 2), mode="bilinear")
        (grad,) = torch.autograd.grad((images.flatten(2).permute(0, 2, 1) * torch.ones(3, 4, 8)).sum(), table)
        return grad.stride()

    table = torch.ones(1, 16, 8)
    expected = strides(table.clone())
    with dry_step([], table, device=CPU) as dry:
        assert strides(dry.values) == expected


def test_torch_logs_nothing_where_an_operator_refuses(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError), dry_step([], torch.ones(2, 3), device=CPU) as dry:
        dry.values @ dry.values
    assert not caplog.records


SPARSE: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(500, 16, sparse=True),
    "bags, summed": lambda: nn.EmbeddingBag(500, 16, sparse=True, mode="sum"),
    "bags, averaged": lambda: nn.EmbeddingBag(500, 16, sparse=True, mode="mean"),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 says it once in a process
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_gradients_take_what_they_take_in_a_real_step(kind: str) -> None:
    model = nn.Sequential(SPARSE[kind](), nn.Linear(16, 16))
    numbers = torch.arange(256).reshape(4, 64)

    real = recollect.profile(model, numbers, loss=lambda out: out.square().mean())
    dry = recollect.profile(model, numbers, loss=lambda out: out.square().mean(), dry=True, device="cpu")
    assert dry.peak_bytes == real.peak_bytes
