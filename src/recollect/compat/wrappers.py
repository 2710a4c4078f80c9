"""Modules around modules: `checkpoint_wrapper`, `offload_wrapper`, and applying them all over a model.

A wrapper has no trace in what is stored: ``state_dict``, ``named_parameters`` and ``named_buffers``, its own and those
of the models around it, are those of the plain module. ``named_modules`` shows it, as in torch, because by those names
modules are replaced.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from recollect._apply.caches import cache_classes, without_cache
from recollect._apply.sent_forward import offload_all
from recollect._core.argument_text import describe_argument, short_repr
from recollect._core.torch_private.compiler import untraced
from recollect._core.torch_private.fsdp import run_policy
from recollect._core.torch_private.functorch import transforms_active
from recollect._core.torch_private.modules import lists_members
from recollect._offload.offload import offload_everything
from recollect.compat.checkpoint import checkpoint

_WRAPPED = "_checkpoint_wrapped_module"
_PREFIX = _WRAPPED + "."
_TABLES = ("_parameters", "_buffers", "_modules")
_OPTIONS = frozenset({*(checkpoint.__kwdefaults__ or ()), "preserve_rng_state"})
# What copying and pickling look for on the object itself; found on the wrapped module it would copy that one alone.
_NOT_PASSED_ON = frozenset({"__deepcopy__", "__copy__", "__getnewargs__", "__getnewargs_ex__", _WRAPPED})


class CheckpointImpl(Enum):
    """Which engine `checkpoint_wrapper` uses.

    Attributes:
        REENTRANT: runs the function without a graph, and runs backward on the recomputed one.
        NO_REENTRANT: has fewer limits, and is the default.
    """

    REENTRANT = auto()
    NO_REENTRANT = auto()


class ActivationWrapper(nn.Module, ABC):
    """A module around another one, its ``_checkpoint_wrapped_module``; subclasses say how it is called.

    Attributes that the wrapper does not have, and indexing, go to the wrapped module; so does setting one of the
    wrapped module's own parameters, buffers or submodules.
    """

    def __init__(self, mod: nn.Module) -> None:
        if not isinstance(mod, nn.Module):
            message = f"{type(self).__name__} expects a torch.nn.Module, not {describe_argument(mod)}"
            raise TypeError(message)
        super().__init__()
        self._checkpoint_wrapped_module = mod
        self.register_state_dict_post_hook(_hide_in_state)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_show_in_state)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_hide_in_report)  # type: ignore[no-untyped-call]

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in _NOT_PASSED_ON:
                raise
            return getattr(self._checkpoint_wrapped_module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        owner = self._owner_of(name)
        if owner is None:
            super().__setattr__(name, value)
        elif isinstance(value, Tensor) and name in owner._parameters:  # noqa: SLF001
            # `functional_call` sets any tensor, and knows the module as its parameters' names tell it: as this one.
            owner._parameters[name] = value  # type: ignore[assignment]  # noqa: SLF001
        else:
            setattr(owner, name, value)

    def __delattr__(self, name: str) -> None:
        owner = self._owner_of(name)
        if owner is None:
            super().__delattr__(name)
        else:
            delattr(owner, name)

    def _owner_of(self, name: str) -> nn.Module | None:
        """The module beneath that registers this name; None if the wrapper itself is meant."""
        own = vars(self)
        wrapped = own.get("_modules", {}).get(_WRAPPED)
        if wrapped is None or name in own or any(name in own[table] for table in _TABLES):
            return None
        if isinstance(wrapped, ActivationWrapper):
            return wrapped._owner_of(name)  # noqa: SLF001
        return wrapped if any(name in getattr(wrapped, table) for table in _TABLES) else None

    def __getitem__(self, key: Any) -> Any:
        wrapped: Any = self._checkpoint_wrapped_module
        return wrapped.__getitem__(key)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As for any module; where parameters or buffers are listed, the wrapped module has the wrapper's name."""
        if not lists_members():
            yield from super().named_modules(memo, prefix, remove_duplicate)
            return
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, child in self._modules.items():
            if child is not None:
                path = prefix if name == _WRAPPED else f"{prefix}.{name}" if prefix else name
                yield from child.named_modules(memo, path, remove_duplicate)


def _hide_in_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """After a state_dict is made: name everything as in the plain module."""
    hidden = prefix + _PREFIX
    for key in [key for key in state_dict if key.startswith(hidden)]:
        state_dict[prefix + key.removeprefix(hidden)] = state_dict.pop(key)
    # The versions of modules, by which older state_dicts are brought up to date, are found by the same names.
    metadata: dict[str, Any] = getattr(state_dict, "_metadata", {})
    for path in [f"{path}." for path in metadata]:
        if path.startswith(hidden):
            metadata[(prefix + path.removeprefix(hidden))[:-1]] = metadata[path[:-1]]


def _show_in_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a state_dict is loaded: name everything as it is named here; what is so named already stays."""
    shown = prefix + _PREFIX
    for key in [key for key in state_dict if key.startswith(prefix) and not key.startswith(shown)]:
        state_dict[shown + key.removeprefix(prefix)] = state_dict.pop(key)


def _hide_in_report(module: nn.Module, incompatible_keys: Any) -> None:
    """After a state_dict was loaded: name what is missing or unexpected as in the plain module."""
    for keys in incompatible_keys:
        keys[:] = [key.replace(_PREFIX, "") for key in keys]


class OffloadWrapper(ActivationWrapper):
    """Calls the wrapped module with its saved tensors in host memory; made by `offload_wrapper`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module; what it saves for backward is sent to the host."""
        if is_dynamo_compiling():
            from recollect._apply.in_graph import call_in_graph

            return call_in_graph("offloaded", self._checkpoint_wrapped_module, offload_all, args, kwargs)
        return self._call(args, kwargs)

    @untraced
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if transforms_active():  # torch.func has no saved-tensor hooks
            return self._checkpoint_wrapped_module(*args, **kwargs)
        with offload_everything():
            return self._checkpoint_wrapped_module(*args, **kwargs)


class CheckpointWrapper(ActivationWrapper):
    """Calls the wrapped module as a checkpointed region; made by `checkpoint_wrapper`."""

    def __init__(
        self,
        mod: nn.Module,
        checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
        checkpoint_fn: Callable[..., Any] | None = None,
        **checkpoint_fn_kwargs: Any,
    ) -> None:
        super().__init__(mod)
        self.checkpoint_impl = checkpoint_impl
        if checkpoint_fn is None:
            checkpoint_fn_kwargs["use_reentrant"] = checkpoint_impl is CheckpointImpl.REENTRANT
        self._is_own_engine = checkpoint_fn is None
        self.checkpoint_fn = functools.partial(checkpoint_fn or checkpoint, **checkpoint_fn_kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module through `checkpoint_fn`."""
        call: Callable[..., Any] = self._checkpoint_wrapped_module
        args, kwargs = without_cache(self, cache_classes(), args, kwargs)
        if kwargs and self.checkpoint_impl is CheckpointImpl.REENTRANT:
            call, args, kwargs = _Packed(call, tuple(kwargs)), (*args, *kwargs.values()), {}
        elif kwargs and self._is_own_engine and not _OPTIONS.isdisjoint(kwargs):
            # Arguments of the module that are named like options of ours.
            call = functools.partial(call, **{name: kwargs.pop(name) for name in _OPTIONS & kwargs.keys()})
        return self.checkpoint_fn(call, *args, **kwargs)


class _Packed:
    """Calls a function whose last arguments are given by position, with these names."""

    __slots__ = ("__wrapped__", "_names")

    def __init__(self, fn: Callable[..., Any], names: tuple[str, ...]) -> None:
        self.__wrapped__, self._names = fn, names

    def __call__(self, *values: Any) -> Any:
        first = len(values) - len(self._names)
        return self.__wrapped__(*values[:first], **dict(zip(self._names, values[first:], strict=True)))


def checkpoint_wrapper(
    module: nn.Module,
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> nn.Module:
    """Wrap a module so that each call drops its activations until backward recomputes them.

    Args:
        module: the module.
        checkpoint_impl: which engine. With the reentrant one, keyword arguments of the module are passed by position
            through the engine.
        checkpoint_fn: called as ``checkpoint_fn(module, *args, **kwargs)`` in place of `checkpoint`.
        checkpoint_fn_kwargs: options of `checkpoint`, or of `checkpoint_fn`.

    >>> import torch
    >>> from recollect.compat import checkpoint_wrapper
    >>> block = checkpoint_wrapper(torch.nn.Linear(2, 2), preserve_rng_state=False)
    >>> block(torch.ones(1, 2)).sum().backward()
    >>> list(block.state_dict())
    ['weight', 'bias']
    """
    return CheckpointWrapper(module, checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs)


def offload_wrapper(module: nn.Module) -> nn.Module:
    """Wrap a module so that each call keeps its activations in host memory until backward.

    >>> import torch
    >>> from recollect.compat import offload_wrapper
    >>> block = offload_wrapper(torch.nn.Linear(2, 2))
    >>> block(torch.ones(1, 2)).sum().backward()
    """
    return OffloadWrapper(module)


def _always(_module: nn.Module) -> bool:
    return True


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., Any] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = _always,
    auto_wrap_policy: Any = None,
) -> None:
    """Wrap modules of a model in place, inner ones first; the model itself is never wrapped.

    A module that is used in several places is wrapped once, and all of them get the same wrapper.

    Args:
        model: the model.
        checkpoint_wrapper_fn: makes the wrapper of a module, or returns None to leave the module as it is.
        check_fn: returns whether to wrap a module.
        auto_wrap_policy: instead of `check_fn`: a function called by keyword with ``module``, ``recurse`` (True to ask
            whether to look inside the module, False whether to wrap it) and ``nonwrapped_numel`` (the number of
            parameters outside of inner wrappers); or a policy object of ``torch.distributed.fsdp.wrap``, which may
            also have keyword arguments for the wrapper of each module.

    Raises:
        ValueError: `auto_wrap_policy` is neither.
        AssertionError: `checkpoint_wrapper_fn` is a class, and a module is wrapped in it already.

    >>> import torch
    >>> from recollect.compat import apply_activation_checkpointing
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, torch.nn.Linear))
    >>> [type(module).__name__ for module in model]
    ['CheckpointWrapper', 'ReLU']
    """
    if not isinstance(model, nn.Module):
        message = f"apply_activation_checkpointing expects a torch.nn.Module first, not {describe_argument(model)}"
        raise TypeError(message)
    for name, given in (("checkpoint_wrapper_fn", checkpoint_wrapper_fn), ("check_fn", check_fn)):
        if not callable(given):
            message = f"{name}={short_repr(given)}: expected a function of a module"
            raise TypeError(message)
    if auto_wrap_policy is None:
        auto_wrap_policy = functools.partial(_checked, check_fn)
    if callable(auto_wrap_policy):
        _refuse_wrapped(model, checkpoint_wrapper_fn)
        _Walk(checkpoint_wrapper_fn, auto_wrap_policy).cover(model, is_root=True)
    else:
        wanted = run_policy(auto_wrap_policy, model)
        if wanted is None:
            message = (
                f"auto_wrap_policy={auto_wrap_policy!r}: expected a function of (module, recurse, nonwrapped_numel) or "
                "a policy object of torch.distributed.fsdp.wrap"
            )
            raise ValueError(message)
        policy = functools.partial(_wanted, wanted)
        _Walk(checkpoint_wrapper_fn, policy, wanted).cover(model, is_root=True)


def _refuse_wrapped(model: nn.Module, wrap: Callable[..., Any]) -> None:
    for name, module in model.named_modules():
        if isinstance(wrap, type) and isinstance(module, wrap):
            message = f"{name or 'the model itself'} is already a {wrap.__name__}; pass a model without such wrappers"
            raise AssertionError(message)  # noqa: TRY004 (torch's type)


def _checked(check_fn: Callable[[nn.Module], bool], *, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    del nonwrapped_numel
    return recurse or check_fn(module)


def _wanted(wanted: dict[nn.Module, Any], *, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    del nonwrapped_numel
    return recurse or module in wanted


class _Walk:
    """Goes over a model from the inside out and wraps what a policy says."""

    def __init__(
        self,
        wrap: Callable[..., Any],
        policy: Callable[..., bool],
        options: dict[nn.Module, dict[str, Any]] | None = None,
    ) -> None:
        self._wrap, self._policy, self._options = wrap, policy, options or {}
        # What became of each module, and how many of its parameters' elements have a wrapper now.
        self._done: dict[nn.Module, tuple[nn.Module, int]] = {}

    def cover(self, module: nn.Module, *, is_root: bool = False) -> tuple[nn.Module, int]:
        """Wrap what is inside a module, then the module itself unless it is the root."""
        if module in self._done:
            return self._done[module]
        self._done[module] = (module, 0)  # for a model that contains itself
        total = sum(parameter.numel() for parameter in module.parameters())
        if not self._policy(module=module, recurse=True, nonwrapped_numel=total):
            return self._done[module]
        covered = self._cover_children(module)
        self._done[module] = (module, covered)
        if not is_root and self._policy(module=module, recurse=False, nonwrapped_numel=total - covered):
            wrapper = self._wrap(module, **self._options.get(module, {}))
            self._done[module] = (module if wrapper is None else wrapper, total)
        return self._done[module]

    def _cover_children(self, module: nn.Module) -> int:
        """Put what became of each child in its place; gives how many elements have a wrapper."""
        covered = {child: self.cover(child) for child in module.children()}
        for name, child in list(module._modules.items()):  # noqa: SLF001
            if child is not None and covered[child][0] is not child:
                setattr(module, name, covered[child][0])
        return sum(count for _, count in covered.values())
