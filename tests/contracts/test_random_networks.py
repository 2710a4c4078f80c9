"""Random networks in random regions: a step with the regions is bitwise the step without, and leaves nothing behind.

Networks are those of `networks.py`, steps those of `network_steps.py`: backward twice, in parts, from another thread,
to second order, and so on. Programs that plain autograd itself refuses are thrown away. Where a program writes into a
tensor that a region has read, a `CheckpointError` is as good as the right gradient.

To hunt: ``RECOLLECT_EXAMPLES=1000 pytest tests/contracts/test_random_networks.py`` (for each kind of step; default 25).
"""

import os

import pytest
from hypothesis import HealthCheck, Phase, assume, event, given, settings

import recollect
from tests.collecting import without_collector
from tests.contracts.network_steps import STEPS, Case, Step, cases, is_same, living, take_step
from tests.contracts.networks import routes_in


@pytest.mark.parametrize("step", STEPS)
@settings(
    phases=[phase for phase in Phase if phase is not Phase.explain],  # it takes minutes for one example
    max_examples=int(os.environ.get("RECOLLECT_EXAMPLES", "25")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
@given(case=cases)
def test_a_step_through_regions_is_bitwise_the_plain_step_and_leaves_nothing(step: Step, case: Case) -> None:
    with without_collector():
        try:
            plain = take_step(case, step, has_regions=False)
        except RuntimeError as error:
            event(f"plain autograd refuses: {str(error)[:60]}")
            assume(False)
        try:
            ours = take_step(case, step, has_regions=True)
        except recollect.CheckpointError:
            assert plain.clash, "a region refused a program that writes into nothing a region reads"
            event("a write into what a region reads is refused")
            return
        different = [name for (name, a), (_, b) in zip(plain.values, ours.values, strict=True) if not is_same(a, b)]
        assert different == []
        # A function that closes over a tensor holds it; written into, the tensor holds the function in turn.
        is_held = plain.clash and "closure" in routes_in(case.body)
        if living(plain) == 0 and not is_held:
            assert living(ours) == 0
