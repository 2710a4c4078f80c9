"""Random networks: a small program over a list of tensors (registers), and the machine that runs it.

A program has operators, in-place ones among them, blocks (autocast, no grad, ...) and regions, nested up to three deep.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import recollect
from recollect import compat

SIZE = 4
WINDOW = 4  # how many registers a region sees

# The program.


@dataclass(frozen=True, slots=True)
class Op:
    name: str
    a: int
    b: int


@dataclass(frozen=True, slots=True)
class Block:
    kind: str
    body: tuple[Instruction, ...]
    outputs: int


@dataclass(frozen=True, slots=True)
class Region:
    body: tuple[Instruction, ...]
    outputs: int
    routes: tuple[str, ...]  # how the registers reach the function, in turn
    returns: str
    early_stop: bool
    check: Literal["metadata", "values", "none"]
    preserve_rng: bool
    leaks: bool
    is_compat: bool


Instruction = Op | Block | Region


class SignedSquare(torch.autograd.Function):
    """Saves an input and an output, and its backward is differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x * x.abs()
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, out = ctx.saved_tensors
        again, _ = ctx.saved_tensors
        return gradient * (x.abs() + again.abs()) + 0 * out * gradient


class Shift(torch.autograd.Function):
    """Writes into its input and saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(0.25)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


signed_square: Callable[[Tensor], Tensor] = SignedSquare.apply
shift: Callable[[Tensor], Tensor] = Shift.apply


class Follower(nn.Module):
    """Reads a running mean and then updates it, and counts its calls."""

    mean: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(SIZE))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out = x * (1 + self.mean)
        self.mean.mul_(0.5).add_(x.detach().mean(0).tanh())
        self.calls += 1
        return out.sin()


def make_modules() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "linear": nn.Linear(SIZE, SIZE),
            "other": nn.Linear(SIZE, SIZE, bias=False),
            "spectral": nn.utils.parametrizations.spectral_norm(nn.Linear(SIZE, SIZE)),
            "layer_norm": nn.LayerNorm(SIZE),
            "batch_norm": nn.BatchNorm1d(SIZE),
            "instance_norm": nn.InstanceNorm1d(SIZE, affine=True, track_running_stats=True),
            "rrelu": nn.RReLU(),
            "dropout": nn.Dropout(0.3),
            "prelu": nn.PReLU(),
            "conv": nn.Conv1d(SIZE, SIZE, 3, padding=1),
            "follower": Follower(),
        }
    )


def grad_inside(x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((leaf.sin() * leaf).sum(), leaf)
    return x * gradient


def hooked(x: Tensor) -> Tensor:
    out = x * 1.5
    if out.requires_grad:
        out.register_hook(lambda gradient: gradient * 2)
    return out


def index_put(x: Tensor, y: Tensor) -> Tensor:
    out = x * 1
    out[x > 0] = y[x > 0].to(out.dtype)
    return out


def attention(x: Tensor, y: Tensor, dropout: float) -> Tensor:
    query, other = x.float()[None, None], y.float()[None, None]
    return F.scaled_dot_product_attention(query, other, other, dropout_p=dropout)[0, 0]


Apply = Callable[[nn.ModuleDict, Tensor, Tensor], Tensor]

PURE: dict[str, Apply] = {
    "linear": lambda m, x, _: m["linear"](x.float()),
    "other": lambda m, x, _: m["other"](x.float()),
    "tied": lambda m, x, _: F.linear(x.float(), cast("nn.Linear", m["linear"]).weight.t()),
    "spectral": lambda m, x, _: m["spectral"](x.float()),
    "layer_norm": lambda m, x, _: m["layer_norm"](x.float()),
    "batch_norm": lambda m, x, _: m["batch_norm"](x.float()),
    "instance_norm": lambda m, x, _: m["instance_norm"](x.float()[None])[0],
    "prelu": lambda m, x, _: m["prelu"](x.float()),
    "conv": lambda m, x, _: m["conv"](x.float()[None])[0],
    "follower": lambda m, x, _: m["follower"](x.float()),
    "gelu": lambda _m, x, _: F.gelu(x),
    "relu": lambda _m, x, _: x.relu(),
    "tanh": lambda _m, x, _: x.tanh(),
    "sigmoid": lambda _m, x, _: x.sigmoid(),
    "bounded_exp": lambda _m, x, _: x.tanh().exp(),
    "softmax": lambda _m, x, _: x.softmax(-1),
    "cumsum": lambda _m, x, _: x.cumsum(0),
    "max": lambda _m, x, _: x * x.max(-1, keepdim=True).values,
    "std": lambda _m, x, _: x / (1 + x.std(0)),
    "add": lambda _m, x, y: x + y,
    "mul": lambda _m, x, y: (x * y).tanh(),
    "matmul": lambda _m, x, y: x @ y.to(x.dtype) / SIZE,
    "where": lambda _m, x, y: torch.where(x > y, x, y.sin()),
    "masked_fill": lambda _m, x, y: x.masked_fill(y > 0.5, 0.1),
    "gather": lambda _m, x, y: x.gather(-1, y.argsort(-1)),
    "index": lambda _m, x, _: x[torch.tensor([2, 0, 0, 3])],
    "index_put": lambda _m, x, y: index_put(x, y),
    "topk": lambda _m, x, y: x + y.topk(2).values.sum(-1, keepdim=True),
    "chunk_cat": lambda _m, x, _: torch.cat(x.chunk(2, -1)[::-1], -1),
    "unbind": lambda _m, x, y: torch.stack([row * y[0] for row in x.unbind(0)]),
    "transpose": lambda _m, x, _: x.t(),
    "view": lambda _m, x, _: x.contiguous().view(2, -1).view(SIZE, SIZE),
    "rows": lambda _m, x, y: torch.cat([x[:2], y[2:]]),
    "attention": lambda _m, x, y: attention(x, y, 0.0),
    "signed_square": lambda _m, x, _: signed_square(x.tanh()),
    "detach": lambda _m, x, _: x.detach(),
    "clone": lambda _m, x, _: x.clone(),
    "double": lambda _m, x, _: x.double().sin().float(),
    "grad_inside": lambda _m, x, _: grad_inside(x),
    "hooked": lambda _m, x, _: hooked(x),
}
RANDOM: dict[str, Apply] = {
    "rrelu": lambda m, x, _: m["rrelu"](x),
    "dropout": lambda m, x, _: m["dropout"](x),
    "attention_dropout": lambda _m, x, y: attention(x, y, 0.5),
    "noise": lambda _m, x, _: x * torch.rand_like(x),
    "python_noise": lambda _m, x, _: x.sin() * random.random(),
    "generator_noise": lambda _m, x, _: x,  # needs the machine; see Machine.apply
}
INPLACE: dict[str, Apply] = {
    "relu_": lambda _m, x, _: x.relu_(),
    "halve_": lambda _m, x, _: x.mul_(0.5),
    "add_": lambda _m, x, y: x.add_(y),
    "mul_": lambda _m, x, y: x.mul_(y.tanh()),
    "sigmoid_": lambda _m, x, _: x.sigmoid_(),
    "clamp_": lambda _m, x, _: x.clamp_(-0.5, 0.5),
    "row_": lambda _m, x, _: (x[0].mul_(2), x)[1],
    "transposed_": lambda _m, x, y: (x.t().add_(y), x)[1],
    "masked_fill_": lambda _m, x, y: x.masked_fill_(y > 0, 0.2),
    "copy_": lambda _m, x, y: (x[1:3].copy_(y[:2]), x)[1],
    "zero_": lambda _m, x, _: (x[:1].zero_(), x)[1],
    "shift_": lambda _m, x, _: shift(x),
    "detached_": lambda _m, x, _: (x.detach().mul_(0.9), x)[1],
}
INPLACE_RANDOM: dict[str, Apply] = {
    "dropout_": lambda _m, x, _: F.dropout(x, 0.3, inplace=True),
    "rrelu_": lambda _m, x, _: F.rrelu_(x, training=True),
}
ALL = PURE | RANDOM | INPLACE | INPLACE_RANDOM


def names_in(body: Sequence[Instruction]) -> Iterator[str]:
    for instruction in body:
        if isinstance(instruction, Op):
            yield instruction.name
        else:
            yield from names_in(instruction.body)


def kinds_in(body: Sequence[Instruction]) -> Iterator[str]:
    for instruction in body:
        if not isinstance(instruction, Op):
            yield instruction.kind if isinstance(instruction, Block) else "region"
            yield from kinds_in(instruction.body)


def routes_in(body: Sequence[Instruction]) -> Iterator[str]:
    for instruction in body:
        if not isinstance(instruction, Op):
            yield from instruction.routes if isinstance(instruction, Region) else ()
            yield from routes_in(instruction.body)


# Running it.


@dataclass
class Writes:
    """Finds out, in the plain run, whether a tensor is written that a region has read from outside itself."""

    owners: dict[int, tuple[object, ...]] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)  # so that no identity is used twice
    read: set[int] = field(default_factory=set)
    clash: bool = False

    def note(self, tensor: Tensor, inside: list[object]) -> tuple[int, bool]:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self.owners:
            self.owners[key] = tuple(inside)
            self.kept.append(storage)
        return key, any(mark not in self.owners[key] for mark in inside)

    def reading(self, tensor: Tensor, inside: list[object]) -> None:
        key, is_foreign = self.note(tensor, inside)
        if is_foreign:
            self.read.add(key)

    def writing(self, tensor: Tensor, inside: list[object]) -> None:
        key, is_foreign = self.note(tensor, inside)
        self.clash = self.clash or is_foreign or key in self.read


class Machine:
    """Runs a program, with its regions or without.

    It has slots, so that what it notes is not found by the search for what a region's function reads.
    """

    __slots__ = ("forgettable", "generator", "has_regions", "inside", "leaked", "made", "modules", "outer", "writes")

    def __init__(self, *, has_regions: bool, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.has_regions = has_regions
        self.generator = torch.Generator().manual_seed(seed + 1)
        self.modules = make_modules()
        self.writes = Writes()
        self.inside: list[object] = []
        self.made: list[weakref.ref[Any]] = []
        self.forgettable: list[weakref.ref[Any]] = []
        self.outer: set[int] = set()
        self.leaked: list[Tensor] = []

    def apply(self, modules: nn.ModuleDict, op: Op, registers: list[Tensor], generator: torch.Generator | None) -> None:
        place = op.a % len(registers)
        x, y = registers[place], registers[op.b % len(registers)]
        is_write = op.name in INPLACE or op.name in INPLACE_RANDOM
        if not self.has_regions:
            self.writes.reading(y, self.inside)
            (self.writes.writing if is_write else self.writes.reading)(x, self.inside)
        if op.name == "generator_noise":
            out = x * torch.rand(SIZE, SIZE, generator=generator)
        else:
            out = ALL[op.name](modules, x, y)
        self.note([out])
        made = weakref.ref(out.untyped_storage())
        self.made.append(made)
        if self.inside and id(out.untyped_storage()) not in self.outer:
            self.forgettable.append(made)
        if is_write:
            registers[place] = out
        else:
            registers.append(out)

    def run(
        self,
        modules: nn.ModuleDict,
        body: Sequence[Instruction],
        registers: list[Tensor],
        generator: torch.Generator | None,
    ) -> None:
        for instruction in body:
            if isinstance(instruction, Op):
                self.apply(modules, instruction, registers, generator)
            elif isinstance(instruction, Block):
                here = list(registers)
                try:
                    with BLOCKS[instruction.kind]():
                        self.run(modules, instruction.body, here, generator)
                except Exception as error:
                    # Such code meets the end of a recomputation as an exception, and goes on.
                    if instruction.kind != "guarded" or isinstance(error, (RuntimeError, AssertionError)):
                        raise
                registers.extend(here[-instruction.outputs :])
            else:
                registers.extend(self.call(modules, instruction, registers[-WINDOW:], generator))

    def call(
        self, modules: nn.ModuleDict, region: Region, seen: list[Tensor], generator: torch.Generator | None
    ) -> list[Tensor]:
        routes = [region.routes[i % len(region.routes)] for i in range(len(seen))]
        closed = [t for t, route in zip(seen, routes, strict=True) if route == "closure"]
        positional = [t for t, route in zip(seen, routes, strict=True) if route == "positional"]
        keyword = {f"k{i}": t for i, t in enumerate(seen) if routes[i] == "keyword"}
        boxed = {"box": [t for t, route in zip(seen, routes, strict=True) if route == "boxed"]}
        others: dict[str, Any] = {}
        if "generator_noise" in names_in(region.body):
            others["generator"] = generator
        mark = object()

        def body(*args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Any:
            sources = {
                "positional": iter(args[1:]),
                "keyword": iter([kwargs[name] for name in sorted(kwargs)]),
                "boxed": iter(args[0]["box"]),
                "closure": iter(closed),
            }
            registers = [next(sources[route]) for route in routes]
            self.inside.append(mark)
            try:
                if not self.has_regions:
                    for tensor in registers:
                        self.writes.reading(tensor, self.inside)
                self.run(modules, region.body, registers, generator)
            finally:
                self.inside.pop()
            if region.leaks and not recollect.is_recomputing():
                self.leaked.append(registers[len(registers) // 2])
            return pack_result(region.returns, registers[-region.outputs :])

        is_outermost = not self.inside
        if is_outermost:
            self.outer = storages_of(seen)
        else:  # a function holds what it closes over
            self.keep(closed)
            self.outer |= storages_of(closed)
        self.note(seen)
        result = unpack_result(region.returns, self.wrap(region, body)(boxed, *positional, **keyword, **others))
        if is_outermost:
            self.keep([*result, *self.leaked])
        return result

    def note(self, tensors: list[Tensor]) -> None:
        if not self.has_regions:
            for tensor in tensors:
                self.writes.note(tensor, self.inside)

    def keep(self, tensors: list[Tensor]) -> None:
        """Forward may leave these alive."""
        kept = storages_of(tensors)
        self.forgettable = [ref for ref in self.forgettable if (made := ref()) is None or id(made) not in kept]

    def wrap(self, region: Region, body: Callable[..., Any]) -> Callable[..., Any]:
        if not self.has_regions:
            return body
        draws = [name for name in names_in(region.body) if name in RANDOM or name in INPLACE_RANDOM]
        preserves = region.preserve_rng or bool(draws)
        if region.is_compat and "python_noise" not in draws and region.check != "values":

            def call(*args: Any, **kwargs: Any) -> Any:
                return compat.checkpoint(
                    body,
                    *args,
                    use_reentrant=False,
                    early_stop=region.early_stop,
                    determinism_check="none" if region.check == "none" else "default",
                    preserve_rng_state=preserves,
                    **kwargs,
                )

            return call
        kinds = {"torch", "python"} if preserves else False
        return recollect.checkpoint(body, early_stop=region.early_stop, check=region.check, preserve_rng=kinds)


def storages_of(tensors: list[Tensor]) -> set[int]:
    return {id(tensor.untyped_storage()) for tensor in tensors}


def pack_result(kind: str, tensors: list[Tensor]) -> Any:
    if kind == "tensor" and len(tensors) == 1:
        return tensors[0]
    if kind == "dict":
        return {"tensors": tensors, "note": 3}
    if kind == "nested":
        return [tensors[:1], {"rest": tuple(tensors[1:])}, None]
    return tuple(tensors)


def unpack_result(kind: str, result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if kind == "dict":
        return list(result["tensors"])
    if kind == "nested":
        return [*result[0], *result[1]["rest"]]
    return list(result)


BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast_uncached": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    "no_autocast": lambda: torch.autocast("cpu", enabled=False),
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "guarded": nullcontext,
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "device": lambda: torch.device("cpu"),
}
