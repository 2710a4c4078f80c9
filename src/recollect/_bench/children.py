"""Processes that a benchmark starts, and that must not outlive it: they would disturb whatever is measured next."""

from __future__ import annotations

import os
import threading
import time

_LOOKS_EVERY_S = 1.0


def end_with_parent() -> None:
    """End this process once the one that started it is gone, however that ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOKS_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, name="recollect-bench-parent", daemon=True).start()
