"""The Unix socket to which the ranks of an embedded engine report, if they are on the engine's host."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from contextlib import suppress
from typing import Final

from kvstow.attach.calls import Desired, Report
from kvstow.attach.channel import Channel, Frame
from kvstow.attach.hello import CallError
from kvstow.attach.peer import credentials_of
from kvstow.attach.wake import Wake
from kvstow.attach.wire import Kind
from kvstow.control.engine import OffloadEngine
from kvstow.errors import DisconnectedError, InvalidRequestError, KvstowError, NotFoundError, ProtocolError
from kvstow_service.admin.rendezvous import RANKS, Rendezvous
from kvstow_service.admin.sockets import AdminSockets

logger = logging.getLogger("kvstow.ranks")

_FAULT_SECONDS = 1.0
"""The pause after an unexpected error."""
_SPARE_CLIENTS: Final = 64
"""How many connections there may be beside one for each rank. A rank that restarts may have two for a moment."""


class _Client:
    """A connection of a rank. `number` is that of the desired state which was sent last; None before the first
    report."""

    def __init__(self, connected: socket.socket) -> None:
        self.channel = Channel(connected, limit=Report.MOST_BYTES)
        self.number: int | None = None


class RankSocket:
    """Takes the reports of the ranks on a thread of its own, answers each with the desired state, and sends every later
    change of it at once.

    The thread alone sends, and reads the desired state when it does. So no rank gets an older one after a newer one.
    Only processes of this user and of root may report. An error of one connection ends only that connection. No error
    ends the thread: each is logged and counted as the engine's error `rank_report`. `start` returns at once, and `stop`
    is idempotent.
    """

    def __init__(self, engine: OffloadEngine, rendezvous: Rendezvous) -> None:
        self.failure: str | None = None
        """Why there is no socket; None while it opens, and while it serves."""
        self._engine, self._rendezvous = engine, rendezvous
        self._sockets = AdminSockets()
        self._wake = Wake()
        self._poll = select.poll()
        self._clients: dict[int, _Client] = {}
        """The clients by their file descriptors."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstow-ranks", daemon=True)

    def start(self) -> None:
        """Raises `RuntimeError` if no thread can be started."""
        self._engine.pool.target.on_wanted = self._wake.set
        self._thread.start()

    def stop(self) -> None:
        self._engine.pool.target.on_wanted = lambda: None
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._wake.close()

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._rendezvous.publish(RANKS, self._sockets.listen_unix)
        except (KvstowError, OSError) as error:
            self.failure = str(error)
            self._engine.count_error("rank_report")
            logger.warning("ranks on this host cannot report over a Unix socket: %s", error)
            return
        (listener,) = self._sockets.sockets
        listener.setblocking(False)
        for fd in (self._wake.fileno(), listener.fileno()):
            self._poll.register(fd, select.POLLIN)
        while not self._stopping.is_set():
            try:
                self._turn(listener)
            except Exception:  # nothing may end the thread
                self._engine.count_error("rank_report")
                logger.exception("the ranks' socket has failed, and continues")
                self._stopping.wait(_FAULT_SECONDS)
        for client in list(self._clients.values()):
            self._drop(client)
        self._sockets.close()

    def _turn(self, listener: socket.socket) -> None:
        """Handle what has happened, and wait for it."""
        for fd, _ in self._poll.poll():
            if fd == self._wake.fileno():
                self._wake.clear()
            elif fd == listener.fileno():
                self._accept(listener)
            elif fd in self._clients:
                self._serve(self._clients[fd])
        self._push()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(BlockingIOError):
            connected, _ = listener.accept()
            refusal = self._refusal_of(connected)
            if refusal is not None:
                self._engine.count_error("rank_report")
                logger.warning("a connection to the ranks' socket is refused: %s", refusal)
                connected.close()
                return
            client = _Client(connected)
            self._clients[connected.fileno()] = client
            self._poll.register(connected, select.POLLIN)

    def _refusal_of(self, connected: socket.socket) -> str | None:
        uid = credentials_of(connected).uid
        if uid not in (0, os.geteuid()):
            return f"its process belongs to user {uid}; allowed: root and user {os.geteuid()}"
        if len(self._clients) >= self._engine.config.num_ranks + _SPARE_CLIENTS:
            return f"there are {len(self._clients)} connections already, for {self._engine.config.num_ranks} ranks"
        return None

    def _serve(self, client: _Client) -> None:
        """Answer the reports that have arrived."""
        try:
            for frame in client.channel.receive():
                self._answer(client, frame)
        except DisconnectedError:
            self._drop(client)
        except Exception as error:  # a report that cannot be read, or a rank that reads nothing
            defect = None if isinstance(error, KvstowError) else error
            self._engine.count_error("rank_report")
            logger.warning("the connection of a rank ends: %s", error, exc_info=defect)
            self._drop(client)

    def _answer(self, client: _Client, frame: Frame) -> None:
        if frame.kind != Kind.REPORT:
            raise ProtocolError("unexpected", f"a frame of kind {frame.kind} came instead of a report")
        report = Report.unpack(frame.payload).report
        try:
            desired = self._engine.report(report)
        except (NotFoundError, InvalidRequestError) as error:
            self._engine.count_error("rank_report")
            logger.warning("rank %d: its report is not accepted: %s", report.rank, error)
            refusal = CallError(error.code, str(error))
            client.channel.send(refusal.KIND, refusal.pack(), frame.request_id)
            return
        client.number = desired.number
        client.channel.send(Kind.DESIRED, Desired(desired).pack(), frame.request_id)

    def _push(self) -> None:
        """Send the desired state to the ranks that know an older one."""
        desired = self._engine.desired()
        for client in list(self._clients.values()):
            if client.number is not None and client.number < desired.number:
                client.number = desired.number
                try:
                    client.channel.send(Kind.DESIRED, Desired(desired).pack())
                except KvstowError:  # the rank is gone, or reads nothing: it connects again
                    self._drop(client)

    def _drop(self, client: _Client) -> None:
        fd = client.channel.fileno()
        self._poll.unregister(fd)
        del self._clients[fd]
        client.channel.close()
