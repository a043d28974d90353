from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.engine.conftest import Eventually, MakePool

from kvstow.errors import CopyError, TierTimeoutError
from kvstow.memory.hostpool import HostPool
from kvstow.messages import TierCompletion, TierDirection, TierOp
from kvstow.testing.fakes import FakeClock
from kvstow.testing.tier import ControlledStore
from kvstow.tier.store import MemoryRange, PutStatus
from kvstow.tier.transfers import StoreTransfers

SLOT = 4096
SLOTS = 200
KEYS = [number.to_bytes(4, "big") for number in range(SLOTS)]


class Rank:
    """One rank's share of the transfers, and what has ended of it."""

    def __init__(self, transfers: StoreTransfers, pool: HostPool) -> None:
        self.transfers, self.pool = transfers, pool
        self._ended: list[TierCompletion] = []

    def submit(self, op: TierOp) -> None:
        self.transfers.submit(op, self.pool, 0, 1, self._ended.append)

    def take_completions(self) -> list[TierCompletion]:
        taken, self._ended[:] = self._ended[:], []
        return taken

    def close(self) -> None:
        self.transfers.close()


class OtherRank:
    """The memory of another rank of the same client."""

    slot_bytes = SLOT

    def __init__(self, pool: HostPool) -> None:
        self.addresses = pool.addresses


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store() -> ControlledStore:
    return ControlledStore()


@pytest.fixture
def pool(make_pool: MakePool, eventually: Eventually) -> HostPool:
    pool = make_pool(pool_bytes=SLOTS * SLOT, chunk_bytes=4 * SLOT)
    pool.start()
    eventually(lambda: pool.pinned_slots == SLOTS)
    return pool


@pytest.fixture
def transfers(store: ControlledStore, pool: HostPool, clock: FakeClock) -> Iterator[Rank]:
    client = store.open_transfers()
    client.add_memory(MemoryRange(pool.address, SLOTS * pool.slot_stride))
    transfers = Rank(StoreTransfers(client, clock=clock), pool)
    yield transfers
    for gate in (store.puts, store.gets):
        gate.open()
    transfers.close()


@pytest.fixture
def ended(transfers: Rank, eventually: Eventually) -> Callable[[int], list[TierCompletion]]:
    """Wait for so many completions."""
    found: list[TierCompletion] = []

    def wait(count: int) -> list[TierCompletion]:
        def have_come() -> bool:
            found.extend(transfers.take_completions())
            return len(found) >= count

        eventually(have_come)
        taken = found[:]
        found.clear()
        return taken

    return wait


def op(op_id: int, direction: TierDirection, keys: list[bytes], first_slot: int = 0) -> TierOp:
    return TierOp(op_id, direction, "f", tuple(keys), tuple(range(first_slot, first_slot + len(keys))))


def fill(pool: HostPool, slot: int, value: int) -> None:
    ctypes.memset(pool.address + slot * pool.slot_stride, value, SLOT)


def read(pool: HostPool, slot: int) -> bytes:
    return ctypes.string_at(pool.address + slot * pool.slot_stride, SLOT)


Ended = Callable[[int], list[TierCompletion]]


def test_slots_are_put_and_fetched(transfers: Rank, pool: HostPool, store: ControlledStore, ended: Ended) -> None:
    for slot in range(60):
        fill(pool, slot, slot)
    transfers.submit(op(1, "put", KEYS[:60]))
    (put,) = ended(1)
    assert (put.op_id, put.mark, put.moved, put.num_bytes) == (1, "done", 60, 60 * SLOT)
    transfers.submit(op(2, "fetch", KEYS[:60], 100))
    (fetched,) = ended(1)
    assert (fetched.mark, fetched.moved, fetched.failed) == ("done", 60, 0)
    assert [read(pool, slot)[:1] for slot in range(100, 160)] == [bytes([slot]) for slot in range(60)]
    assert store.batches == [("put", 60), ("get", 60)]
    store.get_status = lambda name: "corrupt" if name.key == KEYS[1] else None
    transfers.submit(op(3, "fetch", KEYS[:3], 100))
    (fetched,) = ended(1)
    assert (fetched.moved, fetched.failed) == (1, 0), "what follows is of no use"
    stats = transfers.transfers.stats()
    assert (stats.put_objects, stats.put_bytes) == (60, 60 * SLOT)
    assert (stats.get_objects, stats.get_bytes, stats.corrupt_objects) == (62, 62 * SLOT, 1)


def test_a_fetch_ends_at_the_first_object_that_is_missing(
    transfers: Rank, store: ControlledStore, ended: Ended
) -> None:
    transfers.submit(op(1, "put", [key for key in KEYS[:60] if key != KEYS[7]]))
    ended(1)
    transfers.submit(op(2, "fetch", KEYS[:60]))
    (fetched,) = ended(1)
    assert (fetched.mark, fetched.moved) == ("done", 7), "what follows is of no use"


def test_what_a_rank_waits_for_the_others_counts_as_its_time(
    transfers: Rank, pool: HostPool, store: ControlledStore, clock: FakeClock, ended: Ended, eventually: Eventually
) -> None:
    """The estimate of a fetch is that of the slowest rank."""
    other, others = OtherRank(pool), list[TierCompletion]()
    store.gets.shut()
    transfers.submit(op(1, "fetch", KEYS[:3]))
    transfers.transfers.submit(op(2, "fetch", KEYS[:3]), other, 0, 1, others.append)
    transfers.submit(op(3, "fetch", KEYS[:3]))
    store.gets.wait_arrived(1)
    clock.advance(5.0)
    store.gets.open()
    assert [(one.seconds, one.queue_seconds) for one in ended(2)] == [(5.0, 0.0), (0.0, 5.0)]
    eventually(lambda: others)
    assert (others[0].seconds, others[0].queue_seconds) == (5.0, 0.0)


def test_the_end_of_a_rank_waits_for_its_calls_alone(
    transfers: Rank, pool: HostPool, store: ControlledStore, ended: Ended, eventually: Eventually
) -> None:
    other, others = OtherRank(pool), list[TierCompletion]()
    store.puts.shut()
    transfers.submit(op(1, "put", KEYS[:3]))
    for op_id, memory, ends in ((2, other, others), (3, pool, transfers._ended)):
        transfers.transfers.submit(op(op_id, "put", KEYS[:3]), memory, 0, 1, ends.append)
    store.puts.wait_arrived(1)
    transfers.transfers.drop([other])
    assert [(one.op_id, one.mark) for one in others] == [(2, "failed")]
    dropping = threading.Thread(target=transfers.transfers.drop, args=([pool],))
    dropping.start()
    eventually(lambda: len(transfers._ended) == 1)
    assert dropping.is_alive(), "a call is under way"
    store.puts.open()
    dropping.join(30)
    assert [(one.op_id, one.mark) for one in transfers.take_completions()] == [(3, "failed"), (1, "done")]


@pytest.mark.parametrize(("status", "failed", "full"), [("full", 0, True), ("failed", 1, False)])
def test_a_put_ends_at_the_first_object_that_is_not_stored(
    transfers: Rank, store: ControlledStore, ended: Ended, status: PutStatus, failed: int, full: bool
) -> None:
    store.put_status = lambda name: status if name.key == KEYS[2] else None
    transfers.submit(op(1, "put", KEYS[:5]))
    (put,) = ended(1)
    assert (put.mark, put.moved, put.failed, put.full) == ("done", 2, failed, full)


def test_an_op_ends_when_the_store_has_given_its_slots_back(
    transfers: Rank, store: ControlledStore, ended: Ended
) -> None:
    store.gets.shut()
    transfers.submit(op(1, "fetch", KEYS[:3], SLOTS - 3))
    store.gets.wait_arrived(1)
    assert transfers.take_completions() == []
    store.gets.open()
    assert [one.moved for one in ended(1)] == [0]


def test_a_fetch_does_not_wait_for_puts(transfers: Rank, store: ControlledStore, ended: Ended) -> None:
    store.puts.shut()
    transfers.submit(op(1, "put", KEYS[:3]))
    transfers.submit(op(2, "put", KEYS[:3]))
    store.puts.wait_arrived(1)
    transfers.submit(op(3, "fetch", KEYS[:3], 10))
    assert [one.op_id for one in ended(1)] == [3]
    store.puts.open()
    assert [one.op_id for one in ended(2)] == [1, 2]


def test_an_outage_fails_the_op_and_no_other(transfers: Rank, store: ControlledStore, ended: Ended) -> None:
    store.error = TierTimeoutError("no answer in 0.5 s")
    transfers.submit(op(1, "put", KEYS[:3]))
    (put,) = ended(1)
    assert (put.mark, put.error, put.outage, put.moved) == ("failed", "no answer in 0.5 s", True, 0)
    store.error = None
    transfers.submit(op(2, "put", KEYS[:3]))
    assert [(one.mark, one.moved, one.outage) for one in ended(1)] == [("done", 3, False)]


def test_a_defect_of_the_store_fails_the_op_and_is_logged(
    transfers: Rank, store: ControlledStore, ended: Ended, caplog: pytest.LogCaptureFixture
) -> None:
    store.error = ZeroDivisionError("defect")
    with caplog.at_level(logging.ERROR, "kvstow.tier"):
        transfers.submit(op(1, "fetch", KEYS[:3]))
        (fetched,) = ended(1)
    assert (fetched.mark, fetched.outage) == ("failed", False)
    assert "defect" in (fetched.error or "")
    assert "fetch 1 failed" in caplog.text
    store.error = None
    transfers.submit(op(2, "fetch", KEYS[:3]))
    assert [one.mark for one in ended(1)] == ["done"]


def test_a_slot_that_is_not_there_fails_the_op(
    transfers: Rank, pool: HostPool, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(slots: object) -> None:
        raise CopyError("some of the slots are in memory that the transfers do not have")

    monkeypatch.setattr(pool, "addresses", fail)
    transfers.submit(op(1, "fetch", KEYS[:3], SLOTS - 1))
    (fetched,) = ended(1)
    assert (fetched.mark, fetched.outage) == ("failed", False)
    assert "some of the slots" in (fetched.error or "")


def test_closing_fails_what_has_not_begun(transfers: Rank, store: ControlledStore, ended: Ended) -> None:
    store.puts.shut()
    transfers.submit(op(1, "put", KEYS[:3]))
    store.puts.wait_arrived(1)
    transfers.submit(op(2, "put", KEYS[:3]))
    store.puts.open()
    transfers.close()
    transfers.submit(op(3, "fetch", KEYS[:3]))
    found = {one.op_id: one.mark for one in ended(3)}
    assert found.keys() == {1, 2, 3}
    assert found[3] == "failed"
    transfers.close()
