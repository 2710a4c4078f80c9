"""Kept operators are intercepted alone: ordinary code is quick, sizes are free, and who looks on changes nothing."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import recollect
from recollect import Decision, Site, policies
from recollect._core.torch_private.intercept import Interception
from recollect._profile.memory import LiveBytes
from recollect._selective import serving, way
from recollect._selective.knowledge import knowledge_of

MM = torch.ops.aten.mm.default


class Ordinary(nn.Module):
    """What training code does: batch norm, dropout, writes in place; through a view, so that it is not replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(self.up(x))
        h.view(-1).relu_()
        y: Tensor = self.down(self.drop(h))
        return x + y


def gradients(call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return list(torch.autograd.grad(call(x).square().sum(), [*module.parameters()]))


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def pair() -> tuple[Ordinary, Ordinary]:
    torch.manual_seed(0)
    plain, ours = Ordinary(), Ordinary()
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def test_ordinary_code_is_exact_and_runs_no_kept_product_again(pair: tuple[Ordinary, Ordinary]) -> None:
    plain, ours = pair
    region = recollect.checkpoint(ours, policy=policies.save_matmuls)
    for step in range(4):
        x = torch.randn(5, 8)
        assert_same(gradients(plain, plain, x, step), gradients(region, ours, x, step))
        assert torch.equal(plain.norm.running_mean, ours.norm.running_mean)  # type: ignore[arg-type]
    (call,) = recollect.explain(region).regions[0].calls
    assert call.way.startswith("by running the function again without the operators that are kept; it has no program")


class Router(nn.Module):
    """Chooses as mixtures of experts do: the largest scores, which it scales in place."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.value = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(self.scores(x).softmax(-1), 2, dim=-1)
        weights /= weights.sum(-1, keepdim=True)
        filled = torch.empty_like(x).copy_(self.value(x))  # what keeps a region from being replayed
        return x + (filled * weights[..., :1] + chosen[..., :1]).sin()


@pytest.mark.parametrize("retain", [False, True])
def test_what_is_written_after_it_was_kept_needs_no_dispatch_mode(
    monkeypatch: pytest.MonkeyPatch, retain: bool
) -> None:
    torch.manual_seed(0)
    router, x = Router(), torch.randn(5, 8)
    region = recollect.checkpoint(router, policy=policies.save_ops("aten.topk.default", "aten.addmm.default"))

    def step(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        loss, leaves = call(x).square().sum(), [*router.parameters()]
        passes = [torch.autograd.grad(loss, leaves, retain_graph=retain) for _ in range(1 + retain)]
        return [gradient for found in passes for gradient in found]

    expected = step(router)
    for _ in range(3):
        assert_same(step(region), expected)
    monkeypatch.setattr(way, "KeepingMode", pytest.fail)
    assert_same(step(region), expected)


def flops_of(step: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("around", ["step", "backward"])
def test_a_flop_counter_sees_what_runs_and_breaks_nothing(pair: tuple[Ordinary, Ordinary], around: str) -> None:
    plain, ours = pair
    region = recollect.checkpoint(ours, policy=policies.save_matmuls)
    x = torch.randn(5, 8, requires_grad=True)
    for _ in range(3):
        gradients(region, ours, x)
    if around == "step":
        expected = flops_of(lambda: plain(x).sum().backward())
        assert [flops_of(lambda: region(x).sum().backward()) for _ in range(4)] == [expected] * 4
    else:
        y, z = plain(x).sum(), region(x).sum()
        assert flops_of(z.backward) == flops_of(y.backward)
    (knowledge,) = knowledge_of(ours)
    assert all(decisions.is_learned and decisions.breaks == 0 for decisions in knowledge.all_decisions())


def test_a_replayed_region_is_replayed_again_after_a_counter_looked_on() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    region = recollect.checkpoint(module, policy=policies.save_matmuls)
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(3):
        region(x).sum().backward()
    expected = flops_of(lambda: module(x).sum().backward())
    assert [flops_of(lambda: region(x).sum().backward()) for _ in range(5)] == [expected] * 5
    (call,) = recollect.explain(region).regions[0].calls
    assert call.way == "by replaying what backward asks for"


class Meter(TorchDispatchMode):
    """Looks at memory as anybody would who has no device to ask: each storage counts until it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.calls = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls += torch.ones(2).sum().int().item() == 2  # it may call torch, too
        for found in tree_leaves(result):
            if isinstance(found, Tensor):
                storage = found.untyped_storage()
                if not hasattr(storage, "is_metered"):
                    storage.is_metered = True  # type: ignore[attr-defined]
                    self.change(storage.nbytes())
                    weakref.finalize(storage, self.change, -storage.nbytes())
        return result

    def change(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.norm(self.up(x)).relu_())
        return y + x


def test_a_region_is_learned_and_replayed_under_somebody_elses_meter_which_sees_the_peak_as_it_is() -> None:
    module = Overwriting()
    plain = copy.deepcopy(module)
    region = recollect.checkpoint(module, policy=policies.save_matmuls)
    x = torch.randn(512, 64)

    def peak_of_third_step(meter: Any) -> Any:
        for _ in range(3):
            with meter() as found:
                assert_same(gradients(region, module, x), gradients(plain, plain, x))
        return found

    metered = peak_of_third_step(Meter)
    (call,) = recollect.explain(region).regions[0].calls
    assert call.way == "by replaying what backward asks for"
    assert metered.calls
    quiet = peak_of_third_step(LiveBytes)
    assert metered.peak == pytest.approx(quiet.peak_bytes, rel=0.02)


class Routed(nn.Module):
    """Picks rows by their values, and multiplies in a way that adds the bias in place where no mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.expert, self.gates = nn.Linear(8, 8), nn.GRU(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.sum(-1) > 0).nonzero(as_tuple=True)
        y = torch.zeros_like(x)
        y.index_put_(rows, self.expert(x[rows]), accumulate=True)
        found: Tensor = self.gates((x + y).transpose(0, 1))[0]
        return found


def test_sizes_that_values_decide_do_not_undo_what_was_proven() -> None:
    torch.manual_seed(0)
    module = Routed()
    ours = recollect.checkpoint(module, policy=policies.save_larger_than(600))
    for seed in range(6):
        x = torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(seed)) + seed / 10
        assert_same(gradients(ours, module, x), gradients(module, module, x))


class Unrolled(nn.Module):
    """Makes as many products as the sequence is long, into which it writes, then one that it does not write into."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.up, self.down = nn.GRU(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.up(self.cells(x)[0]).relu_())
        return found


def test_a_call_that_goes_another_way_is_served_nothing_that_is_not_proven() -> None:
    """A longer sequence: what was learned to be the last product is one of those that are written into."""
    torch.manual_seed(0)
    module = Unrolled()
    ours = recollect.checkpoint(module, policy=policies.save_matmuls)
    for length in (24, 24, 16, 16, 20, 20, 12, 24):
        x = torch.randn(length, 4, 8, generator=torch.Generator().manual_seed(length))
        assert_same(gradients(ours, module, x), gradients(module, module, x))


def test_from_the_third_size_on_nothing_is_learned_and_nothing_grows(pair: tuple[Ordinary, Ordinary]) -> None:
    plain, ours = pair
    region = recollect.checkpoint(ours, policy=policies.save_matmuls)
    for size in range(2, 30):
        x = torch.randn(size, 8)
        assert_same(gradients(plain, plain, x, size), gradients(region, ours, x, size))
    (knowledge,) = knowledge_of(ours)
    assert len(knowledge.all_decisions()) == 3


def test_a_policy_that_goes_by_sizes_is_asked_at_each_size() -> None:
    asked: list[int] = []

    def keep_large(site: Site) -> Decision:
        asked.append(site.bytes)
        return Decision.SAVE if site.bytes >= 512 else Decision.RECOMPUTE

    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())
    region = recollect.checkpoint(module, policy=keep_large)
    for size in (2, 4, 8, 32, 3, 64):
        x = torch.randn(size, 8, requires_grad=True)
        region(x).sum().backward()
    for size, runs in ((32, 0), (4, 2)):
        x = torch.randn(size, 8, requires_grad=True)
        y = region(x).sum()
        again = flops_of(y.backward) - flops_of(module(x).sum().backward)
        assert again == runs * 2 * size * 8 * 8


@pytest.fixture
def met() -> Iterator[list[Any]]:
    found: list[Any] = []

    def meet(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found.append(op)
        return op(*args, **kwargs)

    interception = Interception(frozenset({MM}), meet)
    interception.enter()
    yield found
    interception.leave()
    torch.ones(2, 2) @ torch.ones(2, 2)
    assert MM not in found[1:], "left, it meets nothing"


def test_an_interception_meets_the_operators_that_were_chosen_and_no_others(met: list[Any]) -> None:
    (torch.ones(2, 2) @ torch.ones(2, 2)).sin()
    assert met == [MM]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every execution that is served."""
    found = list[object]()

    class Noted(serving.Serving):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            found.append(self)

    monkeypatch.setattr(way, "Serving", Noted)
    return found


class Casting(nn.Module):
    """Computes something in higher precision, as most norms do; through a view, so that it is not replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.up(x.to(torch.float64).sin().to(x.dtype))
        h.view(-1).relu_()
        y: Tensor = self.down(h)
        return x + y.to(x.dtype)


@pytest.mark.parametrize("around", ["nothing", "autocast", "autocast without its cache"])
def test_kept_casts_are_served_like_any_operator(around: str, served: list[object]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Casting() for _ in range(3)))
    ours = copy.deepcopy(plain)
    recollect.apply(ours, {"*": policies.save_ops("aten._to_copy.default", "aten.mm.default", "aten.addmm.default")})
    steps = 5
    for _ in range(steps):
        x, is_on = torch.randn(4, 8), around != "nothing"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on, cache_enabled=around == "autocast"):
            losses = [module(x).square().sum() for module in (plain, ours)]
        one, other = (torch.autograd.grad(a, [*b.parameters()]) for a, b in zip(losses, (plain, ours), strict=True))
        assert_same(list(one), list(other))
    assert len(served) == len(ours) * (steps - 2)  # all but the call that learns, and the one that proves


class Dropping(nn.Module):
    """Dropout before, in and after what is kept; through a view, so that it is not replayed."""

    def __init__(self, rate: float = 0.3) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.up(nn.functional.dropout(x, 0.2))
        h.view(-1).relu_()
        h = torch.native_dropout(h, self.rate, train=True)[0]
        y: Tensor = self.down(h)
        return x + nn.functional.dropout(y, 0.4)


KEPT_DROPOUT = policies.save_ops("aten.native_dropout.default", "aten.addmm.default")


@pytest.mark.parametrize("rates", [(0.3,) * 5, (0.0, 0.0, 0.0, 0.5, 0.5)], ids=["constant", "rising"])
def test_kept_random_operators_are_served_and_what_follows_draws_the_same_numbers(
    rates: tuple[float, ...], served: list[object]
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Dropping() for _ in range(3)))
    ours = copy.deepcopy(plain)
    recollect.apply(ours, {"*": KEPT_DROPOUT})
    for step, rate in enumerate(rates):
        for module in (*plain, *ours):
            module.rate = rate
        x = torch.randn(4, 8)
        assert_same(gradients(plain, plain, x, step), gradients(ours, ours, x, step))
    assert len(served) >= len(ours) * (len(rates) - 2)


class DroppingOnce(nn.Module):
    """Draws only where it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.up(x)
        h.view(-1).relu_()
        return torch.native_dropout(h, 0.5, train=True)[0].sin().cos()


@pytest.mark.parametrize("policy", [KEPT_DROPOUT, policies.save_modules("0")], ids=["operators", "modules"])
def test_generators_that_are_not_preserved_are_never_set_back(policy: Any) -> None:
    blocks = [nn.Sequential(DroppingOnce(), nn.Tanh()) for _ in range(3)]
    regions = [recollect.checkpoint(block, policy=policy, preserve_rng=False) for block in blocks]
    for _ in range(4):
        x = torch.randn(4, 8)
        for region in regions:
            x = region(x)
        before = torch.get_rng_state()
        x.sum().backward()
        assert torch.equal(torch.get_rng_state(), before)
