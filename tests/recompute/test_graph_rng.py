"""Regions under CUDA-graph capture: right without random numbers, with them through `graph_rng`, else refused."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import recollect
from recollect._core.torch_private.schemas import draws
from tests.waiting import refusing_to_wait
from tests.watching import Seen

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda q: (aten.native_dropout.default, (q, 0.5, True), {}), True),
        (lambda q: (aten.native_dropout.default, (q, 0.5, False), {}), False),
        (lambda q: (aten.bernoulli.default, (q,), {}), True),
        (lambda q: (aten._scaled_dot_product_flash_attention.default, (q, q, q), {}), False),
        (lambda q: (aten._scaled_dot_product_flash_attention.default, (q, q, q, 0.1), {}), True),
        (lambda q: (aten._scaled_dot_product_flash_attention.default, (q, q, q), {"dropout_p": 0.1}), True),
        (lambda q: (aten.rrelu_with_noise.default, (q, q), {}), False),
        (lambda q: (aten.rrelu_with_noise.default, (q, q), {"training": True}), True),
    ],
)
def test_an_operator_draws_only_if_its_arguments_let_it(
    call: Callable[[Tensor], tuple[Callable[..., Tensor], tuple[Tensor, ...], dict[str, float]]], expected: bool
) -> None:
    assert draws(*call(torch.ones(1, 1, 2, 2))) is expected


def test_graph_rng_needs_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    with (
        pytest.raises(RuntimeError, match="graph_rng needs an accelerator"),
        recollect.graph_rng(None, regions=1),  # type: ignore[arg-type]
    ):
        pass


class Step:
    """A training step of two blocks, one region each, that can be captured."""

    def __init__(self, dropout: float, *, checkpoint: bool = True) -> None:
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 64)) for _ in range(2)
        ).cuda()
        self.x = torch.randn(32, 64, device="cuda")
        self.calls = [recollect.checkpoint(block) if checkpoint else block for block in self.blocks]

    def __call__(self) -> Tensor:
        x = self.x
        for call in self.calls:
            x = call(x) + x
        loss = functional.mse_loss(x, self.x)
        loss.backward()
        return loss.detach()

    def gradients(self) -> list[Tensor]:
        return [parameter.grad.clone() for parameter in self.blocks.parameters() if parameter.grad is not None]

    def clear(self) -> None:
        for parameter in self.blocks.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()


@pytest.fixture(autouse=True)
def _frees_what_a_failed_capture_left() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def warmed_up(step: Step) -> Step:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    step.clear()
    return step


def captured(step: Step, *, regions: int | None = None) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with nullcontext() if regions is None else recollect.graph_rng(graph, regions=regions), torch.cuda.graph(graph):
        step()
    return graph


@pytest.mark.gpu
def test_a_step_without_random_numbers_is_captured_as_it_is() -> None:
    step, plain = warmed_up(Step(0.0)), warmed_up(Step(0.0, checkpoint=False))
    graph = captured(step)
    step.clear()
    graph.replay()
    plain()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(step.gradients(), plain.gradients(), strict=True))


@pytest.mark.gpu
def test_a_step_with_random_numbers_is_refused_before_the_draw() -> None:
    step = warmed_up(Step(0.5))
    with pytest.raises(recollect.CaptureError, match=r"draws random numbers .*while a CUDA graph is being captured"):
        captured(step)
    torch.cuda.synchronize()
    step.clear()
    step()  # an eager step after it works
    assert all(gradient.isfinite().all() for gradient in step.gradients())


@pytest.mark.gpu
def test_graph_rng_lets_regions_draw_anew_at_each_replay_and_alike_in_recomputation() -> None:
    step = warmed_up(Step(0.5))
    masks = Seen[Tensor]()

    def note(_module: nn.Module, _args: tuple[Tensor, ...], out: Tensor) -> None:
        masks.append((out == 0).clone())

    for block in step.blocks:
        assert isinstance(block, nn.Sequential)
        block[2].register_forward_hook(note)
    graph = captured(step, regions=4)
    # Four calls: two in forward, then the recomputations in backward order.
    forward, again = [masks[0], masks[1]], [masks[3], masks[2]]
    seen = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(forward, again, strict=True))
        seen.append(torch.stack([mask.float() for mask in forward]))
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert not torch.equal(seen[0][0], seen[0][1])
    assert 0.4 < torch.stack(seen).mean().item() < 0.6


@pytest.mark.gpu
def test_graph_rng_says_when_it_has_too_few_regions() -> None:
    step = warmed_up(Step(0.5))
    with pytest.raises(recollect.CaptureError, match=r"graph_rng\(regions=1\)"):
        captured(step, regions=1)


@pytest.mark.gpu
def test_a_region_on_a_device_restores_by_seed_and_offset_without_waiting_for_it() -> None:
    step, plain = Step(0.5), Step(0.5, checkpoint=False)
    found = []
    for one in (step, plain):
        torch.manual_seed(3)
        torch.cuda.synchronize()
        with refusing_to_wait():
            one()
        found.append((one.gradients(), torch.cuda.get_rng_state(), torch.get_rng_state()))
    (ours, device, host), (theirs, plain_device, plain_host) = found
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(device, plain_device)
    assert torch.equal(host, plain_host)


@pytest.mark.gpu
def test_a_generator_of_the_device_among_the_arguments_is_restored() -> None:
    generator = torch.Generator("cuda").manual_seed(5)
    x = torch.randn(64, device="cuda", requires_grad=True)
    seen = Seen[Tensor]()

    def noisy(x: Tensor, *, generator: torch.Generator) -> Tensor:
        noise = torch.rand(64, device="cuda", generator=generator)
        seen.append(noise)
        return (x * noise).exp()

    recollect.checkpoint(noisy)(x, generator=generator).sum().backward()
    offset = generator.get_offset()
    assert torch.equal(*seen)
    generator.manual_seed(5)
    torch.rand(64, device="cuda", generator=generator)
    assert generator.get_offset() == offset
