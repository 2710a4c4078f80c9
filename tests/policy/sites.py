"""Sites to ask policies about."""

from typing import Any

from recollect._core.decisions import Site


def site(op: str = "aten.sin.default", **facts: Any) -> Site:
    return Site(**{"region": "block", "op": op, **facts})


MM = site("aten.mm.default", shape=(8, 16), dtype="float32", bytes=512, flops=4096)
SIN = site(shape=(8, 16), dtype="float32", bytes=512, flops=128)
