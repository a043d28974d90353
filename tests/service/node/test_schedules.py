"""Random schedules of engines that share a node: they attach, store, load, hang, die at any point and copy late.

Everything is real but the processes: pools, budget, extents and their bytes. Every write that an engine was allowed to
begin happens at some point before the death of its process, however late, and every read is compared with what the key
stands for. Taking out a safeguard must show as wrong bytes, or as something that is never freed.
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace
from tests.seeds import few_and_many
from tests.service.node.hostbench import Engine, HostBench
from tests.service.node.rawengine import HELLO, NAMESPACE, SLOT_BYTES, key_of

from kvstow.attach.calls import ExtentSlots, Hold
from kvstow.attach.hello import Hello
from kvstow.attach.identity import NamespaceIdentity
from kvstow.attach.peer import Peer
from kvstow.control.attachedsession import AttachedSession
from kvstow.errors import LeaseError
from kvstow.memory.rows import BookedExtent
from kvstow_service.node.nodehost import NodeHost
from kvstow_service.node.pools.memoryholder import RankMemory
from kvstow_service.node.pools.nodepool import KnownNamespace, NodePool
from kvstow_service.node.pools.nodesession import NodeSession

STEPS = 800
_KEYS = 60
_MARK_BYTES = 48


class WrongBytesError(AssertionError):
    """A load has read what another block holds, or memory that the engine does not have."""


class Copy(NamedTuple):
    rank: int
    extent_id: int
    offset: int
    content: bytes


@dataclass
class Transfer:
    """An op under way: what is still to be copied, by rank. A rank without any has yet to say so."""

    is_store: bool
    copies: dict[int, list[Copy]]
    unsaid: set[int] = field(default_factory=set)


@dataclass
class Client:
    """An engine and its processes. `dead`: ranks whose process has ended."""

    engine: Engine
    meaning: bytes
    registered: dict[int, dict[int, int]] = field(default_factory=dict)
    transfers: dict[int, Transfer] = field(default_factory=dict)
    leases: list[tuple[int, list[int]]] = field(default_factory=list)
    joined: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    is_lost: bool = False
    was_reset: bool = False


class Schedule:
    def __init__(self, bench: HostBench, seed: int) -> None:
        self.bench = bench
        self.random = random.Random(seed)
        self.clients: list[Client] = []
        self.maps: dict[int, mmap.mmap] = {}
        self.loads = 0
        self.recalls = 0
        self.late_writes = 0
        self.epochs = 0

    def run(self) -> None:
        actions: list[tuple[int, Callable[[], object]]] = [
            (2, self.attach),
            (8, self.bench.run_memory),
            (8, self.bench.run_posted),
            (14, self.register),
            (10, self.store),
            (10, self.look_up),
            (8, self.load),
            (20, self.copy_some),
            (20, self.complete),
            (3, self.release_lease),
            (3, self.release_revoked),
            (1, self.reset),
            (2, self.lose),
            (4, self.die),
            (3, self.pass_time),
            (10, self.report),
            (1, self.delete_pools),
        ]
        weights = [weight for weight, _ in actions]
        for _ in range(STEPS):
            ((_, action),) = self.random.choices(actions, weights)
            action()
        self.finish()

    # -- attaching ------------------------------------------------------------------------------------------

    def attach(self) -> None:
        if sum(not client.is_lost for client in self.clients) >= 4:
            return
        weights, uid = self.random.choice("ab"), self.random.choice((1000, 1001))
        hello = replace(HELLO, namespace=replace(NAMESPACE, weights_id=weights))
        client = Client(self.bench.attach(hello, uid), f"{weights}{uid}".encode())
        client.registered = {rank: {} for rank in range(client.engine.num_ranks)}
        self.clients.append(client)
        for rank in range(client.engine.num_ranks):
            client.engine.join(rank)
            client.joined.add(rank)
            client.engine.report(rank)
        if self.random.random() < 0.7:
            self.bench.run_memory()
            self.bench.run_posted()
            self.register(client)

    def register(self, client: Client | None = None) -> None:
        client = client or self.pick()
        if client is None:
            return
        for rank, grants in client.engine.grants.items():
            said = client.registered[rank]
            for grant in grants.values():
                most = min(grant.num_slots, client.engine.populated[grant.extent_id] // SLOT_BYTES)
                revoked = grant.extent_id in client.engine.revoked.get(rank, [])
                if not revoked and said.get(grant.extent_id, 0) < most:
                    said[grant.extent_id] = self.random.randint(said.get(grant.extent_id, 0), most)
            told = [ExtentSlots(*one) for one in said.items()]
            client.engine.session.registered(rank, told)

    # -- transfers ------------------------------------------------------------------------------------------

    def store(self) -> None:
        if (client := self.pick()) is None:
            return
        first = self.random.randrange(_KEYS)
        numbers = list(range(first, first + self.random.randint(1, 8)))
        begun = client.engine.begin_store(*numbers)
        if begun.op_id:
            keys = [key_of(numbers[index]) for index in begun.accepted]
            self.begin(client, begun.op_id, keys, begun.slots, is_store=True)

    def look_up(self) -> None:
        if (client := self.pick()) is None:
            return
        first = self.random.randrange(_KEYS)
        numbers = list(range(first, first + 8))
        found = client.engine.find(*numbers, hold=self.random.choice((Hold.LEADING, Hold.PRESENT)))
        if found.lease_id:
            keys = [number for start, length in found.runs for number in numbers[start : start + length]]
            client.leases.append((found.lease_id, keys))

    def load(self) -> None:
        client = self.pick()
        if client is None or not client.leases:
            return
        lease_id, numbers = client.leases.pop(self.random.randrange(len(client.leases)))
        try:
            begun = client.engine.begin_load(lease_id, len(numbers))
        except LeaseError:  # it ended for a newer one
            return
        self.begin(client, begun.op_id, [key_of(number) for number in numbers], begun.slots, is_store=False)

    def begin(self, client: Client, op_id: int, keys: list[bytes], slots: tuple[int, ...], *, is_store: bool) -> None:
        ranks = range(client.engine.num_ranks)
        copies = {
            rank: [
                Copy(rank, *self.place_of(client, rank, slot), key + bytes([rank]) + client.meaning)
                for key, slot in zip(keys, slots, strict=True)
            ]
            for rank in ranks
        }
        client.transfers[op_id] = Transfer(is_store, copies, set(ranks))

    def place_of(self, client: Client, rank: int, slot: int) -> tuple[int, int]:
        for extent_id, grant in client.engine.grants.get(rank, {}).items():
            at = slot - grant.first_slot
            if 0 <= at < grant.num_slots:
                if at >= client.registered[rank].get(extent_id, 0):
                    raise WrongBytesError(f"slot {slot} is not registered on rank {rank}")
                return extent_id, at * SLOT_BYTES
        raise WrongBytesError(f"slot {slot} lies in no extent of rank {rank}")

    def copy_some(self) -> None:
        """Of engines that live. What lost ones have begun is copied late: see `die`."""
        waiting = [
            (client, transfer, copies)
            for client in self.clients
            for transfer in client.transfers.values()
            for copies in transfer.copies.values()
            if not client.is_lost
        ]
        for _ in range(self.random.randint(1, 20)):
            if waiting:
                client, transfer, copies = self.random.choice(waiting)
                if copies:
                    self.copy(client, transfer, copies.pop(self.random.randrange(len(copies))))

    def copy(self, client: Client, transfer: Transfer, one: Copy) -> None:
        memory = self.memory_of(one.extent_id)
        if transfer.is_store:
            self.late_writes += client.is_lost
            memory[one.offset : one.offset + _MARK_BYTES] = one.content.ljust(_MARK_BYTES, b".")
        elif not client.is_lost:
            found = memory[one.offset : one.offset + _MARK_BYTES].rstrip(b".")
            if found != one.content:
                raise WrongBytesError(f"{found!r} in place of {one.content!r}")
            self.loads += 1

    def memory_of(self, extent_id: int) -> mmap.mmap:
        if extent_id not in self.maps:
            extent = self.bench.memory.memory.extents.get(extent_id)
            assert extent is not None
            self.maps[extent_id] = mmap.mmap(extent.fd, extent.num_bytes)
        return self.maps[extent_id]

    def complete(self) -> None:
        """One rank says that its copies of an op are done."""
        if (client := self.pick()) is None:
            return
        ready = [
            (op_id, transfer, rank)
            for op_id, transfer in client.transfers.items()
            for rank in transfer.unsaid
            if not transfer.copies[rank]
        ]
        for op_id, transfer, rank in self.random.sample(ready, min(len(ready), 4)):
            transfer.unsaid.discard(rank)
            client.engine.complete(op_id, ranks=[rank])
            if not transfer.unsaid:
                del client.transfers[op_id]

    def release_lease(self) -> None:
        client = self.pick()
        if client is not None and client.leases:
            lease_id, _ = client.leases.pop()
            client.engine.session.release_leases([lease_id])

    def release_revoked(self) -> None:
        """Of a worker that copies nothing to or from them any more."""
        if (client := self.pick()) is None:
            return
        for rank, revoked in list(client.engine.revoked.items()):
            used = {copy.extent_id for one in client.transfers.values() for copy in one.copies[rank]}
            if used.isdisjoint(revoked):
                for extent_id in revoked:
                    client.registered[rank].pop(extent_id, None)
                client.engine.release_revoked(rank)
                self.recalls += 1

    def reset(self) -> None:
        """From now on its keys mean something else."""
        if (client := self.pick()) is not None:
            self.bench.host.reset(client.engine.session_id)
            self.epochs += 1
            client.meaning = client.meaning[:5] + b"r%d" % self.epochs
            client.leases.clear()

    # -- ends -----------------------------------------------------------------------------------------------

    def lose(self) -> None:
        """Its connections end. Its processes go on for a while."""
        if (client := self.pick()) is not None:
            client.is_lost = True
            client.engine.lose()

    def die(self) -> None:
        """A process of a lost engine ends. Its device may still have written just before."""
        lost = [client for client in self.clients if client.is_lost]
        if not lost:
            return
        client = self.random.choice(lost)
        rank = self.random.choice(sorted(client.joined - client.dead))
        for transfer in client.transfers.values():
            for one in transfer.copies[rank]:
                if self.random.random() < 0.8:
                    self.copy(client, transfer, one)
        client.dead.add(rank)
        if client.engine.grants.get(rank) is not None:
            client.engine.let_go(rank)
        if client.dead == client.joined:
            self.bench.run_posted()  # what was on its way to it
            client.engine.over()
            self.clients.remove(client)

    def pass_time(self) -> None:
        """Enough for transfers to become stuck, or only for reports to grow old."""
        self.bench.clock.advance(self.random.choice((0.1, 0.1, 3.0, 40.0)))
        self.bench.host.tick()
        self.bench.host.send_settled()
        for client in self.clients:
            if not client.is_lost and self.random.random() < 0.8:
                client.engine.report()

    def report(self) -> None:
        if (client := self.pick()) is not None:
            client.engine.report()

    def delete_pools(self) -> None:
        for pool in self.bench.host.pools():
            if not self.bench.host.has_sessions(pool):
                self.bench.host.delete_pool(pool.name)

    def pick(self) -> Client | None:
        living = [client for client in self.clients if not client.is_lost]
        return self.random.choice(living) if living else None

    def finish(self) -> None:
        """All engines end in an orderly way; then nothing may be left."""
        for client in self.clients:
            if not client.is_lost:
                client.is_lost = True
                client.engine.lose()
        while self.clients:
            self.die()
        self.bench.run()
        for pool in self.bench.host.pools():
            slots = pool.facade.stats().pool.slots
            left = (slots.filling, slots.leased, slots.quarantined)
            assert left == (0, 0, 0), f"slots were never freed: {slots}"
            assert not [session for session in pool.attached() if session.is_engine]
        self.delete_pools()
        self.bench.run()
        self.close()  # the mappings of the processes, so that nothing counts any more that was closed meanwhile
        self.bench.memory.check()
        self.bench.run()
        assert self.bench.budget.spare_bytes == self.bench.budget.total_bytes, "an extent was never given back"

    def close(self) -> None:
        for memory in self.maps.values():
            memory.close()
        self.maps.clear()


def run(path: Path, seed: int) -> Schedule:
    bench = HostBench(path, extents=4)
    schedule = Schedule(bench, seed)
    try:
        schedule.run()
    finally:
        schedule.close()
        bench.close()
    return schedule


def run_all(path: Path, seeds: range) -> list[Schedule]:
    return [run(path, seed) for seed in seeds]


@pytest.mark.parametrize("seeds", few_and_many(20, 100))
def test_no_byte_is_wrong_and_nothing_is_left(seeds: range, tmp_path: Path) -> None:
    schedules = run_all(tmp_path, seeds)
    assert sum(schedule.loads for schedule in schedules) > 8 * len(seeds)
    assert sum(schedule.recalls for schedule in schedules) > len(seeds) // 5
    assert sum(schedule.late_writes for schedule in schedules) > len(seeds)


# -- what happens without a safeguard --------------------------------------------------------------------------------


def slots_are_freed_at_the_end_of_the_connection(patch: pytest.MonkeyPatch) -> None:
    lose = NodeSession.lose

    def lose_and_free(session: NodeSession, reason: str) -> None:
        lose(session, reason)
        for client in map(session.client, range(len(session.ranks))):
            session.pool.process_died(client)

    patch.setattr(NodeSession, "lose", lose_and_free)


def a_clock_frees_what_lost_sessions_hold(patch: pytest.MonkeyPatch) -> None:
    tick, lose, lost = NodeHost.tick, NodeSession.lose, list[NodeSession]()

    def note_and_lose(session: NodeSession, reason: str) -> None:
        lost.append(session)
        lose(session, reason)

    def tick_and_free(host: NodeHost) -> None:
        tick(host)
        for session in lost:
            for client in map(session.client, range(len(session.ranks))):
                session.pool.process_died(client)
        lost.clear()

    patch.setattr(NodeSession, "lose", note_and_lose)
    patch.setattr(NodeHost, "tick", tick_and_free)


def extents_change_hands_while_they_are_mapped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BookedExtent, "may_change_hands", property(lambda extent: extent.recalled))


def slots_are_shown_that_no_worker_has_registered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RankMemory, "registered_slots", property(lambda memory: memory.top_slot))


def the_weights_are_no_part_of_a_namespace(patch: pytest.MonkeyPatch) -> None:
    namespace_of = NodePool.namespace_of

    def of_any_weights(pool: NodePool, identity: NamespaceIdentity) -> KnownNamespace:
        return namespace_of(pool, replace(identity, weights_id="any"))

    patch.setattr(NodePool, "namespace_of", of_any_weights)


def users_share_a_pool(patch: pytest.MonkeyPatch) -> None:
    open_session = NodeHost.open_session

    def of_any_user(host: NodeHost, session_id: str, hello: Hello, peer: Peer, *rest: Any) -> Any:
        return open_session(host, session_id, hello, Peer(peer.pid, 0, peer.gid, None), *rest)

    patch.setattr(NodeHost, "open_session", of_any_user)


def a_reset_keeps_the_namespace(patch: pytest.MonkeyPatch) -> None:
    reset = AttachedSession.reset
    patch.setattr(AttachedSession, "reset", lambda session: reset(session, session.namespace.name))


MUTANTS = (
    slots_are_freed_at_the_end_of_the_connection,
    a_clock_frees_what_lost_sessions_hold,
    extents_change_hands_while_they_are_mapped,
    slots_are_shown_that_no_worker_has_registered,
    the_weights_are_no_part_of_a_namespace,
    users_share_a_pool,
    a_reset_keeps_the_namespace,
)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_taking_out_a_safeguard_is_noticed(
    mutant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rare one at first by a seed that is known to notice it."""
    known: dict[Callable[[pytest.MonkeyPatch], None], int] = {a_clock_frees_what_lost_sessions_hold: 133}
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        run_all(tmp_path, range(known.get(mutant, 0), 400))
