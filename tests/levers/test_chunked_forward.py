"""A module that runs on some tokens at a time: same results and gradients, less memory."""

import pytest
import torch
from torch import Tensor, nn

from recollect._levers.chunked_forward import call_in_chunks
from recollect._profile.memory import LiveBytes


def make(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 8)).to(dtype)


def run(module: nn.Module, tokens: Tensor, chunks: int) -> tuple[Tensor, list[Tensor | None]]:
    leaf = tokens.clone().requires_grad_()
    module.zero_grad()
    result = call_in_chunks(module, list(module.parameters()), leaf, chunks=chunks)
    result.square().sum().backward()
    return result.detach(), [leaf.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("shape", [(12, 8), (2, 12, 8), (2, 3, 5, 8)])
@pytest.mark.parametrize("chunks", [2, 5, 100])
def test_results_and_gradients_are_those_of_the_whole(shape: tuple[int, ...], chunks: int) -> None:
    module, tokens = make(), torch.randn(*shape, dtype=torch.float64)
    plain, cut = run(module, tokens, 1), run(module, tokens, chunks)
    torch.testing.assert_close(cut, plain)


def test_frozen_parameters_and_inputs_get_no_gradient() -> None:
    module, tokens = make(), torch.randn(12, 8, dtype=torch.float64)
    module[0].requires_grad_(False)
    call_in_chunks(module, list(module.parameters()), tokens, chunks=3).sum().backward()
    assert module[0].weight.grad is None
    assert module[3].weight.grad is not None


def test_what_is_dropped_at_random_is_the_same_in_backward() -> None:
    module, tokens = make(dropout=0.5), torch.ones(64, 8, dtype=torch.float64, requires_grad=True)
    seen: list[Tensor] = []
    module[2].register_forward_hook(lambda *call: seen.append(call[2].detach()))
    state = torch.get_rng_state()
    result = call_in_chunks(module, list(module.parameters()), tokens, chunks=4)
    after = torch.get_rng_state()
    result.sum().backward()
    assert len(seen) == 8
    for forward, backward in zip(seen[:4], seen[4:], strict=True):
        assert torch.equal(forward, backward)
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(state, after)


def test_under_autocast_backward_casts_as_forward_did() -> None:
    module, tokens = make(dtype=torch.float32), torch.randn(12, 8, requires_grad=True)
    kinds: list[torch.dtype] = []
    module[0].register_forward_hook(lambda *call: kinds.append(call[2].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        result = call_in_chunks(module, list(module.parameters()), tokens, chunks=2)
    result.sum().backward()
    assert kinds == [torch.bfloat16] * 4
    assert module[0].weight.grad is not None
    assert module[0].weight.grad.dtype == torch.float32


def test_a_chunks_working_memory_is_there_at_a_time() -> None:
    module, tokens = make(dtype=torch.float32), torch.randn(4096, 8, requires_grad=True)
    peaks = []
    for chunks in (1, 16):
        with LiveBytes() as meter:
            call_in_chunks(module, list(module.parameters()), tokens, chunks=chunks).sum().backward()
        peaks.append(meter.peak_bytes)
    assert peaks[1] < peaks[0] / 3
