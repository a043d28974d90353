"""The agent of one rank. It reports the rank's state to the engine and applies the desired state that comes back, also
while the engine makes no steps.

A rank on the engine's host connects to a Unix socket, over which the engine also sends each change of the desired state
at once (`kvstow_service.admin.ranksocket`). A rank on another host posts the same bytes to the admin server.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import urlsplit

from kvstow.attach.calls import Desired, Report
from kvstow.attach.channel import Channel
from kvstow.attach.hello import CallError
from kvstow.attach.rankreports import GAP_SECONDS, REPORT_SECONDS, ReportNumbers, is_news
from kvstow.attach.wake import Wake
from kvstow.attach.wire import CONTENT_TYPE, Kind
from kvstow.bytesize import format_size
from kvstow.errors import AttachError, CallFailedError, KvstowError, NotFoundError, ProtocolError
from kvstow.messages import DesiredState, RankReport, RankState
from kvstow.plaintext import plain

if TYPE_CHECKING:
    import ssl

logger = logging.getLogger("kvstow.agent")

_TIMEOUT_SECONDS = 5.0
_SEARCH_SECONDS = 0.2
"""The pause between two searches for an engine that has not started yet."""
_MOST_ANSWER_BYTES = 64 << 10
_MOST_REASON = 300
"""The limit for the characters of the server's reason in an error."""


class ReportingRank(Protocol):
    """What an agent needs of a rank; `DataPlane` is one."""

    def report(self) -> RankReport: ...

    def apply(self, desired: DesiredState) -> None: ...

    def add_listener(self, callback: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Where agents reach the admin server over TCP. Picklable; its repr hides the token.

    A TLS server must show `certificate` (PEM), whatever name is in it. A renewed certificate makes a new address.
    """

    url: str
    token: str = field(repr=False)
    certificate: str = ""

    def trusted(self) -> ssl.SSLContext:
        """What accepts this certificate and no other."""
        import ssl

        context = ssl.create_default_context(cadata=self.certificate)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself, without its authority
        return context


FindEngine = Callable[[], Path | None]
"""Finds the engine's socket on this host; None while there is none. Called on the agent's thread, at most 20 times a
second."""


class Arrival(NamedTuple):
    """A desired state that has arrived. `answers`: it answers a report. Otherwise the engine has sent a change."""

    desired: DesiredState
    answers: bool


class Link(ABC):
    """A connection to the engine. `send` and `receive` raise `KvstowError` or `OSError` if the connection has failed,
    or if the engine has refused a report."""

    address: AdminAddress | None = None
    """Where the admin server was reached; None over the Unix socket."""

    def __init__(self) -> None:
        self.reported: RankReport | None = None
        """The last report that was sent."""
        self.sent_at: float | None = None
        """When it was sent; None once it is answered. There is one at a time, so that an engine which is late has no
        queue of them."""

    @abstractmethod
    def send(self, report: Report) -> None: ...

    @abstractmethod
    def receive(self) -> list[Arrival]:
        """What has arrived since the last call, in order. Does not wait."""

    @abstractmethod
    def fileno(self) -> int:
        """Can be read when something arrives. -1 if `send` waits for the answer."""

    @abstractmethod
    def close(self) -> None: ...


class SocketLink(Link):
    """A connection to the engine's Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connecting.settimeout(_TIMEOUT_SECONDS)
            connecting.connect(str(path))
        except BaseException:
            connecting.close()
            raise
        self._channel = Channel(connecting, limit=_MOST_ANSWER_BYTES)

    def send(self, report: Report) -> None:
        self._channel.send(report.KIND, report.pack(), request_id=1)

    def receive(self) -> list[Arrival]:
        arrivals = []
        for frame in self._channel.receive():
            if frame.kind == Kind.ERROR:
                refusal = CallError.unpack(frame.payload)
                raise CallFailedError(refusal.code, refusal.message)
            if frame.kind != Kind.DESIRED:
                raise ProtocolError("unexpected", f"a frame of kind {frame.kind} came instead of a desired state")
            arrivals.append(Arrival(Desired.unpack(frame.payload).desired, answers=frame.request_id != 0))
        return arrivals

    def fileno(self) -> int:
        return self._channel.fileno()

    def close(self) -> None:
        self._channel.close()


class HttpLink(Link):
    """Posts each report to the admin server, and waits for the answer."""

    def __init__(self, address: AdminAddress, rank: int) -> None:
        import http.client  # only ranks of other hosts need it

        super().__init__()
        self.address = address
        url = urlsplit(address.url)
        self._http = (
            http.client.HTTPSConnection(
                url.hostname or "", url.port, timeout=_TIMEOUT_SECONDS, context=address.trusted()
            )
            if url.scheme == "https"
            else http.client.HTTPConnection(url.hostname or "", url.port, timeout=_TIMEOUT_SECONDS)
        )
        self._path = f"/v1/ranks/{rank}/report"
        self._headers = {"Authorization": f"Bearer {address.token}", "Content-Type": CONTENT_TYPE}
        self._arrived: list[Arrival] = []

    def send(self, report: Report) -> None:
        import http.client

        try:
            self._http.request("POST", self._path, report.pack(), self._headers)
            answer = self._http.getresponse()
            body = answer.read(_MOST_ANSWER_BYTES)
        except http.client.HTTPException as error:
            raise AttachError(f"the admin server does not answer as HTTP demands: {error!r}") from error
        if answer.status != HTTPStatus.OK:
            reason = plain(body.decode(errors="replace"), _MOST_REASON)
            raise AttachError(f"the admin server answers with status {answer.status}: {reason}")
        self._arrived.append(Arrival(Desired.unpack(body).desired, answers=True))

    def receive(self) -> list[Arrival]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._http.close()


class RankAgent:
    """Reports every `interval` seconds and on change, and applies each desired state that arrives. More pinned memory
    is no such change.

    `find` looks for the engine on this host, and `offer` says where its admin server is otherwise. Until there is
    either, the agent waits, and that is no failure. After a failure it looks again.

    Guarantees: no failure of the engine or the rank ends the thread; the next attempt follows after `interval`. Only
    the first failure, the recovery and each change of the rank's state are logged. `stop` is idempotent and never
    waits: a server may take seconds to answer, which must delay neither the release of the rank's memory nor the end of
    the process. A report in progress ends on the agent's thread, and its answer is not applied.
    """

    def __init__(
        self,
        rank: int,
        source: ReportingRank,
        find: FindEngine,
        *,
        interval: float = REPORT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank, self._source, self._find = rank, source, find
        self._interval, self._clock = interval, clock
        self.sent = self.failed = 0
        """How many reports were answered, and how many attempts to report have failed."""
        self.is_failing = False
        """Whether the last attempt has failed."""
        self._offered: AdminAddress | None = None
        self._link: Link | None = None
        self._numbers = ReportNumbers()
        self._is_changed = self._is_urgent = False
        self._next_look = self._next_report = float("-inf")
        self._state: RankState | None = None
        self._stopping = False
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name=f"kvstow-agent-{rank}", daemon=True)
        source.add_listener(self._on_change)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread.ident is None:
            self._wake.close()

    def offer(self, address: AdminAddress) -> None:
        """Use this address if the engine is not found on this host. Thread-safe, and cheap to repeat."""
        if address != self._offered:
            self._offered, self._is_urgent = address, True
            self._wake.set()

    def _on_change(self) -> None:
        """Have the thread look at the rank. Wakes it once for each look."""
        if not self._is_changed:
            self._is_changed = True
            self._wake.set()

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001 - nothing may end the thread
                self._fail(error)
            self._wake.wait(-1 if self._link is None else self._link.fileno(), max(0.0, self._due() - self._clock()))
        self._disconnect()
        self._wake.close()

    @property
    def _awaited_since(self) -> float | None:
        """When the report was sent that the engine has not answered. None if there is none."""
        return None if self._link is None else self._link.sent_at

    def _due(self) -> float:
        """When there is something to do, unless something arrives before."""
        if self._awaited_since is not None:
            return self._awaited_since + _TIMEOUT_SECONDS
        return self._next_look if self._is_changed or self._is_urgent else self._next_report

    def _turn(self) -> None:
        if self._link is not None:
            self._take_arrivals(self._link)
        now = self._clock()
        if self._awaited_since is not None and now >= self._due():
            raise AttachError(f"the engine has not answered within {_TIMEOUT_SECONDS:.0f} s")
        if self._is_urgent:
            self._is_urgent = False
            self._next_look = self._next_report = now
        if self._awaited_since is None and now >= self._due():
            self._look(now)

    def _look(self, now: float) -> None:
        """Report the rank's state if that is due, or if there is news."""
        self._is_changed = False  # before the look, so that a change during it causes another one
        self._next_look = now + GAP_SECONDS
        report = self._source.report()
        self._log_change(report)
        if now < self._next_report and not is_news(report, None if self._link is None else self._link.reported):
            return
        link = self._connect()
        if link is None:
            self._next_look = self._next_report = now + _SEARCH_SECONDS
            return
        self._next_report, link.sent_at = now + self._interval, now
        link.send(Report.now(self._numbers.number(report)))
        link.reported = report
        self._take_arrivals(link)

    def _take_arrivals(self, link: Link) -> None:
        for arrival in link.receive():
            if self._stopping:
                return
            self._source.apply(arrival.desired)
            if not arrival.answers:
                continue
            link.sent_at = None
            self.sent += 1
            if self.is_failing:
                logger.info("rank %d: reports arrive again after %d failures", self._rank, self.failed)
            self.is_failing = False

    def _fail(self, error: Exception) -> None:
        self._next_look = self._next_report = self._clock() + self._interval
        self.failed += 1
        # An engine that cannot be reached is no defect, and needs no traceback.
        defect = None if isinstance(error, (KvstowError, OSError)) else error
        if not self.is_failing and not self._stopping:
            logger.warning("rank %d: its report has failed, and is sent again: %s", self._rank, error, exc_info=defect)
        self.is_failing = True
        self._disconnect()

    def _connect(self) -> Link | None:
        """The open connection or a new one; None while the engine has not started."""
        if self._link is not None and self._link.address not in (None, self._offered):
            self._disconnect()
        if self._link is None:
            found, offered = self._find(), self._offered
            if found is not None:
                self._link = SocketLink(found)
            elif offered is not None:
                self._link = HttpLink(offered, self._rank)
            elif self.sent:
                raise NotFoundError("the engine is gone")
        return self._link

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None

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
