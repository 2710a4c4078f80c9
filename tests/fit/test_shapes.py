"""fit and varying shapes: a plan for each, and a safe one for what is larger than anything that was tried."""

import copy
import io
import logging

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._fit.shapes import PlanSwitch, covers, shapes_of

pytest.importorskip("scipy")


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))


def lose(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(0))
    return x, x.roll(1)


def find_regions(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def find_budget(rows: int, share: float = 0.7) -> int:
    x, y = batch(rows)
    return int(recollect.profile(make(), x, loss=lambda output: lose(output, y)).peak_bytes * share)


def test_shapes_cover_what_is_no_larger_in_any_dimension() -> None:
    known = shapes_of((torch.ones(2, 3),), {"mask": torch.ones(4)})
    assert covers(known, ((1, 3), (4,)))
    assert not covers(known, ((3, 3), (4,)))
    assert not covers(known, ((2, 3),))
    assert not covers(known, ((2, 3, 1), (4,)))


def test_a_number_beside_the_batch_leaves_the_plan_in_force(caplog: pytest.LogCaptureFixture) -> None:
    """As the count of targets that the Trainer of Transformers gives to each call."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = make()

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            found: Tensor = self.blocks(x).square().sum()
            return found if scale is None else found / scale

    model, x = Scaled(), batch(256)[0]
    budget = int(recollect.profile(model, x).peak_bytes * 0.85)
    with recollect.fit(model, x, budget=budget) as fitted:
        usual = find_regions(model)
        model(x, scale=torch.tensor(3)).backward()
        assert find_regions(model) == usual
        assert fitted.plan.regions
    assert not caplog.records


def test_each_batch_of_a_list_has_a_plan_that_is_in_force_when_it_comes() -> None:
    model = make()
    budget = find_budget(512)
    fitted = recollect.fit(model, [batch(512), batch(32)], loss=lose, budget=budget)
    small, large = fitted.plans
    assert not small.regions
    assert large.regions
    assert fitted.plan is large
    for rows, is_treated in ((512, True), (32, False), (16, False), (100, True), (512, True)):
        fitted.forward_backward(batch(rows))
        assert bool(find_regions(model)) == is_treated
    fitted.remove()
    assert not find_regions(model)
    assert not model._forward_pre_hooks


def test_what_is_larger_than_anything_runs_under_the_smallest_plan_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make()
    with recollect.fit(model, batch(256), loss=lose, budget=find_budget(256, 0.85)) as fitted:
        usual = find_regions(model)
        for _ in range(2):
            lose(model(batch(400)[0]), batch(400)[1]).backward()
        assert len(find_regions(model)) > len(usual)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "Sequential was called with [400, 16], larger than anything it was fitted with" in caplog.text
        lose(model(batch(200)[0]), batch(200)[1]).backward()
        assert find_regions(model) == usual
        model(batch(400)[0]).sum().backward()
    assert not find_regions(model)
    assert fitted.is_removed


def test_other_inputs_are_not_called_larger(caplog: pytest.LogCaptureFixture) -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = make()

        def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
            found: Tensor = self.blocks(x if more is None else x + more)
            return found

    model, (x, more) = Doubling(), batch(256)
    with recollect.fit(model, (x, more), budget="min"):
        model(x).sum().backward()
    assert "Doubling was called with [256, 16], other inputs than it was fitted with" in caplog.text
    assert "with the same inputs" in caplog.text


def test_calls_that_do_not_train_change_no_plan(caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    with recollect.fit(model, batch(256), loss=lose, budget=find_budget(256)):
        before = find_regions(model)
        with torch.no_grad():
            model(batch(1000)[0])
        model.eval()(batch(1000)[0])
        assert find_regions(model) == before
    assert not caplog.records


def test_gradients_are_the_same_under_any_of_the_plans() -> None:
    model, plain = make(), make()
    fitted = recollect.fit(model, [batch(512), batch(64)], loss=lose, budget=find_budget(512))
    for rows in (64, 512, 700, 64):
        fitted.forward_backward(batch(rows))
        x, y = batch(rows)
        lose(plain(x), y).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_recollect_remove_ends_it() -> None:
    model = make()
    recollect.fit(model, batch(256), loss=lose, budget=find_budget(256))
    recollect.remove(model)
    model(batch(400)[0]).sum().backward()
    assert not find_regions(model)


@pytest.mark.parametrize("how", ["removed", "fitted again"])
def test_a_fit_without_regions_ends_too(how: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    fitted = recollect.fit(model, batch(64), loss=lose, budget="1GiB")
    assert not find_regions(model)
    if how == "removed":
        recollect.remove(model)
    else:
        recollect.fit(model, batch(400), loss=lose, budget="1GiB")
    assert fitted.is_removed
    model(batch(400)[0]).sum().backward()
    assert not find_regions(model)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_copies_of_the_model_have_no_switch(caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    with recollect.fit(model, batch(256), loss=lose, budget=find_budget(256)):
        twin = copy.deepcopy(model)
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        loaded = torch.load(saved, weights_only=False)
        for other in (twin, loaded):
            other(batch(400)[0]).sum().backward()
            (hook,) = other._forward_pre_hooks.values()
            assert isinstance(hook, PlanSwitch)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_micro_batches_are_for_one_batch() -> None:
    with pytest.raises(
        ValueError, match="lever 'micro_batches' works with one batch, but 2 were given: pass the largest"
    ):
        recollect.fit(make(), [batch(8), batch(4)], loss=lose, budget="min", levers={"micro_batches"})


def test_regions_of_a_plan_wait_for_their_shapes_and_are_not_made_anew() -> None:
    model = make()
    fitted = recollect.fit(model, [batch(512), batch(448)], loss=lose, budget=find_budget(512, 0.55))

    def standing(rows: int) -> list[object]:
        fitted.forward_backward(batch(rows))
        return [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]

    first = [standing(rows) for rows in (448, 512, 1024)]
    again = [standing(rows) for rows in (448, 512, 1024)]
    assert all(map(bool, first))
    for one, other in zip(first, again, strict=True):
        assert all(left is right for left, right in zip(one, other, strict=True))
    fitted.remove()
    assert not find_regions(model)
