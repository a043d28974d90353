from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.doubles.fakes import FakeClock
from tests.doubles.rank import FakeRank, make_ranks, store_keys, write_blocks

from kvstow.control.engine import OffloadEngine
from kvstow.errors import InvalidRequestError, LeaseError, NotFoundError
from kvstow.messages import Completion
from kvstow.results import Settled

MakeEngine = Callable[..., OffloadEngine]

A, B, C, D, E = (bytes([letter]) for letter in b"ABCDE")


def test_only_the_leading_run_is_a_hit(make_host: MakeEngine) -> None:
    engine = make_host()
    store_keys(engine, make_ranks(engine), [A, C])
    assert engine.lookup([A, B, C]) == 1
    assert engine.contains([A, B, C]) == [True, False, True]


def test_nothing_is_found_before_every_rank_reported(make_engine: MakeEngine) -> None:
    engine = make_engine(ranks=2)
    FakeRank(engine, 0).pin(4)
    grant = engine.begin_store([A], [0])
    assert grant.op is None
    assert grant.outcomes == {"dropped_not_ready": 1}
    assert engine.readiness().state == "starting"


def test_a_lease_of_single_keys_is_all_or_nothing(make_host: MakeEngine) -> None:
    engine = make_host()
    store_keys(engine, make_ranks(engine), [A, C])
    assert engine.lease([A, B]) is None
    lease = engine.lease([C, A, C])
    assert lease is not None
    assert lease.num_keys == 3
    assert engine.stats().pool.slots.leased == 2
    engine.release_lease(lease)
    engine.check_integrity()


def test_a_failed_load_of_repeated_keys_removes_them_once(make_host: MakeEngine) -> None:
    engine = make_host()
    (rank,) = make_ranks(engine)
    store_keys(engine, [rank], [A, B])
    lease = engine.lease([A, B, A])
    assert lease is not None
    op = engine.begin_load(lease, [1, 2, 3])
    rank.submit(op)
    rank.run(op.op_id, fail=True)
    assert engine.contains([A, B]) == [False, False]
    assert engine.stats().pool.slots.free == 4
    engine.check_integrity()


def test_a_lease_can_be_used_only_once(make_host: MakeEngine) -> None:
    engine = make_host()
    ranks = make_ranks(engine)
    store_keys(engine, ranks, [A])
    lease = engine.acquire([A])
    op = engine.begin_load(lease, [7])
    with pytest.raises(LeaseError, match="released or used up"):
        engine.begin_load(lease, [8])
    engine.release_lease(lease)  # the load still holds its slot
    assert engine.stats().pool.slots.leased == 1
    ranks[0].submit(op)
    ranks[0].run_all()
    assert engine.stats().pool.slots.leased == 0


@pytest.mark.parametrize(("blocks", "first"), [([], 0), ([1, 2, 3], 0), ([1], 2), ([1], -1)])
def test_a_load_outside_its_lease_is_refused(make_host: MakeEngine, blocks: list[int], first: int) -> None:
    engine = make_host()
    store_keys(engine, make_ranks(engine), [A, B])
    lease = engine.acquire([A, B])
    with pytest.raises(InvalidRequestError, match="allowed: 1 or more, within the 2 leased"):
        engine.begin_load(lease, blocks, first=first)
    assert engine.stats().pool.leases == 1


def test_keys_and_blocks_of_a_store_must_pair(make_host: MakeEngine) -> None:
    engine = make_host()
    make_ranks(engine)
    with pytest.raises(InvalidRequestError, match="store of 2 keys and 1 blocks"):
        engine.begin_store([A, B], [0])


def test_a_key_is_stored_once(make_host: MakeEngine) -> None:
    engine = make_host()
    ranks = make_ranks(engine)
    store_keys(engine, ranks, [A])
    in_flight = engine.begin_store([B], [1]).op
    grant = engine.begin_store([A, B, C, C, D], range(10, 15))
    assert grant.accepted == (2, 4)
    assert grant.op is not None
    assert grant.op.blocks == (12, 14)
    assert grant.outcomes == {"skipped_already_cached": 1, "skipped_in_flight": 1, "skipped_duplicate": 1}
    ranks[0].submit(in_flight, grant.op)
    ranks[0].run_all()
    engine.check_integrity()
    assert engine.lookup([A, B, C, D]) == 4


def test_a_store_never_evicts_blocks_of_its_own_prefix(make_host: MakeEngine) -> None:
    engine = make_host(slots=2)
    ranks = make_ranks(engine)
    store_keys(engine, ranks, [A, B])
    grant = engine.begin_store([A, B, C], range(3))
    assert grant.outcomes == {"skipped_already_cached": 2, "dropped_cpu_full": 1}
    assert engine.lookup([A, B]) == 2
    engine.check_integrity()


def test_keys_without_a_slot_are_dropped_from_the_end(make_host: MakeEngine) -> None:
    engine = make_host(slots=2)
    ranks = make_ranks(engine)
    grant = engine.begin_store([A, B, C], range(3))
    assert grant.accepted == (0, 1)
    assert grant.outcomes == {"dropped_cpu_full": 1}
    assert engine.begin_store([D], [9]).outcomes == {"dropped_cpu_full": 1}  # filling slots are no room either
    assert engine.stats().allocation_failures == 2
    ranks[0].submit(grant.op)
    ranks[0].run_all()
    assert engine.lookup([A, B, C]) == 2


def test_settled_ops_are_reported_once_with_blocks_and_request(make_host: MakeEngine) -> None:
    engine = make_host()
    (rank,) = make_ranks(engine)
    op = engine.begin_store([A], [5], request_id="r1").op
    assert op is not None
    rank.send(op.op_id, "source_free")
    rank.submit(op)
    rank.run_all()
    assert engine.take_settled() == [
        Settled(op.op_id, "store", "source_free", "r1", (5,), None),
        Settled(op.op_id, "store", "done", "r1", (5,), None),
    ]
    assert engine.take_settled() == []


def test_the_source_is_free_only_when_it_is_on_every_rank(make_host: MakeEngine) -> None:
    engine = make_host(ranks=2)
    ranks = make_ranks(engine)
    op = engine.begin_store([A], [5]).op
    assert op is not None
    ranks[0].send(op.op_id, "source_free")
    ranks[0].send(op.op_id, "source_free")
    assert engine.take_settled() == []
    ranks[1].send(op.op_id, "done")  # implies it
    assert [settled.mark for settled in engine.take_settled()] == ["source_free"]


def test_a_failed_store_publishes_nothing_and_frees_its_slots(make_host: MakeEngine) -> None:
    engine = make_host(ranks=2)
    ranks = make_ranks(engine)
    op = engine.begin_store([A, B], [0, 1]).op
    assert op is not None
    ranks[0].submit(op)
    ranks[1].submit(op)
    ranks[0].run(op.op_id, fail=True)
    assert engine.take_settled() == []  # rank 1 may still write the slots
    assert engine.stats().pool.slots.filling == 2
    ranks[1].run(op.op_id)
    (settled,) = engine.take_settled()
    assert settled.mark == "failed"
    assert settled.error == "rank 0: injected"
    assert engine.lookup([A]) == 0
    assert engine.stats().pool.slots.free == 4
    assert engine.stats().stores["failed"] == 2
    assert engine.stats().transfers.store.error == 1


def test_a_failed_load_removes_its_keys_at_the_first_failure(make_host: MakeEngine) -> None:
    engine = make_host(ranks=2)
    ranks = make_ranks(engine)
    store_keys(engine, ranks, [A, B])
    op = engine.begin_load(engine.acquire([A, B]), [1, 2], request_id="r")
    ranks[0].send(op.op_id, "failed")
    assert engine.lookup([A]) == 0, "the request would find the keys again and load in a circle"
    assert engine.take_settled() == []
    ranks[1].send(op.op_id, "done")
    (settled,) = engine.take_settled()
    assert (settled.mark, settled.request_id) == ("failed", "r")
    assert engine.stats().pool.slots.free == 4
    assert engine.stats().lookups.miss_blocks["load_failed"] == 2
    assert engine.stats().fallbacks["load_failed"] == 1
    engine.check_integrity()


def test_late_and_repeated_completions_are_counted_and_ignored(make_host: MakeEngine) -> None:
    engine = make_host(ranks=2)
    ranks = make_ranks(engine)
    op = engine.begin_store([A], [0]).op
    assert op is not None
    ranks[0].send(op.op_id, "done")
    ranks[0].send(op.op_id, "done")
    ranks[0].send(op.op_id, "failed")
    assert engine.lookup([A]) == 0
    assert engine.stats().faults.duplicate_completions == 2
    ranks[1].send(op.op_id, "done")
    assert engine.lookup([A]) == 1
    ranks[1].send(op.op_id, "failed")
    ranks[1].send(op.op_id + 1, "done")
    ranks[1].send(op.op_id, "done", boot_id="another")
    assert engine.stats().faults.stale_completions == 3
    assert engine.lookup([A]) == 1


def test_a_completion_of_an_unknown_rank_is_an_error(make_host: MakeEngine) -> None:
    engine = make_host()
    with pytest.raises(NotFoundError, match="rank is 3; allowed: 0 to 0"):
        engine.complete(3, "x", [Completion(1, "done")])


def test_there_is_room_for_free_and_evictable_blocks_and_none_while_stores_are_refused(make_host: MakeEngine) -> None:
    engine = make_host(slots=3)
    assert engine.store_room() == 0
    rank = FakeRank(engine)
    rank.pin(3)
    store_keys(engine, [rank], [A, B])
    assert engine.store_room() == 3
    lease = engine.acquire([A])
    assert engine.store_room() == 2
    grant = engine.begin_store([C, D, E], [0, 1, 2])
    assert (grant.accepted, [*grant.unplaced]) == ((0, 1), [2])
    assert engine.store_room() == 0
    engine.release_lease(lease)
    assert engine.store_room() == 1
    engine.admin.drain("stop_stores", None)
    assert engine.store_room() == 0
    assert [*engine.begin_store([D, E], [1, 2]).unplaced] == [0, 1]


def test_an_abandoned_store_is_not_awaited(make_host: MakeEngine, clock: FakeClock) -> None:
    engine = make_host(slots=2, transfer_timeout=10.0)
    (rank,) = make_ranks(engine)
    op = engine.begin_store([A], [0]).op
    assert op is not None
    assert engine.awaited_transfers == 1
    clock.advance(10.5)
    engine.tick()
    assert (engine.awaited_transfers, engine.open_transfers) == (0, 1)
    rank.send(op.op_id, "done")
    assert (engine.awaited_transfers, engine.open_transfers) == (0, 0)


def test_a_failed_host_gets_no_more_hits_or_stores(make_host: MakeEngine) -> None:
    engine = make_host(slots=2)
    ranks = make_ranks(engine)
    store_keys(engine, ranks, [A])
    for reason in ("the first", "the second"):
        engine.fail(reason)
    ranks[0].report()
    assert (engine.lookup([A]), engine.store_room()) == (0, 0)
    readiness = engine.readiness()
    assert (readiness.state, readiness.reason) == ("degraded", "the host has failed: the first")
    assert engine.stats().faults.errors["host"] == 2


def test_a_stuck_store_is_abandoned_and_its_slots_wait_in_quarantine(make_host: MakeEngine, clock: FakeClock) -> None:
    engine = make_host(slots=2, ranks=2, transfer_timeout=10.0)
    ranks = make_ranks(engine)
    write_blocks(ranks, [0], [A])
    op = engine.begin_store([A], [0], request_id="r").op
    for rank in ranks:
        rank.submit(op)
    assert op is not None
    ranks[0].run(op.op_id)
    clock.advance(10.5)
    engine.tick()
    (settled,) = engine.take_settled()
    assert (settled.mark, settled.error) == ("failed", "rank 1 has not finished it")
    stats = engine.stats()
    assert (stats.pool.slots.quarantined, stats.pool.slots.free, stats.transfers.pending.stuck) == (1, 1, 1)
    assert engine.begin_store([B], [1]).outcomes == {"dropped_not_ready": 1}, "a stuck rank stops the traffic"
    (view,) = engine.transfers()
    assert (view.state, view.pending_ranks, view.failed) == ("quarantined", (1,), True)
    ranks[1].run(op.op_id)
    assert engine.take_settled() == []
    assert engine.stats().pool.slots.free == 2
    assert engine.begin_store([B], [1]).op is not None, "traffic flows again"
    assert engine.lookup([A]) == 0
    engine.check_integrity()


def test_ranks_are_not_blamed_for_completions_that_the_host_has_not_collected(
    make_host: MakeEngine, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_host(slots=4, ranks=2, transfer_timeout=10.0)
    ranks = make_ranks(engine)
    op = engine.begin_store([A], [0]).op
    ranks[0].submit(op)  # it works on it; the other rank has done it, or was never given it
    clock.advance(9.0)
    ranks[0].report()
    ranks[1].report()
    clock.advance(1.5)
    engine.tick()
    (settled,) = engine.take_settled()
    host = "the host has not submitted it, or lost its answer: rank 1 has nothing under way"
    assert settled.error == f"rank 0 has not finished it; {host}"
    assert engine.readiness().reason == f"a transfer is stuck: rank 0 has not finished it; {host}"
    assert host in caplog.text
    (view,) = engine.transfers()
    assert (view.pending_ranks, view.idle_ranks) == ((0, 1), (1,))


@pytest.mark.parametrize(("uncollected", "fault"), [(3, "not collected 6 completions"), (0, "not submitted it")])
def test_a_host_that_collects_nothing_is_named(
    make_host: MakeEngine, clock: FakeClock, uncollected: int, fault: str
) -> None:
    engine = make_host(slots=4, ranks=2, transfer_timeout=10.0)
    ranks = make_ranks(engine)
    engine.begin_store([A], [0])
    clock.advance(9.0)
    for rank in ranks:
        rank.report()
        sent = rank.sent[-1]
        engine.report(replace(sent, number=sent.number + 1, uncollected_completions=uncollected))
    clock.advance(1.5)
    engine.tick()
    (settled,) = engine.take_settled()
    assert settled.error is not None
    assert settled.error.startswith(f"the host has {fault}")
    assert "not finished" not in settled.error


def test_an_idle_report_from_before_the_op_or_from_long_ago_clears_no_rank(
    make_host: MakeEngine, clock: FakeClock
) -> None:
    engine = make_host(slots=4, transfer_timeout=10.0)
    (rank,) = make_ranks(engine)
    engine.begin_store([A], [0])
    (view,) = engine.transfers()
    assert view.idle_ranks == ()
    clock.advance(1.0)
    rank.report()
    (view,) = engine.transfers()
    assert view.idle_ranks == (0,)
    clock.advance(9.5)
    engine.tick()
    (settled,) = engine.take_settled()
    assert settled.error == "rank 0 has not finished it"


def test_a_stuck_load_keeps_waiting(make_host: MakeEngine, clock: FakeClock) -> None:
    engine = make_host(transfer_timeout=10.0)
    ranks = make_ranks(engine)
    store_keys(engine, ranks, [A])
    op = engine.begin_load(engine.acquire([A]), [7])
    clock.advance(10.5)
    engine.tick()
    engine.tick()
    assert engine.take_settled() == [], "the silent rank may still write the blocks"
    assert [view.state for view in engine.transfers()] == ["stuck"]
    assert engine.stats().faults.errors["transfer_stuck"] == 1
    assert engine.lookup([A]) == 0
    assert engine.acquire([A]).slots == ()
    ranks[0].submit(op)
    ranks[0].run_all()
    assert [settled.mark for settled in engine.take_settled()] == ["done"]
    assert engine.lookup([A]) == 1


def test_events_list_stored_and_removed_blocks(make_host: MakeEngine) -> None:
    engine = make_host(slots=2)
    ranks = make_ranks(engine)
    store_keys(engine, ranks, [A, B])
    store_keys(engine, ranks, [C])
    engine.admin.purge(keys=[A]).run()
    told = [(event.kind, event.keys, event.reason) for event in engine.events.read(0).events]
    assert told == [
        ("stored", (A, B), ""),
        ("removed", (B,), "capacity"),
        ("stored", (C,), ""),
        ("removed", (A,), "purge"),
    ]


def test_a_closed_engine_serves_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    store_keys(engine, make_ranks(engine), [A])
    engine.close()
    assert engine.readiness().state == "stopped"
    assert engine.lookup([A]) == 0
    assert engine.begin_store([B], [0]).outcomes == {"dropped_draining": 1}
