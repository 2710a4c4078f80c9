"""State around a call that decides what it computes, read as one value that can be compared and put back.

Torch-function modes (`torch.device` contexts among them), process-wide switches that decide which kernel runs (SDPA
kernels, default dtype, matmul precision), and the cache of `parametrize.cached()`. Modes are put on the raw stack, not
entered: they were entered by their owner, who also leaves them. Switches are process-wide in torch, so they are set
only where they differ, which is rare: a `sdpa_kernel(...)` block around forward that has ended before backward.

Would be replaced by: a public snapshot of torch's global context, a public way to swap the mode stack, a public
handle on the cache.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from recollect._core.torch_private.composites import run_open
from recollect._core.torch_private.precision import matmul_precision, read_cpu, read_cuda, set_matmul_precision

_C = torch._C

function_mode_depth: Callable[[], int] = _C._len_torch_function_stack
"""How many torch-function modes are active. Costs 50 ns."""

any_autocast_enabled: Callable[[], bool] = _C._is_any_autocast_enabled
"""Whether autocast is on for any kind of device: one call of 50 ns against 150 for each kind."""

without_function_modes: Callable[[], Any] = _C.DisableTorchFunction
"""A context in which no torch-function mode sees anything."""

# (read, write) pairs; the C functions cost 40-60 ns each where the public ones cost 150.
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (matmul_precision, set_matmul_precision),
)
_R0, _R1, _R2, _R3, _R4, _ = (read for read, _ in _SWITCHES)

State = tuple[Any, ...]
"""The cache or None, the modes or None, then the switches."""


def read_state() -> State:
    """The state as it stands. Written out: it runs twice per region."""
    return (
        (parametrize._cache_enabled, dict(parametrize._cache)) if parametrize._cache_enabled else None,
        read_modes(ours=False) or None if function_mode_depth() else None,
        _R0(),
        _R1(),
        _R2(),
        _R3(),
        _R4(),
        (read_cuda(), read_cpu()),
    )


def put_state(state: State) -> Callable[[], None]:
    """Put a state in force; gives the function that puts back what was there."""
    cache = (parametrize._cache_enabled, parametrize._cache)
    modes = read_modes(ours=True)
    switches = [read() for read, _ in _SWITCHES]

    def put_back() -> None:
        put_modes(modes)
        _put_switches(switches)
        parametrize._cache_enabled, parametrize._cache = cache

    depth, entries = state[0] or (0, {})
    parametrize._cache_enabled, parametrize._cache = depth, dict(entries)
    _put_switches(state[2:])
    put_modes(state[1] or ())
    return put_back


class FunctionMode(TorchFunctionMode):
    """The base class of our own torch-function modes, which no recomputation runs under, and no compiled code."""

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def look_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of torch's attention, which the mode has just seen, so that it sees what that calls."""
        _C._push_on_torch_function_stack(self)
        try:
            return run_open(args, kwargs)
        finally:
            _C._pop_torch_function_stack()

    def meet_compiled(self) -> None:
        """Called before compiled code, of which the mode will see nothing (`compiled_calls.py`)."""

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)  # type: ignore[no-untyped-call]


def has_foreign_function_modes() -> bool:
    """Whether torch-function modes are on, ours included, that may not be among the calls of a program.

    One that only translates what the user's code says, the same way each time, has ``is_transparent`` set.
    """
    return function_mode_depth() > 0 and not all(
        getattr(mode, "is_transparent", False) for mode in read_modes(ours=True)
    )


def read_modes(*, ours: bool) -> tuple[Any, ...]:
    """The torch-function modes that are active, the innermost last; ours among them, or not."""
    modes = (_C._get_function_stack_at(i) for i in range(function_mode_depth()))
    return tuple(mode for mode in modes if ours or not isinstance(mode, FunctionMode))


def put_modes(modes: tuple[Any, ...]) -> None:
    """Make these the active torch-function modes, without entering or leaving any."""
    for _ in range(function_mode_depth()):
        _C._pop_torch_function_stack()
    for mode in modes:
        _C._push_on_torch_function_stack(mode)


def _put_switches(values: Any) -> None:
    for (read, write), value in zip(_SWITCHES, values, strict=True):
        if read() != value:
            write(value)


def quietly(hook: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """The same hook, unseen by torch-function modes."""

    def run(tensor: torch.Tensor) -> Any:
        with without_function_modes():
            return hook(tensor)

    return run
