"""The fleet tier of a whole node, over a store in this process."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tests.service.conftest import Eventually
from tests.service.node.rawengine import HELLO, NAMESPACE, POOL, SLOT_BYTES, RawEngine, key_of

from kvstow.attach.calls import Detach, ExtentBytes, Found, Hold, Lookup, LookupPrompt, Prefill, Reset, ResetDone, Use
from kvstow.attach.identity import FleetWeights
from kvstow.control.fleettier import FleetTier, TierSettings
from kvstow.errors import NotFoundError, TierUnavailableError
from kvstow.hints import Hints, context_id
from kvstow.keys import make_key
from kvstow.memory.limits import MemoryLimits
from kvstow.prefill import PrefillCost
from kvstow.testing.tier import ControlledLookups, ControlledStore, ControlledTransfers, Gate
from kvstow.tier.fingerprint import TIER_FAILED
from kvstow.tier.store import MemoryRange
from kvstow.tier.transfers import StoreTransfers
from kvstow_service.node.node import Node
from kvstow_service.node.settings import Settings
from kvstow_service.node.tier.namespacetier import ContextKeys, NamespaceTier
from kvstow_service.node.tier.nodetier import NodeTier
from kvstow_service.node.tier.pooltier import MappedRank, PoolTier

MIB = 1 << 20
EXTENT = 2 * MIB
ROW_SLOTS = EXTENT // SLOT_BYTES
NAMED = replace(HELLO, fleet_weights=FleetWeights("digest 1"))
ONE_RANK = replace(NAMED, pool=replace(POOL, slot_bytes=(SLOT_BYTES,), tensor_parallel=1))

MakeNode = Callable[..., Node]
Engines = Callable[..., RawEngine]


class Reluctant(ControlledStore):
    """Its transfers let go of memory only when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.removals = Gate()

    def open_transfers(self, witness: int | None = None) -> ControlledTransfers:
        return ReluctantTransfers(self)


class ReluctantTransfers(ControlledTransfers):
    def remove_memory(self, memory: MemoryRange) -> None:
        store = self._controls
        assert isinstance(store, Reluctant)
        store.removals.pass_through()
        super().remove_memory(memory)


@pytest.fixture
def store() -> Iterator[ControlledStore]:
    store = Reluctant()
    yield store
    for gate in (store.puts, store.gets, store.lookups):
        gate.open()


@pytest.fixture
def reluctant(store: ControlledStore) -> Iterator[Reluctant]:
    """Takes the place of the store."""
    assert isinstance(store, Reluctant)
    yield store
    store.removals.open()


def descriptors() -> Counter[str]:
    """What the descriptors of this process are open for. Sockets and pipes have a number of their own."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists them
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
    return found


@pytest.fixture
def make_node(tmp_path: Path, store: ControlledStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeNode]:
    """Nodes that use the store, and wait for it as long as it takes. They are closed at the end; none leaves a
    descriptor open."""
    patient = partial(TierSettings, deadline=60.0, lookup_wait=60.0)
    monkeypatch.setattr("kvstow_service.node.tier.nodetier.TierSettings", patient)
    (tmp_path / "meminfo").write_text(f"MemAvailable: {1 << 30} kB\n")
    limits = MemoryLimits(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "fs")
    before = descriptors()
    nodes: list[Node] = []

    def make(extents: int = 8, **options: Any) -> Node:
        settings = Settings(
            memory=extents * EXTENT,
            attach_socket=tmp_path / "node" / f"attach{len(nodes)}.sock",
            extent_size=EXTENT,
            pin_pause=0,
            tier="redis://store:1",
            **options,
        )
        nodes.append(Node(settings, store=store, limits=limits))
        nodes[-1].start()
        return nodes[-1]

    yield make
    for gate in (store.puts, store.gets, store.lookups):
        gate.open()
    for node in nodes:
        node.close()
    assert descriptors() - before == Counter()  # those of earlier tests may have been closed meanwhile


@pytest.fixture
def engines() -> Iterator[Engines]:
    made: list[RawEngine] = []

    def make(node: Node, hello: Any = NAMED) -> RawEngine:
        made.append(RawEngine(node.settings.attach_path, hello))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def keys_of(first: int, count: int) -> list[bytes]:
    return [key_of(number) for number in range(first, first + count)]


def node_tier(node: Node) -> NodeTier:
    assert node.tier is not None
    return node.tier


def tier_of(node: Node) -> NamespaceTier:
    sessions = [one for one in node.host._sessions.values() if not one.control.is_lost]
    (tier,) = [one.tier for one in sessions if one.tier is not None]
    assert isinstance(tier, NamespaceTier)
    return tier


def only_pool(node: Node) -> Any:
    (pool,) = node.host.pools()
    return pool


def test_what_one_node_has_stored_another_one_hits(
    make_node: MakeNode, engines: Engines, store: ControlledStore, eventually: Eventually
) -> None:
    here, there = make_node(), make_node()
    keys = keys_of(0, 10)
    engines(here).store_until_found(keys)
    eventually(lambda: store.num_objects == 20, "the puts of both ranks")
    engine = engines(there)
    engine.wait_for(lambda: engine.load(keys) == 10)  # every byte of both ranks is verified
    assert only_pool(there).facade.stats().pool.slots.cached == 10
    for node in (here, there):
        only_pool(node).facade.check_integrity()


def begin_fetch(engine: RawEngine, store: ControlledStore, keys: list[bytes]) -> Any:
    """Look up keys that the store has, until their transfer has begun, which takes memory. Returns the call."""
    before = store.gets.num_arrived
    store.gets.shut()
    calls = [engine.scheduler.call(Lookup(keys))]

    def has_begun() -> bool:
        if calls[-1].done:
            calls.append(engine.scheduler.call(Lookup(keys)))
        return store.gets.num_arrived > before

    engine.wait_for(has_begun)
    return calls[-1]


def put_elsewhere(make_node: MakeNode, engines: Engines, store: ControlledStore, keys: list[bytes]) -> None:
    """Another node has these in the store."""
    engine = engines(make_node())
    engine.store_until_found(keys)
    engine.wait_for(lambda: store.num_objects == 2 * len(keys))


def leave(engine: RawEngine) -> None:
    """Its only worker says that nothing of the pool is mapped or under way in it, as this process goes on."""
    (worker,) = engine.workers
    worker.connection.close(Detach("done"))


def test_an_answer_that_takes_time_delays_no_other_one(
    make_node: MakeNode, engines: Engines, store: ControlledStore
) -> None:
    put_elsewhere(make_node, engines, store, keys_of(0, 4))
    engine = engines(make_node())
    engine.store_until_found(keys_of(100, 4))
    call = begin_fetch(engine, store, keys_of(0, 4))
    assert engine.lookup(keys_of(100, 4)).leading == 4
    assert not call.done
    store.gets.open()
    engine.wait_for(lambda: call.done)
    assert call.answer(Found).leading == 4
    assert call.is_pending


def test_an_answer_says_which_blocks_the_store_has_brought(
    make_node: MakeNode, engines: Engines, store: ControlledStore
) -> None:
    put_elsewhere(make_node, engines, store, keys_of(0, 6))
    engine = engines(make_node())
    engine.store_until_found(keys_of(0, 2))
    engine.wait_for(lambda: engine.lookup(keys_of(0, 2)).leading == 2)
    found = begin_fetch(engine, store, keys_of(0, 6))
    store.gets.open()
    engine.wait_for(lambda: found.done)
    assert (found.answer(Found).runs, found.answer(Found).fetched) == (((0, 6),), ((2, 4),))
    assert engine.lookup(keys_of(0, 6)).fetched == (), "by now they are in host memory"


WINDOW = replace(POOL.groups[0], kind="window a", window=40)
WINDOWED = replace(NAMED, pool=replace(POOL, groups=(*POOL.groups, WINDOW)))
"""A window of two blocks and a half."""


def test_of_several_groups_what_a_hit_needs_is_fetched(
    make_node: MakeNode, engines: Engines, store: ControlledStore
) -> None:
    full = [make_key(0, key_of(number)[2:]) for number in range(8)]
    window = [make_key(3, key_of(number)[2:]) for number in range(8)]  # groups of scratch have numbers, too
    elsewhere = engines(make_node(), WINDOWED)
    elsewhere.store_until_found(full + window[:6])
    elsewhere.wait_for(lambda: store.num_objects == 28)
    node = make_node()
    engine = engines(node, WINDOWED)
    engine.wait_for(lambda: only_pool(node).slots.in_service >= 9)  # of each group what the hit needs
    calls = [engine.scheduler.call(LookupPrompt(full + window))]

    def is_fetched() -> bool:
        if calls[-1].done and not calls[-1].answer(Found).runs:
            calls.append(engine.scheduler.call(LookupPrompt(full + window)))
        return calls[-1].done

    engine.wait_for(is_fetched)
    assert calls[-1].is_pending
    assert calls[-1].answer(Found).runs == ((0, 6), (8 + 3, 3)), "6 blocks, and of the window the last ones"
    engine.wait_for(lambda: [totals.fetched_blocks for totals in node_tier(node).totals().values()] == [9])
    if len(calls) == 1:  # otherwise the memory was registered late, and an earlier look-up has fetched some
        assert calls[0].answer(Found).fetched == calls[0].answer(Found).runs
    lease = engine.lookup([*full[:6], *window[3:6]], Hold.ALL)
    assert lease.leading == 9
    engine.release(lease.lease_id)
    assert engine.lookup(full + window, Hold.NOTHING).runs == ((0, 6), (11, 3)), "it does not wait for the store"
    batches = len(store.batches)
    call = engine.scheduler.call(LookupPrompt(full[:6] + window[:6]))
    engine.wait_for(lambda: call.done)
    assert len(store.batches) == batches, "no hit can be longer"


def test_puts_and_fetches_outlive_the_engine(
    make_node: MakeNode, engines: Engines, store: ControlledStore, eventually: Eventually
) -> None:
    here, there = make_node(), make_node()
    store.puts.shut()
    engine = engines(here, ONE_RANK)
    engine.store_until_found(keys_of(0, 4))
    store.puts.wait_arrived(1)
    leave(engine)
    eventually(lambda: not here.host.sessions(), "the end of the session")
    store.puts.open()
    eventually(lambda: store.num_objects == 4, "the puts")

    engine = engines(there, ONE_RANK)
    engine.wait_for(lambda: tier_of(there).may_have_more and only_pool(there).slots.in_service)
    begin_fetch(engine, store, keys_of(0, 4))
    leave(engine)
    eventually(lambda: not there.host.sessions(), "the end of the session")
    assert only_pool(there).facade.stats().pool.slots.cached == 0
    store.gets.open()
    eventually(lambda: only_pool(there).facade.stats().pool.slots.cached == 4, "the fetched blocks")
    for node in (here, there):
        only_pool(node).facade.check_integrity()


def test_the_node_s_own_session_counts_as_no_engine(
    make_node: MakeNode, engines: Engines, store: ControlledStore, eventually: Eventually
) -> None:
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
    eventually(lambda: not node.host._closing, "the pool's name")


def test_after_a_reset_nothing_is_put_or_fetched(make_node: MakeNode, engines: Engines, store: ControlledStore) -> None:
    node = make_node()
    engine = engines(node)
    engine.store_until_found(keys_of(0, 4))
    engine.wait_for(lambda: store.num_objects == 8)
    engine.ask(Reset(), ResetDone)
    asked = store.batches.count(("exists", 4))
    engine.wait_for(lambda: tier_of(node).fleet is not None)
    assert engine.lookup(keys_of(0, 4)).leading == 0
    engine.store_until_found(keys_of(4, 4))
    engine.wait_for(lambda: tier_of(node).is_idle)
    assert (store.num_objects, store.batches.count(("exists", 4))) == (8, asked)
    assert [len(one.clients) for one in node_tier(node).tiers()] == [2, 0], "they are shown once"
    fleet = tier_of(node).fleet
    assert fleet is not None
    assert (fleet.status().state, "reset its cache" in fleet.status().reason) == ("off", True)


def put_blocks(node: Node) -> list[int]:
    """What each pool has counted."""
    return [totals.put_blocks for totals in node_tier(node).totals().values()]


def test_what_a_pool_has_counted_outlives_a_reset_but_not_the_pool(
    make_node: MakeNode, engines: Engines, eventually: Eventually
) -> None:
    node = make_node()
    engine = engines(node, ONE_RANK)
    engine.store_until_found(keys_of(0, 4))
    engine.wait_for(lambda: put_blocks(node) == [4])
    (before,) = node_tier(node).tiers()
    engine.ask(Reset(), ResetDone)
    assert only_pool(node).facade.admin.purge(everything=True).run().finished
    eventually(lambda: before.namespace not in {one.namespace for one in node_tier(node).tiers()}, "its end")
    engine.wait_for(lambda: tier_of(node).fleet is not None)
    assert put_blocks(node) == [4]

    leave(engine)
    eventually(lambda: not node.host.sessions(), "the end of the session")
    node.host.delete_pool(only_pool(node).name)
    eventually(lambda: not node.host._closing, "the pool's name")
    engine = engines(node, ONE_RANK)
    engine.wait_for(lambda: tier_of(node).fleet is not None)
    assert [one.pool for one in node_tier(node).tiers()] == [before.pool]
    assert put_blocks(node) == [0]


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (HELLO, "weights_unknown"),
        (replace(NAMED, namespace=replace(NAMESPACE, unshared="hashes_not_reproducible: ...")), "hashes_not_repro"),
        (replace(NAMED, namespace=replace(NAMESPACE, epoch=7)), "weights_changed"),
        (replace(NAMED, pool=replace(POOL, groups=(replace(POOL.groups[0], kind="torus"),))), "KV groups"),
    ],
)
def test_without_an_identity_across_nodes_the_tier_is_off_and_says_why(
    make_node: MakeNode, engines: Engines, store: ControlledStore, hello: Any, reason: str
) -> None:
    node = make_node()
    engine = engines(node, hello)
    engine.store_until_found(keys_of(0, 4))
    engine.wait_for(lambda: node_tier(node).tiers())
    (one,) = node_tier(node).tiers()
    assert one.state == "off"
    assert reason in one.reason
    call = engine.scheduler.call(Lookup(keys_of(50, 2)))
    engine.wait_for(lambda: call.done)
    assert (call.is_pending, store.num_objects, store.batches) == (False, 0, [])


def test_where_tenants_are_named_nobody_else_uses_the_store(
    make_node: MakeNode, engines: Engines, store: ControlledStore
) -> None:
    others = make_node(tenant=f"web={os.geteuid() + 1}")
    engine = engines(others)
    engine.store_until_found(keys_of(0, 4))
    engine.wait_for(lambda: node_tier(others).tiers())
    (one,) = node_tier(others).tiers()
    assert (one.state, one.fingerprint, store.num_objects) == ("off", None, 0)
    assert f"--tenant NAME={os.geteuid()}" in one.reason


def test_nodes_exchange_the_blocks_of_a_tenant_by_its_name(
    make_node: MakeNode, engines: Engines, store: ControlledStore
) -> None:
    """Whoever the uid is on each of them."""
    names = [f"ml={os.geteuid()}", f"web={os.geteuid()}", f"ml={os.geteuid() + 1},{os.geteuid()}"]
    found = []
    for name in names:
        tier = node_tier(node := make_node(tenant=name))
        engines(node).wait_for(tier.tiers)
        found.append(tier.tiers()[0].fingerprint)
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("broken", ["step", "look_for"])
def test_a_defect_switches_the_tier_of_its_namespace_off(
    make_node: MakeNode, engines: Engines, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    node = make_node()
    engine = engines(node)
    engine.wait_for(lambda: tier_of(node).may_have_more)
    fleet = tier_of(node).fleet
    assert fleet is not None

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(fleet, broken, fail)
    call = engine.scheduler.call(Lookup(keys_of(50, 4)))
    engine.wait_for(lambda: call.done)
    assert call.answer(Found).leading == 0
    engine.wait_for(lambda: node_tier(node).tiers()[0].state == "off")
    assert node_tier(node).tiers()[0].reason == TIER_FAILED
    engine.store_until_found(keys_of(0, 4))
    assert tier_of(node)._early is None, "what is stored is kept for nobody"


def test_a_defect_strands_no_transfer_that_has_begun(
    make_node: MakeNode, engines: Engines, store: ControlledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node()
    engine = engines(node)
    engine.wait_for(lambda: tier_of(node).may_have_more)
    tier = tier_of(node)
    fleet = tier.fleet
    assert fleet is not None

    def begin_and_fail() -> None:
        FleetTier.step(fleet)
        if len(tier.control.ops):
            raise RuntimeError("injected")

    monkeypatch.setattr(fleet, "step", begin_and_fail)
    engine.store_until_found(keys_of(0, 4))
    engine.wait_for(lambda: tier.fleet is None)
    engine.wait_for(lambda: not len(tier.control.ops))
    assert store.num_objects > 0


def test_a_tier_that_cannot_be_counted_answers_at_its_end(
    make_node: MakeNode, engines: Engines, store: ControlledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_elsewhere(make_node, engines, store, keys_of(0, 4))
    node = make_node()
    engine = engines(node)
    engine.store_until_found(keys_of(100, 4))
    call = begin_fetch(engine, store, keys_of(0, 4))
    tier = tier_of(node)

    def fail() -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(tier.shown, "status", fail)
        node_tier(node).do(partial(node_tier(node)._retire, tier))
        engine.wait_for(lambda: call.done)
    assert tier.is_closed
    store.gets.open()


@pytest.mark.parametrize(
    "broken",
    [(StoreTransfers, "drop"), (MappedRank, "clear"), (PoolTier, "take_completions"), (PoolTier, "end_sessions")],
)
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_defect_at_the_end_of_a_pool_keeps_nobody_waiting(
    make_node: MakeNode,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Eventually,
    broken: tuple[type, str],
    *,
    is_closed: bool,
) -> None:
    node = make_node()
    engine = engines(node, ONE_RANK)
    engine.store_until_found(keys_of(0, 4))
    engine.wait_for(lambda: tier_of(node).is_idle)
    pool, pool_tier = only_pool(node), tier_of(node).pool_tier
    owner, name = broken
    done = getattr(owner, name)
    has_ended = threading.Event()

    def fail(*given: object) -> None:
        done(*given)
        if name != "take_completions" or pool_tier._is_closed:
            raise RuntimeError("injected")

    monkeypatch.setattr(owner, name, fail)
    if is_closed:
        node_tier(node).close()
    else:
        node_tier(node).drop_pool(pool, has_ended.set)
        assert has_ended.wait(30)
        eventually(lambda: not node.host._closing, "the pool's name")
    assert pool_tier.has_ended.wait(30)
    eventually(lambda: pool.facade.stats().faults.errors["host"] == 1, "the count of errors")
    eventually(lambda: not [session for session in pool.attached() if not session.is_engine], "the tier's sessions")


def test_memory_that_cannot_be_mapped_is_shown_and_costs_hits_alone(
    make_node: MakeNode, engines: Engines, store: ControlledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("injected")

    monkeypatch.setattr(MappedRank, "add", fail)
    node = make_node()
    engine = engines(node)
    engine.store_until_found(keys_of(0, 4))
    assert engine.load(keys_of(0, 4)) == 4

    def failures() -> list[str]:
        clients = [client for one in node_tier(node).tiers() for client in one.clients]
        return [f"{one.purpose}: {one.health.reason}" for one in clients if one.health.state == "failed"]

    engine.wait_for(failures)
    assert failures()[0].startswith(f"transfers of pool {only_pool(node).name}: memory of rank ")
    assert "could not be mapped: injected" in failures()[0]
    engine.wait_for(lambda: only_pool(node).facade.stats().faults.errors["host"])
    assert store.num_objects == 0


def test_what_is_still_pushed_after_the_end_touches_no_descriptor_that_was_closed(
    make_node: MakeNode, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory thread may revoke extents, and report them as populated, before it takes the pool from the session."""

    def fail(*_: object) -> None:
        raise OSError("injected")

    monkeypatch.setattr(MappedRank, "add", fail)
    node = make_node()
    engine = engines(node)
    engine.store_until_found(keys_of(0, 4))
    (pool_tier,) = node_tier(node)._pools.values()
    engine.wait_for(lambda: pool_tier.problem is not None)
    unmapped = {number: (grant, fd) for number, (grant, fd, _) in pool_tier._unmapped.items()}
    engine.close()
    node.close()
    begun: list[int] = []
    monkeypatch.setattr(MappedRank, "add", lambda self, grant, fd, stride: begun.append(fd))
    other = os.open("/dev/null", os.O_RDONLY)
    fds = [fd for _, fd in unmapped.values() if fd != other]
    try:
        for fd in fds:  # these numbers belong to others by now
            os.dup2(other, fd)
        for rank in range(2):
            grants = [ExtentBytes(number, grant.num_bytes) for number, (grant, _) in unmapped.items()]
            pool_tier._note_populated(rank, grants)
            pool_tier._unmap(rank, list(unmapped))
        assert begun == []
        for fd in {other, *fds}:
            os.fstat(fd)
    finally:
        for fd in {other, *fds}:
            with suppress(OSError):
                os.close(fd)


def test_the_speed_of_prefill_comes_from_the_engines(
    make_node: MakeNode, engines: Engines, store: ControlledStore
) -> None:
    node = make_node()
    engine = engines(node)
    engine.wait_for(lambda: tier_of(node).fleet is not None)
    engine.scheduler.send(Prefill((0.0005, 0.0, 0.0)))
    fleet = tier_of(node).fleet
    assert fleet is not None
    engine.wait_for(lambda: fleet.break_even.prefill == PrefillCost(0.0005))


def test_a_store_that_fails_costs_hits_and_no_answer(
    make_node: MakeNode, engines: Engines, store: ControlledStore
) -> None:
    node = make_node()
    engine = engines(node)
    engine.wait_for(lambda: tier_of(node).may_have_more)
    store.error = TierUnavailableError("gone")
    assert engine.lookup(keys_of(0, 4)).leading == 0
    engine.wait_for(lambda: not tier_of(node).may_have_more)
    call = engine.scheduler.call(Lookup(keys_of(4, 4)))
    engine.wait_for(lambda: call.done)
    assert not call.is_pending
    engine.store_until_found(keys_of(0, 4))
    assert engine.load(keys_of(0, 4)) == 4
    assert node.live_failure() is None
    assert node.memory_failure() is None


def test_the_end_of_the_tier_waits_for_calls_under_way(
    make_node: MakeNode, engines: Engines, store: ControlledStore
) -> None:
    node = make_node()
    engine = engines(node)
    store.puts.shut()
    engine.store_until_found(keys_of(0, 4))
    store.puts.wait_arrived(1)
    closing = threading.Thread(target=node_tier(node).close)
    closing.start()
    engine.wait_for(lambda: not tier_of(node).may_have_more)
    assert engine.lookup(keys_of(0, 4)).leading == 4
    assert closing.is_alive(), "a call to the store is under way"
    assert [entry for session in only_pool(node).attached() for entry in session.held_slots()] != []
    store.puts.open()
    closing.join(30)
    assert not closing.is_alive()
    pool = only_pool(node)
    assert [session for session in pool.attached() if not session.is_engine] == []
    pool.facade.check_integrity()


def is_known_to_map(make_node: MakeNode, engines: Engines, store: Reluctant) -> bool:
    """Another pool needs memory that the node's transfers map, and they are asked to let go of it. Whether the node
    counts them among those who map it until they do not."""
    node = make_node(extents=2)
    engine = engines(node, ONE_RANK)
    engine.store_until_found(keys_of(0, ROW_SLOTS + 1))
    engine.wait_for(lambda: store.num_objects == ROW_SLOTS + 1)
    tier, budget = tier_of(node).pool_tier, node.memory_thread.memory.budget
    last = budget.pool(tier.pool.name).rows[1].extents[0]
    leave(engine)
    store.removals.shut()
    assert ONE_RANK.pool is not None
    other = engines(node, replace(ONE_RANK, pool=replace(ONE_RANK.pool, kv_cache_dtype="fp8")))
    other.wait_for(lambda: store.removals.num_arrived)
    for pass_on in (node.server.post, node.memory_thread.do):  # what was said before has been heard now
        heard = threading.Event()
        pass_on(heard.set)
        assert heard.wait(60)
    is_known = budget.mappers(last) == [tier.client(0)]
    store.removals.open()
    other.store_until_found(keys_of(0, 1))
    return is_known


def test_an_extent_stays_with_the_transfers_until_no_process_maps_it(
    make_node: MakeNode, engines: Engines, reluctant: Reluctant
) -> None:
    assert is_known_to_map(make_node, engines, reluctant)


def test_mutant_extents_are_released_before_they_are_unmapped(
    make_node: MakeNode, engines: Engines, reluctant: Reluctant, monkeypatch: pytest.MonkeyPatch
) -> None:
    def report_first(tier: PoolTier, rank: int, extent_ids: Sequence[int]) -> None:
        tier._post(partial(tier._report_released, rank, tuple(extent_ids)))
        tier._unmap(rank, extent_ids)

    monkeypatch.setattr(PoolTier, "_release", report_first)
    assert not is_known_to_map(make_node, engines, reluctant)


def test_a_store_that_cannot_be_opened_leaves_nothing_open(
    make_node: MakeNode, store: ControlledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make_node` counts the descriptors."""
    opened = store.open_transfers()

    def fail() -> ControlledLookups:
        raise OSError("injected")

    monkeypatch.setattr(store, "open_transfers", lambda *_: opened)
    monkeypatch.setattr(store, "open_lookups", fail)
    with pytest.raises(OSError, match="injected"):
        make_node()
    assert opened.health().state == "closed"


def test_the_end_of_a_store_waits_for_a_pool_that_is_dropped_in_the_same_moment(
    make_node: MakeNode, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` looks for such pools once it has the lock."""
    node = make_node()
    engine = engines(node, ONE_RANK)
    engine.store_until_found(keys_of(0, 4))
    engine.wait_for(lambda: tier_of(node).is_idle)
    pool, tier = only_pool(node), node_tier(node)
    begin_end, locked = tier._begin_end, list[bool]()

    def noted(*given: Any) -> None:
        locked.append(tier._lock.locked())
        begin_end(*given)

    monkeypatch.setattr(tier, "_begin_end", noted)
    has_ended = threading.Event()
    node_tier(node).drop_pool(pool, has_ended.set)
    assert locked == [True]
    assert has_ended.wait(30)


def test_what_is_stored_before_the_tier_has_begun_is_put_too(
    make_node: MakeNode, engines: Engines, store: ControlledStore
) -> None:
    node = make_node()
    may_go = threading.Event()
    node_tier(node).do(lambda: may_go.wait(60))  # the tier's thread makes no tier meanwhile
    engine = engines(node)
    engine.store_until_found(keys_of(0, 4))
    assert tier_of(node).fleet is None
    may_go.set()
    engine.wait_for(lambda: store.num_objects == 8)


# -- prefetches --------------------------------------------------------------------------------------------------------

TRIP = context_id("trip")


def use(engine: RawEngine, keys: list[bytes], hints: Hints) -> None:
    """A request has used these keys; in two parts, the end first."""
    for start, some in ((4, keys[4:]), (0, keys[:4])):
        engine.scheduler.send(Use(some, start, (0, len(keys)), hints))
    engine.lookup(keys[:1], Hold.NOTHING)  # the service has read them by then


def found(node: Node) -> int:
    """How many of the first ten keys are in the pool, which may have evicted others."""
    return int(only_pool(node).facade.admin.lookup(keys_of(0, 10)).present.count(True))


def test_a_context_is_fetched_when_somebody_asks_for_it(
    make_node: MakeNode, engines: Engines, store: ControlledStore
) -> None:
    keys = keys_of(0, 10)
    put_elsewhere(make_node, engines, store, keys)
    node = make_node()
    engine = engines(node)
    engine.store_until_found(keys_of(100, 1))
    use(engine, keys, Hints(TRIP))
    pool = only_pool(node).name
    engine.wait_for(lambda: tier_of(node).may_have_more)
    assert found(node) == 0
    engine.wait_for(lambda: node_tier(node).prefetch(pool, TRIP) == 10 and found(node) == 10)  # memory comes by and by
    (totals,) = node_tier(node).totals().values()
    assert totals.prefetched_blocks >= 10
    assert totals.saved_seconds == 0.0
    assert engine.load(keys) == 10
    with pytest.raises(NotFoundError):
        node_tier(node).prefetch(pool, context_id("walk"))
    use(engine, keys, Hints(TRIP, release=True))
    with pytest.raises(NotFoundError):
        node_tier(node).prefetch(pool, TRIP)


def test_a_context_is_fetched_shortly_before_it_is_expected(
    make_node: MakeNode, engines: Engines, store: ControlledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(0, 10)
    put_elsewhere(make_node, engines, store, keys)
    node = make_node()
    engine = engines(node)
    engine.store_until_found(keys_of(100, 1))
    engine.wait_for(lambda: tier_of(node).may_have_more)
    seconds, hits, is_on = [3600.0], [0], [True]
    namespace, facade, tier = tier_of(node).control.namespace.name, only_pool(node).facade, tier_of(node)

    def context(context: bytes) -> list[Any]:
        return [SimpleNamespace(namespace=namespace, blocks=10, hits=hits[0], resume_in_seconds=seconds[0])]

    monkeypatch.setattr(facade, "context", context)
    monkeypatch.setattr(facade, "claims", lambda: SimpleNamespace(is_on=is_on[0]))
    looked: list[dict[bytes, float]] = []

    def look() -> None:
        tier._schedule(TRIP)
        looked.append(dict(tier._due_at))

    for hits[0], is_on[0] in ((0, True), (10, False)):  # it never came back; hints are off
        looked.clear()
        use(engine, keys, Hints(TRIP, 3600.0))
        tier._do(look)
        engine.wait_for(lambda: bool(looked))
        assert looked == [{}]
    hits[0], is_on[0] = 10, True
    for _ in range(100):  # each request says it anew
        use(engine, keys, Hints(TRIP, 3600.0))
    engine.wait_for(lambda: bool(tier._due_at))
    assert (len(tier._due_at), len(tier._due) <= 67, found(node)) == (1, True, 0)
    seconds[0] = 0.5

    def is_fetched() -> bool:
        use(engine, keys, Hints(TRIP, 0.5))
        return found(node) == 10

    engine.wait_for(is_fetched)
    seconds[0] = 3600.0
    use(engine, keys, Hints(TRIP, 3600.0))
    engine.wait_for(lambda: bool(tier._due_at))
    tier._do(lambda: tier.fail(ValueError("a defect")))
    engine.wait_for(lambda: tier.fleet is None)
    assert tier.next_deadline is None, "the thread waits for no prefetch that nobody begins"


def test_no_prefetch_begins_while_a_request_waits_for_the_store(
    make_node: MakeNode, engines: Engines, store: ControlledStore
) -> None:
    put_elsewhere(make_node, engines, store, keys_of(0, 10))
    node = make_node()
    engine = engines(node)
    engine.store_until_found(keys_of(100, 1))
    use(engine, keys_of(4, 6), Hints(TRIP))
    call = begin_fetch(engine, store, keys_of(0, 4))
    tier = tier_of(node)
    assert tier.prefetch(TRIP) == 6
    engine.wait_for(lambda: bool(tier._prefetches))
    assert (tier._prefetch, found(node)) == (None, 0)
    store.gets.open()
    engine.wait_for(lambda: call.done and tier.prefetch(TRIP) and found(node) == 10)


def test_of_each_context_the_last_chain_is_known() -> None:
    known = ContextKeys()
    chain = keys_of(0, 6)
    assert known.note(TRIP, chain, release=False)
    assert known.of(TRIP) == chain
    assert known.note(TRIP, chain[:1], release=False)
    assert known.of(TRIP) == chain[:1]
    assert not known.note(TRIP, chain, release=True)
    assert known.of(TRIP) == []


def test_the_keys_that_are_known_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow_service.node.tier.namespacetier.MOST_KEPT_BYTES", 10 * len(key_of(0)))
    known = ContextKeys()
    names = [context_id(str(number)) for number in range(3)]
    for name in names:
        known.note(name, keys_of(0, 5), release=False)
    assert [len(known.of(name)) for name in names] == [0, 5, 5]
    known.note(names[0], keys_of(0, 11), release=False)
    assert known.of(names[0]) == []
