"""Offloaded steps under DDP and FSDP2, on two ranks: gradients are those of the plain wrapped model to the bit."""

import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import recollect
from recollect import Decision
from tests.distributed.launch import Ranks
from tests.distributed.nets import Net, assert_same_steps, train
from tests.distributed.test_fsdp2 import always_resharded, in_lower_precision, nested, never_resharded
from tests.offload.leaving import wait_until_left


def replicated(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net)


def sharded(by: Callable[[Any], None]) -> Callable[[nn.Module], nn.Module]:
    def wrap(net: nn.Module) -> nn.Module:
        by(net)
        return net

    return wrap


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": replicated,
    "fsdp2": sharded(always_resharded),
    "fsdp2, kept whole": sharded(never_resharded),
    "fsdp2, bfloat16": sharded(in_lower_precision),
    "fsdp2, nested": sharded(nested),
}


def compare(wrap: str, inner: Decision | None) -> None:
    torch.manual_seed(0)
    plain = train(WRAPS[wrap](Net()), steps=4)
    torch.manual_seed(0)
    net = Net()
    wrapped = WRAPS[wrap](net)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "offloading to disk")
        away = recollect.offload(tier="disk", directory=folder, min_bytes=0)
        rules: dict[str, Any] = {"layers.0": inner or away, "layers.*": away}
        net.register_forward_hook(lambda *_: wait_until_left(away))
        with recollect.apply(net, rules):
            ours = train(wrapped, steps=4)
        report = away.report()
        assert report.steps == 4
        assert report.out_bytes > 0
        assert away._session.transfers.leaving_bytes == 0
    assert_same_steps(plain, ours)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("inner", [None, Decision.RECOMPUTE])
def test_gradients_are_those_of_the_plain_wrapped_model(ranks: Ranks, wrap: str, inner: Decision | None) -> None:
    ranks.run(compare, wrap, inner)
