"""The store below the pools of a whole node; the store is in this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from msgspec.structs import replace
from tests.doubles.memoryblockstore import MemoryBlockStore, MemoryStoredPool
from tests.service.node.conftest import Engines
from tests.service.node.conftest import MakeWholeNode as MakeNode
from tests.service.node.rawengine import HELLO, NAMED, NAMESPACE, POOL, SLOT_BYTES, RawEngine, key_of, keys_of
from tests.service.node.wholenode import EXTENT
from tests.waiting import eventually

from kvstow.attach.calls import Detach, Found, Hold, Lookup, LookupPrompt, Prefill, Reset, ResetDone
from kvstow.hints import Hints, context_id
from kvstow.keys import make_key
from kvstow.tier.blockstore import Purged
from kvstow_service.node.node import Node
from kvstow_service.node.tier.nodestore import NodeStore

ROW_SLOTS = EXTENT // SLOT_BYTES
ONE_RANK = replace(NAMED, pool=replace(POOL, slot_bytes=(SLOT_BYTES,), tensor_parallel=1))

_stores: WeakKeyDictionary[Node, MemoryBlockStore] = WeakKeyDictionary()


@pytest.fixture
def make_node(make_whole_node: MakeNode, patient: None) -> MakeNode:
    """They are started, and use a store, for which they wait as long as it takes."""

    def make(*, store: MemoryBlockStore | None = None, **options: Any) -> Node:
        stores = store or MemoryBlockStore()
        node = make_whole_node(store=stores, **options)
        _stores[node] = stores
        node.start()
        return node

    return make


def node_store(node: Node) -> NodeStore:
    assert node.tier is not None
    return node.tier


def store_of(node: Node) -> MemoryBlockStore:
    return _stores[node]


def only_pool(node: Node) -> Any:
    (pool,) = node.host.pools()
    return pool


def leave(engine: RawEngine) -> None:
    """Its only worker says that nothing of the pool is mapped or under way in it, as this process goes on."""
    (worker,) = engine.workers
    worker.connection.close(Detach("done"))


def elsewhere(make_node: MakeNode, engines: Engines, keys: list[bytes], hello: Any = NAMED) -> MemoryBlockStore:
    """A store in which another node has these blocks."""
    node = make_node()
    engine = engines(node, hello)
    engine.store_until_found(keys)
    engine.wait_for(lambda: written_by(engine, store_of(node), keys))
    return MemoryBlockStore(shares=store_of(node))


def written_by(engine: RawEngine, store: MemoryBlockStore, keys: list[bytes]) -> bool:
    """Whether all of them are in the store; a request uses them again, as some may have had to wait."""
    engine.use(keys)
    return len(store.blocks) >= len(keys)


def looked_up(engine: RawEngine, node: Node, keys: list[bytes]) -> Any:
    """A look-up that waits for the store, which holds its reads."""
    calls = [engine.scheduler.call(Lookup(keys))]

    def has_begun() -> bool:
        if calls[-1].done:
            calls.append(engine.scheduler.call(Lookup(keys)))
        return any(pool.reads for pool in store_of(node).pools)

    engine.wait_for(has_begun)
    return calls[-1]


# -- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers_later", [False, True])
def test_what_one_node_has_stored_another_one_hits(
    make_node: MakeNode, engines: Engines, *, answers_later: bool
) -> None:
    keys = keys_of(0, 10)
    store = elsewhere(make_node, engines, keys)
    store.answers_later = answers_later
    there = make_node(store=store)
    engine = engines(there, NAMED)
    engine.wait_for(lambda: engine.load(keys) == 10)  # every byte of both ranks is verified
    engine.wait_for(lambda: only_pool(there).facade.stats().pool.slots.cached == 10)  # its leases have ended
    only_pool(there).facade.check_integrity()


def test_an_answer_says_which_blocks_the_store_has_brought(make_node: MakeNode, engines: Engines) -> None:
    store = elsewhere(make_node, engines, keys_of(0, 6))
    store.held = {"read"}
    node = make_node(store=store)
    engine = engines(node, NAMED)
    engine.store_until_found(keys_of(0, 2))
    engine.wait_for(lambda: engine.lookup(keys_of(0, 2)).leading == 2)
    found = looked_up(engine, node, keys_of(0, 6))
    store.release()
    engine.wait_for(lambda: found.done)
    assert (found.unpack(Found).runs, found.unpack(Found).fetched) == (((0, 6),), ((2, 4),))
    assert engine.lookup(keys_of(0, 6)).fetched == (), "by now they are in host memory"
    assert [one.hit_blocks for one in node_store(node).totals().values()] == [4]


WINDOW = replace(POOL.groups[0], kind="window a", window=40)
WINDOWED = replace(NAMED, pool=replace(POOL, groups=(*POOL.groups, WINDOW)))
"""A window of two blocks and a half."""


def test_of_several_groups_what_a_hit_needs_is_read(make_node: MakeNode, engines: Engines) -> None:
    full = [make_key(0, key_of(number)[2:]) for number in range(8)]
    window = [make_key(3, key_of(number)[2:]) for number in range(8)]  # groups of scratch have numbers, too
    store = elsewhere(make_node, engines, full + window[:6], WINDOWED)
    node = make_node(store=store)
    engine = engines(node, WINDOWED)
    engine.wait_for(lambda: only_pool(node).slots.in_service >= 9)  # of each group what the hit needs
    calls = [engine.scheduler.call(LookupPrompt(full + window))]

    def has_arrived() -> bool:
        if calls[-1].done and not calls[-1].unpack(Found).runs:
            calls.append(engine.scheduler.call(LookupPrompt(full + window)))
        return calls[-1].done

    engine.wait_for(has_arrived)
    assert calls[-1].is_pending or len(calls) > 1, "what an earlier call has begun to read may be there by then"
    assert calls[-1].unpack(Found).runs == ((0, 6), (8 + 3, 3)), "6 blocks, and of the window the last ones"
    engine.wait_for(lambda: [totals.read_blocks for totals in node_store(node).totals().values()] == [9])
    lease = engine.lookup([*full[:6], *window[3:6]], Hold.ALL)
    assert lease.leading == 9
    engine.release(lease.lease_id)
    assert engine.lookup(full + window, Hold.NOTHING).runs == ((0, 6), (11, 3)), "it does not wait for the store"
    call = engine.scheduler.call(LookupPrompt(full[:6] + window[:6]))
    engine.wait_for(lambda: call.done)
    assert not call.is_pending, "no hit can be longer"


def test_reads_and_writes_outlive_the_engine(make_node: MakeNode, engines: Engines) -> None:
    here = make_node()
    store_of(here).held = {"write"}
    engine = engines(here, ONE_RANK)
    engine.store_until_found(keys_of(0, 1))
    engine.wait_for(lambda: written_by(engine, store_of(here), []) and store_of(here).pools[0].writes)
    leave(engine)
    eventually(lambda: not here.host.sessions(), "the end of the session")
    store_of(here).release()
    eventually(lambda: len(store_of(here).blocks) == 1, "the writes")

    store = MemoryBlockStore(shares=store_of(here))
    store.held = {"read"}
    there = make_node(store=store)
    engine = engines(there, ONE_RANK)
    engine.wait_for(lambda: only_pool(there).slots.in_service)
    looked_up(engine, there, keys_of(0, 1))
    leave(engine)
    eventually(lambda: not there.host.sessions(), "the end of the session")
    assert only_pool(there).facade.stats().pool.slots.cached == 0
    store.release()
    eventually(lambda: only_pool(there).facade.stats().pool.slots.cached == 1, "the blocks")
    for node in (here, there):
        only_pool(node).facade.check_integrity()


def test_the_speed_of_prefill_comes_from_the_engines(make_node: MakeNode, engines: Engines) -> None:
    node = make_node()
    engine = engines(node, NAMED)
    engine.scheduler.send(Prefill((0.0005, 0.0, 0.0)))
    engine.wait_for(lambda: node_store(node).tiers()[0].prefill_tokens_per_second == pytest.approx(2000.0))


# -- who uses it ----------------------------------------------------------------------------------------------------


def test_the_node_s_own_session_counts_as_no_engine(make_node: MakeNode, engines: Engines) -> None:
    node = make_node()
    engine = engines(node, ONE_RANK)
    engine.store_until_found(keys_of(0, 4))
    pool = only_pool(node)
    assert len(node.host.sessions()) == len(pool.facade.readiness().ranks) == 1
    assert [one.sessions for one in node.host.namespaces()] == [1]
    leave(engine)
    eventually(lambda: not node.host.sessions(), "the end of the session")
    assert [one.sessions for one in node.host.namespaces()] == [0]
    eventually(lambda: node.memory_thread.memory.budget.fair_shares() == {}, "the end of what was asked for")
    node.host.delete_pool(pool.name)
    eventually(
        lambda: node.memory_thread.figures.spare_bytes == node.memory_thread.budget.total_bytes, "the pool's memory"
    )
    assert node.memory_thread.faults == 0
    assert engines(node, ONE_RANK).welcome.pool == pool.name, "its name is free"


def test_a_pool_that_an_operator_deletes_leaves_no_block_in_the_store(make_node: MakeNode, engines: Engines) -> None:
    node = make_node()
    engine = engines(node, ONE_RANK)
    engine.store_until_found(keys_of(0, 4))
    engine.wait_for(lambda: written_by(engine, store_of(node), keys_of(0, 4)))
    leave(engine)
    eventually(lambda: not node.host.sessions(), "the end of the session")
    node.host.delete_pool(only_pool(node).name)
    assert not store_of(node).blocks


def test_the_answer_to_a_deletion_waits_for_the_store(make_node: MakeNode, engines: Engines) -> None:
    node = make_node()
    engine = engines(node, ONE_RANK)
    engine.store_until_found(keys_of(0, 4))
    leave(engine)
    eventually(lambda: not node.host.sessions(), "the end of the session")
    store_of(node).held = {"purge"}
    name, answers = only_pool(node).name, list[Purged]()
    deleting = threading.Thread(target=lambda: answers.append(node.delete_pool(name)))
    deleting.start()
    eventually(lambda: store_of(node).pools[0].removals, "what the store was asked for")
    assert not node.host.pools()
    store_of(node).release()
    deleting.join(30)
    assert [answer.notice for answer in answers] == [""], "it did not wait"


def test_the_answer_to_a_reset_waits_for_the_store(make_node: MakeNode, engines: Engines) -> None:
    node = make_node()
    engine = engines(node, NAMED)
    engine.store_until_found(keys_of(0, 4))
    store_of(node).held = {"purge"}
    before = [one.name for one in node.host.namespaces()]
    call = engine.scheduler.call(Reset())
    engine.wait_for(lambda: store_of(node).pools[0].removals)
    engine.store_until_found(keys_of(4, 4))  # the engine goes on meanwhile, in its fresh namespace
    assert not call.done
    store_of(node).release()
    engine.wait_for(lambda: call.done)
    assert call.unpack(ResetDone).namespace not in before


def test_after_a_reset_nothing_is_written_or_read_and_the_former_blocks_are_gone(
    make_node: MakeNode, engines: Engines
) -> None:
    node = make_node()
    engine = engines(node, NAMED)
    engine.store_until_found(keys_of(0, 4))
    engine.wait_for(lambda: written_by(engine, store_of(node), keys_of(0, 4)))
    engine.ask(Reset(), ResetDone)
    assert not store_of(node).blocks
    engine.store_until_found(keys_of(4, 4))
    engine.use(keys_of(4, 4))
    call = engine.scheduler.call(Lookup(keys_of(50, 2)))
    engine.wait_for(lambda: call.done)
    assert (call.is_pending, len(store_of(node).blocks)) == (False, 0)
    status = node_store(node).tiers()[-1]
    assert (status.state, "reset its cache" in status.reason) == ("off", True)


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (HELLO, "weights_unknown"),
        (replace(NAMED, namespace=replace(NAMESPACE, unshared="hashes_not_reproducible: ...")), "hashes_not_repro"),
        (replace(NAMED, namespace=replace(NAMESPACE, epoch=7)), "weights_changed"),
        (replace(NAMED, pool=replace(POOL, groups=(replace(POOL.groups[0], kind="torus"),))), "KV groups"),
    ],
)
def test_without_an_identity_across_lives_the_store_is_off_and_says_why(
    make_node: MakeNode, engines: Engines, hello: Any, reason: str
) -> None:
    node = make_node()
    engine = engines(node, hello)
    engine.store_until_found(keys_of(0, 4))
    (one,) = node_store(node).tiers()
    assert one.state == "off"
    assert reason in one.reason
    call = engine.scheduler.call(Lookup(keys_of(50, 2)))
    engine.wait_for(lambda: call.done)
    assert (call.is_pending, len(store_of(node).blocks)) == (False, 0)


def test_where_tenants_are_named_nobody_else_uses_the_store(make_node: MakeNode, engines: Engines) -> None:
    others = make_node(tier="mooncake://store:1", tenant=f"web={os.geteuid() + 1}")
    engines(others, NAMED).store_until_found(keys_of(0, 4))
    (one,) = node_store(others).tiers()
    assert (one.state, one.fingerprint, len(store_of(others).blocks)) == ("off", None, 0)
    assert f"--tenant NAME={os.geteuid()}" in one.reason


def test_blocks_that_are_the_same_on_all_ranks_are_stored_once(make_node: MakeNode, engines: Engines) -> None:
    node = make_node()
    engine = engines(node, replace(NAMED, pool=replace(POOL, replicated=True)))
    engine.wait_for(lambda: store_of(node).pools)
    assert store_of(node).pools[0].layout.slot_bytes == POOL.slot_bytes[:1]


# -- contexts -------------------------------------------------------------------------------------------------------


def use_in_context(engine: RawEngine, keys: list[bytes], name: str, resume_in: float | None = None) -> None:
    engine.use(keys, Hints(context=context_id(name), resume_in=resume_in))


def test_blocks_of_a_context_are_read_when_an_operator_asks_for_it(make_node: MakeNode, engines: Engines) -> None:
    node = make_node()
    engine = engines(node, ONE_RANK)
    keys = keys_of(0, 4)
    engine.store_until_found(keys)
    engine.wait_for(lambda: written_by(engine, store_of(node), keys))
    use_in_context(engine, keys, "c")
    pool = only_pool(node)
    engine.wait_for(lambda: pool.facade.contexts().total)
    pool.facade.admin.evict(slots=100).run()
    assert node_store(node).prefetch(pool.name, context_id("c")) == 4
    engine.wait_for(lambda: engine.lookup(keys, Hold.NOTHING).leading == 4)


# -- defects and ends -----------------------------------------------------------------------------------------------


def test_memory_that_cannot_be_mapped_is_shown_and_costs_hits_alone(
    make_node: MakeNode, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: MemoryStoredPool, rank: int, extent: object, fd: int, then: Callable[[str], object]) -> None:
        self._later(lambda: then(f"memory of rank {rank} could not be mapped: injected"))

    monkeypatch.setattr(MemoryStoredPool, "add_extent", refuse)
    node = make_node()
    engine = engines(node, NAMED)
    engine.store_until_found(keys_of(0, 4))
    assert engine.load(keys_of(0, 4)) == 4
    engine.wait_for(lambda: node_store(node).parts()[0].state == "failed")
    assert "could not be mapped: injected" in node_store(node).parts()[0].reason
    engine.wait_for(lambda: only_pool(node).facade.stats().faults.errors["host"])
    assert not store_of(node).blocks


def test_the_end_of_the_service_gives_up_what_hangs(make_node: MakeNode, engines: Engines) -> None:
    node = make_node()
    engine = engines(node, NAMED)
    store_of(node).held = {"write"}
    engine.store_until_found(keys_of(0, 4))
    engine.wait_for(lambda: store_of(node).pools[0].writes)
    pool = only_pool(node)
    node_store(node).close()
    assert [session for session in pool.attached() if not session.is_engine] == []
    assert engine.lookup(keys_of(0, 4)).leading == 4
    pool.facade.check_integrity()


def test_an_extent_stays_with_the_store_until_no_process_maps_it(make_node: MakeNode, engines: Engines) -> None:
    """The store is asked to release memory that it maps, because another pool needs it."""
    node = make_node(extents=2)
    engine = engines(node, ONE_RANK)
    engine.store_until_found(keys_of(0, ROW_SLOTS + 1))
    engine.wait_for(lambda: len(store_of(node).pools[0].maps) == 2)
    budget = node.memory_thread.memory.budget
    pool = only_pool(node).name
    last = budget.pool(pool).rows[1].extents[0]
    others = {f"pool {pool}", f"{engine.welcome.session_id}/0"}
    mappers = [one for one in budget.mappers(last) if one not in others]
    store_of(node).held = {"remove"}
    leave(engine)
    assert ONE_RANK.pool is not None
    other = engines(node, replace(ONE_RANK, pool=replace(ONE_RANK.pool, kv_cache_dtype="fp8")))
    other.wait_for(lambda: store_of(node).pools[0].removals)
    for pass_on in (node.server.post, node.memory_thread.do):  # what was said before has been heard now
        heard = threading.Event()
        pass_on(heard.set)
        assert heard.wait(60)
    assert budget.mappers(last) == mappers
    store_of(node).release()
    other.store_until_found(keys_of(0, 1))


def test_a_store_that_cannot_be_started_leaves_nothing_open(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make_whole_node` counts the descriptors."""

    def fail(*_: object) -> None:
        raise OSError("injected")

    monkeypatch.setattr(MemoryBlockStore, "start", fail)
    with pytest.raises(OSError, match="injected"):
        make_node()


@pytest.mark.parametrize("broken", ["lose", "process_died"])
def test_a_defect_at_the_end_of_a_pool_keeps_nobody_waiting(
    make_node: MakeNode,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: str,
) -> None:
    node = make_node()
    engine = engines(node, ONE_RANK)
    engine.store_until_found(keys_of(0, 4))
    pool = only_pool(node)
    owner: Any = pool.tier.session if broken == "lose" else pool
    done = getattr(owner, broken)

    def fail(*given: object) -> None:
        done(*given)
        raise RuntimeError("injected")

    monkeypatch.setattr(owner, broken, fail)
    has_ended = threading.Event()
    node_store(node).drop_pool(pool, has_ended.set)
    assert has_ended.wait(30)
    node.close()
    assert "the store still has slots" not in caplog.text
    assert pool.facade.stats().faults.errors["host"] >= 1
