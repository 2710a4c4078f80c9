"""Which levers a step can use: the linear layer before its loss, and modules that treat every token by itself."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from recollect._apply.blocks import find_blocks
from recollect._apply.levers import why_not
from recollect._apply.targets import by_name, describe_unmatched, find_targets
from recollect._core.argument_text import short_repr
from recollect._core.calls import Phase
from recollect._core.levers import CHUNKED_LOSS, CHUNKED_MLP, LEVERS, MICRO_BATCHES, PlannedLever
from recollect._core.patterns import compile_pattern, hint_nearest, quote_all
from recollect._core.profiles import Profile
from recollect._core.sharded import is_sharded
from recollect._core.spelling import choose_words, spell_lever
from recollect._inspect.surroundings import list_generators
from recollect._levers.chunked_forward import TOKENS, call_in_chunks
from recollect._recompute.rng import put_back

_log = logging.getLogger("recollect")

Asked = Mapping[str, Any]
"""Levers by name, each with what was said of it: the module, a pattern of modules, a number; None if nothing was."""

_CHUNKS = 8
_LEAST_SHARE = 0.02  # of the peak: a smaller head is not worth it
_TRIED_TOKENS, _TRIED_ROWS = 48, 2
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}
_CLOSE_OTHERWISE = 2e-2
_LEAST_PRODUCTS = 2


def read_levers(levers: Iterable[str] | Asked, *, owns_step: bool) -> Asked:
    """Levers by name, those that cost least first.

    Raises:
        ValueError: there is no such lever, or it cannot be used here.

    >>> read_levers({"chunked_mlp", "chunked_loss"}, owns_step=True)
    {'chunked_loss': None, 'chunked_mlp': None}
    """
    if not isinstance(levers, Iterable):
        message = f"levers={short_repr(levers)}: expected names, as in {{'chunked_loss', 'micro_batches'}}"
        raise TypeError(message)
    named = [levers] if isinstance(levers, str) else list(levers)
    for name in named:
        if name not in LEVERS:
            expected = f"expected one or more of {quote_all(LEVERS)}"
            message = f"levers: unknown lever {name!r}; {expected}{hint_nearest(name, LEVERS)}"
            raise ValueError(message)
    if MICRO_BATCHES in named and not owns_step:
        message = (
            f"{spell_lever(MICRO_BATCHES)} works only if recollect.fit runs forward and backward itself: "
            + choose_words(
                "pass the model's batch, and loss= if it needs one, instead of step=",
                "let the function return the model and its inputs, instead of running a step",
            )
        )
        raise ValueError(message)
    asked = {name: levers[name] if isinstance(levers, Mapping) else None for name in LEVERS if name in named}
    for name, said in asked.items():
        is_count = name == MICRO_BATCHES
        if said is None or (is_count and type(said) is int and said > 0) or (not is_count and isinstance(said, str)):
            continue
        wanted = "a whole number of at least 1" if is_count else "the name of a module, or a pattern over names"
        message = f"levers: {name!r} has the value {short_repr(said)}: expected {wanted}"
        raise ValueError(message)
    return asked


@dataclass(slots=True, kw_only=True)
class SeenInputs:
    """What modules of a model were called with: the shape and type of their only input. No tensor is held.

    Attributes:
        seen: by module; None for one that was called otherwise.
    """

    seen: dict[nn.Module, tuple[torch.Size, torch.dtype, torch.device] | None] = field(default_factory=dict)

    @contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Note their inputs meanwhile."""
        handles = [module.register_forward_pre_hook(self._note, with_kwargs=True) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].dim() >= -TOKENS
        self.seen[module] = (args[0].shape, args[0].dtype, args[0].device) if is_plain else None


def list_candidates(model: nn.Module, asked: Asked) -> list[nn.Module]:
    """The modules that may turn out to treat every token by itself: parts of blocks, or those that were named.

    Raises:
        ValueError: a pattern matches none.
    """
    if CHUNKED_MLP not in asked:
        return []
    pattern = asked[CHUNKED_MLP]
    if pattern is not None:
        targets = find_targets(model)
        matches = compile_pattern(pattern)
        found = [target.chain[-1] for target in targets if any(map(matches, target.names))]
        if not found:
            raise ValueError(describe_unmatched(pattern, model, targets))
        return found
    return [
        part
        for block in find_blocks(model)
        for part in block.modules()
        if part is not block and _count_products(part) >= _LEAST_PRODUCTS
    ]


def _count_products(module: nn.Module) -> int:
    return sum(parameter.dim() > 1 for parameter in module.parameters())


def plan_levers(model: nn.Module, seen: Profile, inputs: SeenInputs, asked: Asked) -> dict[str, PlannedLever]:
    """The levers that were asked for and can be used, by name; why others cannot goes to the log.

    Raises:
        ValueError: a module was named that a lever cannot be used on.
    """
    found: dict[str, PlannedLever] = {}
    if CHUNKED_LOSS in asked:
        path = asked[CHUNKED_LOSS]
        path = _find_head(model, seen) if path is None else _check_named(model, path)
        if path is not None:
            found[CHUNKED_LOSS] = PlannedLever(name=CHUNKED_LOSS, paths=(path,))
    if CHUNKED_MLP in asked:
        paths = _find_tokenwise(model, inputs, is_named=asked[CHUNKED_MLP] is not None)
        if paths:
            found[CHUNKED_MLP] = PlannedLever(name=CHUNKED_MLP, paths=tuple(paths), parts=_CHUNKS)
    return found


def _check_named(model: nn.Module, path: str) -> str:
    target = by_name(find_targets(model)).get(path)
    why = "there is no such module" if target is None else why_not(CHUNKED_LOSS, target.chain[-1])
    if why:
        message = f"{spell_lever(CHUNKED_LOSS)} cannot be used on '{path}': {why}"
        raise ValueError(message)
    return path


def _find_head(model: nn.Module, seen: Profile) -> str | None:
    """The path of the last linear layer that runs in forward, if its output is worth the trouble."""
    targets = by_name(find_targets(model))
    for call in reversed(seen.calls[: seen.forward_count]):
        target = targets.get(call.module)
        if call.phase is not Phase.FORWARD or target is None or not isinstance(target.chain[-1], nn.Linear):
            continue
        size = max((value.bytes for value in call.outputs), default=0)
        why = why_not(CHUNKED_LOSS, target.chain[-1])
        if size < _LEAST_SHARE * seen.peak_bytes:
            why = f"its output is {size / max(seen.peak_bytes, 1):.1%} of the peak"
        if why:
            _log.info("recollect.fit: lever %r is not used: '%s' runs last, and %s", CHUNKED_LOSS, call.module, why)
            return None
        return call.module
    _log.info("recollect.fit: lever %r is not used: no torch.nn.Linear runs in forward", CHUNKED_LOSS)
    return None


def _find_tokenwise(model: nn.Module, inputs: SeenInputs, *, is_named: bool) -> list[str]:
    """The paths of the outermost modules that give the same when they run on some tokens at a time.

    Raises:
        ValueError: one that was named does not.
    """
    paths: list[str] = []
    known: dict[tuple[object, ...], str] = {}
    for target in find_targets(model):
        module = target.chain[-1]
        if module not in inputs.seen or any(target.name.startswith(f"{path}.") for path in paths):
            continue
        key = (type(module), inputs.seen[module], tuple(parameter.shape for parameter in module.parameters()))
        if key not in known:
            known[key] = why_not(CHUNKED_MLP, module) or _compare(module, inputs.seen[module])
        if not known[key]:
            paths.append(target.name)
        elif is_named:
            message = f"{spell_lever(CHUNKED_MLP)} cannot be used on '{target.name}': {known[key]}"
            raise ValueError(message)
    if not paths:
        _log.info("recollect.fit: lever %r is not used: no part of a block handles each token on its own", CHUNKED_MLP)
    return paths


def _compare(module: nn.Module, given: tuple[torch.Size, torch.dtype, torch.device] | None) -> str:
    """Why a module's result would be another one in chunks; empty if it would not."""
    if given is None:
        return "it is called with more than one tensor"
    shape, dtype, device = given
    if any(map(is_sharded, module.parameters())):
        module = _make_twin(module)
    if not dtype.is_floating_point:
        return f"its input is {dtype}"
    rows = [min(size, _TRIED_ROWS) for size in shape[:TOKENS]]
    states = [(source, source.read()) for source in list_generators()]
    modes = [(part, part.training) for part in module.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    module.eval()  # what is dropped at random cannot be compared
    try:
        tokens = torch.randn(*rows, min(shape[TOKENS], _TRIED_TOKENS), shape[-1], dtype=dtype, device=device)
        with torch.no_grad():
            whole = module(tokens)
            if not isinstance(whole, Tensor) or whole.shape[:-1] != tokens.shape[:-1]:
                return "its result is not one tensor with as many tokens as its input"
            parts = call_in_chunks(module, (), tokens, chunks=3)
    except Exception as error:
        return f"it does not run on fewer tokens ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    finally:
        for part, training in modes:
            part.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        put_back(states)
    close = _CLOSE.get(whole.dtype, _CLOSE_OTHERWISE)
    scale = whole.abs().max().item() or 1.0
    off = (whole - parts).abs().max().item() / scale
    return "" if off <= close else f"its result differs by {off:.1g} when it runs on a few tokens at a time"


def _make_twin(module: nn.Module) -> nn.Module:
    """A copy with whole parameters of any values, which needs no other process to run."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
        whole = torch.randn(parameter.shape, dtype=parameter.dtype, device=parameter.device) * scale
        memo[id(parameter)] = nn.Parameter(whole)
    return copy.deepcopy(module, memo)
