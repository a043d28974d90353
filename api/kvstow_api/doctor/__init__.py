"""The doctor: turns measured evidence into findings. It gathers no evidence and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

from kvstow_api.doctor.evidence import Evidence, NodeEvidence, NothingToMeasure
from kvstow_api.doctor.memory import check_huge_pages, check_memlock, check_memory, check_numa, check_pinning
from kvstow_api.doctor.node import (
    check_node_memory,
    check_orphaned_memory,
    check_sessions,
    check_sharing,
    check_trust_eof,
)
from kvstow_api.doctor.serving import check_certificate, check_readiness, check_switches, check_token_files
from kvstow_api.doctor.speed import check_clocks, check_links, check_thrashing
from kvstow_api.poolchoice import NO_POOL
from kvstow_api.views import DoctorView, FindingView, Severity

__all__ = ["CHECKS", "NODE_CHECKS", "Evidence", "NodeEvidence", "examine"]

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


NODE_CHECKS: Mapping[str, Callable[[Evidence], Iterator[FindingView]]] = {
    "node_memory": check_node_memory,
    "orphaned_memory": check_orphaned_memory,
    "sessions": check_sessions,
    "sharing": check_sharing,
    "trust_eof": check_trust_eof,
}
"""Only of a server that engines attach to."""
_POOL_CHECKS = ("pinning", "numa", "memlock", "links", "thrashing")
"""Of each pool of such a server, and not of the node."""


def examine(evidence: Evidence, pools: Sequence[Evidence] = ()) -> DoctorView:
    """Run all checks. `pools`: the evidence of each pool of a node, whose own is `evidence`."""
    if evidence.node is None:
        return _view(_run(evidence, CHECKS))
    # memory of a node gets huge pages whatever the machine's setting is
    of_node = {name: check for name, check in CHECKS.items() if name not in (*_POOL_CHECKS, "huge_pages")}
    results = _run(evidence, {**of_node, **NODE_CHECKS})
    for pool in pools:
        found = _run(pool, {name: CHECKS[name] for name in (*_POOL_CHECKS, "switches")})
        results.findings.extend(replace(one, what=f"pool {pool.pool}: {one.what}") for one in found.findings)
        results.made.update(found.made)
        results.skipped.update({name: f"pool {pool.pool}: {reason}" for name, reason in found.skipped.items()})
    if not pools:
        results.skipped.update(dict.fromkeys(_POOL_CHECKS, NO_POOL))
    return _view(results)


class _Results(NamedTuple):
    """`made`: the checks that could run; `skipped`: why the others could not."""

    findings: list[FindingView]
    made: dict[str, None]
    skipped: dict[str, str]


def _run(evidence: Evidence, checks: Mapping[str, Callable[[Evidence], Iterator[FindingView]]]) -> _Results:
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
