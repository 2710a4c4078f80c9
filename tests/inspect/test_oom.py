"""`on_oom` says what was alive, where memory ran out and what would have made room, and lets the exception through."""

import contextlib
import gc
import io
import logging
import math
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recollect
from recollect import compat
from recollect._core.calls import Phase
from recollect._core.torch_private import alarms
from recollect._inspect.oom import alive as oom_alive
from recollect._inspect.oom import watch as oom
from recollect._inspect.oom.alive import Alive, SavedPlace
from recollect._inspect.oom.error import read_shortage
from recollect._inspect.oom.remedies import Candidate, find_remedies
from recollect._inspect.oom.report import OomReport
from recollect._inspect.oom.text import format_report
from recollect._inspect.oom.watch import on_oom
from tests.watching import backward, what_is_in_force

MEBIBYTE = 2**20
SIMULATED = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1048576 bytes."


def run_out(size: int = MEBIBYTE) -> None:
    raise RuntimeError(SIMULATED.replace("1048576", str(size)))  # line: run_out


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)  # line: up
        x = nn.functional.gelu(x)
        return self.down(x)  # type: ignore[no-any-return]  # line: down


class OomBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)  # line: norm
        return x + self.mlp(y).tanh()  # type: ignore[no-any-return]  # line: mlp


class OomNet(nn.Module):
    """A stack of blocks; `fail_at` says after which of them memory runs out."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.layers = nn.ModuleList(OomBlock(width) for _ in range(layers))
        self.head = nn.Linear(width, 10)
        self.fail_at: int | None = None
        self.missing = MEBIBYTE

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == self.fail_at:
                run_out(self.missing)  # line: fails
        return self.head(x)  # type: ignore[no-any-return]


def line_of(what: str) -> str:
    """Where this file says ``line: what``."""
    path = Path(__file__)
    lines = path.read_text().splitlines()
    return f"{path.name}:{1 + next(i for i, line in enumerate(lines) if line.endswith(f'# line: {what}'))}"


def rows_of(report: OomReport, *kinds: str) -> dict[tuple[str, str], int]:
    """Bytes by module and line; of these classes, since a test process has other graphs too."""
    return {(row.module, row.line): row.bytes for row in report.alive.saved if row.kind in kinds}


def report_of(step: Callable[[], Any]) -> OomReport:
    """The report of a step that runs out of memory."""
    reports: list[OomReport] = []
    with pytest.raises((RuntimeError, MemoryError)), on_oom(to=reports.append):
        step()
    (report,) = reports
    return report


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    call, hooks, before = nn.Module._call_impl, (sys.excepthook, threading.excepthook), what_is_in_force()
    yield
    before["random state"] = None
    after = what_is_in_force() | {"random state": None}
    assert nn.Module._call_impl is call
    assert (sys.excepthook, threading.excepthook) == hooks
    assert after == before


# Where, and what was alive


def test_a_failure_in_forward_names_phase_module_and_line() -> None:
    net = OomNet()
    net.fail_at = 1
    report = report_of(lambda: net(torch.ones(16, 8)))
    assert (report.phase, report.module, report.kind) == (Phase.FORWARD, "", "OomNet")
    assert report.line == line_of("run_out")
    assert report.stack[:2] == (f"{line_of('run_out')} in run_out", f"{line_of('fails')} in OomNet.forward")
    assert (report.device, report.requested_bytes) == ("cpu", MEBIBYTE)


def test_a_failure_inside_of_a_module_of_torch_is_placed_at_the_line_that_calls_it() -> None:
    net = OomNet()
    net.layers[2].get_submodule("mlp.down").register_forward_pre_hook(lambda _m, _a: exhaust())
    report = report_of(lambda: net(torch.ones(16, 8)))
    assert (report.module, report.kind) == ("layers.2.mlp.down", "Linear")
    assert f"{line_of('down')} in Mlp.forward" in report.stack


def exhaust() -> None:
    run_out()


def test_what_is_held_is_listed_by_module_and_line_to_the_byte() -> None:
    net = OomNet()
    net.fail_at = 0
    report = report_of(lambda: net(torch.ones(16, 8)))
    rows = rows_of(report, "Linear", "LayerNorm", "OomBlock", "Mlp")
    up, down = line_of("up"), line_of("down")
    between = f"{up}-{down.partition(':')[2]}"
    assert rows["layers.0.mlp.up", up] == 16 * 128 * 4  # saved by gelu
    assert rows["layers.0.mlp", between] == 16 * 128 * 4  # gelu's result, saved by down; a line between the two calls
    assert rows["layers.0.norm", line_of("norm")] == 16 * 32 * 4 + 2 * 16 * 4  # the result, and two statistics
    assert rows["layers.0", line_of("mlp")] == 16 * 32 * 4  # tanh's


def test_results_of_a_module_whose_caller_still_runs_are_seen() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Mlp(16), nn.Linear(16, 16)
            self.right.register_forward_pre_hook(lambda _m, _a: exhaust())

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.left(x), self.right(x)])

    rows = rows_of(report_of(lambda: Both()(torch.ones(4, 16))), "Mlp", "Linear")
    assert rows["left.up", line_of("up")] == 4 * 64 * 4 + 4 * 16 * 4  # its result, and the data that it holds


def test_parameters_gradients_and_optimizer_state_count_apart() -> None:
    gc.collect()
    empty = oom_alive.find_alive(on_oom()._tracks, "cpu")
    net = OomNet()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(16, 8)).sum().backward()
    optimizer.step()
    net.fail_at = 3
    alive = report_of(lambda: net(torch.ones(16, 8))).alive
    size = sum(parameter.nbytes for parameter in net.parameters())
    assert alive.parameter_bytes - empty.parameter_bytes == size
    assert alive.gradient_bytes - empty.gradient_bytes == size
    assert alive.optimizer_bytes - empty.optimizer_bytes == 2 * size + 4 * sum(1 for _ in net.parameters())


def test_a_failure_without_grad_is_placed_too() -> None:
    net = OomNet()
    net.fail_at = 1

    @torch.no_grad()
    def evaluate() -> None:
        net(torch.ones(16, 8))

    report = report_of(evaluate)
    assert (report.kind, report.line) == ("OomNet", line_of("run_out"))
    assert not rows_of(report, "Linear", "Mlp")


def test_a_failure_in_the_backward_of_a_function_names_the_module_that_called_it() -> None:
    class Heavy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            run_out()

    net = OomNet()
    net.layers[2].register_forward_hook(lambda _m, _a, y: Heavy.apply(y))  # type: ignore[no-untyped-call]
    loss = net(torch.ones(16, 8)).sum()  # made before: its nodes are not known
    report = report_of(lambda: backward(loss))
    assert (report.phase, report.kind, report.line) == (Phase.BACKWARD, "", "")
    assert any("before on_oom was entered" in note for note in report.notes)
    report = report_of(lambda: backward(net(torch.ones(16, 8)).sum()))
    assert (report.phase, report.module, report.is_exact) == (Phase.BACKWARD, "layers.2", True)
    assert report.stack[0] == f"{line_of('run_out')} in run_out"
    # Later layers have run their backward, and hold nothing any more.
    assert {module for module, _ in rows_of(report, "Mlp")} == {"layers.0.mlp", "layers.1.mlp", "layers.2.mlp"}


@pytest.mark.parametrize("way", ["native", "reentrant", "of torch"])
def test_a_failure_in_a_recomputation_is_said_to_be_one(way: str) -> None:
    net = OomNet()
    first, block, last = net.layers[0], net.layers[1], net.layers[2]
    runs: list[int] = []

    def fail_the_second_time(_m: nn.Module, _a: Any) -> None:
        runs.append(1)
        if len(runs) > 1:
            run_out()

    block.get_submodule("mlp").register_forward_pre_hook(fail_the_second_time)

    def run_block(x: Tensor) -> Any:
        if way == "native":
            return recollect.checkpoint(block)(x)
        if way == "reentrant":
            return compat.checkpoint(block, x, use_reentrant=True)
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    report = report_of(lambda: backward(last(run_block(first(torch.ones(16, 32, requires_grad=True)))).sum()))
    assert (report.phase, report.kind) == (Phase.RECOMPUTATION, "Mlp")
    assert report.module == "layers.1.mlp"


def test_a_failure_in_the_optimizer_is_said_to_be_one() -> None:
    class Greedy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            run_out()

    net = OomNet()
    optimizer = Greedy(net.parameters(), lr=0.1)

    def step() -> None:
        backward(net(torch.ones(16, 8)).sum())
        optimizer.step()

    report = report_of(step)
    assert (report.phase, report.kind, report.remedies) == (Phase.OPTIMIZER, "", ())
    assert any("recomputing modules does not help there" in note for note in report.notes)


def test_a_region_counts_by_what_it_holds() -> None:
    net = OomNet()
    net.fail_at = 3
    plain = report_of(lambda: net(torch.ones(16, 8)))
    with recollect.apply(net):
        report = report_of(lambda: net(torch.ones(16, 8)))
    held = sum(rows_of(report, "Linear", "LayerNorm", "OomBlock", "Mlp").values())
    assert held < 0.3 * sum(rows_of(plain, "Linear", "LayerNorm", "OomBlock", "Mlp").values())
    assert report.alive.forgotten > 0
    assert any("to be recomputed" in note for note in report.notes)


def test_wrappers_do_not_show_in_paths() -> None:
    net = OomNet()
    net.layers[1].register_forward_hook(lambda _m, _a, _y: exhaust())
    assert report_of(lambda: nn.DataParallel(net)(torch.ones(16, 8))).module == "layers.1"


def test_a_loss_that_is_a_module_is_not_taken_for_the_model() -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.exp().sin()
            run_out()
            return x

    net, loss = OomNet(), Loss()
    report = report_of(lambda: loss(net(torch.ones(16, 8))))
    assert (report.alive.model, report.module, report.kind) == ("OomNet", "Loss", "Loss")
    assert ("layers.0.mlp.up", line_of("up")) in rows_of(report, "Linear")


def test_a_module_that_was_only_begun_does_not_disturb() -> None:
    begun = nn.Sequential.__new__(nn.Sequential)
    net = OomNet()
    x = torch.ones(16, 32, requires_grad=True)

    def step() -> None:
        y = net.layers[1](net.layers[0](x))
        run_out()
        del y

    report = report_of(step)
    assert {row.module for row in report.alive.saved if row.kind == "Linear"} >= {"layers.0.mlp.up", "layers.1.mlp.up"}
    assert "_modules" not in vars(begun)


def test_parts_that_are_called_by_themselves_have_their_paths_in_the_model() -> None:
    net = OomNet()

    def step() -> None:
        x = net.layers[0](net.embed(torch.ones(16, 8)))
        x = net.layers[1](x)
        run_out()

    report = report_of(step)
    assert (report.alive.model, report.kind) == ("OomNet", "")
    assert ("layers.1.mlp.up", line_of("up")) in rows_of(report, "Linear")


def test_several_graphs_that_are_alive_are_remarked() -> None:
    net = OomNet()
    losses = [net(torch.ones(4, 8)).sum() for _ in range(2)]

    def step() -> None:
        losses.extend(net(torch.ones(4, 8)).sum() for _ in range(3))
        run_out()

    notes = " ".join(report_of(step).notes)
    assert "graphs of 3 calls of OomNet are still alive" in notes
    assert "loss.item()" in notes


def test_forward_in_another_thread_is_known_by_its_own_numbers() -> None:
    net, other = OomNet(), OomNet(width=16)
    results: list[Tensor] = []

    def step() -> None:
        worker = threading.Thread(target=lambda: results.append(other(torch.ones(16, 8))))
        worker.start()
        worker.join()
        results.append(net(torch.ones(16, 8)))
        run_out()

    rows = rows_of(report_of(step), "Linear")
    assert rows["layers.3.mlp.up", line_of("up")] == 16 * 128 * 4
    assert rows["OomNet.layers.3.mlp.up", line_of("up")] == 16 * 64 * 4


def test_compiled_code_is_said_to_be_opaque() -> None:
    net = OomNet()
    compiled = torch.compile(net, backend="aot_eager")

    def step() -> None:
        y = compiled(torch.ones(16, 8))
        run_out()
        y.sum()

    report = report_of(step)
    assert any("compiled code is one node" in note for note in report.notes)
    assert report.alive.saved_bytes > 16 * 128 * 4


def test_an_alarm_of_the_device_is_looked_at_before_anything_is_freed() -> None:
    """The device's allocator calls before it raises; here the test does."""
    net = OomNet()
    reports: list[OomReport] = []
    watch = on_oom(to=reports.append)

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            alarms._observe(7, 1, 2, 3)
            raise torch.OutOfMemoryError(CUDA.format(free="1.00 MiB", allowed="", unused="1.00 MiB"))

    monitored = oom_alive.find_alive
    devices: list[str] = []

    def find_on_cpu(tracks: Any, device: str, *args: Any, **kwargs: Any) -> Alive:
        devices.append(device)
        return monitored(tracks, "cpu", *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oom, "find_alive", find_on_cpu)
        with pytest.raises(torch.OutOfMemoryError), watch:
            Failing()(net(torch.ones(16, 8)) * 1)
    assert devices == ["cuda:7", "cuda:1"]  # of another device than the exception's, it is not used
    devices.clear()
    watch._rests_until_s = 0  # as if that had been long ago
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oom, "find_alive", find_on_cpu)
        patch.setattr(
            oom,
            "read_shortage",
            lambda error: replace(found, device="cuda:7") if (found := read_shortage(error)) else None,
        )
        with pytest.raises(torch.OutOfMemoryError), watch:
            Failing()(net(torch.ones(16, 8)) * 1)
    assert devices == ["cuda:7"]
    assert reports[1].kind == "Failing"
    assert ("layers.0.mlp.up", line_of("up")) in rows_of(reports[1], "Linear")
    assert alarms._alarms == []
    assert watch._rests_until_s > 0  # for as long as it looked, which is short in a small process
    watch._rests_until_s = math.inf
    with watch:
        watch._look_at_device(7)  # shortly after, it rests
        assert watch._sighting is None


# The exception and what it keeps alive


def test_the_exception_is_the_same_object_with_its_own_traceback() -> None:
    error = MemoryError("none left")
    with pytest.raises(MemoryError) as caught, on_oom(to=lambda _: None):
        raise error
    assert caught.value is error
    assert error.__context__ is None
    trace = error.__traceback__
    assert trace is not None
    assert trace.tb_frame.f_code.co_name == "test_the_exception_is_the_same_object_with_its_own_traceback"
    assert trace.tb_next is None


def test_nothing_is_kept_alive_once_the_exception_is_dropped() -> None:
    net = OomNet()
    net.fail_at = 2
    seen: list[weakref.ref[Any]] = []
    net.layers[1].register_forward_hook(lambda _m, _a, y: seen.append(weakref.ref(y)))
    reports: list[OomReport] = []

    def step() -> None:
        with contextlib.suppress(RuntimeError), on_oom(to=reports.append):
            net(torch.ones(16, 8)).sum()

    step()  # what torch makes once
    gc.collect()
    gc.disable()
    try:
        step()
        assert [ref() for ref in seen] == [None, None]
        assert len(reports) == 2
    finally:
        gc.enable()


def test_nothing_is_kept_alive_after_a_failure_in_backward() -> None:
    net = OomNet()
    net.layers[1].register_full_backward_hook(lambda _m, _i, _o: exhaust())
    seen: list[weakref.ref[Any]] = []
    net.layers[1].register_forward_hook(lambda _m, _a, y: seen.append(weakref.ref(y)))

    def step() -> None:
        with contextlib.suppress(RuntimeError), on_oom(to=lambda _: None):
            backward(net(torch.ones(16, 8)).sum())

    gc.disable()
    try:
        step()
        assert [ref() for ref in seen] == [None]
    finally:
        gc.enable()


def test_variables_of_a_function_that_goes_on_are_not_kept() -> None:
    x = torch.ones(16, 8)
    alive = weakref.ref(x)
    with contextlib.suppress(RuntimeError), on_oom(to=lambda _: None):
        run_out()
    del x
    assert alive() is None


def test_other_exceptions_pass_untouched() -> None:
    reports: list[OomReport] = []
    for error in (ValueError("out of memory, says a ValueError"), RuntimeError("shapes"), KeyboardInterrupt()):
        with pytest.raises(type(error)), on_oom(to=reports.append):
            raise error
        assert not vars(error)
    assert reports == []


def test_an_exception_that_was_raised_from_the_failure_is_reported() -> None:
    reports: list[OomReport] = []

    @on_oom(to=reports.append)
    def step() -> None:
        try:
            run_out()
        except RuntimeError as error:
            message = "step 3 failed"
            raise ValueError(message) from error

    with pytest.raises(ValueError, match="step 3 failed"):
        step()
    assert reports[0].line == line_of("run_out")


def test_a_failure_that_is_caught_inside_is_not_reported() -> None:
    net = OomNet()
    net.fail_at = 0
    reports: list[OomReport] = []
    with on_oom(to=reports.append), contextlib.suppress(RuntimeError):
        net(torch.ones(16, 8))
    assert reports == []


def test_a_report_that_fails_is_logged_and_hides_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        message = "no report"
        raise ZeroDivisionError(message)

    caplog.set_level(logging.WARNING, "recollect")
    with pytest.raises(RuntimeError, match="tried to allocate"), on_oom(to=fail):
        run_out()
    monkeypatch.setattr(oom, "find_alive", fail)
    net = OomNet()
    net.fail_at = 0
    with pytest.raises(RuntimeError, match="tried to allocate"), on_oom():
        net(torch.ones(16, 8))
    text = "recollect.on_oom could not report that memory ran out: ZeroDivisionError: no report"
    assert {record.getMessage() for record in caplog.records} == {text}
    assert all(record.exc_info is None for record in caplog.records)


# The ways to use it


def test_it_writes_to_stderr_or_to_a_stream(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), on_oom():
        run_out()
    printed = capsys.readouterr()
    assert printed.err.startswith("recollect.on_oom: out of memory on cpu in forward, test_oom.py:")
    assert printed.out == ""
    stream = io.StringIO()
    with pytest.raises(RuntimeError), on_oom(to=stream, top=0):
        run_out()
    assert stream.getvalue().startswith("recollect.on_oom: out of memory on cpu")
    assert "by module and line" not in stream.getvalue()


def test_the_innermost_reports_and_only_it() -> None:
    inner: list[OomReport] = []
    outer: list[OomReport] = []
    net = OomNet()

    @on_oom(to=outer.append)
    def step() -> None:
        x = net.layers[0](net.embed(torch.ones(16, 8)))
        with on_oom(to=inner.append):
            net.layers[1](x)
            net.fail_at = 0
            net(torch.ones(16, 8))

    with pytest.raises(RuntimeError):
        step()
    assert (len(inner), outer) == (1, [])
    # What the outer one has noted serves the report of the inner.
    assert ("layers.0.mlp.up", line_of("up")) in rows_of(inner[0], "Linear")


def test_as_a_decorator_it_watches_each_call() -> None:
    reports: list[OomReport] = []
    net = OomNet()

    @on_oom(to=reports.append)
    def step(size: int) -> Tensor:
        """One step."""
        return net(torch.ones(size, 8))  # type: ignore[no-any-return]

    assert step(2).shape == (2, 10)
    net.fail_at = 0
    for _ in range(2):
        with pytest.raises(RuntimeError):
            step(2)
    assert len(reports) == 2
    assert (step.__name__, step.__doc__) == ("step", "One step.")


def test_one_object_may_be_entered_again_and_by_several_threads() -> None:
    reports: list[OomReport] = []
    watch = on_oom(to=reports.append)

    def fail() -> None:
        with contextlib.suppress(RuntimeError), watch:
            run_out()

    with watch, watch:
        threads = [threading.Thread(target=fail) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(reports) == 4


def test_installed_it_reports_what_no_one_catches(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import sys, threading
        import torch
        from recollect._inspect.oom.watch import on_oom
        before = sys.excepthook, threading.excepthook, torch.nn.Module._call_impl
        handle = on_oom().install()
        assert handle.install() is handle
        try:
            raise MemoryError("caught")
        except MemoryError:
            pass
        def work():
            raise MemoryError("in a thread")
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        handle.remove()
        handle.remove()
        assert before == (sys.excepthook, threading.excepthook, torch.nn.Module._call_impl)
        on_oom().install()
        net = torch.nn.Linear(4, 4)
        raise MemoryError("at last")
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("recollect.on_oom: out of memory on cpu") == 2
    assert "caught" not in done.stderr
    assert done.stderr.index("MemoryError: at last") < done.stderr.rindex("recollect.on_oom: out of memory on cpu")


def test_what_others_put_over_the_hooks_stays() -> None:
    def theirs(*_: Any) -> None: ...

    before = sys.excepthook
    handle = on_oom().install()
    ours, sys.excepthook = sys.excepthook, theirs
    handle.remove()
    assert sys.excepthook is theirs
    sys.excepthook = before
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        ours(MemoryError, MemoryError("gone"), None)
    assert "MemoryError: gone" in shown.getvalue()
    assert "recollect.on_oom" not in shown.getvalue()


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes its options by name.*with parentheses: @recollect\.on_oom\(\)"):
        on_oom(run_out)
    with pytest.raises(TypeError, match=r"to=3: expected a stream, such as sys\.stderr or an open file, or a function"):
        on_oom(to=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="top=-1: expected a whole number of at least 0"):
        on_oom(top=-1)

    def steps() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match=r"cannot watch .*steps, which is a generator or coroutine: write `with"):
        on_oom()(steps)


# What would have made room


def test_the_remedy_frees_what_it_says() -> None:
    """What is promised is compared with what the same failure holds once the line it gives was carried out."""
    net = OomNet(layers=6)
    net.fail_at, net.missing = 4, 40_000
    kinds = ("Linear", "LayerNorm", "OomBlock", "Mlp", "OomNet")
    data = torch.ones(16, 8)
    plain = report_of(lambda: net(data))
    held = sum(rows_of(plain, *kinds).values())
    assert [(remedy.pattern, remedy.is_enough) for remedy in plain.remedies] == [
        ("layers.*", True),
        ("layers.*.mlp", True),
    ]
    assert plain.remedies[0].code == "recollect.apply(model)"
    assert (plain.remedies[0].modules, plain.remedies[0].ran, plain.remedies[0].fewest) == (6, 5, 2)
    for remedy in plain.remedies:
        handle = eval(remedy.code, {"recollect": recollect, "model": net})
        left = sum(rows_of(report_of(lambda: net(data)), *kinds).values())
        handle.remove()
        assert held - left == remedy.freed_bytes


def candidate(path: str, freed: int, kind: str = "Block", operators: int = 10, *, block: bool = False) -> Candidate:
    return Candidate(path=path, kind=kind, freed_bytes=freed, operators=operators, is_block=block)


def test_the_module_that_fails_frees_nothing_by_being_recomputed() -> None:
    blocks = [candidate(f"layers.{i}", 100, block=True) for i in range(4)]
    (remedy,) = find_remedies(blocks, missing_bytes=250, failed_module="layers.3.mlp", is_forward=True)
    assert (remedy.freed_bytes, remedy.ran, remedy.fewest, remedy.is_enough) == (300, 3, 3, True)
    assert remedy.code == "recollect.apply(model)"


def test_in_backward_the_fewest_modules_are_taken() -> None:
    blocks = [candidate(f"layers.{i}", 100, block=True) for i in range(4)]
    (remedy,) = find_remedies(blocks, missing_bytes=150, failed_module="head", is_forward=False)
    assert (remedy.fewest, remedy.operators, remedy.code) == (2, 20, "recollect.apply(model, first=2)")


def test_what_is_enough_comes_first_then_what_runs_least_again() -> None:
    modules = [
        candidate("encoder", 900, "Encoder", operators=100),
        candidate("decoder", 300, "Decoder", operators=5),
        candidate("neck", 600, "Neck", operators=50),
        candidate("small", 20, "Small"),
    ]
    found = find_remedies(modules, missing_bytes=500, failed_module="", is_forward=True)
    assert [(remedy.pattern, remedy.is_enough) for remedy in found] == [
        ("neck", True),
        ("encoder", True),
        ("decoder", False),
    ]
    assert found[0].code == 'recollect.apply(model, {"neck": "full"})'
    assert all(
        remedy.is_enough is None
        for remedy in find_remedies(modules, missing_bytes=None, failed_module="", is_forward=True)
    )


def test_a_pattern_that_would_match_too_much_is_written_out() -> None:
    modules = [candidate("layers.0", 100), candidate("layers.1", 100, "Other"), candidate("layers.2", 100)]
    first, _ = find_remedies(modules, missing_bytes=None, failed_module="", is_forward=True)
    assert first.code == r'recollect.apply(model, {r"re:layers\.(0|2)": "full"})'


# What the exceptions of allocators say

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.15 GiB of which {free} is free. "
    "Process 41 has 78.00 GiB memory in use. {allowed}Of the allocated memory 70.00 GiB is allocated by PyTorch, and "
    "{unused} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def test_the_numbers_of_a_device_are_read() -> None:
    found = read_shortage(torch.OutOfMemoryError(CUDA.format(free="512.00 MiB", allowed="", unused="512.00 MiB")))
    assert found is not None
    assert (found.device, found.requested_bytes, found.allocated_bytes) == ("cuda:1", 2 * 2**30, 70 * 2**30)
    assert (found.missing_bytes, found.is_fragmentation) == (2**30, False)


def test_complaint_23_fragmentation_is_told_from_need() -> None:
    """Fragmentation mistaken for need."""
    text = CUDA.format(free="10.00 MiB", allowed="", unused="6.00 GiB")
    reports: list[OomReport] = []
    with pytest.raises(torch.OutOfMemoryError), on_oom(to=reports.append):
        raise torch.OutOfMemoryError(text)
    assert (reports[0].missing_bytes, reports[0].is_fragmentation) == (0, True)
    assert "there was enough memory, but not in one piece" in str(reports[0])
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in str(reports[0])


def test_a_limit_that_was_set_for_the_process_is_the_total() -> None:
    text = CUDA.format(free="60.00 GiB", allowed="71.00 GiB allowed; ", unused="512.00 MiB")
    found = read_shortage(torch.OutOfMemoryError(text))
    assert found is not None
    assert (found.total_bytes, found.free_bytes, found.missing_bytes) == (71 * 2**30, 2**29, 2**30)


@pytest.mark.parametrize("free_bytes", [2**28, 2**36])
def test_an_unclear_error_of_a_library_is_a_shortage_where_hardly_any_memory_is_left(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_bytes, 2**37))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    found = read_shortage(RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"))
    assert (found is not None) == (free_bytes == 2**28)


@pytest.mark.parametrize(
    ("error", "device", "requested"),
    [
        (MemoryError(), "cpu", None),
        (MemoryError("Unable to allocate 7.28 TiB for an array with shape (1000,)"), "cpu", 8_004_444_650_209),
        (RuntimeError(SIMULATED), "cpu", MEBIBYTE),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes."), "cpu", 64),
        (RuntimeError("HIP out of memory. Tried to allocate 1.00 KiB. GPU 0 has a total"), "cuda:0", 1024),
        (RuntimeError("XPU out of memory. Tried to allocate 2.00 MiB. GPU 3 has a total"), "xpu:3", 2 * MEBIBYTE),
        (RuntimeError("MPS backend out of memory (MPS allocated: 7.0 GB). Tried to allocate 1.0 KB on"), "mps", 1000),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "cuda:0", None),
    ],
)
def test_every_allocator_is_understood(error: Exception, device: str, requested: int | None) -> None:
    found = read_shortage(error)
    assert found is not None
    assert (found.device, found.requested_bytes) == (device, requested)


# The text


def example(**changes: Any) -> OomReport:
    rows = [
        SavedPlace(module=f"layers.{i}.mlp", kind="Mlp", line="model.py:41-44", bytes=2**30, tensors=2)
        for i in range(9)
    ]
    blocks = [candidate(f"layers.{i}", 2**30, block=True) for i in range(12)]
    values: dict[str, Any] = {
        "message": "CUDA out of memory.",
        "phase": Phase.FORWARD,
        "module": "layers.9.mlp.up",
        "kind": "Linear",
        "line": "model.py:41",
        "stack": ("model.py:41 in Mlp.forward", "train.py:12 in step"),
        "is_exact": True,
        "device": "cuda:0",
        "requested_bytes": 2 * 2**30,
        "total_bytes": 20 * 2**30,
        "allocated_bytes": 19 * 2**30,
        "unused_bytes": 0,
        "missing_bytes": 2**30,
        "is_fragmentation": False,
        "alive": Alive(
            parameter_bytes=4 * 2**30,
            gradient_bytes=4 * 2**30,
            saved_bytes=10 * 2**30,
            other_bytes=2**20,
            others=(("int64[8, 4096]", 2**20),),
            saved=(*rows, SavedPlace(module="", kind="", line="after train.py:11", bytes=2**30, tensors=1)),
            candidates=tuple(blocks),
            model="Net",
        ),
        "remedies": find_remedies(blocks, missing_bytes=2**30, failed_module="layers.9.mlp", is_forward=True),
        "notes": ("the graphs of 2 calls of Net are still alive.",),
        "rank": None,
    }
    return OomReport(**{**values, **changes})


def test_the_text() -> None:
    assert (
        str(example())
        == """\
recollect.on_oom: out of memory on cuda:0 in forward of layers.9.mlp.up
  (Linear), model.py:41
  asked for 2.00 GiB; 19.00 GiB of 20.00 GiB were allocated; missing: 1.00 GiB
  model.py:41 in Mlp.forward
  train.py:12 in step
alive on cuda:0
    4.00 GiB  parameters and buffers
    4.00 GiB  gradients
   10.00 GiB  held for backward
    1.00 MiB  other tensors, largest int64[8, 4096] (1.00 MiB)
 1023.00 MiB  temporaries, and what Python cannot see
held for backward, by module and line that made it
     bytes  tensors  module            class  line
  9.00 GiB       18  layers.*.mlp (9)  Mlp    model.py:41-44
  1.00 GiB        1  (no module)              after train.py:11
what recomputing would have freed (missing: 1.00 GiB)
  layers.* (12 Block, 11 of them hold something): 11.00 GiB, enough for this
    allocation; one is enough for it
      recollect.apply(model)
note: the graphs of 2 calls of Net are still alive.
"""
    )


def test_the_text_of_backward_says_that_the_place_is_about_right() -> None:
    text = str(example(phase=Phase.BACKWARD, is_exact=False, rank=3))
    assert text.startswith("recollect.on_oom (rank 3): out of memory on cuda:0 in backward of about\n")


def test_no_line_is_wider_than_80_columns() -> None:
    path = "model.language_model.encoder.transformer.layers.3.self_attention.projection.output"
    row = SavedPlace(
        module=path,
        kind="ParallelAttentionProjectionModule",
        line="modeling_long_name.py:1041-1044",
        bytes=2**30,
        tensors=2,
    )
    alive = Alive(saved_bytes=2**30, saved=(row,), model="Net", others=(("float32[1, 2, 3]", 5),), other_bytes=5)
    text = str(example(alive=alive, stack=(f"model.py:1 in {path}",), remedies=()))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "…" in text
    assert "recomputing would free nothing that modules hold at this point" in text


def test_more_rows_than_asked_for_are_summed() -> None:
    text = format_report(example(), top=1)
    assert "and 1.00 GiB of 1 smaller row" in text


# For real

REAL = """
import resource, sys
import torch
from torch import nn
from recollect._inspect.oom.watch import on_oom
torch.set_num_threads(1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        x = x + self.down(self.up(x).relu())
        return x

class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embed = nn.Embedding(200_000, 64)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x

def limit(size):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + size, used + size))

net = Net(int(sys.argv[1]))
x = torch.arange(int(sys.argv[2]))
net(x[:8]).sum().backward()
net.zero_grad()
limit(int(sys.argv[3]) * 2**20)
with on_oom():
    loss = net(x).sum()
    print("forward done")
    loss.backward()
"""


def run_for_real(tmp_path: Path, *arguments: int) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "real.py"
    script.write_text(REAL)
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


needs_limit = pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of address space")


@needs_limit
def test_the_host_running_out_in_forward_is_reported(tmp_path: Path) -> None:
    done = run_for_real(tmp_path, 12, 20_000, 160)  # 20 MiB for each linear layer's result
    assert "forward done" not in done.stdout
    assert "out of memory on cpu in forward of layers." in done.stderr
    assert "real.py:13 in Block.forward" in done.stderr
    assert "layers.* (" in done.stderr
    assert "recollect.apply(model)" in done.stderr
    assert "can't allocate memory" in done.stderr.splitlines()[-1]


@needs_limit
def test_the_host_running_out_in_backward_is_reported(tmp_path: Path) -> None:
    done = run_for_real(tmp_path, 2, 100, 30)  # the gradient of the embedding is 49 MiB
    assert "forward done" in done.stdout
    assert "out of memory on cpu in backward of about embed (Embedding), real.py:22" in " ".join(done.stderr.split())
    assert "asked for 48.83 MiB" in done.stderr
    assert "can't allocate memory" in done.stderr.splitlines()[-1]


# On a device


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    def set_limit(size: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)

    yield set_limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def device_report(step: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> OomReport:
    """The report of a step that runs out on the device, which was not asked for memory to make it."""
    find = oom_alive.find_alive

    allocations: list[int] = []

    def count_allocations(*args: Any, **kwargs: Any) -> Alive:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        found = find(*args, **kwargs)
        allocations.append(torch.cuda.memory_stats()["allocation.all.allocated"] - before)
        return found

    monkeypatch.setattr(oom, "find_alive", count_allocations)
    reports: list[OomReport] = []
    with pytest.raises(torch.OutOfMemoryError), on_oom(to=reports.append):
        step()
    (report,) = reports
    assert allocations == [0]
    assert report.device == "cuda:0"
    assert report.requested_bytes is not None
    assert report.allocated_bytes is not None
    assert report.total_bytes is not None
    assert report.total_bytes < torch.cuda.get_device_properties(0).total_memory
    assert report.missing_bytes is not None
    return report


@pytest.mark.gpu
def test_a_device_running_out_in_forward_is_reported(
    limit: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_others = torch.cuda.memory_allocated()  # libraries' workspaces, and what tests before this one left
    net = OomNet(width=512, layers=12).cuda()
    data = torch.ones(4096, 8, device="cuda")  # a block holds 88 MiB
    net(data[:8]).sum().backward()
    limit(512 * MEBIBYTE)
    report = device_report(lambda: net(data), monkeypatch)
    assert report.phase is Phase.FORWARD
    assert report.module.startswith("layers.")
    assert report.alive.saved_bytes > 300 * MEBIBYTE
    assert report.rest_bytes is not None
    assert report.allocated_bytes is not None
    assert report.rest_bytes - of_others < 0.2 * report.allocated_bytes
    assert "layers.*" in {remedy.pattern for remedy in report.remedies if remedy.is_enough}
    recollect.apply(net)
    net(data).sum().backward()  # what it says makes it fit


@pytest.mark.gpu
def test_what_only_the_failing_expression_holds_is_seen_on_a_device(
    limit: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = OomNet(width=512, layers=2).cuda().bfloat16()
    data = torch.ones(4096, 8, device="cuda", dtype=torch.bfloat16)
    net(data[:8]).sum().backward()
    limit(512 * MEBIBYTE)
    report = device_report(lambda: net(data).expand(8192, -1, -1).float().sum(), monkeypatch)
    assert (report.phase, report.kind) == (Phase.FORWARD, "")
    assert ("layers.1.mlp.up", line_of("up")) in rows_of(report, "Linear")


@pytest.mark.gpu
def test_a_device_running_out_in_backward_is_reported(
    limit: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = nn.Embedding(200_000, 512, device="cuda")
    net = nn.Sequential(table, OomBlock(512).cuda(), OomBlock(512).cuda())
    x = torch.arange(64, device="cuda")
    net(x).sum().backward()
    net.zero_grad()
    limit(256 * MEBIBYTE)
    report = device_report(lambda: backward(net(x).sum()), monkeypatch)
    assert (report.phase, report.module, report.kind) == (Phase.BACKWARD, "0", "Embedding")
    assert report.is_exact
    assert report.requested_bytes == pytest.approx(table.weight.nbytes, rel=0.01)


@pytest.mark.gpu
def test_a_device_running_out_in_the_optimizer_is_reported(
    limit: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(*(nn.Linear(4096, 4096, device="cuda") for _ in range(4)))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(8, 4096, device="cuda")).sum().backward()
    limit(100 * MEBIBYTE)
    report = device_report(optimizer.step, monkeypatch)
    assert report.phase is Phase.OPTIMIZER
    size = sum(parameter.nbytes for parameter in net.parameters())
    assert report.alive.parameter_bytes >= size
    assert report.alive.gradient_bytes >= size


@pytest.mark.gpu
def test_a_device_running_out_in_a_recomputation_is_reported(
    limit: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = OomNet(width=512, layers=4).cuda()
    recollect.apply(net)
    data = torch.ones(16384, 8, device="cuda")
    net(data).sum().backward()
    loss: list[Tensor] = []

    def step() -> None:
        loss.append(net(data).sum())
        limit(96 * MEBIBYTE)  # a block's recomputation makes 350 MiB, on a thread of the engine's
        backward(loss[0])

    report = device_report(step, monkeypatch)
    assert report.phase is Phase.RECOMPUTATION
    assert report.module.startswith("layers.3.")
