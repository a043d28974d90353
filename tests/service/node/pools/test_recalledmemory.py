"""Memory that goes from one pool to another."""

from __future__ import annotations

import os

import pytest
from msgspec.structs import replace
from tests.service.node.conftest import MakeBench
from tests.service.node.hostbench import ONE_RANK, ONE_RANK_OTHER, ROW_SLOTS, Engine, grown
from tests.service.node.pools.test_nodepool import OTHER
from tests.service.node.rawengine import HELLO, POOL, SLOT_BYTES
from tests.service.node.wholenode import EXTENT

from kvstow.attach.calls import Hold, RevokedExtents
from kvstow.attach.channel import close_fds
from kvstow.errors import ConflictError
from kvstow.memfd import is_open_elsewhere
from kvstow_service.node.pools import memorythread


def last_number(engine: Engine) -> int:
    """Of the block in the pool's last slot."""
    last = sum(engine.pool.extents) - 1
    ((_, key),) = engine.pool.index.slot_keys.between(last, last + 1)
    return int.from_bytes(key, "big")


def test_a_pool_is_not_without_sessions_while_an_engine_starts(make_bench: MakeBench) -> None:
    bench = make_bench(extents=6)
    first, second = grown(bench, rows=2), grown(bench, ONE_RANK_OTHER, rows=2)
    for engine in (first, second):
        engine.end()
    bench.run()
    bench.attach(ONE_RANK)
    third = replace(POOL, slot_bytes=(SLOT_BYTES,), tensor_parallel=1, kv_cache_dtype="int8")
    bench.start(replace(HELLO, pool=third))
    assert [len(pool.extents) for pool in (first.pool, second.pool)] == [3, 2], "although it ended before the other"


def test_a_live_engine_gives_up_its_last_row_once_nothing_of_it_is_used(make_bench: MakeBench) -> None:
    bench = make_bench(extents=4)
    old = grown(bench)
    lease = old.find(last_number(old), hold=Hold.PRESENT)
    new = bench.attach(ONE_RANK_OTHER)
    new.join()
    bench.run()
    assert old.revoked == {}, "a slot is leased"
    assert not any(isinstance(pushed.message, RevokedExtents) for pushed in old.pushed)
    assert old.has(*range(4 * ROW_SLOTS)) < 4 * ROW_SLOTS, "its blocks are evicted meanwhile"
    load = old.begin_load(lease.lease_id)
    bench.run()
    assert old.revoked == {}, "a copy is under way"
    old.complete(load.op_id)
    bench.run()
    (extents,) = old.revoked.values()
    assert [old.grants[0][extent].number for extent in extents] == [3], "the other asks for one row"
    assert [(pool.granted_bytes, pool.due_bytes) for pool in (old.pool, new.pool)] == [(3 * EXTENT,) * 2, (0, EXTENT)]
    assert bench.budget.recalled_bytes == EXTENT
    assert new.grants == {}, "the worker has them mapped"
    with pytest.raises(ConflictError, match="some engines still use memory"):
        old.pool.add_extent(1)
    old.release_revoked()
    bench.run()
    new.register()
    new.report()
    assert list(new.grants[0]) == extents
    assert old.pool.extents == (ROW_SLOTS,) * 3
    assert old.store(1000).op_id


def test_a_worker_may_say_twice_that_it_has_released_an_extent(make_bench: MakeBench) -> None:
    bench = make_bench(extents=4)
    old = grown(bench)
    new = bench.attach(ONE_RANK_OTHER)
    new.join()
    bench.run()
    (revoked,) = old.revoked[0]
    old.session.released(0, (revoked, revoked))
    bench.run()
    assert list(new.grants[0]) == [revoked]


def test_a_pool_gets_its_rows_back_with_the_same_slots_only_when_all_have_let_go(make_bench: MakeBench) -> None:
    bench = make_bench(extents=4)
    old = grown(bench)
    new = bench.attach(ONE_RANK_OTHER)
    new.join()
    bench.run()
    new.lose()
    new.over()
    bench.run()
    assert len(old.pool.extents) == 3
    old.release_revoked()
    bench.run()
    old.register()
    old.store(*range(1000, 1020))
    bench.run()
    assert len(old.pool.extents) == 4
    assert {grant.number for grant in old.grants[0].values()} == {0, 1, 2, 3}
    old.register()
    assert bench.host.sessions()[0].registered_slots == 4 * ROW_SLOTS


def test_a_rank_without_memory_keeps_none_from_anybody(make_bench: MakeBench) -> None:
    bench = make_bench(extents=8)
    old = grown(bench, HELLO)
    half = bench.attach(HELLO)
    half.join(0)
    bench.run()
    assert len(half.grants[0]) == 4
    new = bench.attach(OTHER)
    new.join()
    bench.run()
    old.release_revoked()
    half.release_revoked()
    bench.run()
    assert len(new.grants[0]) == 1
    new.end()
    bench.host.delete_pool(new.answer.pool)
    bench.run()
    assert len(old.pool.extents) == 4
    assert bench.memory.figures.notices == ()


def test_a_worker_that_comes_during_a_recall_gets_nothing_of_it(make_bench: MakeBench) -> None:
    bench = make_bench(extents=4)
    old = grown(bench)
    lease = old.find(last_number(old), hold=Hold.PRESENT)
    bench.attach(ONE_RANK_OTHER).join()
    bench.run()
    late = bench.attach(ONE_RANK)
    late.join()
    bench.run()
    assert {grant.number for grant in late.grants[0].values()} == {0, 1, 2}
    late.register()
    late.report()
    old.session.release_leases([lease.lease_id])
    bench.run()
    old.release_revoked()
    bench.run()
    assert len(bench.engines[1].grants[0]) == 1, "nobody waits for the late one"


def test_who_waits_for_memory_that_which_session_holds_is_shown(make_bench: MakeBench) -> None:
    bench = make_bench(extents=4)
    old = grown(bench)
    assert not bench.memory.figures.waits
    new = bench.attach(ONE_RANK_OTHER)
    new.join()
    bench.run()
    row_bytes = ROW_SLOTS * SLOT_BYTES
    ((wait, _),) = bench.memory.figures.waits
    assert (wait.pool, wait.session) == (new.answer.pool, old.session_id)
    assert wait.num_bytes >= row_bytes
    old.release_revoked()
    bench.run()
    assert not bench.memory.figures.waits


@pytest.mark.parametrize("uses", ["lease", "load", "store"])
def test_who_uses_slots_of_recalled_memory_and_says_nothing_is_shown(make_bench: MakeBench, uses: str) -> None:
    """And not another engine of the same pool."""
    bench = make_bench(extents=4)
    silent = grown(bench)
    bench.start(ONE_RANK)
    if uses == "store":
        silent.begin_store(*range(1000, 1000 + 4 * ROW_SLOTS))
    else:
        found = silent.find(last_number(silent), hold=Hold.PRESENT)
        if uses == "load":
            silent.begin_load(found.lease_id)
    new = bench.attach(ONE_RANK_OTHER, uid=2000)
    new.join()
    bench.run()
    ((wait, _),) = bench.memory.figures.waits
    assert (wait.pool, wait.session) == (new.answer.pool, silent.session_id)
    assert wait.num_bytes >= EXTENT


def test_a_worker_that_lies_about_letting_go_does_not_make_the_node_larger(make_bench: MakeBench) -> None:
    bench = make_bench(extents=4)
    liar = grown(bench, keeps_fds=True)
    assert len(liar.kept) == 4
    assert all(is_open_elsewhere(extent.fd) for extent in bench.memory.memory.extents.values())
    honest = bench.attach(ONE_RANK_OTHER, uid=2000)
    honest.join()
    bench.run()
    liar.release_revoked()
    bench.run()
    ((found, _),) = bench.memory.figures.kept
    assert (found.sessions, found.num_bytes) == ((liar.session_id,), EXTENT)
    assert (honest.grants, len(bench.memory.memory.extents)) == ({}, 3), "nothing takes its place"
    liar.release_revoked()
    bench.run()
    assert honest.grants == {}, "it keeps that, too"
    close_fds(liar.kept)
    bench.memory.check()
    bench.run()
    assert len(honest.grants[0]) == 1
    assert (bench.memory.figures.kept, bench.memory.figures.allocated_bytes) == ((), 4 * EXTENT)


def test_memory_that_an_engine_keeps_after_it_has_detached_names_its_session(make_bench: MakeBench) -> None:
    bench = make_bench(extents=4)
    liar = bench.start(ONE_RANK, keeps_fds=True)
    bench.run()
    liar.detach()
    bench.run()
    assert bench.host.sessions() == []
    honest = grown(bench, ONE_RANK_OTHER, uid=2000, rows=3)
    ((found, _),) = bench.memory.figures.kept
    assert (found.sessions, found.num_bytes) == ((liar.session_id,), EXTENT)
    assert len(honest.pool.extents) == 3, "all that there is without it"
    close_fds(liar.kept)
    bench.memory.check()
    bench.run()
    assert bench.memory.figures.kept == ()
    assert len(honest.pool.extents) == 4


def test_of_the_processes_that_have_detached_only_so_many_of_a_user_are_watched(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memorythread, "MOST_DEPARTED", 8)
    bench = make_bench(extents=4)
    stays = bench.start(ONE_RANK)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(6):
        bench.start(ONE_RANK).detach()
        bench.run()
    assert len(os.listdir("/proc/self/fd")) - before == 4
    assert len(bench.budget.clients()) == 5, "the others are believed"
    stays.end()


def test_a_process_that_detaches_at_the_end_of_the_service_leaves_no_descriptor(make_bench: MakeBench) -> None:
    """Its pidfd waits for the thread of the memory. `make_bench` counts the descriptors."""
    make_bench().start(ONE_RANK).detach()
