"""The agent of one rank: reports the rank's state to the admin server and applies the desired state it returns."""

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
from kvstow.messageorder import is_news
from kvstow.messages import DesiredState, RankReport, RankState
from kvstow_service.process.switchinterval import short_switch_interval

if (
    TYPE_CHECKING
):  # takes 0.3 s: imported on the agent's thread, as every process of an inference engine imports this module
    import ssl

    from kvstow_api.client import Client

logger = logging.getLogger("kvstow.agent")

_TIMEOUT_SECONDS = 5.0
_MIN_GAP_SECONDS = 0.2  # between two reports taken from the rank, however fast chunks are pinned


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


@dataclass(frozen=True, slots=True)
class AgentStats:
    """`failed` counts attempts to report that raised an error; `failing`: whether the last one did."""

    sent: int
    failed: int
    failing: bool


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
        """Use this address if the server is not found otherwise. Thread-safe, and cheap to repeat."""
        if address != self._offered:
            self._offered = address
            self.address_changed()

    def address_changed(self) -> None:
        """Report now instead of after `interval`. Thread-safe."""
        self._due_at = 0.0
        self._wake.set()

    @property
    def stats(self) -> AgentStats:
        return AgentStats(self._sent, self._failed, self._failing)

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
            from kvstow_api.client import calls  # only once there is a server: the host is starting, too

            desired = client.send(calls.report(report, clock=time.time()))
            if self._stopping.is_set():
                return
            self._source.apply(desired)
            self._reported = report
        except Exception as error:  # nothing may end the thread
            self._due_at = time.monotonic() + self._interval
            self._failed += 1
            if not self._failing and not self._stopping.is_set():
                logger.warning("rank %d: report failed, will retry: %s", self._rank, error, exc_info=_if_defect(error))
            self._failing = True
            self._disconnect()
        else:
            self._sent += 1
            if self._failing:
                logger.info("rank %d: reports arrive again after %d failures", self._rank, self._failed)
            self._failing = False

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
            elif self._sent:
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


def _if_defect(error: Exception) -> Exception | None:
    """Log a traceback only for defects of KVStow, not for a server that cannot be reached."""
    from kvstow_api.client import ApiError

    return None if isinstance(error, (ApiError, KvstowError, OSError)) else error
