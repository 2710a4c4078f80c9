"""Compiled code inside a region under a policy: it is one call, which computes what it computes outside."""

import contextlib
import importlib
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import recollect
from recollect import policies
from recollect._core.torch_private import compiled_calls, intercept
from tests.collecting import without_collector

# Dynamo looks at the .grad of every tensor that it meets.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

POLICIES = [policies.save_matmuls, policies.save_all, policies.save_modules(nn.Linear)]


class Backend:
    """Compiles nothing, and counts how often it is asked to; and how often what it gave is run."""

    def __init__(self) -> None:
        self.compiled = self.run = 0

    def __call__(self, module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.run += 1
            return module(*args)

        return run

    def boxed(self, module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        """The same where graphs of forward and backward are asked for."""
        return make_boxed_func(self(module, inputs))


class Calling(nn.Module):
    """Calls a function that it does not hold as a module."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._fn = [fn]

    def forward(self, x: Tensor) -> Tensor:
        return self._fn[0](self.linear(x)).tanh()


def of_function(backend: Backend) -> nn.Module:
    return Calling(torch.compile(lambda x: x.sin().exp(), backend=backend))


def of_module(backend: Backend) -> nn.Module:
    inner: Any = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()), backend=backend)
    return nn.Sequential(inner, nn.Linear(8, 8), nn.Tanh())


@pytest.mark.parametrize("make", [of_function, of_module])
@pytest.mark.parametrize(
    "policy", [policies.save_matmuls, policies.save_all, policies.save_modules(nn.Linear)], ids=str
)
def test_compiled_code_stays_compiled_and_is_compiled_once(make: Callable[[Backend], nn.Module], policy: Any) -> None:
    backend = Backend()
    net = make(backend)
    x = torch.randn(4, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(net(x).sum(), [x])
    region = recollect.checkpoint(net, policy=policy)
    for _ in range(4):
        before = backend.run
        (found,) = torch.autograd.grad(region(x).sum(), [x])
        assert torch.equal(found, expected)
        assert backend.compiled == 1
        assert backend.run > before


class Registry:
    """Where a library keeps what it has compiled: no search from a function leads there."""

    found: ClassVar[dict[str, Callable[[Tensor], Tensor]]] = {}


class Looking(nn.Module):
    """Calls compiled code that it finds in a library, as Transformers does with its attention."""

    def __init__(self, find: str) -> None:
        super().__init__()
        self.up, self.down, self._find = nn.Linear(8, 8), nn.Linear(8, 8), find

    def forward(self, x: Tensor) -> Tensor:
        library = importlib.import_module(__name__)
        out: Tensor = self.down(vars(library)["Registry"].found[self._find](self.up(x))).tanh()
        return out


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_compiled_code_that_no_search_finds_saves_the_same_again(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code = torch.compile(lambda x: (x.sin().exp() * x.cos()).tanh().sigmoid() * x, backend="aot_eager")
    monkeypatch.setitem(Registry.found, "code", code)
    net, x = Looking("code"), torch.randn(4, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(net(x).sum(), [x])
    region = recollect.checkpoint(net, policy=policy)
    for _ in range(4):
        (found,) = torch.autograd.grad(region(x).sum(), [x])
        assert torch.equal(found, expected)


def test_compiled_code_that_only_forward_runs_does_not_shift_what_is_kept() -> None:
    """Each is known by the code that runs, not by its number: another's result would be a wrong gradient."""
    warm_up, of_region = torch.compile(lambda x: x.sin().exp()), torch.compile(lambda x: x.cos().exp())

    def fn(x: Tensor) -> Tensor:
        if not recollect.is_recomputing():
            warm_up(x.detach())
        out: Tensor = of_region(x.exp()).tanh()
        return out

    def keep(site: recollect.Site) -> recollect.Decision:
        is_compiled = "inductor_compiled_code" in site.op
        return recollect.Decision.SAVE if is_compiled else recollect.Decision.RECOMPUTE

    x = torch.randn(4, requires_grad=True)
    with torch._inductor.config.patch(wrap_inductor_compiled_regions=True):
        (expected,) = torch.autograd.grad(fn(x).sum(), [x])
        region = recollect.checkpoint(fn, policy=keep)
        for _ in range(3):
            (found,) = torch.autograd.grad(region(x).sum(), [x])
            assert torch.equal(found, expected)


def by_condition(x: Tensor) -> Tensor:
    out: Tensor = torch.cond(x.sum() > 0, lambda x: x.sin() @ x, lambda x: x.cos() @ x, (x,))
    return out


def by_checkpoint(x: Tensor) -> Tensor:
    out: Tensor = checkpoint(lambda x: (x.sin() @ x).softmax(-1) @ x, x, use_reentrant=False)
    return out


def by_two_graphs(x: Tensor) -> Tensor:
    y = x.sin() @ x
    torch._dynamo.graph_break()
    return y.tanh() @ x


def by_flex_attention(x: Tensor) -> Tensor:
    q = x.detach().view(1, 1, 8, 8)  # on the CPU it has no backward
    out: Tensor = flex_attention(q, q, q)
    return x + out.view_as(x)


EVERY_POLICY = [
    *POLICIES,
    policies.save_ops("aten.tanh.default"),
    policies.first_match(policies.save_matmuls, policies.save_modules("down")),
]


@pytest.mark.parametrize("policy", EVERY_POLICY, ids=str)
@pytest.mark.parametrize("code", [by_condition, by_checkpoint, by_two_graphs, by_flex_attention])
def test_what_plain_code_compiles_is_all_that_is_compiled(
    code: Callable[[Tensor], Tensor], policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that learn as well as later ones run the code that plain steps run: no mode is there for Dynamo to see."""
    torch._dynamo.reset()
    frames = Backend()
    compiled = torch.compile(code, backend=aot_autograd(fw_compiler=frames.boxed, bw_compiler=frames.boxed))
    monkeypatch.setitem(Registry.found, "code", compiled)
    net, x = Looking("code"), torch.randn(8, 8, requires_grad=True)
    expected = torch.autograd.grad(net(x).sum(), [x, *net.parameters()])
    graphs, runs = frames.compiled, frames.run
    region = recollect.checkpoint(net, policy=policy)
    for step in range(1, 6):
        assert all(map(torch.equal, torch.autograd.grad(region(x).sum(), [x, *net.parameters()]), expected))
        assert frames.compiled == graphs
        assert frames.run >= runs * (step + 1)


def test_what_runs_after_compiled_code_is_kept_as_what_runs_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interception that keeps single operators is off while compiled code runs, and on again afterwards."""
    monkeypatch.setitem(Registry.found, "code", torch.compile(torch.sin, backend="aot_eager"))
    net, x, runs = Looking("code"), torch.randn(4, 8, requires_grad=True), 0

    @torch.library.custom_op("recollect_compiled::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        return x + x

    double.register_autograd(lambda _, grad: grad + grad)

    def fn(x: Tensor) -> Tensor:
        out: Tensor = net(double(net(double(x)))).exp()
        return out

    region = recollect.checkpoint(fn, policy=policies.save_ops("recollect_compiled.double.default"))
    for step in range(1, 7):
        torch.autograd.grad(region(x).sum(), [x])
        assert runs == 2 * step


def test_compiled_code_where_none_was_learned_breaks_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Registry.found, "code", torch.sin)
    net, x = Looking("code"), torch.randn(4, 8, requires_grad=True)
    region = recollect.checkpoint(net, policy=policies.save_matmuls)
    for code in (torch.sin, torch.compile(torch.sin, backend="aot_eager"), torch.sin):
        monkeypatch.setitem(Registry.found, "code", code)
        expected = torch.autograd.grad(net(x).sum(), [x, *net.parameters()])
        for _ in range(3):
            assert all(map(torch.equal, torch.autograd.grad(region(x).sum(), [x, *net.parameters()]), expected))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_an_error_inside_compiled_code_leaves_the_modes_as_they_were(policy: Any) -> None:
    def fail(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*_: Any) -> Any:
            message = "out of luck"
            raise KeyError(message)

        return run

    net, x = Calling(torch.compile(torch.sin, backend=fail)), torch.randn(4, 8, requires_grad=True)
    for _ in range(3):
        with pytest.raises(KeyError, match="out of luck"):
            recollect.checkpoint(net, policy=policy)(x)
        assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
        assert not intercept.is_on()


def breaks_its_graph(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x.sin()


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_code_that_does_not_compile_whole_says_so_and_leaves_the_modes_as_they_were(policy: Any) -> None:
    net = Calling(torch.compile(breaks_its_graph, fullgraph=True, backend="aot_eager"))
    x = torch.randn(4, 8, requires_grad=True)
    region = recollect.checkpoint(net, policy=policy)
    for _ in range(2):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
            region(x)
        assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
        assert not intercept.is_on()
    net._fn = [torch.compile(torch.sin, fullgraph=True, backend="aot_eager")]
    (expected,) = torch.autograd.grad(net(x).sum(), [x])
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(region(x).sum(), [x])[0], expected)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_code_that_is_not_compiled_at_all_says_so_and_leaves_the_modes_as_they_were(policy: Any) -> None:
    """Under someone's dispatch mode Dynamo compiles nothing, and in torch 2.13 raises before it calls any hook."""

    def call(x: Tensor) -> Tensor:
        return x.sin()

    net, x = Calling(torch.compile(call, fullgraph=True, backend="aot_eager")), torch.randn(4, 8, requires_grad=True)
    region = recollect.checkpoint(net, policy=policy)
    raises = pytest.raises(RuntimeError, match="found no compiled frames")
    for _ in range(2):
        with raises if torch.__version__ >= "2.13" else contextlib.nullcontext(), FlopCounterMode(display=False):
            region(x)
        assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
        assert not intercept.is_on()
        assert not compiled_calls._due.asides
    net._fn = [torch.compile(torch.sin, fullgraph=True, backend="aot_eager")]
    (expected,) = torch.autograd.grad(net(x).sum(), [x])
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(region(x).sum(), [x])[0], expected)


class Feed(nn.Module):
    """A block whose activation is compiled."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self._activation = nn.Linear(16, 64), nn.Linear(64, 16), [activation]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self._activation[0](self.up(x)))
        return out


@pytest.mark.parametrize("is_dry", [False, True], ids=["real profile", "dry profile"])
@pytest.mark.parametrize("budget", ["min", "half"])
def test_compiled_code_in_blocks_under_a_plan_stays_compiled_and_is_compiled_once(budget: str, is_dry: bool) -> None:
    pytest.importorskip("scipy")
    torch._dynamo.reset()
    backend = Backend()
    activation = torch.compile(lambda x: x.sin().exp().tanh(), backend=aot_autograd(fw_compiler=backend.boxed))
    net, x = nn.Sequential(*(Feed(activation) for _ in range(3))), torch.randn(512, 16, requires_grad=True)
    expected = torch.autograd.grad(net(x).sum(), [x, *net.parameters()])
    compiled = backend.compiled
    profile = recollect.profile(net, x, dry=is_dry)
    least, most = (recollect.plan(profile, budget=one).peak_bytes for one in ("min", "fastest"))
    recollect.apply(net, recollect.plan(profile, budget="min" if budget == "min" else (least + most) // 2))
    for _ in range(3):
        before = backend.run
        assert all(map(torch.equal, torch.autograd.grad(net(x).sum(), [x, *net.parameters()]), expected))
        assert backend.compiled == compiled
        assert backend.run > before


def test_what_compiled_code_was_given_dies_without_the_collector() -> None:
    """Whoever remembers a call of Dynamo's must not hold its frame, where the arguments are."""
    torch._dynamo.reset()
    compiled = torch.compile(torch.sin, backend="eager")
    seen: list[weakref.ref[Tensor]] = []

    def block(x: Tensor) -> Tensor:
        given = x @ x
        seen.append(weakref.ref(given))
        return compiled(given).cos()

    region = recollect.checkpoint(block, policy=policies.save_matmuls)
    with without_collector():
        for _ in range(3):
            region(torch.randn(4, 4, requires_grad=True)).sum().backward()
        assert [one() for one in seen] == [None] * len(seen)


def test_compiled_code_inside_of_compiled_code_is_a_part_of_it() -> None:
    inner = torch.compile(torch.sin, backend="aot_eager")

    def between(x: Tensor) -> Tensor:
        out: Tensor = recollect.checkpoint(lambda x: inner(x).tanh() @ x, policy=policies.save_matmuls)(inner(x))
        return out

    apart: Any = torch.compiler.disable(between)
    outer = torch.compile(lambda x: apart(x.cos()).exp(), backend="aot_eager")
    x = torch.randn(8, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(((outer(x) @ x) @ x).sum(), [x])
    region = recollect.checkpoint(lambda x: (outer(x) @ x) @ x, policy=policies.save_matmuls)
    for _ in range(4):
        (found,) = torch.autograd.grad(region(x).sum(), [x])
        assert torch.equal(found, expected)


LATE = """
import sys, torch, recollect

def make(): return torch.compile(lambda x: x.sin().exp() * x.cos(), backend="aot_eager")

class Net(torch.nn.Linear):
    def forward(self, x):
        if not made:
            assert "torch._dynamo" not in sys.modules
            made.append(make())
        return made[0](super().forward(x)).tanh()

made = []
net, x = Net(8, 8), torch.randn(4, 8, requires_grad=True)
region = recollect.checkpoint(net, policy=recollect.policies.save_matmuls)
found = [torch.autograd.grad(region(x).sum(), [x])[0] for _ in range(4)]
expected = torch.autograd.grad(net(x).sum(), [x])[0]
assert all(torch.equal(one, expected) for one in found)
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
assert counters["stats"]["unique_graphs"] == 1, counters
"""


def test_dynamo_may_be_imported_inside_a_region() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["full", "selective", "save_matmuls", "save_modules"])
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_of_transformers_is_exact_at_every_step(rule: str) -> None:
    """It is compiled inside the model. Bitwise, from the first step on, and nothing is compiled at each step."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="flex_attention",
    )
    torch._dynamo.reset()
    model = transformers.LlamaForCausalLM(config).cuda().bfloat16().train()
    ids = torch.randint(0, 512, (2, 256), device="cuda")
    policy = {"save_matmuls": policies.save_matmuls, "save_modules": policies.save_modules("mlp")}.get(rule, rule)

    def step() -> list[Tensor]:
        return list(torch.autograd.grad(model(input_ids=ids, labels=ids).loss, list(model.parameters())))

    expected = step()
    recollect.apply(model) if rule == "full" else recollect.apply(model, policy)
    for number in range(6):
        assert all(map(torch.equal, step(), expected))
        if number == 1:  # what is compiled without a cache of keys and values, is by now
            graphs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == graphs
