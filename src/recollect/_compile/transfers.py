"""The operators of graphs by which values leave for host memory and come back, beside the stream that computes.

    ticket = send(value)            begins a copy to pinned memory
    host = release(ticket, value)   what computes waits for it; from here on the value's memory is free
    ticket = fetch(host)            takes memory for the value and begins the copy back
    value = arrive(ticket, host)    what computes waits for that

For a compiler these are ordinary operators: none writes into an argument, none gives an argument back, and what each
gives is used, so that it drops none. It only has to keep their order (`ordering.py`). Who waits is always the stream
that computes, never the host. A value on the CPU is copied there and then.

Pinned memory is torch's own: it is lent again when the copies that use it are done, and pieces are powers of two.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, fx

_CARRIES = "_recollect_carries"
"""What a ticket has of a copy under way: the target, and the event at its end."""

_library = torch.library.Library("recollect", "DEF")
_library.define("send(Tensor value) -> Tensor")
_library.define("release(Tensor ticket, Tensor value) -> Tensor")
_library.define("fetch(Tensor host, Device device) -> Tensor")
_library.define("arrive(Tensor ticket, Tensor host, Device device) -> Tensor")

SEND, RELEASE = torch.ops.recollect.send.default, torch.ops.recollect.release.default
FETCH, ARRIVE = torch.ops.recollect.fetch.default, torch.ops.recollect.arrive.default
_ALL = frozenset({SEND, RELEASE, FETCH, ARRIVE})


def is_transfer(node: fx.Node) -> bool:
    """Whether a node of a graph is one of these operators."""
    return node.op == "call_function" and node.target in _ALL


def sent_node(node: fx.Node) -> fx.Node:
    """The node whose value one that is in host memory is; another node itself."""
    if node.target is not RELEASE:
        return node
    source = node.args[1]
    assert isinstance(source, fx.Node)
    return source


@functools.lru_cache(maxsize=16)
def _lanes_of(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    """The streams on which values leave a device and come back."""
    return torch.Stream(device), torch.Stream(device)


def _begin(target: Tensor, source: Tensor, device: torch.device, *, is_out: bool) -> Tensor:
    """Copy when the computing stream has come to this point; gives the ticket."""
    event = None
    if device.type == "cpu":
        target.copy_(source)
    else:
        lane = _lanes_of(device)[0 if is_out else 1]
        lane.wait_stream(torch.accelerator.current_stream(device))
        with lane:
            target.copy_(source, non_blocking=True)
        event = lane.record_event()
    ticket = torch.empty(1, dtype=torch.uint8)
    setattr(ticket, _CARRIES, (target, event))
    return ticket


def _end(ticket: Tensor, device: torch.device) -> Tensor:
    """What a ticket is for, once the computing stream has waited for the copy."""
    target: Tensor
    target, event = vars(ticket).pop(_CARRIES)
    if event is not None:
        torch.accelerator.current_stream(device).wait_event(event)
    return target


@torch.library.impl(_library, "send", "CompositeExplicitAutograd")
def _send(value: Tensor) -> Tensor:
    is_pinned = value.device.type != "cpu"
    host = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, pin_memory=is_pinned)
    return _begin(host, value, value.device, is_out=True)


@torch.library.impl(_library, "release", "CompositeExplicitAutograd")
def _release(ticket: Tensor, value: Tensor) -> Tensor:
    return _end(ticket, value.device)


@torch.library.impl(_library, "fetch", "CompositeExplicitAutograd")
def _fetch(host: Tensor, device: torch.device) -> Tensor:
    return _begin(_like(host, device), host, device, is_out=False)


@torch.library.impl(_library, "arrive", "CompositeExplicitAutograd")
def _arrive(ticket: Tensor, host: Tensor, device: torch.device) -> Tensor:
    del host  # an argument, so that it is there until the copy has begun, and says what the result looks like
    return _end(ticket, device)


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def _imagine_ticket(*_: object) -> Tensor:
    return torch.empty(1, dtype=torch.uint8, device="cpu")


def _imagine_host(ticket: Tensor, value: Tensor) -> Tensor:
    del ticket
    return _like(value, torch.device("cpu"))


def _imagine_value(ticket: Tensor, host: Tensor, device: torch.device) -> Tensor:
    del ticket
    return _like(host, device)


torch.library.register_fake("recollect::send", _imagine_ticket, lib=_library)
torch.library.register_fake("recollect::fetch", _imagine_ticket, lib=_library)
torch.library.register_fake("recollect::release", _imagine_host, lib=_library)
torch.library.register_fake("recollect::arrive", _imagine_value, lib=_library)
