"""Decisions as tags on the nodes of a joint graph, by which torch's partitioner recomputes.

Every node of a region gets ``recompute`` and ``ac_graph_id``, never one without the other; ids rise in forward's order.
What a region takes from operators outside of any region is marked to be saved: otherwise the partitioner would walk out
of the region and compute that again, too. Our own words, ``recollect_region`` and ``recollect_decision``, stand beside
them for whoever partitions or offloads by those.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config
from torch.compiler import is_exporting
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from recollect._compile.inductor import arrange_backward
from recollect._compile.joint import hint, module_path, modules_around
from recollect._compile.nested import is_nested
from recollect._compile.numbering import Numbering, original_of
from recollect._compile.offloading import mark_offloaded
from recollect._core.decisions import Decision, Site
from recollect._core.errors import CompileError
from recollect._core.operators import Operator, count_flops, operator_of
from recollect._core.torch_private.partitioner import (
    BLOCKS,
    DECISION,
    EXPORTED,
    GIVEN,
    REGION,
    VALUES,
    CheckpointPolicy,
)
from recollect._core.torch_private.schemas import HigherOrderOperator
from recollect._policy.base import CallPolicy, Policy
from recollect._policy.judging import judge

_log = logging.getLogger("recollect")
_META = torch.device("meta")
_ids = itertools.count(1)
_RECOMPUTE = frozenset({CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE})


def tag_since(
    graph: Graph, start: Node | None, region: str, policy: Policy | None, *, offloads_inputs: bool = False
) -> tuple[list[Node], set[str]]:
    """Tag the nodes that a region's body has added behind `start`; gives them, and the rules that decided, in words.

    Args:
        graph: the joint graph.
        start: the last node before the region's; None if there was none.
        region: its name.
        policy: what decides in it.
        offloads_inputs: whether what it takes from operators before it is offloaded, as far as it is kept.
    """
    arrange_backward()
    added = nodes_since(graph, start)
    tagger = _Tagger(region, policy, added)
    region_id = new_region_id()
    for node in added:
        choice, decision = tagger.choose(node)
        if "ac_graph_id" in node.meta and node.meta.get("recompute") in _RECOMPUTE:
            # An inner region said so, and the outer one cannot keep what the inner forgets.
            choice, decision = node.meta["recompute"], Decision.RECOMPUTE
        node.meta["recompute"], node.meta["ac_graph_id"] = choice, region_id
        node.meta[DECISION] = decision.value
        if decision is Decision.OFFLOAD:
            mark_offloaded(node)
        node.meta.setdefault(REGION, region)
    needed = _keep_given(added, offloads_inputs=offloads_inputs)
    if is_exporting():
        _write_down([*added, *needed])
        _log.info(
            "region '%s' is recorded in the exported program, and takes effect when that is compiled. After "
            "torch.export.load, restore it with recollect.integrations.export.restore_regions(program)",
            region,
        )
    return added, tagger.words


def _keep_given(added: list[Node], *, offloads_inputs: bool) -> list[Node]:
    """Mark what a region's nodes take from operators before it, and give what no other region makes of that."""
    inside, needed = set(added), []
    for node in added:
        for source in node.all_input_nodes:
            if source in inside or source.op != "call_function":
                continue
            if offloads_inputs:
                mark_offloaded(source)
            if "ac_graph_id" not in source.meta:
                if source.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE) is CheckpointPolicy.MUST_SAVE:
                    source.meta[GIVEN] = True
                needed.append(source)
    return needed


def new_region_id() -> int:
    """A number that no other region has."""
    return next(_ids)


def _write_down(nodes: list[Node]) -> None:
    """Say what the tags say once more in annotations, see `exported.py`."""
    for node in nodes:
        said = {
            "choice": node.meta["recompute"].name,
            "number": node.meta.get("ac_graph_id", 0),
            "decision": node.meta.get(DECISION, Decision.SAVE.value),
            "region": node.meta.get(REGION, ""),
        }
        node.meta["custom"] = {**node.meta.get("custom", {}), EXPORTED: said}


def save_readers(added: list[Node], inputs: set[Node]) -> None:
    """Save what these nodes of a region make of some inputs, which they would not find again in backward."""
    changed = set(inputs)
    for node in added:
        if changed.intersection(node.all_input_nodes):
            if operator_of(node.target).is_view:
                changed.add(node)
            else:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
                node.meta[DECISION] = Decision.SAVE.value


def nodes_since(graph: Graph, start: Node | None) -> list[Node]:
    """The calls that give tensors and were added behind a node, in order."""
    found = []
    for node in reversed(graph.nodes):
        if node is start:
            break
        if node.op == "call_function" and tensors_of(node):
            found.append(node)
    return found[::-1]


def tensors_of(node: Node) -> list[Tensor]:
    """The example tensors that a node gives."""
    value = node.meta.get("val")
    if isinstance(value, dict):  # of a Triton kernel
        value = list(value.values())
    parts = value if isinstance(value, tuple | list) else (value,)
    return [part for part in parts if isinstance(part, Tensor)]


class _Tagger:
    """Asks a policy about the nodes of one region, in order."""

    def __init__(self, region: str, policy: Policy | None, added: list[Node]) -> None:
        self._region, self._policy = region, policy
        self._numbering = Numbering(added)
        self._chosen: set[Node] = set()
        self.words: set[str] = set()
        self._root = _common_path(added)
        for node in reversed(added):
            _pass_name_on(node)

    def choose(self, node: Node) -> tuple[CheckpointPolicy, Decision]:
        """What torch's partitioner is told, and what that is in our words."""
        if self._numbering.is_given_up(node):
            return CheckpointPolicy.PREFER_RECOMPUTE, Decision.RECOMPUTE
        if isinstance(self._policy, CallPolicy):
            choice = self._ask_of_call(self._policy, node)
            return choice, Decision.RECOMPUTE if choice in _RECOMPUTE else Decision.SAVE
        decision = self.decide(node)
        # Under torch's budget an operator of several outputs cannot be saved itself; its outputs are.
        is_whole = isinstance(node.meta["val"], tuple | list) and config.activation_memory_budget < 1
        is_again = decision is Decision.RECOMPUTE or is_whole
        return CheckpointPolicy.PREFER_RECOMPUTE if is_again else CheckpointPolicy.MUST_SAVE, decision

    def _ask_of_call(self, policy: CallPolicy, node: Node) -> CheckpointPolicy:
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            shared: CheckpointPolicy = node.args[0].meta.get("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
            return shared
        args, kwargs = _values_of(node)
        answer = policy.judge_call(original_of(node), args, kwargs, node.meta["val"])
        return CheckpointPolicy.PREFER_RECOMPUTE if answer is None else answer

    def decide(self, node: Node) -> Decision:
        """In our words."""
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, Node)
            # An output shares the fate of its operator.
            if source in self._chosen:
                self._chosen.add(node)
            return Decision(source.meta.get(DECISION, Decision.RECOMPUTE.value))
        if is_nested(node.target):
            return Decision.RECOMPUTE  # as a unit: no other stays a node, see `nested.py`
        if isinstance(node.target, HigherOrderOperator) or operator_of(node.target).hides_writes:
            # Recomputed branches gave wrong gradients on Inductor. Running statistics are returned to be written.
            return Decision.SAVE
        by_place = self._decide_by_place(node)
        site = self._site(node)
        if site.is_random and config.activation_memory_budget < 1:
            self._check_budget(site)
            return Decision.SAVE  # under torch's budget what is drawn again is drawn otherwise
        if by_place is not None:
            return by_place
        verdict = judge(self._policy, site)
        self.words.add(verdict.by)
        return verdict.decision

    def _check_budget(self, site: Site) -> None:
        """Refuse a budget under which torch asks no tag.

        Raises:
            CompileError: it is 0.
        """
        if config.activation_memory_budget == 0:
            message = (
                f"region '{self._region}' draws random numbers ({site.op}), but "
                "torch._functorch.config.activation_memory_budget is 0: torch then recomputes everything, whatever "
                "regions say, and draws different numbers.\n"
                "Leave the budget at 1: regions say what is recomputed."
            )
            raise CompileError(message)

    def _decide_by_place(self, node: Node) -> Decision | None:
        """Whether the node lies in a module, or under a name, that is kept whole."""
        if self._policy is None:
            return None
        names = (*node.meta.get(BLOCKS, ()), *node.meta.get(VALUES, ()))
        kept = [*map(self._policy.keeps_name, names)]
        kept += [self._policy.keeps_module(path, module) for path, module in self._modules_around(node)]
        words = [by for by in kept if by is not None]
        self.words.update(words)
        return Decision.SAVE if words else None

    def _modules_around(self, node: Node) -> Iterator[tuple[str, Any]]:
        """The modules of the region that a node lies in, outermost first: path, and what passes for an instance."""
        for path, kind in modules_around(node):
            if path.startswith(f"{self._root}." if self._root else "") and path != self._root:
                yield self._relative(path), _stand_in_for(kind)

    def _path(self, node: Node) -> str:
        return self._relative(module_path(node))

    def _relative(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip(".") if path.startswith(self._root) else path

    def _site(self, node: Node) -> Site:
        op = operator_of(original_of(node))
        number, _ = self._numbering.number(node, "", 1)
        is_routing = op.is_routing or self._follows_choice(node)
        if is_routing:
            self._chosen.add(node)
        tensor = tensors_of(node)[0]
        shape = tuple(map(hint, tensor.shape))
        count = 1
        for size in shape:
            count *= size
        return Site(
            region=self._region,
            op=op.name,
            call=number,
            module=self._path(node),
            scopes=tuple(node.meta.get(BLOCKS, ())),
            shape=shape,
            dtype=str(tensor.dtype).removeprefix("torch."),
            bytes=count * tensor.dtype.itemsize,
            flops=_flops(node, op),
            is_random=op.is_random,
            is_routing=is_routing,
            is_collective=op.is_collective,
        )

    def _follows_choice(self, node: Node) -> bool:
        """Whether whole numbers or truths are counted out of routing results."""
        return any(source in self._chosen for source in node.all_input_nodes) and not any(
            tensor.is_floating_point() or tensor.is_complex() for tensor in tensors_of(node)
        )


def _stand_in_for(kind: Any) -> Any:
    """An object of a class without its constructor: rules ask ``isinstance``, and graphs know the class alone."""
    return object.__new__(kind) if isinstance(kind, type) else None


def _pass_name_on(node: Node) -> None:
    """A named value is seen as a view of it; keeping a view keeps nothing, so its base has the name, too."""
    names = node.meta.get(VALUES)
    if names and node.all_input_nodes and operator_of(node.target).is_view:
        base = node.all_input_nodes[0]
        base.meta[VALUES] = tuple(dict.fromkeys((*names, *base.meta.get(VALUES, ()))))


def _flops(node: Node, op: Operator) -> int:
    if op.flops is None or op.name != operator_of(node.target).name:
        return 0
    # By shapes in numbers, not by the example tensors: symbolic sizes would become a part of the guards.
    args, kwargs, result = tree_map(_shape_if_tensor, (*_values_of(node), node.meta["val"]))
    try:
        return count_flops(op, args, kwargs, result)
    except AssertionError:  # a formula of torch 2.11 that knows no attention with fewer heads of keys than of queries
        return 0


def _shape_if_tensor(value: Any) -> Any:
    return _Shape(map(hint, value.shape)) if isinstance(value, Tensor) else value


class _Shape(tuple[int, ...]):
    """A shape that passes for a tensor with it: some formulas take the one, some, those of attention, the other."""

    __slots__ = ()

    device = _META
    """Where formulas do not ask for the numbers in a tensor."""

    @property
    def shape(self) -> _Shape:
        """Itself."""
        return self

    def size(self, dim: int) -> int:
        """As of a tensor."""
        return self[dim]


def _values_of(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments as example values."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda other: other.meta.get("val"))
    return tuple(args), dict(kwargs)


def _common_path(nodes: list[Node]) -> str:
    """The path of the module that all of these lie in: the region's own, if it is made of one."""
    paths = [path.split(".") for node in nodes if (path := module_path(node))]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
