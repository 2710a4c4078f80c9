"""What errors call a value that a user passed: short, on one line, and never the numbers of a tensor."""

from __future__ import annotations

import inspect
import sys
from types import BuiltinFunctionType, FunctionType
from typing import Any

_MOST_CHARACTERS = 80


def short_repr(value: Any) -> str:
    """A value as its user would write it, or what it is if that is long.

    >>> import torch
    >>> short_repr("layers.*"), short_repr(torch.ones(8, 16)), short_repr(torch.nn.Linear(1, 1)), short_repr(short_repr)
    ("'layers.*'", '<Tensor float32[8, 16]>', '<module Linear>', '<function short_repr>')
    >>> short_repr(list(range(100)))
    '[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,...0, 91, 92, 93, 94, 95, 96, 97, 98, 99]'
    """
    if isinstance(value, type):
        return f"<class {value.__name__}>"
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return f"<function {value.__name__}>"
    torch = sys.modules.get("torch")  # data modules use this too, and are read without torch
    if torch is not None and isinstance(value, torch.Tensor):
        return f"<{type(value).__name__} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}>"
    if torch is not None and isinstance(value, torch.nn.Module):
        return f"<module {type(value).__name__}>"
    if isinstance(value, list | tuple) and torch is not None and any(_is_torchs(one, torch) for one in value):
        inside = ", ".join(map(short_repr, value))
        return _cut(f"[{inside}]" if isinstance(value, list) else f"({inside})")
    text = repr(value)
    return _cut(" ".join(text.split()) if "\n" in text else text)


def describe_argument(value: Any) -> str:
    """The same, after the word for what it is: ``str 'full'``.

    >>> import torch
    >>> describe_argument("full"), describe_argument(torch.ones(2)), describe_argument(torch.nn.Linear)
    ("str 'full'", '<Tensor float32[2]>', 'the class Linear')
    >>> describe_argument(None), describe_argument(describe_argument)
    ('None', '<function describe_argument>')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = short_repr(value)
    if value is None or text.startswith("<") or inspect.ismodule(value):
        return text
    return f"{type(value).__name__} {text}"


def with_article(word: str) -> str:
    """A word, such as the name of a class, after "a" or "an", by how it begins.

    >>> with_article("int"), with_article("Linear"), with_article("LSTM"), with_article("UNet")
    ('an int', 'a Linear', 'an LSTM', 'a UNet')
    """
    vowels = "AEFHILMNORSX" if word[:2].isupper() else "aeioAEIO"  # of capitals, each is said by itself: "an LSTM"
    return f"{'an' if word.startswith(tuple(vowels)) else 'a'} {word}"


def _is_torchs(value: Any, torch: Any) -> bool:
    return isinstance(value, (torch.Tensor, torch.nn.Module))


def _cut(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    kept = (_MOST_CHARACTERS - 3) // 2
    return f"{text[:kept]}...{text[-kept:]}"
