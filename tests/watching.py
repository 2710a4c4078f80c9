"""What tests use to watch a step from outside: operators run again, calls made, what lives, what is in force now."""

import weakref
from collections import UserList
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

import recollect
from recollect._core.torch_private.dispatch import DispatchMode

Region = Callable[..., Any]
T = TypeVar("T")


class Operators(DispatchMode):
    """Names of the operators that run under it: all of them, and those of recomputations."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []
        self.again: list[str] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", str(func)).partition(".")[0]
        if name != "detach":
            self.all.append(name)
            if recollect.is_recomputing():
                self.again.append(name)
        return func(*args, **(kwargs or {}))


class Seen(Sequence[T]):
    """What forward and recomputation have shown, one after the other.

    A list would do if it did not hold tensors or fractions: those are collected once, and recomputation's taken out.
    A region does not look for collections in objects of Python's own classes, such as this one's list.
    """

    __slots__ = ("_shown",)

    def __init__(self) -> None:
        self._shown: UserList[T] = UserList()

    def append(self, value: T) -> None:
        self._shown.append(value)

    def __len__(self) -> int:
        return len(self._shown)

    def __getitem__(self, place: int) -> T:  # type: ignore[override]
        return self._shown[place]

    def __eq__(self, other: object) -> bool:
        return self._shown == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._shown)


class Counted:
    """A function that counts its calls."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self._fn(*args, **kwargs)


class RunsToItsEnd:
    """A function that counts how often it runs to its end, which early stop prevents."""

    def __init__(self) -> None:
        self.ends = 0

    def __call__(self, x: Tensor) -> Tensor:
        y = x.exp().sin()
        self.ends += 1
        return y


class Watched:
    """Says which of the tensors it was shown still have their bytes, by name."""

    def __init__(self) -> None:
        self._storages: dict[str, weakref.ref[torch.UntypedStorage]] = {}

    def show(self, **tensors: Tensor) -> None:
        self._storages |= {name: weakref.ref(tensor.untyped_storage()) for name, tensor in tensors.items()}

    @property
    def alive(self) -> set[str]:
        return {name for name, storage in self._storages.items() if storage() is not None}


class Token:
    """Something that a region's function holds."""


def token_held_by(use: Callable[[Callable[[Tensor], Tensor]], None]) -> weakref.ref[Token]:
    token = Token()

    def fn(x: Tensor) -> Tensor:
        assert token is not None
        return x.exp().sin()

    use(fn)
    return weakref.ref(token)


def what_is_in_force() -> dict[str, Any]:
    """Everything a region might set and forget to put back."""
    return {
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "function modes": [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())],
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "default dtype": torch.get_default_dtype(),
        "recomputing": recollect.is_recomputing(),
        "random state": torch.get_rng_state().tolist(),
    }


def backward(loss: Tensor, *, keep: bool = False) -> None:
    """`loss.backward()`, with a type."""
    torch.autograd.backward(loss, retain_graph=keep)
