"""What the modules of a region held when forward ran, and their side effects, which happen once.

A region's function is searched for modules (`_core/reachable.py`). At entry their training flags and other attributes,
parameters and buffers are noted, parameters and buffers by identity and version. For recomputation

* a random generator that a module holds is put back where it stood, see `rng.py`; one that forward itself has made is
  made again;
* an attribute that has been set since by whoever calls the module (a scale) is as it was at entry, and afterwards as it
  was before; so is a number or flag that forward itself sets (a counter, a schedule), and a tensor or collection that
  it carries from call to call; one that it only sets (its last result) is left alone;
* a tensor or a part that has been *replaced* since (``functional_call``, a swapped parameter) is put back meanwhile,
  unless it was FSDP that put a shard in its place, or took one away: whoever gathers it does so again;
* a tensor that has been *changed in place* since (an optimizer step) is an error where recomputation reads it;
* a buffer, or a tensor in an attribute, that the region itself updates in place (running statistics, power iterations,
  counters) is replaced by a copy of its value at entry: recomputation reads what forward read, and what it writes is
  thrown away; so is a parameter that the region writes itself (a layer that sets itself up from its first data);
* ``requires_grad`` of a parameter is as it was at entry.

Which state that is, `updates.py` and `writes.py` know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from recollect._core.methods import find_run_code
from recollect._core.reachable import find_held
from recollect._core.reads import takes_out
from recollect._core.torch_private.sharding import is_managed
from recollect._recompute.changes import (
    ChangedWatch,
    Loose,
    address_of,
    find_changed,
    find_flipped,
    flags_of,
    versions_of,
)
from recollect._recompute.contents import Contents
from recollect._recompute.memory import Memory
from recollect._recompute.module_hooks import Noted
from recollect._recompute.module_settings import ModuleSettings
from recollect._recompute.module_tree import ModuleTree, find_watched
from recollect._recompute.updates import (
    States,
    Trial,
    copy_value,
    declared,
    find_learned,
    has_moved,
    learn,
    make_scratch,
    rules_of,
    version_of,
)
from recollect._recompute.writes import Place, WriteWatch, Written, copy_written, find_written, learn_written

_MISSING, _ABSENT = object(), object()


def _version_if(value: Any) -> int | None:
    return version_of(value) if isinstance(value, Tensor) else None


def _get(module: nn.Module, name: str) -> Any:
    """An attribute, or `_ABSENT` if forward has not made it yet."""
    return module._buffers[name] if name in module._buffers else getattr(module, name, _ABSENT)  # noqa: SLF001


def put_states(states: States) -> None:
    """During recomputation: set state as it stood after something that recomputation leaves out."""
    for module, name, value in states:
        _set(module, name, copy_value(value))


def _set(module: nn.Module, name: str, value: Any) -> None:
    if value is _ABSENT:
        if hasattr(module, name):
            delattr(module, name)
    elif name in module._buffers:  # noqa: SLF001
        module._buffers[name] = value  # noqa: SLF001
    else:
        setattr(module, name, value)


def _layout(tensor: object) -> tuple[Any, Any]:
    return getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)


Mark = tuple[nn.Module, str, Any, int | None]
Pair = tuple[nn.Module, dict[str, Any], str, Any]


class ModuleState:
    """Modules around one execution of a region: noted at entry, `settle`d at exit, `restore`d for recomputation.

    Args:
        roots: the modules; what they contain is found.
        loose: tensors that the function holds itself; held weakly.
        exact: restore by value even the state that recomputation only writes, so that it can be compared.
        memory: where earlier calls of the region have left what they found.
        watches: copy parameters that the function writes, so that it can run under `watch`.
        restores: whether recomputation finds numbers and flags that forward itself sets as forward found them, even
            where it sets no other state; else it goes on from where they stand.

    Attributes:
        is_watching: whether recomputation runs under a watch for changed tensors.
        watch: what forward must run under, to see which parameters it writes; None if that is known.
    """

    __slots__ = (
        *("_flags", "_hooks", "_is_settled", "_loose", "_restores", "_roots", "_settings", "_state", "_tree", "_trial"),
        *("_versions", "_watched", "_written", "is_watching", "watch"),
    )

    def __init__(
        self,
        roots: list[nn.Module],
        loose: list[Tensor],
        *,
        exact: bool = False,
        memory: Memory | None = None,
        watches: bool = False,
        restores: bool = False,
    ) -> None:
        tree = None if memory is None else memory.tree
        settings = tree.attributes.read(roots) if tree is not None and tree.is_of(roots) else None
        if tree is None or settings is None:
            tree = ModuleTree.of(roots)
            settings = tree.attributes.read(roots)
            if memory is not None:
                memory.tree = tree
        self._tree, self._roots, self._restores, self._is_settled = tree, roots, restores, False
        self._settings = ModuleSettings(tree, roots, settings or [], restores=restores)
        self._hooks: Noted | None = None  # those that forward ran
        self._loose = list(map(Loose, loose))
        self._state: States = []
        self._trial: Trial | None = None
        self.is_watching = False
        self.watch: WriteWatch | None = None
        self._written: Written | None = None
        # What recomputation must find unchanged where it reads it, and the versions that show it.
        self._watched = tree.watched
        self._flags = flags_of(tree.watched)
        if tree.buffers or declared.items:
            exempt: set[int] = set()
            for module, count in zip(tree.modules(roots), tree.buffer_counts, strict=True):
                if count or declared.items:
                    self._note_state(module, exempt, exact=exact)
            self._watched = tree.watched + [t for t in find_watched(tree.buffers) if id(t) not in exempt]
        if tree.attributes.names.may_be_tensors:
            self._note_tensors()
        if watches and roots:
            places = tree.written.get(roots[0].training)
            if places is None or places:
                self._note_written(places)
        self._versions = versions_of(self._watched)

    def _note_written(self, places: list[Place] | None) -> None:
        """Copy the parameters that forward is known to write; where that is not known, have it watched."""
        tree = self._tree
        if places is None:
            places = find_written(tree.modules(self._roots))
            if places is None:
                # Not what a sharding engine gathers into the parameters of its units.
                own = [tensor for module, _, _, tensor in self._pairs(0) if not is_managed(vars(module))]
                watch = WriteWatch(find_watched(own))
                self.watch = watch if watch.is_needed else None
                return
            tree.written[self._roots[0].training] = places
        if places:
            written = self._written = copy_written(tree.modules(self._roots), places)
            self._watched = self._watched if written is None else written.others(self._watched)

    def _settle_written(self, watch: WriteWatch) -> None:
        """Learn which parameters forward wrote, and keep their values at entry."""
        found = {id(tensor): (tensor, value) for tensor, value in watch.find()}
        places = [(module, name) for module, _, name, tensor in self._pairs(0) if id(tensor) in found]
        learn_written(self._tree.modules(self._roots), places)
        values = [(tensor, value) for tensor, value in found.values() if value is not None]
        if values:
            self._written = Written(values)
            versions = dict(zip(map(id, self._watched), self._versions, strict=True))
            self._watched = self._written.others(self._watched)
            self._versions = [versions[id(tensor)] for tensor in self._watched]

    def _note_state(self, module: nn.Module, exempt: set[int], *, exact: bool) -> None:
        updated, written = rules_of(type(module))
        for name in updated:
            self._state.append((module, name, copy_value(_get(module, name))))
            exempt.add(id(_get(module, name)))
        learned = find_learned(module)
        for name, tensor in module._buffers.items():  # noqa: SLF001
            if tensor is None or name in updated:
                continue
            if name in written and module.training:
                self._state.append((module, name, copy_value(tensor) if exact else _MISSING))
            elif name not in learned:
                if self._trial is None:
                    self._trial = Trial()
                self._trial.add(module, name, tensor)
            elif learned[name]:
                self._state.append((module, name, copy_value(tensor)))
            else:
                continue
            exempt.add(id(tensor))

    def _note_tensors(self) -> None:
        """Tensors in attributes: those that their modules write into are state, too."""
        modules = self._tree.modules(self._roots)
        for number, name in self._tree.attributes.names.may_be_tensors:
            module = modules[number]
            tensor = vars(module).get(name)
            if not isinstance(tensor, Tensor) or tensor.requires_grad:
                continue
            writes = find_learned(module).get(name)
            if writes:
                self._state.append((module, name, copy_value(tensor)))
            elif writes is None and not self._tree.carries(self._roots, (number, name)):
                learn(module, name, moved=False)  # its last result
            elif writes is None:
                if self._trial is None:
                    self._trial = Trial()
                self._trial.add(module, name, tensor)

    def find_generators(self) -> list[Any]:
        """The random generators that the modules hold."""
        attributes = self._tree.attributes
        return attributes.find_own_generators(self._roots) if attributes.names.generators else []

    def settle(self) -> None:
        """At exit: learn which buffers a class updates, and keep their values at entry."""
        if self.watch is not None:
            watch, self.watch = self.watch, None
            self._settle_written(watch)
        if self._tree.buffers and versions_of(self._watched) != self._versions:
            self._learn_late()
        if self._trial is not None:
            self._settle_trial(self._trial)
        self._settings.settle(has_state=self._has_set_state, find_set_up=self._find_set_up)
        self._hooks = self._tree.hooks.note() if self._restores else None
        self._is_settled = True

    def _has_set_state(self) -> bool:
        """Whether forward has set other state than attributes."""
        is_kept = any(value is not _MISSING for _, _, value in self._state)
        return is_kept or bool(self._written) or not self._tree.has_same_parts()

    def _settle_trial(self, trial: Trial) -> None:
        for module, name, tensor, version, copied in trial.conclude():
            if has_moved(module, name, tensor, version, copied):
                self._state.append((module, name, copied))
            elif name in module._buffers:  # noqa: SLF001
                self._watched = [*self._watched, tensor]  # not in place: the list may be the tree's
                self._versions.append(version)
        self._trial = None

    def _find_set_up(self) -> set[int]:
        """The numbers of modules whose flags may say what forward has set up and nobody undoes: hooks and parts.

        Not of those that wrote state of their own, which goes back, and is then set up again.
        """
        written = self._written
        writers = {id(module) for module, _, value in self._state if value is not _MISSING}
        if written is not None:
            writers |= {
                id(module) for module, _, _, one in self._pairs(0) if one is not None and not written.others([one])
            }
        modules = self._tree.modules(self._roots)
        return {number for number in self._tree.find_set_up(self._roots) if id(modules[number]) not in writers}

    def _learn_late(self) -> None:
        """Something was updated that had been left alone so far. Its value at entry is lost, but only this once."""
        tree, versions = self._tree, dict(zip(map(id, self._watched), self._versions, strict=True))
        for kind in (0, 1):
            for module, _, name, tensor in self._pairs(kind):
                if tensor is None or version_of(tensor) == versions.get(id(tensor), version_of(tensor)):
                    continue
                if kind:
                    learn(module, name, moved=True)
                else:
                    learn_written([], [(module, name)])
                    tree.written.clear()

    def abandon(self) -> None:
        """The function has raised: leave no hook behind, learn nothing."""
        self.watch = None
        if self._trial is not None:
            self._trial.end()
            self._trial = None

    def find_holders(self) -> list[Any]:
        """Collections among the attributes of the modules, and objects in which they may collect something."""
        return self._tree.attributes.find_holders(self._roots)

    def find_passing(self) -> list[Any]:
        """The same, if forward may put something there that it takes out again, and does so in every run."""
        names = self._tree.attributes.names
        if names.takes_out is None and names.may_be_holders:
            kinds = dict.fromkeys(map(type, self._tree.modules(self._roots)))
            codes = [code for owner, code in find_run_code(kinds) if owner is not None]
            notes_runs = any("is_recomputing" in code.co_names for code in codes)
            names.takes_out = any(map(takes_out, codes)) and not notes_runs
        return self.find_holders() if names.takes_out else []

    def find_new_holders(self) -> list[Any]:
        """At exit, if forward has set any attributes: the same where they had nothing."""
        return self._tree.attributes.find_new_holders(self._roots) if self._settings.are_set_here else []

    def let_go(self, was: dict[int, Contents]) -> None:
        """After `settle`: do not hold these collections; given is what they held at entry, by their ids."""
        self._settings.let_go(was)

    def find_hooked(self) -> list[Any]:
        """Those in which forward hooks on the modules, or on all modules, may collect something."""
        return [holder for hook in self._tree.hooks.find(self._hooks) for holder in find_held(hook).holders]

    def is_stand_in(self, tensor: Tensor) -> bool:
        """Whether this stood for a parameter in the last recomputation."""
        return self._written is not None and self._written.is_stand_in(tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Whether this is a parameter, buffer or closed-over tensor that recomputation reads as it is."""
        return any(tensor is noted for noted in self._watched) or any(tensor is loose.tensor() for loose in self._loose)

    def find_code(self) -> list[CodeType]:
        """The code that forward may run."""
        kinds = dict.fromkeys(map(type, self._tree.modules(self._roots)))
        return [code for _, code in find_run_code(kinds)]

    @property
    def methods(self) -> list[FunctionType]:
        """Methods of the modules that read variables beyond attributes."""
        return self._tree.methods

    @property
    def is_stateless(self) -> bool:
        """Whether nothing is known that the function may move, so that `marks` would be empty. Before `settle` only."""
        return self._trial is None and not self._state

    def marks(self) -> list[Mark]:
        """State that the function may move, and how it stands now; for `moved`. Of use before `settle` only."""
        if not self._state and self._trial is None:
            return []
        found = [(module, name) for module, name, value in self._state if value is not _MISSING]
        if self._trial is not None:
            found += self._trial.names()
        return [(module, name, value, _version_if(value)) for module, name in found for value in [_get(module, name)]]

    def moved(self, marks: list[Mark]) -> States:
        """What has moved since, with copies of it as it stands now."""
        return [
            (module, name, copy_value(now))
            for module, name, value, version in marks
            for now in [_get(module, name)]
            if now is not value
            or not isinstance(now, Tensor)
            or version_of(now) != version
            or name in rules_of(type(module))[1]
        ]

    def moves_any(self, tensors: Iterable[Tensor]) -> bool:
        """After `settle`: whether one of these is a buffer that the function moves, or a view of it."""
        found = {address_of(now) for module, name, _ in self._state if isinstance(now := _get(module, name), Tensor)}
        found.discard(0)
        return bool(found) and any(address_of(tensor) in found for tensor in tensors)

    def restore(self, region: str) -> ExitStack | None:
        """Before recomputation: set what forward found; gives what puts it back, None if there is nothing to put back.

        Where something was changed in place since, recomputation runs under a watch that raises
        `ChangedInputError` when it reads it.
        """
        changed = find_changed(self._watched, self._versions, self._loose)
        self.is_watching = bool(changed)
        tree = self._tree
        flipped = find_flipped(tree.watched, self._flags, self._loose)
        if not (changed or flipped or self._state or self._written or self._trial is not None) and (
            not self._settings.have_changed()
            and tree.has_same_parts()
            and (not self._restores or tree.hooks.are(self._hooks))
        ):
            return self._settings.keep()
        stack = ExitStack()
        try:
            for tensor in flipped:
                stack.callback(tensor.requires_grad_, tensor.requires_grad)
                tensor.requires_grad_(not tensor.requires_grad)
            self._put(stack)
            if changed:
                stack.enter_context(ChangedWatch(region, self._name_changed(changed)))
        except BaseException:
            stack.close()
            raise
        return stack

    def _pairs(self, kind: int) -> Iterator[Pair]:
        """Each noted parameter (0), buffer (1) or part (2): its module, the table and name it stood under, and itself.

        Found by position: what a module adds later, it adds behind. One that has taken some away is left alone.
        """
        tree = self._tree
        noted: Iterator[Any] = iter((tree.parameters, tree.buffers, tree.children)[kind])
        counts = (tree.parameter_counts, tree.buffer_counts, tree.child_counts)[kind]
        tables = tree.tables(self._roots)[kind]
        for module, table, count in zip(tree.modules(self._roots), tables, counts, strict=True):
            held = list(islice(noted, count))
            if len(table) >= count:
                for name, tensor in list(zip(table, held, strict=False)):
                    yield module, table, name, tensor

    def _put(self, stack: ExitStack) -> None:
        stand_ins = {} if self._written is None else self._written.make_stand_ins()
        for kind in (0, 1, 2) if stand_ins or not self._tree.has_same_parts() else ():
            for module, table, name, noted in self._pairs(kind):
                now, tensor = table[name], stand_ins.get(id(noted), noted)
                if now is tensor:
                    continue
                # A sharding engine swaps a parameter for its shard and back around its units: its business. FSDP
                # marks its modules; others are known by this, that their two lie differently over processes.
                if not ((kind == 0 and is_managed(vars(module))) or _layout(now) != _layout(tensor)):
                    table[name] = tensor
                    stack.callback(_put_back, table, name, tensor, now)
        self._settings.put(stack)
        if self._restores and self._is_settled and not self._tree.hooks.are(self._hooks):
            self._tree.hooks.put(self._hooks, stack)
        # A backward inside the function recomputes while buffers are still on trial: they may be updated, too.
        on_trial = [] if self._trial is None else self._trial.states()
        for module, name, value in (*self._state, *on_trial):
            now = _get(module, name)
            _set(module, name, make_scratch(module, name, now) if value is _MISSING else copy_value(value))
            stack.callback(_set, module, name, now)

    def _name_changed(self, changed: list[Tensor]) -> list[tuple[Tensor, str]]:
        """What must not be read, with its name: changed tensors, and what a sharding engine has made of them."""
        wanted = {id(tensor) for tensor in changed}
        named: list[tuple[Tensor, str]] = []
        for kind, word in enumerate(("parameter", "buffer")):
            for module, table, name, tensor in self._pairs(kind):
                if tensor is not None and id(tensor) in wanted:
                    what = f"{word} '{name}' of {type(module).__name__}"
                    now = table[name]
                    named += [(one, what) for one in {id(tensor): tensor, id(now): now}.values() if one is not None]
        known = {id(tensor) for tensor, _ in named}
        return named + [
            (tensor, f"a tensor of shape {list(tensor.shape)} that the function closes over")
            for tensor in changed
            if id(tensor) not in known
        ]


def _put_back(table: dict[str, Any], name: str, ours: Tensor | None, theirs: Any) -> None:
    # What recomputation has set itself goes, but for what a sharding engine has put there.
    if name in table and _layout(table[name]) == _layout(ours):
        table[name] = theirs
