"""Ways of compiling a training step: ours, torch's on the same operators, the compiler's budgets, others' regions."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from annotated import RematBlock
from cases import Setting
from llama_like import Layers, LlamaLike, one_by_one
from peers import OURS, REMAT, REMAT_BARE, TORCH, engines, torch_keeping
from selective import ATTENTION, HALF, KEEPS, MATMULS, Keep, Ops, instead, our_policy_by_ops
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from training import PLAIN, each_block

import recollect
from recollect import Choice as Rule
from recollect import Decision, Plan, Profile, policies
from recollect._compile.speeds import carrier_of
from recollect._plan.budget import Budget
from recollect._plan.graphs import find_keep_set, plan_within
from recollect._plan.sent_values import Carrier

FULL = "full"
BUDGETS = {0.5: 0.6, 0.3: 0.6, 0.1: 0.6, 0.8: 0.6}
"""The compiler's budgets, and what our peak may be of theirs in a step that takes no longer."""

SHARES = (0.47, 0.18, 0.38, 0.75)
"""What our planner is given of the plain step's activations."""

Prepare = Callable[[LlamaLike], tuple[LlamaLike, Layers]]
"""Makes the model to compile, which shares the given one's parameters, and what runs its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way of compiling the step.

    Attributes:
        name: what it is called.
        prepare: sets it up.
        options: Inductor's.
        budget: the compiler's memory budget.
        peer: the rival that keeps the same.
        is_timed: whether its compile time is compared, for which it has empty caches.
    """

    name: str
    prepare: Prepare
    options: dict[str, Any] = field(default_factory=dict)
    budget: float = 1.0
    peer: str | None = None
    is_timed: bool = False


def run_by(layers: Layers) -> Prepare:
    return lambda model: (model, layers)


def apply(policy: Any = None, **how: Any) -> Prepare:
    """Our regions, in a copy of the model that has the same parameters."""

    def prepare(model: LlamaLike) -> tuple[LlamaLike, Layers]:
        kept = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        copied = copy.deepcopy(model, kept)
        recollect.apply(copied, policy, **how)
        return copied, one_by_one

    return prepare


def annotate(layers: Layers, kept: list[str]) -> Prepare:
    """The model with blocks that are annotated for torch_remat."""

    def prepare(model: LlamaLike) -> tuple[LlamaLike, Layers]:
        blocks = nn.ModuleList(RematBlock(block, kept) for block in model.layers)  # type: ignore[arg-type]
        return model, instead(blocks, layers)

    return prepare


def keep_every(every: int, ops: Ops) -> Any:
    """The contexts of one region; a function of this module, because Dynamo refuses others."""
    count = 0

    def decide(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        nonlocal count
        keeps = op in ops.attention
        if op in ops.matmuls:
            keeps, count = count % every == 0, count + 1
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def torch_policy(keep: Keep, ops: Ops) -> Layers:
    if keep.every is not None and keep.every > 1:
        contexts = partial(keep_every, keep.every, ops)
    else:
        contexts = partial(create_selective_checkpoint_contexts, list(ops.all if keep.every else ops.attention))
    contexts.cache_hash = keep.name  # type: ignore[attr-defined]  # without it AOTAutograd's cache is passed by
    return each_block(torch_keeping(contexts))


def keep_modules(ops: Ops, *paths: str) -> Any:
    """Attention and some of a block's matmuls."""
    return policies.first_match(policies.save_modules(*paths), policies.save_ops(*map(str, ops.attention)))


def planned(*choices: Rule) -> dict[str, Any]:
    """The blocks' sums kept, everything else in the blocks made again but for what the choices say."""
    sums = Rule(decision=Decision.SAVE, module="layers.*", op="aten.add.Tensor")
    again = Rule(decision=Decision.RECOMPUTE, module="layers.**")
    return cut_by(*choices, sums, again)


def cut_by(*choices: Rule) -> dict[str, Any]:
    """What the choices have no word for is left to the compiler."""
    return {"custom_partitioner_fn": recollect.partitioner(Plan(choices=choices))}


def within(share: float, carrier: Carrier | None = None) -> dict[str, Any]:
    """What the graph's own planner keeps, at a share of what the plain graph takes beyond its inputs."""

    def make(profile: Profile) -> Plan:
        whole = find_keep_set(profile, 2**62).simulation
        most = whole.held_bytes + int((whole.peak_bytes - whole.held_bytes) * share)
        return plan_within(Budget(text=f"{share:.0%}", bytes=most), carrier)(profile)

    return {"custom_partitioner_fn": recollect.partitioner(planner=make)}


def same_policies(model: LlamaLike, ops: Ops, setting: Setting) -> list[Candidate]:
    """Ours and torch's by turns."""
    calls = {engine.name: engine.call for engine in engines(setting.device)}
    timed = set() if setting.is_quick else {FULL, *(keep.name for keep in KEEPS)}
    found = []
    for name in (FULL, HALF.name, ATTENTION.name, MATMULS.name):
        keep = next((keep for keep in KEEPS if keep.name == name), None)
        ours = apply() if keep is None else apply(our_policy_by_ops(keep, ops))
        theirs = each_block(calls[TORCH]) if keep is None else torch_policy(keep, ops)
        peer = f"{TORCH} {name}"
        found += [
            Candidate(name=peer, prepare=run_by(theirs), is_timed=name in timed),
            Candidate(name=f"{OURS} {name}", prepare=ours, peer=peer, is_timed=name in timed),
        ]
    return found


def more_of_ours(ops: Ops, blocks: int, device: torch.device) -> list[Candidate]:
    """Between the same policies: where the compiler's budgets end up."""
    everything = policies.save_ops(*map(str, ops.all))
    attention = [Rule(decision=Decision.SAVE, op=str(op)) for op in ops.attention]

    def linears(*paths: str) -> list[Rule]:
        return [
            Rule(decision=Decision.SAVE, module=f"layers.*.{path}", op=str(op)) for path in paths for op in ops.matmuls
        ]

    ways: dict[str, Prepare] = {
        "sdpa+out": apply(keep_modules(ops, "attention.out")),
        "mm+sdpa, last 1/4 plain": apply(everything, first=blocks - blocks // 4),
        "sdpa+out+up": apply(keep_modules(ops, "attention.out", "mlp.up")),
        "sdpa+out+gate+up": apply(keep_modules(ops, "attention.out", "mlp.gate", "mlp.up")),
        "sdpa+out+qkv": apply(keep_modules(ops, "attention.out", "attention.qkv")),
        "full, every 2nd block": apply(every=2),
    }
    matmuls = linears("attention.*", "mlp.*")
    plans = {
        **{f"within {share:.0%}": within(share) for share in SHARES},
        **{f"within {share:.0%}, host": within(share, carrier_of(device)) for share in SHARES if device.type != "cpu"},
        "plan mm+sdpa": planned(*attention, *matmuls),
        "plan sdpa+out": planned(*attention, *linears("attention.out")),
        "plan mm+sdpa, rest torch's": cut_by(*attention, *matmuls),
    }
    found = [Candidate(name=f"{OURS} {name}", prepare=prepare) for name, prepare in ways.items()]
    made = [
        Candidate(name=f"{OURS} {name}", prepare=run_by(one_by_one), options=options) for name, options in plans.items()
    ]
    return [*made, *found]


def rivals(setting: Setting) -> list[Candidate]:
    calls = {engine.name: engine.call for engine in engines(setting.device)}
    if REMAT_BARE not in calls:
        return []
    bare = each_block(calls[REMAT_BARE])  # compiled it calls torch's, which minds random state
    return [
        Candidate(name=f"{REMAT} {FULL}", prepare=run_by(bare)),
        Candidate(name=f"{REMAT} {HALF.name}", prepare=annotate(bare, ["qkv", "sdpa", "gate", "down"])),
    ]


def candidates(model: LlamaLike, ops: Ops, setting: Setting) -> list[Candidate]:
    """Everyone, the most telling first."""
    same = same_policies(model, ops, setting)
    budgets = [Candidate(name=f"budget {budget}", prepare=run_by(one_by_one), budget=budget) for budget in BUDGETS]
    plain = Candidate(name=PLAIN, prepare=run_by(one_by_one))
    between = more_of_ours(ops, len(model.layers), setting.device)
    everyone = [*same[:4], *budgets, *between, *same[4:], plain, *rivals(setting)]
    return [one for one in everyone if not setting.only or any(part in one.name for part in setting.only)]
