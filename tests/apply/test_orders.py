"""Before or after torch.compile, parallel wrappers and freezing: the same names, the same regions."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import Decision
from tests.models import GPT, Block

# Dynamo itself reads it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

TOKENS = torch.arange(12).reshape(2, 6)
RULES = {"layers.*": Decision.RECOMPUTE}

runs = [0]


@torch.library.custom_op("recollect_tests::count_run", mutates_args=())
def count_run(x: Tensor) -> Tensor:
    runs[0] += 1
    return x.clone()


count_run.register_fake(lambda x: x.clone())
count_run.register_autograd(lambda ctx, gradient: gradient)


class Counted(nn.Module):
    """Counts its runs in compiled code too."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = count_run(x)
        return result


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build() -> GPT:
    torch.manual_seed(0)
    model = GPT(layers=2, dropout=0.0)
    for layer in model.layers:
        layer.mlp.insert(0, Counted())  # type: ignore[union-attr, operator]
    return model


def step(model: Any, source: nn.Module) -> tuple[int, list[Tensor]]:
    """How often the counters ran, and the gradients."""
    runs[0] = 0
    source.zero_grad()
    model(TOKENS).square().sum().backward()
    return runs[0], [p.grad.clone() for p in source.parameters() if p.grad is not None]


def compile_whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def compile_in_place(model: nn.Module) -> Any:
    model.compile(backend="aot_eager")
    return model


def compile_blocks_in_place(model: GPT) -> Any:
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


def compile_blocks(model: GPT) -> Any:
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend="aot_eager")  # type: ignore[assignment]
    return model


COMPILERS: list[Callable[[GPT], Any]] = [compile_whole, compile_in_place, compile_blocks_in_place, compile_blocks]


@pytest.mark.parametrize("order", ["before", "after", "after a step"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_order_of_apply_and_compile_does_not_matter(compiler: Callable[[GPT], Any], order: str) -> None:
    model = build()
    _, expected = step(model, model)
    if order == "before":
        recollect.apply(model, RULES)
    compiled = compiler(model)
    if order == "after a step":
        assert step(compiled, model)[0] == 2
    if order != "before":
        handle = recollect.apply(compiled, RULES)
        assert [place.name for place in handle.places] == [f"layers.{n}" for n in range(2)]
    for _ in range(2):
        count, found = step(compiled, model)
        assert count == 4
        assert all(map(torch.equal, found, expected))
    recollect.remove(compiled)
    assert step(compiled, model)[0] == 2


def test_a_part_of_a_compiled_module_cannot_be_kept() -> None:
    model = compile_blocks(build())
    with pytest.raises(ValueError, match=r"(?s)module 'attn' of 'layers.0' cannot be kept: 'layers.0' is compiled"):
        recollect.apply(model, {Block: Decision.RECOMPUTE, "layers.*.attn": Decision.SAVE})


def test_names_are_those_without_wrappers() -> None:
    model = build()
    model.layers[1] = torch.compile(model.layers[1], backend="eager")  # type: ignore[assignment]
    whole = torch.compile(model, backend="eager")
    handle = recollect.apply(whole, {"layers.*": Decision.RECOMPUTE})  # type: ignore[arg-type]
    assert [(place.name, place.class_name) for place in handle.places] == [(f"layers.{n}", "Block") for n in range(2)]


def test_freezing_before_or_after_does_not_matter() -> None:
    expected: list[Tensor] = []
    for order in ("plain", "before", "after"):
        model = build()
        if order == "before":
            recollect.apply(model, RULES)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        if order == "after":
            recollect.apply(model, RULES)
        _, found = step(model, model)
        expected = expected or found
        assert len(found) == 10
        assert all(map(torch.equal, found, expected))


def test_a_copy_made_before_compiling_stays_plain() -> None:
    model = build()
    plain = copy.deepcopy(model)
    recollect.apply(compile_in_place(model), RULES)
    assert step(plain, plain)[0] == 2
