"""What torch.compile has compiled more than once, and why: another version may have run in recomputation.

Private names: Dynamo's table of guards that failed, by code.
Would be replaced by: a public list of recompilations.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

_SHOWN = 3


def allow_compilations(count: int) -> AbstractContextManager[Any]:
    """Let Dynamo compile a function this often before it leaves it to Python, for as long as a block runs.

    Private: ``torch._dynamo.config.recompile_limit``; ``torch.compile`` would have to take it as an option.
    """
    from torch._dynamo import config

    patched: AbstractContextManager[Any] = config.patch(recompile_limit=count)
    return patched


def recompilations() -> list[str]:
    """A line for each function that was compiled again, latest last; nothing if Dynamo was never imported."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    failures = getattr(dynamo, "guard_failures", None) or {}
    lines = []
    for code, reasons in failures.items():
        why = str(reasons[-1]).strip().splitlines() if reasons else []
        place = f"{code.co_name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
        lines.append(f"{place}, because {why[0].strip()}" if why else place)
    return lines


def hints_about_compiled_code() -> list[str]:
    """What to try where forward and recomputation saved other tensors, if anything was compiled more than once."""
    lines = recompilations()
    if not lines:
        return []
    shown = [f"  {line}" for line in lines[-_SHOWN:]]
    if len(lines) > _SHOWN:
        shown.insert(0, f"  ({len(lines) - _SHOWN} more before these)")
    advice = (
        "If a size varies, say so before the first call with torch._dynamo.mark_dynamic(tensor, dim): one "
        "version then serves all sizes. TORCH_LOGS=recompiles shows each recompilation as it happens."
    )
    return [
        "Or recomputation ran a different compiled version than forward did. torch.compile has recompiled:",
        *shown,
        advice,
    ]
