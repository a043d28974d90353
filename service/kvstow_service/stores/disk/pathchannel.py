"""Keeps one child process for a path, and talks to it."""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import select
import socket
import threading
import time
from typing import Protocol

from kvstow_service.stores.childprocess import IsolatedProcess, pause_after
from kvstow_service.stores.disk.blockfile import FoundFiles
from kvstow_service.stores.disk.diskmessages import CloseFiles, DiskSocket, Done, Open, Opened, Problem, Request

logger = logging.getLogger("kvstow.disk")

_MODULE = "kvstow_service.stores.disk.diskchild"
_TICK_SECONDS = 0.5
_KILL_SECONDS = 2.0


class PathUser(Protocol):
    """What the channel reports to. Its thread makes all calls."""

    def opened(self, found: FoundFiles, file_system_bytes: int) -> None:
        """The files are open. Requests may be sent from now on."""

    def has_problem(self, problem: Problem) -> None:
        """The files cannot be opened now."""

    def done(self, answer: Done) -> None: ...

    def ended(self, reason: str) -> None:
        """The process has ended, so it does not touch the memory that it was lent any more. Another one is started."""

    def tick(self) -> None:
        """Twice a second."""


class PathChannel:
    """Starts a child process, and another one when it has ended. `send` and `close` may be called by any thread."""

    def __init__(self, opening: Open, user: PathUser, witness: int) -> None:
        self._opening, self._user, self._witness = opening, user, witness
        self._link: DiskSocket | None = None
        self._child: IsolatedProcess | None = None
        self._unsent: list[tuple[Request, int | None]] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._seconds_to_close = 0.0
        self._starts_without_success = 0
        self._thread = threading.Thread(target=self._run, name="kvstow-disk", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        child = self._child
        return None if child is None else child.pid

    def send(self, request: Request, fd: int | None = None) -> None:
        """Send a request, without waiting. The caller keeps `fd`. Requests that the process does not get before its end
        are lost."""
        with self._lock:
            if self._link is None:
                return
            if not self._unsent and self._link.send(request, fd, waits=False):
                return
            self._unsent.append((request, None if fd is None else os.dup(fd)))

    def close(self, seconds: float) -> None:
        """End the process, which has `seconds` to sync everything. After that it is killed, and left behind if the
        kernel does not let it end. Idempotent."""
        self._seconds_to_close = seconds
        self._closing.set()
        self.send(CloseFiles())
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._starts_without_success += 1
            try:
                reason = self._host()
            except Exception as error:
                logger.exception("the disk %s: unexpected error", self._opening.path)
                reason = f"unexpected error: {error!r}"
            if reason is None:
                return
            try:
                self._user.ended(reason)
            except Exception:
                logger.exception("the disk %s: unexpected error", self._opening.path)
            self._closing.wait(pause_after(self._starts_without_success))

    def _host(self) -> str | None:
        """Start a child, and listen to it until it has ended. Returns why it has ended, or None if it hangs and so
        still has the memory that it was lent."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            child = IsolatedProcess(_MODULE, [theirs.fileno()], [self._witness], {}, logger)
        except OSError as error:
            ours.close()
            return f"no process can be started: {error}"
        finally:
            theirs.close()
        link = DiskSocket(ours)
        link.send(self._opening)
        with self._lock:
            self._link, self._child = link, child
        try:
            self._listen(link)
        except EOFError:
            pass
        finally:
            with self._lock:
                self._link = None
                unsent, self._unsent = self._unsent, []
            for _, fd in unsent:
                if fd is not None:
                    os.close(fd)
            ours.close()
            self._end(child)
        if not child.has_ended():
            return None
        return f"its process {child.pid} has ended ({child.describe_end()}){child.describe_lines()}"

    def _end(self, child: IsolatedProcess) -> None:
        if self._closing.is_set():
            child.send_kill()
            if not child.wait(_KILL_SECONDS):
                logger.error("disk %s hangs; process %d will end when the disk goes on", self._opening.path, child.pid)
                child.leave_behind()
        else:
            child.kill()  # it has closed its socket, so no thread of it waits for the disk

    def _listen(self, link: DiskSocket) -> None:
        poll = select.poll()
        next_tick, closes_at = time.monotonic() + _TICK_SECONDS, None
        while True:
            events = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            poll.register(link.end, events)
            ready = poll.poll(max(0.0, next_tick - time.monotonic()) * 1000)
            if ready and ready[0][1] & select.POLLOUT:
                self._flush(link)
            if ready and ready[0][1] & ~select.POLLOUT:
                self._take(link)
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + _TICK_SECONDS
                self._user.tick()
            if self._closing.is_set():
                closes_at = closes_at or now + self._seconds_to_close
                if now >= closes_at:
                    return

    def _flush(self, link: DiskSocket) -> None:
        with self._lock:
            while self._unsent and link.send(*self._unsent[0], waits=False):
                _, fd = self._unsent.pop(0)
                if fd is not None:
                    os.close(fd)

    def _take(self, link: DiskSocket) -> None:
        message, fds = link.receive()
        match message:
            case Done():
                self._starts_without_success = 0
                self._user.done(message)
            case Opened(num_bytes, file_system_bytes):
                with mmap.mmap(fds[0], num_bytes) as mapped:
                    found = pickle.loads(mapped)
                os.close(fds[0])
                self._user.opened(found, file_system_bytes)
            case Problem():
                self._user.has_problem(message)
