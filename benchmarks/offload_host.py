"""What offloading costs the host for each value, by part: `python benchmarks/offload.py --case host`.

A step of many small values, whose copies take no time to speak of, so that the host never waits for the device: with
large ones the queues of the device fill up, and every call in the hooks takes as long as a copy. Without a device the
link is one that carries nothing. Each part is timed alone, and of each value the fastest of many steps counts.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import recollect
from recollect._core.torch_private.copies import copy_all
from recollect._offload import learning
from recollect._offload.accounts import Accounts
from recollect._offload.compression import Compression
from recollect._offload.departures import Departures
from recollect._offload.learning import SessionOptions
from recollect._offload.parcels import Parcel
from recollect._offload.returns import Returns
from recollect._offload.session import Session
from recollect._offload.streams import Batch, DeviceLanes, HostClock, StreamClock
from recollect._offload.tiers import HostTier
from recollect._offload.transfers import Transfers

VALUES = 200
SIZE = 2**14  # float32: 64 KiB each
BATCH = 16  # values that travel together
WARM, ROUNDS = 8, 40
MOST_US = 15.0

PARTS: dict[str, tuple[type, tuple[str, ...]]] = {
    "  of that: the way out": (Transfers, ("send",)),
    "  of that: letting go of memory": (Departures, ("_let_go",)),
    "  of that: the way back": (Returns, ("fetch_with",)),
    "  of that: handing over": (Transfers, ("take",)),
}


class NullLanes:
    """A link that carries nothing, at once."""

    def __init__(self, device: torch.device) -> None:
        del device
        self.clock: StreamClock = HostClock()
        self.current: Callable[[], Any] = lambda: "the only stream"

    def copy_out(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            batch.begun, batch.end = len(batch.targets), "reached"
            if batch.times is not None:
                batch.times.append((batch.targets[0].nbytes, 0.0, 1e-6))

    copy_back = copy_out

    def hold(self, stream: Any, mark: Any) -> None:
        pass

    def lend(self, tensor: Tensor, *, is_out: bool) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """Microseconds for each value that travels: of each part, and of the copies that are in them."""

    parts: dict[str, float]
    copies_us: float
    values: int

    @property
    def own_us(self) -> float:
        """Without the copies."""
        return self.parts["pack"] + self.parts["unpack"] + self.parts["gone"] - self.copies_us


def make_session(device: torch.device) -> Session:
    if device.type != "cpu":
        return recollect.offload(min_bytes=0)._session
    transfers = Transfers(
        host=HostTier(),
        slow=None,
        staging=HostTier(),
        in_flight=2**30,
        accounts=Accounts(measures=False),
        make_lanes=NullLanes,
    )
    options = SessionOptions(min_bytes=0, in_flight=2**30, waits=True, compression=Compression(None))
    return Session("host", options, transfers)


def run_step(session: Session, device: torch.device) -> None:
    x = torch.randn(SIZE, device=device, requires_grad=True)
    if device.type != "cpu":
        torch.accelerator.synchronize()
    with session:
        y = x
        for _ in range(VALUES):
            y = y.sin()
    y.sum().backward()


def time_calls(owner: Any, names: Sequence[str], session: Session, device: torch.device) -> float:
    """Microseconds in some methods for each value, of each call the fastest."""
    spent: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            result = method(*args)
            spent.append(time.perf_counter() - start)
            return result

        return run

    fastest: list[float] | None = None
    for _ in range(ROUNDS):
        spent.clear()
        patches = [mock.patch.object(owner, name, timed(getattr(owner, name))) for name in names]
        for patch in patches:
            patch.start()
        run_step(session, device)
        for patch in patches:
            patch.stop()
        if fastest is None or len(fastest) != len(spent):
            fastest = list(spent)
        else:
            fastest = [min(pair) for pair in zip(fastest, spent, strict=True)]
    assert fastest is not None
    spent.clear()
    call_nothing = timed(lambda value: value)
    for _ in range(2000):
        call_nothing(None)
    own = sum(fastest) - min(spent) * len(fastest)  # without what timing takes
    return own / max(session.report().values, 1) * 1e6


def time_copies(device: torch.device) -> float:
    """Microseconds that the host takes to begin one copy out and one back, and nothing else."""
    if device.type == "cpu":
        return 0.0
    there = [torch.empty(SIZE, pin_memory=True) for _ in range(BATCH)]
    here = [torch.empty(SIZE, device=device) for _ in range(BATCH)]
    total = 0.0
    for targets, sources in ((there, here), (here, there)):
        best = float("inf")
        for _ in range(ROUNDS):
            torch.accelerator.synchronize()
            start = time.perf_counter()
            copy_all(targets, sources)
            best = min(best, (time.perf_counter() - start) / BATCH)
        total += best * 1e6
    return total


@mock.patch.object(learning, "_MEASURED_EVERY", 2**30)  # one timetable for all rounds
def measure_host(device: torch.device) -> HostCost:
    torch.set_num_threads(1)
    session = make_session(device)
    for _ in range(WARM):
        run_step(session, device)
    parts = {"pack": time_calls(session, ("pack",), session, device)}
    for name, (owner, names) in list(PARTS.items())[:2]:
        parts[name] = time_calls(owner, names, session, device)
    parts["unpack"] = time_calls(session, ("unpack",), session, device)
    for name, (owner, names) in list(PARTS.items())[2:]:
        parts[name] = time_calls(owner, names, session, device)
    parts["gone"] = time_calls(Parcel, ("__del__",), session, device)
    lanes: type = NullLanes if device.type == "cpu" else DeviceLanes
    parts["in both: lanes, events and copies"] = time_calls(lanes, ("copy_out", "copy_back", "hold"), session, device)
    return HostCost(parts=parts, copies_us=time_copies(device), values=session.report().values)
