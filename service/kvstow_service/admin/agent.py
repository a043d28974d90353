"""The agent of one rank, which reports the rank's state to the admin server and applies the desired state it returns;
and how it finds the server on the same machine.

The server starts late, in a process that the ranks do not know. Both sides know the engine's identity: it names a Unix
socket and a file with the agents' token, in a folder that only this user can enter.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import secrets
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstow.bytesize import format_size
from kvstow.errors import ConflictError, KvstowError, NotFoundError, SettingError
from kvstow.messageorder import is_news
from kvstow.messages import DesiredState, RankReport, RankState
from kvstow_service.admin.sockets import AdminSockets, is_listening
from kvstow_service.process.switchinterval import short_switch_interval

if (
    TYPE_CHECKING
):  # takes 0.3 s: imported on the agent's thread, as every process of an inference engine imports this module
    import ssl

    from kvstow_api.client import Client

logger = logging.getLogger("kvstow.agent")
rendezvous_logger = logging.getLogger("kvstow.rendezvous")

_TIMEOUT_SECONDS = 5.0
_MIN_GAP_SECONDS = 0.2  # between two reports taken from the rank, however fast chunks are pinned
_MOST_PATH_BYTES = 107  # of a Unix socket, on Linux
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class ReportingRank(Protocol):
    """What an agent needs of a rank; `DataPlane` is one."""

    def report(self) -> RankReport: ...

    def apply(self, desired: DesiredState) -> None: ...

    def add_listener(self, callback: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Where agents find the admin server: the Unix socket if there is one, otherwise TCP. Picklable; its repr hides the
    token.

    A TLS server must show `certificate` (PEM), whatever name is in it. A renewed certificate makes a new address.
    """

    url: str
    token: str = field(repr=False)
    uds: Path | None = None
    certificate: str = ""

    def connect(self) -> Client:
        with short_switch_interval():
            from kvstow_api.client import Client, Endpoint

        return Client(Endpoint(self.url, self.uds, self.token, tls=self._trusted()), timeout=_TIMEOUT_SECONDS)

    def _trusted(self) -> ssl.SSLContext | None:
        if not self.certificate:
            return None
        import ssl

        context = ssl.create_default_context(cadata=self.certificate)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself, without its authority
        return context


FindAdmin = Callable[[], AdminAddress | None]
"""Finds the admin server; None while there is none. Called on the agent's thread, at most 5 times a second."""


class RankAgent:
    """Reports every `interval` seconds and on change, and applies the desired state in each response. Growth of the
    pinned memory is no such change.

    `server` may be a function that finds a server started later: until then the agent waits, and that is no failure.
    After a failure it is called again.

    Guarantees: no failure of the server or the rank ends the thread; the next attempt follows after `interval`. Only
    the first failure, the recovery and each change of the rank's state are logged. `stop` is idempotent and never
    waits: a server may take seconds to answer, which must delay neither the release of the rank's memory nor the end of
    the process. A report in progress ends on the agent's thread, and its response is not applied.
    """

    def __init__(
        self, rank: int, source: ReportingRank, server: AdminAddress | FindAdmin, *, interval: float = 1.0
    ) -> None:
        self._rank = rank
        self._source = source
        self._find: FindAdmin = (lambda: server) if isinstance(server, AdminAddress) else server
        self._offered: AdminAddress | None = None
        self._used_offer: AdminAddress | None = None  # the offered address, if the connection uses it
        self._client: Client | None = None
        self._interval = interval
        self._reported: RankReport | None = None
        self._due_at = 0.0
        self.sent = self.failed = 0
        """How many reports were sent, and how many attempts to report raised an error."""
        self.is_failing = False
        """Whether the last attempt has failed."""
        self._state: RankState | None = None
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvstow-agent-{rank}", daemon=True)
        source.add_listener(self._wake.set)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()

    def offer(self, address: AdminAddress) -> None:
        """Use this address if the server is not found otherwise. Thread-safe, and cheap to repeat."""
        if address != self._offered:
            self._offered = address
            self.address_changed()

    def address_changed(self) -> None:
        """Report now instead of after `interval`. Thread-safe."""
        self._due_at = 0.0
        self._wake.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()  # before the report is taken: a change after it wakes the loop again
            started = time.monotonic()
            self._report_and_apply(is_due=started >= self._due_at)
            self._wake.wait(max(0.0, self._due_at - time.monotonic()))
            self._stopping.wait(max(0.0, _MIN_GAP_SECONDS - (time.monotonic() - started)))
        self._disconnect()

    def _report_and_apply(self, *, is_due: bool) -> None:
        try:
            report = self._source.report()
            self._log_change(report)
            if not is_due and not is_news(report, self._reported):
                return
            self._due_at, self._reported = time.monotonic() + self._interval, None
            client = self._connect()
            if client is None:
                return
            from kvstow_api.client import routes  # only once there is a server: the host is starting, too

            answer = client.call(
                routes.report.returning(dict),
                report.to_json(),
                headers={"X-KVStow-Clock": f"{time.time():.6f}"},
                rank=self._rank,
            )
            if self._stopping.is_set():
                return
            self._source.apply(DesiredState.from_json(answer))
            self._reported = report
        except Exception as error:  # nothing may end the thread
            self._due_at = time.monotonic() + self._interval
            self.failed += 1
            # A server that cannot be reached is no defect, and needs no traceback.
            defect = None if isinstance(error, (KvstowError, OSError)) else error
            if not self.is_failing and not self._stopping.is_set():
                logger.warning("rank %d: report failed, will retry: %s", self._rank, error, exc_info=defect)
            self.is_failing = True
            self._disconnect()
        else:
            self.sent += 1
            if self.is_failing:
                logger.info("rank %d: reports arrive again after %d failures", self._rank, self.failed)
            self.is_failing = False

    def _connect(self) -> Client | None:
        """The open connection or a new one; None while the server has not started."""
        if self._used_offer is not None and self._used_offer != self._offered:
            self._disconnect()
        if self._client is None:
            found, offered = self._find(), self._offered
            address = found or offered
            if address is not None:
                self._client = address.connect()
                self._used_offer = offered if found is None else None
            elif self.sent:
                raise NotFoundError("the admin server is gone")
        return self._client

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = self._used_offer = None

    def _log_change(self, report: RankReport) -> None:
        if report.state == self._state:
            return
        self._state = report.state
        logger.log(
            logging.WARNING if report.error else logging.INFO,
            "rank %d is %s: %s of %s pinned (%s)%s",
            self._rank,
            report.state,
            format_size(report.pinned_bytes),
            format_size(report.target_bytes),
            report.pin_mode,
            "".join(f"; {words}" for words in (report.notice, report.error) if words),
        )


class _Published(NamedTuple):
    socket: Path
    token: str
    lock: int
    """Descriptor of the locked token file."""


class Rendezvous:
    """The socket and the token file of one engine. `identity` must be unique on this machine.

    The folder is `kvstow-UID`, of mode 0700, in `XDG_RUNTIME_DIR` (`/run/user/UID` if that is not set) or in the folder
    for temporary files. A folder that another user owns, or that others may enter, is not used.

    A rank's agent calls the object to find the server. The engine's host publishes the server once and withdraws it.
    The host keeps its token file locked: a host that publishes removes files that no living process has locked.
    """

    def __init__(self, identity: str, environ: Mapping[str, str] = os.environ) -> None:
        uid = os.geteuid()
        # Also without the variable: ranks are not always started with the environment of their host.
        runtime = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}"
        parents = [Path(runtime)]
        with suppress(FileNotFoundError):  # no temporary folder is writable
            parents.append(Path(tempfile.gettempdir()))
        self._folders = [parent / f"kvstow-{uid}" for parent in parents]
        self._identity = identity
        self._published: _Published | None = None
        self._refused: set[Path] = set()

    def __call__(self) -> AdminAddress | None:
        """The server's address; None while no server listens. Raises `OSError` if that cannot be determined."""
        for folder in self._folders:
            path = self._visit(folder)
            if path is not None and is_listening(path):  # checked first: the token is written before the socket listens
                return AdminAddress("http://kvstow", _token_path(path).read_text(), path)
        return None

    def publish(self, sockets: AdminSockets, token: str) -> None:
        """Write the token, then listen. Raises `ConflictError` if no folder can be used, or if another server has
        published this identity."""
        path = self._make_place()
        try:
            with _locked(path.parent):  # otherwise `_sweep` could remove a file that is being written
                if is_listening(path):
                    raise ConflictError(f"another engine with the identity {self._identity!r} listens on unix:{path}")
                self._published = _Published(path, token, _write_locked(_token_path(path), token))
                sockets.listen_unix(path)
                _sweep(path.parent)
        except OSError as error:
            raise ConflictError(f"cannot publish the admin server's address to agents: {error}") from error

    def withdraw(self) -> None:
        """Remove the token file unless a successor has replaced it; `AdminSockets` removes the socket. Idempotent."""
        published, self._published = self._published, None
        if published is None:
            return
        path = _token_path(published.socket)
        with suppress(OSError), _locked(path.parent):
            if path.read_text() == published.token:
                path.unlink()
        os.close(published.lock)

    def _make_place(self) -> Path:
        problems = []
        for folder in self._folders:
            try:
                with suppress(FileExistsError):
                    folder.mkdir(mode=0o700)
                path = _socket_path(folder, self._identity)
                if not os.access(folder, os.W_OK):
                    raise SettingError("runtime folder", folder, "is not writable")
                return path
            except (OSError, SettingError) as error:
                problems.append(str(error))
        hint = "set XDG_RUNTIME_DIR or TMPDIR to a folder that this user may write"
        raise ConflictError(
            f"no folder for the socket by which agents find the admin server: {'; '.join(problems)}; {hint}"
        )

    def _visit(self, folder: Path) -> Path | None:
        """The socket's path, if the folder exists and can be trusted."""
        try:
            return _socket_path(folder, self._identity)
        except FileNotFoundError:
            return None
        except (OSError, SettingError) as error:
            if folder not in self._refused:
                rendezvous_logger.warning("not looking for the admin server there: %s", error)
                self._refused.add(folder)
            return None


def _socket_path(folder: Path, identity: str) -> Path:
    """Raises `OSError` if the folder cannot be read, `SettingError` if others may enter it or its path is too long."""
    _require_private(folder)
    for name in (identity, hashlib.sha256(identity.encode()).hexdigest()[:16]):
        path = folder / f"{name}.sock"
        if _PLAIN_NAME.fullmatch(name) and len(os.fsencode(path)) <= _MOST_PATH_BYTES:
            return path
    raise SettingError("runtime folder", folder, f"has a path of more than {_MOST_PATH_BYTES - 22} bytes")


def _require_private(folder: Path) -> None:
    status = folder.lstat()
    uid = os.geteuid()
    if not stat.S_ISDIR(status.st_mode):
        raise SettingError("runtime folder", folder, "is not a folder")
    if status.st_uid != uid:
        raise SettingError("runtime folder", folder, f"belongs to user {status.st_uid}, not to user {uid}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise SettingError("runtime folder", folder, "can be entered by other users: chmod 700 it")


def _token_path(socket_path: Path) -> Path:
    return socket_path.with_suffix(".token")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: one process at a time creates and removes files in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove files that killed hosts left; an inference engine has a new identity at each start. The caller holds the
    folder's lock."""
    for token in folder.glob("*.token*"):  # also temporary files of writers that were killed
        with suppress(OSError):  # a busy socket is in use
            path = token.with_suffix(".sock")
            if not _is_locked(token) and not is_listening(path):
                path.unlink(missing_ok=True)
                token.unlink()


def _is_locked(token: Path) -> bool:
    """Whether the process that wrote this file is alive."""
    descriptor = os.open(token, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _write_locked(path: Path, text: str) -> int:
    """Replace the file atomically and return its descriptor, which holds a lock on it from before the file is visible
    until the descriptor is closed or the process ends."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, text.encode())
        partial.replace(path)
    except BaseException:
        os.close(descriptor)
        partial.unlink(missing_ok=True)
        raise
    return descriptor
