"""Models that Accelerate shards by FSDP2, on two processes: the same parameters after training, to the bit."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import FSDPModule

import recollect
import recollect.compat
from tests.distributed.launch import Ranks

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


@contextmanager
def launched() -> Iterator[None]:
    """As if `torchrun` had started these processes; Accelerate forgets it afterwards."""
    from accelerate.state import AcceleratorState, GradientState

    before = dict(os.environ)
    rank, size = str(distributed.get_rank()), str(distributed.get_world_size())
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Accelerate warns about is its own
            yield
    finally:
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(before)


def make_accelerator(**options: Any) -> Any:
    """An Accelerator that shards. By itself it does so on GPUs only, and spreads copies (DDP) on the CPU."""
    from accelerate import Accelerator, DistributedType
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["MistralDecoderLayer"],
        **options,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def trained(prepare: str) -> list[Tensor]:
    """The parameters after two steps, whole."""
    from recollect.integrations.transformers import enable
    from tests.integrations.small_models import batch, build

    inputs = batch("mistral")
    is_plugins = prepare == "plugin"
    with launched(), recollect.compat.install() if is_plugins else nullcontext():
        accelerator = make_accelerator(activation_checkpointing=is_plugins)
        model: Any = build("mistral")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        ways: dict[str, Callable[[], Any]] = {
            "apply": lambda: recollect.apply(model),
            "selective": lambda: recollect.apply(model, policy="selective"),
            "budget": lambda: enable(model, budget="min", inputs=inputs, optimizer=optimizer),
        }
        if prepare == "apply before":
            recollect.apply(model)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert FSDPModule in type(model).__mro__
        if prepare in ways:
            ways[prepare]()
        recomputed = []
        inside = next(module for name, module in model.named_modules() if name.endswith("mlp.up_proj"))
        inside.register_forward_pre_hook(lambda *_: recomputed.append(recollect.is_recomputing()))
        for _ in range(2):
            accelerator.backward(model(**inputs, use_cache=False).loss)
            optimizer.step()
            optimizer.zero_grad()
        if is_plugins:
            assert True in recomputed
        found = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
        recollect.remove(model)
        return found


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> list[Tensor]:
    return ranks.run(trained, "")[0]


@pytest.mark.parametrize("prepare", ["apply before", "apply", "selective", "budget", "plugin"])
def test_a_model_that_accelerate_shards_trains_the_same(prepare: str, ranks: Ranks, plain: list[Tensor]) -> None:
    for found in ranks.run(trained, prepare):
        assert len(found) == len(plain) > 30
        assert all(map(torch.equal, found, plain))


def losses_of_example(policy: str) -> list[float]:
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples" / "accelerate_sharded.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    options = ["--layers", "2", "--dim", "16", "--length", "32", "--steps", "2", "--policy", policy]
    with launched():
        found: list[float] = example.train(example.parse(options))
        return found


def test_the_example_trains_the_same_under_any_policy(ranks: Ranks) -> None:
    expected = ranks.run(losses_of_example, "none")
    assert ranks.run(losses_of_example, "full") == expected
    assert ranks.run(losses_of_example, "selective") == expected
