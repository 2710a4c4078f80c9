"""Steps that are compiled with the caches on, which other processes run too."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import recollect
from recollect import Decision, policies
from recollect.compat import CheckpointPolicy


def run(call: Callable[..., Tensor]) -> str:
    """Compile and run a step; whether AOTAutograd's cache had it."""
    torch._dynamo.reset()
    counters.clear()
    inputs = [torch.full((4, 4), number, requires_grad=True) for number in (0.1, 0.2, 0.3, 0.4)]
    stored = functorch_config.patch(enable_autograd_cache=True, strict_autograd_cache=True)
    with stored, inductor_config.patch(fx_graph_cache=True):
        found = torch.autograd.grad(torch.compile(call, fullgraph=True)(*inputs).sum(), inputs)
    expected = torch.autograd.grad(f(*inputs).sum(), inputs)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)
    aot = counters["aot_autograd"]
    assert not aot["autograd_cache_bypass"]
    return "hit" if aot["autograd_cache_hit"] else "miss" if aot["autograd_cache_miss"] else "nothing"


MM, ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default


def save_products(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in (MM, ADDMM) else CheckpointPolicy.PREFER_RECOMPUTE


def f(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Products only: Inductor takes those from a library, and calls no C++ compiler."""
    return torch.mm(torch.addmm(x, torch.mm(x.detach(), a), b), c)


def under(policy: Any, **options: Any) -> Callable[..., Tensor]:
    return recollect.checkpoint(f, policy=policy, **options)


def named(word: str) -> Callable[..., Tensor]:
    def g(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.mm(torch.addmm(x, recollect.name(torch.mm(x.detach(), a), word), b), c)

    return recollect.checkpoint(g, policy=policies.save_names("kept"), name="g")


class Bounded:
    """An object that decides; what it reads cannot be known from outside."""

    def __init__(self, bound: int) -> None:
        self.bound = bound

    def __call__(self, site: recollect.Site) -> Decision:
        return Decision.SAVE if site.bytes > self.bound else Decision.RECOMPUTE
