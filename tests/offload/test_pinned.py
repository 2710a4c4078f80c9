"""The pool of host memory: pieces come again, never overlap, and carry the marks of copies that may still use them."""

import itertools
import threading
import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from recollect._offload.extents import Extents
from recollect._offload.host_memory import aligned_bytes
from recollect._offload.pinned import Buffer, PinnedPool


def make_pool(limit: int | None = None) -> PinnedPool:
    return PinnedPool(limit, aligned_bytes)


def take(pool: PinnedPool, size: int) -> Buffer:
    buffer = pool.take(size)
    assert buffer is not None
    return buffer


def test_a_piece_of_the_same_size_comes_again_with_its_mark() -> None:
    pool = make_pool()
    first = take(pool, 5000)
    mark: Any = object()
    first.give_back(mark)
    again = take(pool, 5000)
    assert again.bytes.data_ptr() == first.bytes.data_ptr()
    assert list(again.busy) == [mark]
    again.give_back()
    assert list(take(pool, 5000).busy) == []


def test_a_piece_cut_anew_carries_the_marks_of_all_that_it_overlaps() -> None:
    pool = make_pool(2**20)
    pieces = [take(pool, 2**18) for _ in range(4)]
    marks: list[Any] = [object() for _ in pieces]
    for piece, mark in zip(pieces, marks, strict=True):
        piece.give_back(mark)
    half = take(pool, 2**19)
    other = take(pool, 2**19)
    assert {*half.busy, *other.busy} == set(marks)
    assert len(half.busy) == len(other.busy) == 2


def test_a_step_that_comes_again_takes_nothing_from_the_system() -> None:
    pool = make_pool()
    sizes = [100_000, 3_000_000, 100_000, 70_000, 3_000_000]
    counts = []
    for _ in range(3):
        for buffer in [take(pool, size) for size in sizes]:
            buffer.give_back()
        counts.append(pool.allocations)
    assert counts == [counts[0]] * 3
    assert pool.used_bytes == 0


def test_what_is_reserved_is_there() -> None:
    pool = make_pool()
    sizes = [300_000, 500_000, 700_000] * 3
    pool.reserve(sizes)
    before = pool.allocations
    assert len([take(pool, size) for size in sizes]) == 9
    assert pool.allocations == before


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 200_000)), max_size=60))
def test_pieces_never_overlap_and_never_pass_the_limit(actions: list[tuple[bool, int]]) -> None:
    pool = make_pool(2**20)
    lent: list[Buffer] = []
    for gives, size in actions:
        if gives and lent:
            lent.pop(size % len(lent)).give_back()
        elif (buffer := pool.take(size)) is not None:
            lent.append(buffer)
        spans = sorted((one.bytes.data_ptr(), one.bytes.data_ptr() + one.bytes.numel()) for one in lent)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert pool.held_bytes <= 2**20
    for buffer in lent:
        buffer.give_back()
    assert pool.used_bytes == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3000)), max_size=60))
def test_extents_never_overlap(actions: list[tuple[bool, int]]) -> None:
    extents = Extents(size=2**14, alignment=256)
    taken: list[tuple[int, int]] = []
    for gives, size in actions:
        if gives and taken:
            extents.give_back(*taken.pop(size % len(taken)))
        elif (offset := extents.take(size)) is not None:
            taken.append((offset, size))
        ordered = sorted(taken)
        ends = [offset + size for offset, size in ordered]
        assert all(end <= start for end, (start, _) in zip(ends, ordered[1:], strict=False))
        assert all(end <= 2**14 for end in ends)
    for piece in taken:
        extents.give_back(*piece)
    assert extents.used_bytes == 0
    assert extents.take(2**14) == 0


def test_threads_that_lend_and_give_back_never_have_one_piece_at_a_time() -> None:
    pool = PinnedPool(2**20, aligned_bytes)
    taken: set[tuple[int, int]] = set()
    twice: list[tuple[int, int]] = []

    def work(size: int) -> None:
        for _ in range(200):
            buffer = pool.take(size)
            if buffer is None:
                continue
            place = (buffer.slab, buffer.offset)
            if place in taken:
                twice.append(place)
            taken.add(place)
            time.sleep(0)  # let the others run
            taken.discard(place)
            buffer.give_back()

    threads = [threading.Thread(target=work, args=(size,)) for size in (4096, 4096, 8192, 400_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert twice == []
    assert pool.used_bytes == 0
    pool.trim()
    assert pool.held_bytes == 0
