"""Recomputation finds modules as forward found them, and what it does to them is forgotten."""

import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
import recollect.compat
from recollect._core.reachable import find_held
from recollect._recompute.updates import _learned
from tests.watching import backward


def compat_checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(recollect.compat.checkpoint, function, use_reentrant=False)


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_step_is_plain(make: Callable[[], nn.Module], x: Tensor, *, forwards: int = 1, steps: int = 1) -> None:
    """Steps with and without the region leave the same gradients and buffers."""
    results = []
    for wrap in (lambda module: module, recollect.checkpoint):
        torch.manual_seed(0)
        module = make()
        region = wrap(module)
        for _ in range(steps):
            backward(torch.stack([region(x * n).sum() for n in range(1, forwards + 1)]).sum())
        results.append((gradients(module), list(buffers(module).values())))
    (plain, plain_buffers), (ours, our_buffers) = results
    assert len(plain) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain_buffers, our_buffers, strict=True))


# Buffers that a module updates

Norm = Callable[[], nn.Module]
NORMS: dict[str, tuple[Norm, tuple[int, ...]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), (4, 3)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (2, 3, 2, 2)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(3), (2, 3, 2, 2, 2)),
    "cumulative": (lambda: nn.BatchNorm1d(3, momentum=None), (4, 3)),
    "LazyBatchNorm1d": (nn.LazyBatchNorm1d, (4, 3)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (2, 3, 4)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (2, 3, 2, 2)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(3, affine=True, track_running_stats=True), (2, 3, 2, 2, 2)),
    "LazyInstanceNorm1d": (lambda: nn.LazyInstanceNorm1d(affine=True, track_running_stats=True), (2, 3, 4)),
    "spectral_norm hook": (lambda: nn.utils.spectral_norm(nn.Linear(3, 3)), (4, 3)),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(3, 3)), (4, 3)),
}


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize(("make", "shape"), NORMS.values(), ids=NORMS)
def test_buffers_are_updated_once_per_forward(make: Norm, shape: tuple[int, ...], forwards: int) -> None:
    assert_step_is_plain(lambda: nn.Sequential(make(), nn.Tanh()), torch.randn(shape), forwards=forwards, steps=2)


class Momentum(nn.Module):
    """Updates a buffer of its own, in place or by another object, and reads it."""

    target: Tensor

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("target", torch.zeros(3))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.in_place:
                self.target.mul_(0.9).add_(x.mean(0))
            else:
                self.target = self.target * 0.9 + x.mean(0)
        return (x * self.weight * self.target.clone()).exp()


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_of_an_unknown_module_are_learned(in_place: bool, steps: int) -> None:
    class Fresh(Momentum):
        """A class that no region has met yet."""

    assert_step_is_plain(lambda: Fresh(in_place=in_place), torch.randn(4, 3), forwards=2, steps=steps)


def test_a_buffer_that_only_a_later_instance_has_is_learned_too() -> None:
    class Fresh(Momentum):
        """Has another buffer besides, if it is told to."""

        count: Tensor

        def __init__(self, *, counts: bool) -> None:
            super().__init__(in_place=True)
            if counts:
                self.register_buffer("count", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            if hasattr(self, "count"):
                self.count += 1
                x = x * self.count.clone()
            return super().forward(x)

    for counts in (False, True):
        assert_step_is_plain(functools.partial(Fresh, counts=counts), torch.randn(4, 3), forwards=2, steps=2)


def test_a_buffer_that_is_updated_only_later_is_never_silently_wrong() -> None:
    class Late(Momentum):
        active = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.active else (x * self.weight).exp()

    module, x = Late(in_place=True), torch.randn(4, 3)
    backward(recollect.checkpoint(module)(x).sum())
    module.active = True
    refused = 0
    for _ in range(2):
        twin = Late(in_place=True)
        twin.load_state_dict(module.state_dict())
        twin.active = True
        backward(twin(x).sum())
        module.zero_grad()
        try:
            backward(recollect.checkpoint(module)(x).sum())
        except recollect.ChangedInputError:
            refused += 1
            continue
        assert all(torch.equal(a, b) for a, b in zip(gradients(module), gradients(twin), strict=True))
    assert refused <= 1


def test_a_buffer_made_by_forward_does_not_disturb_the_others() -> None:
    class Cached(nn.Module):
        """Makes a table when it is first called, as rotary embeddings do."""

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "table"):
                self.register_buffer("table", torch.full((3,), 2.0))
            return (x * cast("Tensor", self.table)).sin()

    class Offset(nn.Module):
        offset: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("offset", torch.full((3,), 7.0))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.offset * self.weight).cos()

    assert_step_is_plain(lambda: nn.Sequential(Cached(), Offset(), Cached()), torch.randn(4, 3), forwards=2, steps=2)


@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(3), lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(2))])
def test_lazy_modules_may_take_shape_inside_a_region(make: Callable[[], nn.Module]) -> None:
    assert_step_is_plain(lambda: nn.Sequential(make(), nn.Tanh()), torch.randn(4, 3))


def test_a_parametrization_added_after_forward_does_not_change_recomputation() -> None:
    class Double(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * 2

    block, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), torch.randn(2, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(block(x).exp().sum(), x)
    loss = recollect.checkpoint(lambda x: block(x).exp())(x).sum()
    parametrize.register_parametrization(block[0], "weight", Double())
    try:
        backward(loss)
    except recollect.RecollectError:
        return  # an error is as good as the right gradient
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


# Flags and parameters that change in between


@pytest.mark.parametrize("train", [True, False])
def test_a_flipped_training_flag_gives_the_gradient_of_forward(train: bool) -> None:
    block, x = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(5, 4)
    block.train(train)
    backward(block(x).exp().sum())
    expected = gradients(block)
    block.zero_grad()
    block[0].reset_running_stats()  # type: ignore[operator]
    loss = recollect.checkpoint(lambda x: block(x).exp())(x).sum()
    block.train(not train)
    backward(loss)
    assert all(torch.equal(a, b) for a, b in zip(gradients(block), expected, strict=True))
    assert all(module.training is not train for module in block.modules())


def test_a_replaced_parameter_is_put_back_for_recomputation_only() -> None:
    block, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    old = block[0].weight
    backward(block(x).exp().sum())
    expected = gradients(block)
    block.zero_grad()
    loss = recollect.checkpoint(lambda x: block(x).exp())(x).sum()
    new = block[0].weight = nn.Parameter(torch.zeros(3, 3))
    backward(loss)
    assert block[0].weight is new
    assert new.grad is None
    assert isinstance(old, Tensor)
    assert old.grad is not None
    assert torch.equal(old.grad, expected[0])


@pytest.mark.parametrize("where", ["around", "inside"])
def test_functional_call_is_recomputed_with_its_own_parameters(where: str) -> None:
    block, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    given: dict[str, Tensor] = {name: torch.randn_like(p).requires_grad_() for name, p in block.named_parameters()}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor, *, forget: bool) -> Any:
            return (recollect.checkpoint(self.block) if forget else self.block)(x)

    def run(*, forget: bool) -> Tensor:
        result: Tensor
        if where == "around":
            prefixed = {f"block.{name}": tensor for name, tensor in given.items()}
            result = torch.func.functional_call(Outer(), prefixed, (x,), {"forget": forget})
            return result
        call = functools.partial(torch.func.functional_call, block)
        result = (recollect.checkpoint(call) if forget else call)(given, (x,))
        return result

    wanted = list(given.values())
    expected = torch.autograd.grad(run(forget=False).sum(), wanted)
    got = torch.autograd.grad(run(forget=True).sum(), wanted)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_an_optimizer_step_between_forward_and_backward_is_refused() -> None:
    block, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    region = recollect.checkpoint(block)
    first, second = region(x).sum(), region(x).sum()
    backward(first)
    optimizer.step()
    with pytest.raises(recollect.ChangedInputError, match="of Linear was changed in place"):
        backward(second)


class Gate(nn.Module):
    """Multiplies by a parameter and a buffer, the buffer last."""

    gate: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("gate", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).exp() * self.gate


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("name", ["weight", "gate"])
def test_a_changed_tensor_that_is_read_last_is_refused(name: str, early_stop: bool) -> None:
    module, x = Gate(), torch.ones(2, 3)
    loss = recollect.checkpoint(module, early_stop=early_stop)(x).sum()
    with torch.no_grad():
        getattr(module, name).add_(1)
    with pytest.raises(recollect.CheckpointError, match="changed in place"):
        backward(loss)


def test_an_unrelated_change_is_not_refused() -> None:
    block, other, x = nn.Linear(3, 3), nn.Linear(3, 3), torch.randn(2, 3)
    loss = recollect.checkpoint(lambda x: block(x).exp())(x).sum()
    with torch.no_grad():
        other.weight.add_(1)
    backward(loss)
    assert block.weight.grad is not None


class Follower(nn.Module):
    """Reads a running mean and then updates it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out = x * (1 + self.mean)
        self.mean.add_(x.detach().mean(0))
        return out.sin()


def test_a_region_inside_may_hold_a_module_whose_buffers_changed_since() -> None:
    """It copies them, in case it uses the module; that alone is no reason to refuse."""
    follower, x = Follower(), torch.randn(2, 3, requires_grad=True)
    _learned.pop(Follower, None)
    inner = recollect.checkpoint(lambda x: x.exp().sin() if x is not follower else follower(x))
    outer = recollect.checkpoint(lambda x: inner(x * 2).exp() if x is not follower else follower(x))
    loss = outer(x).sum()
    recollect.checkpoint(follower)(x).sum().backward()
    x.grad = None
    backward(loss)
    (expected,) = torch.autograd.grad((x * 2).exp().sin().exp().sum(), x)
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_what_a_backward_inside_recomputes_teaches_nothing_about_a_class() -> None:
    """It calls modules on copies of their buffers, which the originals do not show."""
    follower, x = Follower(), torch.randn(2, 3, requires_grad=True)
    lost = recollect.checkpoint(follower)(x)
    _learned.pop(Follower, None)

    def fn(x: Any) -> Any:
        lost.sum().backward(retain_graph=True)
        return x.sin() if x is not follower else follower(x)

    backward(recollect.checkpoint(fn)(x).sum())
    assert Follower not in _learned


# State of the user's own


class Diary(nn.Module):
    """Counts and lists its calls in Python attributes."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []
        self.by_name: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.means.append(float(x.detach().mean()))
        self.by_name["x"] = self.by_name.get("x", 0) + 1
        return (x * self.calls).exp()


@pytest.mark.parametrize("inherited", [False, True])
def test_registered_state_changes_once_until_the_registration_is_removed(inherited: bool) -> None:
    class Heir(Diary):
        pass

    module, x = (Heir if inherited else Diary)(), torch.ones(2, requires_grad=True)
    means, by_name = module.means, module.by_name
    with recollect.register_state(Diary, "means", "by_name"):
        for step in (1, 2):
            y = recollect.checkpoint(module)(x)
            x.grad = None
            backward(y.sum())
            assert (module.calls, len(module.means), module.by_name) == (step, step, {"x": step})
            assert x.grad is not None
            assert torch.equal(x.grad, step * y)
        assert (module.means, module.by_name) == (means, by_name)
        assert module.means is means
    backward(recollect.checkpoint(module)(x).sum())
    assert (module.calls, len(module.means), module.by_name) == (3, 3, {"x": 3})


class Recurrent(nn.Module):
    """Carries its state from call to call in attributes, and shows its last result there."""

    def __init__(self) -> None:
        super().__init__()
        self.of_input, self.of_state = nn.Linear(4, 4), nn.Linear(4, 4)
        self.hidden: Tensor | None = None
        self.pair: tuple[Tensor, Tensor] | None = None
        self.history: list[Tensor] = []
        self.shown: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = self.hidden if isinstance(self.hidden, Tensor) else torch.zeros_like(x)
        self.hidden = torch.tanh(self.of_input(x) + self.of_state(before) * x)
        cell, gate = (x, x) if self.pair is None else self.pair
        self.pair = torch.sigmoid(cell * self.hidden), self.decide(gate * self.hidden)
        result = self.shown = self.pair[0] * self.pair[1].exp()
        return result

    def decide(self, gate: Tensor) -> Tensor:
        self.history = [*self.history[-1:], gate]
        return torch.stack(self.history).sum(0)

    def let_go(self) -> None:
        """End the graph, as training on long sequences does."""
        assert self.hidden is not None
        assert self.pair is not None
        self.hidden, self.pair = self.hidden.detach(), (self.pair[0].detach(), self.pair[1].detach())
        self.history = [one.detach() for one in self.history]


KEPT = (None, recollect.policies.save_matmuls, recollect.policies.save_ops("aten.tanh.default"))


@pytest.mark.parametrize("policy", KEPT)
@pytest.mark.parametrize("lets_go", [False, True])
def test_what_a_module_carries_in_attributes_is_as_forward_found_it(policy: Any, lets_go: bool) -> None:
    found = []
    for applies in (False, True):
        torch.manual_seed(0)
        module = Recurrent()
        run = recollect.checkpoint(module, policy=policy) if applies else module
        grads = []
        for _ in range(3):
            module.zero_grad()
            loss = torch.zeros(())
            for _ in range(3):
                loss = loss + run(torch.randn(2, 4)).sum()
                if lets_go:
                    module.let_go()
            backward(loss)
            module.let_go()
            grads.append(gradients(module))
        found.append(grads)
    for plain, ours in zip(*found, strict=True):
        assert all(map(torch.equal, plain, ours))


class State(NamedTuple):
    hidden: Tensor | None


@dataclass(frozen=True)
class Frozen:
    hidden: Tensor | None


class Turn(Enum):
    FIRST, SECOND = 1.0, 2.0

    def next(self) -> "Turn":
        return Turn.SECOND if self is Turn.FIRST else Turn.FIRST


class Stateful(nn.Module):
    """Carries a state of some kind from call to call."""

    def __init__(self, state: Any, move: Callable[[Any, Tensor], Any], scale: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.state, self.move, self.scale = nn.Linear(4, 4), state, move, scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.layer(x) * self.scale(self.state))
        self.state = self.move(self.state, y)
        return y.exp()


def _scale_of(state: Any) -> Any:
    return 1.0 if state.hidden is None else state.hidden


KINDS: dict[str, tuple[Any, Callable[[Any, Tensor], Any], Callable[[Any], Any]]] = {
    "named tuple": (State(None), lambda _, y: State(y), _scale_of),
    "frozen data class": (Frozen(None), lambda _, y: Frozen(y.detach()), _scale_of),
    "enumeration": (Turn.FIRST, lambda turn, _: turn.next(), lambda turn: turn.value),
    "number of NumPy's": (np.float32(1), lambda number, _: number * np.float32(0.5), float),
    "array": (np.ones(1, np.float32), lambda array, _: array * 0.5, torch.from_numpy),
    "range": (range(1, 2), lambda at, _: range(at.stop, at.stop + 1), lambda at: float(at.start)),
    "dtype": (torch.float32, lambda _, __: torch.float16, lambda dtype: torch.tensor(1.1, dtype=dtype).item()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", KEPT)
def test_a_state_of_any_kind_is_as_forward_found_it(kind: str, policy: Any) -> None:
    found = []
    for applies in (False, True):
        torch.manual_seed(0)
        module, x = Stateful(*KINDS[kind]), torch.randn(2, 4)
        run = recollect.checkpoint(module, policy=policy) if applies else module
        for _ in range(2):
            backward(run(run(x)).sum())
            module.state = KINDS[kind][0]
        found.append(gradients(module))
    assert all(map(torch.equal, *found))


class Guarded(nn.Module):
    """Sets attributes while it runs, and sets them back; recomputation ends in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.is_busy, self.depth = False, 0
        self.current: Tensor | None = None
        self.shown: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert not self.is_busy
        self.is_busy, self.current = True, x
        y = torch.tanh(self.step(x))
        self.is_busy, self.current = False, None
        return y

    def step(self, x: Tensor) -> Tensor:
        self.depth += 1
        y = torch.tanh(self.layer(x) * self.depth)
        y = self.step(y) if self.depth < 3 else y.exp()
        self.shown = y
        self.depth -= 1
        return y


@pytest.mark.parametrize("policy", KEPT)
@pytest.mark.parametrize("holds_state", [False, True])
def test_what_forward_sets_and_sets_back_is_as_before_where_recomputation_stops(policy: Any, holds_state: bool) -> None:
    found = []
    for applies in (False, True):
        torch.manual_seed(0)
        module = Guarded()
        if holds_state:
            module.layer = nn.Sequential(nn.BatchNorm1d(4), module.layer)  # type: ignore[assignment]
        run = recollect.checkpoint(module, policy=policy) if applies else module
        for _ in range(3):
            y = run(torch.randn(2, 4))
            shown = module.shown
            backward(y.sum())
            assert (module.is_busy, module.depth, module.current) == (False, 0, None)
            assert module.shown is shown
        found.append(gradients(module))
    assert all(map(torch.equal, *found))


class Incomparable:
    """Like a table of data, says by an error of its own that it has no truth value."""

    def __eq__(self, _: object) -> bool:
        raise LookupError

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("make", [Incomparable, lambda: [Incomparable()], lambda: (1, Incomparable())])
@pytest.mark.parametrize("before", [None, 0, [1]])
@pytest.mark.parametrize("is_late", [False, True])
def test_nothing_of_the_users_is_compared(make: Callable[[], Any], before: Any, is_late: bool) -> None:
    class Layer(nn.Linear):
        held: Any
        shown: Any

        def forward(self, x: Tensor) -> Tensor:
            if not is_late and not recollect.is_recomputing():
                self.held, self.shown = make(), make()
            return torch.tanh(super().forward(x))

    layer = Layer(4, 4)
    layer.held = layer.shown = before
    region = recollect.checkpoint(layer)
    for _ in range(2):
        y = region(torch.ones(1, 4))
        if is_late:
            layer.held, layer.shown = make(), make()
        backward(y.sum())


def test_a_tensor_that_takes_the_place_of_another_is_not_read() -> None:
    """On a device, to read it would wait for all that was computed before."""

    class Unread(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func is not torch.ops.aten.eq.Tensor
            assert func is not torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    class Layer(nn.Linear):
        auxiliary: Any = None

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(super().forward(x))
            self.auxiliary = y.mean()
            return y.exp()

    layer = Layer(4, 4)
    layer.auxiliary = None
    region = recollect.checkpoint(layer)
    unread: Any = Unread  # typed nowhere
    with unread():
        for _ in range(3):
            y = region(torch.ones(1, 4)).sum()
            backward(y + layer.auxiliary)


class Averaging(nn.Module):
    """Takes off a moving average that is no buffer, only an attribute."""

    def __init__(self, is_late: bool) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(4, 4), torch.arange(4.0)
        self.mean = None if is_late else torch.zeros(4)
        self.count = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.mean is None:
            self.mean = torch.zeros(4)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
            self.count.data += 1
        return torch.tanh((y - self.mean) * self.count.clone() * self.table.sin())


@pytest.mark.parametrize("policy", KEPT)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_tensor_in_an_attribute_that_a_module_writes_into_is_as_forward_found_it(policy: Any, is_late: bool) -> None:
    found = []
    for applies in (False, True):
        torch.manual_seed(0)
        module = Averaging(is_late)
        run = recollect.checkpoint(module, policy=policy) if applies else module
        for _ in range(3):
            backward(run(run(torch.randn(3, 4))).sum())
        found.append([*gradients(module), module.mean, module.count])
    assert all(map(torch.equal, *found))


def test_what_a_module_only_shows_lives_no_longer_than_without_us() -> None:
    module, shown = Recurrent(), list[weakref.ref[torch.UntypedStorage]]()
    region = recollect.checkpoint(module)
    for _ in range(2):
        y = region(torch.randn(2, 4))
        assert module.shown is not None
        shown.append(weakref.ref(module.shown.untyped_storage()))
    del y
    assert shown[0]() is None
    assert shown[1]() is not None


# Where modules are looked for

GLOBAL = nn.Linear(1, 1)
HELD = [nn.Linear(1, 1)]


class Owner:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def method(self, x: Tensor) -> Any:
        return self.module(x)

    def __call__(self, x: Tensor) -> Any:
        return self.module(x)


def ways_to_hold(module: nn.Module) -> dict[str, Callable[..., Any]]:
    def default(x: Tensor, module: nn.Module = module) -> Any:
        return module(x)

    def inner(x: Tensor) -> Any:
        return module(x)

    listed, named = [module], {"m": module}
    return {
        "itself": module,
        "its forward": module.forward,
        "closure": lambda x: module(x),
        "closure of a closure": lambda x: inner(x),
        "default": default,
        "partial": functools.partial(lambda m, x: m(x), module),
        "keyword of a partial": functools.partial(lambda x, m: m(x), m=module),
        "owner of a method": Owner(module).method,
        "callable object": Owner(module),
        "list in a closure": lambda x: listed[0](x),
        "dict in a closure": lambda x: named["m"](x),
        "another region": recollect.checkpoint(inner),
    }


@pytest.mark.parametrize("way", ways_to_hold(GLOBAL))
def test_modules_are_found_where_functions_hold_them(way: str) -> None:
    module = nn.Linear(1, 1)
    modules = find_held(ways_to_hold(module)[way]).modules
    assert any(found is module for found in modules)


def test_modules_are_found_in_globals_and_arguments() -> None:
    argument = nn.Linear(1, 1)
    modules = find_held(lambda x: HELD[0](GLOBAL(x)), (argument,)).modules
    assert {id(module) for module in modules} >= {id(GLOBAL), id(HELD[0]), id(argument)}


def test_a_search_that_meets_itself_ends() -> None:
    loop: list[Any] = []
    loop.append(loop)
    found = find_held(lambda: loop)
    assert (found.modules, found.tensors) == ([], [])


def test_a_compiled_module_inside_a_region_is_no_stranger() -> None:
    inner: Any = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), backend="eager")
    net = nn.Sequential(inner, nn.Tanh()).eval()
    x = torch.randn(2, 4, requires_grad=True)
    y = recollect.checkpoint(net)(x)
    net.train()
    y.sum().backward()
    assert net.training
    (expected,) = torch.autograd.grad(net.eval()(x).sum(), [x])
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_a_backward_inside_the_first_call_of_a_class_does_not_update_its_buffers_twice() -> None:
    class Following(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return (x * self.calls).sin()

    module = Following()

    def fn(x: Tensor) -> Tensor:
        y: Tensor = module(x)
        (inner,) = torch.autograd.grad(y.exp().sum(), x, retain_graph=True)
        return y * inner

    x = torch.ones(2, requires_grad=True)
    backward(recollect.checkpoint(fn)(x).sum())
    assert module.calls == 1


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
def test_a_module_of_torchscript_is_refused_by_name() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    x = torch.ones(2, requires_grad=True)
    for fn in (nn.Sequential(nn.Tanh(), scripted), lambda x: scripted(x)):
        with pytest.raises(TypeError, match="a region uses Linear, which is compiled by TorchScript"):
            recollect.checkpoint(fn)(x)


class Scaled(nn.Linear):
    """Is told by its caller, before each call, how to compute."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x) * self.factor)


@pytest.mark.parametrize("policy", [None, recollect.policies.save_matmuls])
@pytest.mark.parametrize("is_number", [True, False])
def test_attributes_that_a_caller_sets_between_calls_are_those_of_forward(is_number: bool, policy: Any) -> None:
    """Numbers by themselves; tensors are registered."""
    layer, x = Scaled(4, 4), torch.randn(2, 4)
    values = [0.5, 1.5, 2.5] if is_number else [torch.full((4,), 0.5), torch.full((4,), 1.5), torch.full((4,), 2.5)]

    def gradient(call: Callable[[Tensor], Tensor]) -> Tensor:
        y = x
        for layer.factor in values:  # type: ignore[assignment]
            y = call(y)
        (found,) = torch.autograd.grad(y.sum(), layer.weight)
        assert layer.factor is values[-1]
        return found

    with nullcontext() if is_number else recollect.register_state(Scaled, "factor"):
        region = recollect.checkpoint(layer, policy=policy)
        for _ in range(4):
            assert torch.equal(gradient(region), gradient(layer))


def test_an_attribute_that_becomes_a_tensor_is_as_it_was_in_forward() -> None:
    layer, x = Scaled(4, 4), torch.randn(2, 4)
    layer.factor = 0.5
    region = recollect.checkpoint(layer)
    for _ in range(2):
        layer.factor = 0.5
        (plain,) = torch.autograd.grad(layer(x).sum(), layer.weight)
        loss = region(x).sum()
        layer.factor = torch.full((4,), 2.0)  # type: ignore[assignment]
        (ours,) = torch.autograd.grad(loss, layer.weight)
        assert torch.equal(ours, plain)
        assert isinstance(layer.factor, Tensor)


def test_a_part_that_is_replaced_before_backward_is_that_of_forward() -> None:
    first, x = nn.Linear(4, 4), torch.ones(2, 4)
    block = nn.Sequential(first, nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    (plain,) = torch.autograd.grad(block(x).sum(), first.weight)
    for _ in range(2):
        block[0], block[3] = first, nn.Tanh()
        loss = recollect.checkpoint(block)(x).sum()
        block[0], block[3] = nn.Linear(4, 4), nn.Identity()
        (ours,) = torch.autograd.grad(loss, first.weight)
        assert torch.equal(ours, plain)
        assert isinstance(block[3], nn.Identity)
        assert block[0] is not first


class Tabled(nn.Linear):
    """Makes a table anew for each length, and remembers for which."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.length, self._table = 0, torch.zeros(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != self.length:
            self.length, self._table = len(x), torch.arange(len(x)).float()[:, None].cos()
        return torch.tanh(super().forward(x) * self._table)


class Switched(nn.Module):
    """Has adapters, of which one is active, as PEFT's layers do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({name: nn.Linear(width, width) for name in ("one", "other")})
        self._active, self._is_disabled = ["one"], False

    def forward(self, x: Tensor) -> Tensor:
        for name in self._active if not self._is_disabled else ():
            x = torch.tanh(self.adapters[name](x))
        return x.sin()


@pytest.mark.parametrize("policy", [None, recollect.policies.save_matmuls])
def test_tables_that_calls_of_other_lengths_replace_are_those_of_forward(policy: Any) -> None:
    def gradients(wrap: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        layer = Tabled(4)
        call = wrap(layer)
        found: list[Tensor] = []
        for _ in range(4):
            loss = sum(call(torch.ones(length, 4)).sum() for length in (3, 5))
            found += torch.autograd.grad(cast("Tensor", loss), layer.weight)
        return found

    ours = gradients(lambda layer: recollect.checkpoint(layer, policy=policy))
    assert all(map(torch.equal, ours, gradients(lambda layer: layer)))


def test_adapters_that_a_caller_switches_between_calls_are_those_of_forward() -> None:
    def gradients(wrap: Callable[[Any], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        layer, x = Switched(4), torch.ones(2, 4, requires_grad=True)
        call, loss = wrap(layer), torch.zeros(())
        for layer._active, layer._is_disabled in ((["one"], False), (["other"], False), (["one", "other"], True)):
            loss = loss + call(x).sum()
        assert layer._is_disabled
        found = torch.autograd.grad(loss, [x, *layer.parameters()])
        assert layer._is_disabled
        assert layer._active == ["one", "other"]
        return list(found)

    assert all(map(torch.equal, gradients(recollect.checkpoint), gradients(lambda layer: layer)))


def test_what_forward_replaces_is_not_held_for_recomputation() -> None:
    layer = Remembering(4)
    region = recollect.checkpoint(layer)
    region(torch.ones(2, 4))
    assert layer.last is not None
    before = weakref.ref(layer.last)
    loss = region(torch.ones(2, 4)).sum()
    assert before() is None
    backward(loss)


class Remembering(nn.Linear):
    """Keeps its last result in an attribute that is None at first, as the recurrent layers of RecurrentGemma do."""

    last: Tensor | None

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.last = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(super().forward(x))
        self.last = y.detach()
        return y


@pytest.mark.parametrize("policy", [None, recollect.policies.save_matmuls])
def test_a_module_may_remember_a_tensor_where_it_had_none(policy: Any) -> None:
    layer, x = Remembering(4), torch.randn(2, 4)
    region = recollect.checkpoint(layer, policy=policy)
    for _ in range(4):
        (ours,) = torch.autograd.grad(region(x).sum(), layer.weight)
        (plain,) = torch.autograd.grad(layer(x).sum(), layer.weight)
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("wrap", [recollect.checkpoint, compat_checkpoint], ids=["checkpoint", "compat"])
def test_numbers_that_forward_sets_are_as_forward_found_them_and_count_forwards_but_as_torch_does_in_compat(
    wrap: Any,
) -> None:
    module = Diary()
    for step in (1, 2, 3):
        x = torch.ones(2, requires_grad=True)
        y = wrap(module)(x)
        backward(y.sum())
        assert module.calls == step * (1 if wrap is recollect.checkpoint else 2)
        if wrap is recollect.checkpoint:
            assert x.grad is not None
            assert torch.equal(x.grad, step * y)


class Annealed(nn.Linear):
    """Cools down at every call, and hides parts of its input more and more often."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.temperature, self._step, self.is_hot = 1.0, 0, True

    def forward(self, x: Tensor) -> Tensor:
        self._step += 1
        self.temperature, self.is_hot = self.temperature * 0.5, self.is_hot and self._step < 3
        x = torch.where(torch.rand(4) < 0.1 * self._step, 0.0, x)
        return (super().forward(x) / self.temperature).softmax(-1) * (2 if self.is_hot else 1)


@pytest.mark.parametrize("policy", [None, recollect.policies.save_matmuls])
def test_a_schedule_that_forward_moves_is_moved_once(policy: Any) -> None:
    results = []
    for wraps in (False, True):
        torch.manual_seed(0)
        layer = Annealed()
        call = recollect.checkpoint(layer, policy=policy) if wraps else layer
        for _ in range(3):
            backward(torch.stack([call(torch.randn(2, 4)).square().sum() for _ in range(2)]).sum())
        results.append([*gradients(layer), torch.tensor([layer.temperature, layer._step, layer.is_hot])])
    assert all(map(torch.equal, *results))


class SetUp(nn.Linear):
    """Sets something up in its first forward, and knows by a flag that it has."""

    def __init__(self, way: str) -> None:
        super().__init__(4, 4)
        self.inner, self.way, self.is_done, self.calls = nn.Linear(4, 4), way, False, 0

    def set_up(self) -> None:
        if self.way == "hook":
            self.register_forward_hook(lambda module, args, output: output * 1.5)
        elif self.way == "hook of a part":
            self.inner.register_forward_hook(lambda module, args, output: output * 1.5)
        elif self.way == "part":
            self.part = nn.Linear(4, 4)
        elif self.way == "parameter":
            self.extra = nn.Parameter(torch.rand(4))
        else:
            self.register_buffer("table", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_done:
            self.set_up()
            self.is_done = True
        self.calls += 1
        x = super().forward(self.inner(x).sin()) * self.calls
        for own in (getattr(self, name) for name in ("extra", "table") if hasattr(self, name)):
            x = x * own
        return (self.part(x) if hasattr(self, "part") else x).cos()


@pytest.mark.parametrize("way", ["hook", "hook of a part", "part", "parameter", "buffer"])
@pytest.mark.parametrize("policy", [None, "selective"])
def test_what_a_first_forward_sets_up_is_not_set_up_again(way: str, policy: Any) -> None:
    found = []
    for applies in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(SetUp(way), SetUp(way))
        if applies:
            recollect.apply(model, {"*": policy or "full"})
        steps = []
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            steps.append(gradients(model))
        hooks = sum(len(module._forward_hooks) for module in model.modules())
        found.append((steps, hooks, [block.calls for block in model]))
    (plain, *others), (ours, *same) = found
    assert others == same
    assert all(
        len(one) == len(other) and all(map(torch.equal, one, other)) for one, other in zip(ours, plain, strict=True)
    )


class Counting(nn.Linear):
    """Carries a number, a tensor and a collection from call to call."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = 0
        self.hidden: Tensor | None = None
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls / 2)
        hidden = torch.ones(4) if self.hidden is None else self.hidden
        y = torch.tanh(super().forward(x) * hidden * sum(self.seen))
        self.hidden = y.detach() * self.calls
        return y


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "grad of grad": lambda f, x: torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).sum())(x).sum())(x),
    "grad in vmap": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).sum()))(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_a_module_carries_is_as_forward_found_it_under_transforms(name: str, calls: int) -> None:
    def repeated(call: Callable[..., Tensor], x: Tensor) -> Tensor:
        return functools.reduce(lambda y, _: call(y), range(calls), x)

    found, x = [], torch.randn(3, 4)
    for applies in (False, True):
        torch.manual_seed(0)
        module = type("Counting", (Counting,), {})()  # of which nothing has been learned yet
        call = recollect.checkpoint(module) if applies else module
        result = TRANSFORMS[name](functools.partial(repeated, call), x)
        found.append((result, module.calls, module.seen))
    (plain, *counted), (ours, *counts) = found
    torch.testing.assert_close(ours, plain)
    assert counts == counted
