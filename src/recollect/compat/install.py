"""Puts this library's engine where code expects torch's: under torch's own names, and wherever they were taken from.

Libraries import torch's functions by name (``from torch.utils.checkpoint import checkpoint``), and keep them in
partials and attributes. So torch's function is replaced in every dictionary, partial, closure and default argument that
refers to it; `uninstall` replaces ours in the same way. Nothing of torch's is called.

What is replaced are functions and the two classes that go with the engine. torch's wrapper classes and its
`CheckpointError` stay what they are: our wrappers count as instances of the former, our errors of the latter.
"""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from collections.abc import Callable
from types import CellType, FunctionType, ModuleType, TracebackType
from typing import Any, Self

from torch import distributed

from recollect._compile.torchs_checkpoint import trace_as_written
from recollect._core.errors import CheckpointError

_CHECKPOINT = "torch.utils.checkpoint"
_WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"

_FUNCTIONS = (
    "checkpoint",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
)
_CLASSES = ("CheckpointFunction", "GraphExecGroup")
_WRAPPER_FUNCTIONS = ("checkpoint_wrapper", "offload_wrapper", "apply_activation_checkpointing")
_WRAPPER_CLASSES = ("ActivationWrapper", "CheckpointWrapper", "OffloadWrapper")


class Installation:
    """What `install` did; as a context manager it undoes that at the end of the block.

    Attributes:
        is_removed: whether it was undone.
    """

    def __init__(self) -> None:
        self.is_removed = False
        self._bases = CheckpointError.__bases__
        pairs = _stand_ins()
        self._undo_tracing = trace_as_written(pairs[0][1])
        CheckpointError.__bases__ = (self._bases[0], importlib.import_module(_CHECKPOINT).CheckpointError)
        _replace(pairs)

    def remove(self) -> None:
        """Put torch's own functions back, wherever ours are; once is enough."""
        if self.is_removed:
            return
        self.is_removed = True
        self._undo_tracing()
        CheckpointError.__bases__ = self._bases
        _replace([(new, old) for old, new in _stand_ins()])
        if self in _installed:
            _installed.remove(self)

    def __enter__(self) -> Self:
        """Nothing: it was installed when it was made."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


_installed: list[Installation] = []  # one at most: what is replaced is the process's


def install() -> Installation:
    """Make unedited code that calls ``torch.utils.checkpoint`` use recollect's engine.

    This replaces functions in ``torch.utils.checkpoint``, in torch's module wrappers and its composable API, and
    wherever a library or a model already holds them. Code imported later finds the replacements too. Modules wrapped
    meanwhile keep recollect's wrappers. It imports torch's compiler, which takes about two seconds.

    Call it before training starts: if a forward ran on torch's engine, torch's engine also runs its backward.

    Returns:
        An object that undoes it at the end of a ``with`` block; `uninstall` does so anywhere.

    >>> import torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> import recollect.compat
    >>> def block(x):
    ...     seen.append(recollect.is_recomputing())
    ...     return x.sin().cos()
    >>> seen = []
    >>> with recollect.compat.install():
    ...     checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    >>> seen
    [False, True]
    """
    if not _installed:
        _installed.append(Installation())
    return _installed[0]


def uninstall() -> None:
    """Undo `install`: put torch's own functions back everywhere. If nothing is installed, nothing happens.

    >>> import recollect.compat
    >>> installation = recollect.compat.install()
    >>> recollect.compat.uninstall()
    >>> installation.is_removed
    True
    """
    if _installed:
        _installed[0].remove()


@functools.cache  # for good: a compiler or a class may remember one of ours
def _stand_ins() -> list[tuple[Any, Any]]:
    """Pairs of what torch has and what stands there instead; `checkpoint` first."""
    checkpointing = importlib.import_module(_CHECKPOINT)
    compat = importlib.import_module("recollect.compat")  # which imports this file
    noop = checkpointing.noop_context_fn
    pairs = [(getattr(checkpointing, name), _function(getattr(compat, name), noop)) for name in _FUNCTIONS]
    pairs += [(getattr(checkpointing, name), _subclass(getattr(compat, name))) for name in _CLASSES]
    if distributed.is_available():
        wrapping = importlib.import_module(_WRAPPERS)
        pairs += [(getattr(wrapping, name), _function(getattr(compat, name), None)) for name in _WRAPPER_FUNCTIONS]
        for name in _WRAPPER_CLASSES:
            getattr(wrapping, name).register(getattr(compat, name))
        composable = importlib.import_module("recollect.compat.composable")
        torchs = importlib.import_module(_COMPOSABLE)
        pairs.append((torchs.checkpoint, _function(composable.checkpoint, None)))
    return pairs


def _function(ours: Callable[..., Any], noop: Any) -> Callable[..., Any]:
    """A function of ours under an identity of its own, by which it is found again."""

    @functools.wraps(ours)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if noop is not None and kwargs.get("context_fn") is noop:
            del kwargs["context_fn"]
        return ours(*args, **kwargs)

    return stand_in


def _subclass(ours: type) -> type:
    """A class of ours under an identity of its own; what torch's engine still has to finish finds no group there."""
    own = {"__module__": ours.__module__, "__doc__": ours.__doc__, "_get_current_group": staticmethod(lambda: None)}
    return type(ours.__name__, (ours,), own)


def _replace(pairs: list[tuple[Any, Any]]) -> None:
    """Put objects in place of others in whatever refers to them by a name; one look over all that is alive."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # the collector does not look at what is frozen
    try:
        _replace_in_living(pairs)
    finally:
        if is_frozen:
            gc.freeze()


def _replace_in_living(pairs: list[tuple[Any, Any]]) -> None:
    instead = {id(old): new for old, new in pairs}
    parts: list[Any] = []  # dictionaries of classes and defaults of functions: what has them is asked for, below
    for holder in gc.get_referrers(*(old for old, _ in pairs)):
        if isinstance(holder, tuple) or (isinstance(holder, dict) and _is_of_class(holder)):
            parts.append(holder)
        elif isinstance(holder, dict):
            _replace_values(holder, instead)
        elif isinstance(holder, functools.partial):
            new = instead.get(id(holder.func), holder.func)
            holder.__setstate__((new, holder.args, holder.keywords, vars(holder)))  # type: ignore[attr-defined]
        elif isinstance(holder, CellType):
            holder.cell_contents = instead[id(holder.cell_contents)]
        elif hasattr(holder, "__dict__"):
            _replace_attributes(holder, instead)  # an object whose dictionary Python has not made yet
    defaults = {id(part) for part in parts}
    for holder in gc.get_referrers(*parts) if parts else ():
        kind = type(holder)  # a weak proxy must not be asked
        if kind is FunctionType and id(holder.__defaults__) in defaults:
            holder.__defaults__ = tuple(instead.get(id(value), value) for value in holder.__defaults__)
        elif issubclass(kind, type):
            _replace_attributes(holder, instead)


def _is_of_class(table: dict[Any, Any]) -> bool:
    """Whether it is a class's. Python caches what it finds there and does not see changes: the class must be set."""
    return "__module__" in table and "__doc__" in table


def _replace_values(table: dict[Any, Any], instead: dict[int, Any]) -> None:
    if not _is_ours(table):
        for key in [key for key, value in table.items() if id(value) in instead]:
            table[key] = instead[id(table[key])]


def _replace_attributes(holder: Any, instead: dict[int, Any]) -> None:
    for key, value in list(vars(holder).items()):
        if id(value) in instead:
            setattr(holder, key, instead[id(value)])


def _is_ours(table: dict[Any, Any]) -> bool:
    """Whether it is the dictionary of a module of this library, or of the compiler's, which know functions by name."""
    name = table.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if not isinstance(module, ModuleType) or vars(module) is not table:
        return False
    return module.__name__.startswith(("recollect.", "torch._dynamo", "torch._inductor"))
