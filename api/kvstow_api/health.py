"""The probes of one server, which are named sets of checks, and the lag of its event loop.

A probe fails if one of its required checks fails. Informational checks are shown, and never fail a probe. Liveness
checks only for problems that a restart repairs."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvstow.stats import Histogram
from kvstow_api.host import ApiHost, HealthCheck

logger = logging.getLogger("kvstow.api")


class Check(NamedTuple):
    """A check. `failure` is None if conditions of the table decide whether it fails."""

    name: str
    failure: HealthCheck | None = None
    required: bool = True

    def run(self, failures: Mapping[str, str] = {}) -> str | None:
        """Return why the check fails, or None if it passes. A check that raises has failed. `failures` are those that
        conditions report, by the names of the checks."""
        try:
            return failures.get(self.name) if self.failure is None else self.failure()
        except Exception as error:  # the probe must answer, even if a host's check raises
            logger.exception("the health check %s has raised an error", self.name)
            return _raised(error)


class Finding(NamedTuple):
    name: str
    failure: str | None
    required: bool
    excluded: bool

    @property
    def fails_probe(self) -> bool:
        return self.failure is not None and self.required and not self.excluded

    def __str__(self) -> str:
        if self.excluded:
            return f"[+]{self.name} excluded: ok"
        note = "" if self.required else " (informational)"
        return f"[+]{self.name} ok{note}" if self.failure is None else f"[-]{self.name} failed: {self.failure}{note}"


class Verdict(NamedTuple):
    probe: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not any(finding.fails_probe for finding in self.findings)

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings]
        return "\n".join([*lines, f"{self.probe} check {'passed' if self.ok else 'failed'}", ""])


class Probe:
    def __init__(
        self, name: str, checks: Callable[[], Iterable[Check]], conditions: Callable[[], Mapping[str, str]] = dict
    ) -> None:
        """`checks` is called for each use, because the server answers before all parts of its host exist. `conditions`
        returns the failures that conditions report, by the names of the checks."""
        self.name = name
        self._checks, self._conditions = checks, conditions

    @property
    def checks(self) -> Mapping[str, Check]:
        return {check.name: check for check in self._checks()}

    def run(self, exclude: Collection[str] = frozenset(), failures: Mapping[str, str] | None = None) -> Verdict:
        """Run all checks except those in `exclude`. `failures` are those that conditions report, if the caller has read
        them already."""
        failures = self._read_failures() if failures is None else failures
        return Verdict(
            self.name,
            tuple(
                Finding(name, None if name in exclude else check.run(failures), check.required, name in exclude)
                for name, check in self.checks.items()
            ),
        )

    def run_one(self, name: str) -> Verdict:
        found = Finding(name, self.checks[name].run(self._read_failures()), required=True, excluded=False)
        return Verdict(f"{self.name}/{name}", (found,))

    def _read_failures(self) -> Mapping[str, str]:
        try:
            return self._conditions()
        except Exception as error:  # the probe must answer
            logger.exception("the conditions of %s could not be read", self.name)
            return dict.fromkeys(self.checks, _raised(error))


def _raised(error: Exception) -> str:
    return f"the check has raised {type(error).__name__}; the log has the traceback"


_INTERVAL = 0.25
_WINDOW = 20  # how many samples are kept: a probe right after a stall still sees the worst lag of the last 5 s
_BOUNDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


class LoopMonitor:
    """Measures how late the running event loop wakes its tasks. Used on that loop."""

    def __init__(self, allowed: float = 1.0) -> None:
        self._allowed = allowed
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._histogram = Histogram(_BOUNDS)
        self._has_stopped = False

    def record(self, lag: float) -> None:
        self._recent.append(lag)
        self._histogram.observe(lag)

    def failure(self) -> str | None:
        if self._has_stopped:
            return "the measurement of the event loop has stopped"
        worst = max(self._recent, default=0.0)
        if worst > self._allowed:
            return f"in the last 5 s, the event loop was {worst:.2f} s late (allowed: {self._allowed:g} s)"
        return None

    def snapshot(self) -> Histogram:
        return self._histogram.copy()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                due = loop.time() + _INTERVAL
                await asyncio.sleep(_INTERVAL)
                self.record(max(0.0, loop.time() - due))
        finally:
            self._has_stopped = True


def make_probes(
    host: ApiHost, process: Sequence[Check], failures: Callable[[], Mapping[str, str]]
) -> Mapping[str, Probe]:
    """Make the probes `livez`, `readyz` and `startupz`. `process` are checks of the host's own process. `failures`
    returns those that conditions report, by the names of the checks."""
    answering = Check("server", lambda: None)
    live = [answering, *map(Check, host.live_checks, host.live_checks.values())]
    startup = [answering, *map(Check, host.startup_checks, host.startup_checks.values())]
    probes = (
        Probe("livez", lambda: live),
        Probe("readyz", lambda: [*_condition_checks(host), *process], failures),
        Probe("startupz", lambda: startup),
    )
    return {probe.name: probe for probe in probes}


def _condition_checks(host: ApiHost) -> Iterator[Check]:
    """Yield the checks that conditions decide. On a node, a fault of one engine fails no probe, because the service
    still serves the others. A fault that only a restart of the service repairs does. The tier fails no probe, because
    requests can compute what its store has."""
    is_node, require = host.directory.is_node, host.readiness_require
    yield Check("engine")
    if is_node:
        yield Check("memory")
    yield Check("pool", required="pool" in require)
    yield Check("pinned", required="pinned" in require)
    yield Check("ranks", required=not is_node)
    yield Check("transfers", required=not is_node)
    if host.directory.tier is not None:
        yield Check("tier", required=False)
