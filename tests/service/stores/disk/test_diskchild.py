"""The memory that the process of a path has."""

from __future__ import annotations

import os

import pytest

from kvstow.memfd import create_memfd
from kvstow_service.stores.disk.diskchild import MappedExtents
from kvstow_service.stores.disk.diskmessages import BlockAt, PartAt
from kvstow_service.stores.disk.places import BlockName, Place

PAGE = 4096


@pytest.mark.parametrize(
    "wrong", [PartAt(1, PAGE, PAGE + 1), PartAt(1, 2 * PAGE, 1), PartAt(1, -PAGE, 1), PartAt(2, 0, 1)]
)
def test_a_part_that_does_not_lie_in_its_extent_is_not_lent(wrong: PartAt) -> None:
    fd = create_memfd("kvstow-extent", 2 * PAGE)
    extents = MappedExtents(PAGE)
    extents.add(1, fd, 2 * PAGE)
    os.close(fd)
    place, name = Place(0, 0, 0, 1), BlockName(bytes(16), 1, 1)
    right = extents.borrow(BlockAt(place, name, (PartAt(1, PAGE, 1),)))
    assert [(len(part.buffer), part.num_bytes) for part in right] == [(PAGE, 1)]
    extents.give_back(right)
    with pytest.raises(LookupError):
        extents.borrow(BlockAt(place, name, (wrong,)))
