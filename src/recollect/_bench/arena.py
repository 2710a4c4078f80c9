"""The arena: a model, its inputs and its optimizer, which the contenders share, and how each is made ready."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from recollect._bench.cases import Case
from recollect._bench.contenders import PLAIN, Contender
from recollect._core.profiles import Profile
from recollect._inspect.profile import profile as take_profile
from recollect._profile.memory import LiveBytes

_LEARNING, _SETTLING = 3, 1  # steps until ours runs as planned, and until others have settled


def own_code(function: Any) -> Any:
    """The function with a code object of its own.

    Dynamo keeps what it compiles by code object, and returns it wherever its guards hold. They hold for a model that
    differs from another only in how it is to be compiled.
    """
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A contender that has learned and compiled all there is, and how long forward and backward then took."""

    step: Callable[[], None]
    norms: list[float]
    step_s: float


class Arena:
    """A model, its inputs and its optimizer, and the contenders that share them."""

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, torch.device(device)
        self.model, self.inputs, self.optimizer = case.make(device)

    @property
    def model_bytes(self) -> int:
        """What the model and its inputs hold: all that a graph of the step is given."""
        given = {*self.model.parameters(), *self.model.buffers(), *self.inputs}
        return sum(one.untyped_storage().nbytes() for one in given)

    def take_profile(self) -> Profile:
        """The plain step, after one that made what is made lazily."""
        step = self.make_step(self.model)
        step()
        return take_profile(_run_step, step, self.model, self.optimizer, *self.inputs, name=type(self.model).__name__)

    def make_model(self) -> nn.Module:
        """Another model with the same parameters and buffers."""
        with torch.device("meta"):
            other = self.case.build()
        mine = dict(self.model.named_modules(remove_duplicate=False))
        for path, module in other.named_modules(remove_duplicate=False):
            for kind in ("_parameters", "_buffers"):
                getattr(module, kind).update(getattr(mine[path], kind))
        return other

    def prepare(self, one: Contender, *, is_compiled: bool) -> Ready:
        """Let a contender learn and compile; parameters stay as they are."""
        model = self.model if one.name == PLAIN and not is_compiled else self.make_model()
        one.prepare(model)
        call: Callable[..., Tensor] = model
        if is_compiled:
            call = partial(torch.compile(own_code(_call_model), options=dict(one.options) or None), model)
        with one.compiling():
            norms = self.find_norms(call, one)
        learning = self.make_step(call, one, updates=False)
        step_s = 0.0
        for _ in range(_LEARNING if one.plan is not None else _SETTLING):
            start = time.perf_counter()
            learning()
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            step_s = time.perf_counter() - start
            self.optimizer.zero_grad()
        return Ready(step=self.make_step(call, one), norms=norms, step_s=step_s)

    def give_up(self) -> None:
        """Free what a contender left behind when it failed."""
        self.optimizer.zero_grad()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def make_step(
        self, call: Callable[..., Tensor], contender: Contender | None = None, *, updates: bool = True
    ) -> Callable[[], None]:
        """A step of a model."""
        around = Contender(name="").around if contender is None else contender.around

        def step() -> None:
            with around():
                loss = self.case.run_forward(call, self.inputs, self.device.type)
            loss.backward()
            del loss
            if updates:
                self.optimizer.step()
                self.optimizer.zero_grad()

        return step

    def find_norms(self, call: Callable[..., Tensor], contender: Contender) -> list[float]:
        """The norms of the gradients of a step from the same random state, which leaves the parameters as they are."""
        torch.manual_seed(1)
        self.make_step(call, contender, updates=False)()
        norms = [
            0.0 if parameter.grad is None else parameter.grad.float().norm().item()
            for parameter in self.model.parameters()
        ]
        self.optimizer.zero_grad()
        return norms

    def meter(self, step: Callable[[], object]) -> int:
        """The live bytes of a step at its peak."""
        state = [value for one in self.optimizer.state.values() for value in one.values() if isinstance(value, Tensor)]
        with LiveBytes(include=[self.model, *state, *self.inputs]) as meter:
            step()
        return meter.peak_bytes


def _run_step(step: Callable[[], None], *works_with: Any) -> None:
    """Run a step. What it works with stands among the arguments, where the profiler looks for it."""
    del works_with
    step()


def _call_model(model: nn.Module, *inputs: Tensor) -> Tensor:
    loss: Tensor = model(*inputs)
    return loss
