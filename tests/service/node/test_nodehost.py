"""The control plane of a node: its sessions, what they may say, and how they end."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace
from tests.service.node.conftest import MakeBench
from tests.service.node.hostbench import ONE_RANK, ONE_RANK_OTHER, ROW_SLOTS, Engine, HostBench, grown
from tests.service.node.rawengine import HELLO, key_of
from tests.service.node.wholenode import EXTENT

from kvstow.attach.calls import ExtentSlots, Found, Hold, Lookup
from kvstow.attach.channel import Frame
from kvstow.attach.hello import TRANSIENT_REFUSALS, Hello
from kvstow.attach.wire import Kind
from kvstow.control.namespaces import KeyMap
from kvstow.errors import AttachRefusedError, ConflictError, InvalidRequestError, NotFoundError
from kvstow.keys import make_key
from kvstow.results import NO_LEASE
from kvstow_service.node import nodehost
from kvstow_service.node.attach.attachserver import answer_to
from kvstow_service.node.pools import nodesession
from kvstow_service.node.pools.nodesession import Member


def test_a_worker_whose_descriptors_cannot_be_sent_gets_them_later(bench: HostBench) -> None:
    engine = bench.attach(ONE_RANK)
    engine.refuses_fds = True
    engine.join()
    bench.run()
    (row,) = bench.budget.pool(engine.pool.name).rows.values()
    assert bench.budget.mappers(row.extents[0]) == [f"pool {engine.pool.name}"], "no worker has it"
    assert "Too many open files" in bench.memory.figures.failures[0]
    engine.refuses_fds = False
    bench.run()
    assert bench.memory.figures.failures == ()
    engine.register()
    assert bench.host.sessions()[0].registered_slots == ROW_SLOTS


def test_a_session_that_is_lost_before_its_memory_is_sent_leaves_nothing(bench: HostBench) -> None:
    engine = bench.attach(ONE_RANK)
    engine.join()
    bench.run_memory()
    engine.lose()
    engine.over()
    bench.run()
    (row,) = bench.budget.pool(engine.pool.name).rows.values()
    assert bench.budget.mappers(row.extents[0]) == [f"pool {engine.pool.name}"]
    assert bench.host.sessions() == []
    other = bench.attach(ONE_RANK)
    other.join()
    other.lose()
    bench.run()
    other.over()
    bench.run()
    assert bench.budget.mappers(row.extents[0]) == [f"pool {engine.pool.name}"]


LEASES = range(1, 21)


def hello_of(number: int) -> Hello:
    """Of an engine with a memory layout of its own."""
    assert ONE_RANK.pool is not None
    return replace(ONE_RANK, pool=replace(ONE_RANK.pool, kv_cache_dtype=f"dtype{number}"))


def test_a_user_has_so_many_pools_and_one_without_sessions_makes_room(
    bench: HostBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodehost, "POOLS_OF_USER", 3)
    first, second, _ = (bench.attach(hello_of(number)) for number in range(3))
    with pytest.raises(
        AttachRefusedError, match="engines of uid 1000 have 3 pools, and no more are allowed"
    ) as refused:
        bench.attach(hello_of(3))
    assert refused.value.reason in TRANSIENT_REFUSALS
    bench.attach(hello_of(2))
    bench.attach(hello_of(3), uid=2000)
    second.end()
    bench.run()
    fourth = bench.attach(hello_of(3))
    names = [pool.name for pool in bench.host.pools()]
    assert first.answer.pool in names
    assert second.answer.pool not in names
    assert fourth.answer.pool in names


@pytest.mark.parametrize("why", ["identity", "memory", "sharing_off", "user_limit"])
def test_an_engine_that_is_refused_costs_no_pool_and_leaves_none(
    bench: HostBench, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(nodehost, "POOLS_OF_USER", 2)
    idle, other = bench.start(hello_of(0)), bench.attach(hello_of(1))
    idle.store(1)
    idle.end()
    bench.run()
    names = [pool.name for pool in bench.host.pools()]
    assert ONE_RANK.pool is not None
    hello = hello_of(2)
    match why:
        case "identity":
            hello = replace(hello, pool=replace(ONE_RANK.pool, slot_bytes=()))
        case "memory":
            hello = replace(hello, pool=replace(ONE_RANK.pool, slot_bytes=(1 << 40,)))
        case "sharing_off":
            hello = replace(hello, require_sharing=True)
        case "user_limit":
            monkeypatch.setattr(nodehost, "NAMESPACES_OF_USER", 1)
    with pytest.raises(AttachRefusedError) as refused:
        bench.attach(hello)
    assert refused.value.reason == why
    bench.run()
    assert [pool.name for pool in bench.host.pools()] == names == [idle.answer.pool, other.answer.pool]
    assert bench.start(hello_of(0)).has(1)


def test_the_sessions_of_a_user_have_so_many_ranks(bench: HostBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodehost, "RANKS_OF_USER", 5)
    one, _ = bench.attach(), bench.attach()
    with pytest.raises(AttachRefusedError, match="sessions of uid 1000 have 4 ranks, and 5 are allowed") as refused:
        bench.attach()
    assert refused.value.reason == "user_limit"
    bench.attach(ONE_RANK)
    bench.attach(uid=2000)
    one.end()
    bench.attach()


def test_a_user_has_so_many_namespaces(bench: HostBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodehost, "NAMESPACES_OF_USER", 2)
    assert ONE_RANK.namespace is not None
    hellos = [replace(ONE_RANK, namespace=replace(ONE_RANK.namespace, weights_id=f"w{number}")) for number in range(3)]
    first, second = bench.start(hellos[0]), bench.attach(hellos[1])
    for number in range(3):
        first.store(number)
        bench.host.reset(first.session_id)
    assert len(first.pool.known) > 3, "those that reset their cache share an identity"
    bench.attach(hellos[0])
    with pytest.raises(AttachRefusedError, match="pools of uid 1000 have 2 namespaces, and no more are allowed"):
        bench.attach(hellos[2])
    bench.attach(hellos[1])
    bench.attach(hellos[2], uid=2000)
    second.end()
    bench.engines[-2].end()
    bench.attach(hellos[2])


def test_the_namespace_that_was_left_first_makes_room_for_another(
    bench: HostBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine without PYTHONHASHSEED has another namespace at each start, and its blocks stay."""
    monkeypatch.setattr(nodehost, "NAMESPACES_OF_USER", 2)
    assert ONE_RANK.namespace is not None
    hellos = [replace(ONE_RANK, namespace=replace(ONE_RANK.namespace, hash_probe=f"h{number}")) for number in range(4)]
    for number, hello in enumerate(hellos):
        engine = bench.start(hello)
        assert engine.store(number).op_id
        if number < 3:
            engine.end()
        bench.run()
    assert len(bench.host.namespaces()) == 4, "blocks of two are the next to be evicted"
    assert len(engine.pool.known) == 2
    assert bench.start(hellos[2]).has(2)
    with pytest.raises(AttachRefusedError, match="2 namespaces, and no more are allowed"):
        bench.attach(hellos[0])
    bench.engines[-1].end()
    bench.run()
    assert bench.start(hellos[0]).has(0) == 0


def test_a_session_keeps_no_identities_of_its_own(bench: HostBench) -> None:
    one, other = bench.attach(), bench.attach()
    found = [engine.session.hello for engine in (one, other)]
    assert [hello.pool for hello in found] == [None, None]
    assert found[0].namespace is found[1].namespace
    assert found[0].namespace == HELLO.namespace


@pytest.mark.parametrize("end", [Engine.end, lambda engine: engine.session.release_leases(LEASES)])
def test_many_slots_are_freed_by_the_thread_of_the_memory(bench: HostBench, end: Callable[[Engine], object]) -> None:
    """While the attach server's thread answers others, and one slice between two actions of its own."""
    engine = bench.start(ONE_RANK)
    engine.store(*range(8))
    engine.pool.slice_slots = engine.pool.debts.slice_slots = 20
    shared = engine.pool
    for _ in LEASES:
        engine.find(*range(8), hold=Hold.PRESENT)

    def held() -> int:
        return shared.debts.num_slots + sum(len(slots) for one in shared.attached() for slots in one.held_slots())

    end(engine)
    assert held() >= 8 * len(LEASES) - 20
    for number in range(3):
        before, ran = held(), list[int]()
        bench.memory.do(ran.append, number)
        bench.run_memory()
        assert 0 < before - held() <= 20
        assert ran == [number]
        shared.facade.check_integrity()
    while shared.debts.exist:
        bench.run_memory()
    assert shared.facade.stats().pool.slots.leased == 0


def test_extents_that_a_worker_was_not_sent_are_refused(bench: HostBench) -> None:
    engine, other = bench.start(ONE_RANK), bench.start(ONE_RANK_OTHER)
    (mine,), (foreign,) = engine.grants[0], other.grants[0]
    for extents, says in (
        ([ExtentSlots(foreign, 1)], "this worker was not sent extent"),
        ([ExtentSlots(mine, 1), ExtentSlots(9999, 1)], "this worker was not sent extent"),
        ([ExtentSlots(mine, ROW_SLOTS + 1)], "its 32 slots at most"),
    ):
        with pytest.raises(InvalidRequestError, match=says):
            engine.session.registered(0, extents)
    with pytest.raises(InvalidRequestError, match="this worker was not sent extent"):
        engine.session.released(0, [foreign])
    with pytest.raises(InvalidRequestError, match="was not revoked"):
        engine.session.released(0, [mine])
    bench.run()
    assert engine.client(0) in bench.budget.mappers(mine)
    assert bench.host.sessions()[0].registered_slots == ROW_SLOTS


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
    assert bench.memory.figures.allocated_bytes == 8 * EXTENT


def test_a_pool_may_be_deleted_as_soon_as_its_last_session_is_over(
    bench: HostBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory goes back although a session of an earlier service had a claim to it."""
    engine = bench.start()
    name, do = engine.pool.name, bench.memory.do
    bench.budget.attach(name, "earlier")
    bench.memory._pools[name].claims = {"earlier"}
    engine.lose()
    engine.let_go()
    deleting = threading.Thread(target=bench.host.delete_pool, args=(name,))

    def delete_first(action: Callable[..., object], *given: object) -> None:
        """Unless the host's lock keeps it from that, another thread deletes the pool before its claims end."""
        if action == bench.memory.end_claims:
            deleting.start()
            deleting.join(0.2)
        do(action, *given)

    monkeypatch.setattr(bench.memory, "do", delete_first)
    engine.over()
    deleting.join(30)
    assert bench.host.pools() == []
    bench.run()
    again = bench.start()
    assert again.answer.pool == name
    assert again.store(1).op_id


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
    bench.memory.do(bench.memory.revoke_all)
    bench.memory.do(ended.append, True)
    late = bench.attach()
    late.join()
    bench.run()
    assert ended == [True]
    assert {rank: set(extents) for rank, extents in first.revoked.items()} == {
        rank: set(grants) for rank, grants in first.grants.items()
    }
    assert late.grants == {}


def test_a_prompt_of_16_000_tokens_is_looked_up_in_one_turn(bench: HostBench) -> None:
    """In several turns, a look-up took twice the time."""
    engine = grown(bench)
    engine.store(1)
    hashes = (hashlib.sha256(bytes([number % 256, number // 256])).digest() for number in range(999))
    call = Lookup([key_of(1), *(make_key(0, block_hash) for block_hash in hashes)], counted=False)
    member = Member(engine.session, engine.hello, engine.peer())
    found = answer_to(bench.host, member, Frame(Kind.LOOKUP, 1, call.pack()))
    assert isinstance(found, Found), "not a call that goes on in the next turn"
    assert [tuple(run) for run in found.runs] == [(0, 1)]


@pytest.mark.parametrize("hold", Hold)
@pytest.mark.parametrize("numbers", [range(1, 13), range(1, 9), [1, 2, 1, 3, 30, 4, 2, 5, 9], [20, 1, 2, 3, 4, 5]])
def test_a_lookup_in_slices_finds_and_holds_the_same(
    bench: HostBench, monkeypatch: pytest.MonkeyPatch, hold: Hold, numbers: Sequence[int]
) -> None:
    engine = grown(bench)
    engine.store(*range(1, 9), 11, 12)
    session, index = engine.session, engine.pool.index
    asked: list[int] = []
    for name in ("slots_of", "leading_runs"):
        real = getattr(KeyMap, name)

        def counted(self: KeyMap, keys: Sequence[bytes], *rest: object, real: Callable[..., object] = real) -> object:
            asked.append(len(keys))
            return real(self, keys, *rest)

        monkeypatch.setattr(KeyMap, name, counted)

    def found_and_held() -> tuple[object, ...]:
        found = engine.find(*numbers, hold=hold)
        slots = session.control.find_lease(found.lease_id).slots if found.lease_id else ()
        held = index.held.slots()
        session.release_leases([found.lease_id])
        bench.run()
        assert not index.held
        return found.runs, slots, held

    whole = found_and_held()
    asked.clear()
    monkeypatch.setattr(nodesession, "LOOKUP_SLICE", 4)
    assert found_and_held() == whole
    assert max(asked) <= 4


@pytest.mark.parametrize("hold", Hold)
def test_a_lookup_of_a_session_that_has_ended_meanwhile_finds_nothing_and_is_no_error(
    bench: HostBench, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    """One of its processes has ended, and its scheduler goes on asking; or it ends between two slices."""
    engine = grown(bench)
    engine.store(1, 2, 3)
    monkeypatch.setattr(nodesession, "LOOKUP_SLICE", 2)
    steps = engine.session.lookup_in_steps(Lookup([key_of(number) for number in (1, 2, 3)], hold, counted=False))
    next(steps)
    engine.session.control.lose("a test")
    assert isinstance(nodesession.result_of(steps), Found), "nobody reads it any more"
    assert not engine.find(1, 2, 3, hold=hold).runs or not hold
    assert engine.session.control.leases.num_slots == 0


def test_leases_that_were_broken_meanwhile_are_not_joined(bench: HostBench) -> None:
    engine = grown(bench)
    engine.store(1, 2)
    control = engine.session.control
    keys = [key_of(1), key_of(2)]
    leases = [control.acquire([key]) for key in keys]
    control.leases.break_all()
    assert control.join_leases(leases) == NO_LEASE
    assert not engine.pool.index.held
