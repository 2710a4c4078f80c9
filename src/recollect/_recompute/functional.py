"""Regions under torch.func: one autograd Function per region, which keeps its inputs and recomputes in backward.

`grad`, `vjp` and `jacrev` refuse every saved-tensor hook, and under `vmap` and `jvp` a tensor outlives the transform
that wraps it, so a region under any transform takes this path. What the function reads must be an explicit input of
the Function: the tensors among its arguments and the parameters and buffers of its modules are lifted to be. A tensor
that a transform tracks and that is neither is an error, because its gradient would be missing.

There are no saved tensors to compare: ``check="metadata"`` compares outputs, values cannot be checked, and neither
``early_stop`` nor operator logs mean anything here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from recollect._core.errors import MismatchError, TransformError
from recollect._core.pytree import Arguments
from recollect._core.reachable import find_held
from recollect._core.torch_private.functorch import current_level, is_tracked, level_of, unwrap, unwrap_if_ended
from recollect._core.torch_private.pytree import Spec, flatten, tree_leaves, unflatten
from recollect._recompute.surroundings import Surroundings
from recollect._recompute.way import Options

_TENSOR = object()  # stands for a tensor in a function's result


class _Call:
    """One call: the function, where its tensors go, and the state around it."""

    def __init__(
        self, name: str, options: Options, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._name, self._fn = name, fn
        self._arguments = Arguments(args, kwargs)
        self._leaves = list(self._arguments.leaves)
        self._places = self._arguments.tensors
        held = find_held(fn, self._arguments.objects)
        self._tables = [
            (table, name)
            for table, is_buffers in _tables_of(held.modules)
            for name, tensor in table.items()
            if tensor is not None and (not is_buffers or is_tracked(tensor))
        ]
        for tensor in held.tensors:
            if is_tracked(tensor) or tensor.requires_grad:
                raise TransformError(_explain(name, tensor))
        self.tensors = [self._leaves[i] for i in self._places] + [table[name] for table, name in self._tables]
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        self._around = Surroundings(name, fn, self._arguments, options.preserve, restores=not options.counts_runs)
        self._arguments.leaves = []  # autograd holds the tensors
        self._checks = options.matcher.metadata
        self._metas: list[tuple[torch.Size, torch.dtype]] = []
        self.spec: Spec | None = None
        self.constants: list[Any] = []

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Forward: call the function with these tensors in their places; the tensors among its outputs."""
        with self._around.forward(), _ForeignWatch(self._name, tensors):
            outputs = self._call(tensors)
        self._metas = [(output.shape, output.dtype) for output in outputs]
        self._around.settle()  # here, because `jvp` runs the function again before the Function returns
        return outputs

    def again(self, transform: Callable[[Callable[..., tuple[Tensor, ...]]], Any]) -> Any:
        """Recompute: apply a transform to the function, under the state that was around it in forward."""
        return self._around.rerun(transform, self._call_again)

    def _call_again(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = self._call(tensors)
        metas = [(output.shape, output.dtype) for output in outputs]
        if self._checks and metas != self._metas:
            message = (
                f"region '{self._name}': it returned {_describe(self._metas)} in forward and "
                f"{_describe(metas)} in recomputation.\n"
                "The function read something that changed in between: a global, a random generator."
            )
            raise MismatchError(message)
        return outputs

    def abandon(self) -> None:
        """The function has raised."""
        self._around.abandon()

    def _call(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=False):
            leaves[place] = tensor
        args, kwargs = self._arguments.rebuild(leaves)
        with _lifted(self._tables, tensors[len(self._places) :]):
            result = self._fn(*args, **kwargs)
        outputs, self.spec = flatten([result])
        self.constants = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in outputs]
        return tuple(leaf for leaf in outputs if isinstance(leaf, Tensor))

    def rebuild(self, outputs: Sequence[Tensor]) -> Any:
        """The function's result with these tensors in it."""
        assert self.spec is not None
        tensors = iter(outputs)
        leaves = [next(tensors) if constant is _TENSOR else constant for constant in self.constants]
        return unflatten(leaves, self.spec)[0]


def run_functional(
    name: str, options: Options, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a region inside a torch.func transform.

    Raises:
        ValueError: an option that this path cannot honour.
        TransformError: a tracked tensor that is neither argument nor parameter.
    """
    if options.contexts is not None:
        message = f"region '{name}': context_fn does not work inside a torch.func transform; leave it out there"
        raise ValueError(message)
    if options.matcher.values is not None:
        message = (
            f"region '{name}': check='values' does not work inside a torch.func transform, which does not allow "
            "saved-tensor hooks; use check='metadata' or check='none' there"
        )
        raise ValueError(message)
    call = _Call(name, options, fn, args, kwargs)
    try:
        outputs = _Recomputed.apply(call, *call.tensors)  # type: ignore[no-untyped-call]
    except BaseException:
        call.abandon()
        raise
    return call.rebuild(outputs)


class _Recomputed(torch.autograd.Function):
    """Keeps its inputs and nothing else; backward and jvp run the function again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        return call.run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        call, *tensors = inputs
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.differentiable = [_is_differentiable(out) for out in output]
        ctx.mark_non_differentiable(*(out for out in output if not _is_differentiable(out)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = tuple(map(unwrap_if_ended, ctx.saved_tensors))
        wanted = [i for i, t in enumerate(tensors) if ctx.needs_input_grad[i + 1] and _is_differentiable(t)]

        def pull(fn: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
            def of_wanted(*values: Tensor) -> tuple[Tensor, ...]:
                full = list(tensors)
                for place, value in zip(wanted, values, strict=True):
                    full[place] = value
                return tuple(out for out in fn(*full) if _is_differentiable(out))

            outputs, back = torch.func.vjp(of_wanted, *(tensors[i] for i in wanted))  # type: ignore[misc]
            given = [gradient for gradient, real in zip(gradients, ctx.differentiable, strict=True) if real]
            assert len(given) == len(outputs)
            return cast("tuple[Tensor, ...]", back(tuple(unwrap_if_ended(cast("Tensor", g)) for g in given)))

        found = dict(zip(wanted, ctx.call.again(pull), strict=True))
        return (None, *(found.get(i) for i in range(len(tensors))))

    @staticmethod
    def jvp(ctx: Any, _call: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = tuple(map(unwrap_if_ended, ctx.saved_tensors))
        moving = [i for i, tangent in enumerate(tangents) if tangent is not None]

        def push(fn: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor | None, ...]:
            def of_moving(*values: Tensor) -> tuple[Tensor, ...]:
                full = list(tensors)
                for place, value in zip(moving, values, strict=True):
                    full[place] = value
                return fn(*full)

            primals = tuple(tensors[i] for i in moving)
            moves = tuple(cast("Tensor", tangents[i]) for i in moving)
            outputs, out = torch.func.jvp(of_moving, primals, moves)  # type: ignore[misc]
            return tuple(t if _is_differentiable(o) else None for o, t in zip(outputs, out, strict=True))

        return cast("tuple[Tensor | None, ...]", ctx.call.again(push))


def _describe(metas: list[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in metas) or "no tensor"


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _tables_of(roots: list[nn.Module]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Tables of parameters and (True) of buffers. A buffer no transform tracks stays: its module may update it."""
    seen: set[int] = set()
    for root in roots:
        for module in root.modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield module._parameters, False  # noqa: SLF001
                yield module._buffers, True  # noqa: SLF001


@contextmanager
def _lifted(tables: list[tuple[dict[str, Any], str]], tensors: Sequence[Tensor]) -> Iterator[None]:
    with ExitStack() as stack:
        for (table, name), tensor in zip(tables, tensors, strict=True):
            stack.callback(table.__setitem__, name, table[name])
            table[name] = tensor
        yield


class _ForeignWatch(TorchFunctionMode):
    """Raises when the function touches a tensor whose gradient the Function would lose."""

    def __init__(self, region: str, lifted: Sequence[Tensor]) -> None:
        super().__init__()
        self._region = region
        self._level = current_level()
        self._lifted = {id(unwrap(tensor)) for tensor in lifted}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and self._is_foreign(leaf):
                raise TransformError(_explain(self._region, leaf))
        return func(*args, **kwargs)

    def _is_foreign(self, tensor: Tensor) -> bool:
        if level_of(tensor) > self._level:
            return True
        below = unwrap(tensor)
        return below.requires_grad and not torch.is_grad_enabled() and id(below) not in self._lifted


def _explain(region: str, tensor: Tensor) -> str:
    return (
        f"region '{region}': inside a torch.func transform it reads a tensor of shape {list(tensor.shape)} that is "
        "neither one of its arguments nor a parameter or buffer of its modules.\n"
        "The transform tracks that tensor, and its gradient would be lost.\n"
        "Pass the tensor to the function as an argument."
    )
