"""State of the process: each table, cache and context variable that outlives a call is in docs/design/state.md."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTED = (ROOT / "docs" / "design" / "state.md").read_text("utf-8")

EMPTY = {"{}", "[]", "dict()", "list()", "set()"}
MUTABLE = {"defaultdict", "OrderedDict", "deque", "count", "ContextVar", "Registry"}
MUTABLE |= {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "local"}
CACHES = {"cache", "lru_cache"}


def _name_of(node: ast.AST) -> str:
    """The last part of a name: that of ``functools.lru_cache(8)`` is ``lru_cache``."""
    if isinstance(node, ast.Call):
        return _name_of(node.func)
    if isinstance(node, ast.Subscript):
        return _name_of(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_mutable(value: ast.AST | None) -> bool:
    if not isinstance(value, ast.Dict | ast.List | ast.Call):
        return False
    return ast.unparse(value) in EMPTY or _name_of(value) in MUTABLE


def _changes_itself(node: ast.ClassDef) -> bool:
    """Whether instances of a class hold what changes: attributes set after it is made, containers, one per thread."""
    for method in (part for part in node.body if isinstance(part, ast.FunctionDef)):
        for part in ast.walk(method):
            if not isinstance(part, ast.Assign | ast.AnnAssign | ast.AugAssign):
                continue
            is_own = "self." in ast.unparse(part).split("=")[0]
            if is_own and (method.name != "__init__" or _is_mutable(part.value)):
                return True
    return any(_name_of(base) == "local" for base in node.bases)


def find_state(source: str) -> Iterator[str]:
    """The names at the top of a module that hold what outlives a call."""
    tree = ast.parse(source)
    own = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and _changes_itself(node)}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any(_name_of(one) in CACHES for one in node.decorator_list):
            yield node.name
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        if _is_mutable(node.value) or (isinstance(node.value, ast.Call) and _name_of(node.value) in own):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            yield _name_of(target)


def test_whatever_outlives_a_call_is_listed_with_its_reason_and_bound() -> None:
    unlisted = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for name in find_state(path.read_text("utf-8"))
        if f"{path.stem}.{name}`" not in LISTED and f"`{name}`" not in LISTED
    ]
    assert not unlisted


def test_tables_caches_variables_and_objects_that_change_are_found() -> None:
    source = """
_table: dict[int, str] = {}
_row = [1, 2]
_variable: ContextVar[int] = ContextVar("v", default=0)

@functools.lru_cache(maxsize=8)
def ask(): ...

class Listeners:
    def __init__(self):
        self.present = ()

    def add(self, one):
        self.present = (*self.present, one)

class Shared:
    def __init__(self):
        self._tiers = {}

class Fixed:
    def __init__(self, name):
        self.name = name

listeners = Listeners()
shared = Shared()
FIXED = Fixed("f")
"""
    assert list(find_state(source)) == ["_table", "_variable", "ask", "listeners", "shared"]
