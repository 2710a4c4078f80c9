"""Generators are read once per boundary, restored only where a region drew, and put back afterwards."""

import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import compat
from recollect._core.pytree import Arguments
from recollect._core.torch_private import generators
from recollect._recompute import rng
from recollect._recompute.host_rng import TorchSource
from tests.naming import name_of
from tests.watching import Counted, Operators, Seen, backward


@pytest.fixture
def x() -> Tensor:
    return torch.ones(3, requires_grad=True)


def noisy(x: Tensor) -> Tensor:
    """Of ones, gives the numbers it draws, which are its gradient too."""
    return x * torch.rand(3)


class Traffic:
    """How often generators are read and written."""

    def __init__(self) -> None:
        self.cpu_reads = self.writes = 0


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    counts = Traffic()
    read_whole = TorchSource._read_whole

    def counted_read(self: TorchSource) -> Tensor:
        counts.cpu_reads += 1
        return read_whole(self)

    def count_writes(kind: Any) -> None:
        write = kind.write

        def counted_write(self: Any, state: Tensor) -> None:
            counts.writes += 1
            write(self, state)

        monkeypatch.setattr(kind, "write", counted_write)

    monkeypatch.setattr(TorchSource, "_read_whole", counted_read)
    count_writes(TorchSource)
    count_writes(rng._StateSource)
    return counts


def test_each_boundary_reads_the_cpu_generator_once(traffic: Traffic, x: Tensor) -> None:
    torch.manual_seed(int(time.time()))  # a state that nobody has read
    loss = recollect.checkpoint(noisy)(x).sum()
    assert traffic.cpu_reads == 2
    backward(loss)
    assert traffic.cpu_reads == 2


def test_a_cpu_generator_that_stands_still_is_not_read_again(traffic: Traffic, x: Tensor) -> None:
    backward(recollect.checkpoint(torch.sin)(x).sum())
    traffic.cpu_reads = 0
    for _ in range(3):
        backward(recollect.checkpoint(torch.sin)(x).sum())
    assert traffic.cpu_reads == 0


def draw_gaussian(_: Tensor) -> Tensor:
    return torch.randn(1, dtype=torch.float64)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("draw", [torch.rand_like, torch.randn_like, torch.dropout, draw_gaussian], ids=name_of)
def test_every_way_of_drawing_is_noticed(
    draw: Callable[..., Tensor], is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a second Gaussian, which waits beside the words and does not move them."""
    if not is_known:
        monkeypatch.setattr(rng._CPU, "_is_known", False)
        monkeypatch.setattr(rng._CPU, "_last", None)
    arguments = (0.5, True) if draw is torch.dropout else ()
    for _ in range(4):
        drawn = Seen[Tensor]()

        def fn(x: Tensor, drawn: Seen[Any] = drawn) -> Tensor:
            drawn.append(draw(x, *arguments).detach())
            return x.exp().sin()

        loss = recollect.checkpoint(fn)(torch.ones(3, requires_grad=True)).sum()
        stands = torch.get_rng_state()
        backward(loss)
        assert torch.equal(drawn[0], drawn[1])
        assert torch.equal(torch.get_rng_state(), stands)


def test_the_memory_of_torchs_generator_is_found_without_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng._CPU, "_is_known", None)
    monkeypatch.setattr(rng._CPU, "_last", None)
    with Operators() as seen:
        rng._CPU.read()
    assert not seen.all
    assert rng._CPU._is_known is (sys.platform == "linux")


def test_memory_that_does_not_show_every_state_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    size_of, own = generators._bytes_at, torch.default_generator
    assert generators.find_memory(own) is not None
    monkeypatch.setattr(generators, "_bytes_at", lambda address: size_of(address) - 64)  # without the Gaussians
    assert generators.find_memory(own) is None


def test_a_region_that_drew_nothing_restores_nothing(traffic: Traffic, x: Tensor) -> None:
    loss = recollect.checkpoint(lambda x: x.exp().sin())(x).sum()
    torch.rand(1)
    backward(loss)
    assert traffic.writes == 0


def test_a_region_that_drew_sets_its_state_and_puts_the_other_back(traffic: Traffic, x: Tensor) -> None:
    loss = recollect.checkpoint(noisy)(x).sum()
    backward(loss, keep=True)
    backward(loss)
    assert traffic.writes == 4


def test_without_preservation_no_generator_is_touched(traffic: Traffic, x: Tensor) -> None:
    y = recollect.checkpoint(noisy, preserve_rng=False)(x)
    backward(y.sum())
    assert (traffic.cpu_reads, traffic.writes) == (0, 0)
    assert x.grad is not None
    assert not torch.equal(x.grad, y)


def test_an_unused_generator_is_not_written(traffic: Traffic, x: Tensor) -> None:
    used, unused = torch.Generator(), torch.Generator()
    region = recollect.checkpoint(lambda x, a, b: (x * torch.rand(3, generator=a)).exp())
    backward(region(x, used, b=unused).sum())
    assert traffic.writes == 2


# The numbers themselves, for each kind of generator

DRAWS: dict[str, tuple[Callable[[], float], Callable[[], Any]]] = {
    "torch": (lambda: float(torch.rand(())), torch.get_rng_state),
    "python": (random.random, random.getstate),
    "numpy": (np.random.random, lambda: np.random.get_state()[2]),  # type: ignore[index]
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def drawn_twice(kind: str, preserve: Any, x: Tensor) -> tuple[float, float, bool]:
    """What forward and recomputation draw, and whether the generator stands after backward as before."""
    draw, state = DRAWS[kind]
    drawn = Seen[float]()

    def fn(x: Tensor) -> Tensor:
        drawn.append(draw())
        return x.exp().sin()

    loss = recollect.checkpoint(fn, preserve_rng=preserve)(x).sum()
    draw()
    before = state()
    backward(loss)
    after = state()
    same = torch.equal(before, after) if isinstance(before, Tensor) else before == after
    return drawn[0], drawn[1], same


@pytest.mark.parametrize("kind", DRAWS)
def test_numbers_are_drawn_again_on_request(kind: str, x: Tensor) -> None:
    forward, again, stands = drawn_twice(kind, [kind], x)
    assert forward == again
    assert stands


@pytest.mark.parametrize(
    ("kind", "preserve"), [("torch", False), ("python", {"torch"}), ("numpy", {"torch", "python"})]
)
def test_numbers_of_other_generators_go_on(kind: str, preserve: Any, x: Tensor) -> None:
    forward, again, stands = drawn_twice(kind, preserve, x)
    assert forward != again
    assert not stands


@pytest.mark.parametrize("kind", DRAWS)
def test_numbers_that_a_region_is_found_to_draw_are_drawn_again(kind: str, x: Tensor) -> None:
    forward, again, stands = drawn_twice(kind, True, x)
    assert forward == again
    assert stands


@pytest.mark.parametrize("kind", ["python", "numpy"])
def test_a_region_that_begins_to_draw_later_draws_the_same_again(kind: str, x: Tensor) -> None:
    draw, _ = DRAWS[kind]
    drawn = Seen[float]()

    def fn(x: Tensor) -> Tensor:
        if is_late:
            drawn.append(draw())
        return x.exp().sin()

    region = recollect.checkpoint(fn)
    for step in range(8):
        is_late = step >= 5
        loss = region(x).sum()
        draw()
        backward(loss)
    assert len(drawn) == 6
    assert list(drawn)[::2] == list(drawn)[1::2]


SECONDS: dict[str, Callable[[], float]] = {
    "python": (lambda: random.gauss(0.0, 1.0)),
    "numpy": np.random.standard_normal,
}
"""Each makes two numbers at a time: every second call takes what waits, and moves nothing else."""


@pytest.mark.parametrize("kind", SECONDS)
@pytest.mark.parametrize("waits", [False, True])
def test_a_gaussian_that_waits_is_part_of_the_state(kind: str, *, waits: bool, x: Tensor) -> None:
    draw = SECONDS[kind]
    drawn = Seen[float]()

    def fn(x: Tensor) -> Tensor:
        drawn.append(draw())
        return x.exp().sin()

    if waits:
        draw()
    backward(recollect.checkpoint(torch.sin)(x).sum())  # reads the state as it is now
    loss = recollect.checkpoint(fn)(x).sum()
    draw()
    backward(loss)
    assert drawn[0] == drawn[1]


def test_a_state_set_again_is_told_from_the_one_without_a_waiting_gaussian(x: Tensor) -> None:
    np.random.standard_normal()
    waiting = np.random.get_state()
    np.random.standard_normal()  # the same words, and nothing waits
    backward(recollect.checkpoint(torch.sin)(x).sum())
    np.random.set_state(waiting)
    drawn = Seen[float]()

    def fn(x: Tensor) -> Tensor:
        drawn.append(np.random.standard_normal())
        return x.exp().sin()

    loss = recollect.checkpoint(fn)(x).sum()
    np.random.standard_normal()
    backward(loss)
    assert drawn[0] == drawn[1]


def test_other_generators_are_read_whole_only_where_they_move(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"python": Counted(random.getstate), "numpy": Counted(np.random.get_state)}
    region = recollect.checkpoint(torch.sin)
    backward(region(x).sum())
    monkeypatch.setattr(random, "getstate", whole["python"])
    monkeypatch.setattr(np.random, "get_state", whole["numpy"])
    for _ in range(3):
        backward(region(x).sum())
    assert [reads.calls for reads in whole.values()] == [0, 0]
    random.random()
    np.random.random()
    backward(region(x).sum())
    assert [reads.calls for reads in whole.values()] == [1, 1]


@pytest.mark.parametrize("kind", ["python", "numpy"])
def test_where_memory_cannot_be_compared_every_reading_is_whole(
    kind: str, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in (rng._PYTHON, rng._NUMPY):
        monkeypatch.setattr(source, "_is_known", False)
        monkeypatch.setattr(source, "_last", None)
    forward, again, stands = drawn_twice(kind, True, x)
    assert forward == again
    assert stands


def test_another_bit_generator_of_numpy_is_preserved(x: Tensor) -> None:
    numbers: Any = np.random
    own = numbers.get_bit_generator()
    try:
        for other in (np.random.MT19937(5), np.random.PCG64(5)):
            numbers.set_bit_generator(other)
            backward(recollect.checkpoint(torch.sin)(x).sum())  # draws nothing
            drawn = Seen[float]()

            def fn(x: Tensor, drawn: Seen[Any] = drawn) -> Tensor:
                drawn.append(np.random.random())
                return x.exp().sin()

            loss = recollect.checkpoint(fn)(x).sum()
            expected = other.state
            backward(loss)
            assert drawn[0] == drawn[1]
            assert str(other.state) == str(expected)
    finally:
        numbers.set_bit_generator(own)


@pytest.mark.parametrize("place", ["positional", "keyword", "nested"])
def test_generators_among_the_arguments_are_restored_and_put_back(place: str, x: Tensor) -> None:
    generator = torch.Generator().manual_seed(1)
    drawn = Seen[Tensor]()

    def fn(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = next(leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)))
        drawn.append(torch.rand(3, generator=found))
        return (x * drawn[-1]).exp()

    region = recollect.checkpoint(fn)
    y = {
        "positional": lambda: region(x, generator),
        "keyword": lambda: region(x, generator=generator),
        "nested": lambda: region(x, options={"rng": [generator]}),
    }[place]()
    torch.rand(3, generator=generator)
    before = generator.get_state()
    backward(y.sum())
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(generator.get_state(), before)


class Noisy(nn.Module):
    """Draws from a generator of its own: made with it, or by its first forward."""

    def __init__(self, kind: str, made: str = "at once") -> None:
        super().__init__()
        self.linear, self.kind, self.made = nn.Linear(3, 3), kind, made
        if made == "at once":
            self._source = OWN[kind]()
        elif made == "instead of None":
            self._source = None

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "_source", None) is None:
            self._source = OWN[self.kind]()
        return torch.tanh(self.linear(x * draw_from(self._source)))


OWN: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "python": lambda: random.Random(1),
    "numpy": lambda: np.random.default_rng(1),
    "old numpy": lambda: np.random.RandomState(1),
}


def draw_from(source: Any) -> Any:
    if isinstance(source, torch.Generator):
        return torch.rand(3, generator=source)
    return source.normal(1, 1) if not isinstance(source, random.Random) else source.gauss(1, 1)


@pytest.mark.parametrize("policy", [None, recollect.policies.save_matmuls])
@pytest.mark.parametrize("made", ["at once", "instead of None", "out of nothing"])
@pytest.mark.parametrize("kind", OWN)
def test_generators_that_modules_hold_are_restored_and_put_back(kind: str, made: str, policy: Any) -> None:
    def gradients(*, is_region: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.Sequential(*[Noisy(kind, made) for _ in range(2)])
        if is_region:
            recollect.apply(layers, {"*": "full" if policy is None else policy})
        for _ in range(4):
            backward(layers(torch.ones(2, 3)).sum())
        return [cast("Tensor", parameter.grad) for parameter in layers.parameters()]

    assert all(map(torch.equal, gradients(is_region=True), gradients(is_region=False)))


@pytest.mark.parametrize("kind", OWN)
def test_generators_that_a_function_closes_over_are_restored_and_put_back(kind: str, x: Tensor) -> None:
    def gradient(wrap: Callable[[Any], Any]) -> Tensor:
        source = OWN[kind]()
        region = wrap(lambda x: torch.sin(x * draw_from(source)))
        (found,) = torch.autograd.grad(region(x).sum() + region(x).sum(), x)
        return torch.as_tensor(found * draw_from(source))

    assert torch.equal(gradient(recollect.checkpoint), gradient(lambda fn: fn))


def test_methods_of_pythons_own_generator_are_not_read_twice(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.uniform
    reads: list[Any] = []
    monkeypatch.setattr(rng._PythonInstance, "read", reads.append)
    region = recollect.checkpoint(lambda x: x * draw(0, 1))
    backward(region(x).sum())
    assert reads == []


def test_two_regions_draw_their_own_numbers_whatever_the_order_of_backward(x: Tensor) -> None:
    region = recollect.checkpoint(noisy)
    first, second = region(x), region(x)
    for y in (first, second):
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, y)


def test_reseeding_between_forward_and_backward_changes_nothing(x: Tensor) -> None:
    y = recollect.checkpoint(noisy)(x)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    backward(y.sum())
    assert x.grad is not None
    assert torch.equal(x.grad, y)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_region_that_reseeds_is_recomputed_alike(x: Tensor) -> None:
    def fn(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return (x * torch.rand(3)).exp()

    backward(recollect.checkpoint(fn)(x).sum())
    assert x.grad is not None


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("preserve", [True, False])
def test_compat_takes_preserve_rng_state(x: Tensor, use_reentrant: bool, preserve: bool) -> None:
    fn = Counted(noisy)
    y = compat.checkpoint(fn, x, use_reentrant=use_reentrant, preserve_rng_state=preserve)
    backward(y.sum())
    assert fn.calls == 2
    assert x.grad is not None
    assert torch.equal(x.grad, y) is preserve


class CountingGenerator:
    """A generator of a device that counts its draws."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.offset = 0

    def get_offset(self) -> int:
        return self.offset


@pytest.mark.parametrize("draws", [False, True])
def test_a_region_may_start_the_accelerator_if_nothing_is_drawn_there(
    monkeypatch: pytest.MonkeyPatch, x: Tensor, draws: bool
) -> None:
    # Inductor does, to ask what the device can do, when it compiles for the CPU.
    started, generator = [False], CountingGenerator()
    device = SimpleNamespace(is_initialized=lambda: started[0], default_generators=[generator])
    monkeypatch.setattr(rng, "accelerator", lambda: ("cuda", device))
    monkeypatch.setattr(rng, "_has_offset", lambda _: True)

    def fn(x: Tensor) -> Tensor:
        started[0] = True
        generator.offset += 4 * draws
        return x.exp()

    with pytest.raises(RuntimeError, match="initialized the accelerator") if draws else nullcontext():
        recollect.checkpoint(fn)(x).sum().backward()


def test_no_accelerator_is_started_by_a_region(x: Tensor) -> None:
    before = rng.accelerator_started()
    backward(recollect.checkpoint(noisy)(x).sum())
    assert rng.accelerator_started() is before


def test_devices_without_a_generator_are_passed_over() -> None:
    assert rng.source_of_device(torch.device("meta")) is None
    x = torch.ones(3, device="meta", requires_grad=True)
    backward(recollect.checkpoint(lambda x: x.exp().sin())(x).sum())
    assert x.grad is not None


def test_regions_that_begin_with_equal_states_store_them_once() -> None:
    states: list[rng.RngState | None] = []
    torch.manual_seed(0)
    outer, inner = (rng.RngState(frozenset({"torch"}), Arguments((), {})) for _ in range(2))
    torch.rand(1)
    states.extend(state.settle("r") for state in (inner, outer))
    later = rng.RngState(frozenset({"torch"}), Arguments((), {}))
    torch.rand(1)
    states.append(later.settle("r"))
    first, second, third = (state.entries[0][1] for state in states if state is not None)
    assert first is second
    assert third is not first
