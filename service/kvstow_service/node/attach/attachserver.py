"""The attach server: its socket, and one thread that answers all engines of a node."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from kvstow.attach.calls import (
    Admit,
    BeginLoad,
    BeginStore,
    Completions,
    CountLookup,
    DescribeStore,
    Desired,
    End,
    Lookup,
    LookupPrompt,
    Prefill,
    ReadEvents,
    RegisteredExtents,
    Release,
    ReleasedExtents,
    Report,
    Reset,
)
from kvstow.attach.channel import MAX_PAYLOAD_BYTES, SCRATCH_BYTES, Frame, close_fds, duplicates_of
from kvstow.attach.hello import CallError, Hello, Refused
from kvstow.attach.peer import Peer, peer_of
from kvstow.attach.wire import Kind, Message, refusal_of
from kvstow.errors import AttachRefusedError, DisconnectedError, InvalidRequestError, KvstowError, ProtocolError
from kvstow.messages import DesiredState
from kvstow.status import UserLimit
from kvstow_service.admin.sockets import bind_unix, file_id, require_folder
from kvstow_service.node.attach.clients import AttachTally, ClientConnection, Clients, client_limit
from kvstow_service.node.attach.sessionlife import SessionLife, described
from kvstow_service.node.nodehost import NodeHost
from kvstow_service.node.pools.nodesession import CALL_SLICE, LOOKUP_SLICE, Later, Member, NodeSession, Steps
from kvstow_service.process.switchinterval import short_switch_interval

logger = logging.getLogger("kvstow.attach")
_A = TypeVar("_A")

SWITCH_SECONDS = 0.0001
"""The interpreter's switch interval in this process, in seconds. With it, a lookup beside a thread that is always busy
took 0.5 ms at the median and 1 ms at p99, instead of 10 ms."""

_LONGEST_WAIT_SECONDS = 60.0
"""How long the thread waits for events at most, if no deadline comes before."""
_ACCEPTS_PER_TURN = 64
"""How many connections one turn accepts at most."""
_PAUSE_SECONDS = 1.0
"""How long no connection is accepted after the process had no descriptor left."""
_FRAMES_PER_TURN = 64
"""How many frames of one client are handled before the others have their turn."""
_TURN_SECONDS = 0.001
"""How long the server handles the frames of one client before the others have their turn, in seconds. The last frame
may take longer."""
_PAUSED_ABOVE_BYTES = 1 << 20
"""If a client has left more bytes than this unread, the server stops reading from it."""
_UNPACKED_AT_ONCE_BYTES = 64 << 10
"""Longer messages are unpacked in pieces. Other clients have their turns between them."""
_LAST_READS = 64
"""How many times the server reads from a client that has disconnected, at most. That is more than enough to empty its
socket's buffer."""
_FAILED = "the service has failed in this call; its log says how"

FOLDER_MODE = 0o750
SOCKET_MODE = 0o660


class AttachSocket:
    """A listening Unix socket of mode 0660. If it had to create the folder, the folder has mode 0750.

    Processes of the service's user and of the group may write to the socket, which lets them attach. The owner calls
    `close`, which is idempotent. It removes the file unless another service has replaced it.
    """

    def __init__(self, path: Path, group: int | None = None) -> None:
        """Raises `ConflictError` if another process listens at this path, or if the folder cannot be used."""
        self.path = path
        require_folder(path.parent, FOLDER_MODE, group)
        self.listener: socket.socket = bind_unix(path, mode=SOCKET_MODE, group=group)
        self._file = file_id(path)

    def close(self) -> None:
        self.listener.close()
        if self._file is not None and file_id(self.path) == self._file:
            self.path.unlink(missing_ok=True)
        self._file = None


_CALLS: Final[dict[int, type[Message]]] = {
    call.KIND: call
    for call in (
        *(Lookup, LookupPrompt, Release, BeginLoad, BeginStore, Completions, Admit, End, CountLookup, Prefill, Reset),
        *(ReadEvents, DescribeStore, Report, RegisteredExtents, ReleasedExtents),
    )
}


def answer_to(
    host: NodeHost, member: Member, frame: Frame, later: Later | None = None
) -> Message | Steps[Message | None] | None:
    """Make the call and return its answer, if its kind has one. For a call with many items it returns steps instead, so
    that other clients have their turns between them. For `later`, see `NodeSession.lookup`.

    Raises whatever the call raises, and `ProtocolError` for a payload that is not a message of its kind.
    """
    if len(frame.payload) > _UNPACKED_AT_ONCE_BYTES:
        return _answer_in_steps(host, member, frame, later)
    return _answer(host, member, _CALLS[frame.kind].unpack(frame.payload), later)


def _answer_in_steps(host: NodeHost, member: Member, frame: Frame, later: Later | None) -> Steps[Message | None]:
    call = yield from _CALLS[frame.kind].unpack_in_steps(frame.payload)
    answer = _answer(host, member, call, later)
    return (yield from answer) if isinstance(answer, Generator) else answer


def _answer(
    host: NodeHost, member: Member, call: Message, later: Later | None
) -> Message | Steps[Message | None] | None:
    if (steps := _steps_of_long(member.session, call, later)) is not None:
        return steps
    if isinstance(call, Report | Completions | RegisteredExtents | ReleasedExtents):
        return _answer_to_rank(member, call)
    return _answer_to_engine(host, member, call, later)


def _steps_of_long(session: NodeSession, call: Message, later: Later | None) -> Steps[Message | None] | None:
    """Return the steps of a call with more items than are handled at once, or None for any other call."""
    match call:
        case Lookup(keys) | LookupPrompt(keys) if len(keys) > LOOKUP_SLICE:
            return session.lookup_in_steps(call, later)
        case Release(lease_ids) if len(lease_ids) > CALL_SLICE:
            return session.release_in_steps(lease_ids)
        case Admit(_, keys) if len(keys) > CALL_SLICE:
            return session.admit_in_steps(call)
        case End(more=more, others=others) if len(more) + len(others) > CALL_SLICE:
            return session.end_in_steps(call)
    return None


def _answer_to_rank(
    member: Member, call: Report | Completions | RegisteredExtents | ReleasedExtents
) -> Steps[Message | None] | None:
    """Make a call of one rank's worker: its report, its completions, or the extents that it has registered or
    released."""
    session = member.session
    match call:
        case Report(report):
            if report.rank != _rank_of(member):
                raise InvalidRequestError(f"rank {member.rank} has sent a report of rank {report.rank}")
            return _desired(session.take_report_in_steps(report))
        case Completions(rank):
            if rank >= member.session.num_ranks or member.rank not in (None, rank):
                raise InvalidRequestError(f"the sender may not report completions of rank {rank}")
            return session.complete_in_steps(call)
        case RegisteredExtents(extents):
            session.registered(_rank_of(member), extents)
        case ReleasedExtents(extent_ids):
            session.released(_rank_of(member), extent_ids)
    return None


def _answer_to_engine(
    host: NodeHost, member: Member, call: Message, later: Later | None
) -> Message | Steps[Message | None] | None:
    """Make a call of an engine's scheduler half."""
    session = member.session
    match call:
        case Lookup() | LookupPrompt():
            return session.lookup(call, later)
        case BeginLoad():
            return session.begin_load(call)
        case BeginStore():
            return session.begin_store(call)
        case ReadEvents():
            return session.read_events(call)
        case Reset():
            return host.reset(member.session.session_id, later)
        case Release(lease_ids):
            session.release_leases(lease_ids)
        case Admit():
            session.admit(call)
        case End():
            session.end(call)
        case DescribeStore():
            session.describe_store(call)
        case CountLookup():
            session.count_lookup(call)
        case Prefill():
            session.note_prefill(call)
    return None


def _desired(steps: Steps[DesiredState]) -> Steps[Message]:
    return Desired((yield from steps))


def _step_of(steps: Steps[Message | None]) -> Message | Steps[Message | None] | None:
    """Make one step. Returns the steps again while there are more, and then the answer."""
    try:
        next(steps)
    except StopIteration as ended:
        answer: Message | None = ended.value
        return answer
    return steps


def _rank_of(member: Member) -> int:
    assert member.rank is not None, "the kinds of workers come from workers"
    return member.rank


class AttachServer:
    """Accepts engines on a listening Unix socket and answers their calls with their sessions of a `NodeHost`.

    `start` starts the thread, which makes every call to the host. `close` ends it and closes all connections, but makes
    no call to the host, whose own `close` settles what the sessions hold. Any thread may use `tally`, `detach` and
    `NodeSession.push`, which do not wait.

    No client can stop the thread or fill its memory: `Clients` limits connections, `Channel` limits what is queued for
    sending, `NodeHost` limits what one user may have, and `Session` of the control plane limits leases and loads. An
    error of one client ends only its connection, and therefore its session. If the thread itself fails, `failure` is
    set and `on_failure` is called.
    """

    def __init__(
        self,
        host: NodeHost,
        listener: socket.socket,
        *,
        limit: int | None = None,
        trust_eof: float | None = None,
        on_failure: Callable[[str], object] = lambda reason: None,
        find_peer: Callable[..., Peer] = peer_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The caller still owns the listener, and closes it after `close`."""
        self.failure: str | None = None
        self._host, self._listener = host, listener
        self._clock, self._on_failure, self._find_peer = clock, on_failure, find_peer
        self.tally = AttachTally(clock)
        self._clients = Clients(limit or client_limit(), clock)
        self._connected: dict[Member, ClientConnection] = {}
        self._busy: dict[ClientConnection, None] = {}
        """Clients with frames that wait for their turn, in the order of their turns."""
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._posted: deque[tuple[Callable[[], object], Sequence[int]]] = deque()
        self._life = SessionLife(
            host,
            self._epoll,
            self._disconnect,
            self.send,
            max_awaited=self._clients.limit,
            errors=self.tally.errors,
            trust_eof=trust_eof,
            clock=clock,
        )
        self._paused_until: float | None = None
        """When the server accepts connections again, if it has paused for lack of descriptors. Otherwise None."""
        self._scratch = bytearray(SCRATCH_BYTES)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvstow-attach", daemon=True)

    # -- for any thread -------------------------------------------------------------------------------------

    def start(self) -> None:
        self._epoll.register(self._wake, select.EPOLLIN)
        self._listener.setblocking(False)
        self._epoll.register(self._listener, select.EPOLLIN)
        self._thread.start()

    def restore_session(self, session: NodeSession, workers: Sequence[tuple[Hello, Peer]]) -> None:
        """Take over a session of an earlier service: see `SessionLife.restore`. Call it before `start`."""
        self._life.restore(session, workers)

    def close(self) -> None:
        """End the thread. Idempotent. Must not be called on that thread."""
        if self._stopping:
            return
        self._stopping = True
        if self._thread.ident is not None:
            self.post(lambda: None)
            self._thread.join()
        for _, fds in self._posted:
            close_fds(fds)
        self._posted.clear()
        self._epoll.close()
        os.close(self._wake)

    def detach(self, session_id: str, *, kill: bool = False) -> bool:
        """End a session's connections and, with `kill`, its processes. Returns False if there is no such session. What
        it holds is freed when its processes have ended, and not before."""
        session = self._life.sessions.get(session_id)
        if session is None:
            return False
        self.post(partial(self._detach, session, kill))
        return True

    def user_limits(self) -> list[UserLimit]:
        """The users who have reached their limit of connections, or of processes of lost sessions."""
        return [*self._life.user_limits(), *self._clients.user_limits()]

    def post(self, action: Callable[[], object], fds: Sequence[int] = ()) -> None:
        """Have the server's thread call `action` soon, and close `fds` afterwards. Actions run in the order in which
        they were posted."""
        self._posted.append((action, fds))
        if threading.current_thread() is not self._thread:
            with suppress(BlockingIOError):  # the counter is full, so the thread will wake up
                os.eventfd_write(self._wake, 1)

    def send(self, session: NodeSession, message: Message, rank: int | None, fds: Sequence[int]) -> None:
        """Send a message of a session: see `MemoryHolder.push`."""
        copies = duplicates_of(fds)
        self.post(partial(self._push, session, message, rank, copies), copies)

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with short_switch_interval(SWITCH_SECONDS):
                while not self._stopping:
                    self._turn()
        except BaseException as error:
            self.failure = f"the attach server has failed: {error!r}"
            logger.critical("%s", self.failure, exc_info=error)
            with suppress(Exception):
                self._on_failure(self.failure)
        finally:
            for client in self._clients:
                self._forget(client)
            self._life.close()

    def _turn(self) -> None:
        """Handle what has happened since the last turn. Waits for events if there is nothing else to do."""
        accepting = self._resume()
        ended: list[int] = []
        for fd, mask in self._epoll.poll(self._timeout()):
            client = self._clients.get(fd)
            if client is not None:
                self._guarded(client, partial(self._serve, client, mask))
            elif fd == self._listener.fileno():
                accepting = True
            elif fd == self._wake:
                os.eventfd_read(self._wake)
            else:
                ended.append(fd)
        for client in list(self._busy):
            self._guarded(client, partial(self._work, client))
        for fd in ended:  # after the frames of these clients, because a process may have sent some before it ended
            self._life.on_pidfd(fd)
        self._run_posted()
        for client in self._clients.expired():
            self._drop(client, "hello_timeout", "no hello came in time")
        self._life.expire()
        self._host.expire()
        if accepting:  # last, because an accepted descriptor may get the number of one that this turn has closed
            self._accept()

    def _timeout(self) -> float:
        """How many seconds to wait for events."""
        if self._busy or self._posted:
            return 0.0
        deadlines = (
            self._clients.next_deadline(),
            self._life.next_deadline(),
            self._host.next_deadline(),
            self._paused_until,
        )
        now = self._clock()
        left = min((deadline - now for deadline in deadlines if deadline is not None), default=_LONGEST_WAIT_SECONDS)
        return max(0.0, min(left, _LONGEST_WAIT_SECONDS))

    def _run_posted(self) -> None:
        for _ in range(len(self._posted)):
            action, fds = self._posted.popleft()
            try:
                action()
            except Exception as error:  # noqa: BLE001 - logged and counted
                self.tally.fault(error)
            finally:
                close_fds(fds)

    # -- accepting ------------------------------------------------------------------------------------------

    def _resume(self) -> bool:
        """Listen again if the pause is over. Returns whether this call has ended a pause."""
        if self._paused_until is None or self._clock() < self._paused_until:
            return False
        self._paused_until = None
        self._epoll.register(self._listener, select.EPOLLIN)
        return True

    def _accept(self) -> None:
        """Accept some of the waiting connections. At the limit, a new connection replaces the oldest one that has sent
        no hello. If all have sent theirs, the new connection is refused."""
        for _ in range(min(_ACCEPTS_PER_TURN, self._clients.limit)):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # this process has no descriptor or memory left, so the next try would fail too
                self._pause(error)
                return
            self.tally.accepted += 1
            try:
                self._admit(accepted)
            except Exception as error:  # noqa: BLE001 - logged and counted
                self.tally.fault(error)
                accepted.close()

    def _pause(self, error: OSError) -> None:
        self.tally.refuse("no_descriptors", "a client", f"it cannot be accepted: {error.strerror}")
        oldest = self._clients.oldest_stranger()
        if oldest is not None:
            self._drop(oldest, "no_descriptors", "the service has no descriptor left")
        self._epoll.unregister(self._listener)
        self._paused_until = self._clock() + _PAUSE_SECONDS

    def _admit(self, accepted: socket.socket) -> None:
        oldest = self._clients.oldest_stranger()
        if oldest is not None and self._clients.is_crowded:
            self._drop(oldest, "too_many_strangers", "too many connections have sent no hello")
        client = self._clients.add(accepted, self._scratch)
        client.interest = select.EPOLLIN
        self._epoll.register(client.channel.fileno(), client.interest)
        if len(self._clients) > self._clients.limit:
            self._drop(client, "too_many_clients", f"the service serves {self._clients.limit} connections already")
        else:  # read now, because a client whose hello has arrived cannot be dropped as a stranger
            self._guarded(client, partial(self._serve, client, select.EPOLLIN))

    # -- the frames of one client ---------------------------------------------------------------------------

    def _guarded(self, client: ClientConnection, step: Callable[[], object]) -> None:
        """Make a step for one client. Any error in it ends only that client's connection."""
        try:
            step()
        except DisconnectedError as error:
            self._part(client, str(error))
        except (ProtocolError, AttachRefusedError) as error:
            self._drop(client, error.reason, str(error))
        except Exception as error:  # noqa: BLE001 - logged and counted
            self.tally.fault(error)
            self._drop(client, "internal", _FAILED)

    def _serve(self, client: ClientConnection, mask: int) -> None:
        """Handle the events that epoll has reported for the client's socket."""
        if mask & select.EPOLLOUT:
            client.channel.flush()
            self._rewatch(client)
        if mask & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            if client in self._busy:  # it has disconnected, but its frames are handled first: one may be a detach
                return
            if not client.interest & select.EPOLLIN:  # it has disconnected while the server did not read from it
                raise DisconnectedError("the other end has closed the connection")
            self._read(client)

    def _read(self, client: ClientConnection) -> None:
        frames = client.channel.receive()
        if not self._clients.count_partial(client):
            raise ProtocolError("memory", "too many incomplete frames wait in the service")
        if frames:
            client.backlog.extend(frames)
            self._work(client)

    def _work(self, client: ClientConnection) -> None:
        """Handle some of the client's frames. The rest waits until the other clients have had their turn."""
        self._busy.pop(client, None)
        until = self._clock() + _TURN_SECONDS
        for _ in range(_FRAMES_PER_TURN):
            if client.steps is not None:
                self._go_on(client, *client.steps)
            elif client.channel.unsent_bytes > _PAUSED_ABOVE_BYTES or not client.backlog:
                break
            else:
                self._handle(client, client.backlog.popleft())
            if client.steps is not None or self._clock() >= until:  # its turn is over
                break
        self._rewatch(client)

    def _rewatch(self, client: ClientConnection) -> None:
        """Watch for the events that matter next. Do not read from a client that has a backlog or leaves answers
        unread."""
        if client.channel.fileno() < 0:
            return
        unsent = client.channel.unsent_bytes
        interest = select.EPOLLOUT if unsent else 0
        if unsent <= _PAUSED_ABOVE_BYTES:
            if client.backlog or client.steps is not None:
                self._busy[client] = None
            else:
                interest |= select.EPOLLIN
        if interest != client.interest:
            self._epoll.modify(client.channel.fileno(), interest)
            client.interest = interest

    def _handle(self, client: ClientConnection, frame: Frame) -> None:
        member = client.member
        if member is None:
            self._greet(client, frame)
            return
        refusal = refusal_of(frame.kind, member.hello.role, len(frame.fds))
        if refusal is None and frame.kind == Kind.HELLO:
            refusal = "HELLO came twice"
        if refusal is not None:
            raise ProtocolError("unexpected", refusal)
        self.tally.frames[frame.kind] += 1
        if frame.kind == Kind.DETACH:
            self._take_leave(member)
            return
        later = partial(self._answer_later, client, frame.request_id) if frame.request_id else None
        answer = self._answer_or_error(partial(answer_to, self._host, member, frame, later), frame.request_id)
        if isinstance(answer, Generator):
            self._go_on(client, frame.request_id, answer)
        else:
            self._give_answer(client, answer, frame.request_id)

    def _go_on(self, client: ClientConnection, request_id: int, steps: Steps[Message | None]) -> None:
        """Make the next step of a call. The client's next frames wait until the call is over."""
        client.steps = None
        answer = self._answer_or_error(partial(_step_of, steps), request_id)
        if isinstance(answer, Generator):
            client.steps = (request_id, answer)
        else:
            self._give_answer(client, answer, request_id)

    def _give_answer(self, client: ClientConnection, answer: Message | None, request_id: int) -> None:
        if answer is not None and request_id and not client.has_detached:
            client.channel.send(answer.KIND, answer.pack(), request_id)

    def _answer_or_error(self, call: Callable[[], _A], request_id: int) -> _A | CallError:
        """Make a call to the host. An error that it raises is returned as its answer, unless the client must be dropped
        for it."""
        try:
            return call()
        except (ProtocolError, DisconnectedError):
            raise
        except KvstowError as error:
            self.tally.errors[error.code] += 1
            return CallError(error.code, str(error))
        except Exception as error:
            if not request_id:
                raise
            self.tally.fault(error)
            return CallError("internal", _FAILED)

    def _answer_later(self, client: ClientConnection, request_id: int, call: Callable[[], Message]) -> None:
        if client.channel.fileno() >= 0 and not client.has_detached:
            self._guarded(client, partial(self._send_answer, client, request_id, call))

    def _send_answer(self, client: ClientConnection, request_id: int, call: Callable[[], Message]) -> None:
        answer = self._answer_or_error(call, request_id)
        if answer is not None and answer.KIND != Kind.PENDING:  # the client already has a `Pending` for this call
            self._send(client, answer, request_id)

    # -- the first and the last frame -----------------------------------------------------------------------

    def _greet(self, client: ClientConnection, frame: Frame) -> None:
        if frame.kind != Kind.HELLO:
            raise ProtocolError("no_hello", "the first frame is not a hello")
        hello = Hello.unpack(frame.payload)
        if hello.is_farewell:
            self._take_farewell(client, hello)
            return
        peer = self._find_peer(client.socket, needs_pidfd=self._life.needs_pidfd)
        try:
            if not self._clients.has_place_for(peer.uid):
                raise AttachRefusedError(
                    "too_many_clients", f"processes of uid {peer.uid} have as many connections as one user may have"
                )
            member, welcome = self._life.greet(hello, peer)
        except BaseException:
            peer.close()
            raise
        client.member = member
        self._connected[member] = client
        self._clients.accept_member(client)
        client.channel.set_limit(MAX_PAYLOAD_BYTES)
        self.tally.frames[frame.kind] += 1
        client.channel.send(welcome.KIND, welcome.pack())

    def _take_farewell(self, client: ClientConnection, hello: Hello) -> None:
        """Take the farewell of a process. Its session may already be over, and the process may have ended. Neither is
        an error."""
        with (
            suppress(AttachRefusedError),
            closing(self._find_peer(client.socket, needs_pidfd=self._life.needs_pidfd)) as peer,
        ):
            self._life.settle(hello, peer)
        self.tally.frames[Kind.HELLO] += 1
        self._forget(client)

    def _take_leave(self, member: Member) -> None:
        """Handle a detach. The process reports that it has nothing of the pool mapped, and no copy under way."""
        if member.rank is not None:
            self._life.process_ended(member, is_claim=True, expected=True)
        else:
            self._life.lose(member.session, "the engine has detached", expected=True)

    def _part(self, client: ClientConnection, sentence: str) -> None:
        """Handle the end of a connection. The frames that the client sent last are read even if it left answers unread,
        because one of them may be a detach."""
        with suppress(KvstowError):
            for _ in range(_LAST_READS if client.member is not None else 0):
                client.backlog.extend(client.channel.receive())
        if client.member is not None and client.has_detached:
            self._take_leave(client.member)
            self._forget(client)
        else:
            self._drop(client, "disconnected", sentence)

    # -- sending unasked ------------------------------------------------------------------------------------

    def _push(self, session: NodeSession, message: Message, rank: int | None, fds: Sequence[int]) -> None:
        """Send a message to a member, if it is connected."""
        member = session.member_of(rank)
        client = None if member is None else self._connected.get(member)
        if member is None or client is None or client.has_detached:
            return
        if fds:
            member.has_memory = True
        self._guarded(client, partial(self._send, client, message, 0, fds))

    def _send(self, client: ClientConnection, message: Message, request_id: int, fds: Sequence[int] = ()) -> None:
        client.channel.send(message.KIND, message.pack(), request_id, fds)
        self._rewatch(client)

    # -- ending ---------------------------------------------------------------------------------------------

    def _detach(self, session: NodeSession, kill: bool) -> None:
        if kill:
            for member in session.members:
                if not member.peer.kill() and not member.peer.is_gone():
                    logger.warning(
                        "session %s: %s was not killed: the service sees no process of uid %d that it may kill for it",
                        session.session_id,
                        described(member),
                        member.peer.uid,
                    )
        self._life.lose(session, "an operator has detached it", expected=True)

    def _drop(self, client: ClientConnection, reason: str, sentence: str) -> None:
        """End a connection, and with it its session. The client is sent the reason, unless it has disconnected."""
        if client.channel.fileno() < 0:
            return
        if reason != "disconnected":
            self.tally.refuse(reason, client.described(), sentence)
            refused = Refused(reason, sentence)
            with suppress(KvstowError):
                client.channel.send(refused.KIND, refused.pack())
        member = client.member
        self._forget(client)
        if member is not None:
            self._life.lose(member.session, f"{described(member)}: {sentence}")

    def _disconnect(self, member: Member) -> None:
        """Close the connection of a process whose session is lost."""
        client = self._connected.get(member)
        if client is not None:
            self._forget(client)

    def _forget(self, client: ClientConnection) -> None:
        """Close the connection, and drop the client. Idempotent."""
        if not self._clients.remove(client):
            return
        self._busy.pop(client, None)
        if client.member is not None:
            client.member.is_connected = False
            self._connected.pop(client.member, None)
        client.backlog.clear()
        self._epoll.unregister(client.channel.fileno())
        client.channel.close()
