"""Rules that go by where in the user's code a value is made: under a name, or in a module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from recollect._core.argument_text import describe_argument
from recollect._core.decisions import Decision, Site
from recollect._core.patterns import compile_pattern, did_you_mean, nearest_paths, plain_path, quote_all
from recollect._policy.base import Policy, Verdict


class PlacePolicy(Policy):
    """A policy over what has a name of its own, so that single operators need not be looked at."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The one rule."""
        return (repr(self),)


@dataclass(frozen=True, slots=True, repr=False)
class SaveNames(PlacePolicy):
    """Saves named blocks and values."""

    patterns: tuple[str, ...]

    @property
    def sees_names(self) -> bool:
        """Names are all it goes by."""
        return True

    def keeps_name(self, name: str) -> str | None:
        """By the name."""
        return repr(self) if any(compile_pattern(pattern)(name) for pattern in self.patterns) else None

    def judge(self, site: Site) -> Verdict | None:
        """By the names of the blocks around the site."""
        return Verdict(Decision.SAVE, by=repr(self)) if any(map(self.keeps_name, site.scopes)) else None

    def __repr__(self) -> str:
        return f"save_names({quote_all(self.patterns)})"


@dataclass(frozen=True, slots=True, repr=False)
class SaveModules(PlacePolicy):
    """Saves the results of modules, by path or class."""

    patterns: tuple[str | type[nn.Module], ...]

    def keeps_module(self, path: str, module: Any) -> str | None:
        """By the path or the class."""
        return repr(self) if any(_matches(pattern, path, module) for pattern in self.patterns) else None

    def judge(self, site: Site) -> Verdict | None:
        """By the paths of the modules around the site; a site does not know their classes."""
        if any(self.keeps_module(path, None) for path in _with_parents(site.module)):
            return Verdict(Decision.SAVE, by=repr(self))
        return None

    def check_modules(self, paths: dict[str, Any]) -> None:
        """Refuse what matches none of these modules.

        Raises:
            ValueError: a pattern or class matches none.
        """
        for pattern in self.patterns:
            if not any(_matches(pattern, path, module) for path, module in paths.items()):
                raise ValueError(_describe_unmatched(pattern, paths))

    def __repr__(self) -> str:
        shown = (repr(pattern) if isinstance(pattern, str) else pattern.__name__ for pattern in self.patterns)
        return f"save_modules({', '.join(shown)})"


def _matches(pattern: str | type[nn.Module], path: str, module: Any) -> bool:
    if not isinstance(pattern, str):
        return isinstance(module, pattern)
    matches = compile_pattern(pattern)
    return matches(path) or matches(plain_path(path))


def _with_parents(path: str) -> Iterator[str]:
    """The path and those of the modules that it lies in, outermost first."""
    yield ""
    for end, character in enumerate(path):
        if character == ".":
            yield path[:end]
    if path:
        yield path


def _describe_unmatched(pattern: str | type[nn.Module], paths: dict[str, Any]) -> str:
    if isinstance(pattern, str):
        message = f"pattern {pattern!r} matches no module of the region"
        near = nearest_paths(pattern, paths)
        return f"{message}; {did_you_mean(near)}" if near else f"{message}, which has no modules inside"
    message = f"class {pattern.__name__} matches no module of the region"
    classes = sorted({type(module).__name__ for module in paths.values()})
    return f"{message}; its classes are {', '.join(classes)}" if classes else f"{message}, which has none"


def save_names(*names: str) -> Policy:
    """Save what you have named: blocks by `recollect.region`, single values by `recollect.name`.

    Args:
        names: names, or patterns over them as in `save_modules`.

    Raises:
        ValueError: none is given, or one is empty or not a regular expression.
        TypeError: one is not a string.

    >>> from recollect import policies
    >>> policies.save_names("attn", "expert_*")
    save_names('attn', 'expert_*')
    """
    if not names:
        message = "save_names() needs a name; to save nothing, use save_nothing"
        raise ValueError(message)
    for name in names:
        compile_pattern(name)
    return SaveNames(tuple(dict.fromkeys(names)))


def save_modules(*patterns: str | type[nn.Module]) -> Policy:
    """Save the results of modules, so that their calls are not run again.

    Args:
        patterns: paths as seen from the region's own module, in which ``*`` stands for anything within one dotted part
            and ``**`` for any number of parts; ``re:`` and a regular expression for the whole path; or subclasses of
            `torch.nn.Module`.

    Raises:
        ValueError: none is given, one is empty or not a regular expression; or, once the region's modules are known,
            one matches none of them.
        TypeError: one is neither text nor a class of modules.

    >>> import torch
    >>> from recollect import policies
    >>> policies.save_modules("layers.*.attn", torch.nn.LayerNorm)
    save_modules('layers.*.attn', LayerNorm)
    """
    if not patterns:
        message = "save_modules() needs a pattern; to save nothing, use save_nothing"
        raise ValueError(message)
    for pattern in patterns:
        if isinstance(pattern, str):
            compile_pattern(pattern)
        elif not (isinstance(pattern, type) and issubclass(pattern, nn.Module)):
            message = "save_modules expects patterns over module paths, or subclasses of torch.nn.Module; not "
            message += describe_argument(pattern)
            if isinstance(pattern, nn.Module):
                message += f": pass its path, or its class {type(pattern).__name__}"
            raise TypeError(message)
    return SaveModules(tuple(dict.fromkeys(patterns)))
