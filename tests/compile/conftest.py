"""Settings for the tests of this folder: a fresh compiler for each, kernels only where they matter, and processes."""

from collections.abc import Iterator

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from tests.distributed.launch import Ranks


@pytest.fixture(autouse=True)
def _fresh_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing compiled before, in this process or by an earlier state of the library, is found again.

    All of Inductor runs, but it writes no kernels: it calls torch's, because a C++ compiler takes 2 s for a graph.
    Tests of what its kernels read, and when, are marked `kernels`.
    """
    torch._dynamo.reset()
    has_kernels = any(request.node.get_closest_marker(name) for name in ("kernels", "gpu"))
    with (
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False, fallback_by_default=not has_kernels),
    ):
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two processes with a process group between them, see `tests/distributed/launch.py`."""
    with Ranks(2) as both:
        yield both
