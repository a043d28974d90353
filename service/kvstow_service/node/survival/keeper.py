"""The keeper holds the service's memory while the service restarts.

It holds file descriptors by name, each with a text that it does not read. It serves one service at a time, over a Unix
socket that only its own uid can reach. It ends some time after the last service has gone. `keeperprocess` is its
process.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvstow_service.node.survival.keepermessages import (
    MAX_HELD,
    MAX_INFO,
    MAX_NAME,
    MESSAGE_FDS,
    VERSION,
    Garbage,
    Held,
    receive,
    send,
    take_apart,
)
from kvstow_service.node.survival.keeperpeer import KeeperPeer, uid_of

_PAGE_BYTES = 48 << 10  # of names and texts in one answer
_MAX_CONNECTIONS = 8


class _Refusal(Exception):
    """A request that is answered with an error. The connection stays open."""


class Keeper:
    """Answers requests in `step`. Not locked: one thread uses it.

    Guarantees: what was put is held until it is dropped or replaced, or the keeper ends. A service is accepted only
    when the previous one has left or its process has ended, so two services never write to the same memory.
    """

    def __init__(
        self,
        listener: socket.socket,
        keep_timeout: float,
        *,
        stays: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes ownership of the listening socket. `stays`: let go of everything instead of ending."""
        self._listener, self._keep_timeout, self._stays, self._clock = listener, keep_timeout, stays, clock
        self._held: dict[str, Held] = {}
        self._connections: dict[int, KeeperPeer] = {}
        self._service: KeeperPeer | None = None
        self._predecessor: int | None = None  # pidfd of a service whose connection ended without a message
        self._alone_since = clock()
        self._refused = 0
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self.ended: str | None = None
        """Why the keeper has ended: "timeout" or "end". Always None with `stays`."""

    def step(self, timeout: float | None = None) -> bool:
        """Wait for requests and answer them, for at most `timeout` seconds. Returns False once the keeper has ended."""
        if self.ended is None:
            left = self._seconds_left()
            waits = [seconds for seconds in (timeout, left) if seconds is not None]
            for fd, _ in self._poll.poll(1000 * max(0, min(waits)) if waits else None):
                if fd == self._listener.fileno():
                    self._accept()
                elif fd in self._connections:
                    self._serve(self._connections[fd])
            if self.ended is None and self._service is None and self._seconds_left() == 0:
                self._end("timeout")
        return self.ended is None

    def close(self) -> None:
        """Let go of everything; idempotent."""
        for connection in list(self._connections.values()):
            self._disconnect(connection)
        self._forget_predecessor()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        self._listener.close()
        self._let_go()

    def _end(self, why: str) -> None:
        if self._stays:
            self._let_go()
        else:
            self.ended = why

    def _let_go(self) -> None:
        for held in self._held.values():
            os.close(held.fd)
        self._held.clear()

    def _seconds_left(self) -> float | None:
        """Seconds until the keeper ends, or lets go of what it holds. None while there is a service, or nothing to wait
        for."""
        if self._service is not None or (self._stays and not self._held):
            return None
        return max(0, self._alone_since + self._keep_timeout - self._clock())

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away()
            return
        if uid_of(peer) != os.geteuid() or len(self._connections) >= _MAX_CONNECTIONS:
            self._refused += 1
            peer.close()
            return
        peer.setblocking(False)
        self._connections[peer.fileno()] = KeeperPeer(peer)
        self._poll.register(peer, select.POLLIN)

    def _turn_away(self) -> None:
        """Accept and close a connection for which no descriptor is left. Otherwise it would be reported again and
        again."""
        self._refused += 1
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with suppress(OSError):
            self._listener.accept()[0].close()
        with suppress(OSError):  # the machine may have none either: what is held matters more
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _disconnect(self, connection: KeeperPeer) -> None:
        fd = connection.socket.fileno()
        self._poll.unregister(fd)
        del self._connections[fd]
        if connection is self._service:
            self._service, self._alone_since = None, self._clock()
            if not connection.has_left:
                self._predecessor, connection.pidfd = connection.pidfd, None
        connection.close()

    def _serve(self, connection: KeeperPeer) -> None:
        fds: list[int] = []
        try:
            data, fds, is_cut = receive(connection.socket)
            if not data:
                self._disconnect(connection)
                return
            answer, sent = self._answer(connection, take_apart(data, is_cut), fds)
            send(connection.socket, {"ok": True, **answer}, sent)
        except _Refusal as refusal:
            self._refuse(connection, str(refusal))
        except (Garbage, OSError):
            self._refused += 1
            self._disconnect(connection)
        finally:
            for fd in fds:
                os.close(fd)

    def _refuse(self, connection: KeeperPeer, why: str) -> None:
        self._refused += 1
        try:
            send(connection.socket, {"ok": False, "error": why}, [])
        except OSError:
            self._disconnect(connection)

    def _answer(
        self, connection: KeeperPeer, request: dict[str, Any], fds: list[int]
    ) -> tuple[dict[str, Any], list[int]]:
        """The answer to send back. Removes from `fds` the descriptors that the keeper holds from now on."""
        verb = request.get("do")
        if verb == "list":
            return self._page(request)[0], []
        if verb == "hello":
            return self._welcome(connection, request), []
        if verb not in ("put", "take", "drop", "leave", "end"):
            raise Garbage
        if connection is not self._service:
            raise _Refusal("this connection has not said hello")
        if verb == "take":
            return self._page(request)
        if verb == "put":
            self._put(request, fds)
        elif verb == "drop":
            for name in _strings(request, "names"):
                if name in self._held:
                    os.close(self._held.pop(name).fd)
        elif verb == "leave":
            connection.has_left = True
        else:
            connection.has_left = True
            self._end("end")
        return {}, []

    def _welcome(self, connection: KeeperPeer, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("version") != VERSION:
            raise _Refusal(f"this keeper speaks version {VERSION}, not {request.get('version')}")
        if self._service is not None and self._service is not connection:
            raise _Refusal("another service is connected")
        if self._predecessor is not None and not select.select([self._predecessor], [], [], 0)[0]:
            raise _Refusal("the process of the service before is still there")
        self._forget_predecessor()
        self._service = connection
        return {"version": VERSION, "pid": os.getpid(), "held": len(self._held)}

    def _forget_predecessor(self) -> None:
        if self._predecessor is not None:
            os.close(self._predecessor)
            self._predecessor = None

    def _put(self, request: dict[str, Any], fds: list[int]) -> None:
        names, infos = _strings(request, "names"), _strings(request, "infos")
        if not len(names) == len(infos) == len(fds) or len(set(names)) < len(names):
            raise _Refusal(f"{len(names)} names and {len(infos)} texts came with {len(fds)} descriptors")
        if any(len(name) > MAX_NAME for name in names) or any(len(info) > MAX_INFO for info in infos):
            raise _Refusal(f"a name is longer than {MAX_NAME} or a text longer than {MAX_INFO} characters")
        if len(self._held.keys() | set(names)) > MAX_HELD:
            raise _Refusal(f"a keeper holds at most {MAX_HELD} descriptors")
        for name, info in zip(names, infos, strict=True):
            before = self._held.get(name)
            self._held[name] = Held(fds.pop(0), info)
            if before is not None:
                os.close(before.fd)

    def _page(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """A page of what is held, starting at a given number, and the number at which the next page begins."""
        start = request.get("start")
        if not isinstance(start, int) or isinstance(start, bool) or start < 0:
            raise Garbage
        items: list[list[str]] = []
        fds: list[int] = []
        size = 0
        for name, held in list(self._held.items())[start : start + MESSAGE_FDS]:
            size += len(json.dumps([name, held.info]))
            if size > _PAGE_BYTES and items:
                break
            items.append([name, held.info])
            fds.append(held.fd)
        end = start + len(items)
        more = {"next": end if end < len(self._held) else None, "pid": os.getpid(), "refused": self._refused}
        left = self._seconds_left()
        return {"items": items, "seconds_left": left, **more}, fds


def _strings(request: dict[str, Any], key: str) -> list[str]:
    found = request.get(key)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise Garbage
    return found
