"""Patterns over dotted paths (modules, regions, names), and what to suggest where one matches nothing."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable

from recollect._core.argument_text import describe_argument

_REGEX = "re:"
_SHOWN = 5
_ALIKE = 0.6
_SHORT = 3  # letters
_AS_ALIKE = 0.15  # as the most similar one


def compile_pattern(text: str) -> Callable[[str], bool]:
    r"""Make the test that a path passes if all of it matches.

    A glob, in which ``*`` and ``?`` stay within one dotted part, ``[abc]`` and ``[!abc]`` stand for one character, and
    ``**`` crosses parts: in place of a part it stands for any number of them, at the end for at least one. Or ``re:``
    and a regular expression.

    Raises:
        ValueError: the text is empty or not a regular expression.
        TypeError: it is not a string.

    >>> in_layer = compile_pattern("layers.*")
    >>> in_layer("layers.0"), in_layer("layers.0.attn"), in_layer("layers")
    (True, False, False)
    >>> attention = compile_pattern("**.attn")
    >>> attention("attn"), attention("layers.0.attn"), attention("layers.0.attn.q")
    (True, True, False)
    >>> early = compile_pattern(r"re:layers\.[0-7]")
    >>> early("layers.7"), early("layers.70")
    (True, False)
    """
    if not isinstance(text, str):
        message = f"expected a pattern as a string, not {describe_argument(text)}"
        raise TypeError(message)
    if not text.removeprefix(_REGEX):
        message = f"pattern {text!r} is empty; '**' matches every path"
        raise ValueError(message)
    try:
        regex = _read(text)
    except re.error as error:
        message = (
            f"pattern {text!r} is not a valid {'regular expression' if text.startswith(_REGEX) else 'pattern'}: {error}"
        )
        raise ValueError(message) from None
    return lambda path: regex.fullmatch(path) is not None


@functools.lru_cache(maxsize=2**10)  # policies ask of each module anew, with the same few patterns
def _read(text: str) -> re.Pattern[str]:
    return re.compile(text.removeprefix(_REGEX) if text.startswith(_REGEX) else _translate(text))


def _translate(glob: str) -> str:
    """The regular expression of a glob."""
    *inner, last = glob.split(".")
    pieces = [r"(?:[^.]+\.)*" if part == "**" else _translate_part(part) + r"\." for part in inner]
    return "".join([*pieces, ".+" if last == "**" else _translate_part(last)])


def _translate_part(part: str) -> str:
    """The regular expression of a glob's part; a lone ``*`` matches no empty part."""
    if part == "*":
        return "[^.]+"
    pieces = []
    for piece in re.findall(r"\*\*|\*|\?|\[!?[^\]]+\]|.", part, re.DOTALL):
        if piece == "**":
            pieces.append(".*")
        elif piece == "*":
            pieces.append("[^.]*")
        elif piece == "?":
            pieces.append("[^.]")
        elif len(piece) > 1:
            inside = piece[1:-1].replace("\\", r"\\").replace("[", r"\[").replace("^", r"\^")
            pieces.append(f"[^.{inside[1:]}]" if inside.startswith("!") else f"[{inside}]")
        else:
            pieces.append(re.escape(piece))
    return "".join(pieces)


_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def plain_path(path: str) -> str:
    """A module's path as it is without the wrappers of torch.compile, FSDP and checkpoint_wrapper.

    >>> plain_path("_orig_mod.layers.0._fsdp_wrapped_module.attn")
    'layers.0.attn'
    """
    return ".".join(part for part in path.split(".") if part not in _WRAPPED) if "_" in path else path


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The known names most similar to this one, the most similar first. Case does not matter.

    >>> nearest("layer.0", ["embed", "layers.0", "layers.1", "head"])
    ['layers.0', 'layers.1']
    """
    name = name.removeprefix(_REGEX).lower()
    scores = {other: difflib.SequenceMatcher(None, other.lower(), name).ratio() for other in known}
    least = max(_ALIKE, max(scores.values(), default=0.0) - _AS_ALIKE)
    near = [other for other, score in scores.items() if score >= least]
    return sorted(near, key=lambda other: -scores[other])[:_SHOWN]


def nearest_paths(pattern: str, known: Iterable[str]) -> list[str]:
    """The known paths to suggest for a pattern that matches none.

    Those that read like it, then those whose last part does, then those of its depth.

    >>> nearest_paths("blocks.*", ["embed", "head", "layers", "layers.0", "layers.1"])
    ['layers.0', 'layers.1']
    >>> nearest_paths("**.attention", ["embed", "layers.0", "layers.0.attn"])[0]
    'layers.0.attn'
    """
    paths = list(dict.fromkeys(path for path in known if path))
    ends = nearest(_end(pattern), set(map(_end, paths)))
    same_end = [path for path in paths if _end(path) in ends]
    same_depth = [path for path in paths if path.count(".") == pattern.count(".")]
    return list(dict.fromkeys([*nearest(pattern, paths), *same_end, *same_depth]))[:_SHOWN] or paths[:_SHOWN]


def _end(path: str) -> str:
    return path.rpartition(".")[2]


def quote_all(names: Iterable[str]) -> str:
    """Names as they stand in errors.

    >>> quote_all(["layers.0", "head"])
    "'layers.0', 'head'"
    """
    return ", ".join(map(repr, names))


def did_you_mean(names: Iterable[str]) -> str:
    """The question that follows a name which does not exist.

    >>> did_you_mean(["layers.0", "layers.1", "head"])
    "did you mean 'layers.0', 'layers.1' or 'head'?"
    """
    *first, last = map(repr, names)
    return f"did you mean {', '.join(first)}{' or ' if first else ''}{last}?"


def hint_nearest(name: object, known: Iterable[str]) -> str:
    """What to end an error with that refuses a name: the question which of the known ones is meant, if one is similar.

    Short names must begin with the same letter: ``"inf"`` is two letters away from ``"min"``.

    >>> hint_nearest("chunk_loss", ["chunked_loss", "chunked_mlp"]), hint_nearest("gpu", ["cpu", "cuda"])
    ("; did you mean 'chunked_loss'?", '')
    """
    if not isinstance(name, str):
        return ""
    begin = name[:1].lower() if len(name) <= _SHORT else ""
    near = nearest(name, [one for one in known if one.lower().startswith(begin)])
    return f"; {did_you_mean(near)}" if near else ""
