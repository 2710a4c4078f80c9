"""`recollect doctor`: looks at everything, goes on without a device, and says what to do where something is amiss."""

import json
from typing import Any

import pytest
import torch

import recollect
from recollect._cli import checks
from recollect._cli.checks import Check, CheckState, judge_torch
from tests.cli.conftest import Invoke

pytest.importorskip("typer")


def only(found: Any) -> Check:
    (check,) = found
    assert isinstance(check, Check)
    return check


def test_findings_as_json_are_alone_on_standard_output(invoke: Invoke) -> None:
    done = invoke("doctor", "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert (found["recollect"], found["version"], found["torch"]) == ("doctor", 1, torch.__version__)
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert {"Python", "torch", "torch internals", "torch.compile", "host memory", "pinned memory"} <= set(states)
    assert (states["torch"], states["torch internals"]) == ("ok", "ok")
    assert found["checks"][0] == {"name": "recollect", "state": "ok", "found": recollect.__version__}
    assert {"inside host memory", "to disk", "from disk"} <= {link["name"] for link in found["links"]}
    assert all(link["bytes_per_s"] > 0 for link in found["links"])
    assert len(found["devices"]) == (torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


def test_findings_are_tables_of_what_is_there_and_what_to_do(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Check(name="a thing", state=CheckState.LIMITED, found="half [of] it", advice="get the other half")
    monkeypatch.setattr("recollect._cli.findings.CHECKS", (lambda: iter([odd]),))
    done = invoke("doctor")
    assert done.code == 0
    assert [word for word in ("a thing", "limited", "half [of] it", "get the other half") if word in done.out] != []
    assert "link speeds, measured" in done.out
    assert "to disk" in done.out
    assert "/s" in done.out


def test_something_broken_has_exit_code_1(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Check(name="torch", state=CheckState.BROKEN, found="1.0")
    monkeypatch.setattr("recollect._cli.findings.CHECKS", (lambda: iter([broken]),))
    monkeypatch.setattr("recollect._cli.findings.measure_links", list)
    assert invoke("doctor").code == 1


def test_links_that_cannot_be_measured_do_not_stop_it(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure() -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("recollect._cli.findings.CHECKS", ())
    monkeypatch.setattr("recollect._cli.findings.measure_links", measure)
    done = invoke("doctor", "--json")
    assert done.code == 0
    assert json.loads(done.out)["checks"] == [
        {
            "name": "link speeds",
            "state": "limited",
            "found": "[Errno 28] No space left on device",
            "advice": "free some memory or disk",
        }
    ]


def test_without_a_device_it_says_so_and_what_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    device = only(checks.check_devices())
    assert (device.state, device.found) == (CheckState.ABSENT, "none")
    assert "recollect profile --dry --device H200" in device.advice
    assert only(checks.check_pinning()).state is CheckState.ABSENT


@pytest.mark.parametrize(
    ("version", "state", "advice"),
    [
        ("2.11.0", CheckState.OK, ""),
        ("2.13.1+cu130", CheckState.OK, ""),
        ("2.10.0", CheckState.BROKEN, "install torch 2.11 to 2.13"),
        ("2.14.0a0+git", CheckState.LIMITED, "if something breaks, install torch 2.11 to 2.13"),
    ],
)
def test_a_version_of_torch_is_judged_by_those_we_run_on(version: str, state: CheckState, advice: str) -> None:
    check = judge_torch(version)
    assert (check.state, check.advice) == (state, advice)


def test_a_touch_point_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        if name.endswith("torch_private.nodes"):
            raise ImportError("cannot import name 'Node'")

    monkeypatch.setattr(checks, "import_module", missing)
    check = only(checks.check_seam())
    assert check.state is CheckState.BROKEN
    assert check.found == "recollect._core.torch_private.nodes: ImportError: cannot import name 'Node'"


def test_no_compiler_is_a_limit_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "list_backends", lambda: ["inductor"])
    monkeypatch.setattr("shutil.which", lambda name: None)
    check = only(checks.check_compile())
    assert (check.state, check.found) == (CheckState.LIMITED, "Inductor, no C++ compiler")
    assert check.advice == "install g++ or clang++, or set CXX; eager mode still works"


def test_a_library_that_is_missing_comes_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_version_of", lambda name: None)
    advice = {check.name: check.advice for check in checks.check_extras()}
    assert advice["matplotlib"] == 'pip install "recollect[plot]", for plots'
    assert advice["scipy"] == 'pip install "recollect[plan]", for budgets'
    assert set(advice) == {"rich", "typer", "matplotlib", "scipy", "trainers"}


def test_trainers_are_told_with_their_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_version_of", lambda name: "5.22.2" if name == "transformers" else None)
    found = {check.name: check for check in checks.check_extras()}
    assert (found["trainers"].state, found["trainers"].found) == (CheckState.OK, "transformers 5.22.2")


def test_memory_of_the_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    total, available = checks.host_memory()
    assert total is not None
    assert total > 2**28
    assert available is None or 0 < available <= total
    monkeypatch.setattr(checks, "host_memory", lambda: (None, None))
    assert only(checks.check_host_memory()).state is CheckState.LIMITED


@pytest.mark.gpu
def test_every_device_is_found_with_its_memory(invoke: Invoke) -> None:
    devices = checks.list_devices()
    assert [device.name for device in devices] == [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    assert all(0 < device.free_bytes <= device.total_bytes for device in devices)
    assert only(checks.check_pinning()).state is CheckState.OK
    done = invoke("doctor")
    assert "host to cuda:0, pinned" in done.out
