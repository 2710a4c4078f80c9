"""The parts of a region under a policy that Dynamo cuts up, each compiled under the policy and kept as a block.

A policy decides about operators, and Python does not see those of compiled code. So where Dynamo breaks its graph
inside such a region, the policy decides in each part apart: the part is a region of its own graph, and the partitioner
keeps what the policy says. For the eager engine around them the parts are blocks that are kept whole: autograd holds
what the partitioner had it hold, and recomputation, of what runs as written between them, is given their results.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.fx import Graph, GraphModule, Node

from recollect._compile.keys import goes_by_names, key_of, name_of_all
from recollect._core.decisions import Decision, Site
from recollect._core.scope import region
from recollect._core.torch_private.compiler import Compiling, changed_backend, innermost_backend
from recollect._policy.base import Policy, Verdict
from recollect._policy.by_plan import goes_by_plan

_PART = "compiled part "
_numbers = itertools.count(1)
_not_cut: WeakSet[CodeType] = WeakSet()
"""Functions of which Dynamo compiled nothing: their regions are left to the eager engine, which sees all operators."""


class KeptParts(Policy):
    """Keeps the compiled parts of a region, in which another policy has decided, and makes again what is between."""

    __slots__ = ("_inside",)

    def __init__(self, inside: Policy) -> None:
        self._inside = inside

    @property
    def sees_names(self) -> bool:
        """Parts are named blocks."""
        return True

    @property
    def keeps_defaults(self) -> bool:
        """What is between them runs again, whatever it is."""
        return False

    @property
    def is_known_before(self) -> bool:
        """There is nothing to learn of operators."""
        return True

    def keeps_name(self, name: str) -> str | None:
        """Those of parts."""
        return repr(self) if name.startswith(_PART) else None

    def judge(self, site: Site) -> Verdict:
        """Nothing else is kept."""
        del site
        return Verdict(Decision.RECOMPUTE, by=repr(self))

    def check_modules(self, paths: dict[str, Any]) -> None:
        """As the policy inside.

        Raises:
            ValueError: a pattern matches nothing.
        """
        self._inside.check_modules(paths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeptParts) and other._inside == self._inside

    def __hash__(self) -> int:
        return hash((KeptParts, self._inside))

    def __repr__(self) -> str:
        return f"{self._inside} in compiled parts"


class InParts(Compiling):
    """Calls a function whose compiled parts are regions under a policy of their own graphs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; remember where nothing was compiled."""
        before = _ran.count
        result = super().__call__(*args, **kwargs)
        code = _code_of(self.__wrapped__)
        if _ran.count == before and code is not None:
            _not_cut.add(code)
        return result


def in_parts(fn: Callable[..., Any], compiler: Any, name: str, policy: Policy) -> InParts | None:
    """The function, compiled in parts; None where it cannot be, or a plan has counted on its operators in one piece."""
    code = _code_of(fn)
    if (code is not None and code in _not_cut) or goes_by_plan(policy):
        return None
    name = name if goes_by_names(policy) else name_of_all(name)
    key = key_of(policy.within(name))
    changed = changed_backend(compiler, (name, key), lambda backend: _Backend(backend, name, key))
    return None if changed is None else InParts(fn, changed)


def _code_of(fn: Any) -> CodeType | None:
    """The code of a function, a method, or a module's forward."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    code = getattr(type(fn).forward if isinstance(fn, nn.Module) else fn, "__code__", None)
    return code if isinstance(code, CodeType) else None


class _Ran(threading.local):
    """How many parts ran on this thread."""

    count = 0


_ran = _Ran()


class _Backend:
    """Compiles a part of a region. Dynamo shares compiled code between callers whose backends are equal."""

    def __init__(self, backend: Callable[..., Any], name: str, key: str) -> None:
        self._backend, self._name, self._key = backend, name, key

    def __call__(self, graph: GraphModule, examples: Any, **options: Any) -> Any:
        """Compile it as a region, and have each of its runs seen as one block."""
        compiled = self._backend(_as_region(graph, self._name, self._key), examples, **options)
        block = region(f"{_PART}{next(_numbers)}")(compiled)

        def run(*args: Any) -> Any:
            _ran.count += 1
            return block(*args)

        return run

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Backend) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash((self._name, self._key))

    def _identity(self) -> tuple[Any, ...]:
        return innermost_backend(self._backend), self._name, self._key


def _as_region(whole: GraphModule, name: str, key: str) -> GraphModule:
    """The graph, with all that it computes in one region."""
    from recollect._compile.operator import region_operator  # which imports this

    graph = whole.graph
    result: Any = graph.output_node().args[0]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    made = [node for node in dict.fromkeys(result) if isinstance(node, Node) and node.op != "placeholder"]
    if not made:
        return whole
    inside = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op != "output":
            copies[node] = inside.node_copy(node, copies.__getitem__)
    inside.output(tuple(copies[node] for node in made))
    whole.add_submodule("recollect_part", GraphModule(whole, inside))
    with graph.inserting_before(graph.output_node()):
        body = graph.get_attr("recollect_part")
        call = graph.call_function(region_operator, (body, *inputs), {"name": name, "key": key, "is_part": True})
        call.meta["example_value"] = tuple(node.meta.get("example_value") for node in made)
        for number, node in enumerate(made):
            item = graph.call_function(operator.getitem, (call, number))
            item.meta.update(node.meta)
            graph.output_node().replace_input_with(node, item)
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)
    whole.recompile()
    return whole
