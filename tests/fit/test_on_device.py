"""fit and levers on a device: the allocator's peak within the budget, half precision, batches from the host."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import recollect
from tests.models import Block

pytestmark = pytest.mark.gpu
pytest.importorskip("scipy")

WORDS, WIDTH = 8192, 256


class Net(nn.Module):
    """Blocks, and a head that is larger than they are if it knows as many words."""

    def __init__(self, words: int = WORDS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(words, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH, 0.0) for _ in range(4))
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def lose(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.view(-1))


def make(words: int = WORDS, batch: int = 4) -> tuple[Net, Tensor]:
    tokens = torch.randint(0, words, (batch, 512), generator=torch.Generator().manual_seed(0))
    return Net(words).cuda().bfloat16(), tokens  # the batch is on the host, as loaders have it


def run(model: nn.Module, tokens: Tensor) -> tuple[float, list[Tensor], int]:
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    loss = lose(model(tokens), tokens)
    loss.backward()
    peak = torch.cuda.max_memory_allocated()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return loss.item(), grads, peak


def test_a_fitted_model_stays_within_its_budget_on_the_device() -> None:
    model, tokens = make(words=256, batch=16)  # the peak is then that of the blocks, which can run again
    here = tokens.cuda()
    run(model, here)
    loss, grads, peak = run(model, here)
    held = torch.cuda.memory_allocated() - sum(grad.nbytes for grad in grads)
    budget = held + int((peak - held) * 0.8)
    with recollect.fit(model, (tokens, tokens), loss=lose, budget=budget) as fitted:
        for _ in range(4):
            found = run(model, here)
        assert found[2] <= budget
        assert found[0] == loss
        for one, other in zip(found[1], grads, strict=True):  # attention's backward adds up in any order
            assert (one.float() - other.float()).norm() <= 1e-2 * other.float().norm()
        assert fitted.plan.forecast is not None


def test_other_tensors_on_the_device_count() -> None:
    """An average of the weights, a teacher: the budget is for all that the process has there."""
    model, tokens = make(words=256, batch=16)
    here = tokens.cuda()
    run(model, here)
    _, grads, peak = run(model, here)
    del grads
    other = torch.empty(peak // 10, dtype=torch.uint8, device="cuda")
    with recollect.fit(model, (tokens, tokens), loss=lose, budget=peak):
        for _ in range(4):
            found = run(model, here)
        assert found[2] <= peak
    del other


def test_a_chunked_loss_takes_less_of_the_device_and_gives_the_same_up_to_rounding() -> None:
    model, tokens = make()
    here = tokens.cuda()
    loss, grads, peak = run(model, here)
    exact = run(copy.deepcopy(model).float(), here)[1]
    with recollect.fit(model, (tokens, tokens), loss=lose, budget="min", levers={"chunked_loss"}) as fitted:
        assert [lever.name for lever in fitted.plan.levers] == ["chunked_loss"]
        for _ in range(4):
            found = run(model, here)
    assert found[2] < 0.8 * peak
    assert found[0] == pytest.approx(loss, rel=1e-3)
    for one, other, right in zip(found[1], grads, exact, strict=True):
        scale = right.norm()
        assert (one.float() - right).norm() <= 1.5 * (other.float() - right).norm() + 1e-2 * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_cross_entropy_on_the_device(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2048, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(WORDS, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
    targets = torch.randint(0, WORDS, (2048,), device="cuda")
    found = recollect.linear_cross_entropy(hidden, weight, targets)
    expected = F.cross_entropy(F.linear(hidden, weight).float(), targets)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    scale = 65536.0 if dtype == torch.float16 else 1.0
    mine = torch.autograd.grad(found * scale, (hidden, weight))
    theirs = torch.autograd.grad(expected * scale, (hidden, weight))
    for one, other in zip(mine, theirs, strict=True):
        assert (one.float() - other.float()).norm() <= 2e-2 * other.float().norm()


def test_random_numbers_of_the_device_are_the_same_in_chunks_of_backward() -> None:
    from recollect._levers.chunked_forward import call_in_chunks

    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.5), nn.Linear(256, 64)).cuda()
    seen: list[Tensor] = []
    module[2].register_forward_hook(lambda *call: seen.append(call[2].detach()))
    tokens = torch.randn(128, 64, device="cuda", requires_grad=True)
    call_in_chunks(module, list(module.parameters()), tokens, chunks=4).sum().backward()
    assert len(seen) == 8
    assert all(torch.equal(one, other) for one, other in zip(seen[:4], seen[4:], strict=True))


@pytest.mark.parametrize("is_autocast", [False, True])
def test_what_regions_cost_the_host_is_measured_with_the_device(is_autocast: bool) -> None:
    from recollect._fit.overheads import measure_overheads

    before = torch.cuda.get_rng_state()
    found = measure_overheads("cuda", is_autocast=is_autocast)
    assert all(0 < one.forward_s(20) < 5e-3 for one in found.values())
    assert torch.equal(before, torch.cuda.get_rng_state())


@pytest.mark.parametrize("is_autocast", [False, True])
def test_what_sending_costs_the_host_is_measured_with_the_device_and_pins_nothing_for_good(is_autocast: bool) -> None:
    from recollect._fit.sending import measure_sending
    from recollect._offload.offload import Offload, measuring_offloads
    from recollect._plan.overheads import USUAL

    before = torch.cuda.get_rng_state()
    sessions = []
    with measuring_offloads() as make_away:

        def make(min_bytes: int) -> Offload:
            sessions.append(make_away(min_bytes)._session)
            return Offload(sessions[-1])

        found = measure_sending(USUAL, "cuda", is_autocast=is_autocast, make_away=make)
        values = [session.report().values for session in sessions]
        host = sessions[0].transfers.host
    assert values[0] == 0
    assert all(values[1:])
    assert all(0 < one.value_forward_s < 1e-3 and 0 < one.value_backward_s < 1e-3 for one in found.values())
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert host is not None
    assert host.pool.held_bytes == 0
