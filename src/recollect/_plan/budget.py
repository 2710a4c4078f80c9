"""What a user means by a budget: bytes, a share of the device, as little as possible, or as quick as possible."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from numbers import Real

from recollect._core.patterns import hint_nearest
from recollect._core.spelling import choose_words
from recollect._core.units import format_bytes, hint_unit, parse_bytes

SMALLEST, FASTEST = "min", "fastest"
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_NUMBER = re.compile(r"\s*(-?)([0-9]+(?:[.,][0-9]+)?(?:e[0-9]+)?)\s*([^0-9.,]*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A budget as it was asked for.

    Attributes:
        text: as it was written.
        bytes: how many; None for ``"min"`` and ``"fastest"``.
    """

    text: str
    bytes: int | None = None


def parse_budget(budget: int | str, *, device_bytes: int | None = None) -> Budget:
    """Read a budget.

    Args:
        budget: bytes as a whole number; text with a unit; a share of the device, ``"80%"``; ``"min"``, ``"fastest"``.
        device_bytes: what the device has; None if nobody knows.

    Raises:
        ValueError: it has another form, or it is a share and nobody knows of how much.
        TypeError: it is neither a number nor text.

    >>> parse_budget("40GiB").bytes == parse_budget(40 * 2**30).bytes
    True
    >>> parse_budget("50%", device_bytes=80 * 2**30)
    Budget(text='50% (40.00 GiB)', bytes=42949672960)
    >>> parse_budget("min")
    Budget(text='min', bytes=None)
    >>> parse_budget("plenty")
    Traceback (most recent call last):
    ...
    ValueError: budget 'plenty': expected bytes as a whole number, text like '40GiB', a share of the device like '80%',
    'min' or 'fastest'
    """
    expected = (
        "expected bytes as a whole number, text like '40GiB', a share of the device like '80%', 'min' or 'fastest'"
    )
    if isinstance(budget, str):
        word = budget.strip().lower()
        if word in (SMALLEST, FASTEST):
            return Budget(text=word)
        share = _SHARE.fullmatch(budget)
        if share is not None:
            return _take_share(budget, Fraction(share[1]) / 100, device_bytes)
    try:
        count = parse_bytes(budget)
    except ValueError:
        hint = hint_unit(str(budget)) or hint_nearest(budget, (SMALLEST, FASTEST)) or _hint_number(str(budget))
        message = f"budget {budget!r}: {expected}{hint}"
        raise ValueError(message) from None
    except TypeError:
        message = f"budget {budget!r}: {expected}{_hint_float(budget)}"
        raise TypeError(message) from None
    if not count:
        message = f"budget {budget!r}: a step needs more than nothing; write 'min' for the smallest possible peak"
        raise ValueError(message)
    return Budget(text=budget.strip() if isinstance(budget, str) else format_bytes(count), bytes=count)


def _take_share(budget: str, share: Fraction, device_bytes: int | None) -> Budget:
    if not share:
        message = f"budget {budget!r}: a step needs more than nothing; write 'min' for the smallest possible peak"
        raise ValueError(message)
    if share > 1:
        message = f"budget {budget!r}: expected at most 100% of the device's memory"
        raise ValueError(message)
    if not device_bytes:
        message = (
            f"budget {budget!r}: a share needs to know how much memory the device has, and the profile does not say "
            "(on the CPU, it never does). Give bytes, as in '40GiB', or profile for a GPU: "
            + choose_words(
                "recollect.profile(model, ..., dry=True, device='H100')", "recollect plan --dry --device H100"
            )
        )
        raise ValueError(message)
    count = int(share * device_bytes)
    return Budget(text=f"{budget.strip()} ({format_bytes(count)})", bytes=count)


def _hint_number(text: str) -> str:
    """What to end an error with that refuses a number in text: it is negative, nothing, or has no unit.

    >>> _hint_number("40"), _hint_number("-1GiB"), _hint_number("0"), _hint_number("plenty")
    ("; to say GiB, write '40GiB'", '; it cannot be negative', "; write 'min' for the smallest possible peak", '')
    """
    found = _NUMBER.fullmatch(text)
    if found is None:
        return ""
    sign, number, unit = found.groups()
    if not float(number.replace(",", ".")):
        return "; write 'min' for the smallest possible peak"
    if sign:
        return "; it cannot be negative"
    return "" if unit or "," in number else f"; to say GiB, write '{number}GiB'"


def _hint_float(budget: object) -> str:
    """What to end an error with that refuses a number that is not whole by its type.

    >>> _hint_float(0.9), _hint_float(40e9), _hint_float(1.5), _hint_float(None)
    ("; for a share, write '90%'", '; write 40000000000', '', '')
    """
    if isinstance(budget, bool) or not isinstance(budget, (Real, Decimal)):
        return ""
    number = float(budget)
    if 0 < number <= 1:
        return f"; for a share, write '{100 * number:g}%'"
    return f"; write {number:.0f}" if number > 1 and number.is_integer() else ""
