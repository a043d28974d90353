"""The input and the output of the checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstow.messages import DesiredState
from kvstow.status import BypassStatus, DrainStatus, RankStatus, Readiness
from kvstow_api.health import Verdict
from kvstow_api.history import SampleView
from kvstow_api.measurements import HostMemory
from kvstow_api.views import FindingView, Severity


class Evidence(NamedTuple):
    """The input of all checks. `verdict` is that of /readyz. `host` is None if the host measures nothing,
    `certificate_seconds_left` if the server does not use TLS. `exposed_files` describes the access that other users
    have to each token file, by the name of its setting; None if no token file is set."""

    verdict: Verdict
    readiness: Readiness
    desired: DesiredState
    drain: DrainStatus
    bypass: BypassStatus
    samples: Sequence[SampleView]
    clock_offsets: Mapping[int, float]
    host: HostMemory | None
    certificate_seconds_left: float | None
    exposed_files: Mapping[str, str] | None

    @property
    def reporting(self) -> list[RankStatus]:
        """The ranks that have reported. Raises `NothingToMeasure` if none has."""
        ranks = [rank for rank in self.readiness.ranks if rank.boot_id is not None]
        if not ranks:
            raise NothingToMeasure("no rank has reported")
        return ranks


class NothingToMeasure(Exception):
    """Raised by a check that lacks evidence; the message says which."""


def make_finding(check: str, severity: Severity, what: str, why: str, fix: str, **evidence: float) -> FindingView:
    return FindingView(check=check, severity=severity, what=what, why=why, fix=fix, evidence=evidence)
