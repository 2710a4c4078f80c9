"""Tests that share something expensive run in the same process, if several run tests."""

import pytest

from tests.sharing_out import CHUNK, Groups, find_shared

_ran: list[int] = []


@pytest.mark.parametrize("number", range(6))
def test_tests_of_a_file_run_in_one_process_and_in_their_order(number: int) -> None:
    _ran.append(number)
    assert _ran == list(range(_ran[0], number + 1))


def test_files_are_cut_into_chunks_wherever_their_tests_stand() -> None:
    groups = Groups()
    names = [f"tests/core/test_{file}.py::test_it[{number}]" for number in range(CHUNK + 1) for file in "ab"]
    found = [groups.find(name) for name in names]
    assert set(found[0 : 2 * CHUNK : 2]) == {"tests/core/test_a.py 0"}
    assert found[-2:] == ["tests/core/test_a.py 1", "tests/core/test_b.py 1"]
    assert [groups.find(name) for name in names] == found


def test_what_shares_a_model_or_processes_stays_together() -> None:
    groups = Groups()
    cases = ["test_zoo.py::test_it[qwen3-moe-full]", "test_compiled.py::test_it[qwen3-moe-compiled, then applied]"]
    assert {groups.find(f"tests/zoo/{case}") for case in cases} == {"zoo qwen3-moe"}
    assert groups.find("tests/zoo/test_zoo.py::test_it[qwen3-full]") == "zoo qwen3"
    both = ("tests/distributed/test_ddp.py::test_it", "tests/compile/test_engines.py::test_it")
    assert {groups.find(name) for name in both} == {find_shared(name) for name in both} == {"ranks"}
