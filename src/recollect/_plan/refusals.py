"""Steps that no plan can be made for, and what to do about each."""

from __future__ import annotations

from recollect._core.calls import Phase
from recollect._core.profiles import Profile


def refuse_unplannable(profile: Profile) -> None:
    """Raise unless the step is a plain one, with a forward and a backward; see `rounds.py` for several.

    Raises:
        ValueError: it has no backward, or recomputes already.
    """
    again = next((call for call in profile.calls if call.phase is Phase.RECOMPUTATION), None)
    regions = next((call.region for call in profile.calls if call.region), "")
    if regions:
        message = (
            f"the profile of {profile.name or 'this step'} was taken with regions in place ('{regions}'), but a "
            "plan is made from the plain step.\n"
            "Remove them (`recollect.remove(model)`), and profile again"
        )
        raise ValueError(message)
    if again is not None:
        message = (
            f"the step of {profile.name or 'this profile'} already recomputes (from {again.op} in "
            f"{again.module or again.source or 'backward'} on), and not through recollect; a plan is made from "
            "the plain step.\n"
            "Turn the model's own checkpointing off: gradient_checkpointing_disable() (Transformers), "
            "disable_gradient_checkpointing() (diffusers), set_grad_checkpointing(False) (timm), or remove the "
            "call of torch.utils.checkpoint from its code"
        )
        raise ValueError(message)
    first = profile.forward_count
    if first == len(profile.calls) or not profile.saved:
        message = (
            f"the profile of {profile.name or 'this step'} has no backward pass, so there is nothing to plan: profile "
            "a step that runs one (a model, or a function that calls `loss.backward()`)"
        )
        raise ValueError(message)
