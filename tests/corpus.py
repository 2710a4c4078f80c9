"""Small functions that every engine must survive: for each, how to build a call and what to look at after a step.

A case is a function decorated with `case`; calling it builds the call afresh, under the random state of its caller.
"""

import functools
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, parametrize
from torch.utils import _pytree

import recollect


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function, what to call it with, and the tensors and modules to look at besides its arguments and itself."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    watch: tuple[Tensor | nn.Module, ...] = ()

    def watched(self) -> Iterator[Tensor | nn.Module]:
        leaves = _pytree.tree_leaves((self.args, self.kwargs))
        for thing in (*self.watch, self.fn, *leaves):
            if isinstance(thing, (Tensor, nn.Module)):
                yield thing

    def parameters(self) -> list[Tensor]:
        """Leaf tensors that a step gives gradients to, each once."""
        found: dict[int, Tensor] = {}
        for thing in self.watched():
            for tensor in thing.parameters() if isinstance(thing, nn.Module) else (thing,):
                if tensor.requires_grad and tensor.is_leaf:
                    found[id(tensor)] = tensor
        return list(found.values())

    def buffers(self) -> list[Tensor]:
        return [tensor for thing in self.watched() if isinstance(thing, nn.Module) for tensor in thing.buffers()]

    def generators(self) -> list[torch.Generator]:
        leaves = _pytree.tree_leaves((self.args, self.kwargs))
        return [torch.default_generator, *(leaf for leaf in leaves if isinstance(leaf, torch.Generator))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A named way to build a call, and what may be done with it."""

    name: str
    build: Callable[[], Call]
    around: Callable[[], AbstractContextManager[Any]]
    has_reentrant: bool
    has_double_backward: bool

    def __str__(self) -> str:
        return self.name


CASES: list[Case] = []


def case(
    *,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    reentrant: bool = True,
    double: bool = True,
) -> Callable[[Callable[[], Call]], Callable[[], Call]]:
    """Put a case in the table.

    Args:
        around: a context that is active around forward and has ended when backward runs.
        reentrant: whether the reentrant engine can do it: tensors as positional arguments, one of which requires
            grad, and a tensor or a tuple as output.
        double: whether plain autograd can differentiate it twice.
    """

    def add(build: Callable[[], Call]) -> Callable[[], Call]:
        name = build.__name__.replace("_", " ").strip()
        CASES.append(Case(name=name, build=build, around=around, has_reentrant=reentrant, has_double_backward=double))
        return build

    return add


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A random tensor that requires grad."""
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def mlp(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))


# Arithmetic, views and writes in place


@case()
def one_operator() -> Call:
    return Call(fn=torch.sin, args=(leaf(3),))


@case()
def chain_of_operators() -> Call:
    return Call(fn=lambda x, y: (x @ y).exp().cumsum(0).logsumexp(1) * x.sum(1), args=(leaf(3, 4), leaf(4, 5)))


@case()
def views() -> Call:
    def fn(x: Tensor) -> Tensor:
        left, right = x.transpose(0, 1).chunk(2)
        rows = torch.stack(x.view(2, 3, 4).unbind(1)).expand(2, 3, 2, 4)
        return left.reshape(-1).sin().sum() * right[..., 1:].cos() + (rows * rows).sum().tanh()

    return Call(fn=fn, args=(leaf(6, 4),))


@case()
def in_place_on_intermediates() -> Call:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = (x * w).add_(1).tanh_()
        z = torch.zeros_like(y)
        z[:2] = y[:2].exp()
        z[2:].add_(y[2:]).mul_(x[2:])
        return z * y

    return Call(fn=fn, args=(leaf(4, 3), leaf(4, 3)))


@case()
def in_place_through_a_view() -> Call:
    def fn(x: Tensor) -> Tensor:
        y = x.clone()
        y.view(-1)[::2].mul_(3).sigmoid_()
        return y * x

    return Call(fn=fn, args=(leaf(3, 4),))


@case()
def masks_and_indices() -> Call:
    def fn(x: Tensor) -> Tensor:
        y = x.masked_fill(x > 0.5, 0.0)[torch.tensor([0, 2, 2])]
        return torch.where(y > 0, y * y, y.exp()).index_add(0, torch.tensor([1, 0]), x[:2])

    return Call(fn=fn, args=(leaf(4, 3),))


@case()
def same_tensor_given_twice() -> Call:
    x = leaf(3)
    return Call(fn=lambda a, b: a.sin() * b.exp(), args=(x, x))


@case()
def inputs_that_are_not_leaves() -> Call:
    x = leaf(4, 3)
    y = x * 2
    return Call(fn=lambda a, b, c: a.sin() * b.t() + c, args=(y, y.t(), x.exp()), watch=(x,))


@case()
def expanded_input() -> Call:
    x = leaf(1, 3)
    return Call(fn=lambda a: (a * a).exp(), args=(x.expand(4, 3),), watch=(x,))


@case(reentrant=False)
def empty_tensors() -> Call:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ y).exp(), torch.cat([x.sin(), y[:0, :3]])

    return Call(fn=fn, args=(leaf(0, 3), leaf(3, 4)[:, :3]))


@case()
def double_precision_and_half() -> Call:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return (x.bfloat16() @ y).double().exp() * x

    return Call(fn=fn, args=(leaf(3, 3, dtype=torch.float64), leaf(3, 3, dtype=torch.bfloat16)))


@case(reentrant=False)
def complex_numbers() -> Call:
    def fn(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        f = torch.fft.fft(x) * z.conj()
        return f.abs(), (f * f).imag.exp()

    return Call(fn=fn, args=(leaf(4), leaf(4, dtype=torch.complex64)))


@case()
def scalars() -> Call:
    return Call(fn=lambda x: x.exp() * 2.5 / x, args=(torch.randn((), requires_grad=True),))


# What goes in


@case(reentrant=False)
def keyword_tensors() -> Call:
    def fn(x: Tensor, *, scale: Tensor, flag: bool, mode: str) -> Tensor:
        return x.sin() * scale.exp() if flag and mode == "mine" else x

    return Call(fn=fn, args=(leaf(3),), kwargs={"scale": leaf(3), "flag": True, "mode": "mine"})


@case(reentrant=False)
def nested_containers() -> Call:
    def fn(parts: dict[str, Any], *, cache: list[tuple[Tensor, int]]) -> dict[str, Any]:
        total = parts["a"][0].exp() * parts["b"] + cache[0][0].sin() * cache[0][1]
        return {"total": total, "more": [total.tanh(), (cache[1][0] * total).sum()]}

    cache = [(leaf(3), 2), (leaf(3), 0)]
    return Call(fn=fn, args=({"a": [leaf(3)], "b": leaf(3)},), kwargs={"cache": cache})


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


Plain = namedtuple("Plain", ["x", "n"])


@dataclass
class Batch:
    tokens: Tensor
    weights: list[Tensor]
    label: str


_pytree.register_dataclass(Batch)


@case(reentrant=False)
def named_tuples() -> Call:
    def fn(pair: Pair, plain: Plain) -> Pair:
        return Pair(pair.first.exp() * plain.x * plain.n, pair.second)

    return Call(fn=fn, args=(Pair(leaf(3), None), Plain(leaf(3), 2)))


@case(reentrant=False)
def registered_dataclass() -> Call:
    def fn(batch: Batch) -> Batch:
        return Batch(batch.tokens.exp(), [w.sin() * batch.tokens for w in batch.weights], batch.label.upper())

    return Call(fn=fn, args=(Batch(leaf(3), [leaf(3), leaf(3)], "x"),))


@case(reentrant=False)
def tensors_inside_an_unregistered_object() -> Call:
    class Holder:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    x = leaf(3)
    return Call(fn=lambda holder: holder.x.exp() * holder.x, args=(Holder(x),), watch=(x,))


@case()
def arguments_that_are_not_tensors() -> Call:
    def fn(x: Tensor, n: int, mode: str, nothing: None, op: Callable[[Tensor], Tensor]) -> Tensor:
        assert nothing is None
        return op(x) * n if mode == "times" else x

    return Call(fn=fn, args=(leaf(3), 3, "times", None, torch.exp))


@case(reentrant=False)
def closures_over_parameters() -> Call:
    w, b = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))
    return Call(fn=lambda x: (x @ w + b).tanh() @ w, args=(torch.randn(2, 3),), watch=(w, b))


@case()
def module_given_as_argument() -> Call:
    block = mlp()
    return Call(fn=lambda x, m: m(x).exp(), args=(leaf(2, 4), block))


@case()
def bound_method_in_a_partial() -> Call:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def twice(self, x: Tensor, *, times: int) -> Tensor:
            for _ in range(times):
                x = cast("Tensor", self.linear(x)).tanh()
            return x

    block = Block()
    return Call(fn=functools.partial(block.twice, times=2), args=(leaf(2, 3),), watch=(block,))


@case(reentrant=False)
def frozen_base_with_trained_adapter() -> Call:
    base, down, up = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 2), nn.Linear(2, 6)
    return Call(fn=lambda x: (base(x) + up(down(x))).relu(), args=(torch.randn(3, 6),), watch=(base, down, up))


def _inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.randn(3)


@case(reentrant=False)
def inference_tensor_as_input() -> Call:
    return Call(fn=lambda x, t: (x.sin() + t).exp() * t.clone(), args=(leaf(3), _inference_tensor()))


@case(reentrant=False)
def explicit_generator() -> Call:
    def fn(x: Tensor, *, generator: torch.Generator) -> Tensor:
        noise = torch.rand(3, generator=generator) + torch.rand(3)
        return (x * noise).exp() * torch.randn(3, generator=generator)

    return Call(fn=fn, args=(leaf(3),), kwargs={"generator": torch.Generator().manual_seed(7)})


# What comes out


@case(reentrant=False)
def returns_its_input() -> Call:
    return Call(fn=lambda x, y: (x, (x * y).exp(), y), args=(leaf(3), leaf(3)))


@case(reentrant=False)
def returns_views() -> Call:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x.exp()
        return x.view(-1), y[0], y.t(), y.unsqueeze(0)

    return Call(fn=fn, args=(leaf(2, 3),))


@case()
def returns_a_tuple_with_holes() -> Call:
    return Call(fn=lambda x: (x.exp(), None, x.sin() * x, 3), args=(leaf(3),))


@case(reentrant=False)
def returns_a_dict() -> Call:
    return Call(fn=lambda x: {"a": x.exp(), "b": {"c": [x * x]}, "n": 1}, args=(leaf(3),))


@case(reentrant=False)
def returns_integers() -> Call:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        values, places = (x * x).topk(2)
        return places, values.exp(), (x > 0), places.sum()

    return Call(fn=fn, args=(leaf(5),))


@case(reentrant=False)
def returns_one_tensor_twice() -> Call:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y, y

    return Call(fn=fn, args=(leaf(3),))


@case()
def saves_nothing() -> Call:
    return Call(fn=lambda x, y: (x + y).view(-1) - 3, args=(leaf(2, 3), leaf(2, 3)))


@case()
def saves_only_its_input() -> Call:
    return Call(fn=lambda x: x.sin(), args=(leaf(3),))


# Islands and gradients inside


@case()
def no_grad_island() -> Call:
    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        with torch.no_grad():
            scale = (y * y).sum().sqrt()
            with torch.enable_grad():
                inner = (y * scale).tanh()
        return y / scale + inner

    return Call(fn=fn, args=(leaf(3),))


@case()
def detached_part() -> Call:
    return Call(fn=lambda x: x.exp() * x.sin().detach() + (x.detach() * x).cos(), args=(leaf(3),))


@case(reentrant=False)
def gradient_inside() -> Call:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        inner = x.detach().requires_grad_()
        (force,) = torch.autograd.grad((inner * w).exp().sum(), inner)
        return (x * force).sin() * w.exp()

    return Call(fn=fn, args=(leaf(3), leaf(3)))


@case(reentrant=False)
def gradient_inside_of_the_graph_that_goes_on() -> Call:
    def fn(x: Tensor) -> Tensor:
        y = (x * x).exp()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.sin() * slope

    x = leaf(3)
    return Call(fn=fn, args=(x,))


@case(reentrant=False)
def gradient_inside_with_retained_graph() -> Call:
    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y * slope

    return Call(fn=fn, args=(leaf(3),))


@case(reentrant=False)
def backward_inside() -> Call:
    def fn(x: Tensor) -> Tensor:
        inner = x.detach().requires_grad_()
        torch.autograd.backward((inner * inner).cos().sum())
        assert inner.grad is not None
        return x.exp() * inner.grad

    return Call(fn=fn, args=(leaf(3),))


@case(reentrant=False)
def gradient_inside_to_third_order() -> Call:
    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        for _ in range(3):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.tanh()

    return Call(fn=fn, args=(leaf(3),))


# Functions of the user's own


class Cube(torch.autograd.Function):
    """Saves its input and its output, and reads them twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: int) -> Tensor:
        y = x**power
        ctx.save_for_backward(x, y)
        ctx.power = power
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x, _), (_, y) = ctx.saved_tensors, ctx.saved_tensors
        return gradients[0] * ctx.power * y / x, None


class Scramble(torch.autograd.Function):
    """Saves an intermediate that is neither input nor output, returns an integer tensor too, and runs once only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.randperm(x.numel())
        ctx.save_for_backward(order, x.exp())
        ctx.mark_non_differentiable(order)
        return x.exp()[order], order

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        order, exp = ctx.saved_tensors
        return torch.zeros_like(exp).index_put((order,), gradients[0]) * exp


class AddOne(torch.autograd.Function):
    """Writes into its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)


@case()
def custom_function() -> Call:
    return Call(fn=lambda x: apply(Cube, x.exp(), 3).sin(), args=(leaf(3),))


@case(double=False)
def custom_function_with_an_intermediate() -> Call:
    def fn(x: Tensor) -> Tensor:
        y, order = apply(Scramble, x * x)
        return cast("Tensor", y.sin() * order)

    return Call(fn=fn, args=(leaf(5),))


@case()
def custom_function_that_writes_in_place() -> Call:
    return Call(fn=lambda x: apply(AddOne, x * x).exp(), args=(leaf(3),))


# Random numbers


@case()
def dropout() -> Call:
    return Call(
        fn=nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4), nn.Dropout(0.2)), args=(leaf(3, 4),)
    )


@case()
def random_numbers_of_many_kinds() -> Call:
    def fn(x: Tensor) -> Tensor:
        y = x[torch.randperm(4)] * torch.rand_like(x) + torch.randn(4, 3)
        return F.alpha_dropout(y.exp(), 0.3) * torch.bernoulli(torch.full((4, 3), 0.5)) + x

    return Call(fn=fn, args=(leaf(4, 3),))


@case()
def randomised_relu() -> Call:
    return Call(fn=nn.Sequential(nn.Linear(4, 4), nn.RReLU(), nn.Linear(4, 4), nn.RReLU()), args=(leaf(3, 4),))


@case(double=False)
def randomised_relu_in_place_at_the_end() -> Call:
    return Call(fn=lambda x: F.rrelu((x * 2).sin(), training=True, inplace=True), args=(leaf(6),))


# Modules


@case()
def batch_norm() -> Call:
    return Call(fn=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()), args=(leaf(6, 4),))


@case()
def batch_norm_with_cumulative_average_and_evaluation() -> Call:
    still = nn.BatchNorm1d(4).eval()
    return Call(fn=nn.Sequential(nn.BatchNorm1d(4, momentum=None), still, nn.Tanh()), args=(leaf(6, 4),))


@case()
def instance_and_group_norm() -> Call:
    block = nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True, affine=True), nn.GroupNorm(2, 4), nn.GELU())
    return Call(fn=block, args=(leaf(2, 4, 5),))


@case()
def spectral_norm_by_hook() -> Call:
    return Call(fn=nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 5)), nn.Tanh()), args=(leaf(3, 4),))


@case()
def spectral_norm_by_parametrization() -> Call:
    return Call(fn=nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh()), args=(leaf(3, 4),))


@case()
def weight_norm_by_parametrization() -> Call:
    return Call(fn=nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh()), args=(leaf(3, 4),))


@case(around=parametrize.cached)
def cached_parametrization() -> Call:
    linear = parametrizations.orthogonal(nn.Linear(4, 4))
    return Call(fn=lambda x: linear(linear(x).tanh()), args=(leaf(3, 4),), watch=(linear,))


@case()
def module_that_counts_in_a_buffer() -> Call:
    class Counted(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return (x * self.calls.clone()).exp()

    return Call(fn=nn.Sequential(Counted(), Counted()), args=(leaf(3),))


@case()
def convolution() -> Call:
    block = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(inplace=True), nn.ConvTranspose2d(3, 2, 2)
    )
    return Call(fn=block, args=(leaf(1, 2, 6, 6),))


# Without grad mode another kernel runs, so the reentrant engine's forward rounds otherwise.
@case(reentrant=False, double=False)
def lstm() -> Call:
    net = nn.LSTM(3, 4, num_layers=2, dropout=0.3)
    return Call(fn=lambda x: net(x)[0], args=(leaf(5, 2, 3),), watch=(net,))


@case(reentrant=False, double=False)
def packed_sequence() -> Call:
    net = nn.GRU(3, 4)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2]))
        out, state = net(packed)
        return nn.utils.rnn.pad_packed_sequence(out)[0], state

    return Call(fn=fn, args=(leaf(4, 2, 3),), watch=(net,))


@case()
def attention_by_module() -> Call:
    net = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
    return Call(fn=lambda x: net(x, x, x)[0], args=(leaf(2, 3, 8),), watch=(net,))


@case(double=False)
def attention_by_kernel() -> Call:
    def fn(q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, is_causal=True).exp()

    return Call(fn=fn, args=(leaf(1, 2, 5, 4), leaf(1, 2, 5, 4)))


@case(double=False)
def transformer_layer() -> Call:
    return Call(fn=nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), args=(leaf(2, 3, 8),))


@case(reentrant=False)
def embedding_and_loss() -> Call:
    table, head = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 7)
    tokens = torch.tensor([[1, 3, 0], [2, 2, 6]])
    return Call(
        fn=lambda t: F.cross_entropy(head(table(t)).flatten(0, 1), t.flatten(), label_smoothing=0.1),
        args=(tokens,),
        watch=(table, head),
    )


@case(reentrant=False)
def tied_weights() -> Call:
    table, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = table.weight
    return Call(fn=lambda t: head(table(t).tanh()), args=(torch.tensor([1, 3, 3]),), watch=(table, head))


@case()
def shared_weights() -> Call:
    linear = nn.Linear(4, 4)
    return Call(fn=lambda x: linear(linear(linear(x).tanh()).sin()), args=(leaf(2, 4),), watch=(linear,))


@case(reentrant=False)
def functional_call() -> Call:
    net = mlp()
    given: dict[str, Tensor] = {name: nn.Parameter(torch.randn_like(p)) for name, p in net.named_parameters()}

    def fn(x: Tensor, parameters: dict[str, Tensor]) -> Any:
        return torch.func.functional_call(net, parameters, (x,))

    return Call(fn=fn, args=(leaf(2, 4), given), watch=(net,))


# Regions within regions


@case(reentrant=False)
def nested_regions() -> Call:
    first, second = mlp(), mlp()

    def fn(x: Tensor) -> Tensor:
        y = recollect.checkpoint(first)(x.exp())
        return cast("Tensor", y.sin() * recollect.checkpoint(lambda y: second(y) * x)(y))

    return Call(fn=fn, args=(leaf(2, 4),), watch=(first, second))


@case(reentrant=False)
def regions_inside_a_sequential() -> Call:
    class Forgetful(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            return recollect.checkpoint(super().forward)(x)

    chain = nn.Sequential(Forgetful(*mlp()), nn.Dropout(0.5), Forgetful(Forgetful(*mlp()), nn.BatchNorm1d(4)))
    return Call(fn=chain, args=(leaf(5, 4),))


@case(reentrant=False)
def functional_call_around_a_region() -> Call:
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return cast("Tensor", recollect.checkpoint(self.inner)(x)).exp()

    net = Forgetful()
    given: dict[str, Tensor] = {name: nn.Parameter(torch.randn_like(p)) for name, p in net.named_parameters()}
    return Call(
        fn=lambda x: torch.func.functional_call(net, given, (x,)), args=(leaf(2, 4),), watch=(net, *given.values())
    )


@case(reentrant=False)
def region_called_twice_on_its_own_output() -> Call:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Tanh())
    region = recollect.checkpoint(block)
    return Call(fn=lambda x: region(region(x)), args=(leaf(5, 4),), watch=(block,))


# What stands around the call


@case(around=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
def autocast_around() -> Call:
    shared = nn.Linear(4, 4)
    return Call(fn=lambda x: shared(shared(x).tanh()), args=(leaf(3, 4),), watch=(shared,))


@case(around=lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False))
def autocast_without_weight_cache() -> Call:
    shared = nn.Linear(4, 4)
    return Call(fn=lambda x: shared(shared(x).tanh()), args=(leaf(3, 4),), watch=(shared,))


@case()
def autocast_inside() -> Call:
    block = mlp()

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = block(x)
            with torch.autocast("cpu", enabled=False):
                return cast("Tensor", block(y.float()))

    return Call(fn=fn, args=(leaf(3, 4),), watch=(block,))


@case(around=lambda: torch.device("meta"))
def default_device_around() -> Call:
    # The only devices of a CPU build are cpu and meta, so the region shows which one it was made under.
    return Call(
        fn=lambda x: (x * (3 if torch.empty(1).is_meta else 2)).exp(),
        args=(torch.randn(3, device="cpu", requires_grad=True),),
    )


class _DefaultDtype(AbstractContextManager[None]):
    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(torch.float32)


@case(around=_DefaultDtype)
def default_dtype_around() -> Call:
    return Call(fn=lambda x: (x * torch.full((3,), 1 / 3)).exp(), args=(leaf(3),))
