"""A node service that answers late: a shared pool and the wire's messages, without sockets, threads or time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvstow.attach.calls import (
    Admit,
    BeginLoad,
    BeginStore,
    Completions,
    CountLookup,
    DescribeStore,
    End,
    Hold,
    Lookup,
    LookupPrompt,
    Pending,
    Prefill,
    ReadEvents,
    Release,
    Reset,
    ResetDone,
)
from kvstow.attach.channel import Frame
from kvstow.attach.connection import Answer
from kvstow.attach.hello import CallError, Hello, Welcome
from kvstow.attach.identity import GroupIdentity, NamespaceIdentity, PoolIdentity, RegionIdentity
from kvstow.attach.wire import Kind, Message
from kvstow.config import EngineConfig
from kvstow.control.attachedsession import AttachedSession
from kvstow.control.engine import PoolFacade
from kvstow.control.sharedpool import SharedPool
from kvstow.endings import Ending
from kvstow.errors import DisconnectedError, KvstowError
from kvstow_service.connectors.engine_core.controlplane import AttachedControl
from kvstow_service.node.pools.nodesession import NodeSession, result_of


class SlowService:
    """It takes each message at once, and its answer arrives `delay()` steps later. Its pool outlives its clients."""

    def __init__(
        self,
        config: EngineConfig,
        slots: int,
        *,
        clock: Callable[[], float],
        delay: Callable[[], int],
        pool: SharedPool | None = None,
    ) -> None:
        """`pool`: the one that it shares with other engines' services, as these are one service."""
        if pool is None:
            pool = SharedPool(config, clock=clock)
            pool.add_extent(slots)
            pool.set_populated(slots)
        self.use(pool)
        self.delay = delay
        self.is_up = True
        self.is_silent = False
        """It takes messages, and answers none."""
        self.holds_lookups = False
        """It says of lookups that they take time, but for those of exactly one hit, and `answer_held` answers them."""
        self.fetched: tuple[tuple[int, int], ...] = ()
        """Runs of keys that the answers of `answer_held` say the fleet tier has brought."""
        self.session: AttachedSession | None = None
        self.connection: SlowConnection

    def use(self, pool: SharedPool) -> None:
        """Serve this pool from the next session on."""
        self.pool, self.facade = pool, PoolFacade(pool)

    def control(self) -> AttachedControl:
        """The control plane of an engine of this service."""
        config = self.pool.config
        sizes = tuple(config.slot_bytes_of(rank) for rank in range(config.num_ranks))
        identity = PoolIdentity(sizes, (RegionIdentity("0", sizes[0]),), "auto", (GroupIdentity("full", 16, 16),))
        namespace = NamespaceIdentity("model", "weights", "configured", "probe")
        slot_bytes, clock = config.slot_bytes, self.pool.clock
        return self.connect(
            lambda: AttachedControl(
                Path("/none"), slot_bytes, clock, engine="engine", pool=identity, namespace=namespace
            )
        )

    def connect(self, make: Callable[[], AttachedControl]) -> AttachedControl:
        """Make an engine that talks to this service."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvstow.attach.engine.AttachConnection", partial(SlowConnection, self))
            return make()

    def open_session(self, namespace: NamespaceIdentity | None) -> AttachedSession:
        assert namespace is not None
        self.session = session = self.pool.attach("engine", f"epoch {namespace.epoch}")
        for rank in range(self.pool.config.num_ranks):
            session.map_memory((session.session_id, rank))
        return session

    def lose(self) -> None:
        """End the session, as when the service has gone and come back with its memory."""
        self.connection.disconnect("the service has gone")

    def die(self) -> None:
        """It ends, and is back at once with its memory. The engine sees that when it has read what has arrived."""
        self.connection.die()

    def answer_held(self) -> None:
        """The lookups that take time are answered now: their clients see it in the next step."""
        self.connection.answer_held()

    def let_go(self, session: AttachedSession, rank: int) -> None:
        """Nothing of that session is under way on this rank any more."""
        if session.pool is self.pool:  # otherwise the service of that session has ended with its pool
            self.pool.process_died((session.session_id, rank))


class SlowConnection:
    """An `AttachConnection` to a `SlowService`."""

    def __init__(
        self,
        service: SlowService,
        _path: Path,
        make_hello: Callable[[], Hello],
        *,
        on_attached: Callable[[Welcome], object],
        on_lost: Callable[[], object],
        **_: object,
    ) -> None:
        self._service, self._make_hello = service, make_hello
        self._on_attached, self._on_lost = on_attached, on_lost
        service.connection = self
        self._step = 0
        self._is_over = False
        self._answers: deque[tuple[int, Answer[Any], Frame]] = deque()
        self._held: list[tuple[Lookup | LookupPrompt, Answer[Any]]] = []
        self._pushed: list[Frame] = []
        self._session: Any = None
        self.state = "detached"
        self.problem: str | None = None
        self.refusal: str | None = None
        self.welcome: Welcome | None = None

    def call(self, message: Message, call: Answer[Any] | None = None) -> Answer[Any]:
        call = call or Answer()
        if self.state != "attached":
            call.fail(DisconnectedError(str(self.problem)))
            return call
        message = type(message).unpack(message.pack())
        if self._is_over:  # sent, and nobody reads it
            self._answers.append((1 << 60, call, Frame(0, 0, b"")))
            return call
        try:
            answer: Any = self._answer(message, call)
        except KvstowError as error:
            answer = CallError(error.code, str(error))
        due = self._step + self._service.delay()
        if self._answers:
            due = max(due, self._answers[-1][0])
        self._answers.append((due, call, _frame(answer)))
        return call

    def send(self, message: Message, fds: object = ()) -> bool:
        if self.state != "attached":
            return False
        message = type(message).unpack(message.pack())
        if self._is_over:
            return True
        match message:
            case Completions():
                result_of(self._session.complete_in_steps(message))
            case Release():
                self._session.control.release_leases(message.lease_ids)
            case Admit():
                self._session.control.admit(
                    message.keys,
                    number=message.number,
                    looked_up=message.looked_up,
                    hints=message.hints,
                    salt=message.salt,
                )
            case End():
                ending = Ending(message.status, message.tokens)
                self._session.control.end_request(message.number, ending, more=message.more, others=message.others)
            case CountLookup():
                self._session.control.count_lookup(message.queried, message.hits)
            case DescribeStore():
                self._session.describe_store(message)
            case Prefill():
                self._session.control.note_prefill(message.news())
        return True

    def poll(self, seconds: float = 0.0) -> list[Frame]:
        self._step += 1
        if self._is_over:
            self.drain()
        elif self.state == "detached" and self._service.is_up:
            self._attach()
        self._deliver()
        return self.take_pushed()

    def push(self, message: Message) -> None:
        """The client gets this message of the service with its next step."""
        self._pushed.append(_frame(message))

    def take_pushed(self) -> list[Frame]:
        pushed, self._pushed = self._pushed, []
        return pushed

    @property
    def oldest_call(self) -> Answer[Any] | None:
        return self._answers[0][1] if self._answers else None

    def wait(self, call: Answer[Any], seconds: float) -> bool:
        """The answers that are due are there; those of later steps are not, however long one waits."""
        self._deliver()
        if self._is_over and not call.done:
            self.drain()
        return call.done

    def die(self) -> None:
        """The service has ended the connection, behind what it has sent. The client sees that when it has read it."""
        if self.state == "attached" and not self._is_over:
            self._session.control.lose("the service has died")
            self._is_over = True

    def hasten(self) -> None:
        """What the service has sent arrives a step earlier. The client has yet to read it."""
        self._step += 1

    def drain(self) -> None:
        self._deliver()
        if self._is_over:
            self.disconnect("the service has died")

    def disconnect(self, problem: str) -> None:
        if self.state != "attached":
            return
        self._session.control.lose(problem)
        self._is_over = False
        self.state, self.problem, self.welcome, self._session = "detached", problem, None, None
        answers, self._answers = self._answers, deque()
        held, self._held = self._held, []
        for call in [*(call for _, call, _ in answers), *(call for _, call in held)]:
            call.fail(DisconnectedError(problem))
        self._on_lost()

    def close(self, *last_words: Message) -> None:
        for message in last_words:
            self.send(message)
        self.disconnect("closed")
        self.state = "closed"

    def retry_now(self) -> None: ...

    def fileno(self) -> int:
        return -1

    def _attach(self) -> None:
        self._session = session = object.__new__(NodeSession)
        session.control = self._service.open_session(self._make_hello().namespace)
        session._send = lambda session, message, rank, fds: self.push(message)
        self.state, self.problem = "attached", None
        session.pool = self._service.pool  # type: ignore[assignment]
        session.pool.grow_above = -1  # all its memory is there
        self.welcome = Welcome(
            session_id=str(session.control.session_id),
            service="slow",
            token="secret",
        )
        self._on_attached(self.welcome)

    def answer_held(self) -> None:
        held, self._held = self._held, []
        for message, call in held:
            call.resolve(_frame(replace(self._find(message), fetched=self._service.fetched)))

    def _answer(self, message: Message, call: Answer[Any]) -> Any:
        match message:
            case Lookup() | LookupPrompt():
                if self._service.holds_lookups and not (isinstance(message, Lookup) and message.hold == Hold.ALL):
                    self._held.append((message, call))
                    return Pending()
                return self._find(message)
            case BeginLoad():
                return self._session.begin_load(message)
            case BeginStore():
                return self._session.begin_store(message)
            case ReadEvents():
                return self._session.read_events(message)
            case Reset():
                return ResetDone(self._session.control.reset())
        raise AssertionError(f"{message} has no answer")

    def _find(self, message: Lookup | LookupPrompt) -> Any:
        return self._session.lookup(message)

    def _deliver(self) -> None:
        while self._answers and self._answers[0][0] <= self._step and not self._service.is_silent:
            _, call, frame = self._answers.popleft()
            if frame.kind == Kind.PENDING:
                call.is_pending = True
            else:
                call.resolve(frame)


def _frame(message: Any) -> Frame:
    return Frame(message.KIND, 0, message.pack())
