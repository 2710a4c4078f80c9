"""The processes of the other tests: what each gives back, and how each way to fail is reported."""

import os
import time
import warnings

import pytest
import torch
from torch import Tensor, distributed

from tests.distributed.launch import RankError, Ranks


def total(start: int) -> float:
    mine = torch.tensor([float(start + distributed.get_rank())])
    distributed.all_reduce(mine)
    return mine.item()


def drawn() -> Tensor:
    return torch.randn(3)


def test_each_rank_gives_its_result_and_starts_from_the_same_seed(ranks: Ranks) -> None:
    assert ranks.run(total, 3) == [7.0, 7.0]
    first, second = ranks.run(drawn)
    assert torch.equal(first, second)
    assert torch.equal(first, ranks.run(drawn)[0])


def fail_on_one() -> None:
    if distributed.get_rank() == 1:
        message = "no such luck"
        raise ValueError(message)
    total(0)


def test_a_failing_rank_shows_its_traceback_though_the_other_waits_for_it(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"(?s)fail_on_one: rank 1 raised:.*no such luck") as failure:
        ranks.run(fail_on_one)
    assert "rank 0 did not come back, because of that" in str(failure.value)
    assert ranks.run(total, 0) == [1.0, 1.0]


def hang_on_one() -> None:
    if distributed.get_rank() == 0:
        time.sleep(1000)


def test_a_hanging_rank_is_ended_and_shows_where_it_hangs(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"(?s)hang_on_one: rank 0 was not back within 1 s:.*in hang_on_one"):
        ranks.run(hang_on_one, limit_s=1.0)
    assert ranks.run(total, 0) == [1.0, 1.0]


def die_on_one() -> None:
    if distributed.get_rank() == 1:
        os._exit(3)


def test_a_dying_rank_is_named(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="die_on_one: rank 1 died with exit code 3"):
        ranks.run(die_on_one)
    assert ranks.run(total, 0) == [1.0, 1.0]


def warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def test_warnings_are_errors_on_ranks(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="UserWarning: careful"):
        ranks.run(warn)


def split_world() -> int:
    group = distributed.new_group([0, 1])
    assert group is not None
    return len(distributed.distributed_c10d._world.pg_map)


def count_groups() -> int:
    return len(distributed.distributed_c10d._world.pg_map)


def test_process_groups_of_a_function_end_with_it(ranks: Ranks) -> None:
    assert ranks.run(split_world) == [2, 2]
    assert ranks.run(count_groups) == [1, 1]


def process_id() -> int:
    return os.getpid()


def test_closing_leaves_no_process() -> None:
    with Ranks(1) as alone:
        (pid,) = alone.run(process_id)
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
