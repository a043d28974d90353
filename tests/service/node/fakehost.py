"""A control plane in a few lines, for tests of the wire: one pool without bytes, which records the calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvstow.attach.calls import (
    Admit,
    BeginLoad,
    BeginStore,
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
    ResetDone,
    SettledOp,
    SettledOps,
    StoreBegun,
)
from kvstow.attach.hello import Hello, Welcome
from kvstow.attach.peer import Peer
from kvstow.attach.wire import Message
from kvstow.errors import AttachRefusedError, LeaseError, NotFoundError
from kvstow.messages import DesiredState, RankReport
from kvstow_service.node.pools.nodesession import Later, Member, Steps


@dataclass
class FakeOp:
    direction: str
    keys: tuple[bytes, ...]
    slots: tuple[int, ...]
    pending: set[int]


class FakeSession:
    """A session of a `FakeHost`."""

    def __init__(self, host: FakeHost, session_id: str, token_digest: str, send: Any, uid: int, ranks: int) -> None:
        self.host, self.session_id, self.uid, self.num_ranks = host, session_id, uid, ranks
        self.token_digest, self._send, self.state = token_digest, send, "attached"
        self.members: list[Member] = []
        self.leases: dict[int, tuple[bytes, ...]] = {}
        self.ops: dict[int, FakeOp] = {}
        self.lost = False

    def push(self, message: Message, *, rank: int | None = None, fds: Sequence[int] = ()) -> None:
        self._send(self, message, rank, fds)

    def member_of(self, rank: int | None) -> Member | None:
        return next((one for one in self.members if one.rank == rank and one.is_connected), None)

    def _called(self) -> None:
        self.host.threads.add(threading.get_ident())
        assert not self.lost, "a lost session makes no call"

    def join_worker(self, hello: Hello, peer: Peer) -> None:
        self.host.events.append(("joined", self.session_id, hello.rank))
        self.host.on_join(self, hello.rank)

    def lookup(self, call: Lookup | LookupPrompt, later: Later | None = None) -> Found | Pending:
        """Pending while the host `holds_lookups`: `answer_held` answers then."""
        if isinstance(call, LookupPrompt):
            call = Lookup(call.keys, Hold.NOTHING)
        if self.host.holds_lookups and later is not None:
            self.host.held.append(partial(later, partial(self._found, call)))
            return Pending()
        return self._found(call)

    def _found(self, call: Lookup) -> Found:
        self.host.on_lookup()
        self._called()
        slot_of, runs = self.host.slot_of, list[tuple[int, int]]()
        for number, key in enumerate(call.keys):
            if key not in slot_of:
                continue
            if runs and sum(runs[-1]) == number:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((number, 1))
        held = tuple(call.keys[at] for start, length in runs for at in range(start, start + length))
        if call.hold == Hold.NOTHING or not held:
            return Found(0, tuple(runs))
        lease_id = self.host.new_id()
        self.leases[lease_id] = held
        return Found(lease_id, tuple(runs))

    def release_leases(self, lease_ids: Sequence[int]) -> None:
        self._called()
        for lease_id in lease_ids:
            self.leases.pop(lease_id, None)

    def lookup_in_steps(self, call: Lookup | LookupPrompt, later: Later | None = None) -> Steps[Found | Pending]:
        yield
        return self.lookup(call, later)

    def release_in_steps(self, lease_ids: Sequence[int]) -> Steps[None]:
        for lease_id in lease_ids:
            self.release_leases((lease_id,))
            yield

    def begin_load(self, call: BeginLoad) -> LoadBegun:
        self._called()
        held = self.leases.pop(call.lease_id, None)
        if held is None:
            raise LeaseError(f"lease {call.lease_id} was released or used up")
        keys = held[call.first : call.first + call.count]
        slots = tuple(self.host.slot_of[key] for key in keys)
        return LoadBegun(self._start("load", keys, slots), slots)

    def begin_store(self, call: BeginStore) -> StoreBegun:
        self._called()
        fresh = tuple(number for number, key in enumerate(call.keys) if key not in self.host.slot_of)
        if not fresh:
            return StoreBegun(0, (), (), (), {"skipped_already_cached": len(call.keys)})
        slots = tuple(self.host.new_id() for _ in fresh)
        op_id = self._start("store", tuple(call.keys[number] for number in fresh), slots)
        return StoreBegun(op_id, fresh, slots, room=1000)

    def _start(self, direction: str, keys: tuple[bytes, ...], slots: tuple[int, ...]) -> int:
        op_id = self.host.new_id()
        self.ops[op_id] = FakeOp(direction, keys, slots, set(range(self.num_ranks)))
        return op_id

    def complete_in_steps(self, call: Completions) -> Steps[None]:
        yield
        self._called()
        settled = []
        for done in call.completions:
            op = self.ops.get(done.op_id)
            if op is None:
                raise NotFoundError(f"op {done.op_id} is not of this session")
            op.pending.discard(call.rank)
            if not op.pending:
                del self.ops[done.op_id]
                if op.direction == "store" and done.mark == "done":
                    self.host.slot_of.update(zip(op.keys, op.slots, strict=True))
                settled.append(SettledOp(done.op_id, "store" if op.direction == "store" else "load", done.mark))
        if settled:
            self.push(SettledOps(tuple(settled), room=7))

    def admit_in_steps(self, call: Admit) -> Steps[None]:
        yield
        self.admit(call)

    def end_in_steps(self, call: End) -> Steps[None]:
        yield
        self.end(call)

    def admit(self, call: Admit) -> None:
        self.host.events.append(("admitted", len(call.keys), call.number))

    def end(self, call: End) -> None:
        self.host.events.append(("ended", call.number, call.status))

    def count_lookup(self, call: CountLookup) -> None:
        self.host.queried += call.queried

    def describe_store(self, call: DescribeStore) -> None:
        self.host.events.append(("described", call.op_id, call.numbers, call.blocks))

    def note_prefill(self, call: Prefill) -> None:
        self.host.events.append(("prefill", call.news()))

    def read_events(self, call: ReadEvents) -> EventPage:
        return EventPage(call.after, ())

    def take_report_in_steps(self, report: RankReport) -> Steps[DesiredState]:
        yield
        return DesiredState("engine-1", 100 + report.rank, number=1)

    def registered(self, rank: int, extents: Sequence[ExtentSlots]) -> None:
        self.host.registered.append((rank, tuple(extents)))

    def released(self, rank: int, extent_ids: Sequence[int]) -> None:
        self.host.events.append(("released", rank, tuple(extent_ids)))

    def lose(self, reason: str) -> None:
        self._called()
        self.lost = True
        self.leases.clear()
        self.host.events.append(("lost", self.session_id, reason))

    def end_worker(self, rank: int, left_alive: Peer | None = None) -> None:
        if left_alive is not None:
            left_alive.close()
        self.host.events.append(("ended", self.session_id, rank))


class FakeHost:
    """`events` is what it was called with about the life of sessions, in order."""

    def __init__(self) -> None:
        self.session_type: Callable[..., FakeSession] = FakeSession
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
        self.on_join: Callable[[FakeSession, int], object] = lambda session, rank: None

    def open_session(
        self, session_id: str, hello: Hello, peer: Peer, token_digest: str, send: Any
    ) -> tuple[FakeSession, Welcome]:
        self.threads.add(threading.get_ident())
        if self.refusal is not None:
            raise self.refusal
        assert hello.pool is not None
        session = self.session_type(self, session_id, token_digest, send, peer.uid, hello.pool.num_ranks)
        self.sessions[session_id] = session
        self.events.append(("opened", session_id))
        return session, Welcome(
            session_id=session_id,
            engine_id="engine-1",
            pool="model-0a1b2c",
            namespace="model-3d4e5f",
            sharing_off=("hashes are not reproducible",),
        )

    def reset(self, session_id: str, later: Later | None = None) -> ResetDone:
        return ResetDone("model-99")

    def session_over(self, session_id: str) -> None:
        del self.sessions[session_id]
        self.events.append(("over", session_id))

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

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id
