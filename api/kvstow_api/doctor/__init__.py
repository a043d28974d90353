"""The doctor: turns measured evidence into findings. It gathers no evidence and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime

from kvstow_api.doctor.evidence import Evidence, NothingToMeasure
from kvstow_api.doctor.memory import check_huge_pages, check_memlock, check_memory, check_numa, check_pinning
from kvstow_api.doctor.serving import check_certificate, check_readiness, check_switches, check_token_files
from kvstow_api.doctor.speed import check_clocks, check_links, check_thrashing
from kvstow_api.views import DoctorView, FindingView, Severity

__all__ = ["CHECKS", "Evidence", "examine"]

_SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

CHECKS: Mapping[str, Callable[[Evidence], Iterator[FindingView]]] = {
    "readiness": check_readiness,
    "certificate": check_certificate,
    "token_files": check_token_files,
    "pinning": check_pinning,
    "memory": check_memory,
    "huge_pages": check_huge_pages,
    "numa": check_numa,
    "memlock": check_memlock,
    "clocks": check_clocks,
    "links": check_links,
    "thrashing": check_thrashing,
    "switches": check_switches,
}


def examine(evidence: Evidence) -> DoctorView:
    """Run all checks."""
    findings: list[FindingView] = []
    skipped: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            findings += check(evidence)
        except NothingToMeasure as reason:
            skipped[name] = str(reason)
    findings.sort(key=lambda finding: _SEVERITIES.index(finding.severity))
    return DoctorView(
        checked=datetime.now(UTC),
        healthy=all(finding.severity == "info" for finding in findings),
        findings=findings,
        checks=[name for name in CHECKS if name not in skipped],
        skipped=skipped,
    )
