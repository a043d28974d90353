"""Probes: named sets of checks.

A probe fails if one of its required checks fails. Informational checks are shown, and never fail a probe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvstow_api.host import HealthCheck

logger = logging.getLogger("kvstow.api")

_NO_EXCLUSION: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Check:
    """`failure` is None for a check that fails while a condition of the table says so."""

    name: str
    failure: HealthCheck | None = None
    required: bool = True

    def run(self, told: Mapping[str, str] = {}) -> str | None:
        """Why the check fails, None if it passes. A check that raises has failed. `told`: failures by conditions."""
        try:
            return told.get(self.name) if self.failure is None else self.failure()
        except Exception as error:  # the probe must answer whatever a host's check raises
            logger.exception("health check %s raised", self.name)
            return f"the check raised {type(error).__name__}"


class _Unknown(dict[str, str]):
    """In place of the failures that conditions tell, if they could not be read: all of these checks fail."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def get(self, name: str, default: object = None) -> str:
        return f"the check raised {type(self._error).__name__}"


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

    def __init__(self, name: str, checks: Iterable[Check], conditions: Callable[[], Mapping[str, str]] = dict) -> None:
        """`conditions`: the failures that conditions tell, by the names of the checks."""
        self.name = name
        self._conditions = conditions
        self.checks = {check.name: check for check in checks}

    def run(self, exclude: Collection[str] = _NO_EXCLUSION) -> Verdict:
        """Run all checks except those in `exclude`."""
        told = self._tell()
        return Verdict(self.name, tuple(_find(check, check.name in exclude, told) for check in self.checks.values()))

    def run_one(self, name: str) -> Verdict:
        """Run one of `checks`, which is required here even if it is informational."""
        check = self.checks[name]
        found = Finding(name, check.run(self._tell()), required=True, excluded=False)
        return Verdict(f"{self.name}/{name}", (found,))

    def _tell(self) -> Mapping[str, str]:
        try:
            return self._conditions()
        except Exception as error:  # the probe must answer
            logger.exception("the conditions of %s could not be read", self.name)
            return _Unknown(error)


def _find(check: Check, excluded: bool, told: Mapping[str, str]) -> Finding:
    return Finding(check.name, None if excluded else check.run(told), check.required, excluded)
