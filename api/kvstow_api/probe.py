"""Probes: named sets of checks.

A probe fails if one of its required checks fails. Informational checks are shown, and never fail a probe.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvstow_api.host import HealthCheck

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
