"""Makes names from the user's model safe to show: control characters are spelled out, long names cut."""

from __future__ import annotations


def spell_out(text: str) -> str:
    r"""A text with what would steer a terminal, or cannot be seen, spelled out.

    >>> print(spell_out("red\x1b[31m alert"))
    red\x1b[31m alert
    """
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text
    )


def clip(text: str, width: int) -> str:
    """The end of a text that is too long: it tells paths apart better than the start.

    >>> clip("model.layers.3.mlp", 12)
    '...ers.3.mlp'
    """
    return text if len(text) <= width else f"...{text[3 - width :]}"
