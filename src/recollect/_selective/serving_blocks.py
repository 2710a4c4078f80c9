"""The context around the recomputation of a region that keeps blocks, and perhaps operators: gives what was kept."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from recollect._core.errors import CheckpointError
from recollect._core.scope import is_last_recomputation
from recollect._core.torch_private.engine import pop_hooks, push_hooks
from recollect._recompute.hooks import StopRecomputation, same
from recollect._selective.blocks import Side, Wanted
from recollect._selective.decisions import Decisions
from recollect._selective.kept_calls import KeptCalls, Slipped
from recollect._selective.served_way import Server
from recollect._selective.serving_mode import ChoiceMode, ServingMode

if TYPE_CHECKING:
    from recollect._recompute.match import Recorder
    from recollect._recompute.rerun import Collector
    from recollect._recompute.way import Pack


class Again(Side[ServingMode | ChoiceMode], Server):
    """Around recomputation: gives the results of blocks and operators that forward kept."""

    __slots__ = ("_decisions", "has_served", "knows_states")

    def __init__(
        self, kept_calls: KeptCalls, wanted: Wanted, decisions: Decisions, *, mode: ServingMode | ChoiceMode | None
    ) -> None:
        super().__init__(kept_calls, wanted, mode)
        self._decisions = decisions
        self.knows_states = True
        self.has_served = False

    def check(self, recorder: Recorder | Collector) -> Pack:
        """As the mode checks."""
        return self.mode.check(recorder) if isinstance(self.mode, ServingMode) else recorder.pack()

    def gives_less(self, error: RuntimeError) -> bool:
        """Kept operators do not fit as in `ServingMode`; kept blocks, if the function runs a backward pass itself."""
        if isinstance(error, Slipped):
            self.mode = None
            return True
        if isinstance(error, CheckpointError) or not self.has_served:
            return False
        self.knows_states, self._decisions.has_backward = False, True  # its graph lacks what was served
        return True

    def held(self) -> list[Tensor]:
        """What is kept."""
        return self.kept_calls.tensors()

    def __enter__(self) -> Self:
        if self.mode is None:
            self.kept_calls.unpack()
        self._begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end(kind, error, trace)
        finally:
            self.kept_calls.let_go()
        if (
            self.kept_calls.calls
            and is_last_recomputation()
            and (error is None or isinstance(error, StopRecomputation))
        ):
            # It stopped before it came there: so it will the next time.
            self._decisions.unneeded.update(key for key in self.kept_calls.calls if key[0] in self._decisions.blocks)

    def call_module(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Give what was kept of a module's call."""
        found = self._wanted.modules.get(id(module))
        if found is None or self._is_inside:
            return call(*args, **kwargs)
        return self._serve(found[0], call, args, kwargs)

    def call_named(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give what was kept of a named block."""
        if self._is_inside or self._decisions.rule_for(name) is None:
            return fn(*args, **kwargs)
        return self._serve(("region", name), fn, args, kwargs)

    def call_function(
        self, function: type, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Give what was kept of a custom Function."""
        name = function.__name__
        if self._is_inside or self._decisions.rule_for_function(name, self._counter.next(function)) is None:
            return call(*args, **kwargs)
        return self._serve(("Function", name), call, args, kwargs)

    def see_named(self, name: str, value: Any) -> None:
        """Names of values mean nothing here: their makers were kept."""

    def _serve(self, key: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = self._counter.next(key)
        kept = self.kept_calls.take((key, number))
        if kept is not None and self.knows_states and not kept.must_rerun:
            if not kept.is_changed:
                self.has_served = True
                return kept.serve(is_last=is_last_recomputation())
            self._decisions.blocks[key].is_written = True  # from the next call on, a copy is kept
        self._decisions.unneeded.discard((key, number))
        mode = self.mode
        self._is_inside = True
        if mode is not None:
            mode.is_paused = True
        push_hooks(same, same)  # what it saves belongs to nobody: its graph is not used
        try:
            return call(*args, **kwargs)
        finally:
            pop_hooks()
            self._is_inside = False
            if mode is not None:
                mode.is_paused = False
