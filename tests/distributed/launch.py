"""Real processes that run a function together, joined by a gloo process group.

How to use it: write a function at the top level of a test module and hand it to the fixture `ranks`::

    def total(start: int) -> float:  # runs on both ranks, with the default process group up
        mine = torch.tensor([float(start + distributed.get_rank())])
        distributed.all_reduce(mine)
        return mine.item()


    def test_ranks_add_up(ranks: Ranks) -> None:
        assert ranks.run(total, 3) == [7.0, 7.0]

* `run` gives what each rank returned, in the order of ranks. Arguments and results are pickled: plain tensors may pass,
  sharded ones may not (return `full_tensor()`).
* An exception on a rank fails the test with that rank's traceback; so does a rank that dies, or that is not back within
  `limit_s` (with what it was doing). Expect exceptions *inside* the function, with ``pytest.raises``.
* The processes stay: one pair serves the whole test session, function after function, because starting one costs
  seconds. Before each function the seed is 0 and warnings are errors; after it, the ranks meet at a barrier and
  process groups that the function made are destroyed. A function must undo whatever else it changes in its process.
  After any failure the processes are killed and `run` starts new ones.
* Other sizes: ``with Ranks(4) as ranks: ...``, in a fixture of your own with the widest scope that fits.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import distributed

from tests.collecting import collect_seldom
from tests.guards import leave_guards_untimed
from tests.pricing import fix_overheads
from tests.seeding import seed_only_what_is_here

T = TypeVar("T")

LIMIT_S = 180.0
_START_LIMIT_S = 120.0
_GRACE_S = 2.0  # what the other ranks get when one has failed; they may be waiting for it
# Loaded once, by the process that the ranks are forked from.
_PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.nn.parallel", "pytest", "recollect"]
_ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",  # the ranks work on the CPU; with a device in sight FSDP would take that
}

_context = multiprocessing.get_context("forkserver")


class RankError(Exception):
    """A rank raised, died or did not come back; the message says which, and shows its traceback."""


class Ranks:
    """A number of processes with a process group between them, which run functions one after another.

    They start at the first `run`, and again after a failure. `close` ends them.
    """

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def run(self, function: Callable[..., T], *args: Any, limit_s: float = LIMIT_S) -> list[T]:
        """Call a module-level function on every rank; gives what each returned.

        Raises:
            RankError: a rank raised, died, or was not back in time.
        """
        call = pickle.dumps((function, args))
        if not self._workers:
            self._start()
        for worker in self._workers:
            worker.send(call)
        return self._gather(f"{function.__module__}.{function.__qualname__}", limit_s)

    def close(self) -> None:
        """End the processes: politely first, the group destroyed, then by force."""
        for worker in self._workers:
            worker.dismiss()
        for worker in self._workers:
            worker.process.join(_GRACE_S)
        self._kill()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        before = {name: os.environ.get(name) for name in _ENVIRONMENT}
        os.environ.update(_ENVIRONMENT)
        try:
            _context.set_forkserver_preload(_PRELOADED)
            self._workers = [_Worker(rank, self.size, Path(self._folder.name)) for rank in range(self.size)]
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        self._gather("start", _START_LIMIT_S)

    def _gather(self, what: str, limit_s: float) -> list[Any]:
        """The answer of each rank; kills all of them if one fails."""
        results: dict[int, Any] = {}
        problems: dict[int, str] = {}
        waiting = {worker.connection: worker for worker in self._workers}
        deadline = time.monotonic() + limit_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                worker = waiting.pop(connection)
                is_good, answer = worker.receive()
                (results if is_good else problems)[worker.rank] = answer
                if not is_good:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if not waiting and not problems:
            return [results[rank] for rank in range(self.size)]
        for worker in waiting.values():
            problems[worker.rank] = (
                f"did not come back, because of that:\n{worker.where()}"
                if problems
                else f"was not back within {limit_s:g} s:\n{worker.where()}"
            )
        self._kill()
        raise RankError("\n".join(f"{what}: rank {rank} {problem}" for rank, problem in problems.items()))

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class _Worker:
    """The parent's end of one process."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank = rank
        self._stacks = folder / f"stacks-{rank}"
        self.connection, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs, rank, size, folder, self._stacks), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, call: bytes) -> None:
        try:
            self.connection.send_bytes(call)
        except OSError:  # dead; `receive` says so
            return

    def receive(self) -> tuple[bool, Any]:
        """Whether it went well, and the result or what happened."""
        try:
            is_good, answer = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join(_GRACE_S)
            return False, f"died with exit code {self.process.exitcode}\n{self._said()}"
        return is_good, answer

    def where(self) -> str:
        """What the process is doing, by its Python stacks."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.2)
        return self._said()

    def _said(self) -> str:
        return self._stacks.read_text() if self._stacks.exists() else ""

    def dismiss(self) -> None:
        self.send(b"")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


def _serve(connection: Connection, rank: int, size: int, folder: Path, stacks: Path) -> None:
    """The life of one process: join the group, run functions until told to go."""
    _die_with_parent()
    torch.set_num_threads(1)
    collect_seldom()
    fix_overheads()
    seed_only_what_is_here()
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        faulthandler.enable(file=file)
        try:
            store: Any = vars(distributed)["FileStore"](str(folder / "store"), size)
            timeout = timedelta(seconds=2 * _START_LIMIT_S)
            distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
            _meet()
        except Exception:
            connection.send_bytes(pickle.dumps((False, f"could not join:\n{traceback.format_exc()}")))
            return
        connection.send_bytes(pickle.dumps((True, None)))
        try:
            while call := connection.recv_bytes():
                connection.send_bytes(_answer(call))
        except EOFError:  # the parent has gone
            return
        distributed.destroy_process_group()


def _answer(call: bytes) -> bytes:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.manual_seed(0)
            leave_guards_untimed()
            function, args = pickle.loads(call)
            result = pickle.dumps((True, function(*args)))
            _check()
            _meet()
            _end_groups()
            return result
    except BaseException:  # an exit is a failure too
        return pickle.dumps((False, f"raised:\n{traceback.format_exc()}"))


def _meet() -> None:
    """All ranks are here, and have made as many process groups."""
    counts: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(counts, _world().group_count)
    assert len(set(counts)) == 1, f"ranks have made different numbers of process groups: {counts}"


def _check() -> None:
    assert distributed.is_initialized(), "the function destroyed the default process group"
    assert torch.is_grad_enabled(), "the function left grad mode off"


def _end_groups() -> None:
    """Only after all ranks have met: to end a group closes connections that a slower rank may still be making."""
    for group in list(_world().pg_map):
        if group is not distributed.group.WORLD:
            distributed.destroy_process_group(group)


def _world() -> Any:
    return distributed.distributed_c10d._world


def _die_with_parent() -> None:
    """No orphans, even when the parent is killed while this process waits in a collective."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
