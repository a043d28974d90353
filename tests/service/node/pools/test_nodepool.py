"""Which engines share a pool, and which of them share blocks."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.engine.attach.test_identity import NAMESPACE_CHANGES, POOL_CHANGES
from tests.service.node.conftest import MakeBench
from tests.service.node.hostbench import ROW_SLOTS, HostBench
from tests.service.node.rawengine import HELLO, NAMESPACE, POOL, SLOT_BYTES
from tests.service.node.wholenode import EXTENT

from kvstow.attach.calls import ExtentBytes, PopulatedExtents
from kvstow.attach.identity import GroupIdentity, RegionIdentity
from kvstow.errors import AttachRefusedError

OTHER = replace(HELLO, pool=replace(POOL, kv_cache_dtype="fp8"))


def name_after_reset(bench: HostBench, session_id: str) -> str:
    done = bench.host.reset(session_id)
    assert done is not None, "there is no store below the pools that it waits for"
    return done.namespace


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


def test_users_share_nothing(bench: HostBench) -> None:
    mine, theirs = bench.start(uid=1000), bench.start(uid=1001)
    mine.store(1)
    assert theirs.has(1) == 0
    assert theirs.pool is not mine.pool
    assert theirs.answer.sharing_off == (f"not shared with pool {mine.pool.name}: its engines run as another user",)


def test_the_uid_is_the_kernel_s_and_not_the_hello_s(bench: HostBench) -> None:
    mine = bench.start(uid=1000)
    theirs = bench.start(replace(HELLO, pool=replace(POOL, uid=1000)), uid=1001)
    assert theirs.pool is not mine.pool


def test_a_reset_moves_one_session_only(bench: HostBench) -> None:
    first, second = bench.start(), bench.start()
    first.store(1)
    name = name_after_reset(bench, first.session_id)
    assert name.startswith(f"{first.answer.namespace}@")
    assert (first.has(1), second.has(1)) == (0, 1)
    found = {one.name: one for one in bench.host.namespaces()}
    assert found[name].sharing_off[0].startswith("the engine has reset its cache")
    assert (found[name].sessions, found[second.answer.namespace].sessions) == (1, 1)
    assert found[second.answer.namespace].sharing_off == ()


def test_nobody_joins_the_namespace_of_a_reset(bench: HostBench) -> None:
    """Also when it is the only one: the pool forgets the one before, in which nothing was stored."""
    first = bench.start()
    name = name_after_reset(bench, first.session_id)
    first.store(1)
    second = bench.start()
    assert second.answer.namespace != name
    assert second.has(1) == 0
    assert second.answer.sharing_off == ()


def test_an_engine_that_resets_its_cache_again_and_again_leaves_nothing_behind(bench: HostBench) -> None:
    engine, neighbour = bench.start(), bench.start()
    (pool,) = bench.host.pools()
    for number in range(500):
        engine.store(number)
        name = name_after_reset(bench, engine.session_id)
    in_use = {one.name for one in pool.namespaces()}
    assert {name, neighbour.answer.namespace} <= in_use
    assert len(in_use) < 100, "the others' blocks were evicted"
    assert len(set(pool.known) - in_use) <= 1, "what the last reset has ended"
    assert bench.start().answer.namespace == neighbour.answer.namespace


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
    assert bench.memory.figures.allocated_bytes == 3 * EXTENT
    assert engine.pool.capacity == 3 * ROW_SLOTS
    assert engine.has(*range(2 * ROW_SLOTS)) == 2 * ROW_SLOTS


def test_replicated_ranks_both_hear_what_is_populated(bench: HostBench) -> None:
    bench.starts_populated = False
    extents = [extent for number in range(1, 9) if (extent := bench.memory.memory.extents.get(number)) is not None]
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
        (replace(POOL, slot_bytes=(1,) * 65), "65 entries"),
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
