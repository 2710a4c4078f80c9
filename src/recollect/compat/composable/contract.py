"""What every composable API promises: a module carries each API once, with a state, and keeps its names.

States and registry lie in the module's own dictionary, under names that are the same in every process. So they are
copied and pickled with it, and gone with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from torch import nn

_STATES = "_recollect_composable_states"
_REGISTRY = "_recollect_composable_registry"

P = ParamSpec("P")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
M = TypeVar("M", bound="nn.Module | Sequence[nn.Module]")
M_contra = TypeVar("M_contra", contravariant=True)


class State:
    """What an API remembers about a module: set any attributes. One bag for all modules of one application."""


class RegistryItem:
    """Stands in the registry for one application of an API."""


class ComposableAPI(Protocol, Generic[M_contra, P, S_co]):
    """A function made by `contract`."""

    __name__: str
    __doc__: str | None

    def __call__(self, module: M_contra, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Apply the API."""

    def state(self, module: nn.Module) -> S_co:
        """The state of a module that carries the API; None for one that does not."""


@overload
def contract() -> Callable[[Callable[Concatenate[M, P], Any]], ComposableAPI[M, P, State]]: ...


@overload
def contract(state_cls: type[S]) -> Callable[[Callable[Concatenate[M, P], Any]], ComposableAPI[M, P, S]]: ...


def contract(
    state_cls: type[Any] = State,
) -> Callable[[Callable[Concatenate[M, P], Any]], ComposableAPI[M, P, Any]]:
    """Make a function from modules to modules a composable API.

    Before the function runs, the module gets a new state, which ``function.state(module)`` returns from then on, and an
    entry in the registry; if the function raises, both are removed. A sequence of modules shares one state, which lies
    on those that are inside no other of them. The function returns the module, nothing, or other modules in its place.

    Args:
        state_cls: makes the state, called without arguments.

    Raises:
        AssertionError: by the decorated function: the module carries the API already, or one of that name, or the
            function returns more or fewer modules than it was given.
        RuntimeError: by the decorated function: names of parameters, buffers or modules are not what they were.
        TypeError: by the decorated function: it was not given modules.

    >>> import torch
    >>> from recollect.compat.composable import contract, get_registry
    >>> @contract()
    ... def freeze(module):
    ...     freeze.state(module).was_trained = module.weight.requires_grad
    ...     return module.requires_grad_(False)
    >>> layer = freeze(torch.nn.Linear(2, 2))
    >>> freeze.state(layer).was_trained, list(get_registry(layer))
    (True, ['freeze'])
    >>> freeze(layer)
    Traceback (most recent call last):
    ...
    AssertionError: freeze has already been applied to this module, and can be applied only once: Linear(...)
    """

    def decorate(func: Callable[Concatenate[M, P], Any]) -> ComposableAPI[M, P, Any]:
        key = f"{func.__module__}.{func.__qualname__}"

        @functools.wraps(func)
        def apply(module: M, *args: P.args, **kwargs: P.kwargs) -> Any:
            roots = _roots_of(module, func.__name__)
            before = [_names_of(root) for root in roots]
            _enter(roots, func.__name__, key, state_cls())
            try:
                given = func(module, *args, **kwargs)
                result = module if given is None else given
                _check_names(func.__name__, roots, before, _roots_of(result, func.__name__))
            except BaseException:
                _forget(roots, func.__name__, key)
                raise
            return result

        def state(module: nn.Module) -> Any:
            states: dict[str, Any] = vars(module).get(_STATES) or {}
            return states.get(key)

        api = cast("Any", apply)
        api.state = state
        return cast("ComposableAPI[M, P, Any]", api)

    return decorate


def get_registry(module: nn.Module) -> dict[str, RegistryItem] | None:
    """The APIs that a module carries, by name, in the order in which they were applied; None if there are none.

    >>> import torch
    >>> from recollect.compat.composable import checkpoint, get_registry
    >>> list(get_registry(checkpoint(torch.nn.Linear(2, 2))))
    ['checkpoint']
    """
    registry: dict[str, RegistryItem] | None = vars(module).get(_REGISTRY)
    return registry


_get_registry = get_registry  # torch's name


def _roots_of(given: object, api: str) -> list[nn.Module]:
    """The modules given, without those that are inside another of them."""
    is_one = isinstance(given, nn.Module) or not isinstance(given, Iterable)  # a Sequential is both
    modules: list[Any] = [given] if is_one else list(cast("Iterable[Any]", given))
    strangers = [module for module in modules if not isinstance(module, nn.Module)]
    if strangers:
        message = f"{api} expects a module or a sequence of modules, not {strangers[0]!r}"
        raise TypeError(message)
    inside = {part for module in modules for part in module.modules() if part is not module}
    return [module for module in dict.fromkeys(modules) if module not in inside]


def _enter(roots: list[nn.Module], api: str, key: str, state: object) -> None:
    """Give these modules a state and an entry, or none of them."""
    item = RegistryItem()
    tables = [_tables_of(root) for root in roots]
    for root, (states, registry) in zip(roots, tables, strict=True):
        if key in states:
            message = f"{api} has already been applied to this module, and can be applied only once: {root}"
            raise AssertionError(message)
        if api in registry:
            message = (
                f"{api} has already been applied to this module, by another function of that name: {root}\n"
                "APIs are registered by their names. Rename one of the two."
            )
            raise AssertionError(message)
    for root, (states, registry) in zip(roots, tables, strict=True):
        states[key], registry[api] = state, item
        vars(root)[_STATES], vars(root)[_REGISTRY] = states, registry


def _tables_of(module: nn.Module) -> tuple[dict[str, object], dict[str, RegistryItem]]:
    """The states and the registry of a module, or new ones."""
    found: list[Any] = []
    for name in (_STATES, _REGISTRY):
        table = vars(module).get(name, {})
        if not isinstance(table, dict):
            message = f"{type(module).__name__}.{name} should hold the registry of composable APIs, and holds {table!r}"
            raise AssertionError(message)  # noqa: TRY004 (torch's type)
        found.append(table)
    return found[0], found[1]


def _forget(roots: list[nn.Module], api: str, key: str) -> None:
    """Take away what `_enter` gave, and tables that are empty then."""
    for root in roots:
        for name, entry in ((_STATES, key), (_REGISTRY, api)):
            table = vars(root).get(name, {})
            table.pop(entry, None)
            if not table:
                vars(root).pop(name, None)


def _names_of(module: nn.Module) -> dict[str, list[str]]:
    return {
        "parameters": [name for name, _ in module.named_parameters()],
        "buffers": [name for name, _ in module.named_buffers()],
        "modules": [name for name, _ in module.named_modules()],
    }


def _check_names(
    api: str, roots: list[nn.Module], before: list[dict[str, list[str]]], updated: list[nn.Module]
) -> None:
    if len(updated) != len(roots):
        message = f"{api} was given {len(roots)} modules and returned {len(updated)}; expected the same number"
        raise AssertionError(message)
    for root, names, module in zip(roots, before, updated, strict=True):
        after = _names_of(module)
        for kind, old in names.items():
            new = after[kind]
            if old == new:
                continue
            gone, come = [name for name in old if name not in new], [name for name in new if name not in old]
            change = f"gone: {gone}; new: {come}" if gone or come else f"the order was {old} and is {new}"
            message = (
                f"{api} changed the names of {kind} of {type(root).__name__}: {change}.\n"
                "A composable API cannot modify FQNs, the dotted names by which state_dicts and other APIs find things."
            )
            raise RuntimeError(message)
