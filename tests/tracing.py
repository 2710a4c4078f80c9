"""Torch's trace of what it compiles, which nobody reads here."""

import logging
import os


def leave_compilers_untraced() -> None:
    """Let torch write no trace, unless TORCH_TRACE asks for one.

    Pytest listens to every logger that does not pass records on. Torch's trace is one; torch prints each graph and all
    settings into it as soon as somebody listens: 7% of what it takes to compile a small function.
    """
    if "TORCH_TRACE" not in os.environ:
        trace = logging.getLogger("torch.__trace")
        trace.handlers.clear()
        trace.propagate = True
