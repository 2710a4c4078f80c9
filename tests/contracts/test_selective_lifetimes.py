"""How long kept values live, by weak references alone: the garbage collector is off in every test here."""

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import Decision, Site, policies
from recollect._core.scope import watcher
from recollect._policy.base import PolicyLike
from recollect._profile.memory import LiveBytes
from tests.collecting import collect_new, without_collector
from tests.naming import name_of
from tests.watching import Region, Watched, backward, token_held_by, what_is_in_force

# Many of these policies match nothing on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:policy .* this step")

STEPS = 3
SIZE = 16
UNIT = 4 * SIZE * SIZE


@pytest.fixture(autouse=True)
def collector_off() -> Iterator[None]:
    collect_new()
    with without_collector():
        yield


def square() -> Tensor:
    """A tensor that requires grad and that only its holder keeps alive."""
    return torch.randn(SIZE, SIZE, requires_grad=True) + 1


class Product(nn.Module):
    """A matrix product, by any of the ways in which a policy can keep one; shows its results."""

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self.watched = watched

    def forward(self, x: Tensor, w: Tensor, name: str) -> Tensor:
        h = recollect.name(x @ w / SIZE, "product")
        self.watched.show(**{name: h})
        return h


WAYS: dict[str, PolicyLike] = {
    "operator": policies.save_ops("aten.div.Tensor"),
    "function": lambda site: Decision.SAVE if site.op == "aten.div.Tensor" else Decision.RECOMPUTE,
    "value": policies.save_names("product"),
    "block": policies.save_names("block"),
    "module": policies.save_modules("product"),
    "all": policies.first_match(policies.save_modules("product"), policies.save_ops("aten.div.Tensor")),
}
each_way = pytest.mark.parametrize("way", WAYS)


def held(way: str) -> set[str]:
    """What lives on between forward and backward: of a block that is kept whole also what its operators save."""
    return {"a", "b", "c"} if way in ("operator", "function", "value") else {"a", "b", "c", "sin a", "sin b"}


class Chain(nn.Module):
    """Three products, each followed by an operator that saves it; `seen` says what is alive when backward is there."""

    def __init__(self) -> None:
        super().__init__()
        self.watched, self.seen = Watched(), dict[str, set[str]]()
        self.product = Product(self.watched)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        for name in "abc":
            x = recollect.region("block")(self.product)(x, w, name)
            if not recollect.is_recomputing():
                x.register_hook(functools.partial(lambda name, _: self.seen.update({name: self.watched.alive}), name))
            x = x.sin()
            if not recollect.is_recomputing():
                self.watched.show(**{f"sin {name}": x})
        return x.exp().sum()


# Without backward, and after it


@each_way
def test_kept_values_live_as_long_as_the_output_and_no_longer(way: str) -> None:
    chain = Chain()
    region = recollect.checkpoint(chain, policy=WAYS[way])
    for _ in range(STEPS):
        y = region(square(), square())
        assert chain.watched.alive == held(way)
        del y
        assert chain.watched.alive == set()


@each_way
def test_nothing_kept_outlives_a_pass_that_frees_the_graph(way: str) -> None:
    chain = Chain()
    region = recollect.checkpoint(chain, policy=WAYS[way])
    for _ in range(STEPS):
        y = region(square(), square())
        backward(y)
        assert chain.watched.alive == set()
        assert y.grad_fn is not None


@each_way
def test_kept_values_go_at_their_last_use_in_backward(way: str) -> None:
    chain = Chain()
    region = recollect.checkpoint(chain, policy=WAYS[way])
    for _ in range(STEPS):
        backward(region(square(), square()))
        kept = {name: alive & {"a", "b", "c"} for name, alive in chain.seen.items()}
        assert kept == {"c": {"a", "b"}, "b": {"a"}, "a": set()}


@each_way
def test_a_pass_that_keeps_the_graph_keeps_kept_values(way: str) -> None:
    chain = Chain()
    region = recollect.checkpoint(chain, policy=WAYS[way])
    for _ in range(STEPS):
        y = region(square(), square())
        for _ in range(2):
            backward(y, keep=True)
            assert chain.watched.alive == held(way)
        backward(y)
        assert chain.watched.alive == set()


@each_way
def test_kept_values_wait_for_the_outputs_that_need_them(way: str) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.watched = Watched()
            self.product = Product(self.watched)

        def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            block = recollect.region("block")(self.product)
            return block(x, w, "a").sin().exp().sum(), block(w, x, "b").sin().exp().sum()

    branches = Branches()
    region = recollect.checkpoint(branches, policy=WAYS[way])
    for _ in range(STEPS):
        first, second = region(square(), square())
        backward(first)
        assert branches.watched.alive >= {"b"}
        backward(second)
        assert branches.watched.alive == set()


def keep_products(site: Site) -> Decision:
    return Decision.SAVE if site.op == "aten.mm.default" else Decision.RECOMPUTE


def use_and_drop(fn: Region, policy: PolicyLike) -> None:
    recollect.checkpoint(fn, policy=policy)(square())


def use_and_step(fn: Region, policy: PolicyLike) -> None:
    backward(recollect.checkpoint(fn, policy=policy)(square()).sum())


def use_and_keep_the_graph(fn: Region, policy: PolicyLike) -> None:
    backward(recollect.checkpoint(fn, policy=policy)(square()).sum(), keep=True)


def use_twice_differentiated(fn: Region, policy: PolicyLike) -> None:
    x = square()
    (slope,) = torch.autograd.grad(recollect.checkpoint(fn, policy=policy)(x).sum(), x, create_graph=True)
    backward(slope.sum())


def use_nested(fn: Region, policy: PolicyLike) -> None:
    inner = recollect.checkpoint(fn, policy=policy)
    backward(recollect.checkpoint(lambda x: inner(x.sin()).exp(), policy=policy)(square()).sum())


def use_and_fail(fn: Region, policy: PolicyLike) -> None:
    def failing(x: Tensor) -> Tensor:
        y = fn(x)
        y.register_hook(lambda _: 1 // 0)
        z: Tensor = y.sin()
        return z

    with suppress(ZeroDivisionError):
        backward(recollect.checkpoint(failing, policy=policy)(square()).sum(), keep=True)


@pytest.mark.parametrize(
    "use",
    [use_and_drop, use_and_step, use_and_keep_the_graph, use_twice_differentiated, use_nested, use_and_fail],
)
@pytest.mark.parametrize(
    "policy",
    [policies.save_nothing, policies.save_all, policies.save_matmuls, keep_products, policies.save_names("q")],
    ids=name_of,
)
def test_no_use_under_a_policy_leaves_a_reference_cycle(
    use: Callable[[Region, PolicyLike], None], policy: PolicyLike
) -> None:
    for _ in range(STEPS):
        assert token_held_by(lambda fn: use(fn, policy))() is None


# Bytes


def live_bytes(fn: Callable[..., Tensor], policy: PolicyLike | None, *inputs: Tensor) -> list[int]:
    """Bytes that each of three forwards leaves behind, without its result."""
    region = recollect.checkpoint(fn) if policy is None else recollect.checkpoint(fn, policy=policy)
    found = []
    for _ in range(STEPS):
        with LiveBytes() as meter:
            y = region(*inputs)
            found.append(meter.live_bytes - y.untyped_storage().nbytes())
    return found


def products_and_views(x: Tensor, w: Tensor) -> Tensor:
    h = recollect.name(x @ w, "h")
    turned, flat = recollect.name(h.t(), "turned"), recollect.name(h.view(-1), "flat")
    return turned.sin().sum() * flat.cos().sum() + h.chunk(2)[1].exp().sum()


@pytest.mark.parametrize(
    "policy",
    [
        policies.save_matmuls,
        policies.save_names("h"),
        policies.save_names("turned"),
        policies.save_names("h", "turned", "flat"),
        policies.save_ops("aten.mm.default", "aten.t.default", "aten.view.default", "aten.split.Tensor"),
    ],
    ids=name_of,
)
def test_a_kept_value_and_its_views_are_held_once(policy: PolicyLike) -> None:
    x, w = square(), square()
    nothing = live_bytes(products_and_views, policies.save_nothing, x, w)
    ours = live_bytes(products_and_views, policy, x, w)
    assert [kept - least for kept, least in zip(ours, nothing, strict=True)] == [UNIT] * STEPS


@pytest.mark.parametrize(
    "outer", [policies.save_matmuls, keep_products, policies.save_ops("aten.mm.default")], ids=name_of
)
@pytest.mark.parametrize("inner", [policies.save_matmuls, keep_products, policies.save_names("h")], ids=name_of)
def test_a_value_that_two_nested_policies_keep_is_held_once(outer: PolicyLike, inner: PolicyLike) -> None:
    def part(x: Tensor, w: Tensor) -> Tensor:
        return recollect.name(x @ w, "h").sin()

    def whole(x: Tensor, w: Tensor) -> Tensor:
        return recollect.checkpoint(part, policy=inner)(x, w).exp()

    x, w = square(), square()
    assert live_bytes(whole, outer, x, w) == live_bytes(lambda x, w: part(x, w).exp(), outer, x, w) == [UNIT] * STEPS


def test_a_plain_region_around_forgets_what_the_inner_policy_keeps() -> None:
    def whole(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = recollect.checkpoint(lambda x, w: (x @ w).sin(), policy=policies.save_matmuls)(x, w)
        return y.exp()

    assert live_bytes(whole, None, square(), square()) == [0] * STEPS


def test_recomputed_values_go_as_backward_uses_them() -> None:
    length = 16

    def chain(x: Tensor, w: Tensor) -> Tensor:
        x = x @ w
        for _ in range(length):
            x = x.sin()
        return x

    def step(call: Callable[..., Tensor]) -> list[int]:
        """Bytes alive after each node of backward."""
        alive: list[int] = []
        with LiveBytes() as meter:
            loss = call(square(), square()).sum()
            node: Any = loss.grad_fn
            for _ in range(length):
                node = node.next_functions[0][0]
                node.register_hook(lambda *_: alive.append(meter.live_bytes))
            del node
            backward(loss)
        return alive

    plain, region = step(chain), recollect.checkpoint(chain, policy=policies.save_matmuls)
    for _ in range(STEPS):
        assert all(ours <= theirs for ours, theirs in zip(step(region), plain, strict=True))


@pytest.mark.parametrize("policy", [*WAYS.values(), policies.save_all], ids=name_of)
def test_three_hundred_steps_leave_live_bytes_and_objects_flat(policy: PolicyLike) -> None:
    chain = Chain()
    region = recollect.checkpoint(chain, policy=policy)
    readings = []
    with LiveBytes() as meter:
        for step in range(300):
            backward(region(square(), square()))
            if step % 50 == 20:
                readings.append((meter.live_bytes, len(gc.get_objects())))
    live, objects = zip(*readings, strict=True)
    assert set(live) == {0}
    assert objects[-1] - objects[1] < 20


# Exceptions


class Breaks(nn.Module):
    """Raises at one of its places, on request."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh())
        self.first.register_forward_hook(lambda *_: self.reach("in a kept module"))
        self.second[1].register_forward_hook(lambda *_: self.reach("in a module that is not kept"))
        self.at = ""

    def reach(self, place: str) -> None:
        if self.at == place:
            raise KeyError(place)

    def forward(self, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            self.reach("in a kept block")
            return x.sin()

        x = recollect.region("block")(block)(self.first(x))
        self.reach("in the function")
        y: Tensor = self.second(torch.dropout(x, 0.5, True)).exp()
        return y


@pytest.mark.parametrize(
    "policy",
    [
        policies.save_modules("first"),
        policies.first_match(policies.save_modules("first"), policies.save_names("block")),
        policies.first_match(policies.save_modules("first"), policies.save_names("block"), keep_products),
        policies.save_all,
    ],
    ids=name_of,
)
@pytest.mark.parametrize(
    "place", ["in a kept module", "in a module that is not kept", "in a kept block", "in the function"]
)
@pytest.mark.parametrize("before", range(STEPS))
def test_an_exception_in_forward_leaves_nothing_behind(policy: PolicyLike, place: str, before: int) -> None:
    model, watched = Breaks(), Watched()
    region = recollect.checkpoint(model, policy=policy)
    for _ in range(before):
        backward(region(square()).sum())
    in_force = what_is_in_force()
    model.at, x = place, square()
    watched.show(x=x)
    with pytest.raises(KeyError, match=place):
        region(x)
    del x
    in_force["random state"] = torch.get_rng_state().tolist()
    assert what_is_in_force() == in_force
    assert watcher.get() is None
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())
    assert watched.alive == set()
    model.at = ""
    for step in range(STEPS):
        x = square().detach().requires_grad_()
        gradients = []
        for call in (model, region):
            torch.manual_seed(step)
            gradients.append(torch.autograd.grad(call(x).sum(), [x, *model.parameters()]))
        assert all(map(torch.equal, *gradients))


def test_a_policy_that_raises_leaves_nothing_behind() -> None:
    def policy(site: Site) -> Decision:
        if site.op == "aten.tanh.default":
            raise KeyError(site.op)
        return Decision.SAVE

    model, in_force = Breaks(), what_is_in_force()
    with pytest.raises(KeyError):
        recollect.checkpoint(model, policy=policy)(square())
    in_force["random state"] = torch.get_rng_state().tolist()
    assert what_is_in_force() == in_force
    assert watcher.get() is None
