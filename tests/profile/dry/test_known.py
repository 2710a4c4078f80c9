"""A dry step answers by the whole numbers and masks that it is given."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import recollect
from recollect._profile.dry.roofline import find_device
from recollect._profile.dry.step import dry_step

CPU = find_device("cpu")
TOKENS = torch.tensor([[3, 1, 4, 0], [1, 5, 0, 0]])

HELD = torch.tensor(4)

ASKED: dict[str, Callable[[Tensor], Any]] = {
    "a condition": lambda x: bool((x > 0).all()),
    "a number": lambda x: x.sum().item(),
    "numbers": lambda x: x[0].tolist(),
    "a size": lambda x: torch.zeros(int((x > 0).sum(-1).max())).shape,
    "where a mask is true": lambda x: [part.shape for part in torch.where(x > 2)],
    "a mask as index": lambda x: x[x > 0].shape,
    "masked_select": lambda x: x.masked_select(x > 0).shape,
    "equality": lambda x: torch.equal(x, x.clone()),
    "unique": lambda x: x.unique().shape,
    "bincount": lambda x: x.flatten().bincount().shape,
    "numbers in a list": lambda x: torch.tensor([x.max(), x[0].max() - 1]).tolist(),
    "a number as text": lambda x: f"expert_{x[0, 0]} {x[0, 1]:02d}",
    "numbers of its own": lambda x: torch.arange(5).add(x[0, 0]).max().item(),
    "a mask of floats of its own": lambda x: bool((torch.ones(2, 4) * (x >= 0)).bool().all()),
    "a real number that it holds": lambda x: torch.arange(9)[: HELD + x.dim()].shape,
    "a view of a view": lambda x: x.t()[1:, 0].contiguous().tolist(),
}


@pytest.mark.parametrize("case", ASKED)
def test_what_is_made_of_given_numbers_alone_is_known_and_needs_no_note(case: str) -> None:
    expected = ASKED[case](TOKENS)
    with dry_step([], TOKENS.clone(), device=CPU) as dry:
        assert ASKED[case](dry.values) == expected
        assert len(dry.notes) == 1


def test_a_known_mask_chooses_as_many_of_unknown_values_as_it_does_in_the_real_step() -> None:
    class Merging(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(8, 4)

        def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
            mask = tokens == 0
            hidden = self.embed(tokens)
            merged = hidden.clone()
            merged[mask, :] = hidden[mask, :] + features
            result: Tensor = merged.sum() + hidden.masked_select(mask[..., None]).sum()
            return result

    features = torch.ones(int((TOKENS == 0).sum()), 4)
    dry = recollect.profile(Merging(), TOKENS, features, dry=True, device="cpu")
    real = recollect.profile(Merging(), TOKENS, features)
    assert dry.peak_bytes == real.peak_bytes
    assert not any("mask" in note for note in dry.notes)


def test_numbers_that_were_written_into_are_known_if_what_was_written_is() -> None:
    with dry_step([], TOKENS.clone(), device=CPU) as dry:
        view, shifted = dry.values[0], torch.zeros_like(dry.values)
        shifted[:, 1:] = dry.values[:, :-1]
        shifted[:, 0] = 7
        dry.values.mul_(2)
        assert view.tolist() == [6, 2, 8, 0]
        assert shifted.masked_fill_(shifted == 0, 9).tolist() == [[7, 3, 1, 4], [7, 1, 5, 9]]
        dry.values[1].random_()
        with pytest.raises(Exception, match="_local_scalar_dense"):
            view.sum().item()
        assert shifted[0, 0].item() == 7


def test_random_numbers_are_not_known() -> None:
    with dry_step([], TOKENS.clone(), device=CPU) as dry:
        drawn = torch.randint_like(dry.values, 10)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            drawn.sum().item()


def test_the_given_numbers_stay_as_they_are() -> None:
    given = TOKENS.clone()
    with dry_step([], given, device=CPU) as dry:
        dry.values.zero_()
    assert torch.equal(given, TOKENS)


@pytest.mark.parametrize("tokens", [24, 17])
def test_a_mask_is_left_out_where_the_real_step_leaves_it_out(tokens: int) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))
    ids, mask = torch.ones(2, 24, dtype=torch.long), torch.ones(2, 24, dtype=torch.long)
    mask[1, tokens:] = 0
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask, "use_cache": False}
    real, dry = (recollect.profile(model, kwargs=batch, dry=is_dry) for is_dry in (False, True))
    assert dry.peak_bytes == pytest.approx(real.peak_bytes, rel=0.01)


class Speech(torch.nn.Module):
    """Frames to letters, as speech recognisers train."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 6))

    def forward(self, frames: Tensor, letters: Tensor) -> Tensor:
        mask = letters > 0
        log_probs = self.layers(frames).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(frames),), frames.shape[1])
        return torch.nn.functional.ctc_loss(log_probs, letters.masked_select(mask), lengths, mask.sum(-1))


class SpeechWithLists(Speech):
    """The same, given lengths as lists."""

    def forward(self, frames: Tensor, letters: Tensor) -> Tensor:
        log_probs = self.layers(frames).log_softmax(-1).transpose(0, 1)
        found: Tensor = torch.nn.CTCLoss()(
            log_probs, letters.clamp_min(1), [20, 18], target_lengths=(3, letters.shape[1])
        )
        return found


@pytest.mark.parametrize("kind", [Speech, SpeechWithLists])
def test_a_ctc_loss_is_as_large_as_its_longest_target(kind: type[Speech]) -> None:
    given = torch.randn(2, 20, 8), TOKENS
    real = recollect.profile(kind(), *given, timed=False)
    dry = recollect.profile(kind(), *given, dry=True, device="cpu")
    assert dry.peak_bytes == real.peak_bytes
    assert not any("ctc_loss" in note for note in dry.notes)


class Counting(torch.nn.Module):
    """Counts its calls, and perhaps what is in them, and scales by the first count."""

    counts: Tensor

    def __init__(self, *, writes_unknown: bool) -> None:
        super().__init__()
        self.writes_unknown = writes_unknown
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("counts", torch.zeros(2, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.counts[0].add_(1)
        if self.writes_unknown:
            self.counts[1].add_((x > 0).sum())
        result: Tensor = self.linear(x).tanh() / float(self.counts[0])
        return result


def test_what_a_region_copies_for_recomputation_is_known_too() -> None:
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4, momentum=None), torch.nn.ReLU()),
        Counting(writes_unknown=False),
    ]
    model, x = torch.nn.Sequential(*blocks), torch.randn(8, 4)
    with recollect.apply(model, {"*": "full"}):
        real, dry = (recollect.profile(model, x, dry=dry, loss=Tensor.sum) for dry in (False, True))
    assert dry.peak_bytes == real.peak_bytes


def test_what_a_region_copies_is_unknown_where_unknown_values_were_written_into_it() -> None:
    model, x = torch.nn.Sequential(Counting(writes_unknown=True)), torch.randn(8, 4)
    with recollect.apply(model, {"*": "full"}), pytest.raises(ValueError, match="needs the values of a tensor"):
        recollect.profile(model, x, dry=True, loss=Tensor.sum)
