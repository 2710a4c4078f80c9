"""What a function reads beyond its arguments and modules: variables of closures, and globals by name.

They are noted when the function runs, because another value may stand there when it runs again: the last of a loop that
made each function (``lambda x: layer(x)``), or what the function itself has set (``nonlocal state``). Recomputation
finds what forward found, and afterwards they are as they were.

Whole numbers, flags and texts that the function itself sets are left alone, because that is how people count calls. So
are collections and objects of the user's own in globals: to hold them could keep a graph alive that nobody else holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import starmap
from operator import attrgetter, is_
from types import CellType, FunctionType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from recollect._core.errors import ChangedInputError
from recollect._core.reachable import Global, read_cell
from recollect._core.reads import read_variable
from recollect._recompute.contents import alias_of

_COUNTS = frozenset({int, bool, str, type(None)})

_GOES_ON = object()  # in place of a value that a function counts up
_STANDS = object()  # in place of one that it replaces and never reads: its last result
_contents = attrgetter("cell_contents")


class Variables:
    """Variables around one execution of a region: noted at entry, `settle`d at exit, `put` for recomputation."""

    __slots__ = ("_are_set_here", "_cells", "_globals", "_noted")

    def __init__(self, cells: list[CellType], names: list[Global]) -> None:
        self._cells, self._globals = cells, names
        self._are_set_here: bool | None = None  # whether the function sets any itself; None while it runs
        try:
            values = [*map(_contents, cells), *starmap(dict.get, names)]
        except ValueError:  # a variable that is not set yet
            self._cells = [cell for cell in cells if read_cell(cell)]
            values = self._read()
        self._noted = [_note(value) if isinstance(value, Tensor) else value for value in values]

    def _read(self) -> list[Any]:
        """What they are now."""
        try:
            return [*map(_contents, self._cells), *starmap(dict.get, self._globals)]
        except ValueError:  # one that was unset since
            cells = [(read_cell(cell) or [None])[0] for cell in self._cells]
            return [*cells, *starmap(dict.get, self._globals)]

    def settle(self, functions: list[FunctionType]) -> None:
        """At exit: see what the functions have set themselves, and let what counts calls go on."""
        self._are_set_here = False
        now = self._read()
        if all(map(is_, now, self._noted)):
            return
        for place, (value, noted) in enumerate(zip(now, self._noted, strict=True)):
            if value is noted or (type(noted) is _NotedTensor and noted.is_of(value)):
                continue
            if type(value) in _COUNTS and type(noted) in _COUNTS:
                self._noted[place] = _GOES_ON
                continue
            self._are_set_here = True
            at = place - len(self._cells)
            if not read_variable(functions, *((self._cells[place], None) if at < 0 else self._globals[at])):
                self._noted[place] = _STANDS

    def put(self, region: str, undo: list[Callable[[], None]]) -> None:
        """Before recomputation: set them as forward found them; adds what puts them back.

        Raises:
            ChangedInputError: a tensor was written into that stood there in forward, and does not any longer.
        """
        if self._are_set_here is None:  # a backward inside the function
            return
        values = self._read()
        if not self._are_set_here and all(map(is_, values, self._noted)):
            return
        moved = []
        for place, (value, noted) in enumerate(zip(values, self._noted, strict=True)):
            if value is noted or noted is _GOES_ON or noted is _STANDS:
                continue
            if type(noted) is not _NotedTensor:
                moved.append((place, noted))
            elif not noted.is_of(value):
                moved.append((place, noted.get(region)))
        if moved or self._are_set_here:
            undo.append(partial(self._put_back, values))
            for place, noted in moved:
                self._set(place, noted)

    def _put_back(self, values: list[Any]) -> None:
        for place, (value, now) in enumerate(zip(values, self._read(), strict=True)):
            if value is not now and self._noted[place] is not _GOES_ON:
                self._set(place, value)

    def _set(self, place: int, value: Any) -> None:
        if place < len(self._cells):
            self._cells[place].cell_contents = value
        else:
            table, name = self._globals[place - len(self._cells)]
            table[name] = value


class _NotedTensor:
    """A tensor that stood in a variable, and an alias of it: its own history may come to lead to who holds this."""

    __slots__ = ("_alias", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = ref(tensor), tensor._version  # noqa: SLF001
        self._alias = alias_of(tensor)

    def is_of(self, value: Any) -> bool:
        return value is self._tensor()

    def get(self, region: str) -> Tensor:
        """The tensor itself where nothing leads on from it: backward knows a leaf by its object."""
        tensor = self._tensor()
        if self._alias._version != self._version:  # noqa: SLF001
            message = (
                f"region '{region}': a tensor of shape {list(self._alias.shape)} that the function closes over was "
                "changed in place after the region was entered, and its variable has since been set to another "
                "tensor.\n"
                "Recomputation would read the new values. Use the out-of-place form of that operation, or pass the "
                "tensor as an argument."
            )
            raise ChangedInputError(message)
        return self._alias if tensor is None or not tensor.is_leaf else tensor


def _note(tensor: Tensor) -> Any:
    # A parameter leads nowhere, and an inference tensor has no version.
    return tensor if isinstance(tensor, nn.Parameter) or tensor.is_inference() else _NotedTensor(tensor)
