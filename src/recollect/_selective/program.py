"""What was learned of a region's calls of torch: which to make again for which saved tensor. Shared by its frames.

Tensors have numbers. Only those are numbered that replay can need: arguments of the region, tensors from outside,
kept results, and what lies on the way from those to a forgotten saved tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor

from recollect._core.operators import tensors_in
from recollect._recompute.rng import Source as Generator
from recollect._recompute.way import Hooks

NOWHERE = -1
"""The number of a result that replay never needs."""


_FIXED = frozenset(
    {
        *(type(None), bool, int, float, complex, str, slice, range, type(Ellipsis)),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    }
)


class Unfixed(Exception):  # noqa: N818 (never leaves the recorders)
    """An argument may be changed by its owner after the call, so that it cannot be made again."""


def fixed(value: Any) -> Any:
    """An argument that is not a tensor, so that nobody can change it: lists are copied.

    Raises:
        Unfixed: it is of a kind that may change.
    """
    kind = type(value)
    if kind in _FIXED:
        return value
    if kind is tuple:
        return value if all(type(item) in _FIXED for item in value) else tuple(map(fixed, value))
    if kind is list:
        return list(map(fixed, value))
    raise Unfixed


class Numbered(int):
    """Stands in an argument list for the tensor of this number."""

    __slots__ = ()


class Listed:
    """Stands in an argument list for a list or tuple with tensors in it."""

    __slots__ = ("items", "kind")

    def __init__(self, kind: type, items: list[Any]) -> None:
        self.kind, self.items = kind, items

    def make(self, items: list[Any]) -> Any:
        """The list or tuple of these."""
        return items if self.kind is list else self.kind(items)


def template_of(value: Any, name: Callable[[Tensor], int]) -> Any:
    """An argument with numbers in place of its tensors, which are asked for in order.

    Raises:
        Unfixed: something in it may be changed by its owner.
    """
    if isinstance(value, Tensor):
        return Numbered(name(value))
    if isinstance(value, (list, tuple)) and tensors_in(value):
        return Listed(type(value), [template_of(item, name) for item in value])
    return fixed(value)


class Call:
    """One call of torch.

    Attributes:
        func: the function.
        shapes: of its tensor results: the size of the one tensor it gives, or a list of sizes and dtypes.
        dtype: of the one tensor.
        is_single: whether it gives one tensor, and not several.
        outs: the numbers of its results.
        kept: which of its results are held, by place.
        views: which of its results are views of other numbers, by place.
        tensors: position and number of each tensor among its arguments, if all of them stand there on their own; those
            that are given by name follow the positional ones.
        names: by which they are given, in order.
        others: positions of its other arguments.
        size: how many positional arguments it has.
        links: numbers of all its tensors, in order, those in lists and keywords included; of a kept call that casts,
            `NOWHERE` for those that replay never needs.
        is_recorded: whether replay can need it.
        is_checked: whether its tensors must be those of the program: all that are recorded or cast, and most that view.
        is_general: whether tensors are in lists.
        draws: whether it draws random numbers.
        sources: the generators that it draws from.
        needs_grad: for a call with saved tensors or casts of its own inside: which of its tensors must require grad.
        is_identity: whether a result is one of its own arguments.
        is_base: whether the one tensor it gives has views with numbers of their own.
        written: the number that it overwrites, if replay can need it; what it gives is the same tensor.
        bump: how far that moves the version of the tensor.
        is_overwritten: whether a later call overwrites what it gives, so that it must be memory of its own.
        flags: its arguments that are true or false; where it updates statistics, they say whether it reads them.
        scratch: numbers of statistics that it updates unseen: it is given copies when it is made again.
        place: where it was made when it was learned, for errors.
        is_simple: whether it takes tensors on their own, gives one, and there is nothing more to it.
        is_usual: the same, or it gives a view and is not made again: most calls are one of the two.
        view: what its one result is a view of, if it is usual.
        number: of that one.
    """

    __slots__ = (
        *("bump", "draws", "dtype", "flags", "func", "is_base", "is_checked", "is_general", "is_identity"),
        *("is_overwritten", "is_recorded", "is_simple", "is_single", "is_usual", "kept", "links", "names"),
        *("needs_grad", "number", "others", "outs", "place", "scratch", "shapes", "size", "sources", "tensors"),
        *("view", "views", "written"),
    )

    def __init__(self, func: Any, shapes: Any, *, is_single: bool, draws: bool) -> None:
        self.func, self.shapes, self.is_single, self.draws = func, shapes, is_single, draws
        self.dtype: Any = None
        self.sources: list[Generator] = []
        self.place = ""
        self.outs: list[int] = []
        self.kept: frozenset[int] = frozenset()
        self.views: dict[int, View] | None = None
        self.tensors: tuple[tuple[int, int], ...] = ()
        self.names: tuple[str, ...] = ()
        self.others: tuple[int, ...] = ()
        self.links: tuple[int, ...] = ()
        self.size = 0
        self.is_recorded = self.is_checked = self.is_general = False
        self.needs_grad: tuple[bool, ...] | None = None
        self.is_base = self.is_simple = self.is_usual = self.is_identity = False
        self.view: View | None = None
        self.number = self.written = NOWHERE
        self.bump = 0
        self.scratch: frozenset[int] = frozenset()
        self.flags: tuple[bool, ...] = ()
        self.is_overwritten = False

    def line_up(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[Any, ...]:
        """The arguments as `tensors` counts them."""
        return (*args, *[(kwargs or {}).get(name) for name in self.names]) if self.names else args

    def settle(self) -> None:
        """All is known: see whether it is a simple one."""
        is_bare = (
            self.is_single
            and not (self.draws or self.is_general or self.names or self.kept)
            and self.needs_grad is None
            and not (self.is_identity or self.scratch or self.is_overwritten)
            and self.written == NOWHERE
        )
        self.number = self.outs[0] if self.is_single else NOWHERE
        self.is_simple = is_bare and self.views is None and self.is_recorded
        self.view = None if self.views is None else self.views.get(0)
        gives_view = self.view is not None and self.is_checked and not self.is_recorded and self.number >= 0
        self.is_usual = self.is_simple or (is_bare and gives_view)


def flags_of(args: Iterable[Any], kwargs: dict[str, Any] | None) -> tuple[bool, ...]:
    """The arguments that are true or false."""
    return tuple(value for value in (*args, *(kwargs or {}).values()) if isinstance(value, bool))


class View:
    """A tensor that is a view of a numbered one, which is none itself.

    Attributes:
        delta: how many bytes behind the start of the other it starts.
        steps: the same in elements.
    """

    __slots__ = ("delta", "number", "shape", "steps", "stride")

    def __init__(self, number: int, shape: Any, stride: Any, steps: int, delta: int) -> None:
        self.number, self.shape, self.stride, self.steps, self.delta = number, shape, stride, steps, delta


class Inner:
    """A saved tensor that is made inside a call and seen by nobody else: the call's `place`-th one."""

    __slots__ = ("call", "place")

    def __init__(self, call: int, place: int) -> None:
        self.call, self.place = call, place


class Cast:
    """A saved tensor that a call made of one of its arguments: cast, as autocast does, or copied. Made again, not held.

    Attributes:
        number: of the argument.
        call: which call.
        kind: dtype, shape and strides.
        steps: how many elements behind the start of the cast it starts.
        is_copied: whether it was also laid out without gaps.
    """

    __slots__ = ("call", "is_copied", "kind", "number", "steps")

    def __init__(self, number: int, call: int, kind: tuple[Any, ...], steps: int, *, is_copied: bool) -> None:
        self.number, self.call, self.kind, self.steps, self.is_copied = number, call, kind, steps, is_copied

    def make(self, origin: Tensor) -> Tensor:
        """Cast the argument again."""
        dtype, shape, stride = self.kind
        made = origin.to(dtype)
        if self.is_copied:
            made = origin.clone(memory_format=torch.contiguous_format) if made is origin else made.contiguous()
        return made.as_strided(shape, stride, self.steps)

    def count_bytes(self) -> int:
        """The bytes of its elements."""
        dtype, shape, _ = self.kind
        return int(math.prod(shape) * dtype.itemsize)


class HeldCast:
    """A saved tensor that is held, and from which replay also takes the value that it is a cast of.

    Attributes:
        number: of that value: all that replay calls with it would cast it again.
        kind: dtype, shape and strides of the saved tensor.
        shape: of the whole cast, of which the saved tensor is a view.
        stride: likewise.
        steps: how many elements behind the start of the whole cast the saved tensor starts.
    """

    __slots__ = ("kind", "number", "shape", "steps", "stride")

    def __init__(self, number: int, kind: tuple[Any, ...], shape: Any, stride: Any, steps: int) -> None:
        self.number, self.kind, self.shape, self.stride, self.steps = number, kind, shape, stride, steps

    def find_value(self, saved: Tensor) -> Tensor:
        """The whole cast, in the memory of the saved tensor."""
        return saved.as_strided(self.shape, self.stride, saved.storage_offset() - self.steps)


class Held:
    """A saved tensor that is held as it is: a parameter, a kept value, a view of one, or made inside a kept call."""

    __slots__ = ()


HELD = Held()
Source = int | View | Inner | Cast | Held
"""Where a saved tensor comes from: a number is the tensor itself."""


class Program:
    """How to make a region's saved tensors again.

    Attributes:
        calls: in the order in which the region makes them.
        sources: of its saved tensors, in the order in which it saves them.
        metas: shape, dtype, device of each saved tensor.
        makers: for each number the call that makes it; -1 for arguments and tensors from outside.
        views: for each number, what it is a view of, or None.
        inputs: for numbers of arguments, which leaf of the arguments they are.
        uses: for each number, how often it is asked for until every saved tensor is served.
        bases: the numbers that others are views of.
        draws: whether one of the calls does.
        inner: for each call with inner saved tensors: which of those it saves, and their indices in `sources`.
        held_casts: by index in `sources`: held saved tensors that stand for the values that they are casts of.
        sent: the numbers of kept values that live elsewhere between forward and backward.
        scratch: the numbers of which no call needs the values.
    """

    __slots__ = (
        *("bases", "calls", "draws", "held_casts", "inner", "inputs", "makers", "metas", "scratch", "sent", "sources"),
        *("uses", "views"),
    )

    def __init__(self) -> None:
        self.bases: frozenset[int] = frozenset()
        self.calls: list[Call] = []
        self.draws = False
        self.sources: list[Source] = []
        self.metas: list[tuple[Any, ...] | None] = []
        self.makers: list[int] = []
        self.views: list[View | None] = []
        self.inputs: dict[int, int] = {}
        self.uses: list[int] = []
        self.inner: dict[int, dict[int, int]] = {}
        self.held_casts: dict[int, HeldCast] = {}
        self.scratch: frozenset[int] = frozenset()
        self.sent: frozenset[int] = frozenset()

    def count_uses(self, wanted: list[int], held: list[Any]) -> list[int]:
        """For each number, how often it is asked for until these saved tensors, by index, are served."""
        # No functions that call themselves here or below: such a function is a cycle, and would hold tensors.
        uses = [0] * len(self.makers)
        needed: set[int] = set()
        numbers: list[int] = []
        for index in wanted:
            source = self.sources[index]
            if type(source) is int:
                numbers.append(source)
            elif type(source) is View or type(source) is Cast:
                numbers.append(source.number)
            elif type(source) is Inner and source.call not in needed:
                needed.add(source.call)
                numbers += self.calls[source.call].links
        while numbers:
            number = numbers.pop()
            view = self.views[number]
            if view is not None:
                number = view.number
            uses[number] += 1
            maker = self.makers[number]
            if maker >= 0 and held[number] is None and maker not in needed:
                needed.add(maker)
                numbers += self.calls[maker].links
        return uses


def hold(tensor: Tensor) -> Tensor:
    """What to hold of a tensor: a leaf itself, of others an alias cut off from the graph; both see writes."""
    return tensor if tensor.is_leaf else tensor.detach()


@final
class SentValue:
    """Stands for a kept value that lives elsewhere until backward.

    Attributes:
        handle: what the hooks gave that took it.
    """

    __slots__ = ("_unpack", "handle")

    def __init__(self, handle: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.handle, self._unpack = handle, unpack

    def fetch(self) -> Tensor:
        """The value, on the device again."""
        return self._unpack(self.handle)


class Bound:
    """The tensors and values of one execution that follows a program: what replay starts from.

    Attributes:
        held: by number: kept values (or `SentValue` for one) and tensors from outside; views of others have none.
        versions: by number: of the tensors when they were bound.
        arguments: by call: its arguments with numbers in place of tensors, or only those that are not tensors.
        states: by call: where generators stood before it.
    """

    __slots__ = ("arguments", "held", "states", "versions")

    def __init__(self, numbers: int, calls: int) -> None:
        self.held: list[Any] = [None] * numbers
        self.versions: list[int] = [0] * numbers
        self.arguments: list[Any] = [None] * calls
        self.states: dict[int, Any] = {}

    def send(self, numbers: Iterable[int], hooks: Hooks) -> None:
        """Hand kept values over to live elsewhere; one that was written into since stays, for replay to refuse."""
        pack, unpack = hooks
        with torch.no_grad():
            for number in numbers:
                value = self.held[number]
                if value is not None and value._version == self.versions[number]:  # noqa: SLF001
                    self.held[number] = SentValue(pack(value), unpack)
