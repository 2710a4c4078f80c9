"""The versions of Python that the package says it supports are those that the workflow tests."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def read_classified() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    found = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", one) for one in project["classifiers"]]
    versions = [one[1] for one in found if one]
    assert project["requires-python"] == f">={versions[0]}"
    return versions


def test_every_version_that_is_promised_is_tested() -> None:
    workflow = (ROOT / ".github/workflows/tests.yml").read_text("utf-8")
    matrix = re.search(r"^ +python: \[(.*)\]$", workflow, re.MULTILINE)
    assert matrix is not None
    assert re.findall(r"[\d.]+", matrix[1]) == read_classified()


def test_the_versions_follow_each_other() -> None:
    minors = [int(version.partition(".")[2]) for version in read_classified()]
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert sys.version_info.minor in minors
