"""The index of errors: every text that the library raises or warns with, read from its source, for `errors.md`.

A text is what stands in ``raise`` or ``warnings.warn``: a string, a name that was assigned strings in the same
function, or the strings that a function of ours returns. What cannot be resolved is an error of the build, so the page
is complete. Each build makes it again, so it cannot go stale.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src" / "recollect"

TOPICS = {
    "_apply": "Regions and models",
    "_recompute": "Recomputation",
    "_selective": "Selective recomputation",
    "_policy": "Policies",
    "policies": "Policies",
    "_offload": "Offload",
    "_profile": "Profiles",
    "_inspect": "Profiles, reports and what is saved",
    "_report": "Profiles, reports and what is saved",
    "_plan": "Plans",
    "_fit": "Plans",
    "_compile": "torch.compile",
    "compat": "recollect.compat",
    "integrations": "Integrations",
    "_core": "Everywhere",
    "_cli": "The command line",
    "_bench": "The command line",
}

# What usually leads there, and what helps, where a text itself says no more than what is wrong.
CAUSES = {
    "TypeError": "An argument has the wrong type. Pass what the text says was expected.",
    "ValueError": "An argument has a value that cannot be used there. Pass what the text says was expected.",
    "NotImplementedError": "This combination is not supported. Leave one of the two out.",
    "RuntimeError": "The call cannot work at this point. The text says what has to happen first.",
    "AttributeError": "The name is misspelled, or belongs to a different version.",
    "exit code 1 or 2": "Wrong usage, or your code failed. See `recollect COMMAND --help`.",
    "ImportError": "A package is missing. Install it.",
    "OffloadError": "Memory or the disk failed at that moment: no room, no permission, or damaged bytes.",
    "CellFailedError": "The benchmark goes on with the next measurement. Run it again to measure this one.",
    "Warning": "The step continues. The text says what was not done.",
}
_BUILTIN = (
    "A check inside recollect failed, or torch behaved as it does in none of the tested versions. Please report it."
)
_WRITTEN = {"type": "{class}", "did_you_mean": "did you mean ...?"}  # what stands for the results of functions
_DEEPEST = 5
_NOT_OURS = {
    "type",
    "strerror",
    "popleft",
    "str",
}  # a class, the system's own words, and what another function was given
_TELLERS = {
    "fail": (0, "exit code 1 or 2"),
    "note_warning": (1, "UserWarning"),
}  # functions of ours, and where their text is
_CONTROL = {"SystemExit", "KeyboardInterrupt", "StopIteration", "Exit", "AssertionError", "Abort"}
_NEVER_SEEN = {"Slipped"}  # caught by whoever recomputes
_FEWEST_WORDS = 3  # that tell one text from others, so that "region 'x'" alone is none


class Names:
    """The functions and constants of the library, by file and name."""

    def __init__(self) -> None:
        self._files: dict[str, dict[str, list[ast.AST]]] = {}

    def add(self, file: str, tree: ast.AST) -> None:
        """Read a file."""
        own = self._files[file] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                own.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign) and node.col_offset == 0:
                own.setdefault(_name_of(node.targets[0]), []).append(node)

    def find(self, name: str, file: str) -> list[tuple[ast.AST, str]]:
        """What a name means in a file, and where that is: its own, or its package's, else all of that name."""
        package = file.rpartition("/")[0]
        beside = [other for other in self._files if other.rpartition("/")[0] == package]
        for files in ([file] if file in self._files else [], beside, list(self._files)):
            found = [(node, other) for other in files for node in self._files[other].get(name, ())]
            if found:
                return found
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One text."""

    kind: str
    text: str
    file: str
    line: int

    @property
    def topic(self) -> str:
        return TOPICS.get(self.file.partition("/")[0].removesuffix(".py"), "Everywhere")

    @property
    def what(self) -> str:
        """The first sentence, or as much as tells it from others."""
        for end in re.finditer(r"(?<=[^.])[.;:](?:\s|$)|\n", self.text):
            said = self.text[: end.start()]
            words = re.findall(r"[A-Za-z][\w.-]*", re.sub(r"\{[^}]*\}", "", said))
            if len(words) >= _FEWEST_WORDS and said.count("{") == said.count("}"):
                return said.strip()
        return self.text.strip()

    @property
    def cure(self) -> str:
        """What follows it: why, and what to do; from the kind of error where nothing does."""
        rest = self.text[len(self.what) :].lstrip(".;: \n")
        if not rest:
            return CAUSES.get(self.kind, CAUSES["Warning"] if self.kind.endswith("Warning") else _BUILTIN)
        is_word = re.match(r"[a-z]+[\s,]", rest) is not None  # not code
        return rest[0].upper() + rest[1:] if is_word else rest


def find_entries(source: Path = SOURCE) -> tuple[list[Entry], list[str]]:
    """All texts, and the places whose text could not be found."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(source.rglob("*.py"))}
    names = Names()
    for path, tree in trees.items():
        names.add(path.relative_to(source).as_posix(), tree)
    entries: list[Entry] = []
    unknown: list[str] = []
    for path, tree in trees.items():
        file = path.relative_to(source).as_posix()
        for kind, argument, scope, line in _find_raises(tree):
            texts = list(dict.fromkeys(_resolve(argument, scope, names, file, 0)))
            texts = [text for text in texts if len(text.split()) > 1]
            if not texts and not _is_passed_on(argument, scope):
                unknown.append(f"{file}:{line}")
            entries += (Entry(kind=kind, text=text, file=file, line=line) for text in texts)
    seen: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        seen.setdefault((entry.topic, entry.text), entry)
    return sorted(seen.values(), key=lambda entry: (entry.topic, entry.text.lower())), unknown


def _find_raises(tree: ast.AST) -> Iterator[tuple[str, ast.expr, ast.AST, int]]:
    """Each place that raises or warns with a text of its own: the class, the text, the function around it, the line."""
    scopes: dict[int, ast.AST] = {}

    def mark(node: ast.AST, scope: ast.AST) -> None:
        inner = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else scope
        for child in ast.iter_child_nodes(node):
            scopes[id(child)] = inner
            mark(child, inner)

    mark(tree, tree)
    for node in ast.walk(tree):
        scope = scopes.get(id(node), tree)
        if isinstance(node, ast.Call) and (teller := _TELLERS.get(_name_of(node.func))):
            place, kind = teller
            if len(node.args) > place and (place or isinstance(node.func, ast.Name)):
                yield kind, node.args[place], scope, node.lineno
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            name = _name_of(node.exc.func)
            if name and name not in _CONTROL | _NEVER_SEEN and name[0].isupper():
                yield name, node.exc.args[-1 if name.endswith("OSError") else 0], scope, node.lineno
        elif isinstance(node, ast.Call) and _name_of(node.func) == "warn" and node.args:
            kinds = [*node.args[1:2], *(word.value for word in node.keywords if word.arg == "category")]
            yield (_name_of(kinds[0]) if kinds else "") or "UserWarning", node.args[0], scope, node.lineno


def _name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _resolve(node: ast.AST, scope: ast.AST, names: Names, file: str, depth: int) -> Iterator[str]:
    """The texts that an expression may have, with the names of what is filled in."""
    if isinstance(node, ast.Constant | ast.JoinedStr):
        yield from _write(node, scope)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        right = next(_resolve(node.right, scope, names, file, depth), "...")
        for left in _resolve(node.left, scope, names, file, depth):
            yield f"{left}{right}"
    elif isinstance(node, ast.IfExp):
        yield from _resolve(node.body, scope, names, file, depth)
        yield from _resolve(node.orelse, scope, names, file, depth)
    elif isinstance(node, ast.Name) and depth < _DEEPEST:
        constants = [(one.value, other) for one, other in names.find(node.id, file) if isinstance(one, ast.Assign)]
        for value, other in [(value, file) for value in _find_values(node, scope)] or constants:
            yield from _resolve(value, scope, names, other, depth + 1)
    elif isinstance(node, ast.Call):
        yield from _resolve_call(node, scope, names, file, depth)


def _resolve_call(node: ast.Call, scope: ast.AST, names: Names, file: str, depth: int) -> Iterator[str]:
    """The texts that a function of ours gives, or that a list is joined from."""
    if _name_of(node.func) == "join" and isinstance(node.args[0], ast.Name):
        yield "\n".join(_find_parts(node.args[0].id, scope))
        return
    for function, other in names.find(_name_of(node.func), file) if depth < _DEEPEST else ():
        for inner in ast.walk(function):
            if isinstance(inner, ast.Return | ast.Yield) and inner.value is not None:
                yield from _resolve(inner.value, function, names, other, depth + 1)


def _write(node: ast.Constant | ast.JoinedStr, scope: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.FormattedValue) else part for part in node.values)
        yield "".join(_write_part(part, scope) for part in parts)
    elif isinstance(node.value, str):
        yield node.value


def _write_part(part: ast.expr, scope: ast.AST) -> str:
    """A piece of a text: itself, the only text that a name stands for, or a placeholder."""
    values = _find_values(part, scope) if isinstance(part, ast.Name) else [part]
    if len(values) == 1 and isinstance(values[0], ast.Constant):
        return str(values[0].value)
    return _placeholder(part)


def _find_values(name: ast.Name, scope: ast.AST) -> list[ast.expr]:
    """What a name was given before it is used here, since it was last raised: a function may raise several times."""
    inside = list(ast.walk(scope))
    raises = [
        inner.lineno
        for inner in inside
        if isinstance(inner, ast.Raise)
        and inner.lineno < name.lineno
        and any(isinstance(part, ast.Name) and part.id == name.id for part in ast.walk(inner))
    ]
    since = max(raises, default=0)
    values = [
        value
        for inner in inside
        if isinstance(inner, ast.Assign)
        and since < inner.lineno <= name.lineno
        and any(isinstance(target, ast.Name) and target.id == name.id for target in inner.targets)
        for value in _append(inner, name, inside)
    ]
    values += [
        inner.iter
        for inner in inside
        if isinstance(inner, ast.For) and isinstance(inner.target, ast.Name) and inner.target.id == name.id
    ]
    return values or ([] if not since else _find_values(ast.Name(id=name.id, lineno=since), scope))


def _append(start: ast.Assign, name: ast.Name, inside: list[ast.AST]) -> Iterator[ast.expr]:
    """A text with what is added to it on the way (``+=``), and without what is added only sometimes."""
    ends = [inner.lineno for inner in inside if isinstance(inner, ast.Assign) and _name_of(inner.targets[0]) == name.id]
    end = min([line for line in ends if line > start.lineno] + [name.lineno])
    block = next((body for inner in inside for body in _bodies(inner) if start in body), [])
    value = start.value
    for inner in sorted((one for one in inside if isinstance(one, ast.AugAssign)), key=lambda one: one.lineno):
        if _name_of(inner.target) == name.id and start.lineno < inner.lineno <= end:
            if inner not in block:
                yield value
            value = ast.BinOp(left=value, op=ast.Add(), right=inner.value)
    yield value


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        found = getattr(node, field, None)
        if isinstance(found, list):
            yield found


def _find_parts(name: str, scope: ast.AST) -> Iterator[str]:
    """The first texts that a list is made of, in the order of the source."""
    for inner in ast.walk(scope):
        if isinstance(inner, ast.Assign) and any(_name_of(target) == name for target in inner.targets):
            yield from _resolve(
                inner.value.elts[0] if isinstance(inner.value, ast.List) else inner.value, scope, Names(), "", 0
            )
        elif isinstance(inner, ast.Call) and ast.unparse(inner.func) in (f"{name}.append", f"{name}.extend"):
            yield from _resolve(inner.args[0], scope, Names(), "", 0)


def _is_passed_on(node: ast.AST, scope: ast.AST) -> bool:
    """Whether the text was given to the function: whoever calls it has it. Or it is a bare name, and no text."""
    if isinstance(node, ast.Constant) or (isinstance(node, ast.Call) and _name_of(node.func) in _NOT_OURS):
        return True
    if isinstance(node, ast.BoolOp):  # the system's words, or else the error's own
        return all(isinstance(part, ast.Attribute | ast.Call) for part in node.values)
    given = [part.arg for part in ast.walk(scope) if isinstance(part, ast.arg)]
    return isinstance(node, ast.Name) and node.id in given


def _placeholder(node: ast.AST) -> str:
    """What is filled in: ``{path}``. Of a call, what it writes; of a choice between two texts, the first."""
    if isinstance(node, ast.IfExp):
        texts = [one.value for one in (node.body, node.orelse) if isinstance(one, ast.Constant) and one.value]
        return str(texts[0]) if texts else _placeholder(node.body)
    if isinstance(node, ast.Attribute) and node.attr == "__name__":
        return "{class}"
    written = _placeholder_of_call(node) if isinstance(node, ast.Call) else None
    if written is not None:
        return written
    names = [_name_of(part) for part in ast.walk(node)]
    plain = next((name for name in names if name and not name.startswith("_")), "")
    return f"{{{plain}}}" if plain.isidentifier() else "{...}"


def _placeholder_of_call(node: ast.Call) -> str | None:
    """What stands for the result of a call; None if only its own name can."""
    called = _name_of(node.func)
    if called.lstrip("_").startswith("hint"):
        return ""  # a question that ends some of these texts
    if called in _WRITTEN:
        return _WRITTEN[called]
    if called == "count_noun" and isinstance(node.args[1], ast.Constant):
        return f"{{number}} {node.args[1].value}s"
    inner = _placeholder(node.args[0]) if node.args else ""
    return None if inner in ("", "{...}") else inner


def setup(app: Any) -> dict[str, bool]:
    """Give Sphinx the directive ``error-index``."""
    from docutils import nodes
    from sphinx.util.docutils import SphinxDirective

    class ErrorIndex(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            entries, unknown = find_entries()
            if unknown:
                raise self.error(f"texts that cannot be found: {', '.join(unknown)}")
            found: list[nodes.Node] = []
            for topic in dict.fromkeys(entry.topic for entry in entries):
                section = nodes.section(ids=[nodes.make_id(f"errors-{topic}")])
                section += nodes.title(text=topic)
                for entry in (entry for entry in entries if entry.topic == topic):
                    item = nodes.definition_list_item()
                    item += nodes.term("", "", nodes.literal(text=entry.what))
                    meaning = nodes.definition()
                    meaning += nodes.paragraph("", "", nodes.emphasis(text=entry.kind), nodes.Text(f". {entry.cure}"))
                    item += meaning
                    section += nodes.definition_list("", item)
                found.append(section)
            return found

    app.add_directive("error-index", ErrorIndex)
    return {"parallel_read_safe": True}
