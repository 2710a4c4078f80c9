"""FSDP's wrapping policies, the objects of ``torch.distributed.fsdp.wrap``: which modules one wants wrapped.

Private names: ``torch.distributed.fsdp.wrap._Policy`` and its ``_run_policy``.
Would be replaced by: a public method of policies that gives the modules of a model.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def run_policy(policy: object, model: nn.Module) -> dict[nn.Module, dict[str, Any]] | None:
    """The modules that a policy wants wrapped, each with the wrapper's keyword arguments; None if it is not a policy.

    Imports nothing: who has a policy has imported its class.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp.wrap")
    if fsdp is None or not isinstance(policy, fsdp._Policy):
        return None
    wanted: dict[nn.Module, dict[str, Any]] = policy._run_policy(model, ignored_modules=set(), root_kwargs={})
    return wanted
