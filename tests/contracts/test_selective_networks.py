"""Random networks in random regions under random policies: steps are bitwise the plain steps, and leave nothing behind.

Networks and steps are those of `networks.py` and `network_steps.py`. Here each region also has a policy: a coin for
each site, modules, named blocks and values, or one of the catalogue, so that regions under policies stand in each
other, in plain regions and around them. Each example does three steps on fresh data: a region's first call learns,
later ones run lighter.

To hunt: ``RECOLLECT_EXAMPLES=1000 pytest tests/contracts/test_selective_networks.py`` (per kind of step; default 12).
"""

from __future__ import annotations

import functools
import os
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import recollect
from recollect import policies
from recollect._policy.base import PolicyLike
from tests.collecting import without_collector
from tests.contracts import network_steps, networks
from tests.contracts.network_steps import Case, Outcome, Step
from tests.contracts.networks import Machine, Region
from tests.deciding import toss

# Many of these policies match nothing on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:policy .* this step")

STEPS = 3
MODULES = sorted(networks.make_modules())

CATALOGUE: list[PolicyLike] = [
    policies.save_nothing,
    policies.save_all,
    policies.save_matmuls,
    policies.save_random,
    policies.strictly(policies.save_random),
    policies.save_larger_than(32),
    policies.save_every(("aten.mul.Tensor", "aten.mm.default", "aten.addmm.default", "aten.sin.default"), 2),
]


@dataclass(frozen=True, slots=True)
class Choice:
    """What one region keeps."""

    kind: str
    seed: int
    modules: tuple[str, ...]
    names: tuple[str, ...]

    def policy(self) -> PolicyLike | None:
        coin = functools.partial(toss, seed=self.seed)
        match self.kind:
            case "coin":
                return coin
            case "modules":
                return policies.save_modules(*self.modules)
            case "names":
                return policies.save_names(*self.names)
            case "mixture":
                return policies.first_match(
                    policies.save_names(*self.names), policies.save_modules(*self.modules), coin
                )
            case "catalogue":
                return CATALOGUE[self.seed % len(CATALOGUE)]
        return None


@dataclass(frozen=True, slots=True)
class Choices:
    """Which policy each region of a network has; regions that share a name share what the engine learns of them."""

    choices: tuple[Choice, ...]
    is_name_shared: bool

    def of(self, region: Region) -> tuple[str, Choice]:
        number = zlib.crc32(repr(region).encode())
        return "body" if self.is_name_shared else f"region {number}", self.choices[number % len(self.choices)]


class SelectiveMachine(Machine):
    """Runs a program whose regions have policies."""

    __slots__ = ("_choices", "_policies")

    def __init__(self, choices: Choices, *, has_regions: bool, seed: int) -> None:
        super().__init__(has_regions=has_regions, seed=seed)
        self._choices = choices
        self._policies = {choice: choice.policy() for choice in choices.choices}

    def wrap(self, region: Region, body: Callable[..., Any]) -> Callable[..., Any]:
        name, choice = self._choices.of(region)
        policy = self._policies[choice]
        if not self.has_regions or policy is None:
            return super().wrap(region, body)
        is_random = not {*networks.names_in(region.body)}.isdisjoint({*networks.RANDOM, *networks.INPLACE_RANDOM})
        kinds = {"torch", "python"} if region.preserve_rng or is_random else False
        return recollect.checkpoint(
            body,
            policy=policy,
            name=name,
            early_stop=region.early_stop,
            check=region.check,
            preserve_rng=kinds,
        )


def named(name: str, fn: networks.Apply) -> networks.Apply:
    """An operator as a named block, whose result has a name too."""
    block = recollect.region(name)(fn)

    def call(modules: nn.ModuleDict, x: Tensor, y: Tensor) -> Tensor:
        return recollect.name(block(modules, x, y), f"{name}, its value")

    return call


NAMED = {name: named(name, fn) for name, fn in networks.ALL.items()}
NAMES = sorted([*NAMED, *(f"{name}, its value" for name in NAMED)])


def take_steps(case: Case, choices: Choices, step: Step, *, has_regions: bool) -> Outcome:
    machine = SelectiveMachine(choices, has_regions=has_regions, seed=case.seed)
    parameters = list(machine.modules.parameters())
    values: list[tuple[str, Any]] = []

    for number in range(STEPS):
        inputs = [torch.randn(networks.SIZE, networks.SIZE, requires_grad=i < 2) for i in range(3)]
        leaves = [*inputs, *parameters]

        def forward(leaves: list[Tensor] = leaves) -> list[Tensor]:
            outputs = network_steps.forward_of(machine, case, leaves)
            values.extend((f"output {i}", out.detach().clone()) for i, out in enumerate(outputs))
            weight = torch.linspace(-1, 1, networks.SIZE**2).view(networks.SIZE, networks.SIZE)
            machine.forgettable.clear()
            return [(out.float() * weight).sum() for out in (*outputs, leaves[0]) if out.requires_grad]

        found = step(forward, [leaf for leaf in leaves if leaf.requires_grad], case.bits)
        values.extend((f"step {number}: returned {i}", value) for i, value in enumerate(found))
        values.extend((f"step {number}: gradient of input {i}", leaf.grad) for i, leaf in enumerate(inputs))
        values.extend((f"step {number}: gradient of {n}", p.grad) for n, p in machine.modules.named_parameters())
        values.extend((f"step {number}: buffer {n}", b.clone()) for n, b in machine.modules.named_buffers())
        values.append((f"step {number}: torch's generator", torch.get_rng_state()))
        values.append((f"step {number}: the passed generator", machine.generator.get_state()))
        values.append((f"step {number}: python's generator", random.getstate()))
        machine.modules.zero_grad()
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(0.75)
        del inputs, leaves, forward, found
    return Outcome(values=values, clash=machine.writes.clash, made=machine.made)


_choice = st.builds(
    Choice,
    kind=st.sampled_from(["coin", "coin", "modules", "names", "mixture", "catalogue", "plain"]),
    seed=st.integers(0, 99),
    modules=st.lists(st.sampled_from(MODULES), min_size=1, max_size=4, unique=True).map(tuple),
    names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=8, unique=True).map(tuple),
)
_choices = st.builds(
    Choices, choices=st.lists(_choice, min_size=1, max_size=3).map(tuple), is_name_shared=st.booleans()
)


@pytest.mark.parametrize("step", network_steps.STEPS)
@settings(
    phases=[phase for phase in Phase if phase is not Phase.explain],  # it takes minutes for one example
    max_examples=int(os.environ.get("RECOLLECT_EXAMPLES", "12")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
@given(case=network_steps.cases, choices=_choices)
def test_steps_through_regions_under_policies_are_bitwise_the_plain_steps(
    step: Step, case: Case, choices: Choices
) -> None:
    with without_collector(), mock.patch.dict(networks.ALL, NAMED):
        try:
            plain = take_steps(case, choices, step, has_regions=False)
        except RuntimeError as error:
            event(f"plain autograd refuses: {str(error)[:60]}")
            assume(False)
        try:
            ours = take_steps(case, choices, step, has_regions=True)
        except recollect.CheckpointError:
            assert plain.clash, "a region refused a program that writes into nothing a region reads"
            event("a write into what a region reads is refused")
            return
        different = [
            name for (name, a), (_, b) in zip(plain.values, ours.values, strict=True) if not network_steps.is_same(a, b)
        ]
        assert different == []
        # A function that closes over a tensor holds it; written into, the tensor holds the function in turn.
        is_held = plain.clash and "closure" in networks.routes_in(case.body)
        if network_steps.living(plain) == 0 and not is_held:
            assert network_steps.living(ours) == 0
