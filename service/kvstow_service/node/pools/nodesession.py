"""An engine's session over the wire, on top of a session of the control plane, and the memory that its workers have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

from kvstow.attach.calls import (
    BeginLoad,
    BeginStore,
    BlockChange,
    Completions,
    EventPage,
    ExtentGrant,
    ExtentSlots,
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
    Use,
)
from kvstow.attach.hello import Hello, digest_of
from kvstow.attach.peer import Peer
from kvstow.control.attachedsession import AttachedSession
from kvstow.control.namespaces import runs_without
from kvstow.errors import InvalidRequestError, LeaseError
from kvstow.hints import Hints
from kvstow.messages import DesiredState, RankReport
from kvstow.prefill import PrefillCost
from kvstow.source import Source
from kvstow.status import SessionStatus
from kvstow_service.node.attach.sessionhost import Later, SessionLink
from kvstow_service.node.pools.nodepool import KnownNamespace, NodePool
from kvstow_service.node.survival.roster import WorkerRecord


@dataclass(slots=True)
class _GrantedExtent:
    grant: ExtentGrant
    registered: int = 0
    revoked: bool = False

    @property
    def end(self) -> int:
        return self.grant.first_slot + self.grant.num_slots


class RankMemory:
    """The extents that a worker was sent and has not released. Used only by the attach server's thread. O(extents
    given), except `released`, which is O(all extents)."""

    def __init__(self) -> None:
        self._by_id: dict[int, _GrantedExtent] = {}
        self._by_number: dict[int, _GrantedExtent] = {}
        self._num_full = 0
        """How many leading extents have all their slots registered."""
        self.top_slot = 0
        """A slot number that is above all slots of all its extents."""
        self.applied = 0
        """The newest desired state above whose capacity the worker is known to have no memory."""

    def granted(self, grants: Iterable[ExtentGrant]) -> None:
        """Extents were sent to the worker."""
        for grant in grants:
            extent = self._by_id[grant.extent_id] = self._by_number[grant.number] = _GrantedExtent(grant)
            self.top_slot = max(self.top_slot, extent.end)

    def revoked(self, extent_ids: Iterable[int]) -> None:
        """The worker was asked to release these extents."""
        for extent_id in extent_ids:
            if extent_id in self._by_id:
                self._by_id[extent_id].revoked = True

    def registered(self, extents: Sequence[ExtentSlots]) -> None:
        """The worker can copy to and from so many slots of each extent. Raises `InvalidRequestError`, and changes
        nothing, for extents that it does not have, or that have fewer slots."""
        for extent_id, num_slots in extents:
            if num_slots > self._find(extent_id).grant.num_slots:
                raise InvalidRequestError(
                    f"{num_slots} slots of extent {extent_id} are registered; "
                    f"allowed: its {self._find(extent_id).grant.num_slots} slots at most"
                )
        for extent_id, num_slots in extents:
            extent = self._find(extent_id)
            extent.registered = num_slots
            if num_slots < extent.grant.num_slots:
                self._num_full = min(self._num_full, extent.grant.number)
        while (following := self._by_number.get(self._num_full)) and following.registered == following.grant.num_slots:
            self._num_full += 1

    def released(self, extent_ids: Sequence[int]) -> None:
        """The worker has released these extents. Raises `InvalidRequestError`, and changes nothing, for extents that
        it was not asked to release."""
        for extent_id in extent_ids:
            if not self._find(extent_id).revoked:
                raise InvalidRequestError(
                    f"extent {extent_id} was not revoked: a worker keeps what it was sent until then"
                )
        for extent_id in set(extent_ids):
            extent = self._by_id.pop(extent_id)
            number = extent.grant.number
            if self._by_number.get(number) is extent:
                del self._by_number[number]
                self._num_full = min(self._num_full, number)
        self.top_slot = max((extent.end for extent in self._by_id.values()), default=0)

    @property
    def registered_slots(self) -> int:
        """The number below which all slots are registered. O(1)."""
        extent = self._by_number.get(self._num_full)
        if extent is not None:
            return extent.grant.first_slot + extent.registered
        return self._by_number[self._num_full - 1].end if self._num_full else 0

    def _find(self, extent_id: int) -> _GrantedExtent:
        extent = self._by_id.get(extent_id)
        if extent is None:
            raise InvalidRequestError(f"extent {extent_id} is none that this worker was sent")
        return extent


MOST_SECONDS = 1.0
TOKENS_PER_SECOND = 16_000
"""A lookup is worth waiting for as long as it would take to compute the tokens at this speed, which is that of an 8B
model on an H200."""
STALLED_SECONDS = 1.0
"""Registering counts as stalled if no slot was added for this long."""
MOST_WAITING = 256


class _Wait(NamedTuple):
    end: int
    until: float
    answer: Callable[[], object]


class MemoryWaits:
    """The lookups of one session that wait for memory. An engine that restarts takes seconds to register 40 GiB.
    Without waiting, its first request would find nothing and be computed, which slows registering down.

    Used only by the attach server's thread. The owner calls `expire` at `next_deadline`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slots = 0
        self._grown_at = clock()
        self._rate: float | None = None
        self._waiting: list[_Wait] = []
        self.next_deadline: float | None = None
        """When the first wait is over. None if there is none."""

    def put(self, end: int, tokens: int, answer: Callable[[], object]) -> bool:
        """Call `answer` once all slots below `end` are registered, or the time is over that computing `tokens` takes.
        Returns False, and never calls it, if registering has stalled or would take more than twice as long. `answer`
        must not raise."""
        now = self._clock()
        seconds = min(MOST_SECONDS, tokens / TOKENS_PER_SECOND)
        if len(self._waiting) >= MOST_WAITING or now - self._grown_at > STALLED_SECONDS:
            return False
        if self._rate is not None and end - self._slots > 2 * seconds * self._rate:
            return False
        self._waiting.append(_Wait(end, now + seconds, answer))
        self._note_deadline()
        return True

    def advance(self, slots: int) -> None:
        """All ranks have registered this many slots. Answers the lookups that have waited for these slots."""
        now = self._clock()
        if slots > self._slots:
            seconds = now - self._grown_at
            if self._slots and seconds > 0:  # the first slots come after the mapping
                self._rate = (slots - self._slots) / seconds
            self._grown_at = now
        self._slots = slots
        self.expire()

    def expire(self) -> None:
        """Answer the lookups that have waited long enough, and those whose memory is registered. O(1) without any."""
        if not self._waiting:
            return
        now = self._clock()
        waiting, self._waiting = self._waiting, []
        over = list[_Wait]()
        for wait in waiting:
            (over if wait.end <= self._slots or wait.until <= now else self._waiting).append(wait)
        self._note_deadline()
        for wait in over:
            wait.answer()

    def _note_deadline(self) -> None:
        self.next_deadline = min((wait.until for wait in self._waiting), default=None)


_MAX_TEXT = 200  # of an engine's own description, in a record
_OPS_PER_FRAME = 10_000
_EVENTS_PER_PAGE = 64
_KEYS_PER_PAGE = 2048
"""A page ends with the event that reaches this number: 3,071 keys at most, 0.1 MB."""


HINTS_PER_SECOND = 1000
"""Of one session, as many at once, too. No engine ends so many requests."""


class Rate:
    """Admits so many a second, and as many at once after a second without."""

    def __init__(self, per_second: float) -> None:
        self._per_second = self._left = per_second
        self._at = 0.0

    def admits(self, now: float) -> bool:
        self._left = min(self._per_second, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class SessionTier(Protocol):
    """The fleet tier of a session's namespace: see `NamespaceTier`."""

    @property
    def may_have_more(self) -> bool: ...

    def ask(self, keys: Sequence[bytes], then: Callable[[], object]) -> None: ...

    def ask_prompt(self, keys: Sequence[bytes], then: Callable[[], object]) -> None: ...

    def note_prefill(self, cost: PrefillCost) -> None: ...


class MemoryHolder:
    """A client of a pool's memory, with a worker for each rank: an engine's session, or the tier's transfers.

    What a worker has registered and released is taken from its messages about each extent, not from its reports. Used
    only by the attach server's thread, except what never changes.
    """

    def __init__(
        self,
        session_id: str,
        link: SessionLink,
        pool: NodePool,
        namespace: KnownNamespace,
        control: AttachedSession,
        wanted_slots: int | None,
    ) -> None:
        """`wanted_slots`: how many slots it asks for; None for all of them."""
        self.session_id, self.link = session_id, link
        self.pool, self.namespace, self.control = pool, namespace, control
        self.wanted_slots = wanted_slots
        self.ranks = [RankMemory() for _ in range(pool.config.num_ranks)]

    def client(self, rank: int) -> str:
        """The name of a rank's worker among all processes of the node."""
        return f"{self.session_id}/{rank}"

    def clients(self) -> list[str]:
        return [self.client(rank) for rank in range(len(self.ranks))]

    def worker_record(self, hello: Hello, peer: Peer) -> WorkerRecord:
        """What the next service has to know about a worker."""
        return WorkerRecord(
            session_id=self.session_id,
            client=self.client(hello.rank),
            token_digest=digest_of(hello.token),
            number=self.control.session_id,
            pool=self.pool.name,
            namespace=self.namespace.name,
            rank=hello.rank,
            wanted_slots=self.wanted_slots,
            engine=hello.engine[:_MAX_TEXT],
            host=hello.host[:_MAX_TEXT],
            pid=hello.pid,
            device=hello.device[:_MAX_TEXT],
            uid=peer.uid,
            gid=peer.gid,
            has_pidfd=peer.pidfd is not None,
        )

    def registered(self, rank: int, extents: Sequence[ExtentSlots]) -> None:
        self.ranks[rank].registered(extents)
        self._update_control(rank)

    def released(self, rank: int, extent_ids: Sequence[int]) -> None:
        self.ranks[rank].released(extent_ids)
        self._update_control(rank)

    def follow_pool(self) -> None:
        """The pool has become smaller."""
        for rank in range(len(self.ranks)):
            self._update_control(rank)

    def _update_control(self, rank: int) -> None:
        memory = self._memory_of(rank)
        self.control.set_memory(rank, memory.registered_slots, memory.applied)

    def _memory_of(self, rank: int) -> RankMemory:
        """Treats the newest desired state as applied by the rank once the rank has no memory above it."""
        memory, desired = self.ranks[rank], self.pool.desired
        if memory.top_slot <= desired.capacity_slots:
            memory.applied = desired.number
        return memory


class NodeSession(MemoryHolder):
    """One attached engine. Used only by the attach server's thread, except `view` and what never changes."""

    tier: SessionTier | None = None
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
        wanted = max(1, hello.wanted_bytes // sum(pool.stored_slot_bytes)) if hello.wanted_bytes else None
        super().__init__(session_id, link, pool, namespace, control, wanted)
        self.hello = hello
        self.pid = peer.pid or hello.pid
        control.name = session_id
        control.model = hello.namespace.model if hello.namespace else ""
        control.label = f"session {session_id} ({hello.engine}): "
        self.workers: dict[int, Hello] = {}
        """The hellos of the workers that have attached, by rank."""
        self.waits = MemoryWaits(pool.clock)
        self._hint_rate = Rate(HINTS_PER_SECOND)
        self._began = pool.clock()

    @property
    def is_complete(self) -> bool:
        """Whether the worker of every rank has attached."""
        return len(self.workers) == len(self.ranks)

    def numa_nodes(self) -> list[int | None]:
        """The NUMA node of each rank's device, if it is known."""
        return [self.workers[rank].numa_node if rank in self.workers else None for rank in range(len(self.ranks))]

    # -- calls of the scheduler half ------------------------------------------------------------------------

    def lookup(self, call: Lookup, later: Later | None = None) -> Found | Pending:
        """`later`: see `SessionHost.lookup`."""
        return self._look_up(call, later)

    def lookup_prompt(self, call: LookupPrompt, later: Later | None = None) -> Found | Pending:
        """`later`: see `SessionHost.lookup_prompt`."""
        return self._look_up(Lookup(call.keys, Hold.NOTHING, counted=False), later, is_prompt=True)

    def _look_up(
        self, call: Lookup, later: Later | None, *, is_prompt: bool = False, has_waited: bool = False
    ) -> Found | Pending:
        """Waits for blocks in memory that the ranks are about to register. Then holds what the pool has while the tier
        may have more."""
        if later is None or call.hold == Hold.ALL:
            return self._find(call)
        if not has_waited and self._waits_for_memory(call, later, is_prompt=is_prompt):
            return Pending()
        tier = self.tier
        if tier is None or not tier.may_have_more or (call.hold == Hold.NOTHING and not is_prompt):
            return self._find(call)
        held = self._find(Lookup(call.keys, call.hold, counted=False))
        num_found = sum(length for _, length in held.runs)
        if num_found == len(call.keys):
            if call.counted:
                self.control.count_lookup(len(call.keys), num_found)
            return held
        ask = tier.ask_prompt if is_prompt else tier.ask
        ask(call.keys, partial(self._answer, call, held, later))
        return Pending()

    def _waits_for_memory(self, call: Lookup, later: Later, *, is_prompt: bool) -> bool:
        """Whether the lookup is answered later because the ranks are about to register some of what it finds."""
        slots = self.control.out_of_reach(call.keys)
        if not slots:
            return False

        def look_again() -> None:
            if not self.control.is_lost:
                later(partial(self._look_up, call, later, is_prompt=is_prompt, has_waited=True))

        tokens = len(slots) * max((group.block_tokens for group in self.pool.identity.groups), default=0)
        return self.waits.put(max(slots) + 1, tokens, look_again)

    def _answer(self, call: Lookup, before: Found, later: Later) -> None:
        """Answer: the tier has nothing more to fetch. On the attach server's thread."""
        if not self.control.is_lost:
            later(partial(self._find_anew, call, before))

    def _find_anew(self, call: Lookup, before: Found) -> Found:
        """`before`: what was found, and held, when the tier was asked."""
        found = self._find(call)
        if before.lease_id:
            self.release((before.lease_id,))
        return Found(found.lease_id, found.runs, tuple(runs_without(found.runs, before.runs)))

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
        self.control.release_leases(lease_ids)

    def begin_load(self, call: BeginLoad) -> LoadBegun:
        """Uses up the lease, also if it is broken: the engine that learns of that has nothing to do."""
        control, lease = self.control, self.control.find_lease(call.lease_id)
        blocks = range(min(call.count, len(lease.slots) + 1))
        try:
            op = control.begin_load(lease, blocks, first=call.first, request_id=call.request_id, choice=call.choice)
        except LeaseError:
            control.release_lease(lease)
            raise
        return LoadBegun(op.op_id, op.slots)

    def begin_store(self, call: BeginStore) -> StoreBegun:
        grant = self.control.begin_store(call.keys, range(len(call.keys)), request_id=call.request_id)
        room = self.control.store_room()
        if grant.op is None:
            return StoreBegun(0, (), (), tuple(grant.unplaced), grant.outcomes, room)
        return StoreBegun(grant.op.op_id, grant.accepted, grant.op.slots, tuple(grant.unplaced), grant.outcomes, room)

    def use(self, call: Use) -> None:
        hints = call.hints
        if hints is not None and not self._hint_rate.admits(self.pool.clock()):
            hints = Hints(ignored=("rate",))
        source = Source(*call.source)
        self.control.use(call.keys, start=call.start, looked_up=call.looked_up, hints=hints, source=source)

    def read_events(self, call: ReadEvents) -> EventPage:
        """O(events returned), whatever the other namespaces of the pool do."""
        log, tag = self.pool.events, self.control.namespace.tag
        page = log.read(call.after, _EVENTS_PER_PAGE)
        changes: list[BlockChange] = []
        num_keys, cursor = 0, page.cursor
        for event in page.events:
            num_keys += len(event.keys)
            if event.namespace == tag:
                changes.append(BlockChange(event.kind, list(event.keys)))
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
        memory = self._memory_of(rank)
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

    def registered(self, rank: int, extents: Sequence[ExtentSlots]) -> None:
        super().registered(rank, extents)
        self._advance_waits()

    def _advance_waits(self) -> None:
        self.waits.advance(min(memory.registered_slots for memory in self.ranks))

    # -- status ---------------------------------------------------------------------------------------------

    def status(self) -> SessionStatus:
        """From any thread."""
        hello = self.hello
        return replace(
            self.control.status(),
            engine=hello.engine,
            model=hello.namespace.model if hello.namespace else "",
            host=hello.host,
            pid=self.pid,
            age_seconds=self.pool.clock() - self._began,
        )
