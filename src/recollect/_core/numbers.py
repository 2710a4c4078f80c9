"""How times and counts of operations are written for people."""

from __future__ import annotations

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_COUNTS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_seconds(seconds: float | None) -> str:
    """Write a time with three digits; ``"-"`` for one that nobody knows.

    >>> format_seconds(0.01234), format_seconds(75e-6), format_seconds(75.0), format_seconds(0.0), format_seconds(None)
    ('12.3 ms', '75.0 µs', '75.0 s', '0', '-')
    """
    if seconds is None:
        return "-"
    if not seconds:
        return "0"
    size, unit = next(((size, unit) for size, unit in _TIMES if abs(seconds) >= size), _TIMES[-1])
    return f"{_three_digits(seconds / size)} {unit}"


def format_flops(flops: int) -> str:
    """Write a count of floating-point operations with three digits.

    >>> format_flops(67_108_864), format_flops(12)
    ('67.1 MFLOP', '12 FLOP')
    """
    for size, letter in _COUNTS:
        if abs(flops) >= size:
            return f"{_three_digits(flops / size)} {letter}FLOP"
    return f"{flops} FLOP"


def format_share(part: float, whole: float) -> str:
    """Write a part as percent of a whole.

    >>> format_share(1, 3), format_share(0.1, 300), format_share(0, 300), format_share(1, 0)
    ('33%', '<1%', '0%', '-')
    """
    if not whole:
        return "-"
    percent = 100 * part / whole
    return "<1%" if 0 < percent < 1 else f"{percent:.0f}%"


def format_change(share: float) -> str:
    """Write a change, a share of what was, as percent with its sign; what rounds to nothing has no minus.

    >>> format_change(0.0731), format_change(-0.2), format_change(-0.0001)
    ('+7.3%', '-20.0%', '+0.0%')
    """
    return f"{round(share, 3) + 0.0:+.1%}"


def format_rate(number: float) -> str:
    """Write how many a second with four digits, or all of those before the point.

    >>> format_rate(14_117.3), format_rate(1_559.04), format_rate(3.14159)
    ('14,117', '1,559', '3.142')
    """
    whole = len(f"{abs(number):.0f}")
    return f"{number:,.{max(0, 4 - whole)}f}"


def _three_digits(number: float) -> str:
    whole = len(f"{abs(number):.0f}")
    return f"{number:.{max(0, 3 - whole)}f}"
