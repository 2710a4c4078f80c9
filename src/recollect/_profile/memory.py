"""A meter of live tensor bytes that counts each storage once, from the operator that makes it until it is freed.

It works on every device, because it watches storages and not an allocator. Therefore it does not see scratch memory
inside one operator's kernel (a convolution's workspace, the temporaries of a composite operator below autograd),
storages made without an operator (`torch.UntypedStorage(n)`, `copy.deepcopy`, `torch.load`: name them with
`LiveBytes.include`), what compiled code allocates for itself, and an allocator's rounding and fragmentation.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from recollect._core.torch_private.dispatch import DispatchMode
from recollect._profile.storages import Found, storages_in, storages_of

__all__ = ["LiveBytes"]


class LiveBytes:
    """Counts the bytes of tensor storages that are alive, now and at the peak, in total and per device.

    While entered, the meter sees every operator of this thread and of the autograd threads that work for it: forward,
    backward and recomputation. A storage counts once, however many tensors view it, and stops counting the moment it
    is freed, also after the meter was left. Storages that existed before do not count unless included. One resized by
    an operator is measured again at once; one resized past the operators (`tensor.untyped_storage().resize_(0)`, as
    sharded training does) before it can enter a new peak, when an operator next touches it, and at every reading.

    The meter holds no tensor alive and needs no garbage collector. It may be entered again, and by several threads,
    and meters nest. Wrapper subclasses count by the tensors they are made of, fake tensors as if they were real, meta
    tensors not at all. Each operator takes some microseconds more, and one that sets a new peak 0.1 µs more for every
    live storage, so time is measured without it.

    Args:
        include: Tensors and modules to count from the start; see `include`.

    Example:
        >>> import torch
        >>> with LiveBytes() as meter:
        ...     x = torch.zeros(1024)
        ...     y = x.exp().sum()
        >>> meter.live_bytes, meter.peak_bytes
        (4100, 8196)
        >>> del x
        >>> meter.live_bytes
        4
    """

    def __init__(self, include: Tensor | nn.Module | Iterable[Tensor | nn.Module] = ()) -> None:
        self._tally = _Tally()
        self._entered = _Entered()
        self.include(include)

    def include(self, what: Tensor | nn.Module | Iterable[Tensor | nn.Module]) -> None:
        """Count these storages too, from now on.

        Args:
            what: A tensor, a module, or several of them. A module stands for its parameters and buffers; parameters
                and other leaf tensors bring along the gradient they have now.
        """
        self._tally.note(outputs=[found for tensor in _tensors_of(what) for found in storages_of(tensor)], inputs=())

    def __enter__(self) -> Self:
        watch = _TallyMode(self._tally)
        watch.__enter__()
        self._entered.watches.append(watch)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.watches.pop().__exit__(exc_type, exc, traceback)

    @property
    def live_bytes(self) -> int:
        """Bytes alive now, over all devices."""
        return sum(self.live_bytes_by_device.values())

    @property
    def live_bytes_by_device(self) -> dict[torch.device, int]:
        """Bytes alive now, for each device that ever held any."""
        with self._tally.settled():
            return dict(self._tally.live)

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at one time, over all devices, since the meter was made or `reset_peak` was called."""
        with self._tally.settled():
            return self._tally.total_peak

    @property
    def peak_bytes_by_device(self) -> dict[torch.device, int]:
        """The peak of each device for itself; they need not coincide, so their sum may be above `peak_bytes`."""
        with self._tally.settled():
            return dict(self._tally.peak)

    def reset_peak(self) -> None:
        """Look for the peak anew, from the bytes alive now."""
        with self._tally.settled():
            self._tally.peak = dict(self._tally.live)
            self._tally.total_peak = sum(self._tally.live.values())


class _Tracked(weakref.ref[torch.UntypedStorage]):
    """One storage that counts, and the size it counts with.

    The Python object of a storage lives exactly as long as the storage itself, whoever holds it, so its identity is
    a key and its weak reference dies with the bytes.
    """

    __slots__ = ("device", "key", "nbytes")

    device: torch.device
    key: int
    nbytes: int


class _Tally:
    """The storages that count and their sums; shared by the threads a meter is entered on.

    Storages die anywhere: in another thread, inside the collector, between two lines of this class. So death only
    appends to `freed`, which is atomic and runs no Python code; sums change under the lock, in `_bury` and after it.
    """

    def __init__(self) -> None:
        self.live: dict[torch.device, int] = {}
        self.peak: dict[torch.device, int] = {}
        self.total_peak = 0
        self._tracked: dict[int, _Tracked] = {}
        self._freed: deque[_Tracked] = deque()
        self._lock = threading.RLock()

    @contextmanager
    def settled(self) -> Generator[None, None, None]:
        """Hold the lock, with sums and peaks brought up to date."""
        with self._lock:
            self._bury()
            self._measure_all()
            self._raise_peaks()
            yield

    def note(self, *, inputs: Sequence[Found], outputs: Sequence[Found]) -> None:
        """Record what one operator took and gave: storages it made begin to count, resized ones are measured again."""
        # The caller holds these storages, so once the dead are buried no key below can be that of an earlier storage.
        with self._lock:
            self._bury()
            existed = set()
            for storage, _ in inputs:
                existed.add(id(storage))
                self._measure(storage)
            for storage, device in outputs:
                if not self._measure(storage) and id(storage) not in existed:
                    self._track(storage, device)
            if self._is_above_peak():
                self._measure_all()
                self._raise_peaks()

    def _track(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        tracked = _Tracked(storage, self._freed.append)
        tracked.device, tracked.key, tracked.nbytes = device, id(storage), storage.nbytes()
        self._tracked[tracked.key] = tracked
        self.live[device] = self.live.get(device, 0) + tracked.nbytes

    def _bury(self) -> None:
        while self._freed:
            tracked = self._freed.popleft()
            del self._tracked[tracked.key]
            self.live[tracked.device] -= tracked.nbytes

    def _measure(self, storage: torch.UntypedStorage) -> bool:
        """Bring one storage's size up to date; False if it does not count."""
        tracked = self._tracked.get(id(storage))
        if tracked is None:
            return False
        nbytes = storage.nbytes()
        if nbytes != tracked.nbytes:
            self.live[tracked.device] += nbytes - tracked.nbytes
            tracked.nbytes = nbytes
        return True

    def _measure_all(self) -> None:
        for tracked in tuple(self._tracked.values()):
            storage = tracked()
            if storage is not None and storage.nbytes() != tracked.nbytes:
                self._measure(storage)

    def _is_above_peak(self) -> bool:
        above_own = any(nbytes > self.peak.get(device, 0) for device, nbytes in self.live.items())
        return above_own or sum(self.live.values()) > self.total_peak

    def _raise_peaks(self) -> None:
        for device, nbytes in self.live.items():
            self.peak[device] = max(nbytes, self.peak.get(device, 0))
        self.total_peak = max(sum(self.live.values()), self.total_peak)


class _TallyMode(DispatchMode):
    """Tells a tally of every operator."""

    looks_beneath = True

    def __init__(self, tally: _Tally) -> None:
        super().__init__()
        self._tally = tally

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator, and note whose memory it used."""
        result = func(*args, **kwargs)
        # torch.tensor and torch.from_numpy make their tensor without an operator, then pass it through this one.
        is_birth = func is torch.ops.aten.lift_fresh.default
        inputs = () if is_birth else storages_in((args, kwargs))
        self._tally.note(inputs=inputs, outputs=storages_in(result))
        return result


class _Entered(threading.local):
    """The watches this thread has entered and not left, innermost last."""

    def __init__(self) -> None:
        self.watches: list[_TallyMode] = []


def _tensors_of(what: Tensor | nn.Module | Iterable[Tensor | nn.Module]) -> Iterator[Tensor]:
    if isinstance(what, Tensor):
        yield what
        if what.is_leaf and what.grad is not None:
            yield what.grad
    elif isinstance(what, nn.Module):
        for tensor in (*what.parameters(), *what.buffers()):
            yield from _tensors_of(tensor)
    else:
        for part in what:
            yield from _tensors_of(part)
