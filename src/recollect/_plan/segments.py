"""Which modules can be regions, and which of them are the same: the chain of segments that a plan chooses along.

A segment is a module whose runs do not lie in another segment's. Repeated blocks come first, or a single one that runs
several times; where there are none, and for what lies outside of them, the outermost modules that save something.
Segments that run the same calls on the same shapes are of one type: what is found for one holds for all. Other cuts are
tried, too: parts of blocks, and whole stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from recollect._core.families import paths_above
from recollect._core.profiles import ModuleEntry
from recollect._plan.problem import Problem, Run

_LISTS = ("ModuleList", "ModuleDict")
_LEAST_SHARE = 4000  # a region holds what it is given, seen or not: what frees less than this part is not worth one


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A module that can be a region.

    Attributes:
        path: of the module.
        kind: the name of its class.
        runs: the times that it runs, in the order of forward.
        type: segments of one type have the same number, in all chains of a problem.
    """

    path: str
    kind: str
    runs: tuple[Run, ...]
    type: int


def find_chains(problem: Problem) -> list[list[Segment]]:
    """The cuts of a step into segments that are worth trying, the most natural first; each in the order of forward."""
    modules = {module.path: module for module in problem.profile.modules}
    able = [path for path in problem.paths if _is_able(problem, path, modules)]
    blocks = _find_blocks(able, modules)
    cuts = [blocks]
    if not blocks:
        blocks = _find_rerun(problem, able, modules)
        cuts.insert(0, blocks)
    parts = [path for block in blocks for path in _children(block, able)]
    if parts:
        cuts.append(parts)
    stages = list(dict.fromkeys(parent for block in blocks if (parent := _parent(block, able, modules))))
    if stages and len(stages) < len(blocks):
        cuts.append(stages)
    chains: dict[tuple[str, ...], list[Segment]] = {}
    for cut in cuts:
        chain = [_make_segment(problem, path, modules) for path in _fill(cut, able)]
        chain.sort(key=lambda segment: segment.runs[0].first)
        chains.setdefault(tuple(segment.path for segment in chain), chain)
    return [chain for chain in chains.values() if chain]


def find_parts(problem: Problem, segment: Segment) -> list[Segment]:
    """The outermost modules inside of a segment that can be regions themselves, in the order of forward."""
    modules = {module.path: module for module in problem.profile.modules}
    inside = [path for path in problem.paths if path.startswith(f"{segment.path}.")]
    able = [path for path in inside if _is_able(problem, path, modules)]
    parts = [_make_segment(problem, path, modules) for path in _outermost(able)]
    return sorted(parts, key=lambda part: part.runs[0].first)


def find_last_modules(problem: Problem, chain: Sequence[Segment]) -> Iterator[Segment]:
    """Modules without parts that run once after the last of several segments, or are that one; the last first."""
    modules = {module.path: module for module in problem.profile.modules}
    after = max((run.first for segment in chain for run in segment.runs), default=0)
    once = [path for path in problem.leaves if path in modules and len(problem.runs_of(path)) == 1]
    inside = {segment.path for segment in chain}
    for path in sorted(once, key=lambda path: problem.runs_of(path)[0].first, reverse=True):
        if problem.runs_of(path)[0].first < after:
            return
        if inside.isdisjoint(list(paths_above(path))[1:]):
            yield _make_segment(problem, path, modules)


def _is_able(problem: Problem, path: str, modules: dict[str, ModuleEntry]) -> bool:
    """Whether a module can be a region, and would forget something as one."""
    entry = modules.get(path)
    if entry is None or not path or entry.kind in _LISTS:
        return False
    runs = problem.runs_of(path)
    size = sum(problem.sizes[at] for run in runs for at in run.needs | run.idle if problem.is_evictable(at, run))
    timeline = problem.profile.timeline
    return size * _LEAST_SHARE > timeline.peak_bytes - timeline.held_bytes


def _find_blocks(able: list[str], modules: dict[str, ModuleEntry]) -> list[str]:
    """The outermost modules of which a list holds several of one class; those with parts, where there are any."""
    siblings: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for path in able:
        parent, _, name = path.rpartition(".")
        if name.isdigit():
            siblings[parent, modules[path].kind].append(path)
    repeated = {path for group in siblings.values() if len(group) > 1 for path in group}
    holders = {parent for path in modules for parent in list(paths_above(path))[1:]}
    with_parts = {path for path in repeated if path in holders}
    return list(_outermost(path for path in able if path in (with_parts or repeated)))


def _find_rerun(problem: Problem, able: list[str], modules: dict[str, ModuleEntry]) -> list[str]:
    """The outermost modules with parts that run more often than what holds them, as the one layer of an ALBERT."""

    def runs_again(path: str) -> bool:
        holders = (above for above in list(paths_above(path))[1:] if above in modules or not above)
        holder = next(above for above in holders if not above or modules[above].kind not in _LISTS)
        return path not in problem.leaves and len(problem.runs_of(path)) > len(problem.runs_of(holder))

    return list(_outermost(path for path in able if runs_again(path)))


def _outermost(paths: Iterable[str]) -> Iterator[str]:
    known = set(paths)
    for path in known:
        if not known.intersection(list(paths_above(path))[1:-1]):
            yield path


def _children(block: str, able: list[str]) -> list[str]:
    return list(_outermost(path for path in able if path.startswith(f"{block}.")))


def _parent(block: str, able: list[str], modules: dict[str, ModuleEntry]) -> str:
    """The module around a block that can be a region and is not the whole model."""
    known = set(able)
    above = [path for path in list(paths_above(block))[1:-1] if path in known and modules[path].kind not in _LISTS]
    return above[0] if above else ""


def _fill(cut: list[str], able: list[str]) -> list[str]:
    """The cut, and the outermost other modules beside it."""
    inside = set(cut)
    around = {above for path in cut for above in paths_above(path)}
    rest = [path for path in able if path not in around and inside.isdisjoint(paths_above(path))]
    return [*cut, *_outermost(rest)]


def _make_segment(problem: Problem, path: str, modules: dict[str, ModuleEntry]) -> Segment:
    runs = tuple(problem.runs_of(path))
    key = tuple(_sign(problem, run) for run in runs)
    types: dict[object, int] = problem.derived.setdefault("types", {})
    return Segment(path=path, kind=modules[path].kind, runs=runs, type=types.setdefault(key, len(types)))


def _sign(problem: Problem, run: Run) -> object:
    """What two runs have in common if and only if they do the same to values of the same shapes."""
    local: dict[int, int] = {}
    lines = []
    for number in range(run.first, run.stop):
        call = problem.calls[number]
        for storage in problem.makes[number]:
            local[storage] = len(local)
        lines.append(
            (
                call.op,
                call.module.removeprefix(run.path),
                tuple((value.shape, value.dtype, local.get(value.storage, -1)) for value in call.outputs),
                tuple(local.get(value.storage, -1) for value in call.inputs),
            )
        )
    saved = tuple(sorted((local[at], problem.is_evictable(at, run)) for at in run.needs | run.idle))
    return tuple(lines), saved, bool(run.asks)
