"""`install`: code that calls torch's functions runs on our engine, unedited, and is itself again after `uninstall`."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint_activation
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs_wrappers
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import CheckpointError, GraphExecGroup, checkpoint

import recollect
from recollect import compat
from recollect.compat.composable import checkpoint as composable_checkpoint

ORIGINALS = {name: id(getattr(torchs, name)) for name in torchs.__all__}
held = functools.partial(checkpoint, use_reentrant=False)


class Holder:
    """A library's object that keeps the function."""

    def __init__(self) -> None:
        self.fn = checkpoint


def positional_default(x: Tensor, run: Any = checkpoint) -> Any:
    return run(block, x, use_reentrant=False)


def closed_over() -> Callable[[Tensor], Any]:
    run = checkpoint
    return lambda x: run(block, x, use_reentrant=False)


class OfClass:
    fn: Any = checkpoint


holder, closure = Holder(), closed_over()
seen: list[bool] = []


def block(x: Tensor) -> Tensor:
    seen.append(recollect.is_recomputing())
    return x.sin().cos()


@pytest.fixture(autouse=True)
def as_found() -> Iterator[None]:
    seen.clear()
    yield
    compat.uninstall()
    assert {name: id(getattr(torchs, name)) for name in torchs.__all__} == ORIGINALS
    assert id(checkpoint) == ORIGINALS["checkpoint"]


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "the attribute of the module": lambda x: torchs.checkpoint(block, x, use_reentrant=False),
    "a name imported from it": lambda x: checkpoint(block, x, use_reentrant=False),
    "a partial": lambda x: held(block, x),
    "an attribute of an object": lambda x: holder.fn(block, x, use_reentrant=False),
    "an attribute of a class": lambda x: OfClass.fn(block, x, use_reentrant=False),
    "a default argument": positional_default,
    "a closure": closure,
    "a sequence": lambda x: torchs.checkpoint_sequential([block, torch.sin], 2, x, use_reentrant=False),
    "the reentrant engine": lambda x: checkpoint(block, x, use_reentrant=True),
    "torch's context_fn": lambda x: checkpoint(block, x, use_reentrant=True, context_fn=torchs.noop_context_fn),
}


def recomputing_calls() -> dict[str, list[bool]]:
    """For each way to call it: whether the library recomputed, in forward and in backward."""
    found = {}
    for name, call in CALLS.items():
        seen.clear()
        call(torch.ones(2, requires_grad=True)).sum().backward()
        found[name] = seen.copy()
    return found


def test_calls_go_to_our_engine_wherever_the_function_is_held() -> None:
    compat.install()
    assert recomputing_calls() == {key: [False, True] for key in CALLS}
    compat.uninstall()
    assert recomputing_calls() == {key: [False, False] for key in CALLS}


def test_what_torch_has_begun_torch_finishes() -> None:
    y = checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False)
    with compat.install():
        y.sum().backward()
    assert seen == [False, False]
    with compat.install():
        y = checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False)
    y.sum().backward()
    assert seen == [False, False, False, True]


def test_it_undoes_itself_at_the_end_of_a_block_and_once_is_enough() -> None:
    with compat.install() as first:
        assert compat.install() is first
        assert not first.is_removed
    assert first.is_removed
    compat.uninstall()
    assert compat.install() is not first


def test_after_remove_it_can_be_installed_again() -> None:
    first = compat.install()
    first.remove()
    second = compat.install()
    first.remove()
    assert not second.is_removed
    checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [False, True]


def test_errors_are_caught_by_torchs_class_only_while_it_is_installed() -> None:
    def mismatch() -> None:
        sizes = [2]
        y = checkpoint(
            lambda x: (x * torch.ones(sizes[0])).exp(), torch.ones(2, requires_grad=True), use_reentrant=False
        )
        sizes[0] = 1
        y.sum().backward()

    with compat.install(), pytest.raises(CheckpointError) as caught:
        mismatch()
    assert isinstance(caught.value, recollect.MismatchError)
    assert not issubclass(recollect.CheckpointError, CheckpointError)
    with pytest.raises(CheckpointError):
        mismatch()


def test_wrappers_are_ours_and_count_as_torchs() -> None:
    with compat.install():
        wrapped = torchs_wrappers.checkpoint_wrapper(nn.Linear(2, 2))
        assert isinstance(wrapped, compat.CheckpointWrapper)
        assert isinstance(wrapped, torchs_wrappers.CheckpointWrapper)
        assert isinstance(wrapped, torchs_wrappers.ActivationWrapper)
        assert not isinstance(wrapped, torchs_wrappers.OffloadWrapper)
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        torchs_wrappers.apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Linear))
        assert isinstance(model[0], compat.CheckpointWrapper)
    theirs = torchs_wrappers.checkpoint_wrapper(nn.Linear(2, 2))
    assert not isinstance(theirs, compat.CheckpointWrapper)
    with compat.install():
        assert isinstance(theirs, torchs_wrappers.CheckpointWrapper)


def test_the_composable_api_is_ours() -> None:
    layer = nn.Linear(2, 2)
    with compat.install():
        torchs: Any = checkpoint_activation.checkpoint
        torchs(layer)
        assert torchs.state(layer) is composable_checkpoint.state(layer) is not None
    layer(torch.ones(1, 2)).sum().backward()


def test_groups_and_policies_go_with_the_engine() -> None:
    def keep(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        policies = torchs.CheckpointPolicy
        return policies.MUST_SAVE if op == torch.ops.aten.sin.default else policies.PREFER_RECOMPUTE

    with compat.install():
        contexts = functools.partial(torchs.create_selective_checkpoint_contexts, keep)
        x = torch.ones(2, requires_grad=True)
        checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum().backward()
        assert torch.equal(x.grad, -x.sin().sin() * x.cos())  # type: ignore[arg-type]
        seen.clear()
        a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        y = checkpoint(lambda a, b: block(a) * b, a, b, use_reentrant=False).sum()
        with torchs.GraphExecGroup():
            y.backward(inputs=[b], retain_graph=True)
            y.backward(inputs=[a])
        assert seen == [False, True]
        assert issubclass(torchs.GraphExecGroup, compat.GraphExecGroup)
    assert torchs.GraphExecGroup is GraphExecGroup


def test_compiled_code_holds_regions_of_ours() -> None:
    graphs: list[str] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph

    def step(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(torch.sin, x, use_reentrant=False).sum()
        return result

    for word in ("recollect_region", "tag_activation_checkpoint"):
        torch.compiler.reset()
        if word == "recollect_region":
            compat.install()
        torch.compile(step, backend=backend, fullgraph=True)(torch.ones(2, requires_grad=True)).backward()
        compat.uninstall()
        assert word in graphs.pop()


@pytest.mark.filterwarnings("ignore")
def test_the_switch_of_transformers_uses_our_engine_enabled_before_or_after() -> None:
    from tests.integrations.small_models import batch, build

    for order in ("before", "after"):
        model = build("llama")
        if order == "before":
            model.gradient_checkpointing_enable()
        with compat.install():
            if order == "after":
                model.gradient_checkpointing_enable()
            seen.clear()
            for layer in model.model.layers:
                layer.mlp.register_forward_pre_hook(lambda *_: seen.append(recollect.is_recomputing()))
            model(**batch("llama")).loss.backward()
            assert seen == [False] * 4 + [True] * 4
        assert all(
            id(layer._gradient_checkpointing_func.func) == ORIGINALS["checkpoint"] for layer in model.model.layers
        )
