"""What a plan promises, and for what: figures, regions, and the step it was made for. Plain data; no torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRegion:
    """A module that a plan makes a region.

    Attributes:
        path: of the module.
        kind: the name of its class.
        way: how its values come back: ``"rerun"`` runs the module again, ``"serve"`` does so without the calls whose
            results are kept, ``"replay"`` makes single calls again, ``"offload"`` sends what it saves elsewhere.
        plain_bytes: what it holds between forward and backward in the plain step.
        kept_bytes: what it holds under the plan.
        offloaded_bytes: what waits in other memory than the device's.
        tier: where that is: ``"host"``, ``"disk"``, or ``"host, disk"`` for disk where the host is full; ``""`` if
            nothing is sent. A region that runs again sends its inputs and all that it keeps; one that replays, those
            values that its choices say.
        again_s: how long its recomputation takes.
        parameter_bytes: of its parameters, by which another model is told; 0 if nobody knows.
        keeps: what it keeps, in words.
        joined_to: the path of the region before it, where it forgets what that one gives it: that is made again, too;
            ``""`` if it holds what it was given.
        keeps_casts: whether a region that replays holds what autocast makes of its parameters.
    """

    path: str
    kind: str
    way: str
    plain_bytes: int = 0
    kept_bytes: int = 0
    offloaded_bytes: int = 0
    tier: str = ""
    again_s: float = 0.0
    parameter_bytes: int = 0
    keeps: str = ""
    joined_to: str = ""
    keeps_casts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A peak that can be reached, and the step's time there.

    Attributes:
        peak_bytes: the most bytes in use at a time.
        step_s: how long the step takes.
        name: of the standard policy that gives it; ``""`` for a point of the planner.
    """

    peak_bytes: int
    step_s: float
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a plan promises.

    Attributes:
        peak_bytes: the most bytes that tensors have of the device at a time, over the whole step, as
            ``torch.cuda.max_memory_allocated`` counts them.
        step_s: how long the step takes.
        plain_peak_bytes: the same of the step without a plan.
        plain_step_s: likewise.
        lower_bound_s: no plan that only recomputes can be quicker within this budget less its margin; None if it was
            not worked out.
        budget: what was asked for, as it was written.
        budget_bytes: the same in bytes; None for ``"min"`` and ``"fastest"``.
        margin_bytes: how far below the budget the plan was made to stay, for what a profile does not see.
        allowance_bytes: how much more the allocator is expected to reserve than tensors have: pieces too small to use.
        floor_bytes: the smallest peak that a plan can reach.
        peak_at: the call at which the peak is, in words.
        curve: peaks and times that can be had instead, highest peak first.
        policies: the same of standard policies, for comparison; simulated, not measured.
        measured_peak_bytes: what was measured when the plan was run; None before.
        measured_step_s: likewise.
    """

    peak_bytes: int
    step_s: float
    plain_peak_bytes: int
    plain_step_s: float
    lower_bound_s: float | None = None
    budget: str = ""
    budget_bytes: int | None = None
    margin_bytes: int = 0
    allowance_bytes: int = 0
    floor_bytes: int = 0
    peak_at: str = ""
    curve: tuple[CurvePoint, ...] = ()
    policies: tuple[CurvePoint, ...] = ()
    measured_peak_bytes: int | None = None
    measured_step_s: float | None = None

    @property
    def overhead(self) -> float:
        """How much longer the step takes than without a plan, as a part of that."""
        return self.step_s / self.plain_step_s - 1 if self.plain_step_s else 0.0

    @property
    def gap(self) -> float | None:
        """How much of that the lower bound does not ask for, as a part of the plain step."""
        if self.lower_bound_s is None or not self.plain_step_s:
            return None
        return (self.step_s - self.lower_bound_s) / self.plain_step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a plan was made for.

    Attributes:
        model: the name of the model's class, or of the step.
        modules: a digest of its modules' paths and classes.
        shapes: a digest of the sizes of its inputs and parameters.
        torch: version.
        device: its name.
    """

    model: str = ""
    modules: str = ""
    shapes: str = ""
    torch: str = ""
    device: str = ""
