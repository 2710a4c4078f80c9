"""Backward calls that share one recomputation, above all the two halves of a split backward.

The halves are those of torch's pipeline stages: gradients of inputs first, then those of weights, by one call of
autograd for each group of weights.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as rival
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import recollect
from recollect._core.torch_private.dispatch import DispatchMode
from recollect._core.torch_private.engine import get_group
from recollect._core.torch_private.nodes import node_runs_in_part
from recollect._policy.base import PolicyLike
from recollect._recompute.group import GraphExecGroup, Sharing
from tests.watching import Counted, backward

WIDTH = 8
Region = Callable[..., Any]


@pytest.fixture(autouse=True)
def collector_off() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Halves:
    """The backward of one micro-batch in two halves."""

    def __init__(self, module: nn.Module, region: Region) -> None:
        self._module = module
        self.x = torch.randn(4, WIDTH, requires_grad=True)
        self._y = region(self.x)
        self._groups: Any = None

    def run_input_half(self) -> None:
        ones = torch.ones_like(self._y)
        _, self._groups = stage_backward_input([self._y], [ones], [self.x], self._module.parameters())

    def run_weight_half(self) -> None:
        stage_backward_weight(self._module.parameters(), self._groups)
        self._groups = None

    def run(self) -> None:
        self.run_input_half()
        self.run_weight_half()


def gradients(module: nn.Module, halves: Halves) -> list[Tensor]:
    found = [halves.x.grad, *(parameter.grad for parameter in module.parameters())]
    module.zero_grad()
    return [gradient for gradient in found if gradient is not None]


def are_same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "two linears": lambda: nn.Sequential(linear(), nn.GELU(), linear()),
    "norm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.GELU(), linear(), nn.Dropout(0.5)),
    "batch norm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Tanh()),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 2, 3, padding=1), nn.Flatten(), linear()
    ),
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
}
each_module = pytest.mark.parametrize("kind", MODULES)
GROUPS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no group": nullcontext,
    "group": GraphExecGroup,
    "torch's group": rival.GraphExecGroup,  # means nothing to us, and must not be in the way
}
POLICIES: dict[str, PolicyLike | None] = {
    "nothing kept": None,
    "matmuls kept": recollect.policies.save_matmuls,
    "all kept": recollect.policies.save_all,
    "none by a policy": recollect.policies.save_nothing,
}


def seeded(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[kind]()


# Gradients


@each_module
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_split_backward_gives_the_same_gradients(kind: str, group: str, policy: str) -> None:
    plain, module = seeded(kind), seeded(kind)
    region = recollect.checkpoint(module, policy=POLICIES[policy])
    for seed in range(3):  # a policy learns at the first
        torch.manual_seed(seed)
        expected = Halves(plain, plain)
        expected.run()
        torch.manual_seed(seed)
        halves = Halves(module, region)
        with GROUPS[group]():
            halves.run()
        assert are_same(gradients(module, halves), gradients(plain, expected))


# What runs again


@each_module
def test_both_halves_share_one_recomputation(kind: str) -> None:
    module = seeded(kind)
    fn = Counted(module)
    halves = Halves(module, recollect.checkpoint(fn))
    with GraphExecGroup():
        halves.run()
    assert fn.calls == 2


@pytest.mark.parametrize(("kind", "calls_of_autograd"), [("linear", 2), ("two linears", 3), ("norm", 4)])
@pytest.mark.parametrize("policy", ["nothing kept", "none by a policy"])
def test_without_a_group_every_call_of_autograd_recomputes(kind: str, calls_of_autograd: int, policy: str) -> None:
    module = seeded(kind)
    fn = Counted(module)
    region = recollect.checkpoint(fn, policy=POLICIES[policy])
    for _ in range(3):
        fn.calls = 0
        Halves(module, region).run()
        assert fn.calls == 1 + calls_of_autograd


class Overloads(DispatchMode):
    """Counts the operators that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not getattr(func, "is_view", False):
            self.counts[str(func).partition(".")[2]] += 1
        return func(*args, **(kwargs or {}))


def operators_again(group: str) -> list[Counter[str]]:
    """What a policy that keeps matmuls makes again in each of three steps."""
    found = []
    module = nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.GELU(), linear())
    region = recollect.checkpoint(module, policy=recollect.policies.save_matmuls)
    for _ in range(3):
        counts = []
        for fn in (region, module):
            halves = Halves(module, fn)
            with GROUPS[group](), Overloads() as overloads:
                halves.run()
            counts.append(overloads.counts)
        again, plain = counts
        again.subtract(plain)
        again.pop("detach.default", None)
        found.append(+again)
    return found


def test_under_a_policy_both_halves_share_what_is_made_again() -> None:
    assert operators_again("group") == [Counter({"native_layer_norm.default": 1, "gelu.default": 1})] * 3


def test_under_a_policy_without_a_group_only_what_is_needed_is_made_again() -> None:
    """The norm's own values are needed in both halves, its result for the weight half of a linear: three times."""
    assert operators_again("no group") == [Counter({"native_layer_norm.default": 3, "gelu.default": 2})] * 3


def test_a_value_that_was_gone_costs_a_sharing_one_more_recomputation() -> None:
    fn = Counted(lambda x: x.exp().sin())
    x = torch.randn(4, requires_grad=True)
    loss = recollect.checkpoint(fn)(x).sum()
    sharing = Sharing()
    for step in range(3):
        with sharing.resume():
            backward(loss, keep=True)
        assert fn.calls == 2 + step
    sharing.close()
    plain = x.detach().requires_grad_()
    loss = plain.exp().sin().sum()
    for _ in range(3):
        backward(loss, keep=True)
    assert x.grad is not None
    assert plain.grad is not None
    assert torch.equal(x.grad, plain.grad)


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_that_are_used_twice_get_the_same_gradients(policy: str) -> None:
    """Their call of autograd runs all that lies between the two uses a second time."""

    def run(wrap: Callable[[Region], Region]) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        layer = nn.Linear(WIDTH, WIDTH)
        fn = Counted(lambda x: layer(layer(x).tanh().sin()))
        halves = Halves(layer, wrap(fn))
        sharing = Sharing()
        with sharing.resume():
            halves.run_input_half()
        with sharing.resume():
            halves.run_weight_half()
        sharing.close()
        return gradients(layer, halves), fn.calls

    expected, _ = run(lambda fn: fn)
    found, calls = run(lambda fn: recollect.checkpoint(fn, policy=POLICIES[policy]))
    assert are_same(found, expected)
    assert calls <= 3


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # the engine's thread, first of all to do so
@pytest.mark.parametrize("policy", ["nothing kept", "matmuls kept"])
def test_both_halves_share_on_a_device_too(policy: str) -> None:
    """There nodes run on the engine's own threads."""
    device = torch.accelerator.current_accelerator()
    plain, module = seeded("norm").to(device).eval(), seeded("norm").to(device).eval()
    fn = Counted(module)
    region = recollect.checkpoint(fn, policy=POLICIES[policy])
    for seed in range(3):
        torch.manual_seed(seed)
        expected = Halves(plain, lambda x: plain(x.to(device)))
        expected.run()
        torch.manual_seed(seed)
        fn.calls = 0
        halves = Halves(module, lambda x: region(x.to(device)))
        with GraphExecGroup():
            halves.run()
        assert are_same(gradients(module, halves), gradients(plain, expected))
        assert fn.calls <= 2  # such small products are not worth a replay there


# How long values live


class Watched(nn.Module):
    """A block that shows what is recomputed in it, by name and micro-batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.options = options
        self._seen: dict[str, weakref.ref[torch.UntypedStorage]] = {}
        self._failures: list[str] = []

    def forward(self, x: Tensor) -> Any:
        return recollect.checkpoint(self.run, **self.options)(x + 0)

    def run(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        up = self.up(normed)
        squashed = up.sigmoid()
        gated = squashed * up.exp()
        if recollect.is_recomputing():
            self.show(normed=normed, up=up, squashed=squashed, gated=gated)
            if self._failures:
                raise KeyError(*self._failures)
        down: Tensor = self.down(gated)
        return down

    def show(self, **tensors: Tensor) -> None:
        self._seen |= {name: weakref.ref(tensor.untyped_storage()) for name, tensor in tensors.items()}

    @property
    def alive(self) -> set[str]:
        return {name for name, storage in self._seen.items() if storage() is not None}


FOR_WEIGHTS = {"normed", "gated"}


@pytest.mark.parametrize("options", [{}, {"early_stop": False}, {"check": "values"}], ids=str)
def test_between_the_halves_only_what_the_second_one_needs_is_alive(options: dict[str, Any]) -> None:
    block = Watched(**options)
    halves = Halves(block, block)
    sharing = Sharing()
    with sharing.resume():
        halves.run_input_half()
    assert block.alive == FOR_WEIGHTS
    with sharing.resume():
        halves.run_weight_half()
    assert block.alive == set()
    sharing.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_group_no_value_outlives_its_call(policy: str) -> None:
    block = Watched()
    region = recollect.checkpoint(block.run, policy=POLICIES[policy])
    for _ in range(3):
        halves = Halves(block, region)
        halves.run_input_half()
        assert block.alive == set()
        halves.run_weight_half()
        assert block.alive == set()


def test_values_for_the_second_half_go_one_after_the_other_as_they_are_used() -> None:
    block = Watched()
    halves = Halves(block, block)
    alive = []
    for layer in (block.norm, block.up, block.down):
        layer.weight.register_hook(lambda _: alive.append(block.alive))
    with GraphExecGroup():
        halves.run()
        assert block.alive == set()
    assert len(alive[-1]) < len(alive[0])


def test_values_whose_second_half_never_comes_go_when_it_closes() -> None:
    block = Watched()
    halves = Halves(block, block)
    sharing = Sharing()
    with sharing.resume():
        halves.run_input_half()
    sharing.close()
    assert block.alive == set()
    halves.run_weight_half()  # right all the same
    assert block.up.weight.grad is not None


def test_values_whose_second_half_never_comes_go_with_the_graph() -> None:
    block = Watched()
    halves = Halves(block, block)
    sharing = Sharing()
    with sharing.resume():
        halves.run_input_half()
    del halves
    assert block.alive == set()
    sharing.close()


def test_the_input_of_a_region_goes_with_the_second_half() -> None:
    block = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    inputs: list[weakref.ref[torch.UntypedStorage]] = []

    def region(x: Tensor) -> Any:
        x = x + 0
        inputs.append(weakref.ref(x.untyped_storage()))
        return recollect.checkpoint(block)(x)

    halves = Halves(block, region)
    with GraphExecGroup():
        halves.run()
        assert inputs[0]() is None


def test_a_sharing_holds_no_region() -> None:
    block = Watched()
    halves = Halves(block, block)
    sharing = Sharing()
    with sharing.resume():
        halves.run_input_half()
    gone = weakref.ref(block)
    del halves, block
    assert gone() is None
    sharing.close()


def test_micro_batches_between_the_halves_keep_to_themselves() -> None:
    module = seeded("norm")
    fn = Counted(module)
    region = recollect.checkpoint(fn)
    batches = [Halves(module, region) for _ in range(3)]
    sharings = [Sharing() for _ in batches]
    for batch, sharing in zip(batches, sharings, strict=True):
        with sharing.resume():
            batch.run_input_half()
    for batch, sharing in zip(reversed(batches), reversed(sharings), strict=True):
        with sharing.resume():
            batch.run_weight_half()
        sharing.close()
    assert fn.calls == 6


def test_a_recomputation_that_fails_leaves_nothing_behind() -> None:
    block = Watched()
    halves = Halves(block, block)
    block._failures.append("on purpose")
    sharing = Sharing()
    with pytest.raises((KeyError, RuntimeError), match=r"on purpose|Failed to run stage backward"), sharing.resume():
        halves.run_input_half()
    sharing.close()
    assert get_group() is None
    assert block.alive == set()


# Nested regions


@pytest.mark.parametrize("policy", POLICIES)
def test_regions_in_regions_share_too(policy: str) -> None:
    torch.manual_seed(0)
    inner, outer = nn.Sequential(linear(), nn.GELU(), linear()), linear()
    module = nn.ModuleList([inner, outer])
    count_inner = Counted(inner)
    region = recollect.checkpoint(count_inner, policy=POLICIES[policy])
    count_outer = Counted(lambda x: region(outer(x).tanh()))
    for seed in range(2):
        torch.manual_seed(seed)
        plain = Halves(module, lambda x: inner(outer(x).tanh()))
        plain.run()
        expected = gradients(module, plain)
        count_inner.calls = count_outer.calls = 0
        torch.manual_seed(seed)
        halves = Halves(module, recollect.checkpoint(count_outer))
        with GraphExecGroup():
            halves.run()
        assert are_same(gradients(module, halves), expected)
        assert count_outer.calls == 2
        assert count_inner.calls <= 3  # forward, recomputation of the outer one, its own


# Openness


def test_a_sharing_does_not_nest() -> None:
    with Sharing().resume(), pytest.raises(RuntimeError, match="cannot be nested"), Sharing().resume():
        pass
    assert get_group() is None


def test_a_sharing_inside_torchs_own_group_puts_that_back() -> None:
    with rival.GraphExecGroup() as group:
        with Sharing().resume():
            assert get_group() is not group
        assert get_group() is group


def test_a_read_from_outside_backward_takes_nothing_from_a_group() -> None:
    fn = Counted(lambda x: x.exp().sin())
    y: Any = recollect.checkpoint(fn)(torch.ones(2, requires_grad=True))
    with GraphExecGroup():
        assert y.grad_fn._saved_self is not None
        assert y.grad_fn._saved_self is not None
        backward(y.sum())
    assert fn.calls == 4


# The node that runs


def test_a_node_says_whether_it_makes_all_of_its_gradients() -> None:
    answers: list[bool] = []

    def unpack(tensor: Tensor) -> Tensor:
        answers.append(node_runs_in_part())
        return tensor

    x, w = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = (x @ w).sum()
    torch.autograd.grad(y, x, retain_graph=True)
    torch.autograd.grad(y, w, retain_graph=True)
    assert set(answers) == {True}
    answers.clear()
    torch.autograd.grad(y, (x, w), retain_graph=True)
    backward(y)
    assert set(answers) == {False}
    assert not node_runs_in_part()
