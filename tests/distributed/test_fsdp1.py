"""Regions under the first FSDP: gradients and gathers are those of the plain engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import recollect
from tests.distributed.launch import Ranks
from tests.distributed.nets import INSIDE, WAYS, Block, Net, assert_same_steps, make_regions, noted, patched, train

STEPS = 2
ENGINES: dict[str, dict[str, Any]] = {
    "full": {"use_orig_params": True},
    "gradients only": {"use_orig_params": True, "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "flat parameters": {"use_orig_params": False},
    "lower precision": {"use_orig_params": True, "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    "forward prefetch": {"use_orig_params": True, "forward_prefetch": True},
    "frozen": {"use_orig_params": True},
}


@contextmanager
def gathers(root: FullyShardedDataParallel) -> Iterator[list[int]]:
    """Which unit is gathered, in order."""
    units: list[Any] = FullyShardedDataParallel.fsdp_modules(root)
    numbers = {id(unit._handle): number for number, unit in enumerate(units)}
    seen: list[int] = []

    def noting(gather: Callable[..., Any]) -> Callable[..., Any]:
        def also_noted(handle: Any, *args: Any) -> Any:
            seen.append(numbers[id(handle)])
            return gather(handle, *args)

        return also_noted

    with patched(FlatParamHandle, "_all_gather_flat_param", noting):
        yield seen


def make(engine: str, way: str | None, *, before: bool) -> FullyShardedDataParallel:
    torch.manual_seed(0)
    net: Any = Net()
    if engine == "frozen":
        net.embed.requires_grad_(False)
        net.layers[0].requires_grad_(False)
    if way is not None and before:
        make_regions(net, way)
    units = FullyShardedDataParallel(
        net, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), **ENGINES[engine]
    )
    if way is not None and not before:
        if way in INSIDE:
            recollect.apply(units, {Block: INSIDE[way]})  # where they are now has other names
        else:
            make_regions(net, way)
    return units


def count(units: FullyShardedDataParallel) -> tuple[list[Any], list[int]]:
    with gathers(units) as seen:
        return train(units, steps=STEPS), seen


def compare(engine: str) -> None:
    plain, plain_gathers = count(make(engine, None, before=False))
    for index, way in enumerate(WAYS, list(ENGINES).index(engine)):
        with noted(way):
            ours, our_gathers = count(make(engine, way, before=index % 2 == 0))
            assert_same_steps(plain, ours)
            if way.startswith("around all"):  # at most one more for each unit that is recomputed
                more = Counter(our_gathers) - Counter(plain_gathers)
                assert all(extra <= STEPS for extra in more.values()), more
            else:
                assert our_gathers == plain_gathers


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_and_gathers_are_those_of_plain_fsdp_whatever_is_applied_first(ranks: Ranks, engine: str) -> None:
    ranks.run(compare, engine)


def accumulate(way: str | None) -> list[Any]:
    units = make("full", way, before=True)
    return train(units, steps=2, micro_batches=2, unsynced=units.no_sync)


def compare_accumulation() -> None:
    plain = accumulate(None)
    for way in WAYS:
        with noted(way):
            assert_same_steps(plain, accumulate(way))


def test_gradients_accumulate_without_synchronising(ranks: Ranks) -> None:
    ranks.run(compare_accumulation)
