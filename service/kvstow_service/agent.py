"""The agent of one rank: tells the admin server how the rank is, and the rank what the server wants of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvstow.bytesize import format_size
from kvstow.errors import KvstowError, NotFoundError
from kvstow.messages import DesiredState, RankReport, RankState
from kvstow_service.switchinterval import short_switch_interval

if TYPE_CHECKING:  # 0.3 s: left to the agent's thread, for every process of an inference engine imports this module
    import ssl

    from kvstow_api.client import Client

logger = logging.getLogger("kvstow.agent")

_TIMEOUT_SECONDS = 5.0
_NEWS = ("boot_id", "state", "error", "notice", "target_slots", "engine_id", "applied")
_MIN_GAP_SECONDS = 0.2  # between two looks at the rank, however fast chunks are pinned
_NEWS_PARTS = 10  # of the pool: one more of them is worth a report, which takes 2 to 4 ms of Python on both sides


class ReportingRank(Protocol):
    """What an agent needs of a rank; `DataPlane` is one."""

    def report(self) -> RankReport: ...

    def apply(self, desired: DesiredState) -> None: ...

    def add_listener(self, callback: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Where agents find the admin server: over the Unix socket when there is one, else over TCP. Picklable; shows no
    token. `certificate` (PEM), if there is one, is what a TLS server must show, whatever name is in it; a server that
    has renewed it has another address."""

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
"""Looks for the admin server; None while there is none. Called on the agent's thread, at most 5 times a second."""


@dataclass(frozen=True, slots=True)
class AgentStats:
    """`failed` counts beats that did not reach the server or the rank; `failing` says whether the last one did not."""

    sent: int
    failed: int
    failing: bool


class RankAgent:
    """Reports once a second and on change (of the memory, a tenth of the pool), and applies the desired state of every
    answer.

    `server` may be a way to look for a server that comes later: until it is found the agent waits, and that is
    no failure. After a failure it is looked for again.

    Guarantees: no failure ends the thread, neither of the server nor of the rank: the next beat tries again,
    and only the first failure and the recovery are logged, and each change of the rank's state. `stop` is
    idempotent and never waits: a server may take seconds to answer, and neither the release of the rank's memory nor
    the end of the process may be delayed by it.
    A beat under way ends on the agent's own thread, and its answer is not applied.
    """

    def __init__(
        self, rank: int, source: ReportingRank, server: AdminAddress | FindAdmin, *, interval: float = 1.0
    ) -> None:
        self._rank = rank
        self._source = source
        self._find: FindAdmin = (lambda: server) if isinstance(server, AdminAddress) else server
        self._offered: AdminAddress | None = None
        self._taken: AdminAddress | None = None  # the one that was offered, if the connection is to that
        self._client: Client | None = None
        self._interval = interval
        self._told: RankReport | None = None
        self._due_at = 0.0
        self._sent = 0
        self._failed = 0
        self._failing = False
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
        """Use this address where the server is not found otherwise. Safe on any thread, and cheap to repeat."""
        if address != self._offered:
            self._offered = address
            self.address_changed()

    def address_changed(self) -> None:
        """Look for the server now, not at the next beat. Safe on any thread."""
        self._due_at = 0.0
        self._wake.set()

    @property
    def stats(self) -> AgentStats:
        return AgentStats(self._sent, self._failed, self._failing)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.clear()  # before the report is taken: a change after it wakes the loop again
            started = time.monotonic()
            self._beat(is_due=started >= self._due_at)
            self._wake.wait(max(0.0, self._due_at - time.monotonic()))
            self._stopping.wait(max(0.0, _MIN_GAP_SECONDS - (time.monotonic() - started)))
        self._hang_up()

    def _beat(self, *, is_due: bool) -> None:
        try:
            report = self._source.report()
            self._log_change(report)
            if not is_due and not _is_news(report, self._told):
                return
            self._due_at, self._told = time.monotonic() + self._interval, None
            client = self._connect()
            if client is None:
                return
            from kvstow_api.client import calls  # not before there is a server: the host is starting, too

            desired = client.send(calls.report(report, clock=time.time()))
            if self._stopping.is_set():
                return
            self._source.apply(desired)
            self._told = report
        except Exception as error:  # whatever it is, the thread goes on
            self._due_at = time.monotonic() + self._interval
            self._failed += 1
            if not self._failing and not self._stopping.is_set():
                logger.warning("rank %d: report failed, trying on: %s", self._rank, error, exc_info=_if_defect(error))
            self._failing = True
            self._hang_up()
        else:
            self._sent += 1
            if self._failing:
                logger.info("rank %d: reports arrive again after %d failures", self._rank, self._failed)
            self._failing = False

    def _connect(self) -> Client | None:
        """The open connection, or a new one; None while the server has not come yet."""
        if self._taken is not None and self._taken != self._offered:
            self._hang_up()
        if self._client is None:
            found, offered = self._find(), self._offered
            address = found or offered
            if address is not None:
                self._client = address.connect()
                self._taken = offered if found is None else None
            elif self._sent:
                raise NotFoundError("the admin server is gone")
        return self._client

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = self._taken = None

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


def _is_news(report: RankReport, told: RankReport | None) -> bool:
    """Whether somebody waits for it: all but a little more memory. Figures come along with the next beat."""
    if told is None or any(getattr(report, name) != getattr(told, name) for name in _NEWS):
        return True
    change = abs(report.pinned_slots - told.pinned_slots)
    return change * _NEWS_PARTS >= report.target_slots > 0 or (change > 0 and not told.pinned_slots)


def _if_defect(error: Exception) -> Exception | None:
    """A traceback helps with defects of ours, not with a server that is away."""
    from kvstow_api.client import ApiError

    return None if isinstance(error, (ApiError, KvstowError, OSError)) else error
