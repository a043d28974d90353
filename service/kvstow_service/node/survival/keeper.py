"""The keeper: a small process that holds the service's memory while the service restarts.

It holds file descriptors by name, each with a text that it does not read. It serves one service at a time, over a Unix
socket that only its own uid reaches, and ends a while after the last one. It needs neither numpy nor the engine.

    python -m kvstow_service.node.survival.keeper STATE_FOLDER KEEP_TIMEOUT_SECONDS [--daemon | --stay]

With --daemon it goes on in the background. With --stay it lets go of everything where it would end otherwise, and waits
for the next service: in a container of its own, each end would be a restart.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvstow.errors import KeeperError
from kvstow_service.node.survival import statefolder
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

PROCESS_NAME = "kvstow-keeper"
ALREADY_RUNNING = 3  # exit status

_PAGE_BYTES = 48 << 10  # of names and texts in one answer
_MAX_CONNECTIONS = 8
_SO_PEERPIDFD = 77  # Linux 6.5
_CREDENTIALS = struct.Struct("3i")


class _Refusal(Exception):
    """A request that is answered by an error; the connection stays."""


class _Connection:
    """One peer, and the pidfd of its process."""

    def __init__(self, peer: socket.socket) -> None:
        self.socket = peer
        self.pidfd = _pidfd_of(peer)
        self.has_left = False

    def close(self) -> None:
        self.socket.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class Keeper:
    """Answers requests in `step`. Not locked: one thread.

    Guarantees: what was put is held until it is dropped, replaced or the keeper ends. A service is accepted only when
    the one before has left or its process has ended: two never write to the same memory.
    """

    def __init__(
        self,
        listener: socket.socket,
        keep_timeout: float,
        *,
        stays: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes over the listening socket. `stays`: let go of everything instead of ending."""
        self._listener, self._keep_timeout, self._stays, self._clock = listener, keep_timeout, stays, clock
        self._held: dict[str, Held] = {}
        self._connections: dict[int, _Connection] = {}
        self._service: _Connection | None = None
        self._predecessor: int | None = None  # pidfd of a service whose connection ended without a word
        self._alone_since = clock()
        self._refused = 0
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self.ended: str | None = None
        """Why the keeper has ended: "timeout" or "end". Always None with `stays`."""

    def step(self, timeout: float | None = None) -> bool:
        """Wait for requests and answer them, for at most `timeout` seconds. False once the keeper has ended."""
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
        """Until the keeper ends, or lets go of what it holds; None while there is a service, or nothing to wait for."""
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
        uid = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
        if uid != os.geteuid() or len(self._connections) >= _MAX_CONNECTIONS:
            self._refused += 1
            peer.close()
            return
        peer.setblocking(False)
        connection = _Connection(peer)
        self._connections[peer.fileno()] = connection
        self._poll.register(peer, select.POLLIN)

    def _turn_away(self) -> None:
        """No descriptor is left for the connection, and it would be reported again and again."""
        self._refused += 1
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        with suppress(OSError):
            self._listener.accept()[0].close()
        with suppress(OSError):  # if the machine has none, either: what is held matters more
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _disconnect(self, connection: _Connection) -> None:
        fd = connection.socket.fileno()
        self._poll.unregister(fd)
        del self._connections[fd]
        if connection is self._service:
            self._service, self._alone_since = None, self._clock()
            if not connection.has_left:
                self._predecessor, connection.pidfd = connection.pidfd, None
        connection.close()

    def _serve(self, connection: _Connection) -> None:
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

    def _refuse(self, connection: _Connection, why: str) -> None:
        self._refused += 1
        try:
            send(connection.socket, {"ok": False, "error": why}, [])
        except OSError:
            self._disconnect(connection)

    def _answer(
        self, connection: _Connection, request: dict[str, Any], fds: list[int]
    ) -> tuple[dict[str, Any], list[int]]:
        """What to send back. Takes out of `fds` those that the keeper holds from now on."""
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

    def _welcome(self, connection: _Connection, request: dict[str, Any]) -> dict[str, Any]:
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
        """Some of what is held, from a number on, and the number at which the next page begins."""
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


def _pidfd_of(peer: socket.socket) -> int | None:
    """Tells when the peer's process has ended. None where the kernel cannot say who that is."""
    try:
        return peer.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pid = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None


def _strings(request: dict[str, Any], key: str) -> list[str]:
    found = request.get(key)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise Garbage
    return found


def main(arguments: list[str]) -> int:
    """Become the keeper of a state folder, or say why not."""
    try:
        folder, keep_timeout = Path(arguments[0]).absolute(), float(arguments[1])
        option = "".join(arguments[2:])
        if keep_timeout < 0 or option not in ("", "--daemon", "--stay"):
            raise ValueError
    except (IndexError, ValueError):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        lock = statefolder.try_lock(statefolder.require_state_folder(folder))
        if lock is None:
            print(f"the state folder {folder} has a keeper already", file=sys.stderr)
            return ALREADY_RUNNING
        listener = statefolder.listen(folder)
    except (KeeperError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    if option == "--daemon" and not _daemonize():
        return 0
    _run(Keeper(listener, keep_timeout, stays=option == "--stay"), folder)
    return 0


def _run(keeper: Keeper, folder: Path) -> None:
    with suppress(OSError):
        Path("/proc/self/comm").write_text(PROCESS_NAME)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as process 1 of a container, it would be ignored
    try:
        while keeper.step():
            pass
    finally:
        # The lock is held still, so the socket is this keeper's.
        (folder / statefolder.SOCKET).unlink(missing_ok=True)
        keeper.close()


def _daemonize() -> bool:
    """Go on in a child process that the signals to the service's process group do not reach. False in the parent."""
    if os.fork():
        return False
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.close(null)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
