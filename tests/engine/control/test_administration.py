from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
from tests.doubles.fakes import FakeClock
from tests.doubles.rank import make_ranks, store_keys, write_blocks

from kvstow.control.engine import OffloadEngine
from kvstow.control.pool import SLICE_SLOTS, Pool
from kvstow.errors import ConfigError, ConflictError, InvalidRequestError
from kvstow.status import BypassStatus

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


def test_eviction_by_bytes_frees_at_least_as_much(make_host: MakeEngine) -> None:
    engine = make_host()
    store_keys(engine, make_ranks(engine), [A, B, C])
    assert engine.admin.evict(num_bytes=65).run().evicted_slots == 2


def test_eviction_ends_when_nothing_is_evictable(make_host: MakeEngine) -> None:
    engine = make_host()
    store_keys(engine, make_ranks(engine), [A, B, C])
    lease = engine.acquire([A])
    sweep = engine.admin.evict(slots=100).run()
    assert (sweep.evicted_slots, sweep.done, sweep.total) == (2, 2, 2)
    engine.release_lease(lease)
    assert engine.lookup([A]) == 1


def test_eviction_by_idle_time(make_host: MakeEngine, clock: FakeClock) -> None:
    engine = make_host()
    ranks = make_ranks(engine)
    store_keys(engine, ranks, [A])
    store_keys(engine, ranks, [B])
    clock.advance(10.0)
    engine.release_lease(engine.acquire([B]))
    clock.advance(5.0)
    assert engine.admin.evict(idle_seconds=12.0).run().evicted_slots == 1
    assert engine.contains([A, B]) == [False, True]


def test_a_dry_run_counts_and_changes_nothing(make_host: MakeEngine, clock: FakeClock) -> None:
    engine = make_host()
    store_keys(engine, make_ranks(engine), [A, B, C])
    clock.advance(2.0)
    before = engine.stats()
    assert engine.admin.evict(slots=2, dry_run=True).run().evicted_slots == 2
    assert engine.admin.evict(idle_seconds=1.0, dry_run=True).run().evicted_slots == 3
    assert engine.admin.purge(everything=True, dry_run=True).run().evicted_slots == 3
    assert engine.admin.purge(keys=[A, D], dry_run=True).run().evicted_slots == 1
    assert engine.admin.evict(slots=9, dry_run=True).run().evicted_slots == 3
    assert engine.stats() == before


@pytest.mark.parametrize(
    "selectors",
    [
        {},
        {"slots": 1, "num_bytes": 1},
        {"slots": 0},
        {"num_bytes": -1},
        {"idle_seconds": -1.0},
        {"idle_seconds": float("nan")},
    ],
)
def test_contradictory_selectors_of_an_eviction_are_refused(make_host: MakeEngine, selectors: dict[str, float]) -> None:
    engine = make_host()
    with pytest.raises(InvalidRequestError, match="allowed"):
        engine.admin.evict(**selectors)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "selectors", [{}, {"everything": True, "keys": [A]}, {"key_prefixes": []}, {"key_prefixes": [b""]}]
)
def test_contradictory_selectors_of_a_purge_are_refused(make_host: MakeEngine, selectors: dict[str, object]) -> None:
    engine = make_host()
    with pytest.raises(InvalidRequestError, match="allowed"):
        engine.admin.purge(**selectors)  # type: ignore[arg-type]


def test_purge_by_keys_prefixes_age_and_count(make_host: MakeEngine, clock: FakeClock) -> None:
    engine = make_host(slots=8)
    ranks = make_ranks(engine)
    store_keys(engine, ranks, [b"p1", b"p2", b"q1", b"q2", b"r1"])
    assert engine.admin.purge(keys=[b"p1", b"p1", b"none"]).run().evicted_slots == 1
    assert engine.admin.purge(key_prefixes=[b"q", b"x"]).run().evicted_slots == 2
    clock.advance(60.0)
    store_keys(engine, ranks, [b"s1"])
    assert engine.admin.purge(age_seconds=30.0).run().evicted_slots == 2
    assert engine.contains([b"r1", b"s1"]) == [False, True]
    assert engine.admin.purge(slots=5).run().evicted_slots == 1
    assert engine.stats().evictions["purge"] == 6
    engine.check_integrity()


def test_a_purge_hides_leased_blocks_at_once_and_frees_them_later(make_host: MakeEngine) -> None:
    engine = make_host()
    (rank,) = make_ranks(engine)
    store_keys(engine, [rank], [A])
    op = engine.begin_load(engine.acquire([A]), [7])
    assert engine.admin.purge(everything=True).run().evicted_slots == 1
    assert engine.lookup([A]) == 0
    assert engine.stats().pool.slots.leased == 1
    store_keys(engine, [rank], [B, C, D])
    rank.submit(op)
    rank.run_all()
    assert rank.blocks[7] == A, "the slot was not reused under the load"
    assert engine.stats().pool.slots.free == 1
    engine.check_integrity()


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


def test_growing_is_finished_at_once_and_the_ranks_follow(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2)
    (rank,) = make_ranks(engine)
    assert engine.admin.resize(5).run().finished
    assert rank.report().capacity_slots == 5
    assert engine.readiness().state == "pinning"
    rank.pin(5)
    assert (engine.stats().pool.usable_slots, engine.readiness().state) == (5, "ready")


def test_shrinking_removes_blocks_before_the_ranks_unpin(make_host: MakeEngine) -> None:
    engine = make_host(slots=4)
    (rank,) = make_ranks(engine)
    store_keys(engine, [rank], [A, B, C])
    sweep = engine.admin.resize(1)
    assert rank.report().capacity_slots == 4
    sweep.run()
    assert (sweep.finished, sweep.evicted_slots) == (True, 2)
    assert rank.report().capacity_slots == 1
    assert (engine.stats().pool.usable_slots, engine.lookup([A, B])) == (1, 1)
    assert engine.stats().evictions["resize"] == 2
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


def test_a_resize_can_be_cancelled_before_it_is_run(make_host: MakeEngine) -> None:
    engine = make_host(slots=4)
    make_ranks(engine)
    engine.admin.resize(1).cancel()
    assert (engine.stats().pool.capacity_slots, engine.stats().pool.usable_slots) == (4, 4)
    assert engine.admin.resize(2).run().finished


def test_a_shrink_to_nothing_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequestError, match="capacity_slots is 0"):
        make_engine(slots=4).admin.resize(0)


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


def test_draining_refuses_new_work_and_reports_when_it_is_done(make_host: MakeEngine, clock: FakeClock) -> None:
    engine = make_host()
    (rank,) = make_ranks(engine)
    store_keys(engine, [rank], [A])
    op = engine.begin_load(engine.acquire([A]), [7])
    status = engine.admin.drain("all", deadline_seconds=30.0)
    clock.advance(10.0)
    status = engine.admin.drain_status
    assert (status.active, status.mode, status.drained, status.pending_transfers) == (True, "all", False, 1)
    assert status.deadline_seconds_left == 20.0
    assert engine.readiness().state == "draining"
    assert engine.acquire([A]).slots == ()
    assert engine.stats().lookups.miss_blocks["draining"] == 1
    assert engine.stats().fallbacks["draining"] == 1
    rank.submit(op)
    rank.run_all()
    assert engine.admin.drain_status.drained
    assert not engine.admin.undrain().active
    rank.report()
    assert engine.lookup([A]) == 1
    assert engine.readiness().state == "ready"


def test_draining_stores_only_still_serves_loads(make_host: MakeEngine) -> None:
    engine = make_host()
    store_keys(engine, make_ranks(engine), [A])
    engine.admin.drain("stop_stores", None)
    assert engine.lookup([A]) == 1
    assert engine.begin_store([B], [0]).outcomes == {"dropped_draining": 1}
    with pytest.raises(InvalidRequestError, match="deadline_seconds"):
        engine.admin.drain("all", -1.0)


def test_bypass_switches_off_each_direction_until_its_ttl_ends(make_host: MakeEngine, clock: FakeClock) -> None:
    engine = make_host()
    store_keys(engine, make_ranks(engine), [A])
    engine.admin.set_bypass(load=True, store=False, ttl_seconds=10.0)
    assert engine.lookup([A]) == 0
    assert engine.contains([A]) == [False]
    assert engine.lease([A]) is None
    assert engine.begin_store([B], [0]).op is not None
    clock.advance(4.0)
    assert engine.admin.bypass == BypassStatus(load=True, store=False, ttl_seconds_left=6.0)
    clock.advance(6.0)
    assert engine.admin.bypass == BypassStatus(load=False, store=False, ttl_seconds_left=None)
    assert engine.lookup([A]) == 1
    engine.admin.set_bypass(load=False, store=True, ttl_seconds=None)
    assert engine.begin_store([C], [0]).outcomes == {"skipped_bypass": 1}
    with pytest.raises(InvalidRequestError, match="ttl_seconds"):
        engine.admin.set_bypass(load=True, store=True, ttl_seconds=0.0)


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
