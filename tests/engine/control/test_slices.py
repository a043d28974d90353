"""What a client makes much of ends in slices, with the lock free for others between them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.engine.control.sharedhost import Client, Host

from kvstow.control.engine import PoolFacade
from kvstow.control.ops import OP_SLOTS
from kvstow.messages import Completion, Op

KEYS = [bytes([letter]) for letter in b"ABCDEFGH"]


@pytest.fixture
def host() -> Host:
    host = Host(slots=16)
    host.pool.slice_slots = host.pool.debts.slice_slots = 2
    return host


def begin_stores(client: Client, *batches: list[bytes]) -> list[Op]:
    ops = [client.session.begin_store(keys, range(len(keys))).op for keys in batches]
    return [op for op in ops if op is not None]


def begin_load(client: Client, keys: list[bytes]) -> Op:
    return client.session.begin_load(client.session.acquire(keys), range(len(keys)))


def run_owed(host: Host) -> int:
    """Make all steps, and return how many there were."""
    count = 1
    while host.pool.debts.pay():
        PoolFacade(host.pool).check_integrity()
        count += 1
    return count


def test_many_completions_are_taken_in_steps(host: Host) -> None:
    client, other = host.attach(), host.attach()
    ops = begin_stores(client, KEYS[:2], KEYS[2:4], KEYS[4:6])
    done = [Completion(op.op_id, "done") for op in ops]
    seen = []
    for rank in client.ranks[:-1]:
        client.session.complete(rank.rank, rank.boot_id, done)
    last = client.ranks[-1]
    for _ in client.session.complete_in_steps(last.rank, last.boot_id, done):
        seen.append(other.session.lookup(KEYS))
        PoolFacade(host.pool).check_integrity()
    assert seen == [2, 4]
    assert other.session.lookup(KEYS) == 6


def test_completions_between_whose_steps_the_rank_restarts_are_stale(host: Host) -> None:
    client = host.attach()
    ops = begin_stores(client, KEYS[:2], KEYS[2:4])
    done = [Completion(op.op_id, "done") for op in ops]
    first = client.ranks[0]
    steps = client.session.complete_in_steps(first.rank, first.boot_id, done)
    next(steps)
    first.restart(host.pool.capacity, same_process=True)
    before = PoolFacade(host.pool).stats().faults.stale_completions
    assert list(steps) == []
    assert PoolFacade(host.pool).stats().faults.stale_completions == before + 1


def test_the_blocks_of_a_failed_load_are_removed_in_steps_before_it_ends(host: Host) -> None:
    client, other = host.attach(), host.attach()
    client.store(KEYS[:6])
    op = begin_load(client, KEYS[:6])
    seen = []
    for rank in client.ranks:
        failed = [Completion(op.op_id, "failed", "broken")]
        for _ in client.session.complete_in_steps(rank.rank, rank.boot_id, failed):
            assert client.session.take_settled() == []
            seen.append(sum(other.session.contains(KEYS)))
            PoolFacade(host.pool).check_integrity()
    assert seen[:3] == [4, 2, 0]
    assert [one.mark for one in client.session.take_settled()] == ["failed"]
    run_owed(host)
    assert host.counts["leased"] == 0


def test_the_slots_of_a_large_load_are_freed_in_slices(host: Host) -> None:
    client = host.attach()
    client.store(KEYS[:6])
    op = begin_load(client, KEYS[:6])
    for rank in client.ranks:
        client.session.complete(rank.rank, rank.boot_id, [Completion(op.op_id, "done")])
    assert host.counts["leased"] == 4
    assert run_owed(host) == 2
    assert host.counts["leased"] == 0


def test_a_store_finds_slots_that_are_owed(host: Host) -> None:
    client = host.attach()
    size = host.pool.slots.limit
    keys = [number.to_bytes(2, "big") for number in range(size)]
    client.store(keys)
    lease = client.session.acquire(keys[: size // 2])
    other = host.attach()
    held = other.session.acquire(keys[size // 2 :])
    client.session.release_leases([lease.lease_id])
    assert held.slots
    freed = size // 2 - host.pool.debts.num_slots
    assert freed < size // 2
    op = client.session.begin_store([b"new%d" % number for number in range(freed + 1)], range(freed + 1)).op
    assert op is not None
    assert len(op.slots) == freed + 1


def test_the_ops_of_a_lost_session_end_in_steps(host: Host) -> None:
    client = host.attach()
    client.store(KEYS[:2])
    begin_stores(client, KEYS[2:4], KEYS[4:6])
    begin_load(client, KEYS[:2])
    client.session.acquire(KEYS[:2])
    client.session.lose("closed")
    assert (host.counts["filling"], host.counts["quarantined"]) == (2, 2)
    host.kill(client)
    assert host.counts["quarantined"] == 2
    assert run_owed(host) > 2
    assert host.pool.sessions == []
    assert host.counts["free"] == host.pool.slots.limit - 2
    assert host.counts["cached"] == 2


def test_an_op_with_many_slots_is_a_step_of_its_own() -> None:
    host = Host(64)
    host.pool.slice_slots = host.pool.debts.slice_slots = 2 * OP_SLOTS
    client = host.attach()
    keys = [bytes([number]) for number in range(4 + 2 * OP_SLOTS)]
    half = len(keys) // 2
    begin_stores(client, keys[:half], keys[half:])
    client.session.lose("closed")
    assert host.counts["quarantined"] == half
    run_owed(host)
    assert host.counts["quarantined"] == len(keys)


def test_the_slots_of_a_lost_session_are_freed_in_steps_after_the_death_of_its_processes(host: Host) -> None:
    client = host.attach()
    client.store(KEYS[:2])
    begin_stores(client, KEYS[2:4], KEYS[4:6])
    client.session.acquire(KEYS[:2])
    client.session.lose("closed")
    run_owed(host)
    assert host.counts["quarantined"] == 4
    host.kill(client)
    assert host.counts["quarantined"] == 2
    run_owed(host)
    assert (host.counts["quarantined"], host.counts["leased"]) == (0, 0)
    assert host.pool.sessions == []


def test_the_ops_of_a_rank_that_restarts_fail_in_steps(host: Host) -> None:
    client, other = host.attach(), host.attach()
    begin_stores(client, KEYS[:2], KEYS[2:4], KEYS[4:6])
    sent = replace(client.ranks[0].sent[-1], boot_id="another", number=100)
    failed = []
    for _ in client.session.report_in_steps(sent):
        assert other.session.store_room()
        failed.append(len(client.session.take_settled()))
        PoolFacade(host.pool).check_integrity()
    assert failed == [1, 1]
    assert len(client.session.take_settled()) == 1
    assert not client.session.open_transfers
