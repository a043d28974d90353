"""What the attach server does for each client: it reads frames, makes calls and answers."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Final

from kvstow.attach.calls import (
    BeginLoad,
    BeginStore,
    Completions,
    CountLookup,
    Lookup,
    LookupPrompt,
    Prefill,
    ReadEvents,
    Refresh,
    Release,
    Reset,
)
from kvstow.attach.channel import MAX_PAYLOAD_BYTES, Frame
from kvstow.attach.connection import Message
from kvstow.attach.extentcalls import Desired, RegisteredExtents, ReleasedExtents, Report
from kvstow.attach.hello import CallError, Hello, Refused
from kvstow.attach.payloads import Kind, refusal_of
from kvstow.attach.peer import Peer
from kvstow.errors import AttachRefusedError, DisconnectedError, InvalidRequestError, KvstowError, ProtocolError
from kvstow_service.node.attach.clients import AttachTally, ClientConnection, Clients
from kvstow_service.node.attach.sessionhost import Later, SessionHost
from kvstow_service.node.attach.sessionlife import Member, SessionLife, WireSession, described


def answer_to(host: SessionHost, member: Member, frame: Frame, later: Later | None = None) -> Message | None:
    """Make the call and return its answer, if its kind has one. `later`: see `SessionHost`.

    Raises what the host raises. Raises `ProtocolError` for a payload that is not a message of its kind.
    """
    if frame.kind == Kind.LOOKUP:
        return host.lookup(member.session.session_id, Lookup.unpack(frame.payload), later)
    if frame.kind == Kind.LOOKUP_PROMPT:
        return host.lookup_prompt(member.session.session_id, LookupPrompt.unpack(frame.payload), later)
    return _CALLS[frame.kind](host, member, frame)


def _release(host: SessionHost, member: Member, frame: Frame) -> None:
    host.release_leases(member.session.session_id, Release.unpack(frame.payload).lease_ids)


def _begin_load(host: SessionHost, member: Member, frame: Frame) -> Message:
    return host.begin_load(member.session.session_id, BeginLoad.unpack(frame.payload))


def _begin_store(host: SessionHost, member: Member, frame: Frame) -> Message:
    return host.begin_store(member.session.session_id, BeginStore.unpack(frame.payload))


def _complete(host: SessionHost, member: Member, frame: Frame) -> None:
    call = Completions.unpack(frame.payload)
    if call.rank >= member.session.num_ranks or member.rank not in (None, call.rank):
        raise InvalidRequestError(f"the sender may not report completions of rank {call.rank}")
    host.complete(member.session.session_id, call)


def _refresh(host: SessionHost, member: Member, frame: Frame) -> None:
    host.refresh(member.session.session_id, Refresh.unpack(frame.payload).keys)


def _count_lookup(host: SessionHost, member: Member, frame: Frame) -> None:
    host.count_lookup(member.session.session_id, CountLookup.unpack(frame.payload))


def _note_prefill(host: SessionHost, member: Member, frame: Frame) -> None:
    host.note_prefill(member.session.session_id, Prefill.unpack(frame.payload))


def _reset(host: SessionHost, member: Member, frame: Frame) -> Message:
    Reset.unpack(frame.payload)
    return host.reset(member.session.session_id)


def _read_events(host: SessionHost, member: Member, frame: Frame) -> Message:
    return host.read_events(member.session.session_id, ReadEvents.unpack(frame.payload))


def _report(host: SessionHost, member: Member, frame: Frame) -> Message:
    report = Report.unpack(frame.payload).report
    rank = _rank_of(member)
    if report.rank != rank:
        raise InvalidRequestError(f"a report of rank {report.rank}, from rank {rank}")
    return Desired(host.take_report(member.session.session_id, rank, report))


def _registered(host: SessionHost, member: Member, frame: Frame) -> None:
    extents = RegisteredExtents.unpack(frame.payload).extents
    host.extents_registered(member.session.session_id, _rank_of(member), extents)


def _released(host: SessionHost, member: Member, frame: Frame) -> None:
    extent_ids = ReleasedExtents.unpack(frame.payload).extent_ids
    host.extents_released(member.session.session_id, _rank_of(member), extent_ids)


def _rank_of(member: Member) -> int:
    assert member.rank is not None, "the kinds of workers come from workers"
    return member.rank


_CALLS: Final[dict[int, Callable[[SessionHost, Member, Frame], Message | None]]] = {
    Kind.RELEASE: _release,
    Kind.BEGIN_LOAD: _begin_load,
    Kind.BEGIN_STORE: _begin_store,
    Kind.COMPLETIONS: _complete,
    Kind.REFRESH: _refresh,
    Kind.COUNT_LOOKUP: _count_lookup,
    Kind.PREFILL: _note_prefill,
    Kind.RESET: _reset,
    Kind.READ_EVENTS: _read_events,
    Kind.REPORT: _report,
    Kind.REGISTERED: _registered,
    Kind.LET_GO: _released,
}


_FRAMES_PER_TURN = 64
"""How much is handled for one client before the others have their turn."""
_PAUSED_ABOVE_BYTES = 1 << 20
"""A client that leaves this much unread is not read from either."""
_LAST_READS = 64
"""More than the socket's buffer holds for a client that has disconnected."""
_FAILED = "the service has failed in this call; its log says how"


class ClientCalls:
    """Used only by the attach server's thread. An error of one client ends only its connection, and so its session."""

    def __init__(
        self,
        epoll: select.epoll,
        host: SessionHost,
        clients: Clients,
        tally: AttachTally,
        find_peer: Callable[..., Peer],
    ) -> None:
        self.life: SessionLife
        """Set once, before the first call."""
        self.busy: dict[ClientConnection, None] = {}
        """Clients with a backlog, in the order of their turns."""
        self._epoll = epoll
        self._host = host
        self._clients = clients
        self._tally = tally
        self._find_peer = find_peer
        self._connected: dict[Member, ClientConnection] = {}

    # -- the steps of one client ----------------------------------------------------------------------------

    def on_event(self, client: ClientConnection, mask: int) -> None:
        """epoll has reported the client's socket."""
        self._guarded(client, partial(self._serve, client, mask))

    def on_turn(self, client: ClientConnection) -> None:
        """Continue with the client's backlog."""
        self._guarded(client, partial(self._work, client))

    def watch(self, client: ClientConnection) -> None:
        """Begin to watch a new client."""
        client.interest = select.EPOLLIN
        self._epoll.register(client.channel.fileno(), client.interest)

    def _guarded(self, client: ClientConnection, step: Callable[[], object]) -> None:
        """Take a step for one client. Any error in it ends only that client."""
        try:
            step()
        except DisconnectedError as error:
            self._part(client, str(error))
        except ProtocolError as error:
            self.drop(client, error.reason, str(error))
        except AttachRefusedError as error:
            self.drop(client, error.reason, str(error))
        except Exception as error:  # noqa: BLE001 - logged and counted
            self._tally.fault(error)
            self.drop(client, "internal", _FAILED)

    def _serve(self, client: ClientConnection, mask: int) -> None:
        if mask & select.EPOLLOUT:
            client.channel.flush()
            self._rewatch(client)
        if mask & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            if client in self.busy:  # it disconnected, but what it sent before counts: it may have detached
                return
            if not client.interest & select.EPOLLIN:  # it disconnected while it was not read from
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
        self.busy.pop(client, None)
        for _ in range(min(len(client.backlog), _FRAMES_PER_TURN)):
            if client.channel.unsent_bytes > _PAUSED_ABOVE_BYTES or not client.backlog:
                break
            self._handle(client, client.backlog.popleft())
        if client.backlog and client.channel.unsent_bytes <= _PAUSED_ABOVE_BYTES:
            self.busy[client] = None
        self._rewatch(client)

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
        self._tally.frames[frame.kind] += 1
        if frame.kind == Kind.DETACH:
            self._take_leave(member)
            return
        call = partial(answer_to, self._host, member, frame, self._later(client, frame))
        answer = self._answer_or_error(call, frame.request_id)
        if answer is not None and frame.request_id and not client.has_detached:
            client.channel.send(answer.KIND, answer.pack(), frame.request_id)

    def _answer_or_error(self, call: Callable[[], Message | None], request_id: int) -> Message | None:
        """Make a call to the host. What it raises becomes its answer, unless the client must be dropped for it."""
        try:
            return call()
        except (ProtocolError, DisconnectedError):
            raise
        except KvstowError as error:
            self._tally.errors[error.code] += 1
            return CallError(error.code, str(error))
        except Exception as error:
            if not request_id:
                raise
            self._tally.fault(error)
            return CallError("internal", _FAILED)

    def _later(self, client: ClientConnection, frame: Frame) -> Later | None:
        """Where to send the answer if it takes time."""
        return partial(self._answer_later, client, frame.request_id) if frame.request_id else None

    def _answer_later(self, client: ClientConnection, request_id: int, call: Callable[[], Message]) -> None:
        if client.channel.fileno() >= 0 and not client.has_detached:
            self._guarded(client, partial(self._send_answer, client, request_id, call))

    def _send_answer(self, client: ClientConnection, request_id: int, call: Callable[[], Message]) -> None:
        answer = self._answer_or_error(call, request_id)
        if answer is not None and answer.KIND != Kind.PENDING:  # the client knows that already
            client.channel.send(answer.KIND, answer.pack(), request_id)
            self._rewatch(client)

    def _greet(self, client: ClientConnection, frame: Frame) -> None:
        if frame.kind != Kind.HELLO:
            raise ProtocolError("no_hello", "the first frame is not a hello")
        hello = Hello.unpack(frame.payload)
        if hello.is_farewell:
            self._hear_farewell(client, hello)
            return
        peer = self._find_peer(client.socket, needs_pidfd=self.life.needs_pidfd)
        try:
            if not self._clients.has_place_for(peer.uid):
                raise AttachRefusedError(
                    "too_many_clients", f"processes of uid {peer.uid} have as many connections as one user may have"
                )
            member, welcome = self.life.greet(hello, peer)
        except BaseException:
            peer.close()
            raise
        client.member = member
        self._connected[member] = client
        self._clients.accept_member(client)
        client.channel.set_limit(MAX_PAYLOAD_BYTES)
        self._tally.frames[frame.kind] += 1
        client.channel.send(welcome.KIND, welcome.pack())

    def _hear_farewell(self, client: ClientConnection, hello: Hello) -> None:
        """Handle a farewell. Its session may already be over, and the process may have ended. Neither is the client's
        fault."""
        with (
            suppress(AttachRefusedError),
            closing(self._find_peer(client.socket, needs_pidfd=self.life.needs_pidfd)) as peer,
        ):
            self.life.settle(hello, peer)
        self._tally.frames[Kind.HELLO] += 1
        self.forget(client)

    def _part(self, client: ClientConnection, sentence: str) -> None:
        """The connection has ended. What the client sent last counts, also if it left answers unread: it may have
        detached."""
        with suppress(KvstowError):
            for _ in range(_LAST_READS if client.member is not None else 0):
                client.backlog.extend(client.channel.receive())
        if client.member is not None and client.has_detached:
            self._take_leave(client.member)
            self.forget(client)
        else:
            self.drop(client, "disconnected", sentence, tell=False)

    def _take_leave(self, member: Member) -> None:
        """Handle a detach: the process has nothing of the pool mapped, and no copy under way."""
        if member.rank is not None:
            self.life.process_ended(member, expected=True)
        else:
            self.life.lose(member.session, "the engine has detached", expected=True)

    # -- sending unasked ------------------------------------------------------------------------------------

    def push(self, session: WireSession, message: Message, rank: int | None, fds: Sequence[int]) -> None:
        """On the server's thread. Send a message to a member, if it is connected."""
        member = session.member_of(rank)
        client = None if member is None else self._connected.get(member)
        if member is None or client is None or client.has_detached:
            return
        if fds:
            member.has_memory = True
        self._guarded(client, partial(self._push, client, message, fds))

    def _push(self, client: ClientConnection, message: Message, fds: Sequence[int]) -> None:
        client.channel.send(message.KIND, message.pack(), 0, fds)
        self._rewatch(client)

    # -- watching and dropping ------------------------------------------------------------------------------

    def _rewatch(self, client: ClientConnection) -> None:
        """Watch for what the client can do next. Nothing is read from a client that has a backlog or does not read."""
        if client.channel.fileno() < 0:
            return
        unsent = client.channel.unsent_bytes
        interest = select.EPOLLOUT if unsent else 0
        if not client.backlog and unsent <= _PAUSED_ABOVE_BYTES:
            interest |= select.EPOLLIN
        elif client.backlog and unsent <= _PAUSED_ABOVE_BYTES:
            self.busy[client] = None
        if interest != client.interest:
            self._epoll.modify(client.channel.fileno(), interest)
            client.interest = interest

    def drop(self, client: ClientConnection, reason: str, sentence: str, *, tell: bool = True) -> None:
        """End a connection, and with it its session."""
        if client.channel.fileno() < 0:
            return
        if reason != "disconnected":
            self._tally.refuse(reason, sentence)
        if tell:
            refused = Refused(reason, sentence)
            with suppress(KvstowError):
                client.channel.send(refused.KIND, refused.pack())
        member = client.member
        self.forget(client)
        if member is not None:
            self.life.lose(member.session, f"{described(member)}: {sentence}")

    def disconnect(self, member: Member) -> None:
        """Close the connection of a member of a lost session."""
        client = self._connected.get(member)
        if client is not None:
            self.forget(client)

    def forget(self, client: ClientConnection) -> None:
        """Close the connection. Idempotent."""
        if not self._clients.remove(client):
            return
        self.busy.pop(client, None)
        if client.member is not None:
            client.member.is_connected = False
            self._connected.pop(client.member, None)
        client.backlog.clear()
        self._epoll.unregister(client.channel.fileno())
        client.channel.close()
