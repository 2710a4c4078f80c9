"""What runs again under a policy: exactly the operators that it does not keep, at the first call and at later ones."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode

import recollect
from recollect import Decision, Site, policies
from recollect._core.torch_private.dispatch import DispatchMode
from recollect._policy.base import PolicyLike
from tests.naming import name_of
from tests.watching import Counted, backward

# Many of these policies match nothing on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:policy .* this step")

STEPS = 3
WIDTH = 8
MATMUL_FLOPS = 2 * WIDTH**3


class Overloads(DispatchMode):
    """Counts the operators that run under it, by overload; those that only look at memory another way do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.shapes: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False) and str(func) != "aten.detach.default":
            self.counts[str(func).removeprefix("aten.")] += 1
            if isinstance(result, Tensor):
                self.shapes.append((str(func).removeprefix("aten."), tuple(result.shape)))
        return result


def square() -> Tensor:
    return torch.randn(WIDTH, WIDTH, requires_grad=True)


def squares(count: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(square() for _ in range(count))


def in_backward(loss: Tensor) -> Counter[str]:
    with Overloads() as overloads:
        backward(loss)
    del overloads.counts["add_.Tensor"]  # gradients of parameters add up from step to step
    return overloads.counts


def run_again(
    fn: Callable[..., Tensor], policy: PolicyLike, make: Callable[[], tuple[Any, ...]], **options: Any
) -> list[dict[str, int]]:
    """The operators that each of three steps under a policy runs in backward beyond those of the plain step."""
    region = recollect.checkpoint(fn, policy=policy, **options)
    found = []
    for _ in range(STEPS):
        plain, ours = in_backward(fn(*make()).sum()), in_backward(region(*make()).sum())
        assert plain <= ours
        found.append(dict(ours - plain))
    return found


def thrice(again: dict[str, int]) -> list[dict[str, int]]:
    return [again] * STEPS


# Operators


def two_products(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return ((x @ v).sin() @ w).sin()


def keep_second_product(site: Site) -> Decision:
    return Decision.SAVE if site.op == "aten.mm.default" and site.call == 1 else Decision.RECOMPUTE


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (policies.save_nothing, {"mm.default": 2, "sin.default": 1}),
        (policies.save_all, {}),
        (policies.save_matmuls, {"sin.default": 1}),
        (policies.save_ops("aten.sin.default"), {"mm.default": 2}),
        (policies.save_every("aten.mm.default", 2), {"mm.default": 1, "sin.default": 1}),
        (policies.save_larger_than(4 * WIDTH**2), {"mm.default": 2, "sin.default": 1}),
        (policies.save_larger_than(4 * WIDTH**2 - 1), {}),
        (policies.save_if(policies.flops > 0), {"sin.default": 1}),
        (policies.save_if(policies.flops_per_byte >= 2 * WIDTH), {"mm.default": 2, "sin.default": 1}),
        (policies.first_match(policies.save_matmuls, policies.save_ops("aten.sin.default")), {}),
        (policies.per_region({"two_*": policies.save_matmuls}), {"sin.default": 1}),
        (policies.per_region({"three_*": policies.save_matmuls}), {"mm.default": 2, "sin.default": 1}),
        (Decision.SAVE, {}),
        (Decision.RECOMPUTE, {"mm.default": 2, "sin.default": 1}),
        (keep_second_product, {"mm.default": 1, "sin.default": 1}),
    ],
    ids=name_of,
)
def test_operators_run_again_are_those_the_policy_does_not_keep(policy: PolicyLike, again: dict[str, int]) -> None:
    assert run_again(two_products, policy, squares(3)) == thrice(again)


def test_views_of_nothing_are_followed_at_later_calls() -> None:
    def turn_some(x: Tensor, v: Tensor, w: Tensor) -> Tensor:  # as rotary embeddings do that may leave some alone
        y = x @ v
        return (torch.cat((y[:, :WIDTH].sin(), y[:, WIDTH:]), dim=1) @ w).sin()

    assert run_again(turn_some, policies.save_matmuls, squares(3)) == thrice({"sin.default": 1, "cat.default": 1})


def test_a_write_into_a_view_of_memory_that_nobody_else_sees_is_followed_at_later_calls() -> None:
    def add_to_scores(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        scores = torch.einsum("ij,jk->ik", x, v)  # gives a view of a product
        scores += 1
        return (scores.sin() @ w).sin()

    policy = policies.save_ops("aten.mm.default")
    assert run_again(add_to_scores, policy, squares(3)) == thrice({"bmm.default": 1, "sin.default": 1})


@pytest.mark.parametrize(
    ("policy", "matmuls"),
    [
        (policies.save_nothing, 2),
        (policies.save_matmuls, 0),
        (policies.save_every("aten.mm.default", 2), 1),
        (policies.save_ops("aten.sin.default"), 2),
        (keep_second_product, 1),
    ],
    ids=name_of,
)
def test_flops_run_again_are_those_the_policy_does_not_keep(policy: PolicyLike, matmuls: int) -> None:
    region = recollect.checkpoint(two_products, policy=policy)
    for _ in range(STEPS):
        loss = region(square(), square(), square()).sum()
        with FlopCounterMode(display=False) as counter:
            backward(loss)
        assert counter.get_total_flops() == (4 + matmuls) * MATMUL_FLOPS


def test_every_second_call_is_the_first_the_third_and_the_fifth() -> None:
    def chain(x: Tensor, weights: list[Tensor]) -> Tensor:
        for weight in weights:
            x = (x @ weight).sin()
        return x

    region = recollect.checkpoint(chain, policy=policies.save_every("aten.mm.default", 2))
    for _ in range(STEPS):
        weights = [torch.randn(n, n + 1, requires_grad=True) for n in range(2, 7)]
        plain = chain(torch.ones(1, 2), weights).sum()
        loss = region(torch.ones(1, 2), weights).sum()
        with Overloads() as overloads:
            backward(loss)
        with Overloads() as expected:
            backward(plain)
        products = Counter(shape for op, shape in overloads.shapes if op == "mm.default")
        products -= Counter(shape for op, shape in expected.shapes if op == "mm.default")
        assert products == {(1, 4): 1, (1, 6): 1}  # the results of the second and the fourth


class Layer(nn.Module):
    """A transformer's layer in small, which counts how often its parts are entered."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())
        self.entered: Counter[str] = Counter()
        for path, module in self.named_modules():
            module.register_forward_pre_hook(lambda *_, path=path: self.entered.update([path]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        y: Tensor = x + self.mlp(x)
        return y


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu.default"
LAYER = {"native_layer_norm.default": 1, "addmm.default": 3, ATTENTION: 1, "add.Tensor": 1, "gelu.default": 1}


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (policies.save_matmuls, ["addmm.default"]),
        (policies.save_attention, [ATTENTION]),
        (policies.first_match(policies.save_matmuls, policies.save_attention), ["addmm.default", ATTENTION]),
        (
            policies.save_ops("aten.gelu.default", "aten.native_layer_norm.default"),
            ["gelu.default", "native_layer_norm.default"],
        ),
    ],
    ids=name_of,
)
def test_a_layer_runs_again_what_the_policy_does_not_keep(policy: PolicyLike, kept: list[str]) -> None:
    again = run_again(Layer(), policy, lambda: (torch.randn(2, 4, WIDTH, requires_grad=True),))
    expected = {**LAYER, "tanh.default": 1}
    for op in kept:
        del expected[op]
    assert again == thrice(expected)


# Blocks


@pytest.mark.parametrize(
    ("policy", "entered"),
    [
        (policies.save_modules("mlp"), {"", "norm", "qkv"}),
        (policies.save_modules("mlp.*"), {"", "norm", "qkv", "mlp"}),
        (policies.save_modules("mlp.0", "qkv"), {"", "norm", "mlp", "mlp.1", "mlp.2", "mlp.3"}),
        (policies.save_modules(nn.Linear), {"", "norm", "mlp", "mlp.1", "mlp.3"}),
        (policies.first_match(policies.save_modules("mlp"), policies.save_matmuls), {"", "norm", "qkv"}),
    ],
    ids=name_of,
)
def test_kept_modules_are_not_entered_again(policy: PolicyLike, entered: set[str]) -> None:
    layer = Layer()
    region = recollect.checkpoint(layer, policy=policy, early_stop=False)
    for _ in range(STEPS):
        loss = region(torch.randn(2, 4, WIDTH, requires_grad=True)).sum()
        layer.entered.clear()
        backward(loss)
        kept = {path for path, _ in layer.named_modules()} - entered
        assert kept.isdisjoint(layer.entered)
        assert all(count == 1 for count in layer.entered.values())


def test_the_operators_of_kept_modules_do_not_run_again() -> None:
    again = run_again(
        Layer(), policies.save_modules("mlp", "qkv"), lambda: (torch.randn(2, 4, WIDTH, requires_grad=True),)
    )
    for counts in again:
        assert "addmm.default" not in counts
        assert "gelu.default" not in counts
        assert "tanh.default" not in counts


def test_kept_blocks_are_not_entered_again() -> None:
    kept, other = Counted(lambda x, w: (x @ w).sin()), Counted(lambda x: x.tanh().sin())
    attn, rest = recollect.region("attn")(kept), recollect.region("rest")(other)

    def block(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = rest(attn(x, w)).exp()
        return y

    region = recollect.checkpoint(block, policy=policies.save_names("attn"))
    for step in range(1, STEPS + 1):
        counts = in_backward(region(square(), square()).sum())
        assert (kept.calls, other.calls) == (step, 2 * step)
        assert counts["mm.default"] == 2
        assert counts["sin.default"] == 1


def test_a_kept_block_that_is_called_several_times_is_given_in_order() -> None:
    scaled = Counted(lambda x, n: (x * n).sin())
    part = recollect.region("part")(scaled)

    def block(x: Tensor) -> Tensor:
        for n in range(1, 4):
            x = part(x, n).exp()
        return x

    region = recollect.checkpoint(block, policy=policies.save_names("part"))
    for step in range(1, STEPS + 1):
        x = square()
        (expected,) = torch.autograd.grad(block(x).sum(), x)
        backward(region(x).sum())
        assert x.grad is not None
        assert torch.equal(x.grad, expected)
        assert scaled.calls == 6 * step


def test_what_made_a_kept_value_does_not_run_again() -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        q = recollect.name(x @ w, "q")
        return (q.sin() @ w).sin()

    again = run_again(block, policies.save_names("q"), squares(2))
    assert again == thrice({"mm.default": 1, "sin.default": 1})
    again = run_again(
        block, policies.first_match(policies.save_names("q"), policies.save_ops("aten.sin.default")), squares(2)
    )
    assert again == thrice({"mm.default": 1})


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda q: q.t(),
    "reshape": lambda q: q.view(-1, 4),
    "half": lambda q: q.chunk(2)[0],
}


@pytest.mark.parametrize("view", VIEWS)
def test_what_made_the_memory_of_a_kept_view_does_not_run_again(view: str) -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        return recollect.name(VIEWS[view](x @ w), "q").sin().exp().sin()

    for counts in run_again(block, policies.save_names("q"), squares(2), name=view):
        assert "mm.default" not in counts


# Choices, which are kept unless the policy is strict

CHOICES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "topk": ("topk.default", lambda x: x.topk(3).values),
    "indices of topk": ("topk.default", lambda x: x.gather(-1, x.topk(3).indices)),
    "sort": ("sort.default", lambda x: x.gather(-1, x.sort(-1).indices)),
    "argsort": ("sort.default", lambda x: x.gather(-1, x.argsort(-1))),
    "argmax": ("argmax.default", lambda x: x.gather(-1, x.argmax(-1, keepdim=True))),
    "multinomial": ("multinomial.default", lambda x: x.gather(-1, x.detach().softmax(-1).multinomial(2))),
}


def routed(choose: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return choose(x @ w).sin()

    return fn


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    "policy",
    [
        policies.save_nothing,
        policies.save_matmuls,
        policies.save_names("q"),
        policies.first_match(policies.save_random, policies.otherwise(Decision.RECOMPUTE)),
        lambda _: Decision.RECOMPUTE,
    ],
    ids=name_of,
)
def test_choices_do_not_run_again_under_any_policy(choice: str, policy: PolicyLike) -> None:
    op, choose = CHOICES[choice]
    # Functions that share their code share what is learned of them, unless their regions have other names.
    for counts in run_again(routed(choose), policy, squares(2), name=choice, early_stop=False):
        assert op not in counts


@pytest.mark.parametrize("choice", CHOICES)
def test_choices_run_again_under_a_strict_policy(choice: str) -> None:
    op, choose = CHOICES[choice]
    policy = policies.strictly(policies.save_matmuls)
    for counts in run_again(routed(choose), policy, squares(2), name=f"strict {choice}", early_stop=False):
        assert counts[op] == 1


def test_choices_of_a_call_that_goes_another_way_do_not_run_again() -> None:
    # Two do: argsort keeps its indices alone, where sort beneath it gives values too; and a draw moves the generator.
    for op, choose in (found for choice, found in CHOICES.items() if choice not in ("argsort", "multinomial")):
        for counts in run_again(routed(choose), policies.save_matmuls, squares(2), name="shared", early_stop=False):
            assert op not in counts


def test_choices_run_again_without_a_policy() -> None:
    x, w = square(), square()
    counts = in_backward(recollect.checkpoint(routed(CHOICES["topk"][1]), early_stop=False)(x, w).sum())
    assert counts["topk.default"] == 1


# Random numbers


@pytest.mark.parametrize("policy", [policies.save_random, policies.save_ops("aten.bernoulli_.float")], ids=name_of)
def test_kept_random_numbers_leave_the_generator_where_forward_left_it(policy: PolicyLike) -> None:
    positions: list[list[Tensor]] = []

    def fn(x: Tensor) -> Tensor:
        positions[-1].append(torch.get_rng_state())
        y = F.dropout(x.sin(), 0.5)
        positions[-1].append(torch.get_rng_state())
        y = F.dropout(y.exp(), 0.25).sin()
        positions[-1].append(torch.get_rng_state())
        return y

    region = recollect.checkpoint(fn, policy=policy, early_stop=False)
    for _ in range(STEPS):
        positions.append([])
        loss = region(square()).sum()
        torch.rand(3)
        before = torch.get_rng_state()
        backward(loss)
        assert torch.equal(torch.get_rng_state(), before)
        in_forward, again = positions[-1][:3], positions[-1][3:]
        if again:  # the function itself may not run again
            assert all(map(torch.equal, in_forward, again))


def test_random_numbers_after_kept_ones_are_drawn_again_alike() -> None:
    def fn(x: Tensor) -> Tensor:
        y = F.dropout(x.sin(), 0.5)
        return (y * torch.rand(WIDTH, WIDTH)).exp() * torch.randn(WIDTH, WIDTH)

    region = recollect.checkpoint(fn, policy=policies.save_ops("aten.bernoulli_.float"))
    for step in range(STEPS):
        gradients = []
        for call in (fn, region):
            torch.manual_seed(step)
            x = torch.linspace(-1, 1, WIDTH**2).view(WIDTH, WIDTH).requires_grad_()
            backward(call(x).sum())
            gradients.append(x.grad)
        assert gradients[0] is not None
        assert gradients[1] is not None
        assert torch.equal(gradients[0], gradients[1])


# Only what is needed


def test_only_what_is_needed_runs_again() -> None:
    def branches(x: Tensor, v: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ v).tanh().sin(), (y @ w).exp().cos()

    region = recollect.checkpoint(branches, policy=policies.save_matmuls)
    for step in range(STEPS):
        args = [square() for _ in range(4)]
        one, other = region(*args)
        with Overloads() as overloads:
            one.sum().backward(retain_graph=True)
        if step > 0:  # the first call is recomputed whole
            assert overloads.counts["tanh.default"] == 1
            assert overloads.counts["exp.default"] == 0
        with Overloads() as overloads:
            other.sum().backward()
        if step > 0:
            assert overloads.counts["tanh.default"] == 0
            assert overloads.counts["exp.default"] == 1


def test_a_product_behind_a_kept_value_does_not_run_again_for_it() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).exp().exp()  # each saves its result only, so the product itself is needed by nobody

    again = run_again(fn, policies.save_ops("aten.exp.default"), squares(2))
    assert [counts.get("mm.default", 0) for counts in again[1:]] == [0] * (STEPS - 1)
