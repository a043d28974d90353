"""A control plane in a few lines, for tests of the wire: one pool without bytes, which records what it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvstow.attach.calls import (
    BeginLoad,
    BeginStore,
    Completions,
    CountLookup,
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
    ResetDone,
    SettledOp,
    SettledOps,
    StoreBegun,
    Use,
)
from kvstow.attach.hello import Hello
from kvstow.attach.peer import Peer
from kvstow.errors import AttachRefusedError, LeaseError, NotFoundError
from kvstow.messages import DesiredState, RankReport
from kvstow_service.node.attach.sessionhost import Later, SessionGrant, SessionLink


@dataclass
class FakeOp:
    direction: str
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    pending: set[int]


@dataclass
class FakeSession:
    link: SessionLink
    uid: int
    ranks: int
    leases: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    ops: dict[int, FakeOp] = field(default_factory=dict)
    lost: bool = False


class FakeHost:
    """`events` is all that it was told of the life of sessions, in order."""

    def __init__(self) -> None:
        self.sessions: dict[str, FakeSession] = {}
        self.events: list[tuple[object, ...]] = []
        self.threads: set[int] = set()
        self.slot_of: dict[bytes, int] = {}
        self.next_id = 0
        self.queried = 0
        self.registered: list[tuple[int, tuple[ExtentSlots, ...]]] = []
        self.refusal: AttachRefusedError | None = None
        self.holds_lookups = False
        self.held: list[Callable[[], object]] = []
        self.deadline: float | None = None
        """When to answer what is held, on the server's clock."""
        self.clock: Callable[[], float] = time.monotonic
        self.on_lookup: Callable[[], object] = lambda: None
        self.on_join: Callable[[SessionLink, int], object] = lambda link, rank: None

    def open_session(self, session_id: str, hello: Hello, peer: Peer, link: SessionLink) -> SessionGrant:
        self.threads.add(threading.get_ident())
        if self.refusal is not None:
            raise self.refusal
        assert hello.pool is not None
        self.sessions[session_id] = FakeSession(link, peer.uid, hello.pool.num_ranks)
        self.events.append(("opened", session_id))
        return SessionGrant("engine-1", "model-0a1b2c", "model-3d4e5f", ("hashes are not reproducible",))

    def join_worker(self, session_id: str, hello: Hello, peer: Peer) -> None:
        self.events.append(("joined", session_id, hello.rank))
        self.on_join(self.sessions[session_id].link, hello.rank)

    def lookup(self, session_id: str, call: Lookup, later: Later | None = None) -> Found | Pending:
        """Pending while `holds_lookups`: `answer_held` answers then."""
        if self.holds_lookups and later is not None:
            self.held.append(lambda: later(partial(self._found, session_id, call)))
            return Pending()
        return self._found(session_id, call)

    def lookup_prompt(self, session_id: str, call: LookupPrompt, later: Later | None = None) -> Found | Pending:
        return self.lookup(session_id, Lookup(call.keys, Hold.NOTHING), later)

    def next_deadline(self) -> float | None:
        return self.deadline

    def expire(self) -> None:
        if self.deadline is not None and self.clock() >= self.deadline:
            self.deadline = None
            self.answer_held()

    def answer_held(self) -> None:
        """On the server's thread, the newest first."""
        while self.held:
            self.held.pop()()

    def note_prefill(self, session_id: str, call: Prefill) -> None:
        self.events.append(("prefill", call.news()))

    def _found(self, session_id: str, call: Lookup) -> Found:
        self.on_lookup()
        session = self._session(session_id)
        runs: list[tuple[int, int]] = []
        for number, key in enumerate(call.keys):
            if key not in self.slot_of:
                continue
            if runs and sum(runs[-1]) == number:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((number, 1))
        held = tuple(call.keys[at] for start, length in runs for at in range(start, start + length))
        if call.hold == Hold.NOTHING or not held:
            return Found(0, tuple(runs))
        lease_id = self._new_id()
        session.leases[lease_id] = held
        return Found(lease_id, tuple(runs))

    def release_leases(self, session_id: str, lease_ids: Sequence[int]) -> None:
        for lease_id in lease_ids:
            self._session(session_id).leases.pop(lease_id, None)

    def begin_load(self, session_id: str, call: BeginLoad) -> LoadBegun:
        session = self._session(session_id)
        held = session.leases.pop(call.lease_id, None)
        if held is None:
            raise LeaseError(f"lease {call.lease_id} was released or used up")
        keys = held[call.first : call.first + call.count]
        return LoadBegun(*self._start(session, "load", keys, tuple(self.slot_of[key] for key in keys)))

    def begin_store(self, session_id: str, call: BeginStore) -> StoreBegun:
        session = self._session(session_id)
        fresh = tuple(number for number, key in enumerate(call.keys) if key not in self.slot_of)
        if not fresh:
            return StoreBegun(0, (), (), (), {"skipped_already_cached": len(call.keys)})
        slots = tuple(self._new_id() for _ in fresh)
        op_id, _ = self._start(session, "store", tuple(call.keys[number] for number in fresh), slots)
        return StoreBegun(op_id, fresh, slots, room=1000)

    def complete(self, session_id: str, call: Completions) -> None:
        session = self._session(session_id)
        settled = []
        for done in call.completions:
            op = session.ops.get(done.op_id)
            if op is None:
                raise NotFoundError(f"op {done.op_id} is not of this session")
            op.pending.discard(call.rank)
            if not op.pending:
                del session.ops[done.op_id]
                if op.direction == "store" and done.mark == "done":
                    self.slot_of.update(zip(op.keys, op.slots, strict=True))
                settled.append(SettledOp(done.op_id, "store" if op.direction == "store" else "load", done.mark))
        if settled:
            session.link.push(SettledOps(tuple(settled), room=7))

    def use(self, session_id: str, call: Use) -> None:
        self.events.append(("used", len(call.keys), call.start))

    def count_lookup(self, session_id: str, call: CountLookup) -> None:
        self.queried += call.queried

    def reset(self, session_id: str) -> ResetDone:
        return ResetDone("model-99")

    def read_events(self, session_id: str, call: ReadEvents) -> EventPage:
        return EventPage(call.after, ())

    def take_report(self, session_id: str, rank: int, report: RankReport) -> DesiredState:
        return DesiredState("engine-1", 100 + rank, number=1)

    def extents_registered(self, session_id: str, rank: int, extents: Sequence[ExtentSlots]) -> None:
        self.registered.append((rank, tuple(extents)))

    def extents_released(self, session_id: str, rank: int, extent_ids: Sequence[int]) -> None:
        self.events.append(("released", rank, tuple(extent_ids)))

    def session_lost(self, session_id: str, reason: str) -> None:
        session = self._session(session_id)
        session.lost = True
        session.leases.clear()
        self.events.append(("lost", session_id, reason))

    def worker_released(self, session_id: str, rank: int) -> None:
        self.events.append(("let go", session_id, rank))

    def session_over(self, session_id: str) -> None:
        del self.sessions[session_id]
        self.events.append(("over", session_id))

    def _session(self, session_id: str) -> FakeSession:
        self.threads.add(threading.get_ident())
        session = self.sessions[session_id]
        assert not session.lost, "a lost session says nothing"
        return session

    def _start(
        self, session: FakeSession, direction: str, keys: tuple[bytes, ...], slots: tuple[int, ...]
    ) -> tuple[int, tuple[int, ...]]:
        op_id = self._new_id()
        session.ops[op_id] = FakeOp(direction, keys, slots, set(range(session.ranks)))
        return op_id, slots

    def _new_id(self) -> int:
        self.next_id += 1
        return self.next_id
