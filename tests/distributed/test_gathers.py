"""Gathers of parameters inside regions: never kept, made again where a unit runs again, not where it is kept whole."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.autograd import Function
from torch.nn.functional import dropout, gelu

import recollect
from recollect import policies
from tests.distributed.comparing import repeated
from tests.distributed.launch import Ranks

GATHER = "c10d._allgather_base_"


class Swap(Function):
    """An activation collective, written by hand: the same operator as FSDP's, or another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.new_empty(2 * x.shape[0], *x.shape[1:])
        distributed.all_gather_into_tensor(out, x.contiguous())
        return out[x.shape[0] :] + x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Unit(nn.Module):
    def __init__(self, *, talks: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.talks = talks

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = gelu(self.up(x))
        if self.talks:
            h = Swap.apply(h)  # type: ignore[no-untyped-call]
        return x + dropout(self.down(h), 0.2)


class Model(nn.Sequential):
    def __init__(self, *, talks: bool) -> None:
        torch.manual_seed(5)
        super().__init__(Unit(talks=talks), Unit(talks=talks))


POLICIES: dict[str, Any] = {
    "nothing": policies.save_nothing,
    "all": policies.save_all,
    "matmuls": policies.save_matmuls,
    "large": policies.save_larger_than(1),
    "first": policies.save_modules("0"),
    "both": policies.save_modules("*"),
}


def make_model(engine: str, *, talks: bool) -> Any:
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message="FSDP")
    model = Model(talks=talks)
    if engine == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        policy = ModuleWrapPolicy({Unit})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for unit in model:
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run(engine: str, place: str, keep: str, talks: bool) -> tuple[list[int], Any]:
    """How many gathers backward makes beyond plain backward, in each step; what the first region keeps."""
    model = make_model(engine, talks=talks)
    inner: nn.Sequential = model.module if engine == "fsdp1" else model
    places = [inner] if place == "around" else list(inner)
    regions = [recollect.checkpoint(module.forward, policy=POLICIES[keep]) for module in places]

    def with_regions(x: Tensor) -> Tensor:
        for module, region in zip(places, regions, strict=True):
            module.__dict__["forward"] = region
        try:
            return model(x)  # type: ignore[no-any-return]
        finally:
            for module in places:
                del module.__dict__["forward"]

    counts = repeated(model, with_regions, model.parameters(), shape=(4, 8))
    return [count[GATHER] for count in counts], recollect.explain(regions[0])


@pytest.mark.parametrize("talks", [False, True])
@pytest.mark.parametrize("keep", POLICIES)
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_a_region_around_units_keeps_no_parameters_and_is_not_replayed(
    ranks: Ranks, engine: str, keep: str, talks: bool
) -> None:
    recomputed = {"first": 1, "both": 0}.get(keep, 2)
    for gathers, explanation in ranks.run(run, engine, "around", keep, talks):
        assert max(gathers) <= recomputed
        (call,) = explanation.regions[0].calls
        assert "replay" not in call.way
        sent = [site for site in call.sites if site.what.startswith(("c10d.", "fsdp."))]
        assert [site.is_kept for site in sent] == [True] * recomputed * talks


@pytest.mark.parametrize("talks", [False, True])
@pytest.mark.parametrize("keep", ["nothing", "all", "matmuls", "large"])
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_a_region_inside_of_a_unit_gathers_no_more_than_the_unit(
    ranks: Ranks, engine: str, keep: str, talks: bool
) -> None:
    for gathers, explanation in ranks.run(run, engine, "inside", keep, talks):
        assert gathers == [0] * 4
        (call,) = explanation.regions[0].calls
        # FSDP1 gathers in its `forward`, FSDP2 around it; with everything kept nothing is recomputed in any way.
        assert ("replay" in call.way) is (engine == "fsdp2" and keep not in ("nothing", "all") and not talks)
