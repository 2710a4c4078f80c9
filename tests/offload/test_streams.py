"""The lanes of a device, on streams and events that only note what they are told."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from recollect._core.torch_private.streams import stream_reader
from recollect._offload import streams
from recollect._offload.streams import Batch, DeviceLanes

DEVICE = torch.device("cpu")


class NotedStream:
    """A stream that notes what it waits for; `inside` holds those that are current."""

    inside: list["NotedStream"] = []  # noqa: RUF012 (emptied by each test)

    def __init__(self, device: torch.device) -> None:
        self.waited: list[tuple[str, int]] = []
        self.marks = 0

    def __enter__(self) -> None:
        self.inside.append(self)

    def __exit__(self, *_: object) -> None:
        self.inside.pop()

    def wait_event(self, event: "NotedEvent") -> None:
        assert event.at is not None
        self.waited.append(event.at)


class NotedEvent:
    """An event that knows which point of which stream it was recorded at last."""

    made = 0

    def __init__(self, device: torch.device, *, enable_timing: bool = False) -> None:
        type(self).made += 1
        self.is_timed, self.at = enable_timing, None

    at: Any

    def record(self, stream: NotedStream) -> None:
        stream.marks += 1
        self.at = (stream, stream.marks)


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceLanes]:
    computing = NotedStream(DEVICE)
    monkeypatch.setattr(torch, "Stream", NotedStream)
    monkeypatch.setattr(torch, "Event", NotedEvent)
    monkeypatch.setattr(streams, "stream_reader", lambda device: lambda: computing)
    NotedEvent.made = 0
    NotedStream.inside.clear()
    yield DeviceLanes(DEVICE)
    assert NotedStream.inside == []


def make_batch(
    lanes: DeviceLanes, *after: Any, sizes: Sequence[int] = (4,), times: Any = None, through: Any = None
) -> Batch:
    batch = Batch(lanes, lanes.current(), times, through)
    batch.targets = [torch.zeros(size) for size in sizes]
    batch.sources = [torch.arange(float(size)) for size in sizes]
    batch.after = list(after)
    return batch


@pytest.mark.parametrize("way", ["copy_out", "copy_back"])
def test_copies_that_begin_together_meet_the_computing_stream_once(lanes: DeviceLanes, way: str) -> None:
    batches = [make_batch(lanes, sizes=[4, 3]), make_batch(lanes)]
    getattr(lanes, way)(batches)
    lane = batches[0].end.event.at[0]
    assert lane.waited == [(lanes.current(), 1)]
    assert [batch.end.event.at for batch in batches] == [(lane, 1), (lane, 2)]
    assert [batch.begun for batch in batches] == [2, 1]
    copies = [copy for batch in batches for copy in zip(batch.targets, batch.sources, strict=True)]
    assert all(torch.equal(target, source) for target, source in copies)


def test_copies_that_were_begun_before_one_fails_have_an_end(lanes: DeviceLanes) -> None:
    batches = [make_batch(lanes), make_batch(lanes, sizes=[4, 4, 4]), make_batch(lanes)]
    batches[1].targets[1] = torch.zeros(3)
    with pytest.raises(RuntimeError):
        lanes.copy_back(batches)
    assert [batch.begun for batch in batches] == [1, 1, 0]
    assert [batch.end is not None for batch in batches] == [True, True, False]


def test_a_batch_waits_for_the_marks_that_it_must_come_after(lanes: DeviceLanes) -> None:
    first = make_batch(lanes)
    lanes.copy_out([first])
    second = make_batch(lanes, first.end)
    lanes.copy_back([second])
    assert second.end.event.at[0].waited == [(lanes.current(), 2), first.end.event.at]
    lanes.hold(lanes.current(), second.end)
    assert lanes.current().waited == [second.end.event.at]  # type: ignore[attr-defined]


def test_a_stream_that_has_waited_for_a_mark_does_not_wait_for_those_before_it(lanes: DeviceLanes) -> None:
    batches = [make_batch(lanes) for _ in range(4)]
    lanes.copy_back(batches[:2])
    lanes.copy_back(batches[2:])
    stream: Any = lanes.current()
    for at in (2, 3, 0, 1):
        lanes.hold(stream, batches[at].end)
    assert stream.waited == [batches[2].end.event.at, batches[3].end.event.at]


def test_of_two_streams_each_waits(lanes: DeviceLanes) -> None:
    batch = make_batch(lanes)
    lanes.copy_back([batch])
    waiting = [NotedStream(DEVICE), NotedStream(DEVICE)]
    for stream in waiting:
        lanes.hold(stream, batch.end)
    assert [stream.waited for stream in waiting] == [[batch.end.event.at]] * 2


def test_buffers_that_came_back_together_are_waited_for_once(lanes: DeviceLanes) -> None:
    before = make_batch(lanes, sizes=[4, 4, 4])
    lanes.copy_back([before])
    after = make_batch(lanes, *[before.end] * 3, sizes=[4, 4, 4])
    lanes.copy_out([after])
    assert after.end.event.at[0].waited == [(lanes.current(), 2), before.end.event.at]


def test_a_mark_of_an_event_that_is_used_again_is_waited_for_again(
    lanes: DeviceLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_MOST_EVENTS", 1)
    stream: Any = lanes.current()
    for number in range(1, 4):
        batch = make_batch(lanes)
        lanes.copy_back([batch])
        lanes.hold(stream, batch.end)
        assert len(stream.waited) == number


def test_events_are_used_again_and_only_ever_stand_for_later_points(
    lanes: DeviceLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_MOST_EVENTS", 3)
    made = NotedEvent.made
    marks = []
    for number in range(1, 9):
        batch = make_batch(lanes)
        lanes.copy_out([batch])
        marks.append((number, batch.end))
    assert NotedEvent.made - made == 3
    assert all(mark.event.at[1] >= number for number, mark in marks)


def test_the_times_of_copies_are_taken_with_events_of_their_own(lanes: DeviceLanes) -> None:
    times: list[Any] = []
    lanes.copy_back([make_batch(lanes, times=times) for _ in range(2)])
    assert [size for size, _, _ in times] == [16, 16]
    events = [event for _, start, end in times for event in (start, end)]
    assert len(set(map(id, events))) == 4
    assert all(event.is_timed for event in events)


def test_what_passes_through_a_codec_does_so_on_the_lane(lanes: DeviceLanes) -> None:
    seen: list[int] = []

    def double(data: torch.Tensor) -> torch.Tensor:
        seen.append(len(NotedStream.inside))
        return data * 2

    for way in (lanes.copy_out, lanes.copy_back):
        batch = make_batch(lanes, through=double)
        way([batch])
        assert torch.equal(batch.targets[0], 2 * batch.sources[0])
    assert seen == [1, 1]


def test_a_stream_is_the_same_object_whenever_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = 7
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: handle, raising=False)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: object())
    read = stream_reader(torch.device("cuda", 0))
    first = read()
    assert read() is first
    handle = 8
    second = read()
    assert second is not first
    assert read() is second
    handle = 7
    assert read() is first
