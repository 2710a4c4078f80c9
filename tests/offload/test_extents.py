"""Pieces of one stretch: the smallest that fits is cut, so that large ones stay whole."""

from recollect._offload.extents import Extents

KIB = 1024


def test_a_piece_is_cut_off_the_smallest_free_one_that_holds_it() -> None:
    extents = Extents(size=8 * KIB, alignment=KIB)
    assert [extents.take(size * KIB) for size in (4, 1, 2, 1)] == [0, 4 * KIB, 5 * KIB, 7 * KIB]
    extents.give_back(0, 4 * KIB)
    extents.give_back(5 * KIB, 2 * KIB)
    assert extents.take(KIB) == 5 * KIB
    assert extents.take(4 * KIB) == 0


def test_neighbours_that_are_given_back_are_one_piece_again() -> None:
    extents = Extents(size=4 * KIB, alignment=KIB)
    taken = [extents.take(KIB) for _ in range(4)]
    for offset in (taken[1], taken[2]):
        assert offset is not None
        extents.give_back(offset, KIB)
    assert extents.take(3 * KIB) is None
    assert extents.take(2 * KIB) == KIB
    extents.grow(6 * KIB)
    assert (extents.take(2 * KIB), extents.used_bytes) == (4 * KIB, 6 * KIB)
