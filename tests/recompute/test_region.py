"""A region can be entered and left by hand, as the hooks of a module do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._recompute.frame import Frame
from recollect._recompute.match import Matcher
from recollect._recompute.region import Region
from recollect._recompute.way import Options
from tests.watching import Counted, backward, what_is_in_force

# To the end, because these hooks do not see the exception that stops a recomputation early.
OPTIONS = Options(preserve=frozenset({"torch"}), early_stop=False, matcher=Matcher())


def by_hooks(module: nn.Module) -> Counted:
    """Make every call of a module a region, by hooks alone; counts the calls of its forward."""
    counted = Counted(module.forward)
    module.forward = counted
    region = Region(type(module).__name__, counted, OPTIONS)
    open_frames: list[Frame] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        open_frames.append(region.enter(args, kwargs))

    def after(_: nn.Module, _args: tuple[Any, ...], result: Any) -> None:
        open_frames.pop().leave(result)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
    return counted


def test_hooks_of_a_module_can_drive_a_region() -> None:
    torch.manual_seed(0)
    block, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(3, 3)), torch.randn(2, 3)
    torch.manual_seed(1)
    expected = torch.autograd.grad(block(x).sum(), list(block.parameters()))
    counted = by_hooks(block)
    torch.manual_seed(1)
    got = torch.autograd.grad(block(x).sum(), list(block.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert counted.calls == 2


def test_regions_driven_by_hooks_nest() -> None:
    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    outer, x = nn.Sequential(nn.Linear(3, 3), inner, nn.Tanh()), torch.randn(2, 3)
    expected = torch.autograd.grad(outer(x).sum(), list(outer.parameters()))
    for module in (inner, outer):
        by_hooks(module)
    got = torch.autograd.grad(outer(x).sum(), list(outer.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("end", ["leave", "fail"])
def test_whatever_ends_a_region_takes_its_hooks_away(end: str) -> None:
    x = torch.ones(2, requires_grad=True)
    before = what_is_in_force()
    frame = Region("f", torch.exp, OPTIONS).enter((x,), {})
    assert what_is_in_force() != before
    if end == "leave":
        frame.leave(x.exp())
    else:
        assert frame.fail(KeyError()) is False
    assert what_is_in_force() == before


def test_a_region_can_be_open_several_times() -> None:
    fn, x = Counted(lambda x: x.exp().sin()), torch.ones(2, requires_grad=True)
    region = Region("f", fn, OPTIONS)
    first, second = region.call((x,), {}), region.call((x * 2,), {})
    backward((first + second).sum())
    assert fn.calls == 4
    assert x.grad is not None


def test_saved_tensor_hooks_around_and_inside_a_region_compose() -> None:
    events: list[str] = []

    def hooks(name: str) -> torch.autograd.graph.saved_tensors_hooks:
        def pack(tensor: Tensor) -> Tensor:
            events.append(f"pack {name}")
            return tensor

        def unpack(tensor: Tensor) -> Tensor:
            events.append(f"unpack {name}")
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def fn(x: Tensor) -> Tensor:
        with hooks("inner"):
            y = x.exp()
        return y.sin()

    x = torch.ones(2, requires_grad=True)
    with hooks("outer"):
        y = recollect.checkpoint(fn)(x)
    assert events == ["pack outer", "pack inner"]
    backward(y.sum())
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().sum(), x)[0])
    assert "unpack outer" in events


def test_inputs_can_live_where_an_enclosing_hook_puts_them() -> None:
    x = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = recollect.checkpoint(lambda a, *, b: (a * b).exp().sin())(x * 2, b=x.cos())
    backward(y.sum())
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(((x * 2) * x.cos()).exp().sin().sum(), x)[0])


def test_the_wrapper_looks_like_the_function() -> None:
    def attention(q: Tensor, *, debug: bool = False, policy: str = "") -> Tensor:
        """Attend."""
        return q.exp() if debug and policy else q

    region = recollect.checkpoint(attention, name="a")
    assert (region.__name__, region.__doc__) == ("attention", "Attend.")
    assert region(torch.zeros(1), debug=True, policy="x") == 1
    decorated = recollect.checkpoint(name="a", check="values")(attention)
    assert decorated(torch.zeros(1)) == 0


def test_arguments_named_like_options_reach_the_function() -> None:
    def fn(x: Tensor, *, name: int, fn: int, preserve_rng: int, early_stop: int, check: int, options: int) -> Any:
        return x.exp() * (name + fn + preserve_rng + early_stop + check + options)

    x = torch.zeros(2, requires_grad=True)
    y = recollect.checkpoint(fn)(x, name=1, fn=2, preserve_rng=3, early_stop=4, check=5, options=6)
    backward(y.sum())
    assert x.grad is not None
    assert x.grad.tolist() == [21.0, 21.0]
