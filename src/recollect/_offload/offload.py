"""`recollect.offload`: a context in which what is saved for backward lives elsewhere."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any, Never, Self
from weakref import WeakKeyDictionary

from torch import Tensor

from recollect._core.argument_text import short_repr
from recollect._core.patterns import hint_nearest
from recollect._core.spelling import options_of, refuse_unknown
from recollect._core.timetables import IN_FLIGHT_BYTES, LEAST_BYTES
from recollect._core.torch_private.engine import pop_hooks, push_hooks
from recollect._core.units import parse_bytes
from recollect._offload.accounts import Accounts, OffloadReport
from recollect._offload.compression import Compression
from recollect._offload.learning import SessionOptions
from recollect._offload.parcels import Stayed
from recollect._offload.session import Session
from recollect._offload.tiers import HostTier, Tier, shared_hosts
from recollect._offload.transfers import Transfers

if TYPE_CHECKING:
    from recollect._offload.disk import DiskTier

TierLike = str | Tier | Sequence[str | Tier]
"""``"host"``, ``"disk"``, an object of one's own, or ``("host", "disk")``: the second where the first is full."""

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Offload:
    """Sends saved values elsewhere inside a ``with`` block; made by `recollect.offload`.

    A context manager that you can enter any number of times, one step after another. In the first steps it learns when
    forward makes each value and when backward needs it; after that it fetches values ahead of time.

    Attributes:
        hooks: the pair of hooks that does the work, in the form that `torch.autograd.graph.saved_tensors_hooks` takes.
    """

    __slots__ = ("_session", "hooks")

    def __init__(self, session: Session) -> None:
        self._session = session
        self.hooks: Hooks = (session.pack, session.unpack)

    @property
    def tier(self) -> str:
        """In words, where values go."""
        return self._session.tier

    def __enter__(self) -> Self:
        """What is saved for backward from here on is sent away."""
        self._session.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.__exit__(kind, error, trace)

    def settle(self) -> None:
        """Call this after forward if you use `hooks` yourself, so that the packed values can leave."""
        self._session.settle()

    def pass_by(self) -> None:
        """Forward has moved on without saving anything here: release the memory of values that have left."""
        self._session.pass_by()

    def report(self) -> OffloadReport:
        """Bytes out and back in a step, the share of the copies that was hidden, and how long the step waits."""
        return self._session.report()

    def __repr__(self) -> str:
        return f"<{self.report()}>"


class Staying:
    """A context in which saved values stay where they are, inside one that sends them away."""

    def __enter__(self) -> Self:
        """Put hooks in force that keep."""
        push_hooks(Stayed, Stayed.get)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pop_hooks()


class Passing(Staying):
    """A context in which nothing changes; at its end an offload lets go of what has left by then.

    For modules that run while others send: values that leave after the last of those has run would wait for backward.
    """

    def __init__(self, away: Offload) -> None:
        self._away = away

    def __enter__(self) -> Self:
        """Nothing."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._away.pass_by()


def offload(
    tier: TierLike = "host",
    *,
    directory: str | os.PathLike[str] | None = None,
    min_bytes: int | str = LEAST_BYTES,
    limit: int | str | None = None,
    in_flight: int | str = IN_FLIGHT_BYTES,
    wait: bool = True,
    compress: str | None = None,
    **unknown: Never,
) -> Offload:
    """Move what forward saves for backward to host memory or disk, and fetch it back just in time.

    Put it around forward, or any part of it. Gradients are those of plain training. Copies run alongside the
    computation. recollect watches the first steps; from then on, each value arrives just before it is used. Values that
    backward needs at once stay; so do parameters, buffers and inputs.

    If you call it again at the same place, as in a training loop, it continues with what it learned there.

    Args:
        tier: ``"host"``: pinned memory. ``"disk"``: a file, removed at the end. ``("host", "disk")``: disk for what
            does not fit in host memory. Or an object with the methods of `recollect.Tier`.
        directory: where to put the file; None for a private directory among the temporary files.
        min_bytes: values smaller than this stay.
        limit: the most bytes on the tier (on the first, if there are several); values that do not fit stay, after a
            warning.
        in_flight: the most bytes in transit at a time, out or back. They stay on the device meanwhile.
        wait: whether the step may wait for the link. True sends everything, at the link's pace. False sends only what
            the link can carry away while forward computes: the step takes no longer.
        compress: ``"bf16"`` or ``"fp8"`` rounds float32 values on the way. None loses nothing; masks travel as bits.
        unknown: there are no other options; the error says which one is probably meant.

    Returns:
        A context manager; its ``report()`` says what it did.

    Raises:
        ValueError: an option has an invalid value.
        TypeError: `tier` is not a tier, or an option has the wrong type or is unknown.
        OffloadError: the directory cannot be created.

    >>> import torch, recollect
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    >>> x = torch.ones(256, 8)
    >>> with recollect.offload(tier="disk", min_bytes="1KiB") as away:
    ...     loss = net(x).sum()
    >>> loss.backward()
    >>> away.report().out_bytes
    65536
    """
    if unknown:
        refuse_unknown("recollect.offload", unknown, options_of(offload))
    options = _read_options(tier, directory, min_bytes, limit, in_flight, wait, compress)
    frame = sys._getframe(1)  # noqa: SLF001
    return Offload(_session_at(frame.f_code, frame.f_lasti, options))


def offload_everything() -> Offload:
    """One for all that ask in this thread: to the host, small values too, copies of those that are there already."""
    here = offload_everything.__code__
    session = _session_at(here, 0, _read_options("host", None, 0, None, IN_FLIGHT_BYTES, True, None))  # noqa: FBT003
    session.transfers.copies_host = True
    return Offload(session)


def offload_decided(tier: TierLike | None = None) -> Offload:
    """One for all regions of this thread: for what their policies offload, and for their arguments if those go away.

    Args:
        tier: as of `offload`. None for where the region that runs sends what its policy offloads; else to the host.
    """
    if tier is None:
        chosen = _decided.get()
        if chosen is not None:
            return chosen
        tier = "host"
    here = offload_decided.__code__
    return Offload(_session_at(here, 0, _read_options(tier, None, LEAST_BYTES, None, IN_FLIGHT_BYTES, True, None)))  # noqa: FBT003


@contextmanager
def deciding_for(away: Offload) -> Iterator[None]:
    """A context in which what policies offload goes there."""
    token = _decided.set(away)
    try:
        yield
    finally:
        _decided.reset(token)


_decided: ContextVar[Offload | None] = ContextVar("recollect_decided", default=None)


def _session_at(code: CodeType, instruction: int, options: _Options) -> Session:
    sessions = _places.sessions.setdefault(code, {})
    key = (instruction, options)
    if key not in sessions:
        sessions[key] = make_session(*options)
    return sessions[key]


def make_offload(tier: TierLike = "host", *, min_bytes: int | str = LEAST_BYTES, copies_host: bool = False) -> Offload:
    """One that belongs to its holder, and to no place in a program.

    Args:
        tier: as of `offload`.
        min_bytes: as of `offload`.
        copies_host: whether values that are in host memory already are copied there, in place of staying.
    """
    session = make_session(*_read_options(tier, None, min_bytes, None, IN_FLIGHT_BYTES, True, None))  # noqa: FBT003
    session.transfers.copies_host = copies_host
    return Offload(session)


@contextmanager
def measuring_offloads() -> Iterator[Callable[[int], Offload]]:
    """Makes offloads to the host, for values of at least so many bytes, that say nothing and leave no trace.

    They share pinned memory of their own, which is given back at the end. torch's allocator may keep it for later
    tensors of this process.
    """
    host, in_flight = HostTier(), IN_FLIGHT_BYTES

    def make(min_bytes: int) -> Offload:
        accounts = Accounts(measures=False)
        transfers = Transfers(host=host, slow=None, staging=host, in_flight=in_flight, accounts=accounts)
        whole = Compression(None)
        options = SessionOptions(min_bytes=min_bytes, in_flight=in_flight, waits=True, compression=whole)
        return Offload(Session(host.name, options, transfers, is_quiet=True))

    try:
        yield make
    finally:
        host.close()


class _Places(threading.local):
    """The sessions of each place in this thread's program that offloads: a training loop comes back there each step.

    They hold what was learnt, and no value. They go with the code, or with the thread.
    """

    def __init__(self) -> None:
        self.sessions: WeakKeyDictionary[CodeType, dict[Any, Session]] = WeakKeyDictionary()


_places = _Places()

_Options = tuple[tuple[str | Tier, ...], str | None, int, int | None, int, bool, str | None]


def _read_options(  # noqa: PLR0917
    tier: TierLike,
    directory: str | os.PathLike[str] | None,
    min_bytes: int | str,
    limit: int | str | None,
    in_flight: int | str,
    wait: bool,  # noqa: FBT001
    compress: str | None,
) -> _Options:
    tiers = check_tier(tier, "tier")
    if directory is not None and not isinstance(directory, (str, os.PathLike)):
        message = f"directory={short_repr(directory)}: expected a path"
        raise TypeError(message)
    if directory is not None and "disk" not in tiers:
        message = f"directory={os.fspath(directory)!r} is for the disk tier, but tier={tier!r}. Pass tier='disk'"
        raise ValueError(message)
    if not isinstance(wait, bool):
        message = f"wait={wait!r}: expected True or False"
        raise ValueError(message)  # noqa: TRY004 (as for every other option)
    Compression(compress)
    most = None if limit is None else parse_bytes(limit, "limit")
    folder = None if directory is None else str(Path(directory).resolve())
    least, flying = parse_bytes(min_bytes, "min_bytes"), parse_bytes(in_flight, "in_flight")
    return tiers, folder, least, most, max(flying, 1), wait, compress


def check_tier(tier: TierLike, option: str) -> tuple[str | Tier, ...]:
    """The tiers that a caller named.

    Raises:
        ValueError: there is no such tier, or it cannot stand where it does.
        TypeError: it is none.
    """
    tiers = (tier,) if isinstance(tier, (str, Tier)) else tuple(tier) if isinstance(tier, (tuple, list)) else None
    if not tiers or not all(
        one in ("host", "disk") if isinstance(one, str) else isinstance(one, Tier) for one in tiers
    ):
        strange = next((one for one in tiers or () if one not in ("host", "disk")), None)
        hint = "; did you mean 'host'?" if strange == "cpu" else hint_nearest(strange, ("host", "disk"))
        message = (
            f"{option}={short_repr(tier)}: expected 'host', 'disk', ('host', 'disk'), or an object with a name and the "
            f"methods write, read, free and close{hint}"
        )
        raise ValueError(message) if isinstance(tier, (str, tuple, list)) else TypeError(message)
    if len(tiers) > 2 or (len(tiers) == 2 and (tiers[0] != "host" or tiers[1] == "host")):  # noqa: PLR2004
        message = f"{option}={tier!r}: a chain has two tiers, 'host' and the one behind it, as in ('host', 'disk')"
        raise ValueError(message)
    return tiers


def make_session(  # noqa: PLR0917
    tiers: tuple[str | Tier, ...],
    directory: str | None,
    min_bytes: int,
    limit: int | None,
    in_flight: int,
    wait: bool,  # noqa: FBT001
    compress: str | None,
) -> Session:
    """A session with its tiers."""
    host = shared_hosts.get(limit) if tiers[0] == "host" else None
    last = tiers[-1]
    slow: Tier | None = None
    if last == "disk":
        slow = _make_disk(directory, limit if host is None else None)
    elif not isinstance(last, str):
        slow = last
    transfers = Transfers(
        host=host,
        slow=slow,
        staging=shared_hosts.get(None),
        in_flight=in_flight,
        accounts=Accounts(measures=False),
    )
    names = " then ".join(one if isinstance(one, str) else one.name for one in tiers)
    options = SessionOptions(min_bytes=min_bytes, in_flight=in_flight, waits=wait, compression=Compression(compress))
    return Session(names, options, transfers)


def _make_disk(directory: str | None, limit: int | None) -> DiskTier:
    from recollect._offload.disk import DiskTier

    return DiskTier(directory, limit)
