"""Who runs what, where several processes run tests: chunks of a file, and together what shares processes or models.

xdist knows groups itself, by a mark. But it writes them into the names of tests, where pytest 9.2 does not look: with
``--dist loadgroup`` each test went to whichever process was free, without a word, and what tests share was made twice.
"""

from collections import Counter
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.zoo.catalogue import ZOO

CHUNK = 40
TOGETHER = {
    "tests/compile/test_engines.py": "ranks",
    "tests/distributed/": "ranks",
    "tests/report/test_html.py": "browser",
    "tests/report/test_plan_html.py": "browser",
}
"""Files whose tests use a fixture that starts processes, by its name."""


def find_shared(nodeid: str) -> str | None:
    """The fixture with processes of its own that the tests of this file share."""
    return next((name for start, name in TOGETHER.items() if nodeid.startswith(start)), None)


class Groups:
    """Says which tests stay together. To be asked in the order in which they run."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._seen = Counter[str]()

    def find(self, nodeid: str) -> str:
        """The group of a test, always the same."""
        if nodeid not in self._known:
            self._known[nodeid] = self._choose(nodeid)
        return self._known[nodeid]

    def _choose(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file.startswith("tests/zoo/"):  # what is known of a model serves all of its tests
            case = nodeid.partition("[")[2]
            return f"zoo {max((name for name in ZOO if case.startswith(name)), key=len, default='')}"
        shared = find_shared(nodeid)
        if shared is not None:
            return shared
        self._seen[file] += 1
        return f"{file} {(self._seen[file] - 1) // CHUNK}"


class Sharing(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each process one group after the other, in the order of the tests."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self._groups = Groups()

    def _split_scope(self, nodeid: str) -> str:
        return self._groups.find(nodeid)
