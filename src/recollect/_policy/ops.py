"""What a user may call an operator, and what to say where that is none or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from recollect._core.patterns import did_you_mean, nearest
from recollect._core.torch_private.ops import higher_order_names, is_overload, op_name, overload_names, packet_name
from recollect._core.units import list_some

OpLike = str | type[torch.autograd.Function] | Callable[..., Any]
"""An overload or its name, a higher-order operator or its name, a custom operator, or a subclass of Function."""

_HIGHER_ORDER = "higher_order"


@dataclass(frozen=True, slots=True, repr=False)
class Op:
    """An operator as sites name it, and the subclass of `torch.autograd.Function` behind it, if one is."""

    name: str
    function: type | None = None

    def __repr__(self) -> str:
        return repr(self.name) if self.function is None else self.name


def parse_op(op: OpLike) -> Op:
    """Which operator is meant.

    Raises:
        ValueError: no operator has that name, or several overloads have.
        TypeError: it is neither an operator nor a name.

    >>> parse_op(torch.ops.aten.mm.default), parse_op("aten::mm.default"), parse_op("flex_attention")
    ('aten.mm.default', 'aten.mm.default', 'flex_attention')
    >>> parse_op("aten.mm")
    Traceback (most recent call last):
    ...
    ValueError: 'aten.mm' has the overloads default, ...: write 'aten.mm.default'
    >>> parse_op("aten.bm.default")
    Traceback (most recent call last):
    ...
    ValueError: no operator is named 'aten.bm.default'; did you mean 'aten.bmm.default'?
    """
    if isinstance(op, str):
        return Op(_check_name(op))
    name = op_name(op)
    if name is not None:
        return Op(name)
    packet = packet_name(op)
    if packet is not None:
        raise ValueError(_describe_packet(packet, packet, overload_names()))
    if isinstance(op, type) and issubclass(op, torch.autograd.Function) and op is not torch.autograd.Function:
        return Op(op.__name__, op)
    raise TypeError(_describe_stranger(op))


def parse_ops(ops: Iterable[OpLike]) -> tuple[Op, ...]:
    """Which operators are meant, each once."""
    return tuple(dict.fromkeys(map(parse_op, ops)))


def _check_name(text: str) -> str:
    """The name as sites write it."""
    name = text.replace("::", ".")
    bare = name.removeprefix(f"{_HIGHER_ORDER}.")
    if "." not in bare and bare in higher_order_names():
        return bare
    if is_overload(name):
        return name
    names = overload_names()
    if name in names:
        return name
    packet, _, overload = name.rpartition(".")
    if _overloads(name, names):
        message = _describe_packet(text, name, names)
    elif _overloads(packet, names):
        overloads = _overloads(packet, names)
        message = (
            f"{packet} has no overload {overload!r}, only {list_some(overloads)}: write {_likeliest(packet, names)!r}"
        )
    else:
        message = _describe_unknown(text, name, names)
    raise ValueError(message)


def _describe_packet(text: str, packet: str, names: list[str]) -> str:
    overloads = _overloads(packet, names)
    noun = "overload" if len(overloads) == 1 else "overloads"
    return f"{text!r} has the {noun} {list_some(overloads)}: write {_likeliest(packet, names)!r}"


def _describe_unknown(text: str, name: str, names: list[str]) -> str:
    message = f"no operator is named {text!r}"
    libraries = {known.partition(".")[0] for known in names}
    library, rest = name.split(".", 1) if "." in name else ("aten", name)
    if library not in libraries:
        near = nearest(library, libraries)
        message += f": nothing is registered under {library!r}" + (f" ({did_you_mean(near)})" if near else "")
        return f"{message}.\nIf a package registers it, import that package first."
    known = {other.split(".")[1] for other in names if other.startswith(f"{library}.")}
    higher_order = set() if "." in name else set(higher_order_names())
    found = nearest(rest.partition(".")[0], sorted(known | higher_order))
    near = [short if short in higher_order else _likeliest(f"{library}.{short}", names) for short in found]
    return f"{message}; " + (did_you_mean(near) if near else f"none under {library!r} has a similar name")


def _describe_stranger(op: Any) -> str:
    if isinstance(op, list | tuple | set | frozenset):
        return f"expected operators one by one, not as a {type(op).__name__}: write save_ops(*ops)"
    called = getattr(op, "__name__", None)
    kind = "the class" if isinstance(op, type) else type(op).__name__
    message = (
        "expected an operator as torch.ops.aten.mm.default, by its name 'aten.mm.default', or as a subclass of "
        f"torch.autograd.Function; not {kind} {called or repr(op)}"
    )
    if isinstance(op, type) and issubclass(op, torch.nn.Module):
        return f"{message}.\nTo keep modules, use save_modules."
    names = overload_names()
    if called and _overloads(f"aten.{called}", names):
        message += f".\nThe operator beneath it may be {_likeliest(f'aten.{called}', names)!r}."
    return message


def _overloads(packet: str, names: list[str]) -> list[str]:
    """A packet's overloads, the likeliest to be meant first; none if there is no such packet."""
    overloads = {name.removeprefix(f"{packet}.") for name in names if name.startswith(f"{packet}.") and "." in packet}
    return sorted(overloads, key=lambda name: (name != "default", name != "Tensor", name.endswith("out"), name))


def _likeliest(packet: str, names: list[str]) -> str:
    return f"{packet}.{_overloads(packet, names)[0]}"
