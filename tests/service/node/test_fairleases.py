"""What the leases of one user hold of the service's memory leaves some for the leases of others."""

from __future__ import annotations

from tests.service.node.conftest import MakeBench
from tests.service.node.hostbench import ONE_RANK, ONE_RANK_OTHER, Engine

from kvstow.attach.calls import Hold
from kvstow.control.leases import SLOTS_OF_LEASE
from kvstow.control.session import MOST_HELD, MOST_HELD_SLOTS

COST = 8 + SLOTS_OF_LEASE
"""What a lease of 8 slots counts."""


def with_blocks(engine: Engine) -> Engine:
    engine.store(*range(8))
    return engine


def lease(engine: Engine) -> int:
    """0 if it finds nothing."""
    return engine.find(*range(8), hold=Hold.LEADING).lease_id


def num_leases(engine: Engine) -> int:
    """As many as it gets."""
    count = 0
    while lease(engine):
        count += 1
    return count


def test_a_user_s_leases_in_all_pools_hold_half_of_what_others_leave(make_bench: MakeBench) -> None:
    bench = make_bench()
    engines = [with_blocks(bench.start(hello)) for hello in (ONE_RANK, ONE_RANK, ONE_RANK_OTHER)]
    tenant = with_blocks(bench.start(ONE_RANK, uid=2000))
    bench.host.held.total = 16 * COST
    assert [num_leases(engine) for engine in engines] == [8, 0, 0]
    assert num_leases(tenant) == 4
    engines[0].lose()
    bench.host.tick()
    assert [num_leases(engine) for engine in engines[1:]] == [0, 0], "its processes may still read these slots"
    engines[0].let_go()
    engines[0].over()
    bench.run()
    bench.host.tick()
    assert bench.host.held.owners() == {2000: 4 * COST}
    assert [num_leases(engine) for engine in engines[1:]] == [6, 0]


def test_what_is_released_or_deleted_counts_no_more(make_bench: MakeBench) -> None:
    bench = make_bench()
    engine = with_blocks(bench.start(ONE_RANK))
    found = [lease(engine) for _ in range(5)]
    bench.host.tick()
    assert bench.host.held.owners() == {1000: 5 * COST}
    engine.session.release_leases(found[:2])
    op = engine.begin_load(found[2])
    bench.run()
    bench.host.tick()
    assert bench.host.held.owners() == {1000: 3 * COST}
    engine.complete(op.op_id)
    engine.end()
    bench.run()
    bench.host.delete_pool(engine.pool.name)
    assert bench.host.held.owners() == {}


def test_one_engine_alone_may_hold_what_a_session_may(make_bench: MakeBench) -> None:
    assert make_bench().host.held.most(1000) == MOST_HELD_SLOTS + SLOTS_OF_LEASE * MOST_HELD
