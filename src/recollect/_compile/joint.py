"""The joint graph of AOTAutograd, forward and backward in one, read as a Profile.

Private names: what AOTAutograd calls its inputs (``primals_``, ``tangents_``), its notes on nodes (``original_aten``,
``nn_module_stack``, ``partitioner_tag``) and on outputs (``desc``), the hint behind a symbolic size.
Replaced by: a public description of joint graphs.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, fx

from recollect._compile.numbering import Numbering, original_of
from recollect._core.calls import Lifetime, OpCall, Phase, Storage, Value
from recollect._core.operators import count_flops, operator_of
from recollect._core.patterns import plain_path
from recollect._core.profiles import Profile
from recollect._core.torch_private.partitioner import BLOCKS, REGION
from recollect._core.torch_private.pytree import tree_leaves
from recollect._core.torch_private.schemas import HigherOrderOperator, OpOverload
from recollect._plan.fusing import find_saved

_UNKNOWN_SIZE = 4096  # of a dimension that nobody knows before the step runs; torch's partitioner takes the same
# Recomputed branches gave wrong gradients on Inductor; tokens order effects.
_ONCE = frozenset({"cond", "while_loop", "scan", "associative_scan", "map_impl", "with_effects", "inductor_seeds"})
# Share memory with their argument without a word in their schemas.
_ALIASING = frozenset({"aten._unsafe_view.default", "_c10d_functional.wait_tensor.default"})
_ROOT = re.compile(r"^L\['[^']*'\]\.?|^L__self___?")
_STAND_IN = ".forward._module()"  # see `_apply/stand_in.py`
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(slots=True)
class Joint:
    """A joint graph read.

    Attributes:
        profile: what it does.
        nodes: the node of each call of the profile.
        storages: for each node, the storages of the tensors that it gives, in order.
    """

    profile: Profile
    nodes: list[fx.Node]
    storages: dict[fx.Node, tuple[int, ...]]


def read_joint(
    module: fx.GraphModule,
    *,
    in_forward: Collection[str] = (),
    copied: Collection[str] = (),
    workspace: Callable[[fx.Node], int] = lambda node: 0,
) -> Joint:
    """Read a joint graph.

    Args:
        module: AOTAutograd's joint graph.
        in_forward: names of nodes that are forward's whatever they look like, as a partitioner may have it.
        copied: names of inputs of which a compiler makes a copy that lives as long as the step: a storage of its own.
        workspace: the bytes that a node takes while it runs, beside what it reads and gives.
    """
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    reading = _Reading(numbering=Numbering(calls), workspace=workspace)
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            reading.add_input(node, is_copied=node.name in copied)
        elif node.op == "call_function":
            reading.add_call(node, in_forward)
    outputs = next(iter(module.graph.find_nodes(op="output")))
    results = [leaf for leaf in tree_leaves(outputs.args) if leaf is None or isinstance(leaf, fx.Node)]
    reading.add_outputs([leaf for leaf in results if leaf is not None])
    overwritten = {storage for node in changed_inputs(module) for storage in reading.storages_of(node)}
    return reading.finish(overwritten)


def changed_inputs(module: fx.GraphModule) -> Iterator[fx.Node]:
    """The inputs that the step changes: within the graph, or after it from what forward returns."""
    outputs = next(iter(module.graph.find_nodes(op="output")))
    names = {str(index): node for index, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    for node in module.graph.nodes:
        for position in _written(node):
            if isinstance(node.args[position], fx.Node):
                yield node.args[position]
    for description in tree_leaves(outputs.meta.get("desc", [])):
        changed = getattr(description, "mutated_input", None)
        for node in names.values():
            if changed is not None and node.meta.get("desc") == changed:
                yield node


def _written(node: fx.Node) -> list[int]:
    """Positions of the arguments that a node writes into."""
    if not isinstance(node.target, OpOverload):
        return []
    arguments = enumerate(node.target._schema.arguments)
    written = (at for at, argument in arguments if argument.alias_info is not None and argument.alias_info.is_write)
    return [at for at in written if at < len(node.args)]


@dataclass(slots=True)
class _Reading:
    """What has been read so far."""

    numbering: Numbering
    workspace: Callable[[fx.Node], int]
    sizes: list[Storage] = field(default_factory=list)
    calls: list[tuple[fx.Node, OpCall]] = field(default_factory=list)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    in_backward: set[fx.Node] = field(default_factory=set)
    chosen: set[fx.Node] = field(default_factory=set)

    def add_input(self, node: fx.Node, *, is_copied: bool = False) -> None:
        given = "tangents" in str(node.target)
        lifetime = Lifetime.GIVEN if given else Lifetime.STEP
        first = len(self.sizes)
        self.values[node] = self._new(node.meta.get("val"), lifetime, str(node.target))
        if is_copied:
            self.sizes += self.sizes[first:]  # nobody reads that one: it is the compiler's own
        if given:
            self.in_backward.add(node)

    def add_call(self, node: fx.Node, in_forward: Collection[str]) -> None:
        if self._is_backward(node, in_forward):
            self.in_backward.add(node)
        source = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(source, fx.Node):
            whole = self.values[source]
            key: Any = node.args[1]
            self.values[node] = whole[key] if isinstance(whole, (list, dict)) else whole
            return
        reads = [value for other in node.all_input_nodes for value in _leaves(self.values[other])]
        written = [storage for at in _written(node) for storage in self._argument(node, at)]
        self.values[node] = self._results(node)
        outputs = _leaves(self.values[node])
        original = operator_of(original_of(node))
        region = str(node.meta.get(REGION, ""))
        phase = Phase.BACKWARD if node in self.in_backward else Phase.FORWARD
        number, first_output = self.numbering.number(node, region, len(outputs))
        call = OpCall(
            op=original.name,
            phase=phase,
            inputs=tuple(reads),
            outputs=tuple(outputs),
            writes=tuple(dict.fromkeys(written)),
            region=region,
            module=module_path(node) if phase is Phase.FORWARD else "",
            scopes=tuple(node.meta.get(BLOCKS, ())),
            call=number,
            first_output=first_output,
            source=_source(node),
            flops=_count_flops(node),
            is_random=operator_of(node.target).is_random,
            is_routing=original.is_routing or self._follows_choice(node, outputs),
            is_collective=original.is_collective,
            runs_once=bool(written) or _short(node.target) in _ONCE,
            workspace_bytes=self.workspace(node),
        )
        if call.is_routing:
            self.chosen.add(node)
        self.calls.append((node, call))

    def _follows_choice(self, node: fx.Node, outputs: list[Value]) -> bool:
        """Whether whole numbers or truths are counted out of routing results."""
        from_choice = any(_whole(other) in self.chosen for other in node.all_input_nodes)
        return from_choice and not any("float" in value.dtype or "complex" in value.dtype for value in outputs)

    def add_outputs(self, results: list[fx.Node]) -> None:
        for storage in {storage for node in results for storage in self.storages_of(node)}:
            if self.sizes[storage].lifetime is Lifetime.VALUE:
                self.sizes[storage] = replace(self.sizes[storage], lifetime=Lifetime.RETURNED)

    def storages_of(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(value.storage for value in _leaves(self.values[node]))

    def finish(self, overwritten: set[int]) -> Joint:
        ordered = sorted(self.calls, key=lambda pair: pair[1].phase is Phase.BACKWARD)  # stable
        calls = [
            replace(call, runs_once=True) if call.phase is Phase.FORWARD and overwritten & call.reads else call
            for _, call in ordered
        ]
        profile = Profile(storages=tuple(self.sizes), calls=tuple(calls))
        return Joint(
            replace(profile, saved=tuple(find_saved(profile))),
            [node for node, _ in ordered],
            {node: self.storages_of(node) for node in self.values},
        )

    def _is_backward(self, node: fx.Node, in_forward: Collection[str]) -> bool:
        if node.name in in_forward:
            return False
        tag = node.meta.get("partitioner_tag")
        return tag in ("is_backward", "must_be_in_backward") or any(
            other in self.in_backward for other in node.all_input_nodes
        )

    def _argument(self, node: fx.Node, at: int) -> tuple[int, ...]:
        argument = node.args[at]
        return self.storages_of(argument) if isinstance(argument, fx.Node) else ()

    def _results(self, node: fx.Node) -> Any:
        """The values that a node gives: on the storage of an argument where it is an alias, else on new ones."""
        aliased = _aliased_argument(node)
        if aliased is not None and (leaves := _leaves(self.values[aliased])):
            return _map(node.meta.get("val"), lambda tensor: _value(tensor, leaves[0].storage))
        shared = {
            _address(tensor): value.storage
            for other in node.all_input_nodes
            for tensor, value in zip(_tensors(other.meta.get("val")), _leaves(self.values[other]), strict=False)
        }
        return self._new(node.meta.get("val"), Lifetime.VALUE, "", shared)

    def _new(self, val: Any, lifetime: Lifetime, name: str, shared: dict[int, int] | None = None) -> Any:
        known = dict(shared or {})

        def place(tensor: Tensor) -> Value:
            address = _address(tensor)
            if address not in known:
                known[address] = len(self.sizes)
                whole = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0
                self.sizes.append(Storage(bytes=hint(whole), lifetime=lifetime, name=name))
            return _value(tensor, known[address])

        return _map(val, place)


def _aliased_argument(node: fx.Node) -> fx.Node | None:
    """The argument that a view is a view of, by its schema: what fake tensors share is lost when nodes are merged."""
    if not isinstance(node.target, OpOverload):
        return None
    schema = node.target._schema
    if not any(result.alias_info is not None for result in schema.returns) and str(node.target) not in _ALIASING:
        return None
    for at, argument in enumerate(schema.arguments[: len(node.args)]):
        given = node.args[at]
        if (argument.alias_info is not None or str(node.target) in _ALIASING) and isinstance(given, fx.Node):
            return given
    return None


def hint(size: int | torch.SymInt) -> int:
    """A size in numbers: a symbolic one as it was when the graph was traced.

    >>> hint(12)
    12
    """
    if isinstance(size, int):
        return size
    known = size.node.hint
    return _UNKNOWN_SIZE if known is None else int(known)


def _plain(path: object) -> str:
    """A path as users know it: without the compiled module's own name, wrappers, and our way to a module's forward."""
    return plain_path(_ROOT.sub("", str(path)).replace(_STAND_IN, "")).lstrip(".")


def module_path(node: fx.Node) -> str:
    """Path of the module that a forward node was traced in, from the compiled one."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return _plain(path)


def modules_around(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """The modules that a forward node was traced in, outermost first: path from the compiled one, and class."""
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        yield _plain(path), kind


def _source(node: fx.Node) -> str:
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return f"{PurePath(frames[-1][0]).name}:{frames[-1][1]}" if frames else ""


def _count_flops(node: fx.Node) -> int:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda other: other.meta.get("val"))
    flops: Any = count_flops(operator_of(node.target), args, kwargs, node.meta.get("val"))
    return hint(flops)


def _whole(node: fx.Node) -> fx.Node:
    """The node whose result this one is a part of."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _short(target: Any) -> str:
    """An operator's name without library and overload."""
    if isinstance(target, HigherOrderOperator):
        return str(target.name())
    parts = str(target).split(".")
    return parts[1] if len(parts) > 2 else parts[0]  # noqa: PLR2004


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _value(tensor: Tensor, storage: int) -> Value:
    shape = tuple(map(hint, tensor.shape))
    elements = 1
    for size in shape:
        elements *= size
    return Value(
        storage=storage,
        shape=shape,
        dtype=str(tensor.dtype).removeprefix("torch."),
        bytes=elements * tensor.dtype.itemsize,
    )


def _map(val: Any, place: Any) -> Any:
    """The structure of an example value with each tensor replaced, and all else gone."""
    if isinstance(val, Tensor):
        return place(val)
    if isinstance(val, (list, tuple)):
        return [_map(part, place) for part in val]
    return {key: _map(part, place) for key, part in val.items()} if isinstance(val, dict) else None


def _leaves(values: Any) -> list[Value]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Value)]


def _tensors(val: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(val) if isinstance(leaf, Tensor)]
