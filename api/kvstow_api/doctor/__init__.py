"""The doctor: turns measured evidence into findings. It gathers no evidence and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

from kvstow_api.doctor.evidence import Evidence, NodeEvidence, NothingToMeasure
from kvstow_api.doctor.memory import (
    check_huge_pages,
    check_memlock,
    check_memory,
    check_numa,
    check_pinning,
    check_share,
)
from kvstow_api.doctor.node import (
    check_keeper,
    check_node_memory,
    check_orphaned_memory,
    check_rejected,
    check_sessions,
    check_sharing,
    check_trust_eof,
)
from kvstow_api.doctor.serving import check_certificate, check_readiness, check_switches, check_token_files
from kvstow_api.doctor.speed import check_clocks, check_links, check_thrashing
from kvstow_api.doctor.tier import (
    check_tier,
    check_tier_access,
    check_tier_memlock,
    check_tier_objects,
    check_tier_time,
)
from kvstow_api.poolchoice import NO_POOL
from kvstow_api.views.doctor import DoctorView, FindingView, Severity

__all__ = ["CHECKS", "NODE_CHECKS", "TIER_CHECKS", "Evidence", "NodeEvidence", "examine"]

Check = Callable[[Evidence], Iterator[FindingView]]

_SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

HOST_CHECKS: Mapping[str, Check] = {
    "readiness": check_readiness,
    "certificate": check_certificate,
    "token_files": check_token_files,
    "memory": check_memory,
    "huge_pages": check_huge_pages,
    "clocks": check_clocks,
    "switches": check_switches,
}
POOL_CHECKS: Mapping[str, Check] = {
    "pinning": check_pinning,
    "numa": check_numa,
    "memlock": check_memlock,
    "share": check_share,
    "links": check_links,
    "thrashing": check_thrashing,
    "switches": check_switches,
}
CHECKS: Mapping[str, Check] = {**HOST_CHECKS, **POOL_CHECKS}
NODE_CHECKS: Mapping[str, Check] = {
    "node_memory": check_node_memory,
    "keeper": check_keeper,
    "orphaned_memory": check_orphaned_memory,
    "sessions": check_sessions,
    "rejected": check_rejected,
    "sharing": check_sharing,
    "trust_eof": check_trust_eof,
}
"""Only of a server that engines attach to."""

TIER_CHECKS: Mapping[str, Check] = {
    "tier": check_tier,
    "tier_time": check_tier_time,
    "tier_objects": check_tier_objects,
    "tier_access": check_tier_access,
    "tier_memlock": check_tier_memlock,
}
"""Only while a store is attached."""


def examine(host: Evidence, pools: Sequence[Evidence]) -> DoctorView:
    """Run all checks: those of the host with its evidence, and those of pools with that of each."""
    checks = {**HOST_CHECKS, **(NODE_CHECKS if host.node else {}), **(TIER_CHECKS if host.tier else {})}
    results = _run(host, checks)
    for pool in pools:
        found = _run(pool, POOL_CHECKS)
        before = f"pool {pool.pool}: " if host.node else ""
        results.findings.extend(replace(one, pool=pool.pool, what=before + one.what) for one in found.findings)
        results.made.update(found.made)
        results.skipped.update({name: before + reason for name, reason in found.skipped.items()})
    if not pools:
        results.skipped.update(dict.fromkeys(set(POOL_CHECKS) - set(HOST_CHECKS), NO_POOL))
    return _view(results)


class _Results(NamedTuple):
    """`made`: the checks that could run; `skipped`: why the others could not."""

    findings: list[FindingView]
    made: dict[str, None]
    skipped: dict[str, str]


def _run(evidence: Evidence, checks: Mapping[str, Check]) -> _Results:
    results = _Results([], {}, {})
    for name, check in checks.items():
        try:
            results.findings.extend(check(evidence))
            results.made[name] = None
        except NothingToMeasure as reason:
            results.skipped[name] = str(reason)
    return results


def _view(results: _Results) -> DoctorView:
    findings = sorted(results.findings, key=lambda finding: _SEVERITIES.index(finding.severity))
    return DoctorView(
        checked=datetime.now(UTC),
        healthy=all(finding.severity == "info" for finding in findings),
        findings=findings,
        checks=list(results.made),
        skipped={name: reason for name, reason in results.skipped.items() if name not in results.made},
    )
