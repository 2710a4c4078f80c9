"""Why a contender has no figures, in a few words for the tables."""

from __future__ import annotations

from recollect._core.errors import BudgetError
from recollect._core.units import format_bytes
from recollect._inspect.oom.error import read_shortage


def explain(error: BaseException) -> str:
    """What went wrong, whatever it was.

    >>> explain(ValueError("no such thing"))
    'ValueError: no such thing'
    """
    if read_shortage(error) is not None:
        return "out of memory"
    return find_refusal(error) or f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"


def find_refusal(error: BaseException) -> str:
    """That no plan fits the budget of a graph; ``""`` if the error says something else.

    The compiler raises an error of its own from ours.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BudgetError):
            return f"no plan: the smallest peak of the graph is {format_bytes(cause.smallest_bytes)}"
        cause = cause.__cause__ or cause.__context__
    return ""
