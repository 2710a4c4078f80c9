"""Parameters that a function writes in its own forward are written once, and recomputation reads what forward read."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import recollect
from recollect._recompute.writes import _known
from tests.watching import backward

Write = Callable[[nn.Module, str, Tensor], None]


def _copy_without_grad(module: nn.Module, name: str, value: Tensor) -> None:
    with torch.no_grad():
        getattr(module, name).copy_(value)


def _copy_data(module: nn.Module, name: str, value: Tensor) -> None:
    getattr(module, name).data.copy_(value)


def _set_data(module: nn.Module, name: str, value: Tensor) -> None:
    getattr(module, name).data = value


def _replace(module: nn.Module, name: str, value: Tensor) -> None:
    setattr(module, name, nn.Parameter(value, getattr(module, name).requires_grad))


WRITES: dict[str, Write] = {
    "copy_": _copy_without_grad,
    "data.copy_": _copy_data,
    "data =": _set_data,
    "another parameter": _replace,
}


class ActNorm(nn.Module):
    """Sets itself up from its first batch, as in Glow; `done` is a buffer, a number, or in a dict."""

    def __init__(self, write: Write, flag: str) -> None:
        super().__init__()
        self.write, self.flag = write, flag
        self.shift, self.scale = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
        if flag == "buffer":
            self.register_buffer("done", torch.tensor(0))
        else:
            self.done: Any = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.done:
            self.write(self, "shift", -x.detach().mean(0))
            self.write(self, "scale", 1 / x.detach().std(0))
            if self.flag == "buffer":
                self.done.fill_(1)
            else:
                self.done = 1
        return self.scale * (x + self.shift)


class Codebook(nn.Module):
    """A VQ layer whose codes follow the data: written after they were read, at every call."""

    def __init__(self, write: Write, flag: str) -> None:
        super().__init__()
        self.write = write
        self.codes = nn.Embedding(6, 4)
        self.codes.weight.requires_grad_(flag != "buffer")

    def forward(self, x: Tensor) -> Tensor:
        codes = self.codes.weight.detach()
        nearest = torch.cdist(x.detach(), codes).argmin(1)
        found = functional.embedding(nearest, codes)
        if self.training:
            one_hot = functional.one_hot(nearest, 6).float()
            self.write(self.codes, "weight", 0.7 * codes + 0.3 * one_hot.t() @ x.detach())
        return (x + (found - x).detach()).tanh() * (x - found).square().exp().reciprocal()


class Block(nn.Module):
    """What becomes a region."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.before, self.after = part, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.part(self.before(x)).tanh())
        return x + y


def _network(kind: Callable[[Write, str], nn.Module], write: Write, flag: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(kind(write, flag)) for _ in range(3)))


def _train(model: nn.Module, *, forwards: int = 1, steps: int = 3) -> list[Tensor | None]:
    """Gradients and values after each step."""
    torch.manual_seed(1)
    seen: list[Tensor | None] = []
    for _ in range(steps):
        losses = [model(torch.randn(8, 4) * 3).square().mean() for _ in range(forwards)]
        for loss in losses:
            backward(loss)
        seen += [None if one.grad is None else one.grad.clone() for one in model.parameters()]
        with torch.no_grad():
            for one in model.parameters():
                if one.grad is not None:
                    one.sub_(one.grad, alpha=0.01)
                    one.grad = None
        seen += [one.detach().clone() for one in (*model.parameters(), *model.buffers())]
    return seen


def _are_same(left: list[Tensor | None], right: list[Tensor | None]) -> bool:
    return len(left) == len(right) and all(
        one is other if one is None or other is None else torch.equal(one, other)
        for one, other in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("policy", [None, recollect.policies.save_matmuls], ids=["full", "save_matmuls"])
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("flag", ["buffer", "number"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", [ActNorm, Codebook])
def test_a_parameter_that_forward_writes_is_written_once_and_gradients_are_those_of_forward(
    kind: Callable[[Write, str], nn.Module], write: str, flag: str, forwards: int, policy: Any
) -> None:
    plain = _network(kind, WRITES[write], flag)
    model = copy.deepcopy(plain)
    recollect.apply(model, policy=policy)
    assert _are_same(_train(plain, forwards=forwards), _train(model, forwards=forwards))


def test_a_second_backward_reads_what_forward_read() -> None:
    plain = _network(Codebook, _copy_data, "buffer")
    model = copy.deepcopy(plain)
    recollect.apply(model)
    for one in (plain, model):
        torch.manual_seed(1)
        loss = one(torch.randn(8, 4)).sum()
        loss.backward(retain_graph=True)
        backward(loss)
    assert _are_same([one.grad for one in plain.parameters()], [one.grad for one in model.parameters()])


def test_a_parameter_that_two_modules_share_is_written_once() -> None:
    class Tied(ActNorm):
        def __init__(self) -> None:
            super().__init__(_copy_without_grad, "number")
            self.other = nn.Linear(4, 4, bias=False)
            self.other.bias = self.shift

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.other(super().forward(x))
            return y.exp()

    torch.manual_seed(0)
    plain = Tied()
    model = copy.deepcopy(plain)
    region = recollect.checkpoint(model)
    results = []
    for module, call in ((plain, plain), (model, region)):
        torch.manual_seed(1)
        backward(call(torch.randn(8, 4)).sum())
        results.append([one.grad for one in module.parameters()] + list(module.parameters()))
    assert _are_same(*results)


def test_an_embedding_that_limits_its_norms_is_trained_inside_a_region() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(10, 4, max_norm=0.5), nn.Linear(4, 4), nn.Tanh())

    results = []
    for wrap in (lambda module: module, recollect.checkpoint):
        model = make()
        backward(wrap(model)(torch.tensor([1, 2, 2, 9])).sum())
        results.append([one.grad for one in model.parameters()] + list(model.parameters()))
    assert _are_same(*results)


def test_a_module_is_watched_once_and_forgotten_with_its_last_reference() -> None:
    model = ActNorm(_copy_without_grad, "number")
    region = recollect.checkpoint(model)
    before = len(_known)
    for _ in range(2):
        backward(region(torch.randn(8, 4)).sum())
    assert len(_known) == before + 1
    assert _known[model] == {True: {"shift", "scale"}}
    del model, region
    assert len(_known) == before


class Kernel(nn.Module):
    """A batch norm of its own: torch's kernel writes its statistics, and moves no version."""

    mean: Tensor
    var: Tensor

    def __init__(self, *, through_data: bool) -> None:
        super().__init__()
        self.through_data = through_data
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.through_data:
            y = x * self.var.clone() * self.weight
            self.var.data.mul_(0.9).add_(x.detach().var(0))
            return y.exp()
        return functional.batch_norm(x, self.mean, self.var, self.weight, training=True).exp()


@pytest.mark.parametrize("through_data", [False, True])
def test_a_buffer_that_is_written_behind_its_version_is_updated_once(through_data: bool) -> None:
    results = []
    for wrap in (lambda module: module, recollect.checkpoint):

        class Fresh(Kernel):
            """A class that no region has met yet."""

        torch.manual_seed(0)
        model = Fresh(through_data=through_data)
        region = wrap(model)
        for _ in range(2):
            backward(torch.stack([region(torch.randn(8, 4)).sum() for _ in range(2)]).sum())
        results.append([model.weight.grad, model.mean, model.var])
    assert _are_same(*results)


def test_a_buffer_and_the_flag_that_is_set_with_it_go_back_together() -> None:
    class Centred(nn.Module):
        """Takes its centre from its first batch."""

        centre: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.is_set = nn.Parameter(torch.ones(4)), False
            self.register_buffer("centre", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_set:
                self.centre.copy_(x.detach().mean(0))
                self.is_set = True
            return (x * self.weight - self.centre.clone()).exp()

    results = []
    for wrap in (lambda module: module, recollect.checkpoint):
        torch.manual_seed(0)
        model = Centred()
        backward(wrap(model)(torch.randn(8, 4)).sum())
        assert model.is_set
        results.append([model.weight.grad, model.centre])
    assert _are_same(*results)


_FLAGS: dict[str, Callable[[int], bool]] = {
    "all": lambda _: True,
    "none": lambda _: False,
    "even": lambda number: number % 2 == 0,
    "odd": lambda number: number % 2 == 1,
}


class Scaled(nn.Module):
    """If only the second of its factors requires grad, it saves the first, which has the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.randn(8, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear((x * self.scale).sin())
        return x + y


@pytest.mark.parametrize("policy", [None, recollect.policies.save_matmuls], ids=["full", "save_matmuls"])
@pytest.mark.parametrize("after", _FLAGS)
@pytest.mark.parametrize("before", _FLAGS)
def test_parameters_may_be_frozen_or_released_between_forward_and_backward(
    before: str, after: str, policy: Any
) -> None:
    def flip(model: nn.Module, flags: str) -> None:
        for number, one in enumerate(model.parameters()):
            one.requires_grad_(_FLAGS[flags](number))

    results = []
    for wraps in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Scaled() for _ in range(3)))
        if wraps:
            recollect.apply(model, policy=policy)
        for _ in range(3):
            flip(model, before)
            x = torch.randn(8, 4, requires_grad=True)
            loss = model(x).square().sum()
            flip(model, after)
            backward(loss)
        results.append([x.grad, *(one.grad for one in model.parameters())])
        assert [one.requires_grad for one in model.parameters()] == [_FLAGS[after](at) for at in range(9)]
    assert _are_same(*results)


@pytest.mark.parametrize("inside", [False, True])
def test_arguments_may_be_frozen_or_released_between_forward_and_backward(inside: bool) -> None:
    def product(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sin() * y

    function: Any
    results = []
    for wraps in (False, True):
        for flags in ((True, False), (False, True)):
            function = recollect.checkpoint(product) if wraps else product
            if inside:
                function = recollect.checkpoint(functools.partial(_call_with_more, function)) if wraps else function
            torch.manual_seed(0)
            x, y = torch.randn(3), torch.randn(3)
            x.requires_grad_(flags[0])
            y.requires_grad_(flags[1])
            loss = function(x, y).sum()
            x.requires_grad_(flags[1])
            y.requires_grad_(flags[0])
            backward(loss)
            results.append([x.grad, y.grad])
    assert _are_same(results[0], results[2])
    assert _are_same(results[1], results[3])


def _call_with_more(function: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    return function(x, y)


def test_tensors_that_a_function_closes_over_may_be_frozen_before_backward() -> None:
    x = torch.randn(3, requires_grad=True)
    results = []
    for wrap in (lambda function: function, recollect.checkpoint):
        weight = torch.full((3,), 2.0, requires_grad=True)
        loss = wrap(lambda x, weight=weight: (x * weight).sin())(x).sum()
        weight.requires_grad_(False)
        x.grad = None
        backward(loss)
        results.append([x.grad, weight.grad])
    assert _are_same(*results)
