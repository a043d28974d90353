"""The keeper holds the service's memory while the service restarts.

It holds file descriptors under labels, and decides nothing. One of the descriptors says what the others mean, and the
keeper does not read it. It serves one service at a time, over a Unix socket in the state folder that only its own uid
can reach. It ends some time after the last service has left. A keeper outlives the services that use it, and so their
versions: its messages, which are JSON and descriptors in one packet each, never change. Its process imports neither
numpy nor the engine:

    python -m kvstow_service.node.survival.keeper STATE_FOLDER KEEP_TIMEOUT_SECONDS [--daemon | --stay]

With --daemon it continues in the background. With --stay it closes what it holds instead of ending, and waits for the
next service: where the keeper has a container of its own, its end would restart the container.
"""

from __future__ import annotations

import array
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from kvstow.attach.peer import credentials_of
from kvstow.errors import KeeperError

VERSION = 1
MESSAGE_BYTES = 64 << 10
MESSAGE_FDS = 200  # descriptors of one message; the kernel allows 253
MAX_HELD = 8192
"""How many descriptors a keeper holds at most."""
BUSY = "busy"
"""The reason with which a hello is refused while the process of the previous service lives."""

_MAGIC = b"KVK1"


class Received(NamedTuple):
    """A message and its descriptors. `is_cut`: a part of it was cut off."""

    data: bytes
    fds: list[int]
    is_cut: bool


def receive(peer: socket.socket) -> Received:
    """Receive a message. The caller owns its descriptors."""
    room = socket.CMSG_SPACE(253 * array.array("i").itemsize)
    data, ancillary, flags, _ = peer.recvmsg(MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return Received(data, list(fds), bool(flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)))


def is_readable(fd: int, seconds: float = 0.0) -> bool:
    """Whether a socket or a pidfd becomes readable within this time. It polls, because `select` takes no descriptor
    above 1,023."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def send(peer: socket.socket, message: dict[str, Any], fds: Sequence[int]) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    peer.sendmsg([_MAGIC + json.dumps(message, separators=(",", ":")).encode()], ancillary)


def take_apart(data: bytes, is_cut: bool) -> dict[str, Any]:
    """Return the content of a message. Raises `ValueError` for bytes that are no message of KVStow."""
    try:
        message = json.loads(data[len(_MAGIC) :])
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if is_cut or not data.startswith(_MAGIC) or not isinstance(message, dict):
        raise ValueError("it is no message of a keeper")
    return message


LOCK, SOCKET = "keeper.lock", "keeper.sock"
_MODE = 0o700
_LONGEST_PATH = 100  # bytes of a socket's path; the kernel allows 107


def require_state_folder(folder: Path) -> Path:
    """Create the folder if it does not exist. Raises `KeeperError` if that fails or if others may enter the folder."""
    try:
        folder.mkdir(mode=_MODE, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise KeeperError(f"the state folder {folder} cannot be used: {error.strerror}") from error
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        is_now = f"mode {found.st_mode & 0o777:o} of uid {found.st_uid}"
        raise KeeperError(f"the state folder {folder} has {is_now}; allowed: mode 700 of uid {os.geteuid()}")
    return folder


def try_lock(folder: Path) -> int | None:
    """Take the keeper's lock. Returns a descriptor that holds it until it is closed or this process ends, or None if
    another keeper holds the lock."""
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def listen(folder: Path) -> socket.socket:
    """Open the keeper's socket, for this uid only. The caller holds the lock, so no other keeper uses an existing
    socket."""
    (folder / SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _socket_path(folder) as path:
            listener.bind(path)
        os.chmod(folder / SOCKET, 0o600)
        listener.listen(8)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(folder: Path, timeout: float) -> socket.socket:
    """Connect to the keeper. Raises `OSError` if none is running."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout)
        with _socket_path(folder) as path:
            connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _socket_path(folder: Path) -> Iterator[str]:
    """Yield a path of the socket that is short enough for the kernel."""
    path = str(folder / SOCKET)
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield path
        return
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET}"
    finally:
        os.close(fd)


_SO_PEERPIDFD = 77  # a socket option of Linux 6.5 and newer


class KeeperPeer:
    """A connection. `pidfd` is that of the process that made it, or None if the kernel does not reveal the process.
    `staged` holds descriptors that were put and are not committed yet."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.pidfd = _pidfd_of(connected)
        self.staged: dict[str, int] = {}

    def close(self) -> None:
        self.socket.close()
        for fd in self.staged.values():
            os.close(fd)
        self.staged.clear()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def _pidfd_of(connected: socket.socket) -> int | None:
    try:
        return connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pid = credentials_of(connected)[0]
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None


_MAX_CONNECTIONS = 8
_FULL_SECONDS = 0.05
"""The pause after a connection could not be accepted because this process has no descriptor left."""
_MAX_FORMER = 256
"""How many former lives are remembered."""


class _Refusal(Exception):
    """Raised for a request that is answered with an error. The connection stays open."""

    def __init__(self, sentence: str, reason: str = "refused") -> None:
        super().__init__(sentence)
        self.reason = reason


class Keeper:
    """Answers requests in `step`. Not thread-safe.

    Committed descriptors are held until they are dropped or replaced, or the keeper ends. Descriptors that were only
    put are closed with their connection. A hello names the life of its service, that is, one run of it. The keeper
    accepts another life only when the process of the newest one has ended or has left, so two services never write to
    the same memory. A life that was followed by another one is never accepted again.
    """

    def __init__(
        self,
        listener: socket.socket,
        keep_timeout: float,
        *,
        stays: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes ownership of the listening socket. With `stays`, the keeper closes what it holds instead of ending."""
        self._listener, self._keep_timeout, self._stays, self._clock = listener, keep_timeout, stays, clock
        self._held: dict[str, int] = {}
        self._connections: dict[int, KeeperPeer] = {}
        self._service: KeeperPeer | None = None
        self._life = ""
        """The life of the newest service."""
        self._process: int | None = None
        """The pidfd of its process, until the service has left."""
        self._former: deque[str] = deque(maxlen=_MAX_FORMER)
        self._alone_since = clock()
        self._refused = 0
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self.ended: str | None = None
        """Why the keeper has ended: "timeout" or "end". It is always None with `stays`."""

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
        """Close everything. Idempotent."""
        for connection in list(self._connections.values()):
            self._disconnect(connection)
        self._forget_process()
        self._listener.close()
        self._close_held()

    def _end(self, why: str) -> None:
        if self._stays:
            self._close_held()
        else:
            self.ended = why

    def _close_held(self) -> None:
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()

    def _seconds_left(self) -> float | None:
        """Return the seconds until the keeper ends or, with `stays`, closes what it holds. None while a service is
        connected, and with `stays` while nothing is held."""
        if self._service is not None or (self._stays and not self._held):
            return None
        return max(0, self._alone_since + self._keep_timeout - self._clock())

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(_FULL_SECONDS)  # `poll` would report the waiting connection again at once
            return
        if credentials_of(peer)[1] != os.geteuid() or len(self._connections) >= _MAX_CONNECTIONS:
            self._refused += 1
            peer.close()
            return
        peer.setblocking(False)
        self._connections[peer.fileno()] = KeeperPeer(peer)
        self._poll.register(peer, select.POLLIN)

    def _disconnect(self, connection: KeeperPeer) -> None:
        self._poll.unregister(connection.socket)
        del self._connections[connection.socket.fileno()]
        if connection is self._service:
            self._service, self._alone_since = None, self._clock()
        connection.close()

    def _serve(self, connection: KeeperPeer) -> None:
        fds: list[int] = []
        try:
            data, fds, is_cut = receive(connection.socket)
            if not data:
                self._disconnect(connection)
                return
            sent: list[int] = []
            try:
                answer, sent = self._answer(connection, take_apart(data, is_cut), fds)
                answer = {"ok": True, **answer}
            except _Refusal as refusal:
                self._refused += 1
                answer = {"ok": False, "error": str(refusal), "reason": refusal.reason}
            send(connection.socket, answer, sent)
        except (ValueError, OSError):
            self._refused += 1
            self._disconnect(connection)
        finally:
            for fd in fds:
                os.close(fd)

    def _answer(
        self, connection: KeeperPeer, request: dict[str, Any], fds: list[int]
    ) -> tuple[dict[str, Any], list[int]]:
        """Answer a request. It removes from `fds` the descriptors that the keeper now owns."""
        verb = request.get("do")
        if verb == "list":
            return self._page(request)[0], []
        if verb == "hello":
            return self._welcome(connection, request), []
        if verb not in ("put", "commit", "take", "drop", "leave", "end"):
            raise ValueError(f"{verb!r} is no request")
        if connection is not self._service:
            raise _Refusal("this connection has sent no hello")
        if verb == "take":
            return self._page(request)
        if verb == "put":
            self._put(connection, _strings(request, "labels"), fds)
        elif verb == "commit":
            self._commit(connection, replaces=request.get("replaces") is True)
        elif verb == "drop":
            for label in _strings(request, "labels"):
                if label in self._held:
                    os.close(self._held.pop(label))
        else:
            self._forget_process()
            if verb == "end":
                self._end("end")
        return {}, []

    def _welcome(self, connection: KeeperPeer, request: dict[str, Any]) -> dict[str, Any]:
        life = request.get("life")
        if request.get("version") != VERSION:
            raise _Refusal(f"this keeper has version {VERSION} of the messages, not {request.get('version')}")
        if not isinstance(life, str) or not life:
            raise ValueError("a hello names no life")
        if connection.pidfd is None:
            raise _Refusal(
                "the keeper cannot see when this service ends: the kernel is older than 6.5, and they are in different "
                "pid namespaces. Run both in one (shareProcessNamespace), use a newer kernel, or let the service start "
                "its keeper"
            )
        if life in self._former:
            raise _Refusal("another service has taken over since")
        if life != self._life and self._process is not None and not is_readable(self._process):
            raise _Refusal("the process of the service before is still there", BUSY)
        process = os.dup(connection.pidfd)
        if life != self._life:
            self._former.append(self._life)
            self._life = life
        if self._service is not None and self._service is not connection:
            self._disconnect(self._service)  # requests that it has still sent are ignored
        self._service = connection
        self._forget_process()
        self._process = process
        return {"version": VERSION, "pid": os.getpid(), "held": len(self._held)}

    def _forget_process(self) -> None:
        if self._process is not None:
            os.close(self._process)
            self._process = None

    def _put(self, connection: KeeperPeer, labels: list[str], fds: list[int]) -> None:
        if len(labels) != len(fds) or len({*labels, *connection.staged}) < len(labels) + len(connection.staged):
            raise _Refusal(f"{len(labels)} labels came with {len(fds)} descriptors, or a label came twice")
        if len(connection.staged) + len(labels) > MAX_HELD:
            raise _Refusal(f"a keeper holds at most {MAX_HELD} descriptors")
        for label in labels:
            connection.staged[label] = fds.pop(0)

    def _commit(self, connection: KeeperPeer, *, replaces: bool) -> None:
        """Hold all descriptors that the connection has put, in one step. With `replaces`, close all others."""
        if not replaces and len(self._held.keys() | connection.staged.keys()) > MAX_HELD:
            raise _Refusal(f"a keeper holds at most {MAX_HELD} descriptors")
        staged, connection.staged = connection.staged, {}
        before, self._held = self._held, staged if replaces else self._held | staged
        for label, fd in before.items():
            if self._held.get(label) != fd:
                os.close(fd)

    def _page(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Return the held descriptors from number `start` on, as far as one message can carry them, and the number at
        which the next page begins."""
        start = request.get("start")
        if type(start) is not int or start < 0:
            raise ValueError("a page begins with a number")
        page = dict(islice(self._held.items(), start, start + MESSAGE_FDS))
        end = start + len(page)
        more = {"next": end if end < len(self._held) else None, "pid": os.getpid(), "refused": self._refused}
        return {"labels": list(page), "seconds_left": self._seconds_left(), **more}, list(page.values())


def _strings(request: dict[str, Any], key: str) -> list[str]:
    found = request.get(key)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError(f"{key} is no list of texts")
    return found


PROCESS_NAME = "kvstow-keeper"
ALREADY_RUNNING = 3  # exit status


def main(arguments: list[str]) -> int:
    """Become the keeper of a state folder, or print the reason why that is not possible."""
    try:
        folder, keep_timeout = Path(arguments[0]).absolute(), float(arguments[1])
        option = "".join(arguments[2:])
        if keep_timeout < 0 or option not in ("", "--daemon", "--stay"):
            raise ValueError
    except (IndexError, ValueError):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        lock = try_lock(require_state_folder(folder))
        if lock is None:
            print(f"the state folder {folder} has a keeper already", file=sys.stderr)
            return ALREADY_RUNNING
        listener = listen(folder)
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # process 1 of a container ignores it by default
    try:
        while keeper.step():
            pass
    finally:
        # This process still holds the lock, so no other keeper uses the socket.
        (folder / SOCKET).unlink(missing_ok=True)
        keeper.close()


def _daemonize() -> bool:
    """Continue in a child process that signals to the service's process group do not reach. Returns False in the
    parent."""
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
