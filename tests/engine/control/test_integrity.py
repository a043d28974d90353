"""`check_integrity` must find every kind of inconsistency: each test changes one record only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.doubles.rank import make_ranks, write_blocks

from kvstow.control.chains import Running, ignore
from kvstow.control.engine import OffloadEngine
from kvstow.control.pool import Pool
from kvstow.control.session import sessions_of
from kvstow.errors import IntegrityError

Disorder = Callable[[Pool], object]


def lose_a_key(pool: Pool) -> None:
    pool.index.slot_keys.table.unlink([0])


def swap_two_keys(pool: Pool) -> None:
    key_of = pool.index.slot_keys.key_of
    key_of[0], key_of[1] = key_of[1], key_of[0]


def lose_an_evictable_slot(pool: Pool) -> None:
    part = pool.index.chains.parts()[-1]
    part.slots.pop()


def miscount_a_part(pool: Pool) -> None:
    pool.index.chains.parts()[-1].resident += 1


def miscount_the_absent_blocks_of_a_part(pool: Pool) -> None:
    pool.index.chains.parts()[-1].expected += 1


def give_a_part_to_a_request_that_lacks_it(pool: Pool) -> None:
    chains = pool.index.chains
    part = chains.parts()[-1]
    part.request = Running(part.order, 1.0, ignore)


def forget_an_orphan(pool: Pool) -> None:
    (orphan,) = pool.index.held.slots() - set(pool.index.visible_slots())
    pool.index.held.clear([orphan])


def lose_the_key_of_a_store(pool: Pool) -> None:
    slot = pool.sessions[0].namespace.keys.get(b"E")
    assert slot is not None
    pool.index.slot_keys.table.unlink([~slot])


def count_the_end_of_a_hold_twice(pool: Pool) -> None:
    held = pool.index.held
    slot = min(held.slots())
    held.clear([slot, slot])
    held.increment([slot])


def take_a_slot_from_its_namespace(pool: Pool) -> None:
    pool.index.slot_keys.tag_of[1] = 7


def miscount_leased_slots(pool: Pool) -> None:
    pool.sessions[0].leases.num_slots += 1


def miscount_sessions(pool: Pool) -> None:
    pool.sessions[0].namespace.num_sessions += 1


def forget_a_lease(pool: Pool) -> None:
    leases = pool.sessions[0].leases
    leases.end(next(iter(leases)))


def put_a_slot_into_two_states(pool: Pool) -> None:
    pool.index.quarantined.add([0])


def free_a_used_slot(pool: Pool) -> None:
    pool.slots.deallocate([0])


def miscount_free_slots(pool: Pool) -> None:
    pool.slots.free += 1


def miscount_leaving_slots(pool: Pool) -> None:
    pool.slots.leaving += 1


def store_in_secret(pool: Pool) -> None:
    namespace = pool.sessions[0].namespace
    fresh, hashes, _ = namespace.select([b"F"], {})
    namespace.pending_stores.start([b"F"] * len(fresh), pool.slots.allocate(1), hashes)


def forget_to_watch_a_transfer(pool: Pool) -> None:
    next(iter(sessions_of(pool)[0].ops)).stuck = True


def keep_the_blocks_of_a_dead_boot(pool: Pool) -> None:
    pool.index.lose_contents(0, pool.clock())


def keep_blocks_above_the_usable_slots(pool: Pool) -> None:
    pool.slots.set_limit(0)


@pytest.mark.parametrize(
    ("disorder", "complaint"),
    [
        (lose_a_key, "keys by slot and slots by key differ"),
        (swap_two_keys, "keys by slot and slots by key differ"),
        (lose_an_evictable_slot, "the order of eviction repeats or loses slots"),
        (miscount_a_part, "the count of a part's slots is wrong"),
        (miscount_the_absent_blocks_of_a_part, "the count of a part's absent blocks is wrong"),
        (give_a_part_to_a_request_that_lacks_it, "a part is of a request that does not have it"),
        (forget_an_orphan, "the count of orphans is not that of held slots without a key"),
        (lose_the_key_of_a_store, "the keys and slots that are being stored do not match"),
        (count_the_end_of_a_hold_twice, "the count of held slots is wrong"),
        (take_a_slot_from_its_namespace, "the count of keys is wrong"),
        (miscount_leased_slots, "the count of leased slots is wrong"),
        (miscount_sessions, "the count of a namespace's sessions is wrong"),
        (forget_a_lease, "the held slots are not those of leases and loads"),
        (put_a_slot_into_two_states, "a slot is in two states"),
        (free_a_used_slot, "used slots have no state"),
        (miscount_free_slots, "the counts of free slots and slots in service are wrong"),
        (miscount_leaving_slots, "the count of used slots above the limit is wrong"),
        (forget_to_watch_a_transfer, "the list of transfers that may become stuck is wrong"),
        (store_in_secret, "the filling slots are not those of the open stores"),
        (keep_the_blocks_of_a_dead_boot, "blocks that a rank has lost are visible"),
        (keep_blocks_above_the_usable_slots, "blocks above the usable slots are visible"),
    ],
)
def test_every_inconsistency_is_found(
    make_host: Callable[..., OffloadEngine], disorder: Disorder, complaint: str
) -> None:
    engine = make_host(slots=8)
    (rank,) = make_ranks(engine)
    write_blocks([rank], range(4), [b"A", b"B", b"C", b"D"])
    rank.submit(engine.begin_store([b"A", b"B", b"C", b"D"], range(4)).op)
    rank.run_all()
    engine.acquire([b"A", b"B", b"C"])  # held, of which C becomes an orphan
    lease = engine.acquire([b"A", b"B"])
    engine.admin.purge(keys=[b"C"]).run()
    engine.release_lease(lease)
    engine.begin_store([b"E"], [9])
    engine.check_integrity()
    disorder(engine.pool)
    with pytest.raises(IntegrityError, match=complaint):
        engine.check_integrity()
    assert complaint.split()[-1] in engine.readiness().reason
    assert engine.readiness().state == "degraded"
    assert engine.stats().faults.errors["integrity"] == 1
