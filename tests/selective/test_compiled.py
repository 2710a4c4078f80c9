"""Compiled code inside a region under a policy: it stays compiled, and computes what it computes outside."""

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

import recollect
from recollect import policies

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
    for step in range(4):
        before = backend.run
        (found,) = torch.autograd.grad(region(x).sum(), [x])
        assert torch.equal(found, expected)
        assert backend.compiled == 1
        assert step == 0 or backend.run > before


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
    """The call that learns runs it as it is written, and so does its recomputation; later ones run it compiled."""
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
            torch.testing.assert_close(found, expected)  # a call that learns runs the code as it is written
