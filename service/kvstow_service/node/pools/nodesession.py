"""An engine's session over the wire, on top of a session of the control plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

from kvstow.attach.calls import (
    BeginLoad,
    BeginStore,
    BlockChange,
    Completions,
    EventPage,
    Found,
    Hold,
    LoadBegun,
    Lookup,
    LookupPrompt,
    Pending,
    ReadEvents,
    SettledOp,
    SettledOps,
    StoreBegun,
)
from kvstow.attach.extentcalls import ExtentGrant, ExtentSlots
from kvstow.attach.hello import Hello
from kvstow.attach.peer import Peer
from kvstow.control.attachedsession import AttachedSession
from kvstow.control.namespaces import runs_without
from kvstow.errors import LeaseError
from kvstow.messages import DesiredState, RankReport
from kvstow.status import HostedSession
from kvstow_service.node.attach.sessionhost import Later, SessionLink
from kvstow_service.node.pools.memorywaits import MemoryWaits
from kvstow_service.node.pools.rankmemory import RankMemory
from kvstow_service.node.survival.workerrecord import WorkerRecord

if TYPE_CHECKING:
    from kvstow_service.node.pools.nodepool import KnownNamespace, NodePool
    from kvstow_service.node.tier.namespacetier import NamespaceTier

_L = TypeVar("_L", Lookup, LookupPrompt)

_OPS_PER_FRAME = 10_000
_EVENTS_PER_PAGE = 64
_KEYS_PER_PAGE = 2048
"""A page ends with the event that reaches this number: 3,071 keys at most, 0.1 MB."""


class NodeSession:
    """One attached engine. Used only by the attach server's thread, except `view` and what never changes.

    What a worker has registered and let go of is taken from its messages about each extent, not from its reports.
    """

    is_engine = True
    """False for the node's own transfers, which do not keep a pool."""
    tier: NamespaceTier | None = None
    """The fleet tier for its namespace."""

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
        self._began = pool.clock()
        self._waits = MemoryWaits(pool.clock)

    def client(self, rank: int) -> str:
        """The name of a rank's worker among all processes of the node."""
        return f"{self.session_id}/{rank}"

    def clients(self) -> list[str]:
        return [self.client(rank) for rank in range(len(self.ranks))]

    @property
    def is_complete(self) -> bool:
        """Whether the worker of every rank has attached."""
        return len(self.workers) == len(self.ranks)

    def numa_nodes(self) -> list[int | None]:
        """The NUMA node of each rank's device, if it is known."""
        return [self.workers[rank].numa_node if rank in self.workers else None for rank in range(len(self.ranks))]

    def wanted_slots(self) -> int | None:
        """How many slots the engine asks for. None for all of them."""
        if not self.hello.wanted_bytes:
            return None
        return max(1, self.hello.wanted_bytes // sum(self.pool.stored_slot_bytes))

    def worker_record(self, hello: Hello, peer: Peer) -> WorkerRecord:
        """What the next service has to know about a worker."""
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
        """`later`: see `SessionHost.lookup`. Waits for blocks in memory that the ranks are about to register."""
        if later is not None and call.hold != Hold.ALL and self._waits_for_memory(call, self._look_up, later):
            return Pending()
        return self._look_up(call, later)

    def _waits_for_memory(self, call: _L, look_up: Callable[[_L, Later], Found | Pending], later: Later) -> bool:
        """Whether the lookup is answered later because the ranks are about to register some of what it finds."""
        slots = self.control.out_of_reach(call.keys)
        if not slots:
            return False
        tokens = len(slots) * max((group.block_tokens for group in self.pool.identity.groups), default=0)
        return self._waits.put(max(slots) + 1, tokens, partial(self._look_again, look_up, call, later))

    def _look_again(self, look_up: Callable[[_L, Later], Found | Pending], call: _L, later: Later) -> None:
        """Look again after the wait for memory."""
        if not self.control.is_lost:
            later(partial(look_up, call, later))

    def _look_up(self, call: Lookup, later: Later | None) -> Found | Pending:
        """Hold what the pool has while the tier may have more."""
        tier = self.tier
        if tier is None or call.hold in (Hold.NOTHING, Hold.ALL) or later is None or not tier.may_have_more:
            return self._find(call)
        held = self._find(replace(call, counted=False))
        num_found = sum(length for _, length in held.runs)
        if num_found == len(call.keys):
            if call.counted:
                self.control.count_lookup(len(call.keys), num_found)
            return held
        tier.ask(call.keys, partial(self._answer, call, held, later))
        return Pending()

    def lookup_prompt(self, call: LookupPrompt, later: Later | None = None) -> Found | Pending:
        """`later`: see `SessionHost.lookup_prompt`. Waits for memory as `lookup` does."""
        if later is not None and self._waits_for_memory(call, self._look_up_prompt, later):
            return Pending()
        return self._look_up_prompt(call, later)

    def _look_up_prompt(self, call: LookupPrompt, later: Later | None) -> Found | Pending:
        lookup = Lookup(call.keys, Hold.NOTHING, counted=False)
        found = self._find(lookup)
        tier = self.tier
        if tier is None or later is None or not tier.may_have_more or found.leading == len(call.keys):
            return found
        tier.ask_prompt(call.keys, partial(self._answer, lookup, found, later))
        return Pending()

    def _answer(self, call: Lookup, before: Found, later: Later) -> None:
        """Answer: the tier has nothing more to fetch. On the attach server's thread."""
        if not self.control.is_lost:
            later(partial(self._find_anew, call, before))

    def _find_anew(self, call: Lookup, before: Found) -> Found:
        """`before`: what was found, and held, when the tier was asked."""
        found = self._find(call)
        if before.lease_id:
            self.release((before.lease_id,))
        return replace(found, fetched=tuple(runs_without(found.runs, before.runs)))

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
        op = self.control.begin_load(lease, blocks, first=call.first, request_id=call.request_id, choice=call.choice)
        return LoadBegun(op.op_id, op.slots)

    def begin_store(self, call: BeginStore) -> StoreBegun:
        grant = self.control.begin_store(call.keys, range(len(call.keys)), request_id=call.request_id)
        room = self.control.store_room()
        if grant.op is None:
            return StoreBegun(0, (), (), tuple(grant.unplaced), grant.outcomes, room)
        return StoreBegun(grant.op.op_id, grant.accepted, grant.op.slots, tuple(grant.unplaced), grant.outcomes, room)

    def read_events(self, call: ReadEvents) -> EventPage:
        """O(events returned), whatever the other namespaces of the pool do."""
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
        self._advance_waits()
        return desired

    def granted(self, rank: int, grants: Sequence[ExtentGrant]) -> None:
        """The extents were sent to the worker."""
        self.ranks[rank].granted(grants)

    def revoked(self, rank: int, extent_ids: Sequence[int]) -> None:
        """The worker was asked to let go of these extents."""
        self.ranks[rank].revoked(extent_ids)

    def registered(self, rank: int, extents: Sequence[ExtentSlots]) -> None:
        self.ranks[rank].registered(extents)
        self._tell_control(rank)
        self._advance_waits()

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

    @property
    def next_deadline(self) -> float | None:
        """When a lookup has waited long enough for memory. None if none waits."""
        return self._waits.next_deadline

    def expire_waits(self) -> None:
        """Answer the lookups that have waited long enough for memory."""
        self._waits.expire()

    def _advance_waits(self) -> None:
        self._waits.advance(min(memory.registered_slots for memory in self.ranks))

    def _follow_pool(self, rank: int) -> RankMemory:
        """Treat the newest desired state as applied by the rank once the rank has no memory above it."""
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
