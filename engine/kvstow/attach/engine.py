"""The scheduler half of an engine that attaches to the node service."""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from secrets import randbits
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from kvstow.attach.calls import (
    Admit,
    BeginLoad,
    BeginStore,
    Completions,
    CountLookup,
    DescribeStore,
    Detach,
    End,
    EventPage,
    Found,
    Hold,
    LoadBegun,
    Lookup,
    LookupPrompt,
    Prefill,
    ReadEvents,
    Release,
    Reset,
    ResetDone,
    SettledOps,
    StoreBegun,
)
from kvstow.attach.channel import Frame
from kvstow.attach.connection import Answer, AttachConnection
from kvstow.attach.hello import Hello, SessionTicket, Welcome, count_of, number_of, unique_id
from kvstow.attach.identity import UNNAMED_WEIGHTS, FleetWeights, NamespaceIdentity, PoolIdentity
from kvstow.attach.openops import OpenOps
from kvstow.attach.wire import MOST_STORED, Kind, Message
from kvstow.descriptions import BlockDescription
from kvstow.endings import NO_ENDING, Ending
from kvstow.errors import AttachError, InvalidRequestError, ProtocolError
from kvstow.hints import Hints
from kvstow.messages import Completion, Direction, Op
from kvstow.plaintext import plain
from kvstow.prefill import PrefillNews
from kvstow.results import NO_LEASE, KeyRun, Lease, Settled, StoreGrant

PROBE_SECONDS = 0.5
"""How long to wait before the next store is tried after the service has reported no room."""
PROBE_BLOCKS = 64
"""How many blocks such a store may have."""
_EPOCH_BITS = 61
"""The number of random bits in a fresh epoch."""
_MOST_LATE = 256
"""The requests that `take_late` returns at most."""

logger = logging.getLogger("kvstow.attach")

_T = TypeVar("_T")


class Hits(NamedTuple):
    """The result of a lookup. `runs` are the runs of present keys. `lease` holds keys in the order of the runs, and may
    be empty. `fetched` are the runs of keys that came from the fleet tier during the lookup."""

    lease: Lease
    runs: tuple[KeyRun, ...]
    fetched: tuple[KeyRun, ...] = ()

    @property
    def leading(self) -> int:
        """How many keys are present before the first absent one."""
        return self.runs[0].length if self.runs and self.runs[0].first == 0 else 0


_MISS = Hits(NO_LEASE, ())


class AttachedEngine:
    """Sends the calls of an engine to the node service. It has the calls of an `OffloadEngine`, with which an embedded
    host works. The results are the same, but they arrive later.

    Only one thread uses it, and it starts none. Only `wait` waits. No call raises because the service is absent, is
    slow or refuses the engine: lookups then miss, stores are refused, and `problem` says why. The host calls `step`
    once in each of its steps, which connects, sends and receives. A result arrives in a later `step` or `wait`.

    Each connection is a session. When it ends, its leases are void and its unanswered calls have failed. Loads under
    way still end through the completions of the ranks. Stores under way fail once all ranks have read their blocks. The
    next session has another `ticket`, which the host gives to its workers (`AttachedWorker.join`).

    The host gives each op to the worker of every rank, but a replicated store to rank 0 only. It passes all completions
    to `complete`. A worker fails an op that it cannot run.

    The id of a request comes from the engine's clients and may be any text. The service gets its printable part.

    Keys and blocks are in prefix order, root first. Calls that take keys raise `ProtocolError` if the keys do not
    fit in a frame (8 MiB).
    """

    def __init__(
        self,
        path: Path,
        *,
        engine: str,
        pool: PoolIdentity,
        namespace: NamespaceIdentity | Callable[[], NamespaceIdentity],
        fleet_weights: FleetWeights = UNNAMED_WEIGHTS,
        engine_version: str = "",
        wanted_bytes: int = 0,
        require_sharing: bool = False,
        step_wait: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`path` is the service's socket: see `socket_path`. `step_wait` is the time in seconds that all calls of
        `wait` in one step may take together. `namespace` may be a function, because an engine may learn its hash
        function late. It is called before the first hello. For the other parameters, see `Hello`."""
        self._namespace = namespace
        self._hello = Hello(
            role="scheduler",
            engine=engine,
            engine_version=engine_version,
            host=socket.gethostname(),
            pid=os.getpid(),
            pool=pool,
            fleet_weights=fleet_weights,
            wanted_bytes=wanted_bytes,
            require_sharing=require_sharing,
        )
        self._connection = AttachConnection(
            path,
            self._make_hello,
            on_attached=self._begin_session,
            on_lost=self._end_session,
            clock=clock,
            jitter=jitter,
        )
        self._clock = clock
        self._step_wait = self._wait_left = step_wait
        self._ops = OpenOps(pool.num_ranks, replicated=pool.replicated)
        self.moved_blocks, self.moved_seconds = self._ops.moved_blocks, self._ops.moved_seconds
        self._unwanted: list[Lease] = []
        """The leases of answers that the host discarded before they arrived."""
        self._unsent: dict[tuple[int, str], list[Completion]] = {}
        """Completions to send, by rank and boot id."""
        self._last_request = 0
        self._running: set[int] = set()
        """Numbers of requests that have not ended."""
        self._incomplete: set[int] = set()
        """The numbers of those of them that lack blocks in the pool, as the service has reported."""
        self._late: deque[int] = deque(maxlen=_MOST_LATE)
        """The numbers of ended requests that lack blocks, as the service has reported after their end."""
        self._room = 0
        """How many blocks the next store would find a slot for, as the service has reported."""
        self._probe_time = float("-inf")
        """When a store may be tried although the service has reported no room."""
        self.ticket: SessionTicket | None = None
        """The ticket of the current session, for the workers. None without a session."""
        self.num_sessions = 0
        self.store_below = ""
        """The name of the store below the service's pools, if there is one: see `BlockStore.name`."""

    # -- the session ----------------------------------------------------------------------------------------

    def step(self) -> None:
        """Send completions, receive what has arrived, and connect if it is time for an attempt. The host calls it once
        in each step. O(messages that have arrived)."""
        self._wait_left = self._step_wait
        self._flush()
        self._take(self._connection.poll())
        self._flush()

    def wait(self, *answers: Answer[_T], seconds: float | None = None) -> bool:
        """Wait until these answers are done, for up to `seconds`, or for the rest of the step's `step_wait`. Returns
        whether all of them are done. It does not wait for pending answers, which arrive in a later `step`."""
        for answer in answers:
            if answer.done or answer.is_pending:
                continue
            begun = self._clock()
            self._connection.wait(answer, max(0.0, self._wait_left if seconds is None else seconds))
            spent = self._clock() - begun
            if seconds is None:
                self._wait_left -= spent
            else:
                seconds -= spent
        self._flush()
        return all(answer.done for answer in answers)

    @property
    def is_attached(self) -> bool:
        return self.ticket is not None

    @property
    def welcome(self) -> Welcome | None:
        """The service's welcome to the current session, with its id, and the names of its pool and namespace."""
        return self._connection.welcome

    @property
    def problem(self) -> str | None:
        """The reason why it is not attached, as a sentence. None while it is attached, and before the first `step`."""
        return self._connection.problem

    @property
    def refusal(self) -> str | None:
        """The service's reason for refusing the last attempt, in snake case. None if it did not refuse."""
        return self._connection.refusal

    @property
    def sharing_off(self) -> tuple[str, ...]:
        """Sentences that say why this session shares no blocks with others. Empty if it may share."""
        welcome = self._connection.welcome
        return () if welcome is None else welcome.sharing_off

    def fileno(self) -> int:
        """Return the socket's descriptor, for a host that waits on several. -1 without a connection."""
        return self._connection.fileno()

    def disconnect(self, problem: str) -> None:
        """End the session for the reason `problem`. A later `step` begins another session after a pause."""
        self._connection.disconnect(problem)

    def close(self) -> None:
        """End the session for good. Its leases and unfinished stores end when the workers have released the memory.
        Idempotent."""
        self._connection.close(*self._take_unsent(), Detach("the engine has stopped"))

    # -- lookup and load ------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], *, hold: Hold = Hold.PRESENT, count: bool = True) -> Answer[Hits]:
        """Ask which of the keys are present, and hold them as `hold` says. The values of `hold` match four methods of a
        session: `acquire_runs` (`PRESENT`), `acquire` (`LEADING`), `lease` (`ALL`) and `find_runs` (`NOTHING`). With
        `count`, it counts as a lookup. A host that asks several times for one request passes False, and reports the
        result with `count_lookup`.

        The host releases the lease, or uses it for `begin_load`. It calls `discard` for an answer that it no longer
        needs.
        """
        return self._ask(Lookup(keys, hold, count), partial(self._read_found, len(keys)), _MISS)

    def find_prompt(self, keys: Sequence[bytes]) -> Answer[Hits]:
        """Ask which blocks of a prompt are present, one KV group after the other, and hold nothing. Unlike `find` with
        `NOTHING`, the answer waits for blocks that the service can fetch from a fleet tier."""
        return self._ask(LookupPrompt(keys), partial(self._read_found, len(keys)), _MISS)

    def discard(self, answer: Answer[Hits]) -> None:
        """Drop an answer that the host does not need. Its lease is released when the answer arrives. Idempotent."""
        answer.is_unwanted = True
        if answer.done:
            self.release_lease(answer.value.lease)

    def count_lookup(self, queried: int, hits: int) -> None:
        """Count one lookup of `queried` blocks with `hits` hits."""
        self._send(CountLookup(queried, hits))

    def release_lease(self, lease: Lease) -> None:
        """End a lease. Idempotent, even after a load has used the lease."""
        if lease.lease_id and self._is_of_session(lease.lease_id):
            self._send(Release((count_of(lease.lease_id),)))

    def begin_load(
        self,
        lease: Lease,
        blocks: Sequence[int],
        *,
        first: int = 0,
        request_id: str = "",
        choice: str = "async_engine",
    ) -> Answer[Op | None]:
        """Ask to load the slots of the lease, from its slot `first` on, into `blocks`. This ends the lease. The value
        is None if the service disconnected, or refused because the lease was broken. Nothing is held then. `choice` is
        one of `LOAD_CHOICES`."""
        if not self._is_of_session(lease.lease_id):
            return Answer.given(None, "the session of the lease has ended")
        call = BeginLoad(count_of(lease.lease_id), first, len(blocks), plain(request_id), choice)
        return self._ask(call, partial(self._read_load, tuple(blocks), request_id), None)

    # -- store ----------------------------------------------------------------------------------------------

    def begin_store(self, keys: Sequence[bytes], blocks: Sequence[int], *, request_id: str = "") -> Answer[StoreGrant]:
        """Ask to store block `blocks[i]` under `keys[i]`: see `Session.begin_store`. The host asks one step ahead, so
        that the answer has arrived when it plans the next step. It must not change the blocks before the answer has
        arrived and the store has read them. Raises `InvalidRequestError` for more than `MOST_STORED` blocks."""
        count = len(keys)
        if count > MOST_STORED:
            raise InvalidRequestError(f"a store has {count} blocks; allowed: {MOST_STORED}, so store them in parts")
        self._probe_time = self._clock() + PROBE_SECONDS
        without = StoreGrant(None, (), {"dropped_not_ready": count}, range(count))
        call = BeginStore(keys, plain(request_id))
        return self._ask(call, partial(self._read_store, tuple(blocks), request_id), without)

    def describe_store(self, op: Op, blocks: Sequence[BlockDescription | None]) -> None:
        """Say what the blocks of a store hold, in their order: see `AttachedSession.describe_store`. The host calls it
        before the store's completions. None stands for a block of which that is unknown."""
        service_id = self._ops.service_id(op.op_id)
        if service_id is not None:
            for message in DescribeStore.listed(service_id, blocks):
                self._send(message)

    def store_room(self) -> int:
        """Return for how many blocks the next store would find a slot, as the service has reported last. 0 without a
        session. If the service has reported 0 or nothing yet, this returns a few blocks twice a second, because only
        the answer to a store reports new room."""
        if self.ticket is None:
            return 0
        if self._room or self._clock() < self._probe_time:
            return self._room
        return PROBE_BLOCKS

    def admit(
        self,
        keys: Sequence[bytes],
        *,
        looked_up: tuple[int, int] | None = None,
        hints: Hints | None = None,
        salt: bytes = b"",
    ) -> int:
        """Begin a request: see `Session.admit`. Returns its number, which is never used twice, not even in another
        session."""
        self._last_request += 1
        self._send(Admit(self._last_request, keys, looked_up or (0, len(keys)), hints, salt))
        self._running.add(self._last_request)
        return self._last_request

    def end_request(
        self,
        number: int,
        ending: Ending = NO_ENDING,
        *,
        more: Sequence[bytes] = (),
        others: Sequence[bytes] = (),
    ) -> bool:
        """End a request: see `Session.end_request`. Returns whether the service has reported by now that blocks of the
        request are missing in the pool; `take_late` returns what it reports later. For calls that are sent after this
        one, the request has ended."""
        self._send(End(number, ending.status, ending.tokens, more, others))
        self._running.discard(number)
        if number not in self._incomplete:
            return False
        self._incomplete.discard(number)
        return True

    def take_late(self) -> list[int]:
        """Requests that lack blocks in the pool, as the service has said since the last call, after their end."""
        late = list(self._late)
        self._late.clear()
        return late

    def _note_incomplete(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            (self._incomplete.add if number in self._running else self._late.append)(number)

    def reset(self, reason: str = "") -> Answer[str]:
        """Switch to a fresh namespace. This engine never finds the blocks again that it has stored so far, whereas
        other engines keep theirs. The value is the namespace's name, or "" without a session. `reason` is a sentence
        that says why the engine shares nothing from now on."""
        namespace = self._make_hello().namespace
        assert namespace is not None
        fresh = replace(namespace, epoch=1 + randbits(_EPOCH_BITS), unshared=namespace.unshared or reason)
        self._hello = replace(self._hello, namespace=fresh)
        return self._ask(Reset(), self._read_reset, "")

    def _read_reset(self, answer: Answer[Any]) -> str:
        done = answer.unpack(ResetDone)
        if done.notice:
            logger.warning("the cache was reset, but blocks of it may be left: %s", done.notice)
        return done.namespace

    def note_prefill(self, news: PrefillNews) -> None:
        """Report the cost of computing prompts: see `Session.note_prefill`. The service compares it with the cost of
        fetches from the fleet tier."""
        self._send(Prefill.of(news))

    # -- events ---------------------------------------------------------------------------------------------

    def read_events(self, after: int = 0) -> Answer[EventPage]:
        """Ask which blocks of the session's namespace were stored or removed since `after`, the cursor of an earlier
        page of this session. Without an answer, the page is empty and its cursor is `after`."""
        return self._ask(ReadEvents(after), lambda answer: answer.unpack(EventPage), EventPage(after, ()))

    # -- completion -----------------------------------------------------------------------------------------

    def complete(self, rank: int, boot_id: str, completions: Iterable[Completion]) -> None:
        """Take completions of `rank`. Late and repeated ones are ignored, so this is idempotent. They are sent together
        before the next call, in the next `step`, or in `take_settled`."""
        for completion in completions:
            sent = self._ops.complete(rank, completion)
            if sent is not None:
                self._unsent.setdefault((rank, boot_id), []).append(sent)

    def take_settled(self) -> list[Settled]:
        """Return all results that became final since the last call, in order. Also sends completions, because no step
        may follow."""
        self._flush()
        settled = list(self._ops.settled)
        self._ops.settled.clear()
        return settled

    @property
    def open_transfers(self) -> int:
        """How many ops some rank or the service has not finished, including abandoned ones. O(1)."""
        return len(self._ops)

    @property
    def awaited_transfers(self) -> int:
        """How many of the `open_transfers` have no result yet. O(1)."""
        return self._ops.num_awaited

    def open_blocks(self, direction: Direction) -> int:
        """Return how many blocks the `open_transfers` in this direction have. O(open transfers)."""
        return self._ops.num_blocks(direction)

    @property
    def stale_completions(self) -> int:
        """How many completions were late or repeated."""
        return self._ops.stale_completions

    # -- the wire -------------------------------------------------------------------------------------------

    def _make_hello(self) -> Hello:
        if self._hello.namespace is None:
            namespace = self._namespace() if callable(self._namespace) else self._namespace
            self._hello = replace(self._hello, namespace=namespace)
        return self._hello

    def _begin_session(self, welcome: Welcome) -> None:
        self.num_sessions += 1
        self.ticket = SessionTicket(self.num_sessions, welcome.token)
        self.store_below = welcome.store
        self._ops.begin_session(self.num_sessions)
        self._room, self._probe_time = 0, float("-inf")

    def _end_session(self) -> None:
        self._take(self._connection.take_pushed())  # results that have arrived before the end
        self.ticket = None
        self._unsent.clear()
        self._unwanted.clear()
        self._running.clear()
        self._incomplete.clear()
        self._late.clear()
        self._ops.end_session()

    def _is_of_session(self, identifier: int) -> bool:
        return self.ticket is not None and number_of(identifier) == self.ticket.number

    def _ask(self, message: Message, read: Callable[[Answer[Any]], _T], without: _T) -> Answer[_T]:
        self._flush()
        answer = Answer(read, without)
        answer.sent_at = self._clock()
        self._connection.call(message, answer)
        return answer

    def _send(self, message: Message) -> None:
        self._flush()
        self._connection.send(message)

    def _flush(self) -> None:
        """Send completions and releases. They are sent before the calls that depend on them: a lookup must not find a
        key again that failed to load."""
        for message in self._take_unsent():
            self._connection.send(message)
        unwanted, self._unwanted = self._unwanted, []
        for lease in unwanted:
            self._connection.send(Release((count_of(lease.lease_id),)))

    def _take_unsent(self) -> list[Completions]:
        if not self._unsent:
            return []
        unsent, self._unsent = self._unsent, {}
        return [message for sender, done in unsent.items() for message in Completions.listed(*sender, done)]

    def _take(self, frames: list[Frame]) -> None:
        for frame in frames:
            if frame.kind != Kind.SETTLED:
                continue
            try:
                results = SettledOps.unpack(frame.payload)
            except AttachError as error:
                self._connection.disconnect(str(error))
                return
            self._room = results.room
            self._note_incomplete(results.incomplete)
            self._ops.take_results(results.ops)

    def _read_found(self, num_keys: int, answer: Answer[Any]) -> Hits:
        found = answer.unpack(Found)
        runs, fetched = tuple(map(KeyRun._make, found.runs)), tuple(map(KeyRun._make, found.fetched))
        assert self.ticket is not None
        if runs and sum(runs[-1]) > num_keys:
            raise ProtocolError("malformed", f"the service has found {sum(runs[-1])} of {num_keys} keys")
        lease = NO_LEASE
        if found.lease_id:
            lease = Lease(unique_id(self.ticket.number, found.lease_id), sum(run.length for run in runs))
        if answer.is_unwanted and found.lease_id:
            self._unwanted.append(lease)
        return Hits(lease, runs, fetched)

    def _read_load(self, blocks: tuple[int, ...], request_id: str, answer: Answer[Any]) -> Op:
        begun = answer.unpack(LoadBegun)
        if len(begun.slots) != len(blocks):
            raise ProtocolError("malformed", f"the service gives {len(begun.slots)} slots for {len(blocks)} blocks")
        return self._ops.start("load", blocks, begun.slots, begun.op_id, request_id)

    def _read_store(self, blocks: tuple[int, ...], request_id: str, answer: Answer[Any]) -> StoreGrant:
        begun = answer.unpack(StoreBegun)
        if max(begun.accepted, default=0) >= max(1, len(blocks)):
            raise ProtocolError("malformed", f"the service stores more blocks than the {len(blocks)} of the request")
        self._room = begun.room
        self._note_incomplete(begun.incomplete)
        op = None
        if begun.op_id:
            moved = tuple([blocks[number] for number in begun.accepted])
            op = self._ops.start("store", moved, begun.slots, begun.op_id, request_id)
        return StoreGrant(op, begun.accepted, dict(begun.outcomes), begun.unplaced)
