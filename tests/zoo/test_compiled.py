"""Real models under every rule, compiled: the gradients of the plain model, up to rounding."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config

import recollect
from tests.zoo.catalogue import ZOO, Kind
from tests.zoo.known import each
from tests.zoo.stepping import RULES, build, build_plain, take_step

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


def without_the_last(kind: Kind, model: Any) -> Any:
    """Two blocks of three of one class: Dynamo traces each anew."""
    for module in list(model.modules()) if kind.has_switch else ():
        if isinstance(module, nn.ModuleList) and len(module) == 3 and len({type(block) for block in module}) == 1:
            del module[-1]
    return model


@each("compiled", rules=RULES, in_turn=True, long=SLOWEST)
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
