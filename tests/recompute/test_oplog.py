"""The log says which operator ran where, and where each saved tensor is made."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recollect._recompute.oplog import OpLog, compare_logs, describe_tensor

ONES = torch.ones(2, 3)


def log_of(function: Callable[[], Any], root: str = "root") -> OpLog:
    """The log of a function, told of what autograd saves."""
    log = OpLog(root)

    def pack(tensor: Tensor) -> Tensor:
        log.note_saved(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), log:
        function()
    return log


def test_operators_are_logged_in_order_with_their_inputs() -> None:
    log = log_of(lambda: (ONES @ ONES.t()).sum())
    assert [(entry.op, entry.inputs) for entry in log.entries] == [
        ("aten.t", "float32[2, 3]"),
        ("aten.mm", "float32[2, 3], float32[3, 2]"),
        ("aten.sum", "float32[2, 2]"),
    ]


def test_lines_are_those_of_the_caller() -> None:
    log = log_of(lambda: ONES.sin())
    (entry,) = log.entries
    assert entry.place.line.startswith("test_oplog.py:")
    assert entry.place.module == ""
    assert any("test_lines_are_those_of_the_caller" in frame for frame in entry.place.stack)


def test_modules_are_named_from_the_root() -> None:
    block = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh()))
    log = log_of(lambda: block(ONES), root="layers.3")
    assert [(entry.op, entry.place.module) for entry in log.entries] == [
        ("aten.t", "layers.3.0"),
        ("aten.addmm", "layers.3.0"),
        ("aten.tanh", "layers.3.1.0"),
    ]


@pytest.mark.parametrize(
    ("function", "places"),
    [
        (lambda x: x.sin(), ["input of aten.sin"]),
        (lambda x: x.exp(), ["output of aten.exp"]),
        (lambda x: x.exp().sin(), ["output of aten.exp", "output of aten.exp"]),
        (lambda x: x * x, ["input of aten.mul", "input of aten.mul"]),
        (lambda x: x.max(1).values, ["output of aten.max"]),
    ],
)
def test_saved_tensors_are_placed(function: Callable[[Tensor], Tensor], places: list[str]) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    log = log_of(lambda: function(x))
    assert [" ".join(log.locate(i).split()[:3]).rstrip(",") for i in range(len(log.saved))] == places


def test_an_unknown_tensor_has_no_place() -> None:
    log = log_of(lambda: ONES.sin())
    assert log.locate(99) == "place unknown"


def test_nothing_is_held_after_the_log_is_left() -> None:
    log = OpLog("root")
    with log:
        log.note_saved(torch.ones(3))
    assert log._unplaced == []


def test_the_log_leaves_results_alone() -> None:
    results: list[Tensor] = []
    log_of(lambda: results.append(ONES.sin()))
    assert torch.equal(results[0], ONES.sin())


def test_tensors_are_described_by_dtype_and_shape() -> None:
    assert [describe_tensor(t) for t in (ONES, torch.ones((), dtype=torch.int64), torch.ones(0, dtype=torch.bool))] == [
        "float32[2, 3]",
        "int64[]",
        "bool[0]",
    ]


# Two logs


def sines(count: int) -> OpLog:
    def run() -> None:
        for _ in range(count):
            torch.ones(2).sin()

    return log_of(run)


def test_equal_logs_are_said_to_be_equal() -> None:
    assert compare_logs(sines(2), sines(2)) == "forward and recomputation ran the same 4 operators on the same shapes."


@pytest.mark.parametrize(("ours", "theirs"), [(3, 2), (2, 3)])
def test_the_shorter_log_ends_with_dashes(ours: int, theirs: int) -> None:
    rows = compare_logs(sines(ours), sines(theirs)).splitlines()
    (marked,) = (row for row in rows if row.startswith(">"))
    assert marked.split()[1] == "4"
    assert (marked.split()[2] == "-") is (ours < theirs)


def test_long_logs_are_cut_on_both_sides() -> None:
    rows = compare_logs(sines(100), log_of(lambda: None)).splitlines()
    assert len(rows) <= 20
    assert any("195 more" in row for row in rows)
    differ = sines(50)
    differ.entries[60:] = log_of(ONES.cos).entries
    rows = compare_logs(sines(50), differ).splitlines()
    assert any("57 identical operators" in row for row in rows)


def test_only_operators_and_shapes_are_compared_not_lines() -> None:
    def one() -> None:
        ONES.sin()

    def other() -> None:
        ONES.sin()

    assert "same 1 operators" in compare_logs(log_of(one), log_of(other))
