import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._core.calls import Category
from recollect._core.torch_private.dispatch import DispatchMode
from recollect._core.torch_private.fake import is_fake
from recollect._profile.dry.roofline import find_device
from recollect._profile.dry.step import dry_step
from recollect._profile.optimizer import Shadow, shadow_of, with_shadow_steps, without_steps

SIZE = 4 * (64 * 64 + 64)  # bytes of the model below


class Watch(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = str(func)
        if name.startswith("aten.") and "lift_fresh" not in name:
            self.ops.append(name)
        return func(*args, **kwargs)


def trained() -> nn.Linear:
    model = nn.Linear(64, 64)
    model(torch.randn(2, 64)).sum().backward()
    return model


def large(states: Iterable[Tensor]) -> int:
    return sum(state.nbytes for state in states if state.dim())


@pytest.mark.parametrize(
    ("kind", "slots"),
    [
        (torch.optim.AdamW, 2),
        (torch.optim.Adam, 2),
        (torch.optim.NAdam, 2),
        (torch.optim.RMSprop, 1),
        (torch.optim.Adagrad, 1),
        (torch.optim.SGD, 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p, fused=True), 2),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
    ],
)
def test_state_is_what_the_optimizers_own_code_makes(kind: Any, slots: int) -> None:
    model = trained()
    optimizer = kind if isinstance(kind, type) else kind(model.parameters())
    with shadow_of(optimizer, model.parameters(), on_cuda=True) as shadow:
        assert large(shadow.states) == slots * SIZE
        assert all(state.is_meta or is_fake(state) or not state.dim() for state in shadow.states)
        assert shadow.notes == []


def test_on_cuda_all_tensors_are_taken_at_once_by_default() -> None:
    model = trained()
    with shadow_of(torch.optim.AdamW, model.parameters(), on_cuda=True) as shadow:
        shadow.step(watch := Watch())
    reads = "aten._local_scalar_dense.default"  # of how many steps were made, which is a number of the host's
    assert {op for op in watch.ops if not op.startswith("aten._foreach_")} <= {reads}
    assert "aten._foreach_sqrt.default" in watch.ops
    with shadow_of(torch.optim.AdamW, model.parameters(), on_cuda=False) as shadow:
        shadow.step(watch := Watch())
    assert not any(op.startswith("aten._foreach_") for op in watch.ops)


@pytest.mark.parametrize(
    ("options", "op"), [({"fused": True}, "aten._fused_adamw_.default"), ({"foreach": False}, "aten.addcdiv_.default")]
)
def test_options_of_an_instance_hold(options: dict[str, Any], op: str) -> None:
    model = trained()
    with shadow_of(torch.optim.AdamW(model.parameters(), **options), (), on_cuda=True) as shadow:
        shadow.step(watch := Watch())
    assert op in watch.ops


def test_nothing_of_a_real_step_changes() -> None:
    model = trained()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    before = copy.deepcopy((optimizer.state_dict(), model.state_dict(), model.weight.grad))
    attributes = dict(vars(optimizer))
    with shadow_of(optimizer, (), on_cuda=True) as shadow:
        shadow.step()
    assert vars(optimizer) == attributes
    assert calls == []
    state, values, gradient = before
    assert torch.equal(model.weight.grad, gradient)  # type: ignore[arg-type]
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], state["state"][0]["exp_avg"])
    assert optimizer.state_dict()["state"][0]["step"] == 1


def test_fakes_of_a_real_step_name_what_they_stand_for() -> None:
    model = trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    with shadow_of(optimizer, (), on_cuda=True) as shadow:
        real = {id(other) for _, other in shadow.pairs()}
        fakes = [fake for fake, _ in shadow.pairs()]
    wanted = [model.weight, model.bias, model.weight.grad, model.bias.grad]
    wanted += [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    assert real == {id(tensor) for tensor in wanted}
    assert all(fake.is_meta or is_fake(fake) or not fake.dim() for fake in fakes)
    assert {id(state) for state in shadow.states} <= {id(fake) for fake in fakes}


def test_in_a_dry_step_it_steps_on_the_parameters_that_are_fake() -> None:
    model = nn.Linear(64, 64)
    with dry_step([model], torch.ones(2, 64), device=find_device("H200")) as dry:
        model(dry.values).sum().backward()
        with shadow_of(torch.optim.AdamW, model.parameters(), on_cuda=True) as shadow:
            assert list(shadow.pairs()) == []
            assert large(shadow.states) == 2 * SIZE
            assert model.weight.grad is not None
            shadow.step(watch := Watch())
    assert "aten._foreach_addcdiv_.ScalarList" in watch.ops
    assert model.weight.grad is None


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(requires_grad=False)


def test_frozen_parameters_have_no_state() -> None:
    with shadow_of(torch.optim.AdamW, Frozen().parameters(), on_cuda=True) as shadow:
        assert large(shadow.states) == 2 * SIZE


class Custom(torch.optim.Optimizer):
    """Keeps a moment in 8 bits, and asks for the value of a tensor."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("moment", torch.zeros_like(parameter, dtype=torch.int8))
                if parameter.grad.norm().item() > 1:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


def test_classes_of_the_user_run_their_own_code() -> None:
    model = trained()
    with shadow_of(Custom, model.parameters(), on_cuda=True) as shadow:
        shadow.step(watch := Watch())
        assert large(shadow.states) == SIZE // 4
    assert "aten.add_.Tensor" in watch.ops
    assert model.weight.grad is not None


class AdamW8bit(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError("on CUDA only")


def test_what_cannot_step_is_counted_by_its_name_and_said() -> None:
    with shadow_of(AdamW8bit, trained().parameters(), on_cuda=True) as shadow:
        shadow.step()
        assert large(shadow.states) == 2 * SIZE // 4
        (said,) = shadow.notes
        assert said == (
            "the state of AdamW8bit is counted as 2 tensors for each parameter, going by its name, and its step "
            "is left out: it could not step on fake tensors: on CUDA only"
        )
    with shadow_of(torch.optim.LBFGS, trained().parameters(), on_cuda=True) as shadow:
        assert shadow.states == []
        assert shadow.notes[0].startswith(
            "the state of LBFGS is taken as 0, and its step is left out: it could not step"
        )


def test_an_optimizer_of_a_dry_step_that_cannot_step_is_noted() -> None:
    model = trained()
    optimizer = AdamW8bit(model.parameters())
    with dry_step([model], (), device=find_device("H200"), optimizers=[optimizer]) as dry:
        assert "the state of AdamW8bit is not counted from the start: on CUDA only" in dry.notes


def test_steps_of_a_real_step_write_nothing_real() -> None:
    model = trained()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    attributes = dict(vars(optimizer))
    shadows: list[Shadow] = []

    def follow(shadow: Shadow) -> None:
        shadows.append(shadow)
        with watch_above:
            shadow.step()

    with Watch() as watch, with_shadow_steps(optimizer, follow, on_cuda=True):
        watch_above = Watch()
        model(torch.ones(2, 64)).sum().backward()
        here = len(watch.ops)
        optimizer.step()
        assert watch.ops[here:] == []  # what is below sees nothing of it
        optimizer.zero_grad()
    assert len(shadows) == 1
    assert len(list(shadows[0].pairs())) == 2 + 2 + 6
    assert dict(vars(optimizer)) == attributes
    values, state = before
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    assert optimizer.state_dict()["state"][0]["step"] == state["state"][0]["step"]
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], state["state"][0]["exp_avg"])


def test_steps_with_a_closure_are_real_ones() -> None:
    model = trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.clone()
    shadows: list[Shadow] = []
    with with_shadow_steps(optimizer, shadows.append, on_cuda=True):
        optimizer.step(lambda: 3.0)
    assert shadows == []
    assert not torch.equal(model.weight, before)


def test_the_optimizers_own_step_is_there_again_after_an_error() -> None:
    optimizer = torch.optim.SGD(trained().parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step of its own there
    step = vars(optimizer)["step"]
    with pytest.raises(KeyError, match="mine"), with_shadow_steps(optimizer, lambda _: None, on_cuda=True):
        raise KeyError("mine")
    assert vars(optimizer)["step"] is step


class Around(torch.optim.Optimizer):
    """Has another optimizer do its work, and keeps one more tensor for each parameter."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        found = self.inner.step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("slow", parameter.detach().clone())
        return found


class Passing(torch.optim.Optimizer):
    """Passes everything on, as Accelerate's does; has no parameters of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


@pytest.mark.parametrize(("around", "slots"), [(Around, 3), (Passing, 2), (lambda inner: Passing(Around(inner)), 3)])
@pytest.mark.parametrize("way", ["optimizer=", "in the step", "dry"])
def test_an_optimizer_around_another_leaves_everything_as_it_was_and_counts_all_states(
    around: Any, slots: int, way: str
) -> None:
    model, x = nn.Linear(64, 64), torch.randn(2, 64)
    before = copy.deepcopy(model.state_dict())
    inner = torch.optim.AdamW(model.parameters())
    outer = around(inner)

    def step() -> None:
        model(x).sum().backward()
        outer.step()

    if way == "optimizer=":
        seen = recollect.profile(model, x, optimizer=outer)
    else:
        seen = recollect.profile(step, dry=way == "dry")
    counted = (s for s in seen.storages if s.category is Category.OPTIMIZER and s.made_at is None)
    assert sum(s.bytes for s in counted if s.bytes > 64) == slots * SIZE
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not inner.state
    assert not outer.state


@pytest.mark.parametrize("around", ["dry", "shadow", "none"])
def test_schedulers_take_the_step_that_stands_in_for_the_optimizers_own_for_it(around: str) -> None:
    model = trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)  # warns if it finds another step

    def step() -> None:
        optimizer.step()
        scheduler.step()

    if around == "dry":
        with dry_step([model], (), device=find_device("cpu"), optimizers=[optimizer]):
            step()
    else:
        standing_in = without_steps(optimizer) if around == "none" else None
        with standing_in or with_shadow_steps(optimizer, lambda shadow: shadow.step(), on_cuda=False):
            step()
