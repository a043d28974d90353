"""The agent of one rank: tells the admin server how the rank is, and the rank what the server wants of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from kvstow.bytesize import format_size
from kvstow.messages import DesiredState, RankReport, RankState

logger = logging.getLogger("kvstow.agent")

_TIMEOUT_SECONDS = 5.0
_MIN_GAP_SECONDS = 0.05  # at most 20 reports a second, however fast chunks are pinned


class ReportingRank(Protocol):
    """What an agent needs of a rank; `OffloadWorker` is one."""

    def report(self) -> RankReport: ...

    def apply(self, desired: DesiredState) -> None: ...

    def add_listener(self, callback: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Where agents find the admin server: over the Unix socket when there is one, else over TCP."""

    url: str
    token: str
    uds: Path | None = None

    def connect(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url if self.uds is None else "http://kvstow",
            transport=httpx.HTTPTransport(uds=str(self.uds) if self.uds else None),
            headers={"Authorization": f"Bearer {self.token}"},
            timeout=_TIMEOUT_SECONDS,
        )


@dataclass(frozen=True, slots=True)
class AgentStats:
    """`failed` counts beats that did not reach the server or the rank; `failing` says whether the last one did not."""

    sent: int
    failed: int
    failing: bool


class RankAgent:
    """Reports once a second and on change, and applies the desired state of every answer.

    Guarantees: no failure ends the thread, neither of the server nor of the rank: the next beat tries again,
    and only the first failure and the recovery are logged, and each change of the rank's state. `stop` is
    idempotent and waits for a beat under way.
    """

    def __init__(self, rank: int, source: ReportingRank, server: AdminAddress, *, interval: float = 1.0) -> None:
        self._rank = rank
        self._source = source
        self._server = server
        self._interval = interval
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

    def stop(self, timeout: float = 2 * _TIMEOUT_SECONDS) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    @property
    def stats(self) -> AgentStats:
        return AgentStats(self._sent, self._failed, self._failing)

    def _run(self) -> None:
        with self._server.connect() as client:
            while not self._stopping.is_set():
                self._wake.clear()  # before the report is taken: a change after it wakes the loop again
                started = time.monotonic()
                self._beat(client)
                self._wake.wait(self._interval)
                self._stopping.wait(max(0.0, _MIN_GAP_SECONDS - (time.monotonic() - started)))

    def _beat(self, client: httpx.Client) -> None:
        try:
            report = self._source.report()
            self._log_change(report)
            answer = client.post(f"/v1/ranks/{self._rank}/report", json=report.to_json())
            answer.raise_for_status()
            self._source.apply(DesiredState.from_json(answer.json()))
        except Exception as error:  # whatever it is, the thread goes on
            self._failed += 1
            if not self._failing:
                logger.warning("rank %d: report failed, trying on: %s", self._rank, error, exc_info=_unless_http(error))
            self._failing = True
        else:
            self._sent += 1
            if self._failing:
                logger.info("rank %d: reports arrive again after %d failures", self._rank, self._failed)
            self._failing = False

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


def _unless_http(error: Exception) -> Exception | None:
    """A traceback helps with defects of ours, not with a server that is away."""
    return None if isinstance(error, httpx.HTTPError) else error
