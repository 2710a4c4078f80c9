"""Autocast around a region under a policy: casts belong to the call they are in, and are made again alone."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import recollect
from recollect import Decision, policies
from recollect._core.forecasts import PlannedRegion
from recollect._core.torch_private.dispatch import DispatchMode
from recollect._profile.memory import LiveBytes
from tests.watching import Operators

SIZE = 8


class Block(nn.Module):
    """Full-precision weights, as under autocast; each product's result is read by something that backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(SIZE), nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(gelu(self.up(self.norm(x))))
        return y


def run(fn: Callable[..., Tensor], *args: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return fn(*args).float().square().sum()


def assert_same_steps(fn: Callable[..., Tensor], region: Callable[..., Tensor], wanted: list[Tensor]) -> None:
    for _ in range(3):
        x = torch.randn(2, 4, SIZE, requires_grad=True)
        expected = torch.autograd.grad(run(fn, x), [x, *wanted])
        assert all(map(torch.equal, torch.autograd.grad(run(region, x), [x, *wanted]), expected))


def how(region: Callable[..., Tensor]) -> str:
    return str(recollect.explain(region)).splitlines()[-1]


def test_kept_products_of_full_precision_weights_are_replayed_from() -> None:
    block = Block()
    region = recollect.checkpoint(block, policy=policies.save_matmuls)
    assert_same_steps(block, region, list(block.parameters()))
    assert how(region).startswith("recomputed by replaying")


def test_casts_are_not_held_and_kept_products_not_repeated() -> None:
    block = Block()
    region = recollect.checkpoint(block, policy=policies.save_matmuls)
    assert_same_steps(block, region, list(block.parameters()))
    loss = run(region, torch.randn(2, 4, SIZE, requires_grad=True))
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert counter.get_total_flops() == 2 * 2 * 2 * (2 * 4) * SIZE * 4 * SIZE  # two layers, two products each
    product = 2 * 4 * 4 * SIZE * 2  # of `up`, in half precision; backward has no use for that of `down`
    assert f"({product} B)" in how(region)


def test_a_product_that_backward_has_no_use_for_is_not_repeated_for_its_casts() -> None:
    block = Block()
    region = recollect.checkpoint(block, policy=policies.save_every(["aten.addmm.default"], 2))
    assert_same_steps(block, region, list(block.parameters()))
    assert how(region).startswith("recomputed by replaying")
    loss = run(region, torch.randn(2, 4, SIZE, requires_grad=True))
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert counter.get_total_flops() == 2 * 2 * 2 * (2 * 4) * SIZE * 4 * SIZE


def test_a_weight_that_is_frozen_later() -> None:
    # What a product saves then is another list of tensors, here of the same shapes.
    first, second = nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE, bias=False)

    def fn(x: Tensor) -> Tensor:
        found: Tensor = second(first(x.sin()).tanh()).exp()
        return found

    region = recollect.checkpoint(fn, policy=policies.save_matmuls)
    for is_frozen in (False, True, False, True):
        first.weight.requires_grad_(not is_frozen)
        wanted = [second.weight] if is_frozen else [first.weight, second.weight]
        for _ in range(3):
            x = torch.randn(SIZE, SIZE, requires_grad=True)
            expected = torch.autograd.grad(run(fn, x), [x, *wanted])
            assert all(map(torch.equal, torch.autograd.grad(run(region, x), [x, *wanted]), expected))


def test_attention_whose_mask_is_a_keyword_casts_some_of_its_arguments() -> None:
    mask, weight = torch.randn(4, 4), torch.randn(SIZE, SIZE, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        query = (x @ weight).unflatten(-1, (2, -1)).transpose(1, 2)  # in half precision; key and value are not
        other = x.sin().unflatten(-1, (2, -1)).transpose(1, 2)
        return scaled_dot_product_attention(query, other, other, attn_mask=mask).exp()

    region = recollect.checkpoint(fn, policy=policies.save_attention)
    assert_same_steps(fn, region, [weight])


@pytest.mark.parametrize("frozen", [0, 1, None])
def test_casts_are_told_by_what_is_cast_and_not_by_values_that_two_arguments_may_share(frozen: int | None) -> None:
    def fn(one: Tensor, other: Tensor) -> Tensor:
        return torch.mm(one, other).tanh()

    region = recollect.checkpoint(fn, policy=policies.save_ops("aten.mm.default", "aten.tanh.default"))
    for make in (torch.zeros, torch.randn, torch.randn):
        given = [make(SIZE, SIZE).requires_grad_(number != frozen) for number in range(2)]
        wanted = [one for one in given if one.requires_grad]
        expected = torch.autograd.grad(run(fn, *given), wanted)
        assert all(map(torch.equal, torch.autograd.grad(run(region, *given), wanted), expected))
    assert how(region).startswith("recomputed by replaying")


def test_a_weight_that_autocast_has_cast_before_the_region_is_learned() -> None:
    layer = nn.Linear(SIZE, SIZE)
    region = recollect.checkpoint(lambda x: layer(x.sin()).tanh(), policy=policies.save_matmuls)

    def twice(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: fn(x) * layer(x)

    assert_same_steps(twice(lambda x: layer(x.sin()).tanh()), twice(region), list(layer.parameters()))
    assert how(region).startswith("recomputed by replaying")


def test_of_a_kept_value_that_is_only_cast_the_cast_is_held_in_its_place() -> None:
    block = Block()
    region = recollect.checkpoint(
        block, policy=policies.save_ops("aten.addmm.default", "aten.native_layer_norm.default")
    )
    made: list[weakref.ref[torch.UntypedStorage]] = []
    with block.norm.register_forward_hook(lambda *call: made.append(weakref.ref(call[2].untyped_storage()))):
        assert_same_steps(block, region, list(block.parameters()))
        made.clear()
        loss = run(region, torch.randn(2, 4, SIZE, requires_grad=True))
    assert made[0]() is None
    with Operators() as seen:
        loss.backward()
    assert not seen.all.count("native_layer_norm")


def test_a_product_that_is_made_again_is_given_the_cast_that_is_held() -> None:
    block = Block()
    region = recollect.checkpoint(block, policy=policies.save_ops("aten.native_layer_norm.default"))
    made: list[weakref.ref[torch.UntypedStorage]] = []
    with block.norm.register_forward_hook(lambda *call: made.append(weakref.ref(call[2].untyped_storage()))):
        assert_same_steps(block, region, list(block.parameters()))
        made.clear()
        loss = run(region, torch.randn(2, 4, SIZE, requires_grad=True))
    assert how(region).startswith("recomputed by replaying")
    assert made[0]() is None
    with Operators() as seen, FlopCounterMode(display=False) as counter:
        loss.backward()
    assert not seen.all.count("native_layer_norm")
    up = 2 * 2 * 4 * SIZE * 4 * SIZE
    assert counter.get_total_flops() == 5 * up  # two products in backward for each, and one of them made again


def test_a_product_that_is_made_again_of_a_view_is_given_a_view_of_the_held_cast() -> None:
    block = Block()

    def fn(x: Tensor) -> Tensor:
        y = block.norm(x).view(-1, SIZE)
        return gelu(torch.addmm(block.up.bias, y, block.up.weight.t()))

    region = recollect.checkpoint(fn, policy=policies.save_ops("aten.native_layer_norm.default"))
    made: list[weakref.ref[torch.UntypedStorage]] = []
    with block.norm.register_forward_hook(lambda *call: made.append(weakref.ref(call[2].untyped_storage()))):
        assert_same_steps(fn, region, [*block.norm.parameters(), *block.up.parameters()])
        made.clear()
        loss = run(region, torch.randn(2, 4, SIZE, requires_grad=True))
    assert made[0]() is None
    loss.backward()


def test_a_value_that_is_also_read_as_it_is_is_held_itself() -> None:
    block = Block()

    def fn(x: Tensor) -> Tensor:
        y: Tensor = block.norm(x)
        return gelu(block.up(y)).sum(-1, keepdim=True) * y.tanh()

    region = recollect.checkpoint(fn, policy=policies.save_ops("aten.native_layer_norm.default"))
    assert_same_steps(fn, region, [*block.norm.parameters(), *block.up.parameters()])
    assert how(region).startswith("recomputed by replaying")


def test_a_held_cast_of_zeros_stands_for_no_other_value() -> None:
    """While it is learned, what is normalized and its cast are zeros, and so are many others."""
    block = Block()
    nn.init.zeros_(block.norm.weight)
    nn.init.zeros_(block.norm.bias)

    def fn(x: Tensor) -> Tensor:
        y: Tensor = block.norm(x)
        return gelu(block.up(y)) + nn.functional.bilinear(y, y, bilinear)

    bilinear = torch.randn(4 * SIZE, SIZE, SIZE)
    region = recollect.checkpoint(fn, policy=policies.save_ops("aten.native_layer_norm.default"))
    run(region, torch.randn(2, 4, SIZE, requires_grad=True)).backward()
    with torch.no_grad():
        block.norm.weight.normal_()
        block.norm.bias.normal_()
    assert_same_steps(fn, region, [*block.norm.parameters(), *block.up.parameters()])


def test_a_parameter_that_changes_before_backward_is_refused() -> None:
    block = Block()
    region = recollect.checkpoint(block, policy=policies.save_matmuls)
    assert_same_steps(block, region, list(block.parameters()))
    loss = run(region, torch.randn(2, 4, SIZE, requires_grad=True))
    with torch.no_grad():
        block.up.weight.mul_(2)
    with pytest.raises(recollect.ChangedInputError, match="changed in place"):
        loss.backward()


def test_autocast_holds_no_casts_of_what_a_backward_under_it_replays() -> None:
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def fn(x: Tensor) -> Tensor:
        found: Tensor = layers(x.sin()).sin()
        return found

    def find_left_bytes(call: Callable[[Tensor], Tensor]) -> int:
        layers.zero_grad()
        with LiveBytes() as meter, torch.autocast("cpu", dtype=torch.bfloat16):
            call(torch.randn(512, 64, requires_grad=True)).sum().backward()
            return meter.live_bytes

    def keep_last(site: recollect.Site) -> Decision:
        return Decision.SAVE if "addmm" in site.op and site.call == 1 else Decision.RECOMPUTE

    region = recollect.checkpoint(fn, policy=keep_last)
    plain = find_left_bytes(fn)
    assert [find_left_bytes(region) for _ in range(3)] == [plain] * 3
    assert "recomputed by replaying" in str(recollect.explain(region))


def test_calls_under_autocast_and_without_are_learned_apart() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    ours = copy.deepcopy(plain)
    region = recollect.checkpoint(ours, policy=policies.save_matmuls)
    for step in range(8):
        x = torch.randn(4, 8)
        found = []
        for call, module in ((plain, plain), (region, ours)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step % 2 == 0):
                loss = call(x).square().sum()
            found.append(torch.autograd.grad(loss, [*module.parameters()]))
        assert all(map(torch.equal, *found))
    calls = recollect.explain(region).regions[0].calls
    assert [call.calls for call in calls] == [4, 4]
    assert sorted("under autocast" in call.arguments for call in calls) == [False, True]


class Attends(nn.Module):
    """torch's own attention, whose weight for queries, keys and values is one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.mixed = nn.MultiheadAttention(SIZE, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        found: Tensor = x + self.mixed(y, y, y, need_weights=False)[0]
        return found


class Convolves(nn.Module):
    """Images on their way through convolutions, one of them transposed, and a weight that two products share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.back = nn.Conv2d(4, SIZE, 3, padding=1), nn.ConvTranspose2d(SIZE, 4, 3, padding=1)
        self.mix = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(gelu(self.mix(self.first(x).transpose(1, -1)))).transpose(1, -1)
        found: Tensor = x + self.back(gelu(y))
        return found


class Casts(DispatchMode):
    """Counts how often matrices and images of parameters are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.count += isinstance(args[0], nn.Parameter) and args[0].dim() > 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("make", "op"),
    [
        *((Block, f"aten.{op}.default") for op in ("native_layer_norm", "gelu", "addmm")),
        *((Convolves, f"aten.{op}.default") for op in ("convolution", "gelu", "mm")),
        *((Attends, f"aten.{op}.default") for op in ("native_layer_norm", "mm", "addmm")),
    ],
)
def test_casts_of_weights_that_a_plan_keeps_are_not_made_again(make: type[nn.Module], op: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make(), make())
    shape = (2, 4, SIZE, SIZE) if make is Convolves else (2, 4, SIZE)

    def step() -> tuple[list[Tensor], int]:
        torch.manual_seed(1)
        x = torch.randn(shape, requires_grad=True)
        loss = run(model, x)
        with Casts() as casts:
            found = torch.autograd.grad(loss, [x, *model.parameters()])
        return list(found), casts.count

    expected, _ = step()
    choices = (recollect.Choice(decision=Decision.SAVE, op=op),)
    counts = []
    for keeps_casts in (False, True):
        regions = tuple(
            PlannedRegion(path=path, kind=make.__name__, way="replay", keeps_casts=keeps_casts) for path in "01"
        )
        with recollect.apply(model, recollect.Plan(choices=choices, regions=regions)) as handle:
            for _ in range(3):
                found, count = step()
                assert all(map(torch.equal, found, expected))
            said = [call.way for region in recollect.explain(handle).regions for call in region.calls]
            assert set(said) == {"by replaying what backward asks for"}
        counts.append(count)
    assert counts[0] >= 4
    assert counts[1] == 0
