"""Logits that are not computed until something other than the loss needs them.

An object takes the place of the last linear layer's output. It stays lazy when it is reshaped, cast, or loses rows, and
its `cross_entropy` is computed in chunks. Anything else computes the logits first, once. It is not a Tensor, so nothing
that torch does with tensors behind Python's back can mistake it for one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from recollect._core.torch_private.compiler import untraced
from recollect._core.torch_private.pytree import flatten, unflatten
from recollect._levers.linear_cross_entropy import linear_cross_entropy

_ROWS_FIRST = 2  # a batch of rows and their classes


class LazyLogits:
    """Logits that are not there yet.

    Args:
        hidden: what the last layer was given, ``[..., features]``.
        weight: of that layer.
        bias: of that layer.
        chunks: into how many parts the loss cuts the rows; None: as it sees fit.
        dtype: what the logits would have; by default what the layer would give.
        classes_at: the dimension of the classes: the last, or 1 if they were moved there.
        is_tracked: whether gradients will be asked for; by default if they can be now.
    """

    __slots__ = (
        "__weakref__",
        "_bias",
        "_chunks",
        "_classes_at",
        "_dtype",
        "_hidden",
        "_is_tracked",
        "_made",
        "_weight",
    )

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        chunks: int | None = None,
        dtype: torch.dtype | None = None,
        classes_at: int = -1,
        is_tracked: bool | None = None,
    ) -> None:
        kind = hidden.device.type
        computed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        self._hidden, self._weight, self._bias, self._chunks = hidden, weight, bias, chunks
        self._dtype = computed if dtype is None else dtype
        self._classes_at = classes_at
        self._is_tracked = torch.is_grad_enabled() if is_tracked is None else is_tracked
        self._made: Tensor | None = None

    def compute(self) -> Tensor:
        """The logits themselves; made once."""
        if self._made is None:
            with torch.set_grad_enabled(self._is_tracked):
                made = F.linear(self._hidden, self._weight, self._bias).to(self._dtype)
                self._made = made if self._classes_at == -1 else made.movedim(-1, 1)
        return self._made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Called for functions of torch that are given one of these."""
        del types
        given = dict(kwargs or {})
        if func is F.cross_entropy:
            loss = _lose(*args, **given)
            if loss is not None:
                return loss
        return func(*_compute_all(args), **dict(zip(given, _compute_all(given.values()), strict=True)))

    # What it would be, without being it.
    @property
    def shape(self) -> torch.Size:
        """Of the logits."""
        rows, classes = self._hidden.shape[:-1], self._weight.shape[0]
        return torch.Size((*rows, classes) if self._classes_at == -1 else (rows[0], classes, *rows[1:]))

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where they would be."""
        return self._hidden.device

    @property
    def ndim(self) -> int:
        """How many dimensions they would have."""
        return self._hidden.ndim

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient could be asked for."""
        given = (self._hidden, self._weight, self._bias)
        return self._is_tracked and any(one is not None and one.requires_grad for one in given)

    def dim(self) -> int:
        """How many dimensions they would have."""
        return self._hidden.dim()

    def size(self, dim: int | None = None) -> Any:
        """Their shape, or one number of it."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """How many numbers they would be."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"LazyLogits({list(self.shape)}, dtype={self._dtype}, device='{self.device}')"

    # What leaves it as it is.
    def float(self) -> Any:
        """The same in float32."""
        return self._with(dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The same in another type; anywhere else it is computed first."""
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):
            return self._with(dtype=args[0])
        if not args and kwargs.keys() == {"dtype"}:
            return self._with(dtype=kwargs["dtype"])
        if len(args) == 1 and not kwargs and isinstance(args[0], (str, torch.device)):
            there = torch.device(args[0])
            if there.type == self.device.type and there.index in (None, self.device.index):
                return self
        return self.compute().to(*args, **kwargs)

    def contiguous(self) -> Any:
        """The same: it has no memory to be anywhere in."""
        return self

    def view(self, *shape: Any) -> Any:
        """The same with its rows in another shape."""
        return (
            self.reshape(*shape)
            if all(isinstance(one, (int, tuple, list)) for one in shape)
            else self._do("view", shape)
        )

    def reshape(self, *shape: Any) -> Any:
        """The same with its rows in another shape."""
        wanted = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        classes = self._weight.shape[0]
        rows = math.prod(self._hidden.shape[:-1])
        known = math.prod(one for one in wanted if one != -1)
        is_kept = bool(wanted) and (
            wanted[-1] == classes or (wanted[-1] == -1 and -1 not in wanted[:-1] and known == rows)
        )
        if self._classes_at != -1 or not is_kept:
            return self._do("reshape", shape)
        return self._with(hidden=self._hidden.reshape(*wanted[:-1], self._hidden.shape[-1]))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """The same with some dimensions of its rows joined."""
        start, end = start_dim % self.ndim, end_dim % self.ndim
        if self._classes_at != -1 or end == self.ndim - 1:
            return self.compute().flatten(start_dim, end_dim)
        return self._with(hidden=self._hidden.flatten(start, end))

    def transpose(self, dim0: int, dim1: int) -> Any:
        """The same with its classes second, where `cross_entropy` expects them; or back."""
        pair = {dim0 % self.ndim, dim1 % self.ndim}
        if self.ndim == 3 and pair == {1, 2}:  # noqa: PLR2004
            return self._with(classes_at=1 if self._classes_at == -1 else -1)
        return self.compute().transpose(dim0, dim1)

    def permute(self, *dims: Any) -> Any:
        """The same with its classes second; any other order is computed first."""
        order = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
        order = tuple(dim % self.ndim for dim in order)
        if self._classes_at == -1 and order == (0, self.ndim - 1, *range(1, self.ndim - 1)):
            return self._with(classes_at=1)
        return self.compute().permute(*dims)

    def __getitem__(self, index: Any) -> Any:
        """Some of its rows; if classes are chosen, too, it is computed first."""
        hidden = None if self._classes_at != -1 else _index_rows(self._hidden, index)
        return self.compute()[index] if hidden is None else self._with(hidden=hidden)

    def _with(self, **changed: Any) -> LazyLogits:
        given = {"hidden": self._hidden, "weight": self._weight, "bias": self._bias}
        kept = {"chunks": self._chunks, "dtype": self._dtype, "classes_at": self._classes_at}
        return LazyLogits(**{**given, **kept, "is_tracked": self._is_tracked, **changed})

    def _do(self, name: str, args: Iterable[Any]) -> Any:
        return getattr(self.compute(), name)(*args)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.compute(), name)

    @untraced
    def _lose(self, targets: Tensor, **options: Any) -> Tensor | None:
        """The loss in chunks; None if it must be computed otherwise."""
        if not isinstance(targets, Tensor) or targets.is_floating_point():
            return None
        hidden = self._hidden
        if self._classes_at == -1 and hidden.ndim > _ROWS_FIRST:
            return None  # `cross_entropy` would take the second dimension for classes
        if hidden.shape[:-1] != targets.shape:
            return None
        loss = linear_cross_entropy(hidden, self._weight, targets, bias=self._bias, chunks=self._chunks, **options)
        kind = self.device.type
        return loss if torch.is_autocast_enabled(kind) else loss.to(self._dtype)


def _lose(  # noqa: PLR0917 (those of cross_entropy)
    input: Any,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,  # noqa: FBT001
    ignore_index: int = -100,
    reduce: bool | None = None,  # noqa: FBT001
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """What `cross_entropy` gives; None if it is asked for something else than chunks can do."""
    if not isinstance(input, LazyLogits) or size_average is not None or reduce is not None:
        return None
    return input._lose(  # noqa: SLF001
        target,
        class_weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def _index_rows(hidden: Tensor, index: Any) -> Tensor | None:
    """The hidden states of the rows that an index chooses; None if it chooses among classes, too."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is None or isinstance(part, (bool, Tensor, list)) for part in parts):
        return None
    chosen = [part for part in parts if part is not Ellipsis]
    reaches_last = len(chosen) == hidden.ndim or (len(chosen) < len(parts) and parts[-1] is not Ellipsis)
    if len(parts) - len(chosen) > 1 or len(chosen) > hidden.ndim or (reaches_last and chosen[-1] != slice(None)):
        return None
    return hidden[index]


def _compute_all(values: Iterable[Any]) -> list[Any]:
    """The values, with logits in place of lazy ones, in any containers."""
    leaves, spec = flatten(list(values))
    return unflatten([leaf.compute() if isinstance(leaf, LazyLogits) else leaf for leaf in leaves], spec)


def compute_without_loss(result: Any) -> Any:
    """What a model returns, with logits in place of lazy ones, unless something else of it leads to its graph."""
    leaves, spec = flatten([result])
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        return result
    if not any(isinstance(leaf, LazyLogits) for leaf in leaves):
        return result
    return unflatten([leaf.compute() if isinstance(leaf, LazyLogits) else leaf for leaf in leaves], spec)[0]


def _define(name: str) -> None:
    """Let an operator of Python compute the logits first."""
    function: Callable[..., Any] = getattr(operator, name, None) or getattr(Tensor, name)

    def method(self: LazyLogits, *others: Any) -> Any:
        return function(self.compute(), *_compute_all(others))

    def reflected(self: LazyLogits, other: Any) -> Any:
        return function(other, self.compute())

    setattr(LazyLogits, name, method)
    mirror = f"__r{name.strip('_')}__"
    if hasattr(Tensor, mirror):
        setattr(LazyLogits, mirror, reflected)


for _name in (
    *("__add__", "__sub__", "__mul__", "__truediv__", "__floordiv__", "__mod__", "__pow__", "__matmul__", "__neg__"),
    *("__abs__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__and__", "__or__", "__xor__"),
    *("__invert__", "__iter__", "__float__", "__bool__", "__array__"),
):
    _define(_name)
