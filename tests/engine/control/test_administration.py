from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
from tests.doubles.rank import make_ranks, store_keys, write_blocks

from kvstow.control.administration import Administrator
from kvstow.control.engine import OffloadEngine
from kvstow.control.pool import SLICE_SLOTS, Pool
from kvstow.errors import ConfigError, ConflictError, InvalidRequestError

MakeEngine = Callable[..., OffloadEngine]

A, B, C, D = (bytes([letter]) for letter in b"ABCD")


def test_eviction_by_count_takes_the_coldest(make_host: MakeEngine) -> None:
    engine = make_host()
    store_keys(engine, make_ranks(engine), [A, B, C])
    sweep = engine.admin.evict(slots=2).run()
    assert (sweep.evicted_slots, sweep.evicted_bytes, sweep.finished) == (2, 128, True)
    assert engine.contains([A, B, C]) == [True, False, False]
    assert engine.stats().evictions["operator"] == 2
    engine.check_integrity()


@pytest.mark.parametrize(
    "ask",
    [
        lambda admin: admin.evict(),
        lambda admin: admin.evict(slots=1, num_bytes=1),
        lambda admin: admin.evict(slots=0),
        lambda admin: admin.evict(num_bytes=-1),
        lambda admin: admin.evict(idle_seconds=-1.0),
        lambda admin: admin.evict(idle_seconds=float("nan")),
        lambda admin: admin.purge(),
        lambda admin: admin.purge(everything=True, keys=[A]),
        lambda admin: admin.purge(key_prefixes=[]),
        lambda admin: admin.purge(key_prefixes=[b""]),
        lambda admin: admin.drain("all", -1.0),
        lambda admin: admin.set_bypass(load=True, store=True, ttl_seconds=0.0),
    ],
)
def test_values_out_of_range_and_contradictions_are_refused(
    make_host: MakeEngine, ask: Callable[[Administrator], object]
) -> None:
    engine = make_host()
    with pytest.raises(InvalidRequestError, match="allowed"):
        ask(engine.admin)
    assert not engine.admin.drain_status.active
    assert not engine.admin.bypass.load


def test_a_purge_reaches_stores_in_flight(make_host: MakeEngine) -> None:
    engine = make_host()
    (rank,) = make_ranks(engine)
    write_blocks([rank], [0, 1], [A, B])
    old = engine.begin_store([A, B], [0, 1]).op
    engine.admin.purge(keys=[A]).run()
    again = engine.begin_store([A], [0])
    assert again.op is not None, "the purged key may be stored again while the old store still runs"
    rank.submit(old, again.op)
    rank.run_all()
    assert engine.contains([A, B]) == [True, True]
    assert engine.stats().stores["dropped_purged"] == 1
    assert engine.stats().pool.slots.free == 2
    engine.check_integrity()


def test_bulk_work_is_done_in_slices_that_release_the_lock(make_host: MakeEngine) -> None:
    engine = make_host(slots=3 * SLICE_SLOTS)
    ranks = make_ranks(engine)
    store_keys(engine, ranks, [n.to_bytes(4, "big") for n in range(3 * SLICE_SLOTS)])
    sweep = engine.admin.purge(everything=True)
    assert engine.stats().pool.slots.cached == 3 * SLICE_SLOTS, "nothing happens before the first step"
    assert sweep.step()
    assert engine.stats().pool.slots.free == SLICE_SLOTS
    assert (sweep.done, sweep.total) == (SLICE_SLOTS, 3 * SLICE_SLOTS)
    sweep.cancel()
    assert not sweep.step()
    assert (sweep.cancelled, sweep.evicted_slots) == (True, SLICE_SLOTS)
    engine.check_integrity()


def test_shrinking_waits_for_leases_and_transfers_above(make_host: MakeEngine) -> None:
    engine = make_host(slots=4)
    (rank,) = make_ranks(engine)
    store_keys(engine, [rank], [A, B])
    op = engine.begin_load(engine.acquire([A, B]), [7, 8])
    filling = engine.begin_store([C], [0]).op
    sweep = engine.admin.resize(1).run()
    assert (sweep.waiting, sweep.finished) == (True, False)
    assert rank.report().capacity_slots == 4, "slot 1 is still read, slot 2 still written"
    stats = engine.stats()
    assert stats.pool.slots.usable == stats.pool.usable_slots == 3
    rank.submit(op, filling)
    rank.run_all()
    assert rank.blocks[8] == B
    sweep.run()
    assert sweep.finished
    assert rank.report().capacity_slots == 1
    assert engine.stats().pool.usable_slots == 1
    engine.check_integrity()


def test_no_new_block_is_stored_where_a_resize_clears(make_host: MakeEngine) -> None:
    engine = make_host(slots=4)
    (rank,) = make_ranks(engine)
    store_keys(engine, [rank], [A, B, C])
    sweep = engine.admin.resize(2)
    store_keys(engine, [rank], [b"x", b"y", b"z"])  # evicts A, B and C, of which slot 2 must not be used again
    assert max(engine.block(key).slot for key in (b"x", b"y") if engine.contains([key])[0]) < 2  # type: ignore[union-attr]
    assert sweep.run().finished
    engine.check_integrity()


def test_a_cancelled_shrink_puts_the_capacity_back(make_host: MakeEngine) -> None:
    engine = make_host(slots=4)
    (rank,) = make_ranks(engine)
    store_keys(engine, [rank], [A, B])
    lease = engine.acquire([A, B])
    sweep = engine.admin.resize(1).run()
    with pytest.raises(ConflictError, match="another resize"):
        engine.admin.resize(3)
    sweep.cancel()
    assert engine.stats().pool.capacity_slots == 4
    engine.release_lease(lease)
    assert engine.stats().pool.usable_slots == 4
    engine.check_integrity()
    assert engine.admin.resize(3).run().finished


def test_the_policy_changes_under_traffic_without_losing_a_block(make_host: MakeEngine) -> None:
    engine = make_host(slots=3)
    ranks = make_ranks(engine)
    store_keys(engine, ranks, [A, B, C])
    lease = engine.acquire([A])
    engine.admin.set_policy("auto")
    engine.release_lease(lease)
    engine.check_integrity()
    assert engine.stats().pool.policy == "auto"
    store_keys(engine, ranks, [D])
    assert engine.contains([A, B, C, D]) == [True, True, False, True]
    engine.admin.set_policy("lru")
    engine.admin.set_policy("lru")
    engine.check_integrity()
    assert engine.contains([A, B, D]) == [True, True, True]
    with pytest.raises(ConfigError, match="policy is 'fifo'; allowed: auto, lru"):
        engine.admin.set_policy("fifo")


def test_a_resize_that_is_abandoned_takes_no_lock_when_it_is_collected(
    make_host: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may run on a thread that holds the lock."""
    engine = make_host()
    store_keys(engine, make_ranks(engine), [A, B, C, D])
    lease = engine.acquire([A, B, C, D])
    sweep = engine.admin.resize(1).run()
    assert sweep.waiting
    taken: list[bool] = []

    class Watched:
        def __enter__(self) -> None:
            taken.append(True)

        def __exit__(self, *error: object) -> None:
            pass

    with monkeypatch.context() as patch:
        patch.setattr(engine.pool, "lock", Watched())
        del sweep
        gc.collect()
    assert not taken
    engine.release_lease(lease)


def test_a_resize_that_fails_puts_the_capacity_back(make_host: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_host(slice_slots=1)
    store_keys(engine, make_ranks(engine), [A, B, C, D])
    sweep = engine.admin.resize(1)

    def fail(*arguments: object) -> int:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Pool, "vacate", fail)
        with pytest.raises(MemoryError):
            sweep.run()
    assert sweep.finished
    assert engine.stats().pool.usable_slots == 4
    assert engine.admin.resize(2).run().finished
    engine.check_integrity()
