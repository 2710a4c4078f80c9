"""How numbers are written for people, and read from them."""

from __future__ import annotations

import re
from fractions import Fraction
from numbers import Integral

from recollect._core.patterns import did_you_mean, nearest

_PREFIXES = ("B", "KiB", "MiB", "GiB", "TiB")

_UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGTP", 1)},
}
_BY_LOWER_CASE = {unit.lower(): size for unit, size in _UNITS.items()}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*", re.IGNORECASE | re.ASCII)


def format_bytes(count: int) -> str:
    """Write a number of bytes with a binary prefix.

    >>> format_bytes(512), format_bytes(3 * 2**30), format_bytes(1536)
    ('512 B', '3.00 GiB', '1.50 KiB')
    """
    if abs(count) < 1024:  # noqa: PLR2004
        return f"{count} B"
    value = float(count)
    for prefix in _PREFIXES:
        if abs(value) < 1024 or prefix == _PREFIXES[-1]:  # noqa: PLR2004
            return f"{value:.2f} {prefix}"
        value /= 1024
    raise AssertionError


def parse_bytes(size: int | str, option: str = "") -> int:
    """Read a number of bytes: a whole number, or text with a decimal (KB, MB, ...) or binary (KiB, MiB, ...) unit.

    Case does not matter. Text that does not come to whole bytes is rounded.

    Args:
        size: the number or text.
        option: what its user passed it as, for errors.

    Raises:
        ValueError: the text has no such form, or the number is negative.
        TypeError: it is neither a whole number nor text.

    >>> parse_bytes(512), parse_bytes("1MiB"), parse_bytes("2.5 GB"), parse_bytes("512kb")
    (512, 1048576, 2500000000, 512000)
    >>> parse_bytes("1 mile")
    Traceback (most recent call last):
    ...
    ValueError: size '1 mile': expected bytes as a whole number, or as text like '512 KB' or '1.5 GiB'
    """
    given = f"{option}={size!r}" if option else f"size {size!r}"
    expected = "expected bytes as a whole number, or as text like '512 KB' or '1.5 GiB'"
    if isinstance(size, str):
        found = _SIZE.fullmatch(size)
        unit = _BY_LOWER_CASE.get(found[2].lower()) if found else None
        if found is None or unit is None:
            message = f"{given}: {expected}{hint_unit(size)}"
            raise ValueError(message)
        rounded: int = round(Fraction(found[1]) * unit)
        return rounded
    if isinstance(size, bool) or not isinstance(size, Integral):  # numpy's whole numbers are Integral, too
        message = f"{given}: {expected}"
        raise TypeError(message)
    if size < 0:
        message = f"{given}: a number of bytes cannot be negative"
        raise ValueError(message)
    return int(size)


def hint_unit(text: str) -> str:
    """What to end an error with that refuses a size whose unit does not exist.

    >>> hint_unit("40 Gi"), hint_unit("40 XiB"), hint_unit("forty GiB")
    ("; did you mean '40GiB'?", '', '')
    """
    found = _SIZE.fullmatch(text)
    near = nearest(found[2], _UNITS) if found else []
    if found is None or not 1 <= len(near) <= 2:  # noqa: PLR2004 (any of many: no hint)
        return ""
    return f"; {did_you_mean(f'{found[1]}{unit}' for unit in near)}"


def exact_bytes(count: int) -> int | str:
    """Write a number of bytes in the largest unit that loses nothing, so that `parse_bytes` reads it back.

    >>> exact_bytes(100), exact_bytes(3 * 2**29), exact_bytes(2_500_000_000)
    (100, '1536MiB', '2500MB')
    """
    for unit, size in sorted(_UNITS.items(), key=lambda item: -item[1]):
        if count and size > 1 and count % size == 0:
            return f"{count // size}{unit}"
    return count


def count_noun(count: int, noun: str) -> str:
    """Write a count with its noun.

    >>> count_noun(1, "tensor"), count_noun(2, "tensor")
    ('1 tensor', '2 tensors')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def list_some(words: list[str], most: int = 8) -> str:
    """Words in a row, and how many are left out.

    >>> list_some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more} more" if more > 0 else "")
