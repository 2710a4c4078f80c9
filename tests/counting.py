"""How much Python a step runs: a measure of overhead that no load of the machine disturbs."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_calls(step: Callable[[], object]) -> int:
    """How many calls of functions, in Python and from Python into C, a step makes."""
    count = 0

    def note(_frame: FrameType, what: str, _argument: Any) -> None:
        nonlocal count
        count += what in ("call", "c_call")

    gc.collect()
    gc.disable()  # what earlier tests left behind is not to end within this step
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count
