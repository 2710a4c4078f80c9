"""The graphs that are alive, the calls that made their nodes, and the model that these calls are of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from recollect._apply.forwards import is_called
from recollect._apply.targets import find_targets
from recollect._core.torch_private.engine import sequence_of
from recollect._core.torch_private.graph import NodeContents, leaf_of, read_node
from recollect._inspect.packed import Packed
from recollect._profile.tracks import Spans, Spot

_MOST_VOTES = 50
_COMPILED = "CompiledFunction"

Made = tuple[int, Spans | None]
"""When a node was made: its number, and the calls of the thread that counted it."""


def find_spot(made: Made) -> Spot | None:
    """Where a node was made; None if no calls were noted then."""
    number, spans = made
    return None if spans is None else spans.find(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node, and where it was made."""

    contents: NodeContents
    made: Made


class Graph:
    """The nodes of all graphs behind these tensors, and the thread that each graph was made on."""

    def __init__(self, tensors: Iterable[Tensor], spans: list[Spans]) -> None:
        self.spans = spans
        self.leaves: list[Tensor] = []
        self.nodes: list[Node] = []
        self.forgotten = self.compiled = 0
        self.opaque: Counter[str] = Counter()
        self._packed = Packed()
        for part in _parts(_roots(tensors)):
            made_by = thread_of(part, spans)
            for node in part:
                leaf = leaf_of(node)
                if leaf is not None:
                    self.leaves.append(leaf)
                    continue
                contents = read_node(node)
                self.opaque[contents.name] += contents.is_opaque
                self.compiled += contents.name.startswith(_COMPILED)
                self.nodes.append(Node(contents=contents, made=(sequence_of(node), made_by)))
        self.opaque += Counter()  # drops those of which there are none

    def count_nodes(self) -> Counter[int]:
        """How many nodes the outermost modules, by their ids, have made."""
        found: Counter[int] = Counter()
        for node in self.nodes:
            spot = find_spot(node.made)
            if spot is not None and spot.call is not None:
                found[id(spot.call.around()[-1].module)] += 1
        return found

    def held(self, node: Node) -> Iterator[Tensor]:
        """What a node keeps alive, and what its region does, which counts for the first node that has it."""
        for held in node.contents.held:
            for part in self._packed.parts(held):
                self.forgotten += part.is_forgotten
                if part.tensor is not None:
                    yield part.tensor


def _roots(tensors: Iterable[Tensor]) -> dict[Any, None]:
    roots: dict[Any, None] = {}
    for tensor in tensors:
        with suppress(Exception):  # a view whose base was changed in a way that autograd refuses
            if tensor.requires_grad and tensor.grad_fn is not None:
                roots[tensor.grad_fn] = None
    return roots


def _parts(roots: Iterable[Any]) -> list[list[Any]]:
    """The nodes behind these, those in one list that hang together otherwise than by parameters."""
    parts: list[list[Any]] = []
    part_of: dict[Any, int] = {}  # holds the nodes: their Python objects, and so their identities
    for root in roots:
        if root in part_of:
            continue
        mine, into = [], len(parts)
        part_of[root] = into
        pending = [root]
        while pending:
            node = pending.pop()
            mine.append(node)
            for following, _ in node.next_functions:
                if following is None:
                    continue
                known = part_of.get(following)
                if known is None:
                    part_of[following] = len(parts)
                    pending.append(following)
                elif known != len(parts) and leaf_of(following) is None:
                    into = known
        parts.append(mine if into == len(parts) else [])
        if into != len(parts) - 1:
            parts[into].extend(mine)
            part_of.update(dict.fromkeys(mine, into))
    return [part for part in parts if part]


def thread_of(nodes: Iterable[Any], threads: list[Spans]) -> Spans | None:
    """The thread that made these nodes. Threads number them the same way; the right one knows their parameters."""
    if len(threads) < 2:  # noqa: PLR2004
        return threads[0] if threads else None
    votes: Counter[int] = Counter()
    for node in nodes:
        for following, _ in node.next_functions:
            leaf = None if following is None else leaf_of(following)
            if leaf is not None:
                votes.update(i for i, spans in enumerate(threads) if _knows(spans.find(sequence_of(node)), leaf))
        if votes.total() > _MOST_VOTES:
            break
    return threads[max(range(len(threads)), key=lambda i: votes[i])]  # the first, this thread, if there are none


def _knows(spot: Spot | None, leaf: Tensor) -> bool:
    if spot is None or spot.call is None or spot.call.module is None:
        return False
    return any(leaf is parameter for parameter in spot.call.module.parameters(recurse=False))


class NamedModel:
    """The model among the modules that were called, and the names of all of them."""

    def __init__(self, graph: Graph, modules: list[nn.Module]) -> None:
        outermost = {
            id(call.module): call.module
            for spans in graph.spans
            for call in spans.calls
            if call.parent is None and call.module is not None
        }
        inside = {id(part) for module in outermost.values() for part in module.modules() if part is not module}
        roots = [module for key, module in outermost.items() if key not in inside]
        self._names: dict[int, str] = {}
        self.root = _main(roots, modules, graph.count_nodes())
        for module in roots:
            if module is not self.root:
                self._learn(module, type(module).__name__)
        if self.root is not None:
            self._learn(self.root, "")

    def _learn(self, root: nn.Module, prefix: str) -> None:
        for target in find_targets(root):
            for module in target.chain:
                self._names[id(module)] = ".".join(filter(None, (prefix, target.name)))

    def name(self, module: nn.Module | None) -> tuple[str, str]:
        """A module's class and path."""
        if module is None:
            return "", ""
        kind = type(module).__name__
        return kind, self._names.get(id(module), kind)

    def name_spot(self, spot: Spot | None) -> tuple[str, str]:
        """The class and path of the module that something was made in."""
        return self.name(spot.call.module if spot is not None and spot.call is not None else None)


def _main(roots: list[nn.Module], modules: list[nn.Module], nodes: Counter[int]) -> nn.Module | None:
    """The model: what was called and has most of the graph, or, if parts of it were called by themselves, all of it."""
    trained = [module for module in roots if next(module.parameters(), None) is not None]
    trained = [module for module in trained if nodes[id(module)]] or trained
    if len(trained) > 1:
        wanted = {id(module) for module in trained}
        models = [module for module in modules if is_called(module)]  # not a list of its parts
        sizes = {id(module): sum(1 for _ in module.modules()) for module in models}
        for module in sorted(models, key=lambda module: sizes[id(module)]):
            if sizes[id(module)] > len(wanted) and wanted <= {id(part) for part in module.modules()}:
                return module
    return max(trained or roots, key=lambda module: nodes[id(module)], default=None)
