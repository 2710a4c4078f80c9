"""`on_oom`: when memory runs out, say what was alive, where it ran out, and what would have made room."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import ParamSpec, Protocol, Self, TypeVar, runtime_checkable

from torch import nn

from recollect._core.argument_text import describe_argument
from recollect._core.torch_private.alarms import Alarm, running_node
from recollect._core.torch_private.traces import running_module
from recollect._inspect.oom.alive import Alive, find_alive
from recollect._inspect.oom.error import Shortage, read_shortage
from recollect._inspect.oom.report import ROWS, OomReport, make_report
from recollect._inspect.oom.text import format_report
from recollect._profile.tracks import Tracks

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("recollect")
_SEEN = "__recollect_oom__"
"""What we note at an exception, so that it is looked at once and reported once: an `Alive`, later a report."""
_REST = 10  # times as long as a look at a device took, there is no other


@runtime_checkable
class _Stream(Protocol):
    def write(self, text: str, /) -> object: ...


class on_oom:  # noqa: N801 (reads as a function: `with on_oom():`)
    """When memory runs out, report what was in memory by module and line, and what would have made room.

    Use it around a step or a whole training loop, as a decorator, or once at the start of a script through `install`,
    for exceptions that nobody catches. The exception still reaches whoever catches it, as the same object; nothing is
    kept alive. Other exceptions pass untouched. It covers the devices' allocators and the host's (`MemoryError` and
    torch's own), and needs no device memory. If the report itself fails, that is logged under ``recollect``.

    While nothing fails, it notes each call of a module, about 2 µs each, on all threads; compiled code costs nothing.
    Host memory for that is bounded (about 13 MB in long steps). When memory runs out, the report takes up to a
    few seconds.

    Args:
        misplaced: must be empty; options are passed by name.
        to: a stream to write to (by default ``sys.stderr``), or a function that receives the `OomReport`.
        top: how many rows to print of the tensors held for backward.

    Raises:
        TypeError: `to` is neither, or is not given by name.
        ValueError: `top` is negative.

    >>> import torch, recollect
    >>> class Net(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256))
    ...     def forward(self, x):
    ...         x = self.body(x)
    ...         return x.new_empty(10**15)
    >>> model = Net()
    >>> reports = []
    >>> with recollect.on_oom(to=reports.append):
    ...     loss = model(torch.ones(64, 256))
    Traceback (most recent call last):
    ...
    RuntimeError: ... can't allocate memory: you tried to allocate 4000000000000000 bytes. ...
    >>> print(reports[0])
    recollect.on_oom: out of memory on cpu in forward of Net, ...
      asked for 3637.98 TiB
    ...
    held for backward, by module and line that made it
    ...
    >>> [row.bytes for row in reports[0].alive.saved if row.module == "body.1"]
    [65536]
    """

    def __init__(
        self, *misplaced: object, to: _Stream | Callable[[OomReport], object] | None = None, top: int = ROWS
    ) -> None:
        if misplaced:
            message = "recollect.on_oom takes its options by name. As a decorator it is written with parentheses: "
            message += "@recollect.on_oom()"
            raise TypeError(message)
        if to is not None and not callable(to) and not isinstance(to, _Stream):
            message = (
                f"to={to!r}: expected a stream, such as sys.stderr or an open file, or a function of the report, "
                f"not {type(to).__name__}"
            )
            raise TypeError(message)
        if isinstance(top, bool) or not isinstance(top, int) or top < 0:
            message = f"top={top!r}: expected a whole number of at least 0"
            raise ValueError(message)
        self._to = to
        self._top = top
        self._tracks = Tracks(self._look)
        self._alarm = Alarm(self._look_at_device)
        self._sighting: tuple[str, Alive] | None = None  # what a device's alarm saw, and of which device
        self._rests_until_s = 0.0
        self._lock = threading.Lock()
        self._entered = 0
        self._hooks: _ExceptHooks | None = None

    def __enter__(self) -> Self:
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                self._tracks.start()
                self._alarm.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._report(error, trace)
        finally:
            with self._lock:
                self._entered -= 1
                if self._entered == 0:
                    self._alarm.stop()
                    self._tracks.stop()
                    self._sighting = None

    def __call__(self, fn: Callable[P, T]) -> Callable[P, T]:
        """The function, watched at each call."""
        if not callable(fn):
            message = f"recollect.on_oom()(...) expects a function to watch, not {describe_argument(fn)}"
            raise TypeError(message)
        if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
            message = f"on_oom cannot watch {fn.__qualname__}, which is a generator or coroutine: "
            message += "write `with recollect.on_oom():` inside it"
            raise TypeError(message)

        @functools.wraps(fn)
        def watched(*args: P.args, **kwargs: P.kwargs) -> T:
            with self:
                return fn(*args, **kwargs)

        return watched

    def install(self) -> Self:
        """Watch from now on, and report exceptions that nobody catches, after their traceback.

        For a script, once at its start. Notebooks catch everything themselves: use ``with`` there.

        Returns:
            This object; its ``remove`` ends it.
        """
        if self._hooks is None:
            self.__enter__()
            self._hooks = _ExceptHooks(self._report)
        return self

    def remove(self) -> None:
        """Undo `install`."""
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.remove()
            self.__exit__(None, None, None)

    def _look(self, module: nn.Module, error: BaseException) -> None:
        """A module has raised: if it is for want of memory, look at what is alive before more of it goes."""
        try:
            shortage = None if hasattr(error, _SEEN) else read_shortage(error)
            if shortage is not None:
                _note(error, self._take_sighting(shortage) or find_alive(self._tracks, shortage.device, module))
        except Exception:
            _log_failure()

    def _look_at_device(self, index: int) -> None:
        """A device has no memory left: look at what is alive before anything of it goes; the exception will follow."""
        start_s = time.monotonic()
        self._sighting = None
        if start_s < self._rests_until_s:
            return
        try:
            device, module = f"cuda:{index}", running_module()
            node = running_node() if module is None else None
            alive = find_alive(self._tracks, device, module, node=node)
            self._sighting = (device, replace(alive, is_exact=node is not None))
        except Exception:
            _log_failure()
        # Libraries try for memory and do with less (cuDNN, when it compares kernels): not all the time for that.
        end_s = time.monotonic()
        self._rests_until_s = end_s + _REST * (end_s - start_s)

    def _take_sighting(self, shortage: Shortage) -> Alive | None:
        """What the alarm saw, if it was of the exception's device. It is older than anything that can be seen now."""
        sighting, self._sighting = self._sighting, None
        return sighting[1] if sighting is not None and sighting[0] == shortage.device else None

    def _report(self, error: BaseException, trace: TracebackType | None) -> None:
        """Report an exception that is for want of memory, or was caused by one that is, if no one has yet."""
        try:
            found = _find_shortage(error)
            if found is None:
                return
            error, shortage = found
            seen = getattr(error, _SEEN, None)
            if isinstance(seen, OomReport):
                return
            seen = seen or self._take_sighting(shortage)
            report = make_report(shortage, seen, self._tracks, error.__traceback__ or trace)
            _note(error, report)
            if callable(self._to):
                self._to(report)
            else:
                stream = sys.stderr if self._to is None else self._to
                stream.write(format_report(report, top=self._top))
        except Exception:
            _log_failure()


def _note(error: BaseException, what: Alive | OomReport) -> None:
    with suppress(Exception):  # a class that takes no attributes; it is then reported by each on_oom that sees it
        setattr(error, _SEEN, what)


def _log_failure() -> None:
    """Say that the report failed, as text: a log may keep what it is given, and exceptions hold frames."""
    kind, error, _ = sys.exc_info()
    why = "".join(traceback.format_exception_only(kind, error)).strip()
    _log.warning("recollect.on_oom could not report that memory ran out: %s", why)


def _find_shortage(error: BaseException) -> tuple[BaseException, Shortage] | None:
    """The exception, or what it was raised from, that is for want of memory."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        shortage = read_shortage(cause)
        if shortage is not None:
            return cause, shortage
        seen.add(id(cause))
        cause = cause.__cause__
    return None


class _ExceptHooks:
    """Reports exceptions that no one catches, after whatever hooks were there before have shown them."""

    def __init__(self, report: Callable[[BaseException, TracebackType | None], None]) -> None:
        self._report: Callable[[BaseException, TracebackType | None], None] | None = report
        self._before, self._before_in_threads = sys.excepthook, threading.excepthook
        self._mine, self._mine_in_threads = self._see, self._see_in_thread  # one bound method each, to know them by
        sys.excepthook, threading.excepthook = self._mine, self._mine_in_threads

    def _see(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self._before(kind, error, trace)
        finally:
            if self._report is not None:
                self._report(error, trace)

    def _see_in_thread(self, found: threading.ExceptHookArgs) -> None:
        try:
            self._before_in_threads(found)
        finally:
            if self._report is not None and found.exc_value is not None:
                self._report(found.exc_value, found.exc_traceback)

    def remove(self) -> None:
        """Put back what was there; where others have put theirs over ours, ours only passes on."""
        self._report = None
        if sys.excepthook is self._mine:
            sys.excepthook = self._before
        if threading.excepthook is self._mine_in_threads:
            threading.excepthook = self._before_in_threads
