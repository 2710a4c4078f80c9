"""The public names of the package: `recollect.__init__` gives them out when the first is asked for."""

from recollect import policies
from recollect._apply.function import checkpoint, explain_mismatch
from recollect._apply.handle import Applied
from recollect._apply.model import apply, remove
from recollect._compile.partition import partitioner
from recollect._core.decisions import Decision, Site
from recollect._core.errors import (
    BudgetError,
    CaptureError,
    ChangedInputError,
    CheckpointError,
    CompileError,
    MismatchError,
    OffloadError,
    RecollectError,
    TierFullError,
    TransformError,
)
from recollect._core.plans import Choice, Plan
from recollect._core.profiles import Profile
from recollect._core.scope import is_recomputing, name, region
from recollect._fit.fit import fit
from recollect._fit.fitted import Fitted
from recollect._fit.plan import plan
from recollect._inspect.explain import explain
from recollect._inspect.oom.report import OomReport
from recollect._inspect.oom.watch import on_oom
from recollect._inspect.profile import profile
from recollect._inspect.report import report
from recollect._inspect.saved import print_saved
from recollect._levers.linear_cross_entropy import linear_cross_entropy
from recollect._offload.accounts import OffloadReport
from recollect._offload.offload import Offload, offload
from recollect._offload.tiers import Tier
from recollect._recompute.ambient import register_ambient
from recollect._recompute.graph_rng import graph_rng
from recollect._recompute.updates import register_state
from recollect._recompute.values import ValueCheck

__all__ = [
    "Applied",
    "BudgetError",
    "CaptureError",
    "ChangedInputError",
    "CheckpointError",
    "Choice",
    "CompileError",
    "Decision",
    "Fitted",
    "MismatchError",
    "Offload",
    "OffloadError",
    "OffloadReport",
    "OomReport",
    "Plan",
    "Profile",
    "RecollectError",
    "Site",
    "Tier",
    "TierFullError",
    "TransformError",
    "ValueCheck",
    "apply",
    "checkpoint",
    "explain",
    "explain_mismatch",
    "fit",
    "graph_rng",
    "is_recomputing",
    "linear_cross_entropy",
    "name",
    "offload",
    "on_oom",
    "partitioner",
    "plan",
    "policies",
    "print_saved",
    "profile",
    "region",
    "register_ambient",
    "register_state",
    "remove",
    "report",
]
