"""Settings for all tests: hypothesis profiles, and skipping what needs an accelerator where there is none."""

import os

import pytest
import torch
from hypothesis import settings

# The first example of a property may pay for torch's start-up, so time limits would only make tests flaky.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# The tensors here are tiny: a second thread only adds waiting (measured: 1.2 s instead of 10 ms for one test).
torch.set_num_threads(1)


collect_ignore = ["selective/kernels.py"]  # imports Triton; the tests that use it do so themselves


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.accelerator.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))
