"""What is known of functions under policies, from call to call.

The table is the process's, like torch's own caches: models wrap their blocks anew at each call, so that a region object
cannot hold what was learned. It holds the functions weakly; what it holds of a module goes with the module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import CodeType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from torch import nn

from recollect._core.places import Places
from recollect._core.torch_private.compiled_calls import step_aside_for_compiled_code
from recollect._policy.base import Policy
from recollect._recompute.ambient import Autocast
from recollect._selective.blocks import Wanted
from recollect._selective.decisions import Decisions, KnownDecisions
from recollect._selective.parameters import is_unit

_MOST_KINDS = 64
_SIZES_LEARNED = 2
TALKS_AT_TIMES = "it communicates with other processes in some calls and not in others"


class CallKind(NamedTuple):
    """What makes two calls the same: training mode; shapes and dtypes of tensors, flags and texts, types of the rest.

    Attributes:
        training: whether the module is in training mode.
        words: one for each argument.
        autocast: how autocast stands; None where it is off.
    """

    training: Any
    words: tuple[Any, ...]
    autocast: Autocast = None

    @property
    def form(self) -> tuple[Any, ...]:
        """The same, sizes apart."""
        words = ((len(w[0]), w[1]) if type(w) is tuple else w for w in self.words)
        return (self.training, self.autocast, *words)


class Knowledge:
    """What is known of one function under one policy: the blocks it wants, and the decisions for each kind of call.

    Attributes:
        talks_at_times: it talked to other processes at a call of a kind that had not when it was learned.
    """

    def __init__(self, region: str, policy: Policy, roots: list[nn.Module]) -> None:
        self.given = policy
        self.policy = policy.within(region)
        self.sees_names, self.keeps_defaults = self.policy.sees_names, self.policy.keeps_defaults
        self.replays = self.policy.replays
        self.region = region
        self.talks_at_times = False
        self._roots = [ref(root) for root in roots]
        self.by_kind: dict[CallKind, Decisions] = {}
        self._varying: dict[tuple[Any, ...], Decisions] = {}
        self.wanted = self._find_blocks(roots)
        step_aside_for_compiled_code()

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

    def runs_units(self, fn: Any) -> bool:
        """Whether units of FSDP are called inside the function: their parameters come and go with the call.

        Not if it is the `forward` of a unit, or something inside: then the unit's hooks are outside of the region, and
        have gathered before backward comes to what is in it, into the same tensors. FSDP1 has no hooks, it gathers in
        its `forward`.
        """
        if "torch.distributed.fsdp" not in sys.modules:
            return False
        owner = None if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
        return any(is_unit(module, itself=module is not owner) for module in self._modules())

    def note_talk(self) -> None:
        """It talks at some calls and not at others: see each call from now on, so that all ranks keep the same."""
        self.talks_at_times = True
        for decisions in self.all_decisions():
            decisions.program, decisions.may_record, decisions.why_no_program = None, False, TALKS_AT_TIMES

    def places(self) -> Places:
        """What finds paths relative to the region's modules."""
        return Places("", [root for weak in self._roots if (root := weak()) is not None])

    def decisions_for(self, kind: CallKind) -> Decisions:
        """The decisions of one kind of call."""
        found = self.by_kind.get(kind)
        return self._new_decisions(kind) if found is None else found

    def _new_decisions(self, kind: CallKind) -> Decisions:
        """For a size that was not met before: that of calls of any size, once there were several that differ in it."""
        form = kind.form
        if form in self._varying:
            return self._varying[form]
        learned = [one for other, one in self.by_kind.items() if other.form == form and one.is_learned]
        if len(learned) >= _SIZES_LEARNED:
            self._varying[form] = learned[-1].vary()
            return self._varying[form]
        if len(self.by_kind) >= _MOST_KINDS:
            self.by_kind.clear()
            self._varying.clear()
        kind_of_decisions = KnownDecisions if self.policy.is_known_before else Decisions
        found = self.by_kind[kind] = kind_of_decisions(region=self.region, policy=self.policy)
        return found

    def all_decisions(self) -> list[Decisions]:
        """Of all kinds of calls."""
        return [*self.by_kind.values(), *self._varying.values()]


_MOST_KNOWN = 4096
_Table = WeakKeyDictionary[Any, dict[tuple[str, Policy | int, tuple[int, ...]], Knowledge]]
_known: _Table = WeakKeyDictionary()
_apart: ContextVar[_Table | None] = ContextVar("recollect_learning_apart", default=None)


class Learned:
    """What regions learn apart from what is known; it goes with this, unless it is kept."""

    def __init__(self) -> None:
        self.table: _Table = WeakKeyDictionary()

    def keep(self) -> None:
        """Let it be known to all later calls."""
        for subject, found in self.table.items():
            _known.setdefault(subject, {}).update(found)


@contextmanager
def learning_apart(learned: Learned | None = None) -> Generator[None]:
    """Inside, regions called on this thread know nothing of calls before, and nobody knows later what they learn.

    Args:
        learned: where it is written, for somebody who may keep it.
    """
    token = _apart.set(WeakKeyDictionary() if learned is None else learned.table)
    try:
        yield
    finally:
        _apart.reset(token)


def are_apart() -> bool:
    """Whether `learning_apart` is entered here."""
    return _apart.get() is not None


def _table() -> _Table:
    apart = _apart.get()
    return _known if apart is None else apart


def _subject(fn: Callable[..., Any]) -> Any:
    """What it is known under: the module, or the code of a function, which outlives a closure made at each call."""
    if isinstance(fn, nn.Module):
        return fn
    fn = getattr(fn, "__wrapped__", fn)  # of what is compiled in parts
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, nn.Module):
        return owner
    code = getattr(fn, "__code__", None)
    return code if isinstance(code, CodeType) else type(fn)


def _codes_within(fn: Callable[..., Any]) -> Iterator[CodeType]:
    """The code of the functions that a function closes over."""
    for cell in getattr(fn, "__closure__", None) or ():
        with suppress(ValueError):  # a cell not filled yet
            code = getattr(cell.cell_contents, "__code__", None)
            if isinstance(code, CodeType):
                yield code


def find_knowledge(name: str, fn: Callable[..., Any], policy: Policy, roots: list[nn.Module]) -> Knowledge:
    """What is known of a function under a policy; new knowledge where nothing is."""
    table = _table().setdefault(_subject(fn), {})
    # By identity first: a policy of many parts takes some microseconds to hash. By the modules and functions too:
    # closures made at each call share their code, not what they close over.
    owners = (*map(id, roots), *map(id, _codes_within(fn)))
    knowledge = table.get((name, id(policy), owners))
    if knowledge is None or knowledge.given is not policy:
        knowledge = table.get((name, policy, owners))
    if knowledge is None or not knowledge.is_about(roots):
        if len(table) >= _MOST_KNOWN:
            table.clear()
        knowledge = Knowledge(name, policy, roots)
        table[name, policy, owners] = table[name, id(policy), owners] = knowledge
    return knowledge


def knowledge_of(fn: Callable[..., Any]) -> list[Knowledge]:
    """All that is known of a function, under any policy."""
    found = _table().get(_subject(fn), {})
    return list(dict.fromkeys(found.values()))


def all_knowledge() -> list[Knowledge]:
    """All that is known of all functions that are alive, under any policy."""
    found: dict[Knowledge, None] = {}
    noted = _table()
    for weak in noted.keyrefs():  # a copy, made at once: other threads may be adding to the table
        subject = weak()
        if subject is not None:
            found.update(dict.fromkeys(list(noted.get(subject, {}).values())))
    return list(found)
