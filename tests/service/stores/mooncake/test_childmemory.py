from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvstow.memfd import create_memfd
from kvstow_service.stores.mooncake.objectbuffers import ChildMemory, RegistrationError
from kvstow_service.stores.mooncake.objects import ObjectName, SlotObject

BYTES = 3 * 4096


class FakeStore:
    """Notes what is registered."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.code = 0

    def register_buffer(self, address: int, num_bytes: int) -> int:
        if self.code == 0:
            self.registered[address] = num_bytes
        return self.code

    def unregister_buffer(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def memory(store: FakeStore) -> ChildMemory:
    return ChildMemory(store)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_memfd("kvstow-test", BYTES)
    yield fd
    os.close(fd)


def part(offset: int, num_bytes: int, range_id: int = 0) -> SlotObject:
    return SlotObject(ObjectName("f", bytes(34), 0, 1), range_id, offset, num_bytes)


def test_a_range_shows_the_bytes_of_its_memfd(memory: ChildMemory, store: FakeStore, fd: int) -> None:
    os.pwrite(fd, b"abcd", 4)
    memory.add(0, fd, 8000)
    assert bytes(memory.view(part(4, 4))) == b"abcd"
    assert store.registered == {memory.address(part(0, 1)): 8000}
    assert memory.address(part(4, 4)) == memory.address(part(0, 1)) + 4
    memory.view(part(4, 4))[:] = b"wxyz"
    assert os.pread(fd, 4, 4) == b"wxyz"
    memory.remove(0)
    assert store.registered == {}


@pytest.mark.parametrize(
    "wrong", [part(0, 8193), part(8192, 1), part(-1, 2), part(0, 0), part(4096, 4097), part(0, 1, range_id=7)]
)
def test_an_address_outside_of_what_is_registered_is_refused(memory: ChildMemory, fd: int, wrong: SlotObject) -> None:
    memory.add(0, fd, 8192)
    memory.add(1, fd, 4096)
    assert memory.address(part(0, 8192))
    with pytest.raises(LookupError):
        memory.address(wrong)


def test_memory_that_was_removed_has_no_address(memory: ChildMemory, fd: int) -> None:
    memory.add(0, fd, BYTES)
    memory.remove(0)
    with pytest.raises(LookupError, match="not registered"):
        memory.address(part(0, 1))


def test_memory_that_is_not_registered_is_not_mapped(memory: ChildMemory, store: FakeStore, fd: int) -> None:
    store.code = -1
    with pytest.raises(RegistrationError, match="code -1"):
        memory.add(0, fd, BYTES)
    with pytest.raises(LookupError):
        memory.address(part(0, 1))
