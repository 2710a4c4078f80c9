"""`Tracks` knows the call and the line that made a node, costs nothing where no nodes are made, and leaves no trace."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recollect._core.torch_private.calls import Watch
from recollect._core.torch_private.engine import sequence_of
from recollect._profile import tracks as tracks_module
from recollect._profile.tracks import Spans, Spot, Tracks


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:  # line: inner starts
        return x.sin()  # line: inner ends


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), nn.Sequential(nn.Tanh(), nn.Sigmoid())
        self.seen: dict[str, int] = {}

    def note(self, name: str, x: Tensor) -> Tensor:
        self.seen[name] = number_of(x)
        return x

    def forward(self, x: Tensor) -> Tensor:  # line: outer starts
        x = self.note("before", x.exp())
        x = self.note("first", self.first(x))  # line: first
        x = self.note("between", x.cos())
        x = self.note("second", self.second(x))  # line: second
        return self.note("after", x * 2)  # line: outer ends


def number_of(x: Tensor) -> int:
    return sequence_of(x.grad_fn)


def line_of(what: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(i for i, line in enumerate(lines) if line.endswith(f"# line: {what}"))


def leaf() -> Tensor:
    return torch.ones(4, requires_grad=True)


@pytest.fixture
def tracks() -> Iterator[Tracks]:
    call = nn.Module._call_impl
    found = Tracks()
    found.start()
    yield found
    found.stop()
    assert nn.Module._call_impl is call


def spans_of(tracks: Tracks) -> Spans:
    (spans,) = tracks.read()
    return spans


def found(spans: Spans, number: int) -> tuple[type | None, str]:
    spot = spans.find(number)
    assert spot is not None
    return (None if spot.call is None else type(spot.call.module)), spot.line


# Where nodes are made


def test_a_node_belongs_to_the_innermost_call_and_to_the_lines_around_it(tracks: Tracks) -> None:
    net = Outer()
    before = number_of(leaf().exp())
    y = net(leaf())  # line: net is called
    after = number_of(y.exp())
    spans = spans_of(tracks)
    first, second, name = line_of("first"), line_of("second"), Path(__file__).name
    assert spans.find(before) is None
    assert {what: found(spans, number) for what, number in net.seen.items()} == {
        "before": (Outer, f"{name}:{line_of('outer starts')}-{first}"),
        "first": (Inner, f"{name}:{line_of('inner starts')}-{line_of('inner ends')}"),
        "between": (Outer, f"{name}:{first}-{second}"),
        # torch's own code is at the line that calls it: here of a module in a Sequential.
        "second": (nn.Sigmoid, f"{name}:{second}"),
        "after": (Outer, f"{name}:{second}-{line_of('outer ends')}"),
    }
    assert found(spans, after) == (None, f"after {name}:{line_of('net is called')}")


def test_a_call_knows_the_calls_around_it(tracks: Tracks) -> None:
    net = Outer()
    net(leaf())
    spot = spans_of(tracks).find(net.seen["second"])
    assert spot is not None
    assert spot.call is not None
    assert [call.module for call in spot.call.around()] == [net.second[1], net.second, net]


def test_calls_without_grad_are_not_noted(tracks: Tracks) -> None:
    with torch.no_grad():
        nn.Sequential(Inner(), nn.Tanh())(leaf())
    assert tracks.read() == []


def test_a_call_that_raises_is_over(tracks: Tracks) -> None:
    net = Outer()
    handle = net.second.register_forward_pre_hook(lambda _m, _a: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        net(leaf())
    handle.remove()
    after = number_of(leaf().exp())
    assert found(spans_of(tracks), after)[0] is None
    assert found(spans_of(tracks), net.seen["between"])[0] is Outer


def test_a_failure_is_told_from_the_innermost_module_on() -> None:
    told: list[tuple[str, str]] = []
    noting = Tracks(lambda module, error: told.append((type(module).__name__, repr(error))))
    net = nn.Sequential(Outer())
    net[0].get_submodule("first").register_forward_pre_hook(lambda _m, _a: 1 / 0)
    noting.start()
    try:
        with pytest.raises(ZeroDivisionError):
            net(leaf())
    finally:
        noting.stop()
    error = "ZeroDivisionError('division by zero')"
    assert told == [("Inner", error), ("Outer", error), ("Sequential", error)]


def test_what_falls_out_of_the_log_is_unknown_and_the_rest_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracks_module, "_MOST_EVENTS", 7)
    noting, nets = Tracks(), [Outer(), Outer()]
    noting.start()
    try:
        for net in nets:
            net(leaf())
    finally:
        noting.stop()
    spans = spans_of(noting)
    assert spans.find(nets[0].seen["first"]) is None
    # The beginning of the second call has fallen out; of its inner calls the later ones are there.
    assert found(spans, nets[1].seen["second"])[0] is nn.Sigmoid
    assert found(spans, nets[1].seen["after"])[0] is None


def test_each_thread_has_its_own_numbers(tracks: Tracks) -> None:
    here, there = Outer(), Outer()
    here(leaf())
    thread = threading.Thread(target=lambda: there(leaf()))
    thread.start()
    thread.join()
    ours, theirs = tracks.read()
    assert [call.module for call in ours.calls if call.parent is None] == [here]
    assert [call.module for call in theirs.calls if call.parent is None] == [there]
    assert found(theirs, there.seen["first"])[0] is Inner


def test_nothing_is_kept_alive(tracks: Tracks) -> None:
    net = Outer()
    y = net(leaf())
    gone = [weakref.ref(net), weakref.ref(y)]
    gc.disable()
    try:
        del net, y
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()
    spot = spans_of(tracks).find(0)
    assert spot is None or isinstance(spot, Spot)


# Being told of calls


class Listening:
    def __init__(self) -> None:
        self.entered: list[str] = []
        self.left = 0

    def enter(self, module: nn.Module, *_: Any) -> bool | None:
        self.entered.append(type(module).__name__)
        return True

    def leave(self, _: Any) -> None:
        self.left += 1

    def fail(self, module: nn.Module, error: BaseException) -> None: ...


def test_watches_stop_in_any_order_and_leave_nothing() -> None:
    original = nn.Module._call_impl
    listeners = [Listening() for _ in range(3)]
    watches = [Watch(listener) for listener in listeners]
    for watch in watches:
        watch.start()
    for index in (1, 0, 2):
        Inner()(leaf())
        watches[index].stop()
    assert nn.Module._call_impl is original
    assert [len(listener.entered) for listener in listeners] == [2, 1, 3]
    assert [listener.left for listener in listeners] == [2, 1, 3]


def test_what_others_put_over_ours_stays_and_ours_then_only_passes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listening()
    watch = Watch(listener)
    watch.start()
    ours = nn.Module._call_impl
    monkeypatch.setattr(nn.Module, "_call_impl", lambda self, *args: ours(self, *args))  # type: ignore[no-untyped-call]
    watch.stop()
    theirs = nn.Module._call_impl
    assert theirs is not ours
    assert torch.equal(Inner()(torch.ones(2)), torch.ones(2).sin())
    assert listener.entered == []
    monkeypatch.undo()  # puts ours back, which passes on
    assert torch.equal(Inner()(torch.ones(2)), torch.ones(2).sin())
    nn.Module._call_impl = vars(ours)["beneath"]  # type: ignore[method-assign]


@pytest.mark.parametrize("way", ["module", "function", "in place"])
def test_compiled_code_is_compiled_no_differently(way: str) -> None:
    """Global hooks, in contrast, have it compiled anew at each registration."""
    count = 0

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        nonlocal count
        count += 1
        return graph.forward

    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    run: Callable[[Tensor], Any]
    if way == "module":
        run = torch.compile(net, backend=backend)
    elif way == "function":
        run = torch.compile(lambda x: net(x), backend=backend)
    else:
        net.compile(backend=backend)
        run = net
    torch._dynamo.reset()
    run(torch.ones(2, 4))
    before = count
    for _ in range(3):
        noting = Tracks()
        noting.start()
        try:
            run(torch.ones(2, 4))
        finally:
            noting.stop()
        run(torch.ones(2, 4))
    assert count == before
    torch._dynamo.reset()
    for _ in range(3):
        noting = Tracks()
        noting.start()
        try:
            run(torch.ones(2, 4))
        finally:
            noting.stop()
    assert count == 2 * before
