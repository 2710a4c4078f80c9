"""Settings for the tests of this folder: a fresh compiler for each, and processes."""

from collections.abc import Iterator

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from tests.distributed.launch import Ranks


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Nothing compiled before, in this process or by an earlier state of the library, is found again."""
    torch._dynamo.reset()
    with functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two processes with a process group between them, see `tests/distributed/launch.py`."""
    with Ranks(2) as both:
        yield both
