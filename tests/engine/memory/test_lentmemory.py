from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from tests.engine.conftest import Eventually, MakePool

from kvstow.errors import CopyError
from kvstow.memory.hostpool import HostPool
from kvstow.memory.lentmemory import LentMemory
from kvstow.testing.fakes import FakeRegistrar
from kvstow.tier.memorystore import MemoryStore, MemoryTransfers
from kvstow.tier.store import MemoryRange

SLOT = 4096


class Client(MemoryTransfers):
    """Notes which slots of the pool it knows. `resident`: how much of the pool had memory at each removal."""

    def __init__(self, pool: HostPool) -> None:
        super().__init__(MemoryStore())
        self._pool = pool
        self.known: list[tuple[int, int]] = []
        self.resident: list[int] = []
        self.fds: set[int | None] = set()

    def add_memory(self, memory: MemoryRange) -> None:
        assert memory.address - self._pool.address == memory.offset
        self.known = [*self.known, self._slots(memory)]
        self.fds.add(memory.fd)

    def remove_memory(self, memory: MemoryRange) -> None:
        self.resident.append(self._pool.status().resident_bytes)
        self.known = [one for one in self.known if one != self._slots(memory)]

    def _slots(self, memory: MemoryRange) -> tuple[int, int]:
        first = (memory.address - self._pool.address) // SLOT
        return first, first + memory.num_bytes // SLOT


@pytest.fixture
def lend() -> Iterator[Callable[[HostPool], tuple[Client, LentMemory]]]:
    made: list[LentMemory] = []

    def make(pool: HostPool) -> tuple[Client, LentMemory]:
        client = Client(pool)
        memory = LentMemory(pool, client)
        made.append(memory)
        pool.add_listener(memory.look)
        return client, memory

    yield make
    for memory in made:
        memory.close()


def test_a_pool_is_lent_as_it_grows_in_few_ranges(
    make_pool: MakePool, eventually: Eventually, lend: Callable[[HostPool], tuple[Client, LentMemory]]
) -> None:
    pool = make_pool(pool_bytes=4096 * SLOT, chunk_bytes=4 * SLOT, shared=True)
    client, memory = lend(pool)
    pool.start()
    eventually(lambda: memory.lent_slots == 4096)
    ends = [end for _, end in client.known]
    assert [first for first, _ in client.known] == [0, *ends[:-1]], "ranges follow one another"
    assert len(client.known) <= 70, "of 1,024 chunks"
    assert client.fds == {pool.memory_range.fd}


def test_memory_is_taken_back_before_the_pool_gives_it_back(
    make_pool: MakePool, eventually: Eventually, lend: Callable[[HostPool], tuple[Client, LentMemory]]
) -> None:
    """A network card would go on with pages that are no longer the pool's."""
    pool = make_pool(pool_bytes=16 * SLOT, shared=True)
    pool.start()
    eventually(lambda: pool.pinned_slots == 16)
    client, memory = lend(pool)
    eventually(lambda: memory.lent_slots == 16)
    pool.set_target(6)
    memory.look()
    eventually(lambda: pool.status().resident_bytes == 8 * SLOT)
    eventually(lambda: memory.lent_slots == 6)
    assert client.resident == [16 * SLOT]
    assert client.known == [(0, 6)]
    pool.set_target(0)
    memory.look()
    eventually(lambda: pool.status().resident_bytes == 0)
    assert client.known == []
    pool.set_target(10)
    eventually(lambda: memory.lent_slots == 10)


def test_memory_in_use_is_not_taken_back(
    make_pool: MakePool, eventually: Eventually, lend: Callable[[HostPool], tuple[Client, LentMemory]]
) -> None:
    pool = make_pool(pool_bytes=16 * SLOT)
    pool.start()
    eventually(lambda: pool.pinned_slots == 16)
    client, memory = lend(pool)
    with memory.hold(16):
        pool.set_target(4)
        memory.look()
        eventually(lambda: memory.lent_slots < 16)
        assert (client.known[-1][1], pool.status().resident_bytes) == (16, 16 * SLOT)
    eventually(lambda: pool.status().resident_bytes == 4 * SLOT)
    eventually(lambda: memory.lent_slots == 4)
    with pytest.raises(CopyError, match="slot 4 is not pinned"):
        memory.hold(5)


def test_a_transfer_waits_for_slots_that_are_about_to_be_lent(
    make_pool: MakePool, eventually: Eventually, lend: Callable[[HostPool], tuple[Client, LentMemory]]
) -> None:
    """While the pool grows, an eighth is lent at a time; who needs the rest now has it lent at once."""
    chunks = threading.Semaphore(9)

    class Registrar(FakeRegistrar):
        def register(self, address: int, num_bytes: int) -> None:
            assert chunks.acquire(timeout=30)
            super().register(address, num_bytes)

    pool = make_pool(Registrar(), pool_bytes=1024 * SLOT, chunk_bytes=4 * SLOT)
    pool.start()
    eventually(lambda: pool.pinned_slots == 36)
    _, memory = lend(pool)
    eventually(lambda: memory.lent_slots == 36)
    chunks.release()
    eventually(lambda: pool.pinned_slots == 40)
    with memory.hold(40):
        assert memory.lent_slots == 40
    chunks.release(1000)


def test_a_client_that_fails_ends_no_thread_unseen(
    make_pool: MakePool, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool(pool_bytes=16 * SLOT)
    pool.start()
    eventually(lambda: pool.pinned_slots == 16)
    client = Client(pool)
    client.add_memory = lambda memory: 1 / 0  # type: ignore[assignment,method-assign]
    memory = LentMemory(pool, client)
    with pytest.raises(CopyError, match="ZeroDivisionError"):
        memory.hold(1)
    assert "cannot be lent" in caplog.text
    memory.close()


def test_who_waits_for_memory_is_let_go_at_the_end(make_pool: MakePool, eventually: Eventually) -> None:
    pool = make_pool(pool_bytes=16 * SLOT)
    pool.start()
    eventually(lambda: pool.pinned_slots == 16)
    arrived, gate = threading.Event(), threading.Event()

    class Slow(Client):
        def add_memory(self, memory: MemoryRange) -> None:
            arrived.set()
            gate.wait(30)

    memory = LentMemory(pool, Slow(pool))
    assert arrived.wait(30)
    errors: list[str] = []

    def hold() -> None:
        try:
            memory.hold(1)
        except CopyError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=hold)
    waiting.start()
    memory.stop()
    waiting.join(30)
    assert errors == ["the rank's memory is no longer lent to the tier's store"]
    gate.set()
    memory.close()
