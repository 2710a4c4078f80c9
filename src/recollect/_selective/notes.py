"""What is known of one function under one policy, from call to call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from weakref import ref

from torch import nn

from recollect._policy.base import Policy
from recollect._recompute.places import Places
from recollect._selective.blocks import Wanted
from recollect._selective.ledger import Ledger

_MOST_KINDS = 64


class Notes:
    """What is known of one function under one policy: the blocks it wants, and a ledger for each kind of call."""

    def __init__(self, region: str, policy: Policy, roots: list[nn.Module]) -> None:
        self.given = policy
        self.policy = policy.within(region)
        self.region = region
        self._roots = [ref(root) for root in roots]
        self.ledgers: dict[Any, Ledger] = {}
        self.wanted = self._find_blocks(roots)

    def _find_blocks(self, roots: list[nn.Module]) -> Wanted:
        paths: dict[str, nn.Module] = {}
        for root in roots:
            for path, module in root.named_modules():
                if path or len(roots) > 1:
                    paths.setdefault(path, module)
        self.policy.check_modules(paths)
        found = []
        for path, module in paths.items():
            by = self.policy.keeps_module(path, module)
            if by is not None:
                found.append((module, path, by))
        return Wanted(found, self.policy.functions)

    def is_about(self, roots: list[nn.Module]) -> bool:
        """Whether these are the modules it was made for."""
        return len(roots) == len(self._roots) and all(
            weak() is root for weak, root in zip(self._roots, roots, strict=True)
        )

    def _modules(self) -> Iterator[nn.Module]:
        for weak in self._roots:
            root = weak()
            if root is not None:
                yield from root.modules()

    def buffers(self) -> frozenset[int]:
        """Ids of the buffers that the region's modules have now."""
        return frozenset(id(buffer) for module in self._modules() for buffer in module.buffers(recurse=False))

    def holds_compiled(self) -> bool:
        """Whether a module of the region is compiled: it would be compiled anew for the tape's mode."""
        if "torch._dynamo" not in sys.modules:
            return False
        compiled = sys.modules["torch._dynamo"].OptimizedModule
        return any(
            isinstance(module, compiled) or getattr(module, "_compiled_call_impl", None) is not None
            for module in self._modules()
        )

    def places(self) -> Places:
        """What finds paths relative to the region's modules."""
        return Places("", [root for weak in self._roots if (root := weak()) is not None])

    def ledger(self, kind: Any) -> Ledger:
        """The ledger of one kind of call."""
        found = self.ledgers.get(kind)
        if found is None:
            if len(self.ledgers) >= _MOST_KINDS:
                self.ledgers.clear()
            found = self.ledgers[kind] = Ledger(region=self.region, policy=self.policy)
        return found
