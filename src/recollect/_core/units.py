"""How numbers are written for people."""

from __future__ import annotations

_PREFIXES = ("B", "KiB", "MiB", "GiB", "TiB")


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


def count_noun(count: int, noun: str) -> str:
    """Write a count with its noun.

    >>> count_noun(1, "tensor"), count_noun(2, "tensor")
    ('1 tensor', '2 tensors')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"
