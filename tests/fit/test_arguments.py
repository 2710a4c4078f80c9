"""fit and arguments that cannot work: refused before anything runs, with what to write instead; interrupts."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import recollect

pytest.importorskip("scipy")

X = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))


class Calls:
    """A number that stays as it is, as an attribute of a module would not."""

    count = 0


class Counted(nn.Module):
    """Counts its calls, and may be interrupted in one."""

    def __init__(self, interrupted_at: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))
        self.calls = Calls()
        self.interrupted_at = interrupted_at

    def forward(self, x: Tensor) -> Tensor:
        self.calls.count += 1
        if self.calls.count == self.interrupted_at:
            raise KeyboardInterrupt
        result: Tensor = self.blocks(x)
        return result


@pytest.mark.parametrize("budget", ["1KiB", "min", "fastest"])
def test_a_step_that_never_calls_the_model_is_refused(budget: str) -> None:
    model, other = nn.Sequential(Counted()), nn.Sequential(Counted())
    with pytest.raises(ValueError, match="never called") as caught:
        recollect.fit(model, X, step=lambda x: other(x).sum(), budget=budget)
    assert str(caught.value) == (
        "step=<lambda> never called the Sequential that recollect.fit was given, nor any module in it: it runs another "
        "model, or a copy.\nPass the model that the step runs, or let the step run this Sequential"
    )


def test_a_step_may_call_a_part_of_the_model_or_a_model_without_parts() -> None:
    parts = nn.Sequential(Counted(), Counted())
    recollect.fit(parts, X, step=lambda x: parts[1](x).sum(), budget="fastest").remove()
    whole = nn.Linear(16, 16)
    recollect.fit(whole, X, step=lambda x: whole(x).sum(), budget="fastest").remove()


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"budget": 3e9}, TypeError, "budget 3000000000.0: expected bytes as a whole number"),
        ({"budget": "plenty"}, ValueError, "budget 'plenty': expected bytes"),
        ({"loss": "mse"}, TypeError, "loss='mse': expected a function, not str"),
        ({"step": 3}, TypeError, "step=3: expected a function, not int"),
        ({"step": print, "loss": print}, ValueError, "pass either step= or loss="),
        ({"batch": (part for part in [X])}, TypeError, "batch is a generator, which recollect.fit would use up: pass"),
        ({"batch": X.to("meta")}, ValueError, r"batch has a tensor \[256, 16\] on meta, but Counted is on cpu: move"),
        ({"budget": 0}, ValueError, "budget 0: a step needs more than nothing"),
        ({"budget": "0%"}, ValueError, "budget '0%': a step needs more than nothing"),
        ({"loss": nn.MSELoss}, TypeError, r"loss=MSELoss is a class: pass an instance, as in loss=MSELoss\(\)"),
        ({"step": print, "recover": True}, ValueError, "recover=True is for Fitted.forward_backward, but step= runs"),
        ({"batch": []}, ValueError, "batch is an empty list: pass what one step is called with"),
        ({"batch": {}}, ValueError, "batch is an empty dict: pass what one step is called with"),
        ({"batch": TensorDataset(X)}, TypeError, "batch is a TensorDataset, .*: pass a DataLoader of it, or one batch"),
        (
            {"batch": {"x": X, "row": 3}},
            ValueError,
            r"Counted.forward\(x\) cannot be called .*: it does not take 'row'",
        ),
        ({"model": nn.Linear}, TypeError, "a torch.nn.Module first, not the class Linear: pass an instance"),
        (
            {"model": nn.Linear(2, 2, device="meta")},
            ValueError,
            "has to run Linear, which is on the meta device, .*: load it first",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(given: dict[str, Any], error: Any, text: str) -> None:
    model = Counted()
    options: dict[str, Any] = {"model": model, "batch": X, "budget": "1GiB"} | given
    with pytest.raises(error, match=text):
        recollect.fit(options.pop("model"), **options)
    assert not model.calls.count


def test_a_model_with_regions_is_refused_by_the_name_of_one() -> None:
    model = Counted()
    fitted = recollect.fit(model, X, budget="min")
    with pytest.raises(ValueError, match=r"'blocks.0' of Counted is already a region, from recollect.apply or"):
        recollect.fit(model, X, budget="min")
    fitted.remove()
    recollect.fit(model, X, budget="min").remove()


def test_without_a_batch_the_error_says_so() -> None:
    with pytest.raises(TypeError, match="missing 1 required") as caught:
        recollect.fit(Counted(), budget="min")
    assert "recollect.fit was given no batch for Counted.forward(x): pass one" in caught.value.__notes__


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (
            {"step": lambda x: None},
            ValueError,
            "step=<lambda> ran no backward and returned no loss to run it on: call",
        ),
        ({"loss": lambda output: None}, ValueError, "loss= returned None, which has no graph behind it: expected"),
        ({"loss": lambda output: output.sum().item()}, ValueError, "loss= returned a float, .*: expected a tensor"),
    ],
)
def test_a_step_without_a_loss_is_refused_with_what_to_return(given: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        recollect.fit(Counted(), X, budget="1GiB", **given)


def test_a_step_of_a_frozen_model_is_refused_with_what_to_unfreeze() -> None:
    model = Counted().requires_grad_(requires_grad=False)
    with pytest.raises(ValueError, match="no loss to run it on, because all parameters of Counted are frozen"):
        recollect.fit(model, X, step=lambda x: model(x).sum(), budget="1GiB")


def test_a_model_that_fails_on_a_batch_of_another_class_says_how_it_was_called() -> None:
    with pytest.raises(TypeError) as caught:
        recollect.fit(Counted(), X.numpy(), budget="1GiB")
    assert "gave Counted.forward(x) the whole batch, a ndarray: if it does not take that, pass a tensor" in str(
        caught.value.__notes__
    )


def test_an_optimizer_of_another_model_is_told_of_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = Counted(), torch.optim.SGD(Counted().parameters())
    with (
        caplog.at_level(logging.WARNING, logger="recollect"),
        recollect.fit(model, X, budget="1GiB", optimizer=optimizer),
    ):
        assert "SGD has no parameter of Counted" in caplog.text


def test_a_model_in_eval_mode_is_fitted_and_the_log_says_that_training_may_take_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "recollect"):
        recollect.fit(Counted().eval(), X, budget="min").remove()
    assert "Counted is in eval mode, and is fitted that way" in caplog.text


@pytest.mark.parametrize("call", [1, 2, 4, 5, 6, 8])
def test_an_interrupt_leaves_everything_as_it_was(call: int) -> None:
    model = Counted(call)
    values, generator = [one.clone() for one in model.parameters()], torch.get_rng_state()
    entries = [sorted(vars(module)) for module in model.modules()]
    with pytest.raises(KeyboardInterrupt):
        recollect.fit(model, X, budget="min")
    assert model.calls.count == call
    assert all(map(torch.equal, values, model.parameters()))
    assert torch.equal(generator, torch.get_rng_state())
    assert all(one.grad is None for one in model.parameters())
    assert entries == [sorted(vars(module)) for module in model.modules()]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_interrupt_after_the_last_run_leaves_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    from recollect._fit.shapes import PlanSwitch

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PlanSwitch, "start", interrupt)
    model = Counted()
    with pytest.raises(KeyboardInterrupt):
        recollect.fit(model, X, budget="min")
    assert not any("forward" in vars(module) for module in model.modules())
