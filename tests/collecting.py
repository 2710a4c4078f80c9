"""The garbage collector, kept away from what a test watches."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def collect_new() -> None:
    """Collect what tests left since the last such call, and freeze what survives.

    A plain `gc.collect` would walk over all that was ever imported: 0.3 s a test, 329 s in one file.
    """
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """Let the collector run seldom by itself.

    Compilers make objects by the hundred thousand, nearly all for good. To walk over them whenever there were a quarter
    more took 15% of the time of tests/compile. Tests that are about lifetimes collect by themselves.
    """
    gc.set_threshold(50_000, 20, 50)


@contextmanager
def without_collector() -> Iterator[None]:
    """Let only reference counts free memory."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
