"""Objects between slots and a store that a test plays: what it returns is verified before it counts."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest
from tests.service.stores.mooncake.test_childmemory import FakeStore

from kvstow.memfd import create_memfd
from kvstow_service.stores.mooncake.objectbuffers import STAGED_BYTES, ChildMemory, ObjectBuffers
from kvstow_service.stores.mooncake.objects import ObjectName, SlotObject

LARGE = STAGED_BYTES + 4096


class Objects:
    """Two slots of each size, and the bytes of objects as a store would have them."""

    def __init__(self, fd: int) -> None:
        store = FakeStore()
        self.memory = ChildMemory(store)
        self.memory.add(0, fd, 4 * LARGE)
        self.buffers = ObjectBuffers(store, self.memory, 4)

    def part(self, slot: int, num_bytes: int, key: int = 0) -> SlotObject:
        return SlotObject(ObjectName("f", bytes(33) + bytes([key]), 0, 1), 0, slot * LARGE, num_bytes)

    def put(self, part: SlotObject) -> bytes:
        addresses, sizes = self.buffers.fill([part])
        return b"".join(map(ctypes.string_at, addresses[0], sizes[0]))

    def get(self, part: SlotObject, contents: bytes) -> str | None:
        """What is wrong with the object, if it has these contents."""
        addresses, sizes = self.buffers.place([part])
        for address, size in zip(addresses[0], sizes[0], strict=True):
            ctypes.memmove(address, contents[:size], size)
            contents = contents[size:]
        return self.buffers.take(0, part)


@pytest.fixture
def objects() -> Iterator[Objects]:
    fd = create_memfd("kvstow-test", 4 * LARGE)
    os.pwrite(fd, os.urandom(2 * LARGE), 0)
    yield Objects(fd)
    os.close(fd)


each_way = pytest.mark.parametrize("num_bytes", [4096, LARGE], ids=["copied", "in place"])


@each_way
def test_an_object_with_other_bytes_is_refused(objects: Objects, num_bytes: int) -> None:
    """It is loaded only if it is what was put under its name."""
    put = objects.put(objects.part(0, num_bytes))
    target = objects.part(2, num_bytes)
    assert objects.get(target, put) is None
    assert bytes(objects.memory.view(target)) == bytes(objects.memory.view(objects.part(0, num_bytes)))
    for at in (0, num_bytes // 2, num_bytes - 1, num_bytes, len(put) - 1):
        damaged = bytearray(put)
        damaged[at] ^= 1
        assert objects.get(target, bytes(damaged)) in ("checksum", "magic", "header")
    assert objects.get(objects.part(2, num_bytes, 1), put) == "name"


@each_way
def test_more_objects_than_there_is_room_for_are_refused(objects: Objects, num_bytes: int) -> None:
    """Mooncake would write them behind the room."""
    part = objects.part(0, num_bytes)
    objects.buffers.place([part] * 4)
    with pytest.raises(LookupError):
        objects.buffers.place([part] * 5)
