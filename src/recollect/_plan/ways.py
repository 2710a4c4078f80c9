"""How the executor will get a run's values back under a policy that keeps single results.

Replay makes single calls of torch again and is cheap; where it cannot be trusted the module runs again and kept results
are served. `recollect._selective` decides which; this is what a profile shows of it. What it does not show: autocast
switched inside of a module, arguments that may change, code that is compiled already.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from recollect._core.calls import Category, OpCall
from recollect._core.pace import TODAYS, is_bound_by_host
from recollect._core.profiles import Clock
from recollect._core.queues import reads_values
from recollect._plan.groups import find_groups, place_of_call
from recollect._plan.problem import Problem, Run
from recollect._plan.treatments import PlannedWay, Treatment, find_recomputed

_GIVEN_COPIES = ("aten.addmm.", "aten.baddbmm.", "aten.bmm.", "aten.convolution.", "aten.mm.")
_CASTS = "aten._to_copy."  # what is also laid out anew has other strides, and is not given
_SIZED_BY_VALUES = (
    "aten.masked_select",
    "aten.nonzero",
    "aten.repeat_interleave.Tensor",
    "aten._unique",
    "aten.unique",
)
_NUMBERS = re.compile(r"(?<![^._])\d+(?=\.|$)")


def find_way(problem: Problem, run: Run, kept: Collection[int] = ()) -> PlannedWay:
    """Replay, or serve where the run, or one call of torch of which only a part is kept, cannot be replayed.

    Args:
        problem: the step.
        run: which.
        kept: the calls whose results are kept, by number; those that are kept in any case need not be among them.
    """
    if not can_replay(problem, run):
        return PlannedWay.SERVE
    forced = set(find_forced(problem, run))
    for group in find_groups(problem, run):
        mine = [number for number in group if number in kept or number in forced]
        if mine and not _is_kept_whole(problem, group, mine):
            return PlannedWay.SERVE
    return PlannedWay.REPLAY


def can_replay(problem: Problem, run: Run) -> bool:
    """Whether a run can be replayed if what is kept lets it.

    Not if it overwrites what something else has a view of, reads buffers that it updates, takes memory that others
    fill, assigns to parts of tensors, talks to other processes, calls TorchScript, cuts tensors by what it chooses (see
    `cuts_by_choice`), is so small that an accelerator would wait for the host, or makes other calls in another run that
    looks the same from outside: a cache in a list is empty in the first.
    """
    known: dict[tuple[str, int], bool] = problem.derived.setdefault("can replay", {})
    key = (run.path, run.first)
    if key not in known:
        is_known = _goes_alike(problem, run) and not cuts_by_choice(problem, run)
        known[key] = is_known and _can_replay(problem, run)
    return known[key]


def _goes_alike(problem: Problem, run: Run) -> bool:
    """Whether other runs of its module that look the same from outside make the same calls, and save the same."""
    return all(
        problem.are_same(run, other) and _give_and_save_same(problem, run, other)
        for other in problem.runs_of(run.path)
        if run.form and other is not run and other.form == run.form
    )


def _give_and_save_same(problem: Problem, run: Run, other: Run) -> bool:
    """Whether calls give results of the same shapes, and save as many: a detached input is not differentiated."""
    calls, saves = problem.calls, problem.count_saved
    return all(
        saves[here] == saves[there]
        and [value.shape for value in calls[here].outputs] == [value.shape for value in calls[there].outputs]
        for here, there in zip(range(run.first, run.stop), range(other.first, other.stop), strict=True)
    )


def _can_replay(problem: Problem, run: Run) -> bool:
    for number in range(run.first, run.stop):
        call = problem.calls[number]
        is_unseen = call.is_collective or call.is_scripted or call.is_assignment
        if is_unseen or any("complex" in value.dtype for value in call.outputs):
            return False
        if is_unfilled(call) and not _has_company(problem, run, number):
            return False
        if call.runs_once and not call.writes:
            return False
        if not all(_is_plain_write(problem, run, number, storage) for storage in call.writes):
            return False
    if problem.profile.clock is Clock.HOST or not problem.profile.device:
        return True
    calls = range(run.first, run.stop)
    device_s = TODAYS.device_s(
        flops={"bfloat16": sum(problem.calls[number].flops for number in calls)},
        result_bytes=sum(value.bytes for number in calls for value in problem.calls[number].outputs),
    )
    return not is_bound_by_host(device_s=device_s, calls=len({place_of_call(problem, number) for number in calls}))


def cuts_by_choice(problem: Problem, run: Run) -> bool:
    """Whether the sizes inside of a run depend on what it chooses, as those of experts do that get their tokens.

    They are others in the next step, and no program holds. Either a call gives as much as values say, or after one that
    chooses, numbers are read from tensors, or one line of code gives results of several lengths: on the CPU, nobody
    sees `tolist`.
    """
    known: dict[tuple[str, int], bool] = problem.derived.setdefault("cuts by choice", {})
    key = (run.path, run.first)
    if key not in known:
        known[key] = _cuts_by_choice(problem, run)
    return known[key]


def _cuts_by_choice(problem: Problem, run: Run) -> bool:
    calls = problem.calls[run.first : run.stop]
    if any(call.op.startswith(_SIZED_BY_VALUES) or _takes_by_mask(call) for call in calls):
        return True
    first = next((at for at, call in enumerate(calls) if call.is_routing), len(calls))
    lengths: dict[object, int] = {}
    for call in calls[first:]:
        if reads_values(call.op) and not call.op.startswith("aten.bincount"):  # whose length is mostly given
            return True
        is_split = call.op.startswith("aten.split_with_sizes")
        shapes = [value.shape for value in call.outputs if value.shape] if call.source else []
        for place, shape in enumerate(shapes):
            line = (line_of(call), len(shape), 0 if is_split else place)
            if lengths.setdefault(line, shape[0]) != shape[0]:
                return True
    return False


def _takes_by_mask(call: OpCall) -> bool:
    return call.op.startswith("aten.index.") and any(value.dtype == "bool" for value in call.inputs[1:])


def line_of(call: OpCall) -> tuple[str, str, str]:
    """What the calls have in common that one line of code makes, for one expert after the other."""
    return call.op, name_alike(call.module), call.source


def name_alike(path: str) -> str:
    """The path of a module, the same for all that a list or a dict has under numbers.

    >>> name_alike("mlp.experts.11.up"), name_alike("mlp.experts.expert_3"), name_alike("norm1")
    ('mlp.experts.*.up', 'mlp.experts.expert_*', 'norm1')
    """
    return _NUMBERS.sub("*", path)


def _is_plain_write(problem: Problem, run: Run, number: int, storage: int) -> bool:
    """Whether replay can do without what a call overwrites: nobody else in the run sees it."""
    makers = run.makes.get(storage)
    if makers is None:  # a buffer that is updated, as those of batch norm; what quantizes reads what it updates
        readers = [at for at in problem.read_by[storage] if run.first <= at < run.stop]
        return readers == [number] and (not problem.makes[number] or "batch_norm" in problem.calls[number].op)
    place = place_of_call(problem, makers[0])
    for other in range(makers[0], number):
        is_view = other not in makers and any(value.storage == storage for value in problem.calls[other].outputs)
        if is_view and place_of_call(problem, other) != place:
            return False
    return all(by >= number for by in problem.saved_by.get(storage, ())) or place == place_of_call(problem, number)


def find_forced(problem: Problem, run: Run) -> Iterator[int]:
    """The calls whose results are kept whatever a policy says: those that choose, and what is counted out of them."""
    for number in range(run.first, run.stop):
        if problem.calls[number].is_routing and can_be_kept(problem, run, number):
            yield number


def can_be_kept(problem: Problem, run: Run, number: int) -> bool:
    """Whether recomputation can be given a call's results in place of running it."""
    call, made = problem.calls[number], problem.makes[number]
    if is_unfilled(call) or number in problem.casts:
        return False
    if call.runs_once or not made:
        return bool(find_kept_of(problem, run, number)) and can_replay(problem, run)
    return all(run.makes[storage] == (number,) for storage in made if storage in run.makes)


def find_kept_of(problem: Problem, run: Run, number: int) -> list[int]:
    """The storages that are kept if what a call gives is: those that it makes or overwrites, and no later call does."""
    call = problem.calls[number]
    return [at for at in (*problem.makes[number], *call.writes) if run.makes.get(at, (-1,))[-1] == number]


def find_copied(problem: Problem, run: Run) -> dict[int, tuple[int, ...]]:
    """Storages of which backward asks for copies in another dtype alone, and those copies.

    Replay keeps the copies if it is told to keep what they are copied from, provided that they take less, and that of
    the calls which copy only products are made again: they are given the copies.
    """
    known: dict[tuple[str, int], dict[int, tuple[int, ...]]] = problem.derived.setdefault("copied", {})
    key = (run.path, run.first)
    if key not in known:
        known[key] = {}
        for storage in {at for number in problem.inner_casts for at in problem.reads[number]}.intersection(run.makes):
            copies = _follow_copies(problem, run, storage)
            if (
                copies
                and storage not in run.needs
                and can_be_kept(problem, run, run.makes[storage][0])
                and sum(problem.sizes[at] for at in copies) <= problem.sizes[storage]
            ):
                known[key][storage] = copies
    return known[key]


def _follow_copies(problem: Problem, run: Run, storage: int) -> tuple[int, ...]:
    """What backward asks for of a storage, through copies of copies; nothing if another call reads it."""
    found: list[int] = []
    waiting = [storage]
    while waiting:
        readers = [number for number in problem.read_by[waiting.pop()] if problem.makes[number]]
        if not readers or not problem.inner_casts.issuperset(readers):
            return ()
        for copy in (at for number in readers for at in problem.makes[number]):
            (found if copy in run.needs else waiting).append(copy)
    return tuple(found)


def find_weight_casts(problem: Problem, run: Run) -> frozenset[int]:
    """The storages that autocast makes of parameters, that backward asks for, and that all are given who would cast.

    A replay holds all of them or none: a byte of each saves as much.
    """
    known: dict[tuple[str, int], frozenset[int]] = problem.derived.setdefault("weight casts", {})
    key = (run.path, run.first)
    if key not in known:
        known[key] = frozenset(
            copy
            for number in problem.inner_casts.intersection(range(run.first, run.stop))
            if all(problem.profile.storages[at].category is Category.PARAMETER for at in problem.reads[number])
            for copy in problem.makes[number]
            if copy in run.needs and problem.is_evictable(copy, run)
            if not any(problem.makes[reader] for reader in find_copying(problem, run, [copy]))
        )
    return known[key]


def find_held_for(problem: Problem, run: Run, calls: Collection[int]) -> tuple[PlannedWay, frozenset[int]]:
    """How the executor will get the rest back if it is told to keep what these calls give, and what it then holds."""
    if not calls:
        return PlannedWay.RERUN, frozenset()  # there is nothing to start a replay from
    way = find_way(problem, run, calls)
    made = [storage for number in calls for storage in find_kept_of(problem, run, number)]
    if way is not PlannedWay.REPLAY:
        return way, frozenset(made)
    copied = {storage: copies for storage, copies in find_copied(problem, run).items() if storage in made}
    while True:
        held = frozenset(at for storage in made for at in copied.get(storage, (storage,)))
        if not copied:
            return way, held
        again = {call for _, some in find_recomputed(problem, run, Treatment(way=way, kept=held)) for call in some}
        used = [at for at, copies in copied.items() if not again.isdisjoint(find_copying(problem, run, copies))]
        if not used:
            return way, held
        for storage in used:  # a call that copies it is made again, and takes what it copied
            del copied[storage]


def find_copying(problem: Problem, run: Run, copies: Iterable[int]) -> list[int]:
    """The calls that, made again, would copy again what these are copies of: those that are not given the copies."""
    return [
        number
        for copy in copies
        for number in problem.read_by[copy]
        if not problem.calls[number].op.startswith(_GIVEN_COPIES)
        or not all(problem.calls[maker].op.startswith(_CASTS) for maker in run.makes[copy])
    ]


def find_sendable(problem: Problem, run: Run, kept: Collection[int]) -> Iterator[int]:
    """The storages that a replay can have elsewhere, of those that it keeps: what calls of torch give, not save inside.

    What is given to somebody outside of the run, or written in several steps, stays.
    """
    for group in find_groups(problem, run):
        for storage in (at for number in group for at in problem.makes[number]):
            if (
                storage in kept
                and run.makes[storage] == (run.makes[storage][0],)
                and run.makes[storage][0] not in problem.casts
                and problem.can_leave(storage)
                and problem.last_use[storage] < run.stop
                and any(number > group[-1] for number in problem.read_by[storage])
                and all(run.first <= by < run.stop for by in problem.saved_by.get(storage, ()))
            ):
                yield storage


def is_unfilled(call: OpCall) -> bool:
    """Whether it gives memory that somebody else is to fill."""
    return call.op.startswith(("aten.empty", "aten.new_empty"))


def _has_company(problem: Problem, run: Run, number: int) -> bool:
    """Whether the call of torch that makes this call makes others as well."""
    place = place_of_call(problem, number)
    near = (other for other in (number - 1, number + 1) if run.first <= other < run.stop)
    return any(place_of_call(problem, other) == place for other in near)


def _is_kept_whole(problem: Problem, group: list[int], kept: list[int]) -> bool:
    """Whether all that one call of torch gives, or saves of its own, is kept, if some of it is."""
    mine = {storage for number in kept for storage in problem.makes[number]}
    made = {storage for number in group for storage in problem.makes[number]}
    inside = range(group[0], group[-1] + 1)
    return all(
        storage in mine
        for storage in made
        if problem.saved_by.get(storage) or any(number not in inside for number in problem.read_by.get(storage, ()))
    )
