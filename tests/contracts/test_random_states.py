"""Functions that carry a state from call to call, drawn at random: recomputation finds each as forward found it.

States stand in variables of closures, lists, dicts, queues, objects, and attributes of modules. Their functions run in
regions of their own, together in one, or nested, several times before any backward, which may come in any order and
again. Every gradient is that of the plain step, and every state afterwards, too.

To hunt: ``RECOLLECT_EXAMPLES=2000 pytest tests/contracts/test_random_states.py`` (default 40).
"""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import recollect
from recollect import policies

Step = Callable[[Tensor], Tensor]
Kept = Callable[[], list[Any]]

pytestmark = pytest.mark.filterwarnings("ignore:.*keeps nothing")


def mix(before: Tensor | float, x: Tensor) -> Tensor:
    return torch.tanh(before * x + x.roll(1, -1))


def in_a_variable() -> tuple[Step, Kept]:
    state: Tensor | None = None
    rate = 1.0

    def step(x: Tensor) -> Tensor:
        nonlocal state, rate
        state = mix(0.0 if state is None else state, x)
        rate *= 0.9
        return state * x.cos() * rate

    return step, lambda: [state, rate]


def in_a_dict() -> tuple[Step, Kept]:
    states: dict[str, Any] = {"means": []}

    def step(x: Tensor) -> Tensor:
        states["state"] = mix(states.get("state", 0.0), x)
        states["means"].append(states["state"].mean())
        return torch.as_tensor(states["state"]) * x.cos()

    return step, lambda: [states["state"], *states["means"]]


def in_a_list() -> tuple[Step, Kept]:
    states: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        states.append(mix(sum(states[-2:], torch.zeros(())), x))
        return states[-1] * x.cos()

    return step, lambda: list(states)


def in_a_queue() -> tuple[Step, Kept]:
    states: deque[Tensor] = deque(maxlen=3)

    def step(x: Tensor) -> Tensor:
        states.append(mix(sum(states, torch.zeros(())), x))
        return states[0] * x.cos()

    return step, lambda: list(states)


class Holding:
    """Keeps its state in attributes."""

    def __init__(self) -> None:
        self.state: Tensor | None = None
        self.norms: list[float] = []
        self.by_call: dict[int, Tensor] = {}

    def step(self, x: Tensor) -> Tensor:
        self.state = mix(0.0 if self.state is None else self.state, x)
        self.norms.append(self.state.norm().item())
        self.by_call[len(self.norms)] = self.state
        return self.state * x.cos()


def in_an_object() -> tuple[Step, Kept]:
    holding = Holding()
    return holding.step, lambda: [holding.state, *holding.norms, *holding.by_call.values()]


def in_namespaces() -> tuple[Step, Kept]:
    states = SimpleNamespace(inner=SimpleNamespace(state=torch.zeros(())), rates=[0.5])

    def step(x: Tensor) -> Tensor:
        states.rates[0] = states.rates[0] * 0.9
        states.inner.state = mix(states.inner.state * states.rates[0], x)
        return torch.as_tensor(states.inner.state) * x.cos()

    return step, lambda: [states.inner.state, *states.rates]


class Recurrent(nn.Module):
    """Keeps its state in attributes, too."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None
        self.pair: tuple[Tensor, Tensor] | None = None
        self.losses: list[Tensor] = []
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        state = self.state = mix(0.0 if self.state is None else self.state, x)
        if "last" in self.cache:
            x = x * self.cache["last"].sigmoid()
        self.cache["last"] = state
        self.losses.append(state.mean())
        self.pair = (state, x) if self.pair is None else (self.pair[1], x)
        return state * x.cos() * self.pair[0]


def in_a_module() -> tuple[Step, Kept]:
    module = Recurrent()
    return module, lambda: [module.state, *(module.pair or ()), *module.losses, *module.cache.values()]


class Averaging(nn.Module):
    """Writes into tensors in its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.calls = torch.zeros(4), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.calls += 1
        return (x - self.mean).tanh() * self.calls.cos()


def in_place() -> tuple[Step, Kept]:
    module = Averaging()
    return module, lambda: [module.mean, module.calls]


def in_a_generator() -> tuple[Step, Kept]:
    generator = torch.Generator().manual_seed(3)

    def step(x: Tensor) -> Tensor:
        return torch.tanh(x.roll(1, -1) + torch.rand(4, generator=generator)) * x

    return step, lambda: [generator.get_state()]


PLACES = [
    in_a_variable,
    in_a_dict,
    in_a_list,
    in_a_queue,
    in_an_object,
    in_namespaces,
    in_a_module,
    in_place,
    in_a_generator,
]
POLICIES = [
    None,
    "full",
    policies.save_ops("aten.tanh.default"),
    policies.save_ops("aten.cos.default", "aten.mul.Tensor"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What runs, how it is cut into regions, and when backward comes."""

    places: list[Callable[[], tuple[Step, Kept]]]
    cut: str
    policy: Any
    outer_policy: Any
    early_stop: bool
    runs: int
    steps: int
    order: str

    def run(self, *, applies: bool) -> list[Any]:
        """The gradients of all steps, and the states at the end."""
        torch.manual_seed(0)
        made = [place() for place in self.places]
        steps = [step for step, _ in made]
        if self.cut != "together":
            steps = [self.wrap(step, self.policy) if applies else step for step in steps]

        def whole(x: Tensor) -> Tensor:
            for step in steps:
                x = step(x)
            return x

        run = self.wrap(whole, self.outer_policy) if applies and self.cut != "each" else whole
        found: list[Any] = []
        for _ in range(self.steps):
            inputs = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
            losses = []
            for x in inputs:
                y = x
                for _ in range(self.runs):
                    y = run(y)
                losses.append(y.square().sum())
            if self.order == "reversed":
                losses.reverse()
            for loss in [losses[0] + losses[1]] if self.order == "at once" else losses:
                torch.autograd.backward(loss, retain_graph=True)  # the states lead back to earlier steps
            found += [x.grad for x in inputs]
        return found + [one for _, kept in made for one in kept()]

    def wrap(self, step: Step, policy: Any) -> Step:
        return recollect.checkpoint(step, policy=policy, early_stop=self.early_stop)


PROGRAMS = st.builds(
    Program,
    places=st.lists(st.sampled_from(PLACES), min_size=1, max_size=4),
    cut=st.sampled_from(["each", "together", "nested"]),
    policy=st.sampled_from(POLICIES),
    outer_policy=st.sampled_from(POLICIES),
    early_stop=st.booleans(),
    runs=st.integers(1, 3),
    steps=st.integers(1, 3),
    order=st.sampled_from(["in turn", "reversed", "at once"]),
)


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


@given(program=PROGRAMS)
@settings(
    max_examples=int(os.environ.get("RECOLLECT_EXAMPLES", "40")),
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
def test_states_are_as_forward_found_them(program: Program) -> None:
    plain, ours = program.run(applies=False), program.run(applies=True)
    assert len(plain) == len(ours)
    assert all(map(is_same, plain, ours))
