"""Settings for the tests of this folder: regions cost the host little, and always the same."""

import pytest

from recollect._fit import work
from recollect._plan.overheads import USUAL, Overhead

_LITTLE = {
    **USUAL,
    "rerun": Overhead(region_forward_s=40e-6, call_forward_s=1.5e-6, region_backward_s=40e-6),
    "serve": Overhead(region_forward_s=100e-6, call_forward_s=2e-6, region_backward_s=110e-6, again_s=4e-6),
    "replay": Overhead(region_forward_s=75e-6, call_forward_s=2e-6, region_backward_s=75e-6, again_s=3.5e-6),
}


@pytest.fixture(autouse=True)
def _little_overheads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured ones would let plans depend on the machine, and models as small as those of tests would only rerun."""

    def answer(*_: object, **__: object) -> dict[str, Overhead]:
        return dict(_LITTLE)

    if request.path.name != "test_overheads.py":
        monkeypatch.setattr(work, "measure_overheads", answer)
