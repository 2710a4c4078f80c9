"""What a user means by the tiers of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from recollect._core.argument_text import short_repr
from recollect._core.patterns import hint_nearest
from recollect._core.spelling import choose_words

DISK = "disk"
TIERS = ("host", DISK, f"host, {DISK}")


def read_tiers(tiers: str | Sequence[str]) -> str:
    """Where values may be sent, as plans write it.

    Raises:
        ValueError: there is no such tier.

    >>> read_tiers(("host", "disk"))
    'host, disk'
    """
    tier = ", ".join(map(str, tiers)) if isinstance(tiers, (tuple, list)) else tiers
    if not isinstance(tier, str) or tier not in TIERS:
        named = tiers if isinstance(tiers, (tuple, list)) else (tiers,)
        expected = choose_words(
            "'host', 'disk', ('host', 'disk'), or None to offload nothing", "host, disk, or host,disk"
        )
        strange = next((one for one in named if one not in TIERS), None)
        meant = choose_words("'host'", "host")
        hint = f"; did you mean {meant}?" if strange == "cpu" else hint_nearest(strange, ("host", DISK))
        message = f"{choose_words(f'tiers={short_repr(tiers)}', spell_tiers(tiers))}: expected {expected}{hint}"
        raise ValueError(message)
    return tier


def spell_tiers(tiers: str | Sequence[str]) -> str:
    """Tiers as they are typed on the command line.

    >>> spell_tiers(("host", "disk")), spell_tiers("host")
    ('--tiers host,disk', '--tiers host')
    """
    return f"--tiers {','.join(map(str, tiers)) if isinstance(tiers, (tuple, list)) else tiers}"


def parse_typed(text: str) -> str | tuple[str, ...]:
    """The tiers that were typed on the command line.

    >>> parse_typed("disk"), parse_typed("host, disk")
    ('disk', ('host', 'disk'))
    """
    words = tuple(word.strip() for word in text.split(","))
    return words if len(words) > 1 else words[0]
