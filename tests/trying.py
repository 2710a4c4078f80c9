"""Many variants in one test: a test each would cost more than what most of them do."""

from collections.abc import Callable, Iterable
from typing import TypeVar

V = TypeVar("V")


def try_all(check: Callable[[V], object], variants: Iterable[V]) -> None:
    """Check every variant, also after one has failed, and raise what was raised with the variant it was raised for."""
    failures: list[Exception] = []
    count = 0
    for count, variant in enumerate(variants, 1):  # noqa: B007
        try:
            check(variant)
        except Exception as error:
            error.add_note(f"this was variant {variant!r}")
            failures.append(error)
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {count} variants failed", failures)
    assert count, "there are no variants to try"
