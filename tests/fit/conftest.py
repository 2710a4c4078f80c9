"""Settings for the tests of this folder: what regions cost the host is taken as usual, not measured for each fit."""

import pytest

from recollect._fit import work
from recollect._plan.overheads import USUAL, Overhead


@pytest.fixture(autouse=True)
def _usual_overheads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring takes 0.1 s for each profile that is planned, and would let plans depend on the machine."""

    def answer(*_: object, **__: object) -> dict[str, Overhead]:
        return dict(USUAL)

    if request.path.name != "test_overheads.py":
        monkeypatch.setattr(work, "measure_overheads", answer)
