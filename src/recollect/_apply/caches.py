"""Key/value caches, which Transformers models fill by default: regions turn them off in training.

A cache is for generation. In training nobody reads it, and it holds all the keys and values that regions are meant to
forget; when a region runs again, it would add them a second time. Transformers is looked up among the loaded modules
and never imported: whoever has one of its models has loaded it.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from recollect._apply.instance_forward import InstanceForward
from recollect._core.signatures import read_signature
from recollect._core.torch_private.compiler import passed_by, passed_over

_log = logging.getLogger("recollect")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_USE_CACHE, _LABELS = "use_cache", "labels"
# What each kind of a cache's layers says of whether it holds something.
_FILLED = ("is_initialized", "is_conv_states_initialized", "is_recurrent_states_initialized")


def cache_classes() -> tuple[type, ...]:
    """The classes of Transformers' caches; none where it is not loaded."""
    library = sys.modules.get("transformers.cache_utils")
    return () if library is None else (library.Cache,)


def without_cache(
    module: nn.Module | None, kinds: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    """The arguments of a layer, without a cache that it would fill; as they are where it does not train.

    A cache that already holds something for this layer, such as a learned prefix, changes the result and stays.

    Args:
        module: the layer.
        kinds: from `cache_classes`.
        args: what it is called with.
        kwargs: what it is called with.
    """
    if module is None or not (kinds and module.training and torch.is_grad_enabled()):
        return args, kwargs
    caches = [value for value in (*args, *kwargs.values()) if isinstance(value, kinds)]
    if not caches or any(_holds(cache, module) for cache in caches):
        return args, kwargs
    if not is_dynamo_compiling():
        _say_once()
    return _leave_out(kinds, args, kwargs)


def _leave_out(kinds: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    args = tuple(None if isinstance(value, kinds) else value for value in args)
    kwargs = {name: None if isinstance(value, kinds) else value for name, value in kwargs.items()}
    if kwargs.get(_USE_CACHE):
        kwargs[_USE_CACHE] = False
    return args, kwargs


@functools.cache  # once per process, as layers do not know of each other
def _say_once() -> None:
    _log.info(
        "a key/value cache was passed to layers in training mode: regions leave it empty, as "
        "gradient checkpointing in Transformers does"
    )


def _holds(cache: Any, module: nn.Module | None = None) -> bool:
    """Whether a cache holds anything; with a module, anything for its layer."""
    if not _is_any_filled(cache):
        return False
    if module is None:
        return True
    found: Any = (getattr(part, "layer_idx", None) for part in module.modules())
    index = next((one for one in found if isinstance(one, int)), None)
    return index is None or _is_any_filled(cache, index)


def _is_any_filled(cache: Any, index: int | None = None) -> bool:
    if hasattr(cache, "self_attention_cache"):  # an encoder's and a decoder's
        return _is_any_filled(cache.self_attention_cache, index) or _is_any_filled(cache.cross_attention_cache, index)
    layers = cache.layers if index is None else cache.layers[index : index + 1]
    return any(map(_is_filled, layers))


def _is_filled(layer: Any) -> bool:
    marks = [getattr(layer, name) for name in _FILLED if hasattr(layer, name)]
    if not marks:
        return True  # a kind that we do not know
    return any(any(mark.values()) if isinstance(mark, dict) else mark for mark in marks)


class CacheSwitch(InstanceForward):
    """Calls a model's own ``forward``, with ``use_cache=False`` where it trains or computes a loss.

    `generate` runs without grad, so its cache stays, in train mode too. A cache that is passed and holds something
    changes the result; then nothing is switched.
    """

    def __init__(self, module: nn.Module, name: str, *, is_quiet: bool = False) -> None:
        super().__init__(module, name)
        names = list(read_signature(module.forward).parameters)
        self._place = names.index(_USE_CACHE)
        self._labels_place = names.index(_LABELS) if _LABELS in names else None
        self._caches = cache_classes()
        self._is_said = is_quiet

    def _for_copy(self, copied: nn.Module) -> Self:
        return type(self)(copied, self.name)

    @passed_by
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own ``forward``."""
        module: Any = self._module()
        if not self.is_removed and torch.is_grad_enabled() and (module.training or self._has_labels(args, kwargs)):
            args, kwargs = self._switch_off(args, kwargs)
        return self._own_in_graph(module)(*args, **kwargs)

    @passed_over
    def _has_labels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        place = self._labels_place
        return kwargs.get(_LABELS) is not None or (place is not None and len(args) > place and args[place] is not None)

    @passed_over
    def _switch_off(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        caches = [value for value in (*args, *kwargs.values()) if isinstance(value, self._caches)]
        if any(_holds(cache) for cache in caches):
            return args, kwargs
        place = self._place
        asked = args[place] if len(args) > place else kwargs.get(_USE_CACHE)
        if (asked or caches) and not self._is_said and not is_dynamo_compiling():
            self._is_said = True
            _log.warning("%s was asked for a key/value cache, but does not fill one in training", self.name)
        args, kwargs = _leave_out(self._caches, args, kwargs)
        if len(args) > place:
            return (*args[:place], False, *args[place + 1 :]), kwargs
        return args, {**kwargs, _USE_CACHE: False}

    def __repr__(self) -> str:
        return f"<forward of '{self.name}', without a key/value cache in training>"


def switches_for(model: nn.Module, regions: Iterable[nn.Module], *, is_quiet: bool = False) -> Iterator[CacheSwitch]:
    """One for each model of Transformers that has a switch for its cache and regions inside; none is put yet."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    inside = set(regions)
    for module in model.modules():
        if (
            isinstance(module, library.PreTrainedModel)
            and _can_cache(module)
            and not inside.isdisjoint(module.modules())
        ):
            yield CacheSwitch(module, type(module).__name__, is_quiet=is_quiet)


@contextmanager
def caches_left_out(models: Iterable[nn.Module]) -> Iterator[int]:
    """Let models of Transformers inside fill no cache while they train, as under regions; gives how many they are."""
    switches = [switch for model in models for switch in switches_for(model, model.modules(), is_quiet=True)]
    try:
        for switch in switches:
            switch.put()
        yield len(switches)
    finally:
        for switch in reversed(switches):
            switch.take_away()


def describe_twice(model: nn.Module, regions: Iterable[nn.Module]) -> str | None:
    """What to say where the own switch of Transformers or diffusers is on for regions, too; None where it is not.

    The switch is a flag on the layer that is recomputed, or on a module around it.
    """
    flagged = [part for part in model.modules() if getattr(part, "gradient_checkpointing", False) is True]
    inside = {part for one in flagged for part in one.modules()}
    count = len(inside.intersection(regions))
    if not count:
        return None
    return (
        f"{type(model).__name__}'s own gradient checkpointing is also on for {count} of the regions, so they are "
        "recomputed twice. Turn it off: model.gradient_checkpointing_disable() for Transformers (or use "
        "recollect.integrations.transformers.enable(model)), model.disable_gradient_checkpointing() for diffusers"
    )


def _can_cache(module: nn.Module) -> bool:
    return _USE_CACHE in read_signature(module.forward).parameters
