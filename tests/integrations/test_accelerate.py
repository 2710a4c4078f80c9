"""Accelerate: the hook, and regions before or after `prepare`."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from torch import Tensor

import recollect
from recollect.integrations.accelerate import RecollectHook
from tests.integrations.small_models import batch, build

# What Accelerate warns about is its own.
pytestmark = pytest.mark.filterwarnings("ignore")


def gradients(model: Any, **options: Any) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(**batch("mistral"), **options).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("options", [{}, {"policy": "selective"}, {"every": 2}], ids=str)
def test_the_hook_makes_regions_and_takes_them_away(options: dict[str, Any]) -> None:
    model = build("mistral")
    expected = gradients(model, use_cache=False)
    hook = RecollectHook(**options)
    add_hook_to_module(model, hook)
    assert hook.handle is not None
    assert all(map(torch.equal, gradients(model), expected))
    remove_hook_from_module(model)
    assert hook.handle is None
    assert not any("forward" in vars(layer) for layer in model.model.modules())
    assert all(map(torch.equal, gradients(model, use_cache=False), expected))


@pytest.mark.parametrize("order", ["before", "after"])
def test_regions_come_before_or_after_prepare(order: str) -> None:
    model = build("mistral")
    expected = gradients(model, use_cache=False)
    if order == "before":
        recollect.apply(model)
    prepared = Accelerator(cpu=True).prepare(model)
    if order == "after":
        recollect.apply(prepared)
    assert all(map(torch.equal, gradients(prepared), expected))


def test_fit_takes_the_prepared_optimizer_and_leaves_the_weights_as_they_were() -> None:
    model = build("mistral")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model, optimizer = Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters()))
    with recollect.fit(model, batch("mistral"), optimizer=optimizer, budget="min") as fitted:
        assert fitted.profile.optimizer == "AdamW"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
