"""Settings for all tests: hypothesis profiles, what is skipped, what is slow, and who runs what where several run."""

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from recollect._fit import work
from tests.collecting import collect_new, collect_seldom
from tests.guards import leave_guards_untimed
from tests.pricing import little_overheads, usual_sending
from tests.seeding import seed_only_what_is_here
from tests.sharing_out import TOGETHER, Sharing, find_shared
from tests.tracing import leave_compilers_untraced

# Nothing here may depend on how quick the machine is, nor on luck: no time limits, and the same examples everywhere.
# RECOLLECT_EXAMPLES says how many networks to make, and that they be new ones.
settings.register_profile(
    "same", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("random", settings.get_profile("same"), derandomize=False)
settings.load_profile("random" if os.environ.get("RECOLLECT_EXAMPLES") else "same")

# The tensors here are tiny: a second thread only adds waiting (measured: 1.2 s instead of 10 ms for one test).
torch.set_num_threads(1)

# Processes that tests start inherit these. Kernels that Inductor writes are scalar: they read and write the same, each
# compiles in half the time, and no process compiles four programs first to see which vectors the machine knows.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")  # the collector would run after each graph

collect_seldom()
seed_only_what_is_here()
leave_compilers_untraced()

collect_ignore = ["selective/kernels.py"]  # imports Triton; the tests that use it do so themselves

# These compile, start processes, load trainers or models of packages, or try hundreds of combinations, and take two
# thirds of the time. `make quick` leaves them out.
SLOW = (
    "tests/apply/test_orders.py",
    "tests/apply/test_round_trips.py",
    "tests/apply/test_trainers.py",
    "tests/bench/test_cell.py",
    "tests/bench/",
    "tests/cli/",
    "tests/compat/test_higher_order.py",
    "tests/compat/test_install.py",
    "tests/compat/test_selective.py",
    "tests/compile/",
    "tests/contracts/test_gradients.py",
    "tests/contracts/test_light_import.py",
    "tests/contracts/test_random_networks.py",
    "tests/contracts/test_selective_gradients.py",
    "tests/contracts/test_selective_networks.py",
    "tests/distributed/",
    "tests/docs/",
    "tests/fit/test_transformers.py",
    "tests/fit/",
    "tests/inspect/test_oom.py",
    "tests/inspect/test_profile.py",
    "tests/integrations/",
    "tests/offload/test_gradients.py",
    "tests/profile/dry/test_step.py",
    "tests/report/test_plot.py",
    "tests/selective/test_compiled.py",
    "tests/selective/test_other_ways.py",
    "tests/zoo/",
)
# These look at all objects of the process, so that they are quick while there are few: before a compiler is imported.
FIRST = (
    "src/recollect/compat/install.py",
    "tests/compat/test_install.py",
    "tests/contracts/test_lifetimes.py",
    "tests/contracts/test_selective_lifetimes.py",
    "tests/inspect/test_oom",
)


@pytest.fixture(autouse=True)
def _little_overheads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions cost the host little, and always the same, see `tests/pricing.py`."""
    if request.path.name != "test_overheads.py":
        monkeypatch.setattr(work, "measured_overheads", little_overheads)
        monkeypatch.setattr(work, "measured_sending", usual_sending)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") is not None and not torch.accelerator.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))
        shared = set(TOGETHER.values()).intersection(getattr(item, "fixturenames", ()))
        if item.nodeid.startswith(SLOW) or shared:
            item.add_marker(pytest.mark.slow)
        if not shared <= {find_shared(item.nodeid)}:
            raise pytest.UsageError(
                f"{item.nodeid} uses {min(shared)}: name its file in TOGETHER, tests/sharing_out.py"
            )
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (not item.nodeid.startswith(FIRST), item.get_closest_marker("slow") is None))


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Sharing | None:
    """Share tests out our way, unless ``--dist`` asks for another."""
    return Sharing(config, log) if config.getvalue("dist") == "load" else None


def pytest_collection_finish() -> None:
    collect_new()  # all that collecting made stays; later collections need not look at it


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    torch.manual_seed(0)  # so that no test depends on which ran before it, in the process that it happened to be given
    leave_guards_untimed()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        collect_new()  # compilers and packages that this file imported are walked over once, and not in each plan
