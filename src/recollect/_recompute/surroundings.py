"""All that a function's result depends on besides its arguments, read when it runs and put back to run it again.

The ambient state, the random generators, the modules it uses, Python's context variables. Every engine recomputes
through `Surroundings.rerun`.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import compress
from types import FunctionType
from typing import Any, TypeVar

import torch

from recollect._core.pytree import Arguments
from recollect._core.reachable import Found, find_held
from recollect._core.reads import functions_of, read_entries, reads_first
from recollect._core.scope import mark_recomputing
from recollect._core.torch_private.engine import set_grad_enabled
from recollect._recompute.ambient import Ambient
from recollect._recompute.collected import Collected, keep, keep_out_of
from recollect._recompute.contents import COLLECTIONS, copy_collections
from recollect._recompute.memory import Memory
from recollect._recompute.module_state import ModuleState
from recollect._recompute.objects import ObjectState, may_change
from recollect._recompute.rng import RngState, Source, put_back, sources_of_own
from recollect._recompute.variables import Variables

T = TypeVar("T")

ContextVariable = contextvars.ContextVar[Any]
_FEW = 8  # variables in a context, as long as Inductor has not run


def _find_collecting(context: contextvars.Context) -> list[ContextVariable]:
    """The variables in which user code may collect something.

    In those whose names begin so, torch keeps its settings (2.13, once Inductor ran): hundreds, in dicts. It adds one
    for each time that a setting was patched, so that nothing here may take Python's time for each.
    """
    if len(context) <= _FEW:
        found: Iterable[ContextVariable] = [at for at, value in context.items() if isinstance(value, COLLECTIONS)]
    else:
        kinds = {kind for kind in set(map(type, context.values())) if issubclass(kind, COLLECTIONS)}
        found = compress(context, map(kinds.__contains__, map(type, context.values()))) if kinds else ()
    return [variable for variable in found if not variable.name.startswith("torch.")]


def _copy_collection(variable: ContextVariable) -> None:
    """Let a variable hold a copy of its collection; call it inside a copied context.

    What user code collects there (hooks that record outputs do) it must not collect twice, and what it collects while
    recomputing must not live longer than the recomputation.
    """
    variable.set(copy_collections(variable.get()))


class Surroundings:
    """What was around one execution of a region: made at entry, `settle`d at exit.

    Attributes:
        is_captured: whether forward must run under something, because a CUDA graph is being captured.
        own_generators: those that the function and its modules hold themselves.
        preserved: the kinds of generator that are put back for recomputation.
    """

    __slots__ = (
        *("_ambient", "_collected", "_collecting", "_context", "_functions", "_objects", "_restores", "_rng"),
        "_variables",
        *("is_captured", "modules", "own_generators", "preserved", "region"),
    )

    def __init__(
        self,
        region: str,
        fn: Callable[..., Any],
        arguments: Arguments,
        preserve: frozenset[str],
        *,
        exact: bool = False,
        memory: Memory | None = None,
        watches: bool = False,
        restores: bool = False,
    ) -> None:
        self.region = region
        self._ambient = Ambient()
        self.preserved = preserve
        self._rng = RngState(preserve, arguments) if preserve else None
        self.is_captured = self._rng is not None and self._rng.around_forward is not None
        held = find_held(fn, arguments.objects)
        self.modules = (
            ModuleState(held.modules, held.tensors, exact=exact, memory=memory, watches=watches, restores=restores)
            if held.modules or held.tensors
            else None
        )
        self._restores = restores
        self._variables: Variables | None = None
        self._collected: Collected | None = None
        self._functions: list[FunctionType] = []
        if restores:
            self._note_held(held)
        generators = held.generators
        if self.modules is not None:
            generators += self.modules.find_generators()
        self.own_generators: Sequence[Source] = sources_of_own(generators, preserve) if generators else ()
        if self.own_generators and self._rng is not None:
            self._rng.add(self.own_generators)
            self.is_captured = self._rng.around_forward is not None
        context = self._context = contextvars.copy_context()
        self._collecting = _find_collecting(context) if context else ()
        for variable in self._collecting:
            context.run(_copy_collection, variable)
        changing = [item for item in arguments.objects if may_change(item)] if arguments.objects else None
        self._objects = ObjectState(changing) if changing else None

    def _note_held(self, held: Found) -> None:
        """Note what the function and the methods of its modules read beyond attributes, and where they collect."""
        cells, names, holders, functions, owned = held.cells, held.globals, held.holders, held.functions, list[Any]()
        if self.modules is not None:
            owned = self.modules.find_holders()
            for method in self.modules.methods:
                of_method = find_held(method)
                cells, names = cells + of_method.cells, names + of_method.globals
                holders, functions = holders + of_method.holders, functions + of_method.functions
        if cells or names:
            self._variables = Variables(cells, names)
        if holders or owned:
            self._collected = Collected(holders, owned)
        self._functions = functions

    @property
    def watch(self) -> AbstractContextManager[Any] | None:
        """Before forward: what it must run under, to see which parameters it writes; None if that is known."""
        return None if self.modules is None else self.modules.watch

    def forward(self) -> AbstractContextManager[Any]:
        """What forward must run under: nothing, except while a CUDA graph is being captured."""
        make = None if self._rng is None else self._rng.around_forward
        return nullcontext() if make is None else make(self.region)

    @property
    def draws(self) -> bool:
        """After `settle`: whether the function moved a generator."""
        return self._rng is not None

    def moved_states(self) -> list[tuple[Source, Any]]:
        """After `settle`: the generators that the function moved, and where they stood at entry."""
        return [] if self._rng is None else self._rng.entries

    def restore_ambient(self) -> ExitStack | None:
        """Set the ambient state alone as it was; gives what puts it back, None if it stands so."""
        return self._ambient.restore()

    def settle(self) -> None:
        """At exit: let go of what the function turned out not to need."""
        if self.modules is not None:
            self.modules.settle()
        if self._rng is not None:
            self._rng = self._rng.settle(self.region)
        if self._objects is not None:
            self._objects = self._objects.settle()
        if self._variables is not None:
            self._variables.settle(self._functions)
        new = self.modules.find_new_holders() if self._restores and self.modules is not None else []
        if self._collected is not None or new:
            collected = self._collected or Collected((), ())
            has_changed = collected.settle(new, self._may_read)
            self._collected = collected if has_changed else None
            if self.modules is not None and collected.was:
                self.modules.let_go(collected.was)
        self._functions = []

    def _may_read(self, part: Any, name: Any) -> bool:
        """Whether the code may read what a dict, or an object's attribute, held at entry; other collections it may."""
        codes = [function.__code__ for function in self._functions]
        if self.modules is not None:
            codes += self.modules.find_code()
        if isinstance(part, COLLECTIONS):
            return not isinstance(part, dict) or read_entries(codes)
        codes += [method.__code__ for method in functions_of([type(part)])]
        return any(reads_first(code, name) for code in codes)

    def abandon(self) -> None:
        """The function has raised: leave nothing behind."""
        if self.modules is not None:
            self.modules.abandon()

    def rerun(self, body: Callable[..., T], *args: Any) -> T:
        """Call `body` as if it ran at entry, with grad mode on; afterwards everything stands as before.

        Raises:
            ChangedInputError: it reads a parameter or buffer that was changed in place since.
        """
        return self._context.copy().run(self._rerun, body, args)

    def _rerun(self, body: Callable[..., T], args: tuple[Any, ...]) -> T:
        mark_recomputing()
        for variable in self._collecting:
            _copy_collection(variable)
        grad_was_enabled = torch.is_grad_enabled()
        modules = ambient = states = None
        undo: list[Callable[[], None]] = []
        try:
            if self._restores or self._objects is not None:
                self._put(undo)
            if self.modules is not None:
                modules = self.modules.restore(self.region)
            if self._rng is not None:
                states = self._rng.restore()
            set_grad_enabled(True)
            ambient = self._ambient.restore()
            return body(*args)
        finally:
            try:
                if ambient is not None:
                    ambient.close()
            finally:
                set_grad_enabled(grad_was_enabled)
                if states is not None:
                    put_back(states)
                if modules is not None:
                    modules.close()
                for put_away in reversed(undo):
                    put_away()

    def _put(self, undo: list[Callable[[], None]]) -> None:
        """Set variables, objects and collections as forward found them; adds what puts them back."""
        if self._restores and self.modules is not None:
            undo += keep(self.modules.find_passing())
        if self._variables is not None:
            self._variables.put(self.region, undo)
        if self._objects is not None:
            undo.append(self._objects.put(self.region))
        if self._collected is not None:
            undo += self._collected.put(list if self.modules is None else self.modules.find_holders)
        if self._restores and self.modules is not None:
            hooked = self.modules.find_hooked()
            if hooked:
                undo += keep_out_of(hooked)
