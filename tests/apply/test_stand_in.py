"""What stands in a module's forward: bindings, copies, lifetimes, and others who replace forward too."""

import copy
import functools
import inspect
import pickle
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations

import recollect
from recollect import Decision
from tests.collecting import collect_new, without_collector
from tests.models import GPT, Block, Looped
from tests.watching import Seen

RECOMPUTE = Decision.RECOMPUTE


@pytest.fixture
def without_gc() -> Iterator[None]:
    collect_new()
    with without_collector():
        yield


class Counting(nn.Module):
    """Counts its runs, recomputations included."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.widths = Seen[int]()

    @property
    def runs(self) -> int:
        return len(self.widths)

    def forward(self, x: Tensor, *, times: int = 1) -> Tensor:
        self.widths.append(x.shape[-1])
        result: Tensor = self.linear(x).sin() * times
        return result


def applied(module: nn.Module | None = None) -> Any:
    model = nn.Sequential(module or Counting())
    recollect.apply(model, {"0": RECOMPUTE})
    return model


def test_forward_looks_like_the_modules_own() -> None:
    model = applied()
    assert inspect.signature(model[0].forward) == inspect.signature(Counting().forward)
    assert repr(model[0].forward) == "<forward of '0' as a region of recollect>"


def test_calling_forward_itself_is_a_region_too() -> None:
    model = applied()
    model[0].forward(torch.ones(2, 3), times=2).sum().backward()
    assert model[0].runs == 2


@pytest.mark.usefixtures("without_gc")
def test_a_model_dies_without_the_garbage_collector() -> None:
    model = GPT()
    handle = recollect.apply(model, {"layers.*": RECOMPUTE, "layers.*.attn": Decision.SAVE})
    model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    weak = weakref.ref(model)
    del model
    assert weak() is None
    handle.remove()


@pytest.mark.usefixtures("without_gc")
def test_a_model_that_is_gone_can_still_be_run_backward() -> None:
    model = applied()
    x = torch.ones(2, 3, requires_grad=True)
    loss = model(x).sum()
    weak = weakref.ref(model[0])
    del model
    assert weak() is not None  # the region needs it
    loss.backward()
    assert x.grad is not None
    del loss
    assert weak() is None


def test_a_copy_of_a_part_is_bound_to_the_copy() -> None:
    model = applied()
    twin = copy.deepcopy(model[0])
    twin(torch.ones(2, 3)).sum().backward()
    assert (twin.runs, model[0].runs) == (2, 0)
    assert model[0].linear.weight.grad is None


def test_a_class_that_copies_itself_is_copied_as_it_says() -> None:
    class Copied(Counting):
        def __deepcopy__(self, memo: dict[int, Any]) -> "Copied":
            new = Copied()
            vars(new).update(copy.deepcopy(vars(self), memo))
            return new

    model = applied(Copied())
    twin = copy.deepcopy(model)
    twin(torch.ones(2, 3)).sum().backward()
    assert (twin[0].runs, model[0].runs) == (2, 0)
    assert twin[0].linear.weight.grad is not None
    assert model[0].linear.weight.grad is None


def test_a_shallow_copy_is_plain() -> None:
    model = applied()
    twin = copy.copy(model[0])
    assert "forward" not in vars(twin)
    twin(torch.ones(2, 3)).sum().backward()
    assert twin.widths is model[0].widths
    assert twin.runs == 1


def test_a_pickled_module_has_no_trace() -> None:
    model = applied()
    plain = Counting()
    assert list(vars(pickle.loads(pickle.dumps(model[0])))) == list(vars(plain))
    assert {*vars(model[0])} - {*vars(plain)} == {"forward", "__deepcopy__", "__reduce_ex__"}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        twin = pickle.loads(pickle.dumps(model, protocol))
        twin(torch.ones(2, 3)).sum().backward()
        assert (twin[0].runs, model[0].runs) == (1, 0)


def test_a_forward_without_its_module_says_so() -> None:
    forward = applied()[0].forward
    with pytest.raises(
        RuntimeError, match=r"the module of this forward \('0', a region of recollect.apply\) has been freed"
    ):
        forward(torch.ones(2, 3))


def test_a_static_forward_is_called_as_it_is() -> None:
    class Static(nn.Module):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.sin().exp()

    x = torch.ones(2, requires_grad=True)
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), x)
    model = applied(Static())
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        assert torch.equal(torch.autograd.grad(call(x).sum(), x)[0], expected)


def test_forward_tells_readers_what_they_ask_of_a_function() -> None:
    model = applied()
    forward, plain = model[0].forward, Counting().forward
    assert forward.__name__ == "forward"
    assert forward.__qualname__ == plain.__qualname__
    assert forward.__annotations__ == plain.__annotations__
    assert not hasattr(forward, "__func__")  # who unbinds it would leave the region out


def test_a_forward_set_before_is_run_as_the_region() -> None:
    module = Counting()
    calls: list[bool] = []

    def theirs(self: Counting, x: Tensor) -> Tensor:
        calls.append(recollect.is_recomputing())
        return Counting.forward(self, x)

    module.forward = types.MethodType(theirs, module)  # type: ignore[method-assign]
    before = module.forward
    handle = recollect.apply(nn.Sequential(module), {"0": RECOMPUTE})
    module(torch.ones(2, 3)).sum().backward()
    assert calls == [False, True]
    twin = copy.deepcopy(module)
    twin(torch.ones(2, 3)).sum().backward()
    assert (twin.runs, module.runs) == (4, 2)
    handle.remove()
    assert vars(module)["forward"] is before


def test_a_forward_set_afterwards_stays_and_the_region_under_it_goes() -> None:
    model = nn.Sequential(Counting())
    handle = recollect.apply(model, {"0": RECOMPUTE})
    ours = model[0].forward

    def theirs(*args: Any) -> Any:
        return ours(*args)

    model[0].forward = theirs
    model(torch.ones(2, 3)).sum().backward()
    assert model[0].runs == 2
    handle.remove()
    assert model[0].forward is theirs
    model(torch.ones(2, 3)).sum().backward()
    assert model[0].runs == 3


def test_swapped_parameters_reach_the_recomputation() -> None:
    model = applied()
    parameters = {name: torch.randn_like(p, requires_grad=True) for name, p in model.named_parameters()}
    x = torch.randn(2, 3)
    found = torch.autograd.grad(functional_call(model, parameters, (x,)).sum(), list(parameters.values()))
    recollect.remove(model)
    expected = torch.autograd.grad(functional_call(model, parameters, (x,)).sum(), list(parameters.values()))
    assert all(map(torch.equal, found, expected))


def test_transforms_of_torch_func_go_through() -> None:
    model = applied()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(5, 3)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        result: Tensor = functional_call(model, parameters, (x,)).sum()
        return result

    per_sample = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    recollect.remove(model)
    expected = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    assert all(torch.equal(per_sample[name], expected[name]) for name in parameters)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("rule", [RECOMPUTE, recollect.policies.save_matmuls])
def test_what_torchscript_traces_is_the_plain_forward(rule: Any) -> None:
    def trace(fn: Any) -> list[str]:
        traced: Any = torch.jit.trace(fn, torch.ones(2, 3))
        return [node.kind() for node in traced.inlined_graph.nodes()]

    def curve(x: Tensor) -> Tensor:
        return x.sin().exp()

    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    plain = trace(model)
    recollect.apply(model, {"*": rule})
    assert trace(model) == plain
    policy = recollect.policies.save_all if callable(rule) else None
    assert trace(recollect.checkpoint(curve, policy=policy)) == trace(curve)


def test_parametrizations_added_afterwards_are_honoured() -> None:
    model = applied()
    parametrizations.weight_norm(model[0].linear)
    x = torch.randn(2, 3)
    model(x).sum().backward()
    found = [p.grad for p in model.parameters()]
    recollect.remove(model)
    model.zero_grad()
    model(x).sum().backward()
    assert all(map(torch.equal, found, [p.grad for p in model.parameters()]))


def test_a_lazy_module_takes_shape_inside() -> None:
    model = applied(nn.LazyLinear(4))
    model(torch.ones(2, 3)).sum().backward()
    assert type(model[0]) is nn.Linear
    assert model[0].weight.grad is not None


def test_each_call_of_a_module_is_a_region_of_its_own() -> None:
    torch.manual_seed(0)
    model = Looped()
    plain = copy.deepcopy(model)
    recollect.apply(model, {"block": RECOMPUTE})
    for net in (model, plain):
        torch.manual_seed(1)
        net(torch.ones(1, 3, 8)).square().sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_nothing_behind(kind: type[BaseException]) -> None:
    class Failing(nn.Module):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            y = x.sin()
            if self.fails:
                raise kind
            return y

    model = applied(Failing())
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(kind):
        model(x)
    y = x.cos()
    assert torch.equal(y.grad_fn._saved_self, x)  # type: ignore[union-attr] # no hook packs it
    model[0].fails = False
    model(x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]


def test_threads_may_share_a_model() -> None:
    model = applied(Block(8, dropout=0.0))
    x = torch.randn(4, 1, 3, 8)
    found: dict[int, Tensor] = {}

    def work(index: int) -> None:
        one = x[index].clone().requires_grad_()
        (found[index],) = torch.autograd.grad(model(one).square().sum(), one)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recollect.remove(model)
    for index in range(4):
        one = x[index].clone().requires_grad_()
        assert torch.equal(found[index], torch.autograd.grad(model(one).square().sum(), one)[0])


def test_accelerates_way_of_covering_forward_works() -> None:
    """A model's own forward is often replaced by one that casts its outputs, bound or not."""
    model = GPT()
    recollect.apply(model, {GPT: RECOMPUTE})
    own = model.forward
    assert not hasattr(own, "__func__")

    def cast(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = own(*args, **kwargs)
        return result.float()

    model.forward = cast  # type: ignore[method-assign]
    model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    recollect.remove(model)
    assert model.forward is cast


def test_paused_regions_leave_the_modules_and_come_back_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    handle = recollect.apply(model, {"*": Decision.RECOMPUTE})
    standing = [vars(module)["forward"] for module in model]
    handle.pause()
    assert not any("forward" in vars(module) for module in model)
    handle.resume()
    assert [vars(module)["forward"] for module in model] == standing
    handle.remove()
    assert not any("forward" in vars(module) for module in model)


def test_paused_regions_that_somebody_has_covered_pass_calls_on_and_come_back_beneath() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    handle = recollect.apply(model, {"0": Decision.RECOMPUTE})
    region: Any = model[0].forward
    model[0].forward = functools.wraps(region)(lambda x: region(x))
    handle.pause()
    assert region.is_removed
    handle.resume()
    assert not region.is_removed
    assert model[0].forward is not region


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("rules", ["full", "selective"])
def test_lazy_modules_get_their_parameters_in_a_region(rules: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.LazyLinear(8), nn.GELU(), nn.LazyLinear(4)) for _ in range(2)))

    def train(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        for _ in range(3):
            model(torch.randn(2, 4)).square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    model = build()
    recollect.apply(model, rules)
    found, expected = train(model), train(build())
    assert len(found) == len(expected) == 8
    assert all(map(torch.equal, found, expected))
