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
from functools import partial

from kvstow_service.stores.actionthread import ActionThread
from kvstow_service.stores.childprocess import IsolatedProcess, pause_after
from kvstow_service.stores.disk.diskmessages import CloseFiles, Done, Open, Opened, Problem, Request
from kvstow_service.stores.disk.diskpath import DiskPath
from kvstow_service.stores.messagesocket import MessageSocket

logger = logging.getLogger("kvstow.disk")

_MODULE = "kvstow_service.stores.disk.diskchild"
_TICK_SECONDS = 0.5
_KILL_SECONDS = 2.0


class PathChannel:
    """Starts a child process, and another one when it has ended. Reports to the path with the store's lock held."""

    def __init__(self, opening: Open, path: DiskPath, lock: threading.Lock, witness: int) -> None:
        self._opening, self._path, self._lock, self._witness = opening, path, lock, witness
        self._sender = ActionThread("kvstow-disk-sender")
        self._link: MessageSocket | None = None
        self._child: IsolatedProcess | None = None
        self._closing = threading.Event()
        self._seconds_to_close = 0.0
        self._starts_without_success = 0
        self._thread = threading.Thread(target=self._run, name="kvstow-disk", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        child = self._child
        return None if child is None else child.pid

    def close(self, seconds: float) -> None:
        """End the process, which has `seconds` to sync everything. After that it is killed, and left behind if the
        kernel does not let it end. Idempotent."""
        self._seconds_to_close = seconds
        self._closing.set()
        self._sender.do(self._close_files)
        self._thread.join()
        self._sender.close()

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
                with self._lock:
                    self._path.ended(reason)
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
        self._child, self._link = child, (link := MessageSocket(ours))
        self._send(link, self._opening)
        try:
            self._listen(link)
        except EOFError:
            pass
        finally:
            ours.shutdown(socket.SHUT_RDWR)  # nothing waits any more to send
            self._sender.do(partial(self._close_link, link))
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

    def _listen(self, link: MessageSocket) -> None:
        poll = select.poll()
        poll.register(link.end, select.POLLIN)
        next_tick, closes_at = time.monotonic() + _TICK_SECONDS, None
        while True:
            if poll.poll(max(0.0, next_tick - time.monotonic()) * 1000):
                self._take(link)
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + _TICK_SECONDS
                with self._lock:
                    self._path.tick()
            if self._closing.is_set():
                closes_at = closes_at or now + self._seconds_to_close
                if now >= closes_at:
                    return

    def _take(self, link: MessageSocket) -> None:
        message, fds = link.receive()
        match message:
            case Done():
                self._starts_without_success = 0
                with self._lock:
                    self._path.done(message)
            case Opened(num_bytes, file_system_bytes):
                with mmap.mmap(fds[0], num_bytes) as mapped:
                    found = pickle.loads(mapped)
                os.close(fds[0])
                with self._lock:
                    self._path.opened(found, file_system_bytes, partial(self._send, link))
            case Problem(state, reason):
                with self._lock:
                    self._path.set_state(state, reason)

    # -- the thread that sends: it waits for the process if need be -------------------------------------------

    def _send(self, link: MessageSocket, request: Open | Request, *fds: int) -> None:
        """Send a request later. The caller keeps the descriptors."""
        self._sender.do(partial(self._send_now, link, request, *map(os.dup, fds)))

    def _send_now(self, link: MessageSocket, request: Open | Request, *fds: int) -> None:
        try:
            if link is self._link:  # it was not closed
                link.send(request, *fds)
        except EOFError:
            pass  # the other thread notices it, too
        finally:
            for fd in fds:
                os.close(fd)

    def _close_files(self) -> None:
        if self._link is not None:
            self._send_now(self._link, CloseFiles())

    def _close_link(self, link: MessageSocket) -> None:
        link.end.close()
        if self._link is link:
            self._link = None
