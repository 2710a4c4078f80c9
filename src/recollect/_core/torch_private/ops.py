"""Which operators are registered, and which kinds of object stand for one.

Private names: the classes and the registry of higher-order operators of `torch._ops`, `CustomOpDef`, and the
dispatcher's list of operators and its search for a schema.
Would be replaced by: public names for those classes, and a public list of operators (`dir(torch.ops.aten)` holds only
those that were looked up before).
Run on: torch 2.11, 2.13.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

_PARTS = 3  # library, operator, overload


def overload_names() -> list[str]:
    """All registered overloads, in no order, written as `str` writes them: ``aten.mm.default``. Costs 10 ms."""
    names = (name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names())
    return [name if name.count(".") > 1 else f"{name}.default" for name in names]


def is_overload(name: str) -> bool:
    """Whether an overload has a schema under this name, written as `overload_names` does. Costs 2 µs.

    >>> is_overload("aten.mm.default"), is_overload("aten.mm.out"), is_overload("aten.mm"), is_overload("mm")
    (True, True, False, False)
    """
    parts = name.split(".")
    if len(parts) != _PARTS:
        return False
    library, short, overload = parts
    try:
        torch._C._dispatch_find_schema_or_throw(f"{library}::{short}", "" if overload == "default" else overload)
    except RuntimeError:
        return False
    return True


def higher_order_names() -> list[str]:
    """All higher-order operators, which have no overloads and are written by their bare names: ``flex_attention``."""
    return list(torch._ops._higher_order_ops)


def op_name(op: Any) -> str | None:
    """What an operator is called in a site; None if this is none.

    >>> op_name(torch.ops.aten.mm.default), op_name(torch.ops.higher_order.cond), op_name(torch.mm)
    ('aten.mm.default', 'cond', None)
    """
    if isinstance(op, CustomOpDef):
        op = op._opoverload
    return str(op) if isinstance(op, OpOverload | HigherOrderOperator) else None


def packet_name(op: Any) -> str | None:
    """What a set of overloads is called; None if this is none.

    >>> packet_name(torch.ops.aten.mm), packet_name(torch.ops.aten.mm.default)
    ('aten.mm', None)
    """
    return str(op) if isinstance(op, OpOverloadPacket) else None


def canonical(op: Any) -> Any:
    """The overload that `torch.ops` gives under an operator's name; nodes of graphs may carry copies of it.

    >>> canonical(torch.ops.aten.mm.default) is torch.ops.aten.mm.default
    True
    """
    name = op_name(op)
    found: Any = torch.ops
    for part in name.split(".") if name is not None and isinstance(op, torch._ops.OpOverload) else ():
        found = getattr(found, part, None)
        if found is None:
            return op
    return op if found is torch.ops else found
