"""The attach server: its socket, and one thread that answers all engines of a node."""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvstow.attach.channel import SCRATCH_BYTES, close_fds
from kvstow.attach.connection import Message
from kvstow.attach.hello import Hello
from kvstow.attach.peer import Peer, peer_of
from kvstow_service.admin.sockets import bind_unix, file_id, require_folder
from kvstow_service.node.attach.clientcalls import ClientCalls
from kvstow_service.node.attach.clients import AttachTally, Clients, client_limit
from kvstow_service.node.attach.sessionhost import SessionHost, duplicates_of
from kvstow_service.node.attach.sessionlife import SessionLife, WireSession, described
from kvstow_service.process.switchinterval import short_switch_interval

FOLDER_MODE = 0o750
SOCKET_MODE = 0o660


class AttachSocket:
    """A listening Unix socket of mode 0660. If it had to create the folder, the folder has mode 0750.

    Processes of the service's user and of the group may write to the socket, and so may attach. The owner calls
    `close`, which is idempotent. It removes the file unless another service has replaced it.
    """

    def __init__(self, path: Path, group: int | None = None) -> None:
        """Raises `ConflictError` if another process listens there or the folder cannot be used."""
        self.path = path
        require_folder(path.parent, FOLDER_MODE, group)
        self.listener: socket.socket = bind_unix(path, mode=SOCKET_MODE, group=group)
        self._file = file_id(path)

    def close(self) -> None:
        self.listener.close()
        if self._file is not None and file_id(self.path) == self._file:
            self.path.unlink(missing_ok=True)
        self._file = None


_ACCEPTS_PER_TURN = 64
_PAUSE_SECONDS = 1.0


logger = logging.getLogger("kvstow.attach")

SWITCH_SECONDS = 0.0001
"""Next to a thread that is always busy, a lookup took 0.5 ms at the median and 1 ms at p99, instead of 10 ms."""

_LONGEST_WAIT_SECONDS = 60.0


class AttachServer:
    """Accepts engines on a listening Unix socket and passes their calls to a `SessionHost`.

    `start` starts the thread, which makes every call to the host. `close` ends it and closes all connections, and calls
    nothing: the host settles what the sessions hold. Any thread may use `tally`, `detach` and the links of sessions;
    they do not wait.

    No client can stop the thread or fill its memory: see `Clients` for the limits of connections, `Channel` for what
    waits to be sent, `NodeHost` for what one user may have, and `Session` of the control plane for leases and loads.
    If the thread itself fails, `failure` is set and `on_failure` is called.
    """

    def __init__(
        self,
        host: SessionHost,
        listener: socket.socket,
        *,
        limit: int | None = None,
        trust_eof: float | None = None,
        on_failure: Callable[[str], object] = lambda reason: None,
        find_peer: Callable[..., Peer] = peer_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The caller keeps the listener and closes it after `close`."""
        self.failure: str | None = None
        self._host = host
        self._clock = clock
        self._on_failure = on_failure
        self.tally = AttachTally(clock)
        self._clients = Clients(limit or client_limit(), clock)
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._posted: deque[Callable[[], object]] = deque()
        self.calls = ClientCalls(self._epoll, host, self._clients, self.tally, find_peer)
        self.calls.life = self._life = SessionLife(
            host,
            self._epoll,
            self.calls.disconnect,
            partial(_Link, self),
            service=secrets.token_hex(8),
            max_awaited=self._clients.limit,
            errors=self.tally.errors,
            trust_eof=trust_eof,
            clock=clock,
        )
        self._listener = listener
        self._paused_until: float | None = None
        """Set while nothing is accepted, because the process has no descriptor left."""
        self._scratch = bytearray(SCRATCH_BYTES)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvstow-attach", daemon=True)

    # -- for any thread -------------------------------------------------------------------------------------

    def start(self) -> None:
        self._epoll.register(self._wake, select.EPOLLIN)
        self._listener.setblocking(False)
        self._epoll.register(self._listener, select.EPOLLIN)
        self._thread.start()

    def restore_session(self, session_id: str, token_digest: str, workers: Sequence[tuple[Hello, Peer]]) -> None:
        """Restore a lost session of the previous service, with its workers that may still reach memory. The
        `SessionHost` is notified when they end. Call it before `start`. Takes ownership of the peers."""
        self._life.restore(session_id, token_digest, workers)

    def close(self) -> None:
        """Idempotent. Must not be called on the server's own thread."""
        if self._stopping:
            return
        self._stopping = True
        if self._thread.ident is not None:
            self.post(lambda: None)
            self._thread.join()
        for posted in self._posted:
            if isinstance(posted, _Push):
                posted.drop()
        self._posted.clear()
        self._epoll.close()
        os.close(self._wake)

    def detach(self, session_id: str, *, kill: bool = False) -> bool:
        """End a session's connections, and kill its processes if `kill` is set. Returns False if there is no such
        session. What it holds is freed when its processes have ended, and not before."""
        session = self._life.sessions.get(session_id)
        if session is None:
            return False
        self.post(partial(self._detach, session, kill))
        return True

    def post(self, action: Callable[[], object]) -> None:
        """Have the server's thread call `action` soon. Actions run in the order of the calls of `post`."""
        self._posted.append(action)
        if threading.current_thread() is not self._thread:
            with suppress(BlockingIOError):  # the counter is full, so the thread will wake up anyway
                os.eventfd_write(self._wake, 1)

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
                self.calls.forget(client)
            self._life.close()

    def _turn(self) -> None:
        """Handle what has happened. Waits for events if there is nothing else to do."""
        accepting = self._resume()
        ended: list[int] = []
        for fd, mask in self._epoll.poll(self._timeout()):
            client = self._clients.get(fd)
            if client is not None:
                self.calls.on_event(client, mask)
            elif fd == self._listener.fileno():
                accepting = True
            elif fd == self._wake:
                os.eventfd_read(self._wake)
            else:
                ended.append(fd)
        for client in list(self.calls.busy):
            self.calls.on_turn(client)
        for fd in ended:  # after the messages that their processes have sent
            self._life.on_pidfd(fd)
        self._run_posted()
        for client in self._clients.expired():
            self.calls.drop(client, "hello_timeout", "no hello came in time")
        self._life.expire()
        self._host.expire()
        if accepting:  # last, because a new descriptor may have the number of one that was closed above
            self._accept()

    def _timeout(self) -> float:
        """Seconds to wait for events."""
        if self.calls.busy or self._posted:
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
            action = self._posted.popleft()
            try:
                action()
            except Exception as error:  # noqa: BLE001 - logged and counted
                self.tally.fault(error)

    # -- accepting ------------------------------------------------------------------------------------------

    def _resume(self) -> bool:
        """Listen again if the pause is over. Returns whether it was."""
        if self._paused_until is None or self._clock() < self._paused_until:
            return False
        self._paused_until = None
        self._epoll.register(self._listener, select.EPOLLIN)
        return True

    def _accept(self) -> None:
        """Accept some of the waiting connections. At the limit, the oldest connection that has sent no hello makes room
        for a new one. If all have sent theirs, the new connection is refused."""
        for _ in range(min(_ACCEPTS_PER_TURN, self._clients.limit)):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor or no memory is left: trying again at once would fail too
                self._pause(error)
                return
            self.tally.accepted += 1
            try:
                self._admit(accepted)
            except Exception as error:  # noqa: BLE001 - logged and counted
                self.tally.fault(error)
                accepted.close()

    def _pause(self, error: OSError) -> None:
        self.tally.refuse("no_descriptors", f"it cannot be accepted: {error.strerror}")
        oldest = self._clients.oldest_stranger()
        if oldest is not None:
            self.calls.drop(oldest, "no_descriptors", "the service has no descriptor left")
        self._epoll.unregister(self._listener)
        self._paused_until = self._clock() + _PAUSE_SECONDS

    def _admit(self, accepted: socket.socket) -> None:
        oldest = self._clients.oldest_stranger()
        if oldest is not None and self._clients.is_crowded:
            self.calls.drop(oldest, "too_many_strangers", "too many connections have not said hello")
        client = self._clients.add(accepted, self._scratch)
        self.calls.watch(client)
        if self._clients.is_over_limit:
            reason = f"the service serves {self._clients.limit} connections already"
            self.calls.drop(client, "too_many_clients", reason)
        else:
            self.calls.on_event(client, select.EPOLLIN)  # a hello that has arrived protects it from a flood

    # -- ending ---------------------------------------------------------------------------------------------

    def _detach(self, session: WireSession, kill: bool) -> None:
        if kill:
            for member in session.members:
                if not member.peer.kill() and not member.peer.has_ended():
                    logger.warning(
                        "session %s: %s was not killed: the service sees no process of uid %d that it may kill for it",
                        *(session.session_id, described(member), member.peer.uid),
                    )
        self._life.lose(session, "an operator has detached it", expected=True)


class _Link:
    """The `SessionLink` of one session."""

    def __init__(self, server: AttachServer, session: WireSession) -> None:
        self.session_id = session.session_id
        self._server, self._session = server, session

    def push(self, message: Message, *, rank: int | None = None, fds: Sequence[int] = ()) -> None:
        """Raises `OSError`, and sends nothing, if this process can have no more descriptors."""
        send = partial(self._server.calls.push, self._session, message, rank)
        self._server.post(_Push(send, duplicates_of(fds)))


class _Push:
    """A message on its way to the server's thread, with descriptors of its own."""

    def __init__(self, send: Callable[[Sequence[int]], object], fds: Sequence[int]) -> None:
        self._send, self._fds = send, fds

    def __call__(self) -> None:
        try:
            self._send(self._fds)
        finally:
            self.drop()

    def drop(self) -> None:
        close_fds(self._fds)
        self._fds = ()
