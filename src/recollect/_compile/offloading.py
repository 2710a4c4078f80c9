"""Offloading in graphs: values that are to be offloaded are marked on their nodes, and moved when the graph is cut.

torch's partitioners end with a pass of torch's own that offloads what is marked for it. It holds the memory of every
value until forward ends, which frees nothing where the loss is part of the graph. So this one takes its place, for our
marks: what is marked leaves as soon as it is made, its memory is free when it has left, and its way back begins as late
as the link allows (`_core/timetables.py`). The pass runs only where its switch is on. Nothing else reads the switch, so
it is turned on when the first mark is made, for good. Marks of others are left to torch.

Private names: the configuration of ``torch._functorch``, and ``enable_activation_offloading``, which the partitioners
look up when they have cut a graph.
Would be replaced by: a public pass over both halves of a graph that was cut.
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from recollect._compile.joint import read_joint
from recollect._compile.nodes import base_of, bytes_of, has_kernel, is_part_of_view, is_view
from recollect._compile.speeds import carrier_of
from recollect._compile.transfers import ARRIVE, FETCH, RELEASE, SEND
from recollect._core.timetables import SeenValue, Speeds, Timetable, make_timetable
from recollect._plan.sent_values import Carrier

MARK = "recollect_offload"
INPUTS = "inputs"
"""What a call of a region says whose inputs go to the host. Of one that offloads nothing it is nothing, and of one that
sends to where graphs cannot, it says where that is."""
_HOST = torch.device("cpu")


def mark_offloaded(node: fx.Node) -> None:
    """Have a node's value offloaded, if it is kept for backward.

    Without an accelerator values are in host memory already, and stay as they are.
    """
    from torch._functorch import config  # not with `import recollect`, which this file is a part of
    from torch._functorch._activation_offloading import activation_offloading

    node.meta[MARK] = True
    if not hasattr(activation_offloading.enable_activation_offloading, MARK):
        theirs: Any = activation_offloading
        theirs.enable_activation_offloading = _moving(theirs.enable_activation_offloading)
    config.enable_activation_offloading = True


def _moving(others: Any) -> Any:
    @functools.wraps(others)
    def move_and_pass_on(forward: fx.GraphModule, backward: fx.GraphModule, count: int, *rest: Any) -> None:
        move_marked(forward, backward, count)
        others(forward, backward, count, *rest)

    setattr(move_and_pass_on, MARK, True)
    return move_and_pass_on


def refuse_tier(region: str, sends: str) -> str:
    """Say that a graph cannot send to where a region does."""
    return (
        f"region '{region}' offloads to {sends}, but compiled code can offload only to pinned "
        "host memory. Leave offload_to out, or let Dynamo break the graph there "
        "(fullgraph=False), so that the region runs eagerly"
    )


def can_leave(device: torch.device) -> bool:
    """Whether sending values of a device to the host frees any of its memory."""
    return device.type != "cpu"


def move_marked(forward: fx.GraphModule, backward: fx.GraphModule, count: int) -> int:
    """Put the transfers of all marked values into both halves of a graph; gives how many values travel.

    Args:
        forward: gives results, then what it keeps for backward.
        backward: is given the latter, under the same names.
        count: of results.
    """
    kept = list(_list_kept(forward, backward, count))
    if not any(one.is_marked for one in kept):
        return 0
    carrier = carrier_of(kept[0].value.device)
    clock = _Clock(forward, backward, carrier)
    kept.sort(key=lambda one: clock.forward_s[one.node])
    table = clock.plan(kept, carrier)
    sent = [number for number, one in enumerate(kept) if one.is_marked and table.sends[number]]
    places = _find_releases(table, kept, clock)
    for number in sent:
        host = kept[number].send(forward, places[number], count)
        kept[number].take_back(backward, host)
    for place, numbers in table.fetches.items():
        before = clock.first_backward if place < 0 else kept[place].first_use
        for number in numbers:
            if number in sent:
                kept[number].fetch_before(before)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()
    return len(sent)


@dataclass(slots=True, kw_only=True)
class _Kept:
    """A value that forward keeps for backward.

    Attributes:
        node: that makes it, in forward.
        saved: the nodes by which forward keeps it: itself, or views of it.
        given: those that stand for them in backward.
        first_use: the first node of backward that reads one of them.
        is_marked: whether it is to leave, and can.
        host: once it leaves, the node of backward that stands for it.
        back: the node of backward by which it is back.
    """

    node: fx.Node
    saved: list[fx.Node]
    given: list[fx.Node]
    first_use: fx.Node
    is_marked: bool
    host: fx.Node | None = None
    back: fx.Node | None = None

    @property
    def value(self) -> Tensor:
        """What it looks like."""
        value: Tensor = self.node.meta["val"]
        return value

    def send(self, forward: fx.GraphModule, place: fx.Node, count: int) -> fx.Node:
        """Let it leave once it is made, and its memory go after a node, or after the last one that reads it."""
        graph = forward.graph
        places = {node: number for number, node in enumerate(graph.nodes)}
        output = next(iter(graph.find_nodes(op="output")))
        readers = [user for user in _list_readers(self.node) if user is not output]
        with graph.inserting_after(self.node):
            ticket = _call(graph, SEND, (self.node,), None)
        after = max((self.node, place, *readers), key=places.__getitem__)
        with graph.inserting_after(ticket if after is self.node else after):
            host = _call(graph, RELEASE, (ticket, self.node), self.value, device=_HOST)
        outputs: Any = output.args[0]
        kept = [host if one is self.saved[0] else one for one in outputs[count:] if one not in self.saved[1:]]
        output.args = (type(outputs)((*outputs[:count], *kept)),)
        return host

    def take_back(self, backward: fx.GraphModule, sent: fx.Node) -> None:
        """Let backward be given the value as it is in host memory, and everybody read what comes back."""
        graph = backward.graph
        with graph.inserting_after(self.given[0]):
            self.host = graph.placeholder(sent.name)
        self.host.meta = {**self.given[0].meta, **sent.meta}
        with graph.inserting_before(self.first_use):
            self.back = _call(graph, ARRIVE, (self.host, self.host, self.value.device), self.value)
            for saved, given in zip(self.saved, self.given, strict=True):
                given.replace_all_uses_with(_view_again(graph, saved, self.node, self.back))
                graph.erase_node(given)

    def fetch_before(self, place: fx.Node) -> None:
        """Begin its way back before a node."""
        assert self.back is not None
        graph = place.graph
        with graph.inserting_before(self.back if place is self.first_use else place):
            ticket = _call(graph, FETCH, (self.host, self.value.device), None)
        self.back.update_arg(0, ticket)


def _view_again(graph: fx.Graph, view: fx.Node, base: fx.Node, back: fx.Node) -> fx.Node:
    """In backward, the view of a value that forward had."""
    if view is base:
        return back
    source = _view_again(graph, view.all_input_nodes[0], base, back)
    return graph.node_copy(view, lambda _: source)


def _list_kept(forward: fx.GraphModule, backward: fx.GraphModule, count: int) -> Iterator[_Kept]:
    """What forward makes and keeps, with all views of it; not what it also returns, which is there anyway."""
    outputs: Any = next(iter(forward.graph.find_nodes(op="output"))).args[0]
    returned = {base_of(one) for one in outputs[:count] if isinstance(one, fx.Node)}
    given = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    places = {node: place for place, node in enumerate(backward.graph.nodes)}
    views: dict[fx.Node, list[fx.Node]] = {}
    for node in outputs[count:]:
        if isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor) and node.name in given:
            views.setdefault(base_of(node), []).append(node)
    for base, saved in views.items():
        own = [given[one.name] for one in saved]
        users = [user for one in own for user in one.users]
        if base.op != "call_function" or base in returned or not users:
            continue
        whole = saved[0] if len(saved) == 1 and bytes_of(saved[0]) == bytes_of(base) else base
        is_marked = any(one.meta.get(MARK) for one in (base, *saved))
        yield _Kept(
            node=whole,
            saved=saved,
            given=own,
            first_use=min(users, key=places.__getitem__),
            is_marked=is_marked and _can_travel(whole, saved),
        )


def _can_travel(node: fx.Node, saved: Sequence[fx.Node]) -> bool:
    """Whether a value can leave its device: it fills its memory without a gap, and its views are made of it alone."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided or not can_leave(value.device):
        return False
    is_dense: bool = torch.ops.aten.is_non_overlapping_and_dense.default(value)
    return is_dense and all(len(one.all_input_nodes) == 1 for view in saved for one in _list_views(view, node))


def _list_views(view: fx.Node, base: fx.Node) -> Iterator[fx.Node]:
    """The views on the way from a value to one of it."""
    while view is not base:
        yield view
        view = view.all_input_nodes[0]


def _list_readers(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a node or a view of it, or is one."""
    for user in node.users:
        yield user
        if is_view(user) or is_part_of_view(user):
            yield from _list_readers(user)


class _Clock:
    """When the nodes of both graphs are done, by estimate.

    Attributes:
        forward_s: for each node of forward, when it is done.
        kernels: the nodes of forward with kernels of their own.
        first_backward: the first node of backward that runs.
    """

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule, carrier: Carrier) -> None:
        self.forward_s = _add_up(forward, carrier, 0.0)
        end_s = max(self.forward_s.values(), default=0.0)
        self._backward_s = _add_up(backward, carrier, end_s)
        self.kernels = [node for node in forward.graph.nodes if has_kernel(node)]
        self.first_backward = next(node for node in backward.graph.nodes if node.op != "placeholder")

    def plan(self, kept: Sequence[_Kept], carrier: Carrier) -> Timetable:
        """When to begin what."""
        seen = [
            SeenValue(
                bytes=bytes_of(one.node),
                made_s=self.forward_s[one.node],
                used_s=self._backward_s[one.first_use.prev],
                is_held=not one.is_marked,
            )
            for one in kept
        ]
        return make_timetable(
            seen,
            Speeds(out=carrier.bytes_per_s, back=carrier.bytes_per_s),
            in_flight=sum(value.bytes for value in seen),
            waits=True,
            passes_s=[self.forward_s[node] for node in self.kernels],
        )


def _add_up(module: fx.GraphModule, carrier: Carrier, start_s: float) -> dict[fx.Node, float]:
    read = read_joint(module)
    each_s = {node: carrier.seconds_of(call) for node, call in zip(read.nodes, read.profile.calls, strict=True)}
    nodes = list(module.graph.nodes)
    ends_s = itertools.accumulate((each_s.get(node, 0.0) for node in nodes), initial=start_s)
    return dict(zip(nodes, itertools.islice(ends_s, 1, None), strict=True))


def _find_releases(table: Timetable, kept: Sequence[_Kept], clock: _Clock) -> dict[int, fx.Node]:
    """For each value, the node of forward after which it has left."""
    last = clock.kernels[-1] if clock.kernels else kept[-1].node
    found = dict.fromkeys(table.gone_s, last)  # in the end, if not before
    for place, numbers in table.passes.items():
        found.update(dict.fromkeys(numbers, clock.kernels[place] if place >= 0 else last))
    for place, numbers in table.releases.items():
        found.update(dict.fromkeys(numbers, kept[place].node))
    return found


def _call(
    graph: fx.Graph, operator: Any, args: tuple[Any, ...], value: Tensor | None, *, device: torch.device | None = None
) -> fx.Node:
    """A node of ours: what it gives looks like a value, or is a ticket."""
    node = graph.call_function(operator, args)
    with _fakes_of(args[0]):
        if value is None:
            node.meta["val"] = torch.empty(1, dtype=torch.uint8, device=_HOST)
        else:
            where = device or value.device
            node.meta["val"] = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=where)
    return node


def _fakes_of(node: fx.Node) -> Any:
    """The mode in which the values of a graph were made."""
    return node.meta["val"].fake_mode
