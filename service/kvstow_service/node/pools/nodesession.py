"""A session of the wire, over a session of the control plane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from kvstow.attach.calls import (
    BeginLoad,
    BeginStore,
    Completions,
    Found,
    Hold,
    LoadBegun,
    Lookup,
    Pending,
    SettledOp,
    SettledOps,
    StoreBegun,
)
from kvstow.attach.eventcalls import BlockChange, EventPage, ReadEvents
from kvstow.attach.extentcalls import ExtentGrant, ExtentSlots
from kvstow.attach.hello import Hello
from kvstow.attach.peer import Peer
from kvstow.control.attachedsession import AttachedSession
from kvstow.errors import LeaseError
from kvstow.messages import DesiredState, RankReport
from kvstow.status import HostedSession
from kvstow_service.node.attach.sessionhost import Later, SessionLink
from kvstow_service.node.pools.rankmemory import RankMemory
from kvstow_service.node.survival.workerrecord import WorkerRecord

if TYPE_CHECKING:
    from kvstow_service.node.pools.nodepool import KnownNamespace, NodePool
    from kvstow_service.node.tier.namespacetier import NamespaceTier

_OPS_PER_FRAME = 10_000
_EVENTS_PER_PAGE = 64
_KEYS_PER_PAGE = 2048
"""A page ends with the event that reaches it: 3,071 keys at most, 0.1 MB."""


class NodeSession:
    """One engine that is attached. Used by the attach server's thread alone, but for `view` and what never changes.

    What a worker has registered and let go of is taken from its word about each extent, and not from its reports.
    """

    is_engine = True
    """False for the node's own transfers, which do not keep a pool."""
    tier: NamespaceTier | None = None
    """The fleet tier of its namespace."""

    def __init__(
        self,
        session_id: str,
        hello: Hello,
        peer: Peer,
        link: SessionLink,
        pool: NodePool,
        namespace: KnownNamespace,
        control: AttachedSession,
    ) -> None:
        self.session_id = session_id
        self.hello = hello
        self.pid = peer.pid or hello.pid
        self.link = link
        self.pool = pool
        self.namespace = namespace
        self.control = control
        control.name = session_id
        control.label = f"session {session_id} ({hello.engine}): "
        self.ranks = [RankMemory() for _ in range(pool.config.num_ranks)]
        self.workers: dict[int, Hello] = {}
        """The hellos of the workers that have attached, by rank."""
        self.awaited_extents: dict[int, int] = {}
        """By rank: of the service before, and not handed back yet."""
        self._began = pool.clock()

    def client(self, rank: int) -> str:
        """Names the worker of a rank among all processes of the node."""
        return f"{self.session_id}/{rank}"

    def clients(self) -> list[str]:
        return [self.client(rank) for rank in range(len(self.ranks))]

    @property
    def is_complete(self) -> bool:
        """Whether the worker of every rank has attached."""
        return len(self.workers) == len(self.ranks)

    def numa_nodes(self) -> list[int | None]:
        """The node of each rank's device, where it is known."""
        return [self.workers[rank].numa_node if rank in self.workers else None for rank in range(len(self.ranks))]

    def wanted_slots(self) -> int | None:
        """What the engine asks for; None for all that there are."""
        if not self.hello.wanted_bytes:
            return None
        return max(1, self.hello.wanted_bytes // sum(self.pool.stored_slot_bytes))

    def worker_record(self, hello: Hello, peer: Peer) -> WorkerRecord:
        """What the service after this one has to know of a worker."""
        return WorkerRecord.of(
            hello,
            peer,
            session_id=self.session_id,
            client=self.client(hello.rank),
            number=self.control.session_id,
            pool=self.pool.name,
            namespace=self.namespace.name,
            wanted_slots=self.wanted_slots(),
        )

    # -- calls of the scheduler half ------------------------------------------------------------------------

    def lookup(self, call: Lookup, later: Later | None = None) -> Found | Pending:
        """`later`: see `SessionHost.lookup`. While the tier may have more, what the pool has is held."""
        tier = self.tier
        if tier is None or call.hold not in (Hold.LEADING, Hold.PRESENT):
            return self._find(call)
        if later is None or not tier.may_have_more:
            found = self._find(call)
            tier.note_used(call.keys, found.runs)
            return found
        held = self._find(replace(call, counted=False))
        tier.note_used(call.keys, held.runs)
        num_found = sum(length for _, length in held.runs)
        if num_found == len(call.keys):
            if call.counted:
                self.control.count_lookup(len(call.keys), num_found)
            return held
        tier.ask(call.keys, partial(self._answer, call, held.lease_id, later))
        return Pending()

    def _answer(self, call: Lookup, held: int, later: Later) -> None:
        """The tier has nothing more to bring. On the attach server's thread."""
        if self.control.is_lost:
            return
        found = self._find(call)
        if held:
            self.release((held,))
        later(found)

    def _find(self, call: Lookup) -> Found:
        control, keys = self.control, call.keys
        if call.hold == Hold.LEADING:
            lease = control.acquire(keys, count=call.counted)
            return Found(lease.lease_id, ((0, len(lease.keys)),) if lease.keys else ())
        if call.hold == Hold.PRESENT:
            lease, runs = control.acquire_runs(keys, count=call.counted)
            return Found(lease.lease_id, tuple(runs))
        if call.hold == Hold.ALL:
            held = control.lease(keys) if keys else None
            found = Found(0, ()) if held is None else Found(held.lease_id, ((0, len(keys)),))
        else:
            found = Found(0, tuple(control.find_runs(keys)))
        if call.counted:
            control.count_lookup(len(keys), sum(length for _, length in found.runs))
        return found

    def release(self, lease_ids: Sequence[int]) -> None:
        for lease_id in lease_ids:
            try:
                lease = self.control.find_lease(lease_id)
            except LeaseError:
                continue  # it has ended
            self.control.release_lease(lease)

    def begin_load(self, call: BeginLoad) -> LoadBegun:
        lease = self.control.find_lease(call.lease_id)
        blocks = range(min(call.count, len(lease.slots) + 1))
        op = self.control.begin_load(lease, blocks, first=call.first, request_id=call.request_id)
        return LoadBegun(op.op_id, op.slots)

    def begin_store(self, call: BeginStore) -> StoreBegun:
        grant = self.control.begin_store(call.keys, range(len(call.keys)), request_id=call.request_id)
        room = self.control.store_room()
        if grant.op is None:
            return StoreBegun(0, (), (), tuple(grant.unplaced), grant.outcomes, room)
        return StoreBegun(grant.op.op_id, grant.accepted, grant.op.slots, tuple(grant.unplaced), grant.outcomes, room)

    def read_events(self, call: ReadEvents) -> EventPage:
        """O(events given), whatever the other namespaces of the pool do."""
        log, tag = self.pool.events, self.control.namespace.tag
        page = log.read(call.after, _EVENTS_PER_PAGE)
        changes: list[BlockChange] = []
        num_keys, cursor = 0, page.cursor
        for event in page.events:
            num_keys += len(event.keys)
            if event.namespace == tag:  # clients may store keys of any length
                changes += [BlockChange(event.kind, list(keys)) for _, keys in groupby(event.keys, len)]
            if num_keys >= _KEYS_PER_PAGE:
                cursor = event.sequence
                break
        return EventPage(cursor, tuple(changes), page.lost > 0, cursor < log.last_sequence)

    def complete(self, call: Completions) -> None:
        self.control.complete(call.rank, call.boot_id, call.completions)
        self.send_settled()

    def send_settled(self) -> None:
        """Send what has become final, if anything has."""
        if not self.control.ops.settled:
            return
        settled = [SettledOp(one.op_id, one.direction, one.mark, one.error) for one in self.control.take_settled()]
        room = self.control.store_room()
        for start in range(0, len(settled), _OPS_PER_FRAME):
            self.link.push(SettledOps(tuple(settled[start : start + _OPS_PER_FRAME]), room))

    # -- memory ---------------------------------------------------------------------------------------------

    def take_report(self, rank: int, report: RankReport) -> DesiredState:
        memory = self._follow_pool(rank)
        report = replace(
            report,
            pinned_slots=memory.registered_slots,
            engine_id=self.pool.desired.engine_id,
            applied=memory.applied,
        )
        desired = self.control.report(report)
        self.send_settled()
        return desired

    def granted(self, rank: int, grants: Sequence[ExtentGrant]) -> None:
        """The extents are on their way."""
        self.ranks[rank].granted(grants)

    def revoked(self, rank: int, extent_ids: Sequence[int]) -> None:
        """The worker is asked to let go of them."""
        self.ranks[rank].revoked(extent_ids)

    def registered(self, rank: int, extents: Sequence[ExtentSlots]) -> None:
        self.ranks[rank].registered(extents)
        self._tell_control(rank)

    def released(self, rank: int, extent_ids: Sequence[int]) -> None:
        self.ranks[rank].released(extent_ids)
        self._tell_control(rank)

    def follow_pool(self) -> None:
        """The pool has become smaller."""
        for rank in range(len(self.ranks)):
            self._tell_control(rank)

    def _tell_control(self, rank: int) -> None:
        memory = self._follow_pool(rank)
        self.control.set_memory(rank, memory.registered_slots, memory.applied)

    def _follow_pool(self, rank: int) -> RankMemory:
        """The rank has applied the newest desired state if it has no memory above."""
        memory, desired = self.ranks[rank], self.pool.desired
        if memory.top_slot <= desired.capacity_slots:
            memory.applied = desired.number
        return memory

    # -- status ---------------------------------------------------------------------------------------------

    def view(self) -> HostedSession:
        """From any thread."""
        status = self.control.status()
        hello = self.hello
        return HostedSession(
            session_id=self.session_id,
            engine=hello.engine,
            model=hello.namespace.model if hello.namespace else "",
            pool=self.pool.name,
            namespace=status.namespace,
            host=hello.host,
            pid=self.pid,
            age_seconds=self.pool.clock() - self._began,
            status=status,
        )
