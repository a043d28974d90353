"""Blocks of several ranks over Mooncake's objects of one rank each; the clients are in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.doubles.fakes import FakeClock
from tests.engine.tier.blockstorecontract import NUM_SLOTS, BlockStoreContract, Client, keys_of
from tests.service.stores.mooncake.memoryclients import MemoryClients
from tests.waiting import eventually

from kvstow.errors import TierUnavailableError
from kvstow.tier.blockstore import BlockStore, PurgeWish
from kvstow_service.stores.mooncake.breaker import PROBE_SECONDS
from kvstow_service.stores.mooncake.mooncakeblocks import KEPT, MooncakeBlocks
from kvstow_service.stores.mooncake.objects import MAX_BATCH_OBJECTS, ObjectName


@pytest.fixture
def clients() -> MemoryClients:
    return MemoryClients()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def blocks(clients: MemoryClients, clock: FakeClock) -> Iterator[MooncakeBlocks]:
    reading, writing = os.pipe()
    store = MooncakeBlocks(clients, "mooncake://m:1", clock)
    store.start(writing)
    yield store
    clients.gate.set()
    store.close()
    os.close(reading)
    os.close(writing)


@pytest.fixture
def client(blocks: MooncakeBlocks) -> Iterator[Client]:
    client = Client(blocks)
    yield client
    client.close()


class TestMooncakeBlocks(BlockStoreContract):
    @pytest.fixture
    def store(self, blocks: MooncakeBlocks) -> BlockStore:
        return blocks

    test_a_purged_block_is_gone_and_may_be_written_again = None  # type: ignore[assignment]
    test_a_purge_of_a_namespace_or_a_pool_leaves_the_others = None  # type: ignore[assignment]


def test_a_purge_says_that_the_fleet_keeps_its_copies(client: Client) -> None:
    client.move("write", keys_of(range(2)), (100, 101))
    assert client.purge(PurgeWish()) == (0, KEPT)
    assert client.has(keys_of(range(2))) == [True, True]


def test_rank_0_puts_its_object_when_the_others_have_put_theirs(client: Client, clients: MemoryClients) -> None:
    keys = keys_of(range(3))
    clients.status = lambda name: "failed" if (name.key, name.rank) == (keys[1], 1) else None
    good, bad = client.move("write", keys, (100, 101, 102))
    assert (good, bad) == ({100, 102}, {101})
    assert [name.rank for name in clients.order] == [1, 1, 0, 0]
    assert client.has(keys) == [True, False, True]


def test_a_block_is_there_only_if_every_rank_has_its_object(client: Client, clients: MemoryClients) -> None:
    keys = keys_of(range(3))
    client.move("write", keys, (100, 101, 102))
    del clients.objects[str(ObjectName(client.fingerprint, keys[1], 1, 2))]
    assert client.move("read", keys, (110, 111, 112)) == ({110, 112}, {111})


@pytest.mark.parametrize("fate", ["corrupt", "failed"])
def test_what_one_rank_could_not_get_is_bad(client: Client, clients: MemoryClients, fate: str) -> None:
    keys = keys_of(range(4))
    client.move("write", keys, range(100, 104))
    clients.status = lambda name: fate if (name.key, name.rank) == (keys[2], 1) else None
    good, bad = client.move("read", keys, range(110, 114))
    assert (good, bad) == ({110, 111, 113}, {112})


def test_no_call_moves_more_objects_than_mooncake_can(client: Client, clients: MemoryClients) -> None:
    client.move("write", keys_of(range(NUM_SLOTS)), range(100, 100 + NUM_SLOTS))
    assert max(count for _, count in clients.calls) <= MAX_BATCH_OBJECTS


def test_a_full_store_gets_nothing_for_a_while(
    client: Client, clients: MemoryClients, clock: FakeClock, blocks: MooncakeBlocks
) -> None:
    keys = keys_of(range(4))
    clients.status = lambda name: "full"
    assert client.move("write", keys[:1], (100,))[1] == {100}
    assert client.offer(keys) == []
    clients.status = lambda name: None
    clock.advance(1.0)
    assert client.offer(keys) == [0, 1, 2, 3]
    client.move("write", keys[:1], (100,))
    assert client.offer(keys) == [1, 2, 3]


def test_a_store_that_does_not_answer_is_left_alone_until_a_probe_succeeds(
    client: Client, clients: MemoryClients, clock: FakeClock, blocks: MooncakeBlocks
) -> None:
    keys = keys_of(range(2))
    client.move("write", keys, (100, 101))
    clients.error = TierUnavailableError("no master")
    assert client.move("read", keys, (110, 111))[1] == {110, 111}
    asked = len(clients.calls)
    assert (client.has(keys), client.offer(keys_of(range(5, 6)))) == ([False, False], [])
    assert len(clients.calls) == asked
    assert {part.state for part in blocks.parts()} == {"starting"}
    assert "no master" in blocks.parts()[0].reason
    clients.error = None
    clock.advance(PROBE_SECONDS)
    with blocks.changed:
        blocks.changed.notify_all()
    eventually(lambda: {part.state for part in blocks.parts()} == {"on"})
    assert client.has(keys) == [True, True]


def test_a_read_goes_on_while_writes_wait(client: Client, clients: MemoryClients) -> None:
    client.move("write", keys_of(range(1)), (100,))
    clients.gate.clear()
    op_id = client.begin("write", keys_of(range(1, 2)), (101,))
    eventually(lambda: clients.calls[-1][0] == "put" and len(clients.calls) == 3)
    read = client.begin("read", keys_of(range(1)), (110,))
    eventually(lambda: clients.calls[-1][0] == "get")
    clients.gate.set()
    assert client.finish(read, 1)[0] == {110}
    assert client.finish(op_id, 1)[0] == {101}


def test_answers_are_kept_for_a_while(client: Client, clients: MemoryClients, clock: FakeClock) -> None:
    keys = keys_of(range(3))
    assert client.has(keys) == [False] * 3
    assert client.has(keys) == [False] * 3
    assert clients.calls.count(("exists", 3)) == 1
    clock.advance(2.0)
    assert client.has(keys) == [False] * 3
    assert clients.calls.count(("exists", 3)) == 2


def test_what_a_read_takes_counts_what_is_queued(client: Client, clients: MemoryClients, clock: FakeClock) -> None:
    assert client.pool.expect(1).seconds is None
    client.move("write", keys_of(range(1)), (100,))
    clients.on_move = lambda num_bytes: clock.advance(num_bytes / 12_288_000)
    client.move("read", keys_of(range(1)), (110,))
    assert client.pool.expect(1).seconds == pytest.approx(0.001)
    clients.gate.clear()
    op_id = client.begin("read", keys_of(range(4)), range(100, 104))
    assert client.pool.expect(1).seconds == pytest.approx(0.005)
    clients.gate.set()
    client.finish(op_id, 4)
