from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.attach.test_identity import NAMESPACE_CHANGES, POOL_CHANGES
from tests.service.node.hostbench import EXTENT, ROW_SLOTS, Engine, HostBench
from tests.service.node.rawengine import HELLO, NAMESPACE, POOL, SLOT_BYTES, key_of

from kvstow.attach.calls import Completions, Hold
from kvstow.attach.extentcalls import ExtentBytes, ExtentSlots, GrantedExtents, PopulatedExtents, RevokedExtents
from kvstow.attach.identity import GroupIdentity, RegionIdentity
from kvstow.errors import AttachRefusedError, ConflictError, InvalidRequestError, LeaseError, NotFoundError, PinError
from kvstow.memory.extents import Extent
from kvstow.messages import Completion
from kvstow_service.node.pools.nodepool import PoolSettings

MakeBench = Callable[..., HostBench]
OTHER = replace(HELLO, pool=replace(POOL, kv_cache_dtype="fp8"))
ONE_RANK = replace(HELLO, pool=replace(POOL, slot_bytes=(SLOT_BYTES,), tensor_parallel=1))
ONE_RANK_OTHER = replace(
    ONE_RANK, pool=replace(POOL, slot_bytes=(SLOT_BYTES,), tensor_parallel=1, kv_cache_dtype="fp8")
)


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[MakeBench]:
    """Benches that are closed at the end; none leaves a descriptor open."""
    before = len(os.listdir("/proc/self/fd"))
    made: list[HostBench] = []

    def make(**options: Any) -> HostBench:
        made.append(HostBench(tmp_path, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def bench(make_bench: MakeBench) -> HostBench:
    return make_bench()


# -- who shares what ---------------------------------------------------------------------------------------------------


def test_engines_with_equal_identities_share_blocks(bench: HostBench) -> None:
    first, second = bench.start(), bench.start()
    first.store(1, 2)
    assert second.has(1, 2) == 2
    assert (second.answer.pool, second.answer.namespace) == (first.answer.pool, first.answer.namespace)
    assert second.answer.sharing_off == ()
    assert first.answer.pool.startswith("model-1-")
    assert second.store(1, 2).outcomes == {"skipped_already_cached": 2}


POOLS = {name: value for name, value in POOL_CHANGES.items() if name != "uid"} | {
    "slot_bytes": (SLOT_BYTES, 2 * SLOT_BYTES),
    "regions": (RegionIdentity("layer.1", SLOT_BYTES),),
    "groups": (GroupIdentity("full", 32, 16),),
}


@pytest.mark.parametrize("field", POOLS)
def test_engines_of_unlike_layouts_share_nothing(bench: HostBench, field: str) -> None:
    first = bench.start()
    first.store(1)
    hello = replace(HELLO, pool=replace(POOL, **{field: POOLS[field]}))
    second = bench.attach(hello)
    assert second.answer.pool != first.answer.pool
    (reason,) = second.answer.sharing_off
    assert reason.startswith(f"not shared with pool {first.answer.pool}: {field}")
    assert second.pool is not first.pool


@pytest.mark.parametrize("field", NAMESPACE_CHANGES)
def test_engines_for_which_keys_mean_something_else_share_no_blocks(bench: HostBench, field: str) -> None:
    first = bench.start()
    first.store(1)
    second = bench.start(replace(HELLO, namespace=replace(NAMESPACE, **{field: NAMESPACE_CHANGES[field]})))
    assert second.pool is first.pool
    assert second.answer.namespace != first.answer.namespace
    assert second.has(1) == 0
    if field == "unshared":
        assert second.answer.sharing_off == (NAMESPACE_CHANGES[field],)
    elif field != "model":
        (reason,) = second.answer.sharing_off
        assert f"namespace {first.answer.namespace}: {field}" in reason
    second.store(1)
    first_slots = {slot for slot, _ in first.pool.index.slot_keys.between(0, 100)}
    assert len(first_slots) == 2, "each has a block of its own"


def test_engines_that_hash_differently_are_told_what_to_do(bench: HostBench) -> None:
    first = bench.start()
    first.store(1)
    first.end()
    bench.run()
    second = bench.attach(replace(HELLO, namespace=replace(NAMESPACE, hash_probe="other")))
    assert "PYTHONHASHSEED" in second.answer.sharing_off[0]
    with pytest.raises(AttachRefusedError, match="PYTHONHASHSEED") as refused:
        bench.attach(replace(HELLO, namespace=replace(NAMESPACE, hash_probe="third")), require_sharing=True)
    assert refused.value.reason == "sharing_off"
    assert len(bench.host.sessions()) == 1
    assert second.pool.num_sessions == 1


def test_users_share_nothing_unless_the_service_says_so(make_bench: MakeBench) -> None:
    apart, together = make_bench(), make_bench(share_across_uids=True)
    mine, theirs = apart.start(uid=1000), apart.start(uid=1001)
    mine.store(1)
    assert theirs.has(1) == 0
    assert theirs.pool is not mine.pool
    assert "--share-across-uids" in theirs.answer.sharing_off[0]
    mine, theirs = together.start(uid=1000), together.start(uid=1001)
    mine.store(1)
    assert theirs.has(1) == 1


def test_the_uid_is_the_kernel_s_and_not_the_hello_s(bench: HostBench) -> None:
    mine = bench.start(uid=1000)
    theirs = bench.start(replace(HELLO, pool=replace(POOL, uid=1000)), uid=1001)
    assert theirs.pool is not mine.pool


def test_memory_of_one_user_goes_to_another_only_as_fresh_memory(make_bench: MakeBench) -> None:
    bench = make_bench(extents=1)
    mine = bench.start(ONE_RANK, uid=1000)
    before = {inode for pushed in mine.pushed for inode in pushed.inodes}
    mine.end()
    theirs = bench.start(ONE_RANK, uid=1001)
    after = {inode for pushed in theirs.pushed for inode in pushed.inodes}
    assert after
    assert not before & after


def test_a_reset_moves_one_session_only(bench: HostBench) -> None:
    first, second = bench.start(), bench.start()
    first.store(1)
    name = bench.host.reset(first.session_id).namespace
    assert name.startswith(f"{first.answer.namespace}@")
    assert (first.has(1), second.has(1)) == (0, 1)
    first.store(1)
    third = bench.start()
    assert third.answer.namespace == second.answer.namespace
    found = {one.name: one for one in bench.host.namespaces()}
    assert found[name].sharing_off[0].startswith("the engine has reset its cache")
    assert (found[name].sessions, found[name].blocks, found[name].weights_id) == (1, 1, "w")
    assert (found[second.answer.namespace].sessions, found[second.answer.namespace].sharing_off) == (2, ())


def test_replicated_blocks_are_stored_by_rank_0_alone(bench: HostBench) -> None:
    engine = bench.start(replace(HELLO, pool=replace(POOL, replicated=True)))
    begun = engine.begin_store(1)
    engine.complete(begun.op_id, ranks=[0])
    bench.run()
    assert engine.settled == {begun.op_id: ["done"]}
    assert engine.has(1) == 1


def test_replicated_ranks_have_the_same_memory(make_bench: MakeBench) -> None:
    """What rank 0 stores is what the others load, and it takes memory once."""
    bench = make_bench(extents=3)
    engine = bench.start(replace(HELLO, pool=replace(POOL, replicated=True)), wanted_bytes=3 * EXTENT)
    for first in (0, ROW_SLOTS):
        begun = engine.begin_store(*range(first, first + ROW_SLOTS))
        engine.complete(begun.op_id, ranks=[0])
        bench.run()
        engine.register()
        bench.run()
    assert len(engine.grants[0]) == 3
    assert engine.grants[0] == engine.grants[1]
    inodes = [[pushed.inodes for pushed in engine.pushed if pushed.rank == rank and pushed.inodes] for rank in (0, 1)]
    assert inodes[0] == inodes[1]
    assert bench.memory.allocated_bytes == 3 * EXTENT
    assert engine.pool.capacity == 3 * ROW_SLOTS
    assert engine.has(*range(2 * ROW_SLOTS)) == 2 * ROW_SLOTS


def test_replicated_ranks_both_hear_what_is_populated(bench: HostBench) -> None:
    bench.starts_populated = False
    extents = [extent for number in range(1, 9) if (extent := bench.memory.memory.extent(number)) is not None]
    for extent in extents:
        extent.populated_bytes = 0
    engine = bench.attach(replace(HELLO, pool=replace(POOL, replicated=True)))
    engine.join()
    bench.run()
    for extent in extents:
        extent.populated_bytes = EXTENT // 2
    bench.run()
    (number,) = engine.grants[1]
    expected = PopulatedExtents((ExtentBytes(number, EXTENT // 2),))
    assert [pushed.rank for pushed in engine.pushed if pushed.message == expected] == [0, 1]


@pytest.mark.parametrize(
    ("pool", "says"),
    [
        (replace(POOL, slot_bytes=()), "slot_bytes has 0 entries"),
        (replace(POOL, slot_bytes=(0, 0)), "slot_bytes is 0"),
        (replace(POOL, slot_bytes=(1,) * 1025), "1025 entries"),
        (replace(POOL, slot_bytes=(4096, 8192), replicated=True), "replicated ranks have slots of"),
        (replace(POOL, slot_bytes=(1 << 30, 1)), "one slot on all ranks takes 1.002 GiB.*--memory"),
    ],
)
def test_layouts_that_cannot_be_are_refused(bench: HostBench, pool: Any, says: str) -> None:
    with pytest.raises(AttachRefusedError, match=says):
        bench.attach(replace(HELLO, pool=pool))
    bench.run()
    assert bench.host.pools() == []
    assert bench.host.sessions() == []


# -- memory on demand --------------------------------------------------------------------------------------------------


def test_a_pool_gets_memory_when_all_ranks_are_there_and_more_as_it_fills(bench: HostBench) -> None:
    engine = bench.attach()
    engine.join(0)
    bench.run()
    assert engine.grants == {}
    engine.join(1)
    bench.run()
    assert [len(engine.grants[rank]) for rank in (0, 1)] == [1, 1]
    engine.register()
    engine.report()
    engine.store(0)
    bench.run()
    assert engine.pool.extents == (ROW_SLOTS, ROW_SLOTS), "one row is always ahead"
    engine.register()
    for start in range(1, ROW_SLOTS, 4):
        engine.store(*range(start, start + 4))
    bench.run()
    assert len(engine.pool.extents) == 3
    grants = sorted(engine.grants[0].values(), key=lambda grant: grant.number)
    assert [(grant.number, grant.first_slot, grant.num_slots) for grant in grants] == [
        (number, number * ROW_SLOTS, ROW_SLOTS) for number in range(3)
    ]


def test_a_pool_gets_no_more_than_its_engines_ask_for(bench: HostBench) -> None:
    engine = bench.start(wanted_bytes=2 * SLOT_BYTES * (ROW_SLOTS + 5))
    for start in range(0, 60, 4):
        engine.store(*range(start, start + 4))
        bench.run()
        engine.register()
    assert engine.pool.extents == (ROW_SLOTS, 5)
    assert bench.memory.spare_bytes > 0
    other = bench.start()
    other.store(*range(100, 108))
    bench.run()
    assert other.pool.extents == (ROW_SLOTS, 5, ROW_SLOTS), "the larger wins"


def test_a_second_engine_gets_all_that_the_pool_has(bench: HostBench) -> None:
    first = bench.start()
    first.store(1)
    bench.run()
    second = bench.attach()
    second.join(1)
    bench.run()
    assert [grant.number for grant in second.grants[1].values()] == [0, 1]
    assert second.grants[1].keys() == first.grants[1].keys()


def test_descriptors_come_in_frames_of_at_most_250(make_bench: MakeBench) -> None:
    bench = make_bench(extents=260)
    engine = bench.start(ONE_RANK)
    bench.budget.want(engine.pool.name, None)
    bench.memory.retry()
    bench.run()
    late = bench.start(ONE_RANK)
    sizes = [len(pushed.inodes) for pushed in late.pushed if isinstance(pushed.message, GrantedExtents)]
    assert sizes == [250, 10]


def test_ranks_of_unlike_slots_have_as_many_of_them(bench: HostBench) -> None:
    sizes = (SLOT_BYTES, 2 * SLOT_BYTES)
    engine = bench.attach(replace(HELLO, pool=replace(POOL, slot_bytes=sizes)))
    engine.join()
    bench.run()
    granted = {pushed.rank: pushed.message for pushed in engine.pushed if isinstance(pushed.message, GrantedExtents)}
    assert {rank: message.slot_stride for rank, message in granted.items()} == dict(enumerate(sizes))
    for rank in (0, 1):
        (grant,) = engine.grants[rank].values()
        assert (grant.first_slot, grant.num_slots, grant.num_bytes) == (0, ROW_SLOTS // 2, EXTENT)


def test_devices_numa_nodes_decide_where_memory_is_made(bench: HostBench) -> None:
    engine = bench.attach()
    engine.join(0, numa_node=1)
    engine.join(1)
    bench.run()
    assert [rank.numa_node for rank in bench.budget.layout(engine.pool.name).ranks] == [1, None]


def test_slots_are_shown_as_they_are_populated_and_registered(make_bench: MakeBench) -> None:
    bench = make_bench(starts_populated=False)
    engine = bench.attach()
    engine.join()
    bench.run()
    engine.report()
    assert bench.host.sessions()[0].status.state == "attaching"
    assert engine.begin_store(1).outcomes == {"dropped_not_ready": 1}
    (row,) = bench.budget.rows(engine.pool.name).values()
    first, second = (bench.memory.memory.extent(number) for number in row.extents)
    assert first is not None
    assert second is not None
    first.populated_bytes, second.populated_bytes = 2 * SLOT_BYTES, 3 * SLOT_BYTES
    bench.run()
    assert engine.pool.slots.limit == 2
    first.populated_bytes = 8 * SLOT_BYTES
    bench.run()
    assert engine.populated == {row.extents[0]: 8 * SLOT_BYTES, row.extents[1]: 3 * SLOT_BYTES}
    assert engine.pool.slots.limit == 3
    assert engine.begin_store(1).outcomes == {"dropped_not_ready": 1}
    engine.register()
    assert bench.host.sessions()[0].status.state == "attached"
    begun = engine.begin_store(*range(5))
    assert sorted(begun.slots) == [0, 1, 2]


def test_an_engine_sees_nothing_above_what_it_has_registered(bench: HostBench) -> None:
    first = bench.start()
    first.store(*range(10))
    second = bench.attach()
    second.join()
    bench.run()
    second.report()
    assert second.has(*range(10)) == 0
    second.register(limit=4)
    assert second.has(*range(10)) == 4
    assert max(second.begin_store(100, 101).slots, default=0) < 4
    second.register()
    assert second.has(*range(4, 10)) == 6


def test_a_rank_that_registers_less_than_before_sees_less(bench: HostBench) -> None:
    engine = bench.start()
    engine.store(*range(10))
    lease = engine.find(9, hold=Hold.PRESENT)
    (extent,) = engine.grants[0]
    bench.host.extents_registered(engine.session_id, 0, [ExtentSlots(extent, 4)])
    assert engine.has(*range(10)) == 4
    with pytest.raises(LeaseError, match="broken"):
        engine.begin_load(lease.lease_id)


# -- memory that goes --------------------------------------------------------------------------------------------------


def grown(bench: HostBench, hello: Any = ONE_RANK, rows: int = 4, **fields: Any) -> Engine:
    """An engine whose pool is full."""
    engine = bench.start(hello, **fields)
    for start in range(0, rows * ROW_SLOTS, 8):
        engine.store(*range(start, start + 8))
        bench.run()
        engine.register()
    assert len(engine.pool.extents) >= rows
    return engine


def last_number(engine: Engine) -> int:
    """Of the block in the pool's last slot."""
    last = sum(engine.pool.extents) - 1
    ((_, key),) = engine.pool.index.slot_keys.between(last, last + 1)
    return int.from_bytes(key, "big")


def test_memory_of_a_pool_without_sessions_goes_to_a_new_one(make_bench: MakeBench) -> None:
    bench = make_bench(extents=4)
    old = grown(bench)
    old.end()
    bench.run()
    new = bench.start(ONE_RANK_OTHER)
    assert len(new.pool.extents) == 1
    assert old.pool.extents == (ROW_SLOTS,) * 3, "the last row went"
    again = bench.start(ONE_RANK)
    assert again.has(*range(4 * ROW_SLOTS)) == 3 * ROW_SLOTS


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


def test_an_extent_changes_hands_only_after_every_worker_has_let_go(make_bench: MakeBench) -> None:
    bench = make_bench(extents=4)
    first = grown(bench)
    second = bench.start(ONE_RANK)
    bench.run()
    assert len(second.grants[0]) == 4
    mapped = {grant.number: extent for extent, grant in second.grants[0].items()}
    first.end()
    second.lose()
    new = bench.attach(ONE_RANK_OTHER)
    new.join()
    bench.run()
    assert bench.memory.recalled_bytes > 0
    assert new.grants == {}
    assert bench.budget.mappers(mapped[3]) == [second.client(0)]
    second.let_go()
    second.over()
    bench.run()
    assert list(new.grants[0]) == [mapped[3]]


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
    assert bench.host.sessions()[0].status.registered_slots == 4 * ROW_SLOTS


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
    assert bench.memory.notices == ()


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
    bench.host.release_leases(old.session_id, [lease.lease_id])
    bench.run()
    old.release_revoked()
    bench.run()
    assert len(bench.engines[1].grants[0]) == 1, "nobody waits for the late one"


def test_protected_blocks_keep_memory_and_the_reason_is_shown(make_bench: MakeBench) -> None:
    bench = make_bench(extents=4)
    old = grown(bench)
    old.pool.facade.admin.protect([key_of(number) for number in range(4 * ROW_SLOTS)], None)
    new = bench.attach(ONE_RANK_OTHER)
    new.join()
    bench.run()
    (notice,) = bench.memory.notices
    assert notice.startswith(f"memory of pool {old.pool.name} is recalled, but {ROW_SLOTS} protected blocks")
    old.pool.facade.admin.unprotect(None)
    bench.run()
    old.release_revoked()
    bench.run()
    assert len(new.grants[0]) == 1
    assert bench.memory.notices == ()


def test_a_worker_whose_descriptors_cannot_be_sent_gets_them_later(bench: HostBench) -> None:
    engine = bench.attach(ONE_RANK)
    engine.refuses_fds = True
    engine.join()
    bench.run()
    (row,) = bench.budget.rows(engine.pool.name).values()
    assert bench.budget.mappers(row.extents[0]) == [f"pool {engine.pool.name}"], "no worker has it"
    assert "Too many open files" in bench.memory.failures[0]
    engine.refuses_fds = False
    bench.run()
    assert bench.memory.failures == ()
    engine.register()
    assert bench.host.sessions()[0].status.registered_slots == ROW_SLOTS


def test_a_session_that_is_lost_before_its_memory_is_sent_leaves_nothing(bench: HostBench) -> None:
    engine = bench.attach(ONE_RANK)
    engine.join()
    bench.run_memory()
    engine.lose()
    engine.over()
    bench.run()
    (row,) = bench.budget.rows(engine.pool.name).values()
    assert bench.budget.mappers(row.extents[0]) == [f"pool {engine.pool.name}"]
    assert bench.host.sessions() == []
    other = bench.attach(ONE_RANK)
    other.join()
    other.lose()
    bench.run()
    other.over()
    bench.run()
    assert bench.budget.mappers(row.extents[0]) == [f"pool {engine.pool.name}"]


def test_an_operator_does_not_resize_a_pool(bench: HostBench) -> None:
    engine = bench.start()
    with pytest.raises(ConflictError, match="--memory"):
        engine.pool.facade.admin.resize(1)


# -- foreign and false words -------------------------------------------------------------------------------------------


def test_ops_and_leases_of_others_are_refused(bench: HostBench) -> None:
    mine, theirs = bench.start(), bench.start()
    theirs.store(1)
    op = theirs.begin_store(2)
    lease = theirs.find(1, hold=Hold.PRESENT)
    mine.complete(op.op_id)
    assert theirs.has(2) == 0
    assert mine.pool.facade.stats().faults.stale_completions == 2
    with pytest.raises(LeaseError, match="released or used up"):
        mine.begin_load(lease.lease_id)
    bench.host.release_leases(mine.session_id, [lease.lease_id, 12345])
    assert theirs.begin_load(lease.lease_id).slots
    theirs.complete(op.op_id)
    assert theirs.has(2) == 1


def test_words_of_a_former_boot_are_ignored(bench: HostBench) -> None:
    engine = bench.start()
    op = engine.begin_store(1)
    for rank in (0, 1):
        bench.host.complete(engine.session_id, Completions(rank, "older", (Completion(op.op_id, "done"),)))
    assert engine.has(1) == 0


def test_a_rank_that_boots_again_fails_the_ops_of_its_session_alone(bench: HostBench) -> None:
    engine, other = bench.start(), bench.start()
    engine.store(1)
    op, theirs = engine.begin_store(2), other.begin_store(3)
    engine.report(0, boot="b2")
    bench.run()
    assert engine.settled.get(op.op_id) is None, "rank 1 may still write"
    engine.complete(op.op_id, ranks=[1])
    bench.run()
    assert engine.settled[op.op_id] == ["failed"]
    other.complete(theirs.op_id)
    assert other.has(1, 3) == 2


def test_extents_that_a_worker_was_not_sent_are_refused(bench: HostBench) -> None:
    engine, other = bench.start(ONE_RANK), bench.start(ONE_RANK_OTHER)
    (mine,), (foreign,) = engine.grants[0], other.grants[0]
    for extents, says in (
        ([ExtentSlots(foreign, 1)], "is none that this worker was sent"),
        ([ExtentSlots(mine, 1), ExtentSlots(9999, 1)], "is none that this worker was sent"),
        ([ExtentSlots(mine, ROW_SLOTS + 1)], "its 32 slots at most"),
    ):
        with pytest.raises(InvalidRequestError, match=says):
            bench.host.extents_registered(engine.session_id, 0, extents)
    with pytest.raises(InvalidRequestError, match="is none that this worker was sent"):
        bench.host.extents_released(engine.session_id, 0, [foreign])
    with pytest.raises(InvalidRequestError, match="was not revoked"):
        bench.host.extents_released(engine.session_id, 0, [mine])
    bench.run()
    assert engine.client(0) in bench.budget.mappers(mine)
    assert bench.host.sessions()[0].status.registered_slots == ROW_SLOTS


def test_memory_that_an_engine_hands_back_is_closed(bench: HostBench) -> None:
    engine = bench.start(ONE_RANK)
    reader, writer = os.pipe()
    assert bench.host.take_back(engine.session_id, 0, [], [reader, writer]) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(writer)
    assert bench.host.given_up_extents == 2


def test_only_the_very_extent_that_the_rank_has_is_kept(bench: HostBench) -> None:
    engine = bench.start()
    (mine,), (of_other_rank,) = engine.grants[0], engine.grants[1]
    own, other = bench.memory.memory.extent(mine), bench.memory.memory.extent(of_other_rank)
    assert own is not None
    assert other is not None
    offers = [(mine, own.fd), (mine, other.fd), (of_other_rank, other.fd), (9999, own.fd)]
    extents, fds = [ExtentBytes(one, 0) for one, _ in offers], [os.dup(fd) for _, fd in offers]
    assert bench.host.take_back(engine.session_id, 0, extents, fds) == [mine, 9999], "under whatever number it has it"
    assert (bench.host.kept_extents, bench.host.given_up_extents) == (2, 2)


# -- ends of sessions --------------------------------------------------------------------------------------------------


def test_slots_of_a_lost_session_are_free_when_its_last_worker_has_let_go(bench: HostBench) -> None:
    engine = bench.start()
    engine.store(1)
    engine.begin_store(2)
    engine.find(1, hold=Hold.PRESENT)
    engine.lose()
    slots = engine.pool.facade.stats().pool.slots
    assert (slots.quarantined, slots.leased) == (1, 1)
    engine.let_go(0)
    slots = engine.pool.facade.stats().pool.slots
    assert (slots.quarantined, slots.leased) == (1, 1), "the other rank may still write"
    (session,) = bench.host.sessions()
    assert (session.status.state, session.status.processes) == ("lost", 1)
    engine.let_go(1)
    engine.over()
    slots = engine.pool.facade.stats().pool.slots
    assert (slots.quarantined, slots.leased, slots.cached) == (0, 0, 1)
    assert bench.host.sessions() == []


def test_stuck_transfers_are_shown_and_nothing_is_freed_by_time(make_bench: MakeBench) -> None:
    bench = make_bench(settings=PoolSettings(transfer_timeout=10.0))
    engine, other = bench.start(), bench.start()
    op = engine.begin_store(1)
    bench.clock.advance(10_000.0)
    for one in (engine, other):
        one.report()
    bench.host.tick()
    bench.host.send_settled()
    bench.run()
    assert engine.settled == {op.op_id: ["failed"]}
    states = {session.session_id: session.status.state for session in bench.host.sessions()}
    assert states == {engine.session_id: "stuck", other.session_id: "attached"}
    assert engine.pool.facade.stats().pool.slots.quarantined == 1
    assert other.store(2).op_id


def test_a_pool_is_deleted_only_without_sessions(bench: HostBench) -> None:
    engine = bench.start()
    engine.store(1)
    name = engine.pool.name
    engine.lose()
    with pytest.raises(ConflictError, match=rf"pool {name} has sessions \({engine.session_id}\)"):
        bench.host.delete_pool(name)
    engine.let_go()
    engine.over()
    bench.run()
    bench.host.delete_pool(name)
    with pytest.raises(NotFoundError, match="there are: none"):
        bench.host.delete_pool(name)
    again = bench.start()
    assert again.answer.pool == name
    assert again.has(1) == 0
    bench.run()
    assert bench.memory.allocated_bytes == 8 * EXTENT


def test_a_pool_without_sessions_and_memory_is_forgotten(make_bench: MakeBench) -> None:
    bench = make_bench(extents=2)
    old = bench.start(ONE_RANK)
    old.end()
    bench.run()
    assert len(bench.host.pools()) == 1, "its memory may be of use again"
    new = grown(bench, ONE_RANK_OTHER, rows=2)
    assert bench.host.pools() == [new.pool]
    attached = bench.attach()
    attached.lose()
    attached.over()
    bench.run()
    assert bench.host.pools() == [new.pool]


def test_memory_that_the_machine_refuses_is_shown_and_tried_again(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Extent:
        raise PinError("out_of_memory", "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Extent, "create", refuse)
        bench = make_bench()
        engine = bench.attach()
        engine.join()
        bench.run()
        assert engine.grants == {}
        assert bench.memory.memory.error is not None
    bench.memory.retry()
    bench.run()
    assert len(engine.grants[0]) == 1


def test_drain_of_the_node_holds_in_pools_to_come(bench: HostBench) -> None:
    bench.host.switches.drain("stop_stores", None)
    engine = bench.start()
    assert engine.store(1).outcomes == {"dropped_draining": 1}
    bench.host.switches.undrain()
    assert engine.store(1).op_id


def test_at_the_end_workers_are_asked_to_let_go_of_all_memory_and_get_none(bench: HostBench) -> None:
    first = bench.start()
    assert set(first.grants) == {0, 1}
    ended: list[bool] = []
    bench.memory.revoke_all(lambda: ended.append(True))
    late = bench.attach()
    late.join()
    bench.run()
    assert ended == [True]
    assert {rank: set(extents) for rank, extents in first.revoked.items()} == {
        rank: set(grants) for rank, grants in first.grants.items()
    }
    assert late.grants == {}
