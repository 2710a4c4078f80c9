"""Where modules are in a model's tree, and which of them are repeated. Plain data; no torch here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from recollect._core.profiles import ModuleEntry


def paths_above(path: str) -> Iterator[str]:
    """A path and all that hold it, the model last.

    >>> list(paths_above("layers.3.mlp"))
    ['layers.3.mlp', 'layers.3', 'layers', '']
    """
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


class Families:
    """Knows which modules of a model are at the same place of repeated parts.

    Parts are repeated if they are all the numbered parts of a list, and all of one class.

    >>> kinds = {"layers": "ModuleList", "layers.0": "Block", "layers.0.mlp": "MLP", "layers.1": "Block"}
    >>> families = Families(ModuleEntry(path=path, kind=kind) for path, kind in kinds.items())
    >>> families.name("layers.1.mlp"), families.name("layers")
    ('layers.*.mlp', 'layers')
    """

    __slots__ = ("_lists",)

    def __init__(self, modules: Iterable[ModuleEntry]) -> None:
        parts: defaultdict[str, list[str]] = defaultdict(list)
        for module in modules:
            parent, _, name = module.path.rpartition(".")
            if name.isdigit():
                parts[parent].append(module.kind)
        self._lists = {parent for parent, kinds in parts.items() if len(kinds) > 1 and len(set(kinds)) == 1}

    def name(self, path: str) -> str:
        """A path with ``*`` for the number of a repeated part."""
        parts = path.split(".")
        return ".".join(
            "*" if part.isdigit() and ".".join(parts[:at]) in self._lists else part for at, part in enumerate(parts)
        )
