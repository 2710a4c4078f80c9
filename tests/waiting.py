"""An error for every wait on the device, for as long as a block runs."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """Let torch raise where the host would wait for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
