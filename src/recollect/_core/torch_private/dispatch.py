"""The base class for modes that see every operator, in forward, in recomputation and on autograd's threads.

Private name: `torch.utils._python_dispatch.TorchDispatchMode`, and two of its class methods, overridden below.
Replaced by: a public dispatch mode, once torch exports one (`torch.overrides.TorchFunctionMode` is no substitute: it
does not see the operators of backward).
Run on: torch 2.11 (CUDA), 2.13 (CPU).
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DispatchMode"]


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that leaves Dynamo alone: importing nothing of it, and out of the way of compiled code.

    Subclasses override `__torch_dispatch__`, which runs with the mode itself switched off, holds the GIL, and may be
    called by several of autograd's threads at once. Higher-order operators arrive there too, as one call each.
    """

    supports_higher_order_operators = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Left on, the first operator under the mode imports all of torch._dynamo (about 2 s).
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled functions compiled under the mode; only what they call as operators at run time is seen."""
        return True

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc, traceback)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator unchanged."""
        return func(*args, **(kwargs or {}))
