"""Processes for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.distributed.launch import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two processes with a process group between them, see `launch.py`."""
    with Ranks(2) as both:
        yield both
