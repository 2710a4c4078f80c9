"""Waits for values on their way out. A backward that comes before they have left takes them back, which is right."""

from concurrent.futures import wait
from typing import Any


def wait_until_left(away: Any) -> None:
    """Wait until all that an offloader was given is written, or has failed, on however busy a machine."""
    workers = getattr(away, "_session", away).transfers._workers
    if workers is not None:
        wait([job.future for job, _ in list(workers._writing)], timeout=60)
