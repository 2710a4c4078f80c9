"""`checkpoint_sequential`: every function runs once in forward, all segments but the last once more in backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recollect.compat import checkpoint_sequential
from tests.watching import Counted, backward

LENGTH = 5


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Tanh()) for _ in range(LENGTH)]


CHAINS: dict[str, Callable[[list[nn.Module]], Any]] = {
    "Sequential": lambda parts: nn.Sequential(*parts),
    "ModuleList": nn.ModuleList,
    "list": list,
    "tuple": tuple,
}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("segments", range(1, LENGTH + 1))
@pytest.mark.parametrize("make", CHAINS.values(), ids=CHAINS)
def test_gradients_are_those_of_the_plain_chain(make: Callable[[Any], Any], segments: int, use_reentrant: bool) -> None:
    x, results = torch.ones(3, 4, requires_grad=True), []
    for run in ("plain", "segments"):
        parts, x.grad = layers(), None
        torch.manual_seed(1)
        if run == "plain":
            y = nn.Sequential(*parts)(x)
        else:
            y = checkpoint_sequential(make(parts), segments, x, use_reentrant=use_reentrant)
        backward(y.sum())
        results.append([x.grad, *(parameter.grad for part in parts for parameter in part.parameters())])
    for plain, ours in zip(*results, strict=True):
        assert plain is not None
        assert ours is not None
        assert torch.equal(plain, ours)


@pytest.mark.parametrize(
    ("segments", "calls"),
    [(1, [1, 1, 1, 1, 1]), (2, [2, 2, 1, 1, 1]), (3, [2, 2, 1, 1, 1]), (5, [2, 2, 2, 2, 1])],
)
def test_the_last_segment_never_runs_again(segments: int, calls: list[int]) -> None:
    functions = [Counted(lambda x: (x * 1.5).exp().sin()) for _ in range(LENGTH)]
    backward(checkpoint_sequential(functions, segments, torch.zeros(2).requires_grad_(), use_reentrant=False).sum())
    assert [function.calls for function in functions] == calls


def test_values_between_functions_may_be_of_any_kind() -> None:
    functions = [lambda x: (x.exp(), 3), lambda pair: {"y": pair[0] * pair[1]}, lambda parts: parts["y"].sin()]
    x = torch.ones(2, requires_grad=True)
    backward(checkpoint_sequential(functions, 2, x, use_reentrant=False).sum())
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad((x.exp() * 3).sin().sum(), x)[0])


@pytest.mark.parametrize("preserve", [True, False])
def test_preserve_rng_state_reaches_every_segment(preserve: bool) -> None:
    def noisy(x: Tensor) -> Tensor:
        return x * torch.rand(64)

    x = torch.ones(64, requires_grad=True)
    y = checkpoint_sequential([noisy, torch.clone], 2, x, use_reentrant=False, preserve_rng_state=preserve)
    backward(y.sum())
    assert x.grad is not None
    assert torch.equal(x.grad, y) is preserve


@pytest.mark.parametrize("inputs", [(), (torch.ones(1), torch.ones(1))])
def test_no_input_or_more_than_one_is_a_type_error(inputs: tuple[Any, ...]) -> None:
    call: Callable[..., Any] = checkpoint_sequential
    with pytest.raises(TypeError):
        call(nn.Sequential(nn.Tanh()), 1, *inputs, use_reentrant=False)
