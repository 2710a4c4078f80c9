"""The hook by which a plan or a policy decides, node by node, what a compiled step keeps and what it makes again.

The decisions become the tags that torch's own min-cut partitioner obeys, and it cuts the graph, gives random operators
their state and moves recomputation down to its first use. What the plan is silent about is left to tags that are there
(regions of `recollect.checkpoint`) and then to the min-cut, which knows what will be fused.

Private names: `min_cut_rematerialization_partition`, `fx_graph_cse`, `CustomPartitionerFn`, and the notes ``recompute``
and ``ac_graph_id`` that the first of them reads.
Replaced by: a public partitioner interface (`torch.compile` takes ours through the documented ``options``).
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import operator
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from recollect._compile.choosers import Chooser, by_budget, by_plan, by_planner, by_policy
from recollect._compile.deferring import defer_readers, find_room
from recollect._compile.inductor import arrange_backward, find_copied_inputs, turns_images
from recollect._compile.joint import Joint, read_joint
from recollect._compile.keys import digest_sources, key_of
from recollect._compile.offloading import MARK, mark_offloaded
from recollect._compile.ordering import keep_order, keep_transfers_in_place
from recollect._compile.speeds import carrier_of
from recollect._compile.transfers import is_transfer, sent_node
from recollect._compile.workspaces import workspaces_of
from recollect._core.argument_text import short_repr
from recollect._core.calls import Lifetime
from recollect._core.decisions import Decision
from recollect._core.plans import Choice, Plan
from recollect._core.profiles import Profile
from recollect._core.torch_private.partitioner import DECISION, CheckpointPolicy
from recollect._plan.budget import parse_budget
from recollect._plan.fusing import fuse
from recollect._plan.sent_values import Sending
from recollect._plan.simulate import Simulation, simulate
from recollect._plan.solvers.highs import import_scipy
from recollect._plan.tiers import read_tiers
from recollect._policy.base import PolicyLike, as_policy

_log = logging.getLogger("recollect")

_RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_HOST = "host"
_SOURCES = ("_compile/*.py", "_plan/**/*.py", "_policy/*.py", "_core/operators.py", "_core/timetables.py")
"""All that decides how a graph is cut and arranged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """How one graph was cut.

    Attributes:
        profile: what the step does; calls that backward runs again are in it once.
        kept: the storages that forward keeps for backward.
        simulation: bytes and recomputation of the emitted graphs, without what a compiler fuses away.
        plan: what the plan, the policy or the planner decided here, value by value.
        sent: of the kept storages those that wait in host memory between forward and backward.
    """

    profile: Profile
    kept: frozenset[int]
    simulation: Simulation
    plan: Plan
    sent: frozenset[int] = frozenset()


class Partitioner:
    """Cuts joint graphs as a plan says. Made by `partitioner`; compiled code that is cached does not call it."""

    def __init__(
        self,
        choose: Callable[[Profile, torch.device], Chooser],
        key: str,
        report: Callable[[Partition], None] | None,
        *,
        has_budget: bool = False,
    ) -> None:
        self._choose = choose
        self._key = key
        self._report = report
        self._has_budget = has_budget

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cut a joint graph into forward and backward.

        Raises:
            ValueError: torch is told to keep nothing at all.
        """
        from torch._functorch import config
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor import config as inductor_config

        if config.activation_memory_budget == 0:
            message = (
                "torch._functorch.config.activation_memory_budget is 0: torch keeps nothing and ignores the plan.\n"
                "Leave it at 1: the plan says what to recompute."
            )
            raise ValueError(message)
        count: int = options["num_fwd_outputs"]
        _merge_equal_nodes(gm)
        cuts_for_inductor: Any = inductor_config.custom_partitioner_fn
        has_turned = cuts_for_inductor is self and turns_images(gm)
        copied = find_copied_inputs(gm) if has_turned else set()
        workspace = workspaces_of(gm, has_channels_last=has_turned)
        joint = read_joint(gm, copied=copied, workspace=workspace)
        decided = _decide(joint, self._choose(joint.profile, _device_of(gm)))
        plan = _plan(joint.profile, decided)
        _tag(joint, decided)
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **options)
        arranges = cuts_for_inductor is self and _decides(plan)
        room = None
        if (arranges and self._has_budget) or self._report is not None or _log.isEnabledFor(logging.DEBUG):
            again, partition = _judge(gm, forward, count, plan, copied, workspace)
            _log.debug("partition: %s", partition.simulation)
            if self._report is not None:
                self._report(partition)
            room = find_room(again, partition.simulation) if self._has_budget else None
        if arranges:
            arrange_backward()
            defer_readers(backward, room)
            keep_order(backward, with_sums=True)
            keep_transfers_in_place(forward)
        return forward, backward

    def uuid(self) -> str:
        """What Inductor's and AOTAutograd's caches know this partitioner by: equal plans share it, and only they."""
        return self._key

    # The caches copy the whole configuration and pickle it for their key; they never load it.
    def __deepcopy__(self, memo: dict[int, Any]) -> Partitioner:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_refuse_loading, (self._key,))


def partitioner(
    plan: Plan | PolicyLike | None = None,
    *,
    planner: Callable[[Profile], Plan] | None = None,
    budget: int | str | None = None,
    tiers: str | None = None,
    report: Callable[[Partition], None] | None = None,
) -> Partitioner:
    """Make a partitioner for `torch.compile`: it splits forward from backward by a plan or a policy.

    Give it to Inductor as an option, as below, or to ``aot_autograd(partition_fn=...)``. A plan overrides the tags of
    `recollect.checkpoint` regions inside; a policy is asked only outside of them. torch decides about everything else.
    Some values are always kept, whatever a plan says: what forward returns, results of operators with effects or on
    inputs that the step changes, random seeds, and branches (`torch.cond`). Offloaded values go to pinned host memory
    if there is an accelerator; otherwise they are kept.

    Args:
        plan: a plan, a policy of `recollect.policies`, a function of a `recollect.Site`, or one decision for
            everything. torch decides about values that a policy has no rule for.
        planner: instead of ``plan``, a function that makes the plan from a profile of each graph.
        budget: instead of ``plan``, the most bytes that each graph may have in use at any time in forward and backward,
            its inputs included (parameters, buffers, the batch): a number, text like ``"4GiB"``, or ``"min"`` for the
            smallest peak. Pointwise recomputation is fused and nearly free, so it comes first. Fusion is predicted
            before the graph is compiled, and 5% of the budget is left free where possible. Needs scipy.
        tiers: with `budget`, ``"host"``: values may also go to pinned host memory, as much as the link carries. The
            link is measured when the first graph is compiled.
        report: called with each partition when a graph is compiled.

    Returns:
        An object for the option ``custom_partitioner_fn``. Equal plans and policies share entries in torch's caches,
        also between processes; one with a planner or a report is compiled anew in each process.

    Raises:
        TypeError: not exactly one of ``plan``, ``planner`` and ``budget`` is given, or it has the wrong type.
        ValueError: the budget or `tiers` cannot be read, or `tiers` is given without a budget.
        ImportError: a budget is given, and scipy cannot be imported.
        BudgetError: when a graph is compiled: no choice fits it. Dynamo raises an error of its own, which holds this
            one as ``inner_exception``.

    >>> import torch
    >>> from recollect import Decision, partitioner
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    >>> compiled = torch.compile(model, options={"custom_partitioner_fn": partitioner(Decision.RECOMPUTE)})
    """
    if sum(one is not None for one in (plan, planner, budget)) != 1:
        message = "partitioner takes a plan or policy, a planner, or a budget: pass one of the three"
        raise TypeError(message)
    for name, given in (("planner", planner), ("report", report)):
        if given is not None and not callable(given):
            message = f"{name}={short_repr(given)}: expected a function"
            raise TypeError(message)
    if isinstance(plan, str):
        message = f"partitioner({plan!r}): expected a plan or a policy. A budget is passed by name: budget={plan!r}"
        raise TypeError(message)
    key: str | None = None
    if isinstance(budget, str) and "%" in budget:
        message = f"budget={budget!r}: a graph does not say how much memory its device has. Give bytes, as in '4GiB'"
        raise ValueError(message)
    if tiers is not None:
        _check_tiers(tiers, budget)
    if budget is not None:
        import_scipy()
        choose = by_budget(parse_budget(budget), sends=tiers is not None)
        key = hashlib.sha256(f"budget {budget} {tiers}".encode()).hexdigest()[:32]
    elif planner is not None:
        choose = by_planner(planner)
    elif isinstance(plan, Plan):
        choose, key = by_plan(plan), plan.digest
    else:
        assert plan is not None
        policy = as_policy(plan)
        choose, key = by_policy(policy), hashlib.sha256(key_of(policy).encode()).hexdigest()[:32]
    own = f"recollect-{_source_digest()}-"
    own += uuid.uuid4().hex if key is None or report is not None else key
    made = Partitioner(choose, own, report, has_budget=budget is not None)
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    CustomPartitionerFn.register(Partitioner)
    return made


def _check_tiers(tiers: str, budget: int | str | None) -> None:
    if read_tiers(tiers) != _HOST:
        message = f"tiers={short_repr(tiers)}: compiled code can offload only to pinned host memory. Pass tiers='host'"
        raise ValueError(message)
    if budget is None:
        message = "tiers='host' has no effect without a budget: a plan or a policy says itself what is offloaded"
        raise ValueError(message)


def _merge_equal_nodes(gm: fx.GraphModule) -> None:
    """What torch's partitioner does first, done now: nodes that it would merge later must not be told apart."""
    from torch._functorch import config
    from torch._functorch.compile_utils import fx_graph_cse

    gm.graph.eliminate_dead_code()
    if config.cse:
        gm.graph = fx_graph_cse(gm.graph)


def _decide(joint: Joint, choose: Chooser) -> dict[int, dict[int, Decision]]:
    """For each forward call that makes something, and each of its outputs: what happens to it.

    Only where the plan or the policy has a say. An operator with several results is kept as a whole if one of them is:
    kept apart, they would have to be made again together. Each may wait in host memory or stay.
    """
    profile = joint.profile
    made: dict[int, list[int]] = {}
    for one in profile.made():
        if one.call < profile.forward_count:
            made.setdefault(one.call, []).append(one.output)
    decided: dict[int, dict[int, Decision]] = {}
    for number, outputs in made.items():
        call, tagged = profile.calls[number], _tagged(joint.nodes[number])
        if call.runs_once:
            decided[number] = dict.fromkeys(outputs, Decision.SAVE)
            continue
        said = {output: choose(call, call.site(output), tagged) for output in outputs}
        returned = (profile.storages[call.outputs[at].storage].lifetime is Lifetime.RETURNED for at in outputs)
        if not {Decision.SAVE, Decision.OFFLOAD}.isdisjoint(said.values()):
            sent = [output for output in outputs if said[output] is Decision.OFFLOAD]
            decided[number] = dict.fromkeys(outputs, Decision.SAVE) | dict.fromkeys(sent, Decision.OFFLOAD)
        elif Decision.RECOMPUTE in said.values():
            decided[number] = dict.fromkeys(outputs, Decision.SAVE if any(returned) else Decision.RECOMPUTE)
    return decided


def _tagged(node: fx.Node) -> Decision | None:
    """What a region's tag says, if the node has one that torch's partitioner obeys."""
    tag = node.meta.get("recompute")
    if tag is CheckpointPolicy.MUST_SAVE:
        noted = node.meta.get(DECISION)
        return Decision.OFFLOAD if noted == Decision.OFFLOAD.value else Decision.SAVE
    return Decision.RECOMPUTE if tag in _RECOMPUTE else None


def _tag(joint: Joint, decided: dict[int, dict[int, Decision]]) -> None:
    """Write the decisions where torch's partitioner reads them."""
    again: set[int] = set()
    noted: set[fx.Node] = set()
    for number, decisions in decided.items():
        node, made = joint.nodes[number], joint.profile.calls[number].outputs
        if Decision.RECOMPUTE in decisions.values():
            again.update(joint.storages[node])
        sent = {made[output].storage for output, one in decisions.items() if one is Decision.OFFLOAD}
        rest = next((one for one in decisions.values() if one is not Decision.OFFLOAD), Decision.SAVE)
        for one in (node, *_parts(node)):
            is_sent = sent and sent.issuperset(joint.storages[one])
            _note(one, Decision.OFFLOAD if is_sent else rest)
            noted.add(one)
    for node, storages in joint.storages.items():  # views are made again from what they look at
        if node.op == "call_function" and storages and again.issuperset(storages) and node not in noted:
            _note(node, Decision.RECOMPUTE)


def _note(node: fx.Node, decision: Decision) -> None:
    if decision is Decision.RECOMPUTE:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta.pop("ac_graph_id", None)  # else the last values of a region are kept after all
    else:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    node.meta[DECISION] = decision.value
    node.meta.pop(MARK, None)
    if decision is Decision.OFFLOAD:
        mark_offloaded(node)


def _parts(node: fx.Node) -> list[fx.Node]:
    """The nodes that take a result apart."""
    parts = [user for user in node.users if user.target is operator.getitem]
    return [*parts, *(inner for part in parts for inner in _parts(part))]


def _judge(  # noqa: PLR0917
    gm: fx.GraphModule,
    forward: fx.GraphModule,
    count: int,
    plan: Plan,
    copied: Collection[str] = (),
    workspace: Callable[[fx.Node], int] = lambda node: 0,
) -> tuple[Joint, Partition]:
    """Read again what was emitted, and simulate it."""
    by_name = {node.name: node for node in gm.graph.nodes}

    def origin(node: fx.Node) -> fx.Node | None:
        # Nodes that were added for the states of random generators may bear the names of others.
        found = by_name.get(node.name)
        return found if found is not None and found.meta.get("val") is node.meta.get("val") else None

    names = {node.name for node in forward.graph.nodes if origin(node) is not None}
    joint = read_joint(gm, in_forward=names, copied=copied, workspace=workspace)
    results = next(iter(forward.graph.find_nodes(op="output"))).args[0]
    assert isinstance(results, Sequence)
    passed = [(node, origin(sent_node(node))) for node in results[count:] if isinstance(node, fx.Node)]
    kept = frozenset(storage for _, node in passed if node is not None for storage in joint.storages[node])
    fused, _ = fuse(joint.profile, kept)
    simulation = simulate(fused, kept)
    sent = {at for given, node in passed if node is not None and is_transfer(given) for at in joint.storages[node]}
    if sent:
        carrier = carrier_of(_device_of(gm))
        simulation = Sending(fused, simulation, kept, carrier, least_bytes=0).judge(sent).simulation
    partition = Partition(profile=joint.profile, kept=kept, simulation=simulation, plan=plan, sent=frozenset(sent))
    return joint, partition


def _device_of(gm: fx.GraphModule) -> torch.device:
    """Where the step runs."""
    values = (node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder"))
    devices = [value.device for value in values if isinstance(value, Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _decides(plan: Plan) -> bool:
    """Whether anything is recomputed or offloaded because the plan says so."""
    return any(choice.decision is not Decision.SAVE for choice in plan.choices)


def _plan(profile: Profile, decided: dict[int, dict[int, Decision]]) -> Plan:
    """What was decided, as a plan of exact sites."""
    return Plan(
        choices=tuple(
            Choice.at(profile.calls[made.call].site(made.output), decided[made.call][made.output])
            for made in profile.made()
            if made.call in decided
        )
    )


@functools.cache
def _source_digest() -> str:
    return digest_sources(*_SOURCES)


def _refuse_loading(key: str) -> None:
    message = f"partitioner {key} was pickled only as a cache key, and cannot be loaded again"
    raise TypeError(message)
