"""What is alive on a device, and what of it is held for backward by which module and line.

Read from the garbage collector's list of objects and from the graphs behind its tensors, without a copy and without
device memory. The list has what no variable names any more, such as the results of a module whose caller still runs.
What only C++ holds, outside of graphs, is not seen: gradients on their way through backward, workspaces.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recollect._apply.blocks import find_blocks
from recollect._apply.forwards import is_called
from recollect._apply.targets import find_targets
from recollect._core.torch_private.engine import sequence_of
from recollect._core.torch_private.graph import walk
from recollect._core.torch_private.pytree import tree_leaves
from recollect._inspect.oom.graph import Graph, Made, NamedModel, Node, find_spot, thread_of
from recollect._inspect.oom.remedies import Candidate
from recollect._profile.storages import storages_of
from recollect._profile.tracks import ModuleCall, Tracks

_MOST_OTHERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlace:
    """What was held for backward of the nodes of one module and line."""

    module: str
    """Its path in the model; for a module outside of the model that and its class; empty outside of modules."""
    kind: str
    """The module's class."""
    line: str
    """Of the user's code: ``model.py:41``; ``model.py:41-44`` for one of these lines."""
    bytes: int
    tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """What was alive on one device. Plain data: holds no tensor."""

    parameter_bytes: int = 0
    """Buffers included."""
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    saved_bytes: int = 0
    """Held for backward by graphs; the rows of `saved` together."""
    other_bytes: int = 0
    """Tensors that Python can see and none of the above: inputs, results, what variables and lists hold."""
    others: tuple[tuple[str, int], ...] = ()
    """The largest of those: ``float32[8, 1024]`` and bytes."""
    saved: tuple[SavedPlace, ...] = ()
    """Largest first."""
    candidates: tuple[Candidate, ...] = field(default=(), repr=False)
    """Called modules of the model, in its order, and what recomputing each would free."""
    model: str = ""
    """The model's class; empty if none was called."""
    failed_module: str = ""
    failed_kind: str = ""
    """The module whose call raised, or whose node did, if one did."""
    failed_line: str = ""
    """The line that made the node that raised."""
    is_exact: bool = False
    """Whether the node that raised is certain."""
    calls: int = 0
    """How many calls of the model have a graph that holds something."""
    compiled: int = 0
    """Nodes that are whole graphs of torch.compile."""
    forgotten: int = 0
    """Tensors that regions have let go of."""
    opaque: tuple[tuple[str, int], ...] = ()
    """Nodes that may hold more than Python can see, by name, and how many."""
    unplaced_bytes: int = 0
    """Of what is saved: by nodes that were made before calls were noted."""
    root: ref[nn.Module] | None = field(default=None, repr=False, compare=False)
    """The model, while it is alive."""
    optimizer: ref[Optimizer] | None = field(default=None, repr=False, compare=False)
    """What trains it, if one was found."""

    @property
    def known_bytes(self) -> int:
        """All of it."""
        held = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return held + self.saved_bytes + self.other_bytes


def find_alive(tracks: Tracks, device: str, failed: nn.Module | None = None, node: Any = None) -> Alive:
    """Look at all that is alive on a device now.

    Args:
        tracks: where nodes were made.
        device: as in `Shortage`.
        failed: the module whose call has raised.
        node: or the node of a graph that has.
    """
    objects = _Objects()
    graph = Graph(objects.tensors, tracks.read())
    model = NamedModel(graph, objects.modules)
    sums = _Sums(device)
    parameters = sums.add(_parameters(objects))
    optimizers = sums.add(_optimizer_states(objects.optimizers))
    gradients = sums.add(_gradients([*objects.tensors, *graph.leaves]))
    saved = _Saved(graph, sums, data={id(storage) for storage in _data(objects.tensors)})
    places = saved.places(model)
    others = sums.describe(objects.tensors)
    spans = None if node is None else thread_of(walk([node]), graph.spans)
    spot = None if spans is None else spans.find(sequence_of(node))
    kind, path = model.name_spot(spot) if failed is None else model.name(failed)
    return Alive(
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        optimizer_bytes=optimizers,
        saved_bytes=saved.bytes,
        other_bytes=sum(others.values()),
        others=tuple(others.most_common(_MOST_OTHERS)),
        saved=places,
        candidates=saved.candidates(model),
        model=type(model.root).__name__ if model.root is not None else "",
        failed_module=path,
        failed_kind=kind,
        failed_line="" if spot is None else spot.line,
        calls=saved.count_calls(model),
        compiled=graph.compiled,
        forgotten=graph.forgotten,
        opaque=tuple(graph.opaque.most_common()),
        unplaced_bytes=saved.unplaced_bytes,
        root=None if model.root is None else ref(model.root),
        optimizer=_find_optimizer(model.root, objects.optimizers),
    )


def _find_optimizer(root: nn.Module | None, optimizers: Iterable[Optimizer]) -> ref[Optimizer] | None:
    """The optimizer that has parameters of a model."""
    if root is None:
        return None
    own = {id(parameter) for parameter in root.parameters()}
    for optimizer in optimizers:
        with suppress(Exception):  # one that is being made
            if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
                return ref(optimizer)
    return None


class _Objects:
    """What the garbage collector knows. Holds all of it: not to be kept."""

    def __init__(self) -> None:
        found: dict[type, list[Any]] = {Tensor: [], nn.Module: [], Optimizer: []}
        lists: dict[type, list[Any] | None] = {}
        for thing in gc.get_objects():
            kind = type(thing)  # not isinstance: it asks the object, and proxies answer as they like
            if kind not in lists:
                base = next((base for base in found if base in type.mro(kind)), None) if kind is not type else None
                lists[kind] = None if base is None or kind.__name__ == "FakeTensor" else found[base]
            into = lists[kind]
            if into is not None:
                into.append(thing)
        self.tensors: list[Tensor] = found[Tensor]
        # Not those that are being made, or that were only begun to be.
        self.modules: list[nn.Module] = [module for module in found[nn.Module] if "_modules" in vars(module)]
        self.optimizers: list[Optimizer] = found[Optimizer]


def _parameters(objects: _Objects) -> Iterator[Tensor]:
    yield from (tensor for tensor in objects.tensors if isinstance(tensor, nn.Parameter))
    for module in objects.modules:
        with suppress(Exception):  # one that is being made
            yield from module.parameters(recurse=False)
            yield from module.buffers(recurse=False)


def _gradients(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        with suppress(Exception):  # a transform's wrapper
            if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None:
                yield tensor.grad


def _optimizer_states(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        with suppress(Exception):  # one that is being made
            for state in list(optimizer.state.values()):
                yield from (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))


def _data(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """The storages of tensors that Python has and that no node has made."""
    for tensor in tensors:
        with suppress(Exception):
            if tensor.grad_fn is None:
                yield from (storage for storage, _ in _storages(tensor))


def _storages(tensor: Tensor) -> list[tuple[torch.UntypedStorage, torch.device]]:
    try:
        return storages_of(tensor)
    except Exception:  # a subclass, or a transform's wrapper, that will not say
        return []


class _Sums:
    """Adds up storages of one device, each once, in the order they are given."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._seen: dict[int, torch.UntypedStorage] = {}  # holds them: their identities live as long as this

    def is_here(self, device: torch.device) -> bool:
        return device.type == self._device.type and (device.index or 0) == (self._device.index or 0)

    def take(self, storage: torch.UntypedStorage, device: torch.device) -> int:
        """The bytes of a storage that is seen for the first time; 0 for any other."""
        if not self.is_here(device) or id(storage) in self._seen:
            return 0
        self._seen[id(storage)] = storage
        return storage.nbytes()

    def add(self, tensors: Iterable[Tensor]) -> int:
        return sum(self.take(*found) for tensor in tensors for found in _storages(tensor))

    def describe(self, tensors: Iterable[Tensor]) -> Counter[str]:
        """Bytes by dtype and shape."""
        bytes_by_kind: Counter[str] = Counter()
        for tensor in tensors:
            size = sum(self.take(*found) for found in _storages(tensor))
            if size:
                shape = list(tensor.shape) if tensor.layout is torch.strided else ""
                bytes_by_kind[f"{str(tensor.dtype).removeprefix('torch.')}{shape}"] += size
        return bytes_by_kind


class _HeldStorage:
    """One storage that graphs hold."""

    __slots__ = ("bytes", "holders", "is_given", "made", "tensors")

    def __init__(self, size: int) -> None:
        self.bytes = size
        self.holders: list[Made] = []
        self.made: Made | None = None
        self.is_given = False  # not made by a node: data, or what was computed without grad


class _Saved:
    """The storages that graphs hold, parameters and the like left out."""

    def __init__(self, graph: Graph, sums: _Sums, *, data: set[int]) -> None:
        self.entries: dict[int, _HeldStorage] = {}
        self.unplaced_bytes = 0
        self._nodes = graph.nodes
        self._chains: dict[int, frozenset[int]] = {}
        for node in graph.nodes:
            for tensor in graph.held(node):
                for storage, device in _storages(tensor):
                    size = sums.take(storage, device)
                    if size:
                        self.entries[id(storage)] = _HeldStorage(size)
                    entry = self.entries.get(id(storage))
                    if entry is not None:
                        self._note(entry, node, tensor, is_data=id(storage) in data)

    @staticmethod
    def _note(entry: _HeldStorage, node: Node, tensor: Tensor, *, is_data: bool) -> None:
        entry.holders.append(node.made)
        base = tensor if tensor._base is None else tensor._base  # noqa: SLF001
        if base.grad_fn is not None:
            made = sequence_of(base.grad_fn)
        elif is_data or base.requires_grad:
            entry.is_given = True
            return
        else:
            made = node.made[0]  # the node saved its own result, or what it made along with it
        if entry.made is None or made < entry.made[0]:
            entry.made = (made, node.made[1])

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries.values())

    def places(self, model: NamedModel) -> tuple[SavedPlace, ...]:
        """By module and line."""
        sizes: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
        for entry in self.entries.values():
            spot = find_spot(min(entry.holders, key=lambda held: held[0]) if entry.made is None else entry.made)
            if spot is None:
                self.unplaced_bytes += entry.bytes
            kind, path = model.name_spot(spot)
            sizes[kind, path, "" if spot is None else spot.line].append(entry.bytes)
        rows = [
            SavedPlace(module=path, kind=kind, line=line, bytes=sum(found), tensors=len(found))
            for (kind, path, line), found in sizes.items()
        ]
        return tuple(sorted(rows, key=lambda row: -row.bytes))

    def candidates(self, model: NamedModel) -> tuple[Candidate, ...]:
        """The modules that are called, and what each holds that recomputing it would free.

        That is what was made in it and is held by its nodes alone; what was made outside, its input above all, has to
        be kept to recompute it.
        """
        if model.root is None:
            return ()
        freed: Counter[int] = Counter()
        operators: Counter[int] = Counter()
        for node in self._nodes:
            operators.update(self._chain(node.made))
        for entry in self.entries.values():
            if entry.made is not None and not entry.is_given:
                chains = (self._chain(held) for held in entry.holders)
                for module in self._chain(entry.made).intersection(*chains):
                    freed[module] += entry.bytes
        blocks = {id(module) for module in find_blocks(model.root)}
        return tuple(
            Candidate(
                path=target.name,
                kind=type(target.chain[-1]).__name__,
                freed_bytes=max(freed[id(module)] for module in target.chain),
                operators=max(operators[id(module)] for module in target.chain),
                is_block=any(id(module) in blocks for module in target.chain),
            )
            for target in find_targets(model.root)
            if target.name and is_called(target.chain[-1])
        )

    def _chain(self, at: Made) -> frozenset[int]:
        """The modules, by their ids, within whose calls a node was made."""
        spot = find_spot(at)
        if spot is None or spot.call is None:
            return frozenset()
        key = id(spot.call)
        if key not in self._chains:
            self._chains[key] = frozenset(id(call.module) for call in spot.call.around() if call.module is not None)
        return self._chains[key]

    def count_calls(self, model: NamedModel) -> int:
        """How many calls of the model made what is held."""
        calls: set[int] = set()
        for entry in self.entries.values():
            for held in entry.holders:
                spot = find_spot(held)
                if spot is not None and spot.call is not None:
                    outermost: ModuleCall = spot.call.around()[-1]
                    if outermost.module is model.root:
                        calls.add(id(outermost))
        return len(calls)
