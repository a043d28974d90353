from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.doubles.fakes import FakeClock
from tests.doubles.rank import FakeRank, make_ranks, ready_report, store_keys, write_blocks

from kvstow.control.administration import Administrator, Sweep
from kvstow.control.engine import OffloadEngine
from kvstow.control.pool import Pool
from kvstow.errors import InvalidRequestError, LeaseError, NotFoundError

MakeEngine = Callable[..., OffloadEngine]

A, B = b"A", b"B"

PINNED = ready_report(64, 4)


def test_the_slowest_rank_decides_how_many_slots_are_usable(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=8, ranks=2)
    fast, slow = FakeRank(engine, 0), FakeRank(engine, 1)
    fast.pin(8)
    assert engine.stats().pool.usable_slots == 0
    assert engine.readiness().state == "starting"
    slow.pin(3)
    assert engine.stats().pool.usable_slots == 3
    readiness = engine.readiness()
    assert (readiness.state, readiness.reason) == ("pinning", "3 of 8 slots are pinned on every rank")
    slow.pin(8)
    assert (engine.readiness().state, engine.stats().pool.usable_slots) == ("ready", 8)
    engine.check_integrity()


def test_traffic_flows_with_the_first_slot(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=8)
    rank = FakeRank(engine)
    rank.pin(1)
    store_keys(engine, [rank], [A])
    assert engine.lookup([A]) == 1


@pytest.mark.parametrize(
    ("state", "reason"), [("degraded", "rank 0 is degraded: no memory"), ("failed", "rank 0 is failed: no memory")]
)
def test_a_failing_rank_degrades_the_engine(make_engine: MakeEngine, state: str, reason: str) -> None:
    engine = make_engine()
    (rank,) = make_ranks(engine)
    rank.state, rank.error = state, "no memory"  # type: ignore[assignment]
    rank.report()
    readiness = engine.readiness()
    assert (readiness.state, readiness.reason) == ("degraded", reason)


def test_a_rank_without_its_copy_thread_gets_no_traffic(make_engine: MakeEngine) -> None:
    engine = make_engine()
    (rank,) = make_ranks(engine)
    store_keys(engine, [rank], [A])
    rank.state = "failed"
    rank.report()
    assert engine.lookup([A]) == 0
    assert engine.begin_store([B], [0]).outcomes == {"dropped_not_ready": 1}
    rank.state = "ready"
    rank.report()
    assert engine.lookup([A]) == 1, "its memory is still there"


def test_a_silent_rank_degrades_the_engine_until_it_reports(make_engine: MakeEngine, clock: FakeClock) -> None:
    engine = make_engine(report_timeout=5.0)
    (rank,) = make_ranks(engine)
    clock.advance(5.5)
    assert engine.readiness().reason == "rank 0 has been silent for 5.5 s"
    rank.report()
    assert engine.readiness().state == "ready"


def test_a_store_that_a_restarted_rank_had_finished_fails(make_engine: MakeEngine) -> None:
    """Its blocks are offered again."""
    engine = make_engine(ranks=2)
    ranks = make_ranks(engine)
    write_blocks(ranks, [0], [A])
    op = engine.begin_store([A], [0]).op
    assert op is not None
    for rank in ranks:
        rank.submit(op)
    ranks[1].run_all()
    ranks[1].restart(pinned=4)
    ranks[0].run_all()
    assert engine.lookup([A]) == 0
    (settled,) = engine.take_settled()
    assert (settled.mark, settled.error) == ("failed", "rank 1: rank 1 has restarted")
    stats = engine.stats()
    assert (stats.stores["failed"], stats.stores["dropped_purged"], stats.pool.slots.free) == (1, 0, 4)
    engine.check_integrity()


def test_a_late_report_of_a_former_boot_is_ignored(make_engine: MakeEngine) -> None:
    engine = make_engine()
    (rank,) = make_ranks(engine)
    dead = rank.boot_id
    rank.restart(pinned=4)
    store_keys(engine, [rank], [A])
    rank.report(boot_id=dead)
    assert engine.lookup([A]) == 1
    stats = engine.stats()
    assert (stats.faults.stale_reports, stats.faults.rank_restarts) == (1, 1)


def test_a_late_report_of_the_same_boot_is_counted_and_changes_nothing(make_engine: MakeEngine) -> None:
    """There are two paths to the engine, so an old report may arrive after a newer one."""
    engine = make_engine()
    rank = FakeRank(engine)
    rank.pin(1)
    rank.state = "failed"
    rank.report()
    pinning, failed = rank.sent
    rank.state = "ready"
    rank.pin(4)
    store_keys(engine, [rank], [A, B])
    for late in (pinning, failed, rank.sent[-1]):
        assert engine.report(late) == engine.desired()
    assert engine.lookup([A, B]) == 2
    stats = engine.stats()
    assert (stats.faults.stale_reports, stats.pool.usable_slots, stats.evictions["rank_restart"]) == (3, 4, 0)
    assert engine.readiness().state == "ready"


def test_a_late_report_of_a_boot_that_never_reported_is_no_restart(make_engine: MakeEngine) -> None:
    """A rank slept and woke while the report of its sleep was held up: taken for a restart, it would cut off the boot
    that lives."""
    engine = make_engine()
    (rank,) = make_ranks(engine)
    asleep = replace(rank.sent[-1], boot_id="asleep", number=rank.reports + 1, pinned_slots=0)
    rank.reports += 1
    rank.restart(pinned=4, same_process=True)
    rank.report()
    store_keys(engine, [rank], [A])
    engine.report(asleep)
    rank.report()
    assert engine.ranks.boots == (rank.boot_id,)
    assert engine.lookup([A]) == 1
    assert engine.stats().faults.stale_reports == 1


def test_every_new_desired_state_has_a_larger_number(make_engine: MakeEngine) -> None:
    engine = make_engine()
    make_ranks(engine)
    numbers = [engine.desired().number]
    for change in (
        lambda: engine.admin.resize(8).run(),
        lambda: engine.admin.resize(2).run(),
        lambda: engine.admin.pause_pinning(True),
        lambda: engine.admin.pause_pinning(False),
        engine.admin.retry_pinning,
    ):
        change()
        numbers.append(engine.desired().number)
    assert numbers == sorted(set(numbers))
    engine.admin.resize(2).run()
    assert engine.desired().number == numbers[-1], "nothing changed"


KEYS = [bytes([number]) for number in range(12)]

SWEEPS: dict[str, Callable[[Administrator], Sweep]] = {
    "resize": lambda admin: admin.resize(2),
    "evict": lambda admin: admin.evict(slots=8),
    "idle": lambda admin: admin.evict(idle_seconds=0.0),
    "purge": lambda admin: admin.purge(everything=True),
    "purge keys": lambda admin: admin.purge(keys=KEYS),
}


@pytest.mark.parametrize("end", ["cancel", "run"])
@pytest.mark.parametrize("kind", SWEEPS)
def test_a_restart_loses_everything_during_any_sweep(make_engine: MakeEngine, kind: str, end: str) -> None:
    engine = make_engine(slots=12, slice_slots=2)
    (rank,) = make_ranks(engine)
    store_keys(engine, [rank], KEYS)
    sweep = SWEEPS[kind](engine.admin)
    if kind != "resize":  # which has done its first slice
        sweep.step()
    assert not sweep.finished
    rank.restart(pinned=12)
    assert engine.contains(KEYS) == [False] * 12
    engine.check_integrity()
    getattr(sweep, end)()
    rank.report()
    assert engine.contains(KEYS) == [False] * 12
    engine.check_integrity()
    assert engine.stats().evictions["rank_restart"] == 10
    store_keys(engine, [rank], KEYS[:2])
    assert engine.lookup(KEYS[:2]) == 2, "what is stored from now on is kept, although the clock has not moved"
    engine.check_integrity()


def test_an_interrupted_removal_is_finished_before_anything_is_served(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(slots=12, slice_slots=2)
    (rank,) = make_ranks(engine)
    store_keys(engine, [rank], KEYS)
    vacate = Pool.vacate

    def fail_later(self: Pool, low: int, high: int, reason: str) -> int:
        if low >= 4:
            raise MemoryError
        return vacate(self, low, high, reason)

    monkeypatch.setattr(Pool, "vacate", fail_later)
    with pytest.raises(MemoryError):
        rank.restart(pinned=12)
    assert engine.contains(KEYS) == [False] * 12
    assert engine.begin_store([b"new"], [0]).outcomes == {"dropped_not_ready": 1}
    monkeypatch.undo()
    rank.report()
    assert engine.contains(KEYS) == [False] * 12
    assert engine.begin_store([b"new"], [0]).op is not None
    engine.check_integrity()


def test_slots_unpinned_unasked_are_lost_also_during_a_shrink(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=12, slice_slots=2)
    (rank,) = make_ranks(engine)
    store_keys(engine, [rank], KEYS)
    sweep = engine.admin.resize(2)
    rank.pin(6)
    sweep.cancel()
    rank.pin(12)
    assert [engine.block(key) is not None for key in KEYS] == [True, True, False, False, True, True] + [False] * 6
    engine.check_integrity()


def test_stores_and_leases_of_slots_unpinned_unasked_are_lost(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=4, ranks=2)
    ranks = make_ranks(engine)
    store_keys(engine, ranks, [A, B])
    lease = engine.acquire([A, B])
    write_blocks(ranks, [0, 1], [b"C", b"D"])
    op = engine.begin_store([b"C", b"D"], [0, 1]).op
    assert op is not None
    for rank in ranks:
        rank.submit(op)
    ranks[0].run_all()
    ranks[0].pin(1)
    ranks[0].pin(4)
    ranks[1].run_all()
    assert engine.contains([A, B, b"C", b"D"]) == [True, False, False, False]
    with pytest.raises(LeaseError, match="a rank has lost its memory"):
        engine.begin_load(lease, [7, 8])
    engine.release_lease(lease)
    assert engine.stats().pool.slots.free == 3
    engine.check_integrity()


def test_slots_that_a_rank_unpins_do_not_count_when_the_pool_grows_again(make_engine: MakeEngine) -> None:
    engine = make_engine(ranks=2)
    ranks = make_ranks(engine)
    early = ranks[0].sent[-1]
    engine.admin.resize(1).run()
    engine.admin.resize(3).run()
    assert engine.stats().pool.usable_slots == 1, "the ranks may have received the state with one slot"
    for rank in ranks:
        assert rank.report().capacity_slots == 3
    assert engine.stats().pool.usable_slots == 1, "reports from before"
    ranks[0].report()
    assert engine.stats().pool.usable_slots == 1, "rank 1 has said nothing new"
    ranks[1].report()
    assert engine.stats().pool.usable_slots == 3
    engine.report(early)
    stats = engine.stats()
    assert (stats.pool.usable_slots, stats.faults.stale_reports) == (3, 1)


def test_growth_alone_leaves_the_known_slots_as_they_are(make_engine: MakeEngine) -> None:
    engine = make_engine()
    (rank,) = make_ranks(engine)
    engine.admin.resize(2).run()
    rank.report()
    engine.admin.resize(3).run()
    assert engine.stats().pool.usable_slots == 2
    rank.pin(3)
    engine.admin.resize(4).run()
    assert engine.stats().pool.usable_slots == 3


def test_a_first_report_counts_in_full_if_it_has_applied_the_desired_state(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.admin.resize(1).run()
    engine.admin.resize(4).run()
    rank = FakeRank(engine)
    rank.pin(4)
    assert engine.stats().pool.usable_slots == 1
    rank.report()
    assert engine.stats().pool.usable_slots == 4


def test_desired_states_of_another_engine_do_not_count_as_applied(make_engine: MakeEngine) -> None:
    engine = make_engine()
    (rank,) = make_ranks(engine)
    elsewhere = replace(rank.sent[-1], boot_id="elsewhere", engine_id="another", applied=2)
    engine.admin.resize(1).run()
    engine.report(elsewhere)
    engine.admin.resize(4).run()
    assert engine.stats().pool.usable_slots == 1


def test_reports_of_another_pool_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    good = PINNED
    with pytest.raises(NotFoundError, match="rank is 1; allowed: 0 to 0"):
        engine.report(replace(good, rank=1))
    with pytest.raises(InvalidRequestError, match="slot_bytes 32; allowed: 64"):
        engine.report(replace(good, slot_bytes=32))
    with pytest.raises(InvalidRequestError, match="boot_id"):
        engine.report(replace(good, boot_id=""))
    with pytest.raises(InvalidRequestError, match="applied desired state 2; allowed: 0 to 1, the latest one sent"):
        engine.report(replace(good, engine_id=engine.engine_id, applied=2))
    assert engine.readiness().state == "starting"


def test_each_rank_has_slots_of_its_own_size(make_engine: MakeEngine) -> None:
    engine = make_engine(ranks=2, rank_slot_bytes=(64, 32))
    assert [rank.slot_bytes for rank in engine.readiness().ranks] == [64, 32], "before they have reported, too"
    ranks = make_ranks(engine)
    assert [rank.pinned_bytes for rank in engine.readiness().ranks] == [4 * 64, 4 * 32]
    store_keys(engine, ranks, [A, B])
    assert engine.stats().transfers.store.bytes == 2 * 64, "of the rank with the largest slots"
    wrong = replace(PINNED, rank=1)
    with pytest.raises(InvalidRequestError, match="rank 1 reports slot_bytes 64; allowed: 32, as this rank's pool"):
        engine.report(wrong)


def test_ranks_get_the_desired_state(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=4)
    rank = FakeRank(engine)
    desired = rank.pin(4)
    assert desired == engine.desired()
    assert (desired.engine_id, desired.capacity_slots, desired.paused, desired.pin_attempt) == (
        engine.engine_id,
        4,
        False,
        0,
    )
    engine.admin.pause_pinning(True)
    engine.admin.retry_pinning()
    desired = rank.report()
    assert (desired.paused, desired.pin_attempt) == (True, 1)
