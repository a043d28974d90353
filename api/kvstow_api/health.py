"""Probes and their checks.

A probe fails if one of its required checks fails. Informational checks are shown, and never fail a probe. Liveness
checks only what a restart repairs. Every check is O(ranks).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvstow.status import RankStatus
from kvstow_api.host import ApiHost, HealthCheck
from kvstow_api.looplag import LoopMonitor

logger = logging.getLogger("kvstow.api")

_NO_EXCLUSION: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    failure: HealthCheck
    required: bool = True

    def run(self) -> str | None:
        """Why the check fails, None if it passes. A check that raises has failed."""
        try:
            return self.failure()
        except Exception as error:  # the probe must answer whatever a host's check raises
            logger.exception("health check %s raised", self.name)
            return f"the check raised {type(error).__name__}"


class Finding(NamedTuple):
    """The result of one check."""

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
    """A named set of checks."""

    def __init__(self, name: str, checks: Iterable[Check]) -> None:
        self.name = name
        self.checks = {check.name: check for check in checks}

    def run(self, exclude: Collection[str] = _NO_EXCLUSION) -> Verdict:
        """Run all checks except those in `exclude`."""
        return Verdict(self.name, tuple(_find(check, check.name in exclude) for check in self.checks.values()))

    def run_one(self, name: str) -> Verdict:
        """Run one of `checks`, which is required here even if it is informational."""
        check = self.checks[name]
        return Verdict(f"{self.name}/{name}", (Finding(name, check.run(), required=True, excluded=False),))


def _find(check: Check, excluded: bool) -> Finding:
    return Finding(check.name, None if excluded else check.run(), check.required, excluded)


class Health:
    """The probes `livez`, `readyz` and `startupz` of one server. The start-up grace begins when it is created."""

    def __init__(self, host: ApiHost, loop: LoopMonitor) -> None:
        self._host, self._engine = host, host.directory.pools()[0].facade
        self._grace_ends = host.clock() + host.startup_grace
        require = host.readiness_require
        ready = [
            Check("engine", self._engine_failure),
            Check("ranks", self._ranks_failure),
            Check("pool", self._pool_failure, required="pool" in require),
            Check("pinned", self._pinned_failure, required="pinned" in require),
            Check("transfers", self._transfers_failure),
            Check("loop", loop.failure),
        ]
        answering = Check("server", lambda: None)
        self.probes: Mapping[str, Probe] = {
            "livez": Probe("livez", [answering, *_host_checks(host.live_checks)]),
            "readyz": Probe("readyz", [*ready, *_host_checks(host.ready_checks)]),
            "startupz": Probe("startupz", [answering, *_host_checks(host.startup_checks)]),
        }

    def _engine_failure(self) -> str | None:
        readiness = self._engine.readiness()
        if readiness.state in ("draining", "stopped"):
            return f"the engine is {readiness.state}: {readiness.reason}"
        if readiness.state == "degraded" and not self._ranks_failure() and not self._transfers_failure():
            return f"the engine is degraded: {readiness.reason}"  # for a reason that no other check reports
        return None

    def _ranks_failure(self) -> str | None:
        in_grace = self._host.clock() < self._grace_ends
        limit = self._engine.config.report_timeout
        failures = (rank_failure(rank, limit, in_grace) for rank in self._engine.readiness().ranks)
        return "; ".join(failure for failure in failures if failure) or None

    def _pool_failure(self) -> str | None:
        return None if self._engine.readiness().usable_slots else "no slot is usable yet"

    def _pinned_failure(self) -> str | None:
        readiness = self._engine.readiness()
        if readiness.usable_slots >= readiness.capacity_slots:
            return None
        return f"{readiness.usable_slots} of {readiness.capacity_slots} slots are pinned on every rank"

    def _transfers_failure(self) -> str | None:
        pending = self._engine.stats().transfers.pending
        if not pending.stuck:
            return None
        limit = self._engine.config.transfer_timeout
        return f"{pending.stuck} stuck, the oldest for {pending.oldest_seconds:.1f} s (allowed: {limit:g} s)"


def _host_checks(checks: Mapping[str, HealthCheck]) -> list[Check]:
    return [Check(name, failure) for name, failure in checks.items()]


def rank_failure(rank: RankStatus, report_timeout: float, in_grace: bool = False) -> str | None:
    """Why `rank` is not ready, None if it is. During the start-up grace it need not have reported."""
    age = rank.last_report_age_seconds
    if age is None:
        return None if in_grace else f"rank {rank.rank} has never reported"
    if age > report_timeout:
        return f"rank {rank.rank} last reported {age:.1f} s ago (allowed: {report_timeout:g} s)"
    if rank.state in ("degraded", "failed", "stopped"):
        reason = ": ".join(part for part in (rank.error_reason, rank.error) if part)
        return f"rank {rank.rank} is {rank.state}" + (f" ({reason})" if reason else "")
    return None
