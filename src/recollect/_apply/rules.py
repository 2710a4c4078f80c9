"""Rules: which modules of a model are meant, and what is to become of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from recollect._apply.options import OPTIONS, Choices, hint_at, parse_mapping
from recollect._core.argument_text import describe_argument, short_repr
from recollect._core.decisions import Decision
from recollect._core.patterns import compile_pattern
from recollect._core.signatures import read_signature
from recollect._offload.offload import Offload, make_offload
from recollect._policy.base import Policy, PolicyLike, as_policy, name_function, takes
from recollect._policy.presets import selective

Key = str | type[nn.Module] | tuple[type[nn.Module], ...] | nn.Module | Callable[..., bool]
"""Which modules: a pattern over names, a class or several, a module itself, or a function of it, or of name and it."""

Value = str | PolicyLike | Mapping[str, Any] | Offload
"""What becomes of them: a decision, a policy, ``"full"`` or ``"selective"``, options of `recollect.checkpoint`, or a
`recollect.offload`."""

PRESETS = ("full", "selective", "every:N")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRule:
    """One line of the rules that a model is given."""

    matches: Callable[[str, nn.Module], bool]
    choices: Choices | None
    """How to make the region; None to keep the module's results as they are."""
    text: str
    """The rule's key in words, as its user wrote it."""
    what: str
    """What it does, in words."""
    pattern: str | None = None
    """The pattern, if it is one."""
    away: Offload | None = None
    """Where what the module saves for backward is sent; None to send nothing."""

    @property
    def sends(self) -> bool:
        """Whether something of the module goes elsewhere."""
        return self.away is not None or (self.choices is not None and self.choices.elsewhere is not None)

    @property
    def acts(self) -> bool:
        """Whether calls of the module are other than plain."""
        return self.choices is not None or self.away is not None


def parse_rules(rules: Mapping[Any, Value]) -> list[RegionRule]:
    """Check rules and give them in their order.

    Raises:
        ValueError: there is none, or one has a value it cannot have.
        TypeError: a key or value has a type that it cannot have.
    """
    if not rules:
        message = "the rules are empty; leave them out to recompute the model's repeated blocks"
        raise ValueError(message)
    if all(key in OPTIONS for key in rules):
        message = (
            f"{dict(rules)!r} holds options of a region and names no modules; give the options to "
            f"modules, as in {{'layers.*': {dict(rules)!r}}}"
        )
        raise ValueError(message)
    shared = functools.cache(make_offload)  # one for all modules, which are parts of one step
    return [_parse_rule(key, value, shared) for key, value in rules.items()]


def read_away(value: Any, shared: Callable[[], Offload] = make_offload) -> Offload | None:
    """Where values are to be sent, if a rule's value says that."""
    if value is Decision.OFFLOAD:
        return shared()
    return value if isinstance(value, Offload) else None


def describe_away(away: Offload) -> str:
    """What it does, in words."""
    return f"offload to {away.tier}"


def _parse_rule(key: Key, value: Value, shared: Callable[[], Offload]) -> RegionRule:
    text = _describe_key(key)
    pattern = key if isinstance(key, str) else None
    away = read_away(value, shared)
    if away is not None:
        what = describe_away(away)
        return RegionRule(matches=_parse_key(key), choices=None, text=text, what=what, pattern=pattern, away=away)
    try:
        plain: Any = value
        choices, what = parse_value(plain)
    except (ValueError, TypeError) as error:
        message = f"rule {text}: {error}"
        raise type(error)(message) from None
    return RegionRule(matches=_parse_key(key), choices=choices, text=text, what=what, pattern=pattern)


def parse_value(value: str | PolicyLike | Mapping[str, Any]) -> tuple[Choices | None, str]:
    """How to make regions, or None to keep modules as they are; and what that is in words.

    Raises:
        ValueError: it has a value it cannot have.
        TypeError: it has a type that it cannot have.
    """
    if isinstance(value, str):
        if value == "full":
            value = Decision.RECOMPUTE
        elif value == "selective":
            value = selective()
        else:
            message = f"expected 'full' or 'selective', not {short_repr(value)}{hint_at(value)}"
            raise ValueError(message)
    if value is Decision.SAVE:
        return None, "save"
    if value is Decision.RECOMPUTE:
        return Choices(), "recompute"
    if isinstance(value, Mapping):
        choices = parse_mapping(value)
        words = ", ".join(f"{name}={option!r}" for name, option in value.items() if name != "policy")
        return choices, f"{_describe(choices.policy)} ({words})" if words else _describe(choices.policy)
    policy = as_policy(value)
    return Choices(policy=policy), _describe(policy)


def _describe(policy: Policy | None) -> str:
    return "recompute" if policy is None else f"recompute under {policy}"


def _describe_key(key: object) -> str:
    if isinstance(key, str):
        return repr(key)
    if isinstance(key, type):
        return key.__name__
    if isinstance(key, nn.Module):
        return f"<module {type(key).__name__}>"
    if isinstance(key, tuple):
        return f"({', '.join(map(_describe_key, key))})"
    return name_function(key) if callable(key) else repr(key)


def _parse_key(key: Key) -> Callable[[str, nn.Module], bool]:
    """The test of a module's name and the module."""
    if isinstance(key, str):
        matches = compile_pattern(key)
        return lambda name, module: bool(name) and matches(name)
    if _is_classes(key if isinstance(key, tuple) else (key,)):
        kinds: Any = key
        return lambda name, module: isinstance(module, kinds)
    if isinstance(key, nn.Module):
        return lambda name, module: module is key
    if isinstance(key, type | tuple) or not callable(key):
        message = (
            f"rule {_describe_key(key)}: expected a pattern over module names, a subclass of torch.nn.Module (or a "
            f"tuple of them), or a function of the module; not {describe_argument(key)}"
        )
        raise TypeError(message)
    ask: Any = key
    wants_name = _takes_name(key)
    if not takes(ask, 2 if wants_name else 1):
        message = f"rule {_describe_key(key)}: expected a function of a module, or of its name and the module"
        raise TypeError(message)
    if wants_name:
        return lambda name, module: bool(ask(name, module))
    return lambda name, module: bool(ask(module))


def _is_classes(keys: Iterable[object]) -> bool:
    found = list(keys)
    return bool(found) and all(isinstance(key, type) and issubclass(key, nn.Module) for key in found)


def _takes_name(ask: Callable[..., Any]) -> bool:
    """Whether a function wants two arguments, so that the module's name is meant to come first."""
    try:
        parameters = read_signature(ask).parameters.values()
    except (ValueError, TypeError):  # a builtin without one
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [one for one in parameters if one.kind in positional]
    return sum(one.default is one.empty for one in given) > 1 or (len(given) > 1 and given[0].name == "name")


def parse_preset(text: str) -> tuple[Value, int | None]:
    """What one of the ready-made words means: what to do, and N if only every N-th block is meant.

    Raises:
        ValueError: there is no such word.

    >>> parse_preset("every:3")
    ('full', 3)
    >>> parse_preset("layers.*")
    Traceback (most recent call last):
    ...
    ValueError: 'layers.*' is not one of the ready-made rules 'full', 'selective', 'every:N'.
    To name modules, write {'layers.*': recollect.Decision.RECOMPUTE}
    """
    if text in ("full", "selective"):
        return text, None
    word, colon, number = text.partition(":")
    if word == "every" and colon:
        if number.isascii() and number.isdigit() and int(number) > 0:
            return "full", int(number)
        message = f"{text!r}: expected a whole number of at least 1 after 'every:', as in 'every:2'"
        raise ValueError(message)
    message = f"{short_repr(text)} is not one of the ready-made rules {', '.join(map(repr, PRESETS))}"
    hint = hint_at(text) or f".\nTo name modules, write {{{text!r}: recollect.Decision.RECOMPUTE}}"
    raise ValueError(message + hint)
