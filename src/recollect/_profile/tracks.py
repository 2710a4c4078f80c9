"""Which module call, and which line of the user's, an autograd node belongs to: told by the nodes' numbers.

autograd numbers the nodes of a thread in the order they are made. `Tracks` notes, at the start and end of each call of
a module, the number that the next node will get. A node then belongs to the innermost call between whose numbers its
own lies, however much later one asks. What happens between two calls cannot be seen: a node made by a module's own
code, not by one of the modules it calls, is known to lie between the lines of the two calls around it.

Nothing is noted with grad mode off, where no nodes are made, and inside code of torch.compile.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import unwrap
from pathlib import PurePath
from sys import _getframe
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import is_grad_enabled, nn

from recollect._core.authors import is_of_user
from recollect._core.torch_private.calls import Watch
from recollect._core.torch_private.engine import next_sequence
from recollect._profile.given_arguments import GivenArguments

# Of one thread. A call is two events and about 200 bytes: 65,000 calls in 13 MB. Older ones are forgotten.
_MOST_EVENTS = 2**17
_MOST_THREADS = 64

Entered = tuple[int, ref[nn.Module], str, int]
"""The number of the next node, the module, and the file and line of the user's that calls it."""

Log = deque[Entered | int]
"""A thread's calls: how each was entered, and the number of the next node when it was left, in the order of events."""


def format_line(filename: str, first: int, last: int = 0) -> str:
    """A line as reports show it, or some.

    >>> format_line("/home/me/model.py", 41), format_line("model.py", 41, 44)
    ('model.py:41', 'model.py:41-44')
    """
    return f"{PurePath(filename).name}:{first}" + (f"-{last}" if last > first else "")


class _Here(threading.local):
    """This thread's log."""

    def __init__(self, logs: deque[Log]) -> None:
        self.log: Log = deque(maxlen=_MOST_EVENTS)
        self.depth = 0  # of the calls that run
        logs.append(self.log)


class Tracks:
    """While started, notes calls of modules on all threads. Holds no module and no tensor alive.

    Args:
        when_failed: called with a module and what its call raised, innermost module first; must not raise.
    """

    def __init__(self, when_failed: Callable[[nn.Module, BaseException], None] | None = None) -> None:
        self._logs: deque[Log] = deque(maxlen=_MOST_THREADS)
        self._here = _Here(self._logs)
        self._when_failed = when_failed
        self._given: WeakKeyDictionary[nn.Module, GivenArguments] = WeakKeyDictionary()
        self._watch = Watch(self)

    def start(self) -> None:
        """Begin to note."""
        self._watch.start()

    def stop(self) -> None:
        """Note no more; what was noted stays."""
        self._watch.stop()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Log | None:
        """A module is called."""
        if not is_grad_enabled():
            return None
        here = self._here
        log = here.log
        here.depth += 1
        if here.depth == 1 and (args or kwargs):
            with suppress(Exception):  # a class among the arguments that will not be looked at
                self._given[module] = GivenArguments(args, kwargs)
        frame: FrameType | None = _getframe(2)
        while frame is not None and not is_of_user(frame.f_code, frame.f_globals):
            frame = frame.f_back
        if frame is None:
            log.append((next_sequence(), ref(module), "", 0))
        else:
            log.append((next_sequence(), ref(module), frame.f_code.co_filename, frame.f_lineno))
        return log

    def leave(self, entry: Log) -> None:
        """A call is over."""
        self._here.depth -= 1
        entry.append(next_sequence())

    def fail(self, module: nn.Module, error: BaseException) -> None:
        """A call has raised."""
        if self._when_failed is not None:
            self._when_failed(module, error)

    def given(self, module: nn.Module) -> GivenArguments | None:
        """What a module was called with last, where no other module called it."""
        return self._given.get(module)

    def read(self) -> list[Spans]:
        """What was noted so far, one for each thread, this thread's first."""
        logs = sorted(self._logs, key=lambda log: log is not self._here.log)
        return [spans for log in logs if (spans := Spans(list(log))).calls]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One call of a module."""

    module: nn.Module | None
    """None if it is gone."""
    parent: ModuleCall | None
    """The call it was made in, if that was seen."""
    file: str
    line: int
    """Where the user's code makes it; line 0 where no such code was found."""

    def around(self) -> list[ModuleCall]:
        """This call and those it is made in, outermost last."""
        calls = [self]
        while (parent := calls[-1].parent) is not None:
            calls.append(parent)
        return calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where a node was made."""

    call: ModuleCall | None
    """The innermost call; None for one made outside of modules."""
    line: str
    """``model.py:41``, ``model.py:41-44`` for one of these lines, or ``after train.py:30``; empty if unknown."""


class Spans:
    """The calls of one thread, to be searched by the numbers of nodes. Holds modules: not to be kept.

    Args:
        events: what the thread noted.

    Attributes:
        calls: all calls, in the order they were made.
    """

    def __init__(self, events: Sequence[Entered | int]) -> None:
        self.calls: list[ModuleCall] = []
        self._numbers: list[int] = []
        self._around: list[ModuleCall | None] = []  # after each event
        self._events: list[tuple[ModuleCall | None, bool]] = []  # the call of each event, and whether it is entered
        self._lines: dict[int, str] = {}
        open_calls: list[ModuleCall] = []
        for event in events:
            if isinstance(event, int):
                # An end without a beginning: that has fallen out of the log.
                self._note(event, open_calls.pop() if open_calls else None, open_calls, is_entered=False)
                continue
            number, module, file, line = event
            call = ModuleCall(module=module(), parent=open_calls[-1] if open_calls else None, file=file, line=line)
            self.calls.append(call)
            open_calls.append(call)
            self._note(number, call, open_calls, is_entered=True)

    def _note(self, number: int, call: ModuleCall | None, open_calls: list[ModuleCall], *, is_entered: bool) -> None:
        self._numbers.append(number)
        self._events.append((call, is_entered))
        self._around.append(open_calls[-1] if open_calls else None)

    def find(self, number: int) -> Spot | None:
        """Where the node of this number was made; None if that was before the first call or after the last event."""
        index = bisect_right(self._numbers, number) - 1
        if index < 0:
            return None
        if index not in self._lines:
            self._lines[index] = self._line(index)
        return Spot(call=self._around[index], line=self._lines[index])

    def _line(self, index: int) -> str:
        """The line, as far as it is known, of what a call does itself between an event and the next."""
        call = self._around[index]
        before, was_entered = self._events[index]
        if call is None:
            return f"after {format_line(before.file, before.line)}" if before is not None and before.line else ""
        forward = forward_lines(call.module)
        if forward is None:
            return format_line(call.file, call.line) if call.line else ""
        file, first, last = forward
        if not was_entered and before is not None and before.file == file and first <= before.line <= last:
            first = before.line
        after, will_enter = self._events[index + 1] if index + 1 < len(self._events) else (None, False)
        if will_enter and after is not None and after.file == file and first <= after.line <= last:
            last = after.line
        return format_line(file, first, last)


def forward_lines(module: nn.Module | None) -> tuple[str, int, int] | None:
    """The file and the first and last line of a module's forward, if that is the user's code."""
    forward = unwrap(getattr(type(module), "forward", forward_lines))
    code: Any = getattr(forward, "__code__", None)
    if code is None or not is_of_user(code, getattr(forward, "__globals__", {})):
        return None
    lines = [line for _, _, line in code.co_lines() if line is not None]
    with suppress(ValueError):
        return code.co_filename, code.co_firstlineno, max(lines)
    return None
