"""A profiled step leaves everything as it was found, whatever the step does, and also if it fails."""

import gc
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect._core.calls import Phase
from recollect._core.scope import watcher
from recollect._core.torch_private.dispatch import DispatchMode
from recollect._core.torch_private.fake import is_fake
from tests.inspect.states import assert_same, state_of


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


X = torch.linspace(-1, 1, 128).reshape(8, 16)


class Stateful(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x.mul_(1.5)
        noise = random.random() + np.random.rand()
        total: Tensor = (self.layers(x) * noise).sum()
        return total


class FailureError(Exception):
    pass


class FailAt(DispatchMode):
    """Raises at one operator."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self.left = left

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.left -= 1
        if self.left < 0:
            raise FailureError
        return func(*args, **kwargs)


@pytest.mark.parametrize("has_gradients", [False, True])
def test_everything_is_as_it_was_found(has_gradients: bool) -> None:
    torch.manual_seed(0)
    model, x = Stateful(), torch.randn(8, 4)
    if has_gradients:
        model(x.clone()).backward()
    before, given = state_of(model), x.clone()
    recollect.profile(model, x)
    assert_same(state_of(model), before)
    assert torch.equal(x, given)


@pytest.mark.parametrize("at", range(0, 100, 3))
def test_everything_is_as_it_was_found_after_a_failure_at_any_operator(at: int) -> None:
    torch.manual_seed(0)
    model, x = Stateful(), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(x.clone()).backward()
    optimizer.step()

    def step() -> None:
        with FailAt(at):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
        raise FailureError

    before, given = state_of(model, optimizer), x.clone()
    with pytest.raises(FailureError):
        recollect.profile(step)
    assert_same(state_of(model, optimizer), before)
    assert torch.equal(x, given)
    assert watcher.get() is None


# Ways to change a model that no operator shows.


def by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.data - 0.1 * parameter.grad


def by_set(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.set_(parameter - 0.1 * parameter.grad)  # type: ignore[call-overload]


def by_dtype(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def by_flags(model: nn.Module) -> None:
    model.eval()
    model.requires_grad_(requires_grad=False)


def by_other_parameters(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.zeros(32, 16))  # type: ignore[index, union-attr, unused-ignore]


@pytest.mark.parametrize("change", [by_data, by_set, by_dtype, by_flags, by_other_parameters])
def test_a_step_may_change_the_model_in_any_way(change: Callable[[nn.Module], None]) -> None:
    model = mlp()

    def step() -> None:
        model(X).sum().backward()
        change(model)

    before = state_of(model)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    recollect.profile(step)
    assert_same(state_of(model), before)
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert model._non_persistent_buffers_set == set()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.01),
}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_of_all_kinds_are_as_they_were(kind: str, steps_before: int) -> None:
    model = mlp()
    optimizer = OPTIMIZERS[kind](model.parameters())

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(X).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(steps_before):
        optimizer.step(closure)
    before = state_of(model, optimizer)
    found = recollect.profile(lambda: optimizer.step(closure))
    assert_same(state_of(model, optimizer), before)
    assert {call.phase for call in found.calls} == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    assert found.saved


def test_an_optimizer_that_raises_does_not_make_later_calls_its_own() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise FailureError

    model = mlp()
    optimizer = Failing(model.parameters(), lr=0.1)

    def step() -> None:
        model(X).sum().backward()
        with pytest.raises(FailureError):
            optimizer.step()
        model(X).sum().backward()

    assert {call.phase for call in recollect.profile(step).calls} == {Phase.FORWARD, Phase.BACKWARD}


def test_sparse_gradients_are_as_they_were() -> None:
    table = nn.Embedding(50, 8, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    before = table.weight.grad
    assert before is not None
    values = before.to_dense()
    recollect.profile(lambda: table(torch.tensor([4, 5])).sum().backward())
    assert table.weight.grad is before
    assert torch.equal(before.to_dense(), values)


def test_generators_of_modules_are_as_they_were() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.generator = nn.Linear(16, 16), torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            noisy: Tensor = self.layer(x) * torch.rand(16, generator=self.generator)
            return noisy

    model = Noisy()
    before = model.generator.get_state()
    recollect.profile(model, X)
    assert torch.equal(model.generator.get_state(), before)


def test_what_functions_that_the_step_calls_work_with_is_found() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    model(X).sum().backward()

    def inner() -> None:
        optimizer.zero_grad()
        model(X).sum().backward()
        optimizer.step()

    def step() -> None:
        inner()

    before = state_of(model, optimizer)
    found = recollect.profile(step)
    assert_same(state_of(model, optimizer), before)
    assert "0.weight" in {storage.name for storage in found.storages}


def test_lazy_modules_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"parameter '0\.weight' of Sequential is lazy: the first call") as caught:
        recollect.profile(nn.Sequential(nn.LazyLinear(8)), X)
    assert "Call the model once before you profile it" in str(caught.value)


def test_a_graph_made_before_can_run_after() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(X).sum()

    def step() -> None:
        model(X).sum().backward()
        optimizer.step()

    recollect.profile(step)
    loss.backward()


class SetsUp(nn.Module):
    """Sets itself up at its first forward, as models of Transformers do, and knows by a flag that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.activation = nn.Linear(16, 16), nn.Module()
        self.is_set_up = False
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set_up:
            self.is_set_up = True
            self.layer.register_forward_hook(lambda *_: self.seen.append(x))
            self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)
            self.activation = nn.Tanh()  # as BigBird takes full attention if its first input is short
        total: Tensor = (self.activation(self.layer(x)) * self.scale).sum()
        return total


@pytest.mark.parametrize("dry", [False, True])
def test_what_a_first_forward_sets_up_works_afterwards(dry: bool) -> None:
    model, other = SetsUp(), SetsUp()
    other.load_state_dict(model.state_dict())
    recollect.profile(model, X, dry=dry)
    model.seen.clear()
    assert torch.equal(model(X), other(X))
    assert len(model.seen) == len(other.seen) == 1
    assert len(model.layer._forward_hooks) == 1


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("dry", [False, True])
def test_schedulers_and_scalers_are_as_they_were(dry: bool, steps_before: int) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(X).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    def state() -> tuple[object, ...]:
        return scheduler.last_epoch, scheduler.get_last_lr(), scaler.get_scale(), scaler._get_growth_tracker()

    for _ in range(steps_before):
        step()
    before = state()
    recollect.profile(step, dry=dry)
    assert state() == before
    step()
    assert scheduler.last_epoch == steps_before + 1
    assert all(not is_fake(p.grad) for p in model.parameters() if p.grad is not None)


class Bank:
    """What a model or a step remembers from one step to the next, in an object of no special kind."""

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self.all: list[tuple[Tensor, str]] = []


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bank = nn.Linear(16, 4), Bank()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        self.bank.last = found.detach()
        return found


_last: Tensor | None = None


@pytest.mark.parametrize("dry", [False, True])
def test_what_a_step_keeps_in_objects_of_the_users_is_as_it_was(dry: bool) -> None:
    model, bank, kept = Remembering(), Bank(), torch.zeros(())
    states: dict[str, Any] = {"hidden": X, "of parts": {}}
    losses: deque[Tensor] = deque(maxlen=4)
    seen: set[Tensor] = set()

    def step() -> None:
        nonlocal kept
        global _last  # noqa: PLW0603 (as in a notebook)
        loss = model(states["hidden"]).sum()
        loss.backward()
        states["hidden"], states["new"] = states["hidden"] * 2, [loss]
        states["of parts"]["first"] = kept = _last = bank.last = loss.detach()
        bank.all.append((kept, "loss"))
        losses.append(loss)
        seen.add(loss)

    before = kept
    recollect.profile(step, dry=dry)
    assert states == {"hidden": X, "of parts": {}}
    assert kept is before
    assert _last is bank.last is None
    assert bool(dry) is (model.bank.last is None)  # modules stay as a real step leaves them
    assert all(bool(log) is not dry for log in (bank.all, losses, seen))


def test_an_optimizer_that_steps_in_every_second_run_changes_nothing() -> None:
    model, count = mlp(), [0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        model(X).sum().backward()
        count[0] += 1
        if not count[0] % 2:
            optimizer.step()
            optimizer.zero_grad()

    before = state_of(model, optimizer)
    recollect.profile(step)
    assert count[0] > 1
    assert_same(state_of(model, optimizer), before)


def test_hooks_that_a_first_step_sets_up_keep_the_flag_that_says_so() -> None:
    model, bank = mlp(), Bank()
    bank.is_set_up = False  # type: ignore[attr-defined]

    def step() -> None:
        if not bank.is_set_up:  # type: ignore[attr-defined]
            model[0].register_forward_hook(lambda *_: None)
            bank.is_set_up = True  # type: ignore[attr-defined]
        model(X).sum().backward()

    recollect.profile(step)
    step()
    assert len(model[0]._forward_hooks) == 1


def test_what_a_step_adds_to_a_model_at_each_run_is_there_once() -> None:
    model = mlp()

    def step() -> None:
        model[0].register_forward_hook(lambda *_: None)
        model(X).sum().backward()

    recollect.profile(step)
    assert len(model[0]._forward_hooks) == 1


def test_an_attribute_is_no_global_of_the_same_name() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.large_model = nn.Linear(4, 4)

        def step(self) -> None:
            self.large_model(torch.ones(2, 4)).sum().backward()

    assert recollect.profile(Trainer().step).peak_bytes < large_model.weight.nbytes


large_model = nn.Linear(500, 500)


def test_what_runs_on_another_thread_is_said_not_to_be_seen() -> None:
    model, norm = mlp(), nn.BatchNorm1d(16)

    def step() -> None:
        other = threading.Thread(target=norm, args=(X,))
        other.start()
        other.join()
        model(X).sum().backward()

    found = recollect.profile(step)
    assert any(
        "1 of the parameters and buffers changed where the profiler does not look" in note for note in found.notes
    )
    assert not any("where the profiler does not look" in note for note in recollect.profile(model, X).notes)


def test_nothing_is_held_after_a_profile() -> None:
    models, x = [mlp()], X.clone()

    def step(x: Tensor) -> None:
        models[0](x).sum().backward()
        torch.optim.SGD(models[0].parameters(), lr=0.1).step()

    recollect.profile(step, x)
    gc.collect()
    weak = weakref.ref(x), weakref.ref(models[0][0].weight)
    gc.disable()
    try:
        recollect.profile(step, x)
        del step, x
        models.clear()
        assert [one() for one in weak] == [None, None]
    finally:
        gc.enable()
