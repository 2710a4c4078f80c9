"""Real models under every rule, compiled: the gradients of the plain model, up to rounding."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

import recollect
from tests.zoo.catalogue import ZOO, Kind
from tests.zoo.known import each
from tests.zoo.stepping import RULES, build, build_plain, regions_of, switch_torchs_on, take_step

pytest.importorskip("transformers")

pytestmark = [
    # Dynamo looks at the .grad of every tensor that it meets.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # Mamba of Transformers asks a cached function for torch's version.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with functorch_config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


# Of these Dynamo traces for up to a minute.
SLOWEST = ("deepseek-v3", "mamba", "unet", "gpt-oss", "whisper", "qwen3-moe")
DECODERS = ("llama", "mistral", "qwen3")  # like gemma3, and tests/compile/test_models.py compiles them


def without_the_last(kind: Kind, model: Any) -> Any:
    """Two blocks of three of one class: Dynamo traces each anew."""
    for module in list(model.modules()) if kind.has_switch else ():
        if isinstance(module, nn.ModuleList) and len(module) == 3 and len({type(block) for block in module}) == 1:
            del module[-1]
    return model


@each("compiled", rules=RULES, in_turn=True, long=(*SLOWEST, *DECODERS))
def test_compiled_steps_are_the_plain_ones_up_to_rounding(name: str, rule: str) -> None:
    kind = ZOO[name]
    model, plain = (without_the_last(kind, make(kind)) for make in (build, build_plain))
    expected = take_step(kind, plain, seed=0)
    with recollect.apply(model, **RULES[rule]):
        # Dynamo, AOTAutograd and its partitioner, without Inductor's C++.
        compiled: Any = torch.compile(model, backend="aot_eager")
        found = take_step(kind, model, compiled, seed=0)
    for what, value in expected.items():
        torch.testing.assert_close(found[what], value, msg=functools.partial("{}: {}".format, what))


def as_a_whole(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def block_by_block(model: Any) -> Any:
    for block in regions_of(model):
        block.compile(backend="aot_eager")
    return model


def planned(model: Any, kind: Kind) -> Any:
    """The smallest plan, made of the model as it is written."""
    return recollect.plan(recollect.profile(model, kwargs=kind.inputs(), loss=kind.loss, timed=False), budget="min")


ORDERS: dict[str, Callable[[Any, Kind], Any]] = {
    "compiled, then applied": lambda model, kind: (call := as_a_whole(model), recollect.apply(call))[0],
    "blocks compiled, then applied": lambda model, kind: (block_by_block(model), recollect.apply(model))[0],
    "planned, then compiled": lambda model, kind: (recollect.apply(model, planned(model, kind)), as_a_whole(model))[1],
    "compiled, then planned": lambda model, kind: (
        call := as_a_whole(model),
        recollect.apply(call, planned(model, kind)),
    )[0],
}
SELDOM = ("qwen3", "llama", "gemma3", "t5", "convnext")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["vit", *(pytest.param(name, marks=pytest.mark.long) for name in SELDOM)])
def test_regions_and_plans_come_before_or_after_compilation(name: str, order: str) -> None:
    pytest.importorskip("scipy")
    kind = ZOO[name]
    model = without_the_last(kind, build(kind))
    expected, theirs = compiled_without_us(name, block_by_block if "blocks" in order else as_a_whole)
    call = ORDERS[order](model, kind)
    assert _count_graphs(kind, model, call) <= theirs
    found = take_step(kind, model, call, seed=0)
    for what, value in expected.items():
        if what != "random state":
            torch.testing.assert_close(found[what], value, msg=functools.partial("{}: {}".format, what))


@functools.cache
def compiled_without_us(name: str, compile_: Callable[[Any], Any]) -> tuple[dict[str, Any], int]:
    """A step of the plain model, compiled, and how many graphs torch's switch makes of it."""
    kind = ZOO[name]
    plain, other = (without_the_last(kind, build_plain(kind)) for _ in range(2))
    expected = take_step(kind, plain, compile_(plain), seed=0)
    torch._dynamo.reset()
    switched = compile_(other)
    switch_torchs_on(kind, other)
    graphs = _count_graphs(kind, other, switched)
    torch._dynamo.reset()
    return expected, graphs


def _count_graphs(kind: Kind, model: Any, call: Any) -> int:
    """How many graphs Dynamo makes of two steps."""
    counters.clear()
    for _ in range(2):
        take_step(kind, model, call, seed=0)
    return int(counters["stats"]["unique_graphs"])
