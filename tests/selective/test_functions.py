"""Custom autograd Functions: kept as one operator, inside kept blocks, and beside what is kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import Decision, policies
from recollect._policy.base import PolicyLike
from tests.corpus import AddOne, Cube, Scramble, apply
from tests.selective.comparing import SIZE, STEPS, assert_like_plain, square, squares
from tests.watching import backward

# Many of these policies match nothing on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:policy .* this step")


class Noisy(torch.autograd.Function):
    """Draws, and keeps what it drew where autograd does not see it."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        Noisy.runs += 1
        ctx.noise = torch.rand_like(x) * strength
        y: Tensor = x * ctx.noise
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.noise, None


class Split(torch.autograd.Function):
    """Gives two tensors, one of them a view of what it makes, and materialises no gradients."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        Split.runs += 1
        ctx.set_materialize_grads(False)
        y = x.exp()
        ctx.save_for_backward(y)
        return y * 2, y * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (y,) = ctx.saved_tensors
        scaled = [g * y * n for g, n in zip(gradients, (2, 3), strict=True) if g is not None]
        return torch.stack(scaled).sum(0)


def noisy(x: Tensor) -> Tensor:
    y: Tensor = apply(Noisy, x, 2.0)
    return y


def split(x: Tensor) -> Tensor:
    first, second = apply(Split, x)
    y: Tensor = first.sin() * second.cos() + apply(Split, x.sin())[0]
    return y


def scramble(x: Tensor) -> Tensor:
    y, order = apply(Scramble, x.flatten())
    z: Tensor = y.sin() * order
    return z


FUNCTIONS: dict[str, tuple[type[torch.autograd.Function], Callable[[Tensor], Tensor]]] = {
    "cube": (Cube, lambda x: apply(Cube, x.exp(), 3)),
    "cube twice": (Cube, lambda x: apply(Cube, apply(Cube, x.exp(), 2).tanh() + 2, 3)),
    "with an integer result": (Scramble, scramble),
    "in place": (AddOne, lambda x: apply(AddOne, x * x).exp()),
    "noisy": (Noisy, noisy),
    "two results": (Split, split),
}
each_function = pytest.mark.parametrize("function", FUNCTIONS)
twice_or_once = pytest.mark.parametrize("twice", [False, True])


def around(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The function between other operators, the last of which draw."""
    return lambda x: (recollect.region("kernel")(fn)(x.sin()).tanh() * torch.rand(())).exp()


@each_function
@twice_or_once
@pytest.mark.parametrize("way", ["operator", "region", "operator and others", "all", "random", "products", "coin"])
def test_functions_of_ones_own(function: str, way: str, twice: bool) -> None:
    kind, fn = FUNCTIONS[function]
    ways: dict[str, PolicyLike] = {
        "operator": policies.save_ops(kind),
        "region": policies.save_names("kernel"),
        "operator and others": policies.first_match(policies.save_ops(kind), policies.save_ops("aten.sin.default")),
        "all": policies.save_all,
        "random": policies.save_random,
        "products": policies.save_ops("aten.mul.Tensor"),
        "coin": lambda site: Decision.SAVE if (len(site.op) + site.call) % 2 else Decision.RECOMPUTE,
    }
    assert_like_plain(around(fn), ways[way], squares(1), twice=twice)


class RelativePosition(nn.Module):
    """A product with a parameter that is turned, whose other factor torch copies inside: both are saved there."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(3, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        strided = x.sin().expand(2, 3, SIZE, SIZE).transpose(1, 2).transpose(2, 3).transpose(1, 3)
        found: Tensor = (strided @ self.positions.transpose(0, 1)).sigmoid().exp()
        return found


def test_a_product_with_a_view_of_a_parameter_saves_the_same_when_it_is_made_again() -> None:
    module = RelativePosition()
    assert_like_plain(module, policies.save_ops("aten.sin.default"), squares(1), module=module)


@each_function
def test_modules_that_call_a_function_of_ones_own_are_kept(function: str) -> None:
    _, fn = FUNCTIONS[function]

    class Kernel(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return fn(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = Kernel()

        def forward(self, x: Tensor) -> Any:
            return (self.kernel(x.sin()).tanh() * torch.rand(())).exp()

    assert_like_plain(Net(), policies.save_modules("kernel"), squares(1))
    assert_like_plain(Net(), policies.save_modules(Kernel), squares(1), twice=True)


@pytest.mark.parametrize(("kind", "fn", "calls"), [(Noisy, noisy, 1), (Split, split, 2)], ids=["noisy", "two results"])
def test_a_kept_function_does_not_run_again(kind: Any, fn: Callable[[Tensor], Tensor], calls: int) -> None:
    region = recollect.checkpoint(around(fn), policy=policies.save_ops(kind))
    for _ in range(STEPS):
        kind.runs = 0
        backward(region(square()).sum())
        assert kind.runs == calls


def test_every_second_call_of_a_function_is_kept() -> None:
    def chain(x: Tensor) -> Tensor:
        for _ in range(5):
            x = noisy(x).sin().exp()
        return x

    region = recollect.checkpoint(chain, policy=policies.save_every(Noisy, 2), early_stop=False)
    for _ in range(STEPS):
        Noisy.runs = 0
        backward(region(square()).sum())
        assert Noisy.runs == 5 + 2
    assert_like_plain(chain, policies.save_every(Noisy, 2), squares(1))


def test_functions_of_other_regions_and_of_none_are_left_alone() -> None:
    x = square()
    own = vars(Noisy).get("apply")
    region = recollect.checkpoint(around(noisy), policy=policies.save_ops(Noisy))
    for _ in range(STEPS):
        backward(region(x).sum())
        assert vars(Noisy).get("apply") is own
        Noisy.runs = 0
        backward(recollect.checkpoint(around(noisy))(x).sum())
        assert Noisy.runs == 2


def test_a_function_beside_what_is_kept_does_not_disturb_the_program() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.down(Split.apply(self.up(x))[0]) + x  # type: ignore[no-untyped-call]
            return found

    module = Gated()
    wrapped = recollect.checkpoint(module, policy=policies.save_ops("aten.addmm.default"))
    for _ in range(3):
        wrapped(torch.randn(4, 8, requires_grad=True)).sum().backward()
        assert "recomputed by replaying" in str(recollect.explain(wrapped))


def test_what_a_function_gives_requires_grad_only_when_it_is_over() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def fn(x: Tensor) -> Tensor:
        found: Tensor = module[1](Cube.apply(module[0](x), 3))  # type: ignore[no-untyped-call]
        return found

    region = recollect.checkpoint(fn, policy=policies.save_ops("aten.addmm.default"))
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = region(torch.randn(4, 8, requires_grad=True)).sum()
        loss.backward()
        assert "recomputed by replaying" in str(recollect.explain(region))
