from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvstow.errors import ConflictError
from kvstow.memfd import create_memfd
from kvstow.memory.chunks import ChunkGrid
from kvstow.memory.extentmapping import ExtentMapping
from kvstow.memory.extents import EXTENT_NAME
from kvstow.memory.mappedextent import ExtentPlace, MappedExtent
from kvstow.memory.rankextents import RankExtents

MIB = 1 << 20
STRIDE = 64 << 10
MakeExtent = Callable[[int, int], MappedExtent]


@pytest.fixture
def make_extent() -> Iterator[MakeExtent]:
    """Extents of 32 slots from a first one on."""
    made: list[ExtentMapping] = []

    def make(extent_id: int, first_slot: int) -> MappedExtent:
        mapping = ExtentMapping(create_memfd(EXTENT_NAME, 2 * MIB), 2 * MIB)
        made.append(mapping)
        place = ExtentPlace(0, extent_id, 2 * MIB, first_slot, 32)
        return MappedExtent(extent_id, place, ChunkGrid.of_stride(STRIDE, 32, MIB), mapping)

    yield make
    for mapping in made:
        mapping.close()


def test_an_extent_arrives_until_those_with_its_slots_are_retired(make_extent: MakeExtent) -> None:
    extents = RankExtents(STRIDE, 1 << 32)
    first, second, third = make_extent(1, 0), make_extent(2, 32), make_extent(3, 16)
    extents.add(first)
    extents.add(second)
    assert extents.usable_end == 64
    extents.revoke([1, 2])
    extents.add(third)
    assert (extents.usable_end, extents.usable_at(16)) == (0, None)
    extents.retire(first)
    assert extents.usable_at(16) is None
    extents.retire(second)
    assert extents.usable_at(16) is third
    assert extents.take_released() == [1, 2]


def test_an_extent_that_still_arrives_when_a_session_begins_goes(make_extent: MakeExtent) -> None:
    extents = RankExtents(STRIDE, 1 << 32)
    first, second, retired = make_extent(1, 0), make_extent(2, 0), make_extent(3, 32)
    extents.add(first)
    extents.add(retired)
    extents.revoke([1, 3])
    extents.retire(retired)
    extents.add(second)
    extents.begin_session()
    assert extents.to_retire(32) is second, "nothing of it is registered, and nothing of it ever will be"
    extents.retire(second)
    assert extents.to_retire(32) is None
    assert extents.to_retire(0) is first
    extents.retire(first)
    assert extents.take_released() == [], "the service of this session waits for none of them"


def test_what_a_session_does_not_grant_again_goes(make_extent: MakeExtent) -> None:
    extents = RankExtents(STRIDE, 1 << 32)
    first, second = make_extent(1, 0), make_extent(2, 32)
    extents.add(first)
    extents.add(second)
    extents.begin_session()
    assert extents.to_retire(0) is None, "the service has not said all yet"
    assert extents.take_held(first.place, 70, 0)
    extents.drop_earlier()
    assert extents.to_retire(32) is second
    extents.retire(second)
    assert (extents.to_retire(0), extents.usable_end) == (None, 32)
    assert extents.take_released() == [], "the service of this session waits for none of them"


def test_slots_of_a_granted_extent_are_given_to_no_other(make_extent: MakeExtent) -> None:
    extents = RankExtents(STRIDE, 1 << 32)
    extents.add(make_extent(1, 0))
    with pytest.raises(ConflictError, match="extents 1 and 2 both have slots from 16 on"):
        extents.add(make_extent(2, 16))
    assert extents.usable_end == 32


def test_bytes_that_have_memory_are_never_fewer_than_before(make_extent: MakeExtent) -> None:
    extents = RankExtents(STRIDE, 1 << 32)
    extents.add(make_extent(1, 0))
    extents.set_populated([(1, 2 * MIB)])
    extents.set_populated([(1, 0)])
    extent = extents.usable_at(0)
    assert extent is not None
    assert extent.next_chunk(0, MIB) is not None
