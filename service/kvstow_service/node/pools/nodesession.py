"""An engine's session: the calls of its connections, made to a session of the control plane."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, TypeVar

from kvstow.attach.calls import (
    Admit,
    BeginLoad,
    BeginStore,
    BlockChange,
    Completions,
    CountLookup,
    DescribeStore,
    End,
    EventPage,
    ExtentSlots,
    Found,
    Hold,
    LoadBegun,
    Lookup,
    LookupPrompt,
    Pending,
    Prefill,
    ReadEvents,
    SettledOp,
    SettledOps,
    StoreBegun,
)
from kvstow.attach.hello import Hello
from kvstow.attach.peer import Peer
from kvstow.attach.wire import Message
from kvstow.control.attachedsession import AttachedSession
from kvstow.control.namespaces import joined_runs, runs_without
from kvstow.control.pooltier import PoolTier, TieredNamespace, TierWait
from kvstow.descriptions import BlockDescription
from kvstow.endings import Ending
from kvstow.errors import AttachRefusedError, LeaseError
from kvstow.hints import Hints
from kvstow.messages import DesiredState, RankReport
from kvstow.results import NO_LEASE, KeyRun, Lease, Needs
from kvstow.status import ProcessState, SessionStatus
from kvstow_service.node.pools.memoryholder import MemoryHolder
from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import KnownNamespace, NodePool

MOST_SECONDS = 1.0
"""How long a lookup waits for memory at most."""
TOKENS_PER_SECOND = 16_000
"""A lookup waits at most as long as computing its tokens would take at this speed, which is that of an 8B model on an
H200."""
STALLED_SECONDS = 1.0
"""Registering counts as stalled if it has added no slot for this long."""
MOST_WAITING = 256
"""How many lookups of a session may wait at a time. Further ones are answered at once."""


class SessionTier(NamedTuple):
    """What an engine's session has of the store below the pools. `needs_of` says what a hit needs where that is more
    than a leading run of blocks; see `PoolTier`."""

    pool: PoolTier
    of: TieredNamespace
    needs_of: Callable[[Sequence[bytes]], Needs | None]


class _Wait(NamedTuple):
    end: int
    until: float
    answer: Callable[[], object]


class MemoryWaits:
    """The lookups of one session that wait for memory. A restarted engine needs seconds to register 40 GiB. Without
    waiting, its first request would find nothing and be computed, which also slows down registering.

    Used only by the attach server's thread. The owner calls `expire` at `next_deadline`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slots = 0
        self._grown_at = clock()
        self._rate: float | None = None
        self._waiting: list[_Wait] = []

    @property
    def next_deadline(self) -> float | None:
        """When the first wait ends. None if no lookup waits."""
        return min((wait.until for wait in self._waiting), default=None)

    def put(self, end: int, tokens: int, answer: Callable[[], object]) -> bool:
        """Call `answer`, which must not raise, once all slots below `end` are registered, and at the latest after the
        time that computing `tokens` takes. Returns False, and never calls it, if registering has stalled or is expected
        to take more than twice that time."""
        now = self._clock()
        seconds = min(MOST_SECONDS, tokens / TOKENS_PER_SECOND)
        if len(self._waiting) >= MOST_WAITING or now - self._grown_at > STALLED_SECONDS:
            return False
        if self._rate is not None and end - self._slots > 2 * seconds * self._rate:
            return False
        self._waiting.append(_Wait(end, now + seconds, answer))
        return True

    def advance(self, slots: int) -> None:
        """Note that all ranks have registered this many slots."""
        now = self._clock()
        if slots > self._slots:
            seconds = now - self._grown_at
            if self._slots and seconds > 0:  # the time before the first slots went to mapping
                self._rate = (slots - self._slots) / seconds
            self._grown_at = now
        self._slots = slots
        self.expire()

    def expire(self) -> None:
        """Answer the lookups that have waited long enough, and those whose memory is registered. O(1) if none waits."""
        if not self._waiting:
            return
        now, waiting = self._clock(), self._waiting
        self._waiting = [wait for wait in waiting if wait.end > self._slots and wait.until > now]
        for wait in waiting:
            if wait.end <= self._slots or wait.until <= now:
                wait.answer()


CALL_SLICE = 256
"""How many items of a call are handled before other clients have their turn."""
LOOKUP_SLICE = 1024
"""How many keys are looked up before other clients have their turn. It is higher than `CALL_SLICE`, because a look-up
takes a fraction of the time of other calls, and a prompt of ordinary length should not have to wait between turns."""
_R = TypeVar("_R")
_Item = TypeVar("_Item")
Steps = Generator[None, None, _R]
"""A call in short steps, and its result."""


def result_of(steps: Steps[_R]) -> _R:
    """Make all steps, and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: _R = ended.value
            return result


def _parts(items: Sequence[_Item], size: int) -> list[Sequence[_Item]]:
    if len(items) <= size:
        return [items] if items else []
    return [items[start : start + size] for start in range(0, len(items), size)]


_OPS_PER_FRAME = 10_000
"""How many results one message has at most."""
_EVENTS_PER_PAGE = 64
"""How many events one page reads at most."""
_KEYS_PER_PAGE = 2048
"""A page ends with the event that reaches this number of keys. It has at most 3,071 keys, which take 0.1 MB."""
_DESCRIPTIONS_PER_PAGE = 1 << 20
"""A page ends with the event whose descriptions reach this number of bytes. Those of one event have 4 MiB at most."""
HINTS_PER_SECOND = 1000
"""How many requests of a session may bring hints per second, and in one burst. No engine has that many requests."""

Later = Callable[[Callable[[], Message]], object]
"""Sends the answer of a call that was not answered at once, such as a lookup that was answered with `Pending`. The
argument is a call that returns the answer, or `Pending` if it takes more time.

It makes that call at once, or never if the client has disconnected. An error in the call is sent as the answer. It
raises nothing itself."""


class Rate:
    """Admits this many events per second. After a second without any, it admits as many at once."""

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


class Member:
    """A process of a session: its scheduler half (`rank` is None) or the worker of a rank.

    With `has_memory`, it was sent descriptors, so the service must wait until the process has ended or has reported
    that it has released them. `has_ended` says that one of these has happened. `left_alive` is set after a mere report:
    the process, which is watched further because the report may be false.
    """

    __slots__ = ("has_ended", "has_memory", "hello", "is_connected", "left_alive", "peer", "rank", "session")

    def __init__(self, session: NodeSession, hello: Hello, peer: Peer) -> None:
        self.session = session
        self.hello = hello.in_session()
        self.peer = peer
        self.rank = None if hello.role == "scheduler" else hello.rank
        self.is_connected = True
        self.has_memory = False
        self.has_ended = False
        self.left_alive: Peer | None = None

    @property
    def is_awaited(self) -> bool:
        return self.has_memory and not self.has_ended


Send = Callable[["NodeSession", Message, int | None, Sequence[int]], object]
"""Sends a message to the worker of a rank or to the scheduler half: see `MemoryHolder.push`."""


class NodeSession(MemoryHolder):
    """One life of an attached engine: the connection of its scheduler half, and one for the worker of each rank. Only
    the attach server's thread calls its methods, except `status` and `push`. All engines depend on that thread, so no
    method may wait.

    If a call raises a `KvstowError`, the engine gets its code and message, and the session continues. A client may name
    ops, leases and extents that it does not have, so the session refuses all but its own.
    """

    tier: SessionTier | None = None
    """The session's access to the store below the pool. None if there is no store."""

    def __init__(
        self,
        session_id: str,
        hello: Hello,
        peer: Peer,
        token_digest: str,
        send: Send,
        pool: NodePool,
        namespace: KnownNamespace,
        control: AttachedSession,
        memory: MemoryThread,
        waiting: set[NodeSession],
    ) -> None:
        """`waiting` is a set to which the session adds itself when one of its lookups waits."""
        wanted = max(1, hello.wanted_bytes // sum(pool.stored_slot_bytes)) if hello.wanted_bytes else None
        super().__init__(session_id, pool, namespace, control, wanted)
        self.hello = hello
        self.token_digest = token_digest
        self.state: Literal["attached", "lost", "over"] = "attached"
        """A lost session is over once none of its processes can reach memory. See `SessionLife`, which sets it."""
        self.members: list[Member] = []
        """Includes processes that have ended."""
        self._send = send
        self.process: ProcessState = "unknown"
        """The state of the scheduler's process at the last `look`: see `SessionStatus`."""
        self._scheduler = Peer(peer.pid, peer.uid, peer.gid, None)
        control.set_name(session_id)
        self.workers: dict[int, Hello] = {}
        """The hellos of the workers that have attached, by rank."""
        self.waits = MemoryWaits(pool.clock)
        self._memory, self._waiting = memory, waiting
        self._hint_rate = Rate(HINTS_PER_SECOND)
        self._began = pool.clock()

    @property
    def uid(self) -> int:
        return self._scheduler.uid

    def push(self, message: Message, *, rank: int | None = None, fds: Sequence[int] = ()) -> None:
        self._send(self, message, rank, fds)

    def member_of(self, rank: int | None) -> Member | None:
        """The connected process of a rank, or the scheduler half."""
        return next((member for member in self.members if member.rank == rank and member.is_connected), None)

    def join_worker(self, hello: Hello, peer: Peer) -> None:
        """Add the worker of `hello.rank`. The caller has checked that it has the session's token and uid, and that the
        rank has no other worker. Raises `AttachRefusedError`."""
        try:
            self._memory.add_worker(self, hello, peer)
        except OSError as error:
            raise AttachRefusedError("no_descriptors", f"the node service has too few: {error.strerror}") from error
        self.workers[hello.rank] = hello
        if len(self.workers) == len(self.ranks):  # now the NUMA nodes of all devices are known
            nodes = [self.workers[rank].numa_node for rank in range(len(self.ranks))]
            self._memory.do(self._memory.start_session, self.pool, nodes)

    # -- calls of the scheduler half ------------------------------------------------------------------------

    def lookup(self, call: Lookup | LookupPrompt, later: Later | None = None) -> Found | Pending:
        """Look up blocks. If this returns `Pending`, the session calls `later` with the answer. Without `later`, the
        answer is returned at once."""
        return result_of(self.lookup_in_steps(call, later))

    def lookup_in_steps(self, call: Lookup | LookupPrompt, later: Later | None = None) -> Steps[Found | Pending]:
        is_prompt = isinstance(call, LookupPrompt)
        lookup = Lookup(call.keys, Hold.NOTHING, counted=False) if isinstance(call, LookupPrompt) else call
        answer = yield from self._look_up(lookup, later, is_prompt=is_prompt)
        if isinstance(answer, Pending):
            self._waiting.add(self)
        return answer

    def _look_up(self, call: Lookup, later: Later | None, *, is_prompt: bool) -> Steps[Found | Pending]:
        """Look up blocks, after waiting for those in memory that the ranks are about to register."""
        if later is None or call.hold == Hold.ALL:
            return (yield from self._find(call))
        slots: list[int] = []
        for part in _parts(call.keys, LOOKUP_SLICE):
            slots += self.control.out_of_reach(part)
            yield
        if slots:
            tokens = len(slots) * max((group.block_tokens for group in self.pool.identity.groups), default=0)
            then = partial(result_of, self._look_below(call, later, is_prompt=is_prompt))
            if self.waits.put(max(slots) + 1, tokens, partial(self._answer, later, then)):
                return Pending()
        return (yield from self._look_below(call, later, is_prompt=is_prompt))

    def _look_below(self, call: Lookup, later: Later, *, is_prompt: bool) -> Steps[Found | Pending]:
        """Look up blocks, and wait for those that the store below the pool may have, while the pool's own are held."""
        tier = self.tier
        if tier is None or not tier.pool.is_on(tier.of) or (call.hold == Hold.NOTHING and not is_prompt):
            return (yield from self._find(call))
        held = yield from self._find(Lookup(call.keys, call.hold, counted=False))
        num_found = sum(length for _, length in held.runs)
        needs = tier.needs_of(call.keys) if is_prompt else None
        if num_found < len(call.keys) and (needs is not None or not is_prompt):
            first = held.runs[0][1] if held.runs and not held.runs[0][0] and not is_prompt else 0
            waits: list[TierWait] = []
            then = partial(self._answer, later, partial(self._find_anew, call, held, waits))
            wait = yield from tier.pool.look_for(tier.of, self.control, call.keys, then, first=first, needs=needs)
            if wait is not None:
                waits.append(wait)
                return Pending()
        if call.counted:
            self.control.count_lookup(len(call.keys), num_found)
        return held

    def _answer(self, later: Later, call: Callable[[], Found | Pending]) -> None:
        """Answer a lookup whose wait is over. Called by the attach server's thread."""
        if not self.control.is_lost:
            later(call)

    def _find_anew(self, call: Lookup, before: Found, waits: Sequence[TierWait]) -> Found:
        """Look up again after waiting for the store. `before` is what was found, and held, when the wait began. The
        waits hold the blocks that have arrived since."""
        found = result_of(self._find(call))
        held = [lease.lease_id for wait in waits for lease in wait.leases]
        self.control.release_leases([before.lease_id, *held] if before.lease_id else held)
        fetched = tuple(runs_without(found.runs, before.runs))
        for wait in waits:
            wait.of.counters.hit_blocks += sum(length for _, length in fetched)
        return Found(found.lease_id, found.runs, fetched)

    def _find(self, call: Lookup) -> Steps[Found]:
        control, keys = self.control, call.keys
        leases: list[Lease] = []
        runs: list[KeyRun] = []
        num_found = 0
        for start, part in zip(range(0, len(keys), LOOKUP_SLICE), _parts(keys, LOOKUP_SLICE), strict=True):
            if start:
                yield
            most = min(len(keys), control.leases.max_slots)  # a session that has ended between two steps has no limit
            part = part[: max(0, int(most) - num_found)] if call.hold else part
            lease, found = self._find_part(part, call.hold)
            runs += [KeyRun(start + first, length) for first, length in found]
            num_found += sum(length for _, length in found)
            leases += [lease] if lease.slots else []
            if call.hold in (Hold.LEADING, Hold.ALL) and num_found < start + len(part):
                break
        if call.hold == Hold.ALL and num_found < len(keys):
            control.release_leases([lease.lease_id for lease in leases])
            leases, runs, num_found = [], [], 0
        lease = leases[0] if len(leases) == 1 else control.join_leases(leases) if leases else NO_LEASE
        if leases and not lease.slots:  # the session has lost its leases between two steps
            runs, num_found = [], 0
        if call.counted:
            control.count_lookup(len(keys), num_found)
        return Found(lease.lease_id, tuple(joined_runs(runs)))

    def _find_part(self, keys: Sequence[bytes], hold: Hold) -> tuple[Lease, list[KeyRun]]:
        control = self.control
        if hold == Hold.NOTHING:
            return NO_LEASE, control.find_runs(keys)
        if hold == Hold.PRESENT:
            return control.acquire_runs(keys, count=False)
        lease = control.acquire(keys, count=False) if hold == Hold.LEADING else control.lease(keys) or NO_LEASE
        return lease, [KeyRun(0, len(lease.slots))] if lease.slots else []

    def release_leases(self, lease_ids: Sequence[int]) -> None:
        result_of(self.release_in_steps(lease_ids))

    def release_in_steps(self, lease_ids: Sequence[int]) -> Steps[None]:
        for part in _parts(lease_ids, CALL_SLICE):
            self.control.release_leases(part)
            self._free_owed()
            yield

    def _free_owed(self) -> None:
        if self.pool.debts.exist:
            self._memory.free_owed(self.pool)

    def begin_load(self, call: BeginLoad) -> LoadBegun:
        """Begin a load, which ends the lease. If the lease is broken, it ends too, so that the engine need not release
        it."""
        control, lease = self.control, self.control.find_lease(call.lease_id)
        blocks = range(min(call.count, len(lease.slots) + 1))
        try:
            op = control.begin_load(lease, blocks, first=call.first, request_id=call.request_id, choice=call.choice)
        except LeaseError:
            control.release_lease(lease)
            self._free_owed()
            raise
        return LoadBegun(op.op_id, op.slots)

    def begin_store(self, call: BeginStore) -> StoreBegun:
        grant = self.control.begin_store(call.keys, range(len(call.keys)), request_id=call.request_id)
        self._free_owed()
        if self.pool.used_slots > self.pool.grow_above >= 0:
            self._memory.do(self._memory.grow, self.pool)
        op_id, slots = (0, ()) if grant.op is None else (grant.op.op_id, grant.op.slots)
        accepted = () if grant.op is None else grant.accepted
        room, incomplete = self.control.store_room(), self._incomplete()
        return StoreBegun(op_id, accepted, slots, tuple(grant.unplaced), grant.outcomes, room, incomplete)

    def describe_store(self, call: DescribeStore) -> None:
        self.control.describe_store(call.op_id, call.numbers, call.blocks)

    def _incomplete(self) -> tuple[int, ...]:
        """Take the requests that lack blocks, as far as the engine has not been told yet."""
        with self.pool.lock:
            found, self.control.incomplete = self.control.incomplete, []
        return tuple(found)

    def admit(self, call: Admit) -> None:
        result_of(self.admit_in_steps(call))

    def admit_in_steps(self, call: Admit) -> Steps[None]:
        hints = call.hints
        if hints is not None and not self._hint_rate.admits(self.pool.clock()):
            hints = Hints(ignored=("rate",))
        yield from self.control.admit_in_steps(
            call.keys, CALL_SLICE, number=call.number, looked_up=call.looked_up, hints=hints, salt=call.salt
        )
        if self.tier is not None:
            yield from self.tier.pool.note_use(self.tier.of, call.keys)

    def end(self, call: End) -> None:
        result_of(self.end_in_steps(call))

    def end_in_steps(self, call: End) -> Steps[None]:
        ending = Ending(call.status, call.tokens)
        more, others = call.more, call.others
        ended = yield from self.control.end_in_steps(call.number, ending, CALL_SLICE, more=more, others=others)
        if ended.is_incomplete:  # the engine may not have been told yet
            self.send_settled()
        hints = ended.hints
        if self.tier is not None and hints is not None and hints.context is not None:
            self.tier.pool.note_context(self.tier.of, hints.context)

    def count_lookup(self, call: CountLookup) -> None:
        self.control.count_lookup(call.queried, call.hits)

    def note_prefill(self, call: Prefill) -> None:
        news = call.news()
        self.control.note_prefill(news)
        if self.tier is not None:
            self.tier.pool.note_prefill(self.tier.of, news.cost)

    def read_events(self, call: ReadEvents) -> EventPage:
        """Return the next page of events, with what is known of the blocks that other sessions have stored. O(events
        read), of which the pool's other namespaces may have a part."""
        pool, session_id = self.pool, self.control.session_id
        log, tag = pool.events, self.control.namespace.tag
        page = log.read(call.after, _EVENTS_PER_PAGE)
        changes: list[BlockChange] = []
        num_keys, num_bytes, cursor = 0, 0, page.cursor
        for event in page.events:
            num_keys += len(event.keys)
            if event.namespace == tag:
                described: list[tuple[int, BlockDescription]] = []
                if event.kind == "stored":
                    with pool.lock:
                        described = pool.events.descriptions.find(tag, event.keys, session_id)
                    num_bytes += sum(description.num_bytes for _, description in described)
                changes.append(BlockChange(event.kind, list(event.keys), tuple(described)))
            if num_keys >= _KEYS_PER_PAGE or num_bytes >= _DESCRIPTIONS_PER_PAGE:
                cursor = event.sequence
                break
        return EventPage(cursor, tuple(changes), page.lost > 0, cursor < log.last_sequence)

    def complete_in_steps(self, call: Completions) -> Steps[None]:
        yield from self.control.complete_in_steps(call.rank, call.boot_id, call.completions)
        if self.tier is not None:
            self.tier.pool.write_stored()
        self.send_settled()
        self._free_owed()

    def send_settled(self) -> None:
        """Send results that have become final, and the requests that lack blocks. Sends nothing if there are none."""
        if not self.control.ops.settled and not self.control.incomplete:
            return
        settled = [SettledOp(one.op_id, one.direction, one.mark, one.error) for one in self.control.take_settled()]
        room = self.control.store_room()
        for start in range(0, max(1, len(settled)), _OPS_PER_FRAME):
            self.push(SettledOps(tuple(settled[start : start + _OPS_PER_FRAME]), room, self._incomplete()))

    # -- memory ---------------------------------------------------------------------------------------------

    def take_report_in_steps(self, report: RankReport) -> Steps[DesiredState]:
        memory = self._memory_of(report.rank)
        yield from self.control.report_in_steps(
            replace(
                report,
                pinned_slots=memory.registered_slots,
                engine_id=self.pool.target.desired.engine_id,
                applied=memory.applied,
            )
        )
        self.send_settled()
        self._free_owed()
        self._advance_waits()
        return self.control.desired()

    def registered(self, rank: int, extents: Sequence[ExtentSlots]) -> None:
        super().registered(rank, extents)
        self._advance_waits()

    def released(self, rank: int, extent_ids: Sequence[int]) -> None:
        super().released(rank, extent_ids)
        self._memory.do(self._memory.release, self.client(rank), extent_ids)

    def _advance_waits(self) -> None:
        self.waits.advance(min(memory.registered_slots for memory in self.ranks))

    # -- the end --------------------------------------------------------------------------------------------

    def lose(self, reason: str) -> None:
        """End the session's calls, because one of its connections has ended. Its leases and the slots that it fills go
        into quarantine, because its processes may still read and write these slots."""
        self.control.lose(reason)
        self._free_owed()
        self._memory.do(self._memory.lose_session, self)

    def end_worker(self, rank: int, left_alive: Peer | None = None) -> None:
        """End a worker. Its process has ended, or has reported that it has nothing mapped and no copy under way. The
        attach server calls this after `lose`, for workers that were sent descriptors. `left_alive` is a process that
        has only reported it, and now belongs to the memory thread. If it keeps memory, that is deducted from its own
        user: see `MemoryBudget`."""
        client = self.client(rank)
        self.pool.process_died(client)
        self._memory.do(self._memory.end_client, client, left_alive)
        self._free_owed()

    def look(self) -> None:
        """Find out whether the scheduler's process is stopped, by reading a file of the kernel. Nothing else shows it:
        a scheduler half without work is silent, too, and its ranks still report."""
        self.process = self._scheduler.state()

    def status(self) -> SessionStatus:
        """Return the session's status. From any thread."""
        hello = self.hello
        return replace(
            self.control.status(),
            engine=hello.engine,
            model=hello.namespace.model if hello.namespace else "",
            host=hello.host,
            pid=self._scheduler.pid or hello.pid,
            process=self.process,
            age_seconds=self.pool.clock() - self._began,
        )
