"""Runs a step with and without regions, on real ranks: gradients to the bit, and what backward does once more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Counts operators on plain tensors: those of distributed ones are seen as what they do on each rank."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        self.counts[str(func).rpartition(".")[0]] += 1
        return func(*args, **(kwargs or {}))

    @property
    def collectives(self) -> int:
        """How many of them talk to other processes."""
        return sum(n for name, n in self.counts.items() if is_collective(name))


def is_collective(name: str) -> bool:
    """Whether an operator of this name talks to other processes."""
    space, _, short = name.partition(".")
    return (space in ("c10d", "_dtensor") or space.startswith("_c10d_functional")) and short not in (
        "wait_tensor",
        "_wrap_tensor_autograd",
    )


def local(gradient: Tensor | None) -> Tensor | None:
    """This rank's part of a gradient."""
    return getattr(gradient, "_local_tensor", gradient)


def step(
    forward: Callable[[Tensor], Tensor], parameters: Iterable[Tensor], x: Tensor
) -> tuple[list[Tensor | None], Counter[str]]:
    """Gradients of the input and the parameters, and the operators that backward ran."""
    tensors = [x, *parameters]
    for tensor in tensors:
        tensor.grad = None
    loss = forward(x).square().sum()
    with Calls() as calls:
        loss.backward()
    return [local(tensor.grad) for tensor in tensors], calls.counts


def repeated(
    plain: Callable[[Tensor], Tensor],
    region: Callable[[Tensor], Tensor],
    parameters: Iterable[Tensor],
    *,
    shape: Sequence[int],
    steps: int = 4,
) -> list[Counter[str]]:
    """What backward of a region runs beyond backward of the plain function, in each of some steps on new data.

    Gradients must be equal to the bit; what the random generator gives next, too.
    """
    parameters = list(parameters)
    found = []
    for number in range(steps):
        torch.manual_seed(100 + number)
        x = torch.randn(*shape, requires_grad=True)
        state = torch.get_rng_state()
        expected, before = step(plain, parameters, x)
        drawn = torch.get_rng_state()
        torch.set_rng_state(state)
        gradients, counts = step(region, parameters, x)
        assert torch.equal(drawn, torch.get_rng_state())
        for index, (one, other) in enumerate(zip(gradients, expected, strict=True)):
            assert (one is None) is (other is None), f"step {number}: gradient {index}"
            assert one is None or other is None or torch.equal(one, other), f"step {number}: gradient {index}"
        found.append(counts - before)
    return found


def count_collectives(counts: Counter[str]) -> int:
    """How many of these talk to other processes."""
    return sum(n for name, n in counts.items() if is_collective(name))
