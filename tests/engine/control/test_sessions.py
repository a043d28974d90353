"""Several sessions on one pool, whose memory outlives them."""

from __future__ import annotations

import gc

import pytest
from tests.doubles.rank import FakeRank
from tests.engine.control.sharedhost import Host

from kvstow.control import session
from kvstow.control.engine import PoolFacade
from kvstow.control.indexjournal import RecoveredIndex
from kvstow.control.leases import LeaseBook
from kvstow.control.sharedpool import EarlierSession, recover
from kvstow.errors import ConflictError, InvalidRequestError, LeaseError, NotFoundError
from kvstow.results import KeyRun

A, B, C, D, E = (bytes([letter]) for letter in b"ABCDE")


@pytest.fixture
def host() -> Host:
    return Host()


def test_the_collector_visits_no_slots_of_a_large_lease() -> None:
    assert not gc.is_tracked(LeaseBook().grant(tuple(range(1000, 1256))).slots)


def test_a_lease_is_found_by_its_id_in_its_own_session(host: Host) -> None:
    client, other = host.attach(), host.attach()
    client.store([A])
    lease = client.session.acquire([A])
    assert client.session.find_lease(lease.lease_id) is lease
    with pytest.raises(LeaseError, match="lease 1 was released or used up"):
        other.session.find_lease(lease.lease_id)


def test_a_rank_that_loses_memory_breaks_the_leases_in_it_alone(host: Host) -> None:
    engine = host.attach()
    engine.store([A, B, C])
    nothing, below = engine.session.lease([]), engine.session.lease([A, B])
    assert nothing is not None
    assert below is not None
    engine.session.set_memory(0, 2, 1)
    assert not engine.session.leases.is_broken(below)
    engine.session.set_memory(0, 1, 2)
    assert engine.session.leases.is_broken(below)


def test_sessions_are_found_until_nothing_of_them_is_left(host: Host) -> None:
    first, second = host.attach(), host.attach()
    first.begin_store([A])
    first.session.lose("closed")
    statuses = [session.status() for session in host.pool.attached()]
    assert [(one.id, one.state, one.processes) for one in statuses] == [
        ("1", "lost", 1),
        ("2", "attached", 1),
    ]
    assert host.pool.find_session(2) is second.session
    host.kill(first)
    with pytest.raises(NotFoundError, match="there is no session 1"):
        host.pool.find_session(1)


def test_a_key_whose_store_fails_can_be_stored_by_another_session(host: Host) -> None:
    first, second = host.attach(), host.attach()
    op = first.begin_store([A])
    assert op is not None
    assert second.begin_store([A]) is None
    first.ranks[0].run(op.op_id, fail=True)
    second.store([A])
    assert first.load([A]) == [A]


def test_a_key_of_a_lost_session_can_be_stored_by_another_one_at_once(host: Host) -> None:
    first, second = host.attach(), host.attach()
    first.begin_store([A])
    first.session.lose("closed")
    second.store([A])
    first.run()  # it writes its own slot, and what it says is ignored
    assert second.load([A]) == [A]
    assert host.counts["quarantined"] == 1


def test_a_session_without_processes_leaves_nothing(host: Host) -> None:
    session = host.pool.attach("engine")
    session.lose("closed")
    session.lose("closed")
    assert host.pool.sessions == []
    with pytest.raises(ConflictError, match=r"session 1 \(engine\): the session has ended; attach again"):
        session.map_memory("process")


def test_what_a_lost_session_says_is_counted_and_ignored(host: Host) -> None:
    client = host.attach()
    op = client.begin_store([A])
    client.store([B])
    assert op is not None
    client.session.lose("closed")
    client.ranks[0].send(op.op_id, "done")
    client.ranks[0].pin(2)
    faults = PoolFacade(host.pool).stats().faults
    assert (faults.stale_completions, faults.stale_reports) == (1, 1)
    assert client.session.lookup([B]) == 0
    assert client.session.begin_store([C], [0]).outcomes == {"dropped_draining": 1}
    assert client.session.take_settled() == []


def test_a_new_boot_fails_the_ops_and_leases_of_its_session_and_no_block(host: Host) -> None:
    first, second = host.attach(), host.attach()
    first.store([A, B, C])
    lease = first.session.acquire([A])
    loading = first.session.begin_load(first.session.acquire([B]), [9])
    first.ranks[0].submit(loading)
    kept = second.session.acquire([C])
    first.begin_store([D])
    second.begin_store([E])
    first.ranks[0].restart(8, same_process=True)
    assert [settled.mark for settled in first.session.take_settled()] == ["failed", "failed"]
    with pytest.raises(LeaseError, match="broken"):
        first.session.begin_load(lease, [0])
    first.session.release_lease(lease)
    second.run()
    assert second.session.lookup([A, B, C]) == 3
    assert second.session.begin_load(kept, [1]).slots == kept.slots
    assert first.session.lookup([E]) == 1
    PoolFacade(host.pool).check_integrity()


def test_another_process_cannot_take_the_place_of_a_rank(host: Host) -> None:
    client = host.attach()
    with pytest.raises(InvalidRequestError, match="rank 0 reports from another process; attach again"):
        client.ranks[0].restart(8)


def test_a_session_sees_and_gets_only_slots_that_all_its_ranks_have_registered() -> None:
    host = Host(ranks=2)
    host.attach().store([A, B, C, D, E])
    late = host.attach(registered=3)
    late.ranks[1].pin(2)
    assert late.session.status().registered_slots == 2
    assert late.session.lookup([A, B, C, D, E]) == 2
    assert late.session.contains([D, B]) == [False, True]
    assert late.session.lease([A, C]) is None
    assert late.session.find_runs([C, A, B, D]) == [(1, 2)]
    assert late.session.acquire([A, B, C]).slots == (0, 1)
    assert late.begin_store([A, C, D]) is None, "they are stored, although it does not see them"
    assert late.begin_store([b"new"]) is None, "its slots are leased"
    for rank in late.ranks:
        rank.pin(8)
    assert late.session.lookup([A, B, C, D, E]) == 5


def test_a_session_without_registered_slots_is_attaching(host: Host) -> None:
    session = host.pool.attach("engine")
    rank = FakeRank(session, 0, host.memory[0])
    assert session.status().state == "attaching"
    rank.pin(0)
    assert session.status().state == "attaching"
    assert session.begin_store([A], [0]).outcomes == {"dropped_not_ready": 1}
    rank.pin(1)
    assert session.status().state == "attached"
    assert session.begin_store([A], [0]).op is not None


def test_leases_may_hold_more_than_half_of_the_pool_until_a_store_needs_their_slots(host: Host) -> None:
    client, other = host.attach(), host.attach()
    client.store([A, B, C, D, E])
    leases = [client.session.acquire(keys) for keys in ([A, B], [C, D], [E])]
    other.store([bytes([100 + n]) for n in range(3)])
    assert host.counts["leased"] == 5
    for blocks, lease in zip(([0, 1], [2, 3], [4]), leases, strict=True):
        assert client.session.begin_load(lease, blocks).slots == lease.slots


def test_a_store_that_finds_no_other_slot_ends_the_oldest_unused_leases(host: Host) -> None:
    client, other = host.attach(), host.attach()
    client.store([A, B, C, D, E, *(bytes([100 + n]) for n in range(3))])
    kept = other.session.acquire([bytes([100 + n]) for n in range(3)])
    first, second, third = (client.session.acquire(keys) for keys in ([A, B], [C, D], [E]))
    assert other.session.store_room() == 1
    other.store([b"new"])
    assert client.session.lookup([A, B]) == 1
    with pytest.raises(LeaseError, match=f"lease {first.lease_id} was released or used up"):
        client.session.begin_load(first, [0, 1])
    client.session.release_lease(first)
    assert client.session.begin_load(second, [0, 1]).slots == second.slots
    assert client.session.begin_load(third, [2]).slots == third.slots
    assert other.session.begin_load(kept, [0, 1, 2]).slots == kept.slots


def test_a_store_leaves_leases_of_half_of_the_pool_alone(host: Host) -> None:
    client, other = host.attach(), host.attach()
    client.store([A, B, C, D])
    other.store([E, *(bytes([100 + n]) for n in range(3))])
    mine = client.session.acquire([A, B, C, D])
    other.session.acquire([E, *(bytes([100 + n]) for n in range(3))])
    assert client.session.store_room() == 0
    assert client.session.begin_store([b"new"], [0]).outcomes == {"dropped_cpu_full": 1}
    assert client.session.begin_load(mine, [0, 1, 2, 3]).slots == mine.slots


def test_while_engines_of_an_earlier_service_live_a_store_evicts_no_block_and_ends_no_lease(host: Host) -> None:
    keys = [bytes([100 + n]) for n in range(8)]
    found = RecoveredIndex({0: {key: slot for slot, key in enumerate(keys)}}, {}, ())
    recover(host.pool, found, {0: "model"}, [EarlierSession(1, "engine", frozenset({"worker"}))])
    client = host.attach()
    assert client.begin_store([b"new"]) is None
    leases = [client.session.acquire(some) for some in (keys[:3], keys[3:6], keys[6:])]
    assert client.begin_store([b"new"]) is None
    assert [client.session.find_lease(lease.lease_id) for lease in leases] == leases
    host.pool.process_died("worker")
    assert client.begin_store([b"new"]) is not None


def test_a_hit_of_more_than_half_of_the_pool_is_cut(host: Host) -> None:
    client = host.attach()
    client.store([A, B, C, D, E])
    assert client.session.acquire([A, B, C, D, E]).num_keys == 4
    assert client.session.lease([A, B, C, D, E]) is None
    lease, runs = client.session.acquire_runs([A, b"x", B, C, D, E])
    assert (lease.num_keys, runs) == (4, [(0, 1), (2, 3)])
    assert PoolFacade(host.pool).stats().pool.leases == 2


def test_a_look_up_of_all_keys_answers_with_runs(host: Host) -> None:
    client = host.attach()
    client.store([A, B, D])
    keys = [E, A, B, C, D]
    assert client.session.find_runs(keys) == [KeyRun(1, 2), KeyRun(4, 1)]
    lease, runs = client.session.acquire_runs(keys)
    assert runs == [KeyRun(1, 2), KeyRun(4, 1)]
    assert lease.num_keys == 3
    assert client.session.acquire_runs([C]) == (client.session.acquire([C]), [])
    assert client.session.acquire_runs([A], count=False)[1] == [KeyRun(0, 1)]
    assert client.session.acquire([A], count=False).num_keys == 1
    lookups = PoolFacade(host.pool).stats().lookups
    assert (lookups.query_blocks, lookups.hit_blocks) == (7, 3), "those that are counted"


def test_a_stuck_transfer_stops_its_session_only(host: Host) -> None:
    hung, other = host.attach(), host.attach()
    hung.begin_store([A])
    host.clock.advance(40.0)
    host.pool.tick()
    assert (hung.session.status().state, other.session.status().state) == ("stuck", "attached")
    assert hung.session.begin_store([B], [0]).outcomes == {"dropped_not_ready": 1}
    other.store([A, B])
    assert other.load([A, B]) == [A, B]
    for rank in other.ranks:
        rank.report()
    readiness = PoolFacade(host.pool).readiness()
    assert readiness.state == "degraded"
    assert readiness.reason.startswith("session 1 (engine): a transfer is stuck: rank 0 has not finished it")
    assert host.counts["quarantined"] == 1
    hung.session.lose("closed")
    assert host.counts["quarantined"] == 1
    host.kill(hung)
    assert host.counts["quarantined"] == 0
    assert PoolFacade(host.pool).readiness().state == "ready"


def test_only_extents_that_there_are_can_be_dropped(host: Host) -> None:
    for count in (0, 2):
        with pytest.raises(InvalidRequestError, match=f"count is {count}; allowed: 1 to 1"):
            host.pool.drop_extents(count)


def test_a_pool_is_resized_by_whole_extents(host: Host) -> None:
    host.pool.add_extent(4)
    with pytest.raises(InvalidRequestError, match=r"capacity_slots is 10; allowed: .* one of \[0, 8, 12\]"):
        host.pool.admin.resize(10)
    host.pool.admin.resize(8).run()
    assert host.pool.extents == (8,)


def test_readiness_of_a_pool_without_sessions(host: Host) -> None:
    assert PoolFacade(host.pool).readiness().state == "ready"
    host.pool.add_extent(4)
    readiness = PoolFacade(host.pool).readiness()
    assert (readiness.state, readiness.capacity_slots, readiness.usable_slots) == ("pinning", 12, 8)


def misses(host: Host) -> int:
    return PoolFacade(host.pool).stats().lookups.miss_blocks["too_many_leases"]


def test_a_session_that_holds_too_many_leases_and_loads_finds_nothing_more(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs memory of the service, whether or not the client ever releases it or ends it."""
    monkeypatch.setattr(session, "MOST_HELD", 3)
    client, other = host.attach(), host.attach()
    client.store([A, B])
    first, second = client.session.acquire([A]), client.session.acquire([A])
    client.session.begin_load(first, [0])  # and never ends it
    assert client.session.acquire([A, B]).slots
    assert client.session.acquire([A, B]).slots == ()
    assert client.session.acquire_runs([A])[1] == []
    assert client.session.lease([A]) is None
    assert misses(host) == 3
    assert other.session.acquire([A, B]).slots
    client.session.release_lease(second)
    assert client.session.acquire([A, B]).slots


def test_the_slots_of_a_sessions_leases_and_loads_are_bounded(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MOST_HELD_SLOTS", 4)
    client = host.attach()
    client.store([A, B])
    op = client.session.begin_load(client.session.acquire([A, B]), [0, 1])
    assert len(client.session.acquire([A, B]).slots) == 2
    assert client.session.acquire([A]).slots == ()
    assert misses(host) == 1
    for rank in client.ranks:
        rank.send(op.op_id, "done")
    assert client.session.acquire([A]).slots


def test_what_is_released_counts_until_it_is_freed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may lease and release faster than slots are freed."""
    host.pool.slice_slots = host.pool.debts.slice_slots = 2
    client = host.attach()
    client.store([A, B, C])
    for most in ("MOST_HELD", "MOST_HELD_SLOTS"):
        with monkeypatch.context() as patch:
            leases = [client.session.acquire([A, B, C]).lease_id for _ in range(3)]
            client.session.release_leases(leases)
            assert (len(host.pool.debts.slots), host.pool.debts.num_slots) == (2, 5)
            patch.setattr(session, most, 2)
            assert client.session.acquire([A]).slots == ()
            while host.pool.debts.pay():
                pass
            assert client.session.acquire([A]).slots
            PoolFacade(host.pool).check_integrity()


def test_the_bounds_are_above_what_an_engines_queue_holds() -> None:
    """16,384 waiting requests of 4,096 tokens in blocks of 16, each with a lease."""
    assert session.MOST_HELD >= 16_384
    assert session.MOST_HELD_SLOTS >= 16_384 * 256


@pytest.mark.parametrize("ends", ["release", "death"])
def test_a_lease_with_a_repeated_key_gives_up_one_hold_of_its_slot(host: Host, ends: str) -> None:
    """The parts in which its slots are freed are not holds of their own."""
    host.pool.slice_slots = host.pool.debts.slice_slots = 2
    client, other = host.attach(), host.attach()
    client.store([A, B, C])
    loading = other.session.begin_load(other.session.acquire([A]), [0])
    lease = client.session.acquire([A, B, C, A])
    assert lease.num_keys == 4
    if ends == "release":
        client.session.release_leases([lease.lease_id])
    else:
        client.session.lose("closed")
        host.kill(client)
    while host.pool.debts.pay():
        pass
    assert host.counts["leased"] == 1
    host.pool.remove_blocks(loading.slots, "purge")
    assert host.pool.slots.is_used(loading.slots[0])
