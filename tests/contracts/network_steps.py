"""Steps through random networks: ways to use one, what a step leaves behind, and how hypothesis draws both."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import recollect
from recollect import compat
from tests.contracts.networks import (
    BLOCKS,
    INPLACE,
    INPLACE_RANDOM,
    PURE,
    RANDOM,
    SIZE,
    WINDOW,
    Apply,
    Block,
    Instruction,
    Machine,
    Op,
    Region,
    kinds_in,
    storages_of,
)

DEPTH = 3

# The steps. Each takes a forward that gives losses, the leaves, and bits to choose by; what it gives is compared.

Forward = Callable[[], list[Tensor]]
Found = list[Tensor | None]
Step = Callable[[Forward, list[Tensor], int], Found]


def total(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).sum()


def split(losses: list[Tensor], bits: int) -> tuple[list[Tensor], list[Tensor]]:
    chosen = [loss for i, loss in enumerate(losses) if bits >> i & 1]
    return chosen, [loss for i, loss in enumerate(losses) if not bits >> i & 1]


def chosen_leaves(leaves: list[Tensor], bits: int) -> list[Tensor]:
    return [leaf for i, leaf in enumerate(leaves) if bits >> i & 1] or leaves[:1]


def backward(forward: Forward, _leaves: list[Tensor], _bits: int) -> Found:
    total(forward()).backward()
    return []


def backward_twice(forward: Forward, _leaves: list[Tensor], _bits: int) -> Found:
    loss = total(forward())
    loss.backward(retain_graph=True)
    loss.backward()
    return []


def backward_in_parts(forward: Forward, _leaves: list[Tensor], bits: int) -> Found:
    for part in split(forward(), bits):
        if part:
            total(part).backward()
    return []


def backward_in_retained_parts(forward: Forward, _leaves: list[Tensor], bits: int) -> Found:
    first, second = split(forward(), bits)
    if first:
        total(first).backward(retain_graph=True)
    total(second or first).backward()
    return []


def backward_in_group(forward: Forward, _leaves: list[Tensor], bits: int) -> Found:
    parts = split(forward(), bits)
    with compat.GraphExecGroup():
        for part in parts:
            if part:
                total(part).backward()
    return []


def gradients_of_some(forward: Forward, leaves: list[Tensor], bits: int) -> Found:
    loss = total(forward())
    some = torch.autograd.grad(loss, chosen_leaves(leaves, bits), allow_unused=True, retain_graph=True)
    return [*some, *torch.autograd.grad(loss, chosen_leaves(leaves, ~bits), allow_unused=True)]


def gradients_of_some_then_backward(forward: Forward, leaves: list[Tensor], bits: int) -> Found:
    losses = forward()
    some = torch.autograd.grad(total(losses), chosen_leaves(leaves, bits), allow_unused=True, retain_graph=True)
    total(losses[:1]).backward()
    return [*some]


def backward_to_some(forward: Forward, leaves: list[Tensor], bits: int) -> Found:
    total(forward()).backward(inputs=chosen_leaves(leaves, bits))
    return []


def second_order(forward: Forward, leaves: list[Tensor], bits: int) -> Found:
    some = chosen_leaves(leaves, bits)
    first = torch.autograd.grad(total(forward()), some, create_graph=True, allow_unused=True)
    penalties = [g.square().sum() for g in first if g is not None and g.requires_grad]
    if penalties:
        total(penalties).backward()
    return [None if g is None else g.detach() for g in first]


def two_forwards(forward: Forward, _leaves: list[Tensor], _bits: int) -> Found:
    total([*forward(), *forward()]).backward()
    return []


def two_forwards_backward_crosswise(forward: Forward, _leaves: list[Tensor], _bits: int) -> Found:
    first, second = forward(), forward()
    total(second).backward()
    total(first).backward()
    return []


def backward_on_another_thread(forward: Forward, _leaves: list[Tensor], _bits: int) -> Found:
    loss = total(forward())
    errors: list[BaseException] = []

    def work() -> None:
        try:
            loss.backward()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()
    return []


class Interrupted(Exception):  # noqa: N818
    """Raised by a hook in the middle of backward."""


def backward_interrupted_then_again(forward: Forward, leaves: list[Tensor], bits: int) -> Found:
    loss = total(forward())

    def interrupt(_gradient: Tensor) -> None:
        raise Interrupted

    handle = leaves[bits % len(leaves)].register_hook(interrupt)
    with suppress(Interrupted):
        loss.backward(retain_graph=True)
    handle.remove()
    loss.backward()
    return []


STEPS: list[Step] = [
    backward,
    backward_twice,
    backward_in_parts,
    backward_in_retained_parts,
    backward_in_group,
    gradients_of_some,
    gradients_of_some_then_backward,
    backward_to_some,
    second_order,
    two_forwards,
    two_forwards_backward_crosswise,
    backward_on_another_thread,
    backward_interrupted_then_again,
]


# Comparing.


@dataclass(frozen=True, slots=True)
class Case:
    """What hypothesis draws. Two programs share the step when `halves` is not empty: each has inputs of its own."""

    body: tuple[Instruction, ...]
    halves: Region | None
    second: tuple[Instruction, ...]
    outputs: int
    bits: int
    seed: int
    explains: bool


def forward_of(machine: Machine, case: Case, leaves: list[Tensor]) -> list[Tensor]:
    registers = [leaves[1], leaves[0] * 1, leaves[1] * 2, leaves[2].clone()]
    machine.run(machine.modules, case.body, registers, machine.generator)
    outputs = registers[-case.outputs :]
    if case.halves is not None:
        options = replace(case.halves, preserve_rng=True, is_compat=False)
        modules = machine.modules

        def both(one: Tensor, *, other: Tensor) -> Any:
            machine.inside.append(both)
            first, second = [one, one * 2], [other, other * 2]
            machine.run(modules, options.body, first, None)
            machine.run(modules, case.second, second, None)
            machine.inside.pop()
            return first[-1], {"second": second[-1]}

        inputs = [leaves[0] * 3, leaves[1] * 3]
        machine.outer = storages_of(inputs)
        machine.note(inputs)
        first, rest = machine.wrap(options, both)(inputs[0], other=inputs[1])
        outputs = [first, rest["second"]]
        machine.keep(outputs)
    outputs.extend(machine.leaked)
    machine.leaked.clear()
    return outputs


@dataclass
class Outcome:
    values: list[tuple[str, Any]]
    clash: bool
    made: list[weakref.ref[Any]]


def take_step(case: Case, step: Step, *, has_regions: bool) -> Outcome:
    machine = Machine(has_regions=has_regions, seed=case.seed)
    leaves = [torch.randn(SIZE, SIZE, requires_grad=True) for _ in range(2)]
    leaves += [torch.randn(SIZE, SIZE), *machine.modules.parameters()]
    values: list[tuple[str, Any]] = []

    def forward() -> list[Tensor]:
        outputs = forward_of(machine, case, leaves)
        values.extend((f"output {i}", out.detach().clone()) for i, out in enumerate(outputs))
        weight = torch.linspace(-1, 1, SIZE * SIZE).view(SIZE, SIZE)
        if has_regions and "save_on_cpu" not in kinds_in(case.body):
            alive = sum(ref() is not None for ref in machine.forgettable)
            assert alive == 0, "intermediates of regions are alive after forward"
        machine.forgettable.clear()
        return [(out.float() * weight).sum() for out in (*outputs, leaves[0]) if out.requires_grad]

    trained = [leaf for leaf in leaves if leaf.requires_grad]
    with recollect.explain_mismatch() if case.explains and has_regions else nullcontext():
        found = step(forward, trained, case.bits)
    values.extend((f"returned {i}", value) for i, value in enumerate(found))
    values.extend((f"gradient of input {i}", leaf.grad) for i, leaf in enumerate(leaves[:3]))
    values.extend((f"gradient of {name}", p.grad) for name, p in machine.modules.named_parameters())
    values.extend((f"buffer {name}", b.clone()) for name, b in machine.modules.named_buffers())
    values.append(("torch's generator", torch.get_rng_state()))
    values.append(("the passed generator", machine.generator.get_state()))
    values.append(("python's generator", random.getstate()))
    return Outcome(values=values, clash=machine.writes.clash, made=machine.made)


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    return bool(one == other)


def living(outcome: Outcome) -> int:
    outcome.values.clear()
    return sum(ref() is not None for ref in outcome.made)


# Drawing it.

_numbers = st.integers(0, 7)


def ops(names: dict[str, Apply]) -> st.SearchStrategy[Op]:
    return st.builds(Op, st.sampled_from(sorted(names)), _numbers, _numbers)


_ops = st.one_of(ops(PURE), ops(PURE), ops(PURE), ops(RANDOM), ops(INPLACE), ops(INPLACE_RANDOM))


def regions(body: st.SearchStrategy[tuple[Instruction, ...]]) -> st.SearchStrategy[Region]:
    return st.builds(
        Region,
        body=body,
        outputs=st.integers(1, 3),
        routes=st.lists(
            st.sampled_from(["positional", "keyword", "boxed", "closure"]), min_size=1, max_size=WINDOW
        ).map(tuple),
        returns=st.sampled_from(["tensor", "tuple", "dict", "nested"]),
        early_stop=st.booleans(),
        check=st.sampled_from(["metadata", "values", "none"]),
        preserve_rng=st.booleans(),
        leaks=st.integers(0, 5).map(lambda n: n == 5),
        is_compat=st.booleans(),
    )


def bodies(depth: int) -> st.SearchStrategy[tuple[Instruction, ...]]:
    instructions: list[st.SearchStrategy[Instruction]] = [_ops, _ops, _ops]
    if depth > 0:
        inner = bodies(depth - 1)
        instructions += [regions(inner), regions(inner)]
        instructions.append(st.builds(Block, st.sampled_from(sorted(BLOCKS)), inner, st.integers(1, 2)))
    return st.lists(st.one_of(instructions), max_size=5).map(tuple)


_plain_bodies: st.SearchStrategy[tuple[Instruction, ...]] = st.lists(
    _ops.filter(lambda op: op.name != "generator_noise"), min_size=1, max_size=4
).map(tuple)

cases = st.builds(
    Case,
    body=bodies(DEPTH),
    halves=st.none() | st.none() | st.none() | regions(_plain_bodies),
    second=_plain_bodies,
    outputs=st.integers(1, 4),
    bits=st.integers(0, 2**12 - 1),
    seed=st.integers(0, 3),
    explains=st.integers(0, 15).map(lambda n: n == 15),
)
