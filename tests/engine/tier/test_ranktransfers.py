from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator

import pytest
from tests.engine.conftest import Eventually, MakePool

from kvstow.errors import CopyError, TierTimeoutError
from kvstow.memory.hostpool import HostPool
from kvstow.messages import TierCompletion, TierDirection, TierOp
from kvstow.testing.tier import ControlledStore
from kvstow.tier.ranktransfers import RankTransfers
from kvstow.tier.store import MAX_BATCH_OBJECTS, MemoryRange, ObjectName, PutStatus

SLOT = 4096
SLOTS = 200
KEYS = [number.to_bytes(4, "big") for number in range(SLOTS)]


def name_of(fingerprint: str, key: bytes) -> ObjectName:
    return ObjectName(fingerprint, key, 0, 1)


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
def transfers(store: ControlledStore, pool: HostPool) -> Iterator[RankTransfers]:
    client = store.open_transfers(0)
    client.add_memory(MemoryRange(pool.address, SLOTS * pool.slot_stride))
    transfers = RankTransfers(pool, client, name_of)
    yield transfers
    for gate in (store.puts, store.gets):
        gate.open()
    transfers.close()


@pytest.fixture
def ended(transfers: RankTransfers, eventually: Eventually) -> Callable[[int], list[TierCompletion]]:
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


def test_slots_are_put_and_fetched_in_batches(
    transfers: RankTransfers, pool: HostPool, store: ControlledStore, ended: Ended
) -> None:
    for slot in range(100):
        fill(pool, slot, slot)
    transfers.submit(op(1, "put", KEYS[:100]))
    (put,) = ended(1)
    assert (put.op_id, put.mark, put.moved, put.num_bytes) == (1, "done", 100, 100 * SLOT)
    transfers.submit(op(2, "fetch", KEYS[:100], 100))
    (fetched,) = ended(1)
    assert (fetched.mark, fetched.moved, fetched.failed) == ("done", 100, 0)
    assert [read(pool, slot)[:1] for slot in range(100, 200)] == [bytes([slot]) for slot in range(100)]
    assert store.batches == [("put", 64), ("put", 36), ("get", 64), ("get", 36)]
    assert MAX_BATCH_OBJECTS == 64
    assert transfers.put_rate.bytes_per_second
    assert transfers.fetch_rate.bytes_per_second


def test_a_fetch_ends_at_the_first_object_that_is_missing(
    transfers: RankTransfers, store: ControlledStore, ended: Ended
) -> None:
    transfers.submit(op(1, "put", [key for key in KEYS[:150] if key != KEYS[70]]))
    ended(1)
    store.batches.clear()
    transfers.submit(op(2, "fetch", KEYS[:150]))
    (fetched,) = ended(1)
    assert (fetched.mark, fetched.moved) == ("done", 70)
    assert store.batches == [("get", 64), ("get", 64)], "what follows is of no use"


@pytest.mark.parametrize(("status", "failed", "full"), [("full", 0, True), ("failed", 1, False)])
def test_a_put_ends_at_the_first_object_that_is_not_stored(
    transfers: RankTransfers, store: ControlledStore, ended: Ended, status: PutStatus, failed: int, full: bool
) -> None:
    store.put_status = lambda name: status if name.key == KEYS[2] else None
    transfers.submit(op(1, "put", KEYS[:5]))
    (put,) = ended(1)
    assert (put.mark, put.moved, put.failed, put.full) == ("done", 2, failed, full)


def test_an_op_ends_when_the_store_has_given_its_slots_back(
    transfers: RankTransfers, store: ControlledStore, ended: Ended
) -> None:
    store.gets.shut()
    transfers.submit(op(1, "fetch", KEYS[:3], SLOTS - 3))
    store.gets.wait_arrived(1)
    assert transfers.take_completions() == []
    store.gets.open()
    assert [one.moved for one in ended(1)] == [0]


def test_a_fetch_does_not_wait_for_puts(transfers: RankTransfers, store: ControlledStore, ended: Ended) -> None:
    store.puts.shut()
    transfers.submit(op(1, "put", KEYS[:3]))
    transfers.submit(op(2, "put", KEYS[:3]))
    store.puts.wait_arrived(1)
    transfers.submit(op(3, "fetch", KEYS[:3], 10))
    assert [one.op_id for one in ended(1)] == [3]
    store.puts.open()
    assert [one.op_id for one in ended(2)] == [1, 2]


def test_an_outage_fails_the_op_and_no_other(transfers: RankTransfers, store: ControlledStore, ended: Ended) -> None:
    store.error = TierTimeoutError("no answer in 0.5 s")
    transfers.submit(op(1, "put", KEYS[:3]))
    (put,) = ended(1)
    assert (put.mark, put.error, put.outage, put.moved) == ("failed", "no answer in 0.5 s", True, 0)
    store.error = None
    transfers.submit(op(2, "put", KEYS[:3]))
    assert [(one.mark, one.moved, one.outage) for one in ended(1)] == [("done", 3, False)]


def test_a_defect_of_the_store_fails_the_op_and_is_logged(
    transfers: RankTransfers, store: ControlledStore, ended: Ended, caplog: pytest.LogCaptureFixture
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
    transfers: RankTransfers, pool: HostPool, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(slots: object) -> None:
        raise CopyError("some of the slots are in memory that the transfers do not have")

    monkeypatch.setattr(pool, "addresses", fail)
    transfers.submit(op(1, "fetch", KEYS[:3], SLOTS - 1))
    (fetched,) = ended(1)
    assert (fetched.mark, fetched.outage) == ("failed", False)
    assert "some of the slots" in (fetched.error or "")


def test_closing_fails_what_has_not_begun(transfers: RankTransfers, store: ControlledStore, ended: Ended) -> None:
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
