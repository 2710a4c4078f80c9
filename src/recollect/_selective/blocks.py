"""Blocks that are kept whole: modules, `recollect.region` blocks, custom Functions. They need no dispatch mode.

In forward a block runs with the region's saved-tensor hooks taken away, so that autograd holds what its operators save,
and its result is kept. Recomputation is given the result and does not enter the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import Token
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from recollect._core.decisions import Decision
from recollect._core.operators import tensors_in
from recollect._core.scope import Watcher, watcher
from recollect._core.torch_private.ambient import without_function_modes
from recollect._core.torch_private.engine import pop_hooks, push_hooks, top_hooks
from recollect._recompute.module_state import ModuleState
from recollect._recompute.rng import Source
from recollect._recompute.way import Hooks
from recollect._selective.block_calls import SeenCalls, begin_seeing, calls_of_function, calls_of_module, end_seeing
from recollect._selective.decisions import DecisionLine, Decisions, bytes_of
from recollect._selective.following import Following
from recollect._selective.keeping_mode import KeepingMode
from recollect._selective.kept_call import KeptCall, States, moved_states, read_states, sources_of
from recollect._selective.kept_calls import Counter, KeptCalls
from recollect._selective.recording import Recording

Block = tuple[str, str]
"""What kind of block it is, and its path or name."""

M = TypeVar("M", bound=AbstractContextManager[Any])

_ONE = [True]
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


class Wanted:
    """The blocks that a policy wants whole in one region: modules by identity, and what sees their calls."""

    __slots__ = ("modules", "seen")

    def __init__(self, modules: list[tuple[nn.Module, str, str]], functions: Sequence[type]) -> None:
        self.modules = {id(module): (("module", path), by) for module, path, by in modules}
        self.seen: list[SeenCalls] = [calls_of_module(module) for module, _, _ in modules]
        self.seen += [calls_of_function(function) for function in functions]


class Side(Generic[M]):
    """What forward and recomputation have in common: the watcher of one run of the function, and its mode, if any."""

    __slots__ = ("_counter", "_is_inside", "_tokens", "_wanted", "kept_calls", "mode")

    def __init__(self, kept_calls: KeptCalls, wanted: Wanted, mode: M | None) -> None:
        self.kept_calls, self._wanted, self.mode = kept_calls, wanted, mode
        self._counter = Counter()
        self._is_inside = False
        self._tokens: list[Token[Watcher | None]] = []

    def _begin(self, own: Watcher) -> None:
        self._counter = Counter()
        begin_seeing(self._wanted.seen)
        self._tokens.append(watcher.set(own))
        if self.mode is not None:
            self.mode.__enter__()

    def _end(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self.mode is not None:
                self.mode.__exit__(kind, error, trace)
        finally:
            watcher.reset(self._tokens.pop())
            end_seeing(self._wanted.seen)


class Forward(Side[KeepingMode]):
    """Around forward: runs blocks, keeps their results, and lets the mode see the operators outside of them."""

    __slots__ = (
        "_around",
        "_decisions",
        "_generators",
        "_hooks",
        "_is_plain",
        "_modules",
        "_reads_states",
        "recorder",
        "scopes",
    )

    def __init__(
        self,
        kept_calls: KeptCalls,
        wanted: Wanted,
        decisions: Decisions,
        *,
        mode: KeepingMode | None,
        recorder: Recording | Following | None,
        scopes: list[str],
        generators: Sequence[Source] = (),
        modules: ModuleState | None = None,
    ) -> None:
        super().__init__(kept_calls, wanted, mode)
        self._decisions, self.recorder, self.scopes = decisions, recorder, scopes
        # Read before the region's own hooks are in force: what is kept is a saved tensor of whoever is around.
        self._around = top_hooks(True)  # noqa: FBT003
        self._reads_states = decisions.draws is not False
        self._generators, self._modules = generators, modules
        self._hooks: Hooks | None = None

    def __enter__(self) -> Self:
        self._hooks = top_hooks(True)  # noqa: FBT003
        self._is_plain = (
            self.mode is None
            and self.recorder is None
            and not self._reads_states
            and (self._modules is None or self._modules.is_stateless)
            and self.kept_calls.inside is None
            and not self._decisions.has_backward
        )
        self._begin(self)
        if self.recorder is not None:
            self.recorder.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.recorder is not None:
                self.recorder.__exit__(kind, error, trace)
        finally:
            self._end(kind, error, trace)
            self._hooks = None  # which lead to the frame
        if error is None:
            if self.mode is not None:
                self.mode.prove()  # whatever becomes of it, this execution is served what its operators gave
            self.kept_calls.settle(self._around)

    def call_module(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module; keep its result if the policy wants it whole."""
        found = self._wanted.modules.get(id(module))
        if found is None or self._is_inside:
            return call(*args, **kwargs)
        return self._keep(*found, call, args, kwargs)

    def call_named(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a named block; keep its result if the policy wants it."""
        if self._is_inside:
            return fn(*args, **kwargs)
        by = self._decisions.rule_for(name)
        if by is not None:
            return self._keep(("region", name), by, fn, args, kwargs)
        self.scopes.append(name)
        try:
            return fn(*args, **kwargs)
        finally:
            self.scopes.pop()

    def call_function(
        self, function: type, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a custom Function; keep its result if the policy wants it."""
        name = function.__name__
        found = None if self._is_inside else self._decisions.rule_for_function(name, self._counter.next(function))
        if found is None:
            return call(*args, **kwargs)
        key = ("Function", name)
        if key not in self._decisions.blocks:
            self._decisions.add_block(key, found.by, found.decision)
        return self._keep(key, found.by, call, args, kwargs)

    def see_named(self, name: str, value: Any) -> None:
        """Keep a value that was given a name, if the policy wants it."""
        by = None if self._is_inside or not isinstance(value, Tensor) else self._decisions.rule_for(name)
        if by is None:
            return
        if self.mode is None:
            self._decisions.is_stale = self._decisions.is_stale or name not in self._decisions.named
            return
        self._decisions.named.add(name)
        with without_function_modes():
            line = self.mode.keep_maker(value)
        if isinstance(line, DecisionLine):
            line.decision, line.by = Decision.SAVE, f"{by}: '{name}'"

    def _keep(
        self, key: Block, by: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        decisions = self._decisions
        line = decisions.blocks.get(key)
        if line is None:
            line = decisions.add_block(key, by)
        number = self._counter.next(key)
        if self._is_plain and not (kwargs or line.is_written or line.is_impure):
            return self._keep_plainly(key, number, line, call, args)
        given = tensors_in(*args, *kwargs.values()) if kwargs else tensors_in(*args)
        versions = [tensor._version for tensor in given]  # noqa: SLF001
        watched = self.mode is not None or self.recorder is not None
        self._is_inside = True
        if watched:
            self._pause(given)
        try:
            before = self._states(given, args, kwargs) if self._reads_states else []
            marks = self._modules.marks() if self._modules is not None else None
            result = self._run_bare(call, args, kwargs)
            if not self._is_needed((key, number)):
                kept = KeptCall(line.what, [], None)
                kept.must_rerun = True
            else:
                kept = self._kept(line, result)
                if before and self.kept_calls.preserves:
                    kept.states = moved_states(before, self._states(given, args, kwargs))
                if marks and self._modules is not None:
                    kept.moved = self._modules.moved(marks)
                # It writes into what it is given, where others may look; or where generators stand cannot be read.
                if before is None or versions != [tensor._version for tensor in given]:  # noqa: SLF001
                    kept.must_rerun = True
        finally:
            self._is_inside = False
            if watched:
                self._resume(line)
        if line.is_impure or decisions.has_backward:
            kept.must_rerun = True
        kept.line = line
        self.kept_calls.calls[key, number] = kept
        self.kept_calls.offloads = self.kept_calls.offloads or line.is_offloaded
        line.matched += 1
        return result

    def _keep_plainly(
        self, key: Block, number: int, line: DecisionLine, call: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any:
        """The same where nothing is watched, and no generator or module state is to be looked after. Written out."""
        given = tensors_in(*args)
        versions = [tensor._version for tensor in given]  # noqa: SLF001
        hooks, top = self._hooks, top_hooks(True)  # noqa: FBT003
        is_ours = hooks is not None and top is not None and top[0] is hooks[0]
        self._is_inside = True
        if is_ours:
            pop_hooks()
        try:
            result = call(*args)
        finally:
            if is_ours:
                assert hooks is not None
                push_hooks(*hooks)
            self._is_inside = False
        line.matched += 1
        if (key, number) in self._decisions.unneeded:
            return result
        kept = self._kept(line, result)
        kept.line = line
        if versions != [tensor._version for tensor in given]:  # noqa: SLF001
            kept.must_rerun = True  # it writes into what it is given, where others may look
        self.kept_calls.calls[key, number] = kept
        self.kept_calls.offloads = self.kept_calls.offloads or line.is_offloaded
        return result

    def _is_needed(self, key: tuple[Block, int]) -> bool:
        inside = self.kept_calls.inside
        if inside is not None and inside.keys is not None:
            return key in inside.keys
        return key not in self._decisions.unneeded

    def _pause(self, given: list[Tensor]) -> None:
        if self.mode is not None:
            self.mode.begin_block(given)
        if self.recorder is not None:
            self.recorder.is_paused = True

    def _resume(self, line: DecisionLine) -> None:
        if self.mode is not None and self.mode.end_block():
            line.is_impure = True
        if self.recorder is not None:
            self.recorder.is_paused = False

    def _states(self, given: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> States | None:
        return read_states([*sources_of(given, (*args, *kwargs.values())), *self._generators])

    def _run_bare(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block without the region's saved-tensor hooks, unless others were set inside it."""
        hooks, top = self._hooks, top_hooks(True)  # noqa: FBT003
        if hooks is None or top is None or top[0] is not hooks[0]:
            return call(*args, **kwargs)
        pop_hooks()
        try:
            return call(*args, **kwargs)
        finally:
            push_hooks(*hooks)

    def _kept(self, line: DecisionLine, result: Any) -> KeptCall:
        if type(result) is Tensor:
            kept = KeptCall(line.what, [result.detach()], None)
            if result.requires_grad:
                kept.require_grad(_ONE)
        else:
            kept = KeptCall.of(line.what, result, Tensor.detach)
            kept.look_inside(tensors_in(result), Tensor.detach)
            kept.require_grad(kept.flags_of(result, self._decisions.region, _PLAIN))
        if not line.bytes:
            line.bytes = sum(map(bytes_of, tensors_in(result)))
        if line.is_written:
            kept.copy_out()
            kept.is_written = True
        return kept
