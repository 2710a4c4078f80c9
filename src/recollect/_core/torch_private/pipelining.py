"""The stages that a pipeline schedule of `torch.distributed.pipelining` runs on this rank.

Private names: ``PipelineScheduleSingle._stage``, ``PipelineScheduleMulti._stages``.
Would be replaced by: a public property of schedules.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from typing import Any


def stages_of(schedule: Any) -> list[Any]:
    """The stages of a schedule on this rank; empty if it is none."""
    if hasattr(schedule, "_stages"):
        return list(schedule._stages)
    return [schedule._stage] if hasattr(schedule, "_stage") else []
