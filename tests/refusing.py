"""Calls that must be refused, each with the error and a part of its text."""

from collections.abc import Callable
from typing import Any

import pytest

Wrong = tuple[Callable[[], Any], type[Exception], str]

_LONGEST = 700  # characters: nobody reads more


def refuse(wrong: Wrong) -> None:
    call, kind, text = wrong
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert text in message
    assert len(message) < _LONGEST
    assert "tensor(" not in message, "no numbers of tensors"
