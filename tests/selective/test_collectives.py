"""Collectives inside a region, in a process group of one: kept by default, so that backward does not repeat them."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.utils._python_dispatch import TorchDispatchMode

import recollect
from recollect import policies

pytestmark = pytest.mark.filterwarnings("ignore:policy .* this step")


@pytest.fixture
def group() -> Iterator[None]:
    store: Any = vars(distributed)["HashStore"]()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def shared(x: Tensor, w: Tensor) -> Tensor:
    from torch.distributed import _functional_collectives as collectives

    h = (x @ w).sin()
    world: Any = distributed.group.WORLD
    total: Tensor = collectives.all_reduce(h.detach(), "sum", world)
    return (h * total).exp()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("policy", [policies.save_nothing, policies.save_matmuls, policies.save_collectives], ids=str)
def test_a_collective_is_not_repeated(policy: Any) -> None:
    assert repeated(policy) == [0, 0, 0]


@pytest.mark.usefixtures("group")
def test_a_strict_policy_repeats_it() -> None:
    assert repeated(policies.strictly(policies.save_matmuls)) == [1, 1, 1]


def repeated(policy: Any) -> list[int]:
    """How often backward talks to other processes, in each of three steps; its gradients are the plain ones."""
    found = []
    region = recollect.checkpoint(shared, policy=policy)
    for _ in range(3):
        tensors = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
        loss = region(*tensors).sum()
        with Calls() as calls:
            gradients = torch.autograd.grad(loss, tensors)
        assert all(map(torch.equal, gradients, torch.autograd.grad(shared(*tensors).sum(), tensors)))
        found.append(calls.counts["_c10d_functional.all_reduce.default"])
    return found
