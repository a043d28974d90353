"""Checks of serving: what keeps traffic away, and what an operator has switched off."""

from __future__ import annotations

from collections.abc import Iterator

from kvstow_api.doctor.evidence import Evidence, NothingToMeasure, make_finding
from kvstow_api.switches import bypass_words, bypassed
from kvstow_api.views.doctor import FindingView

_READINESS_FIXES = {
    "engine": "the log has the time and the reason; restart the process",
    "ranks": "see the rank's log (kvstow.agent); a rank that has failed needs a restart of its process",
    "transfers": "`kvstow get transfers` names what they wait for: check the logs and GPUs of these ranks or, if it is "
    "the host, the log of the process that plans transfers; restart it if they stay stuck",
    "pool": "`kvstow get ranks` shows how far each rank is",
    "pinned": "`kvstow get ranks` shows how far each rank is",
    "memory": "`kvstow get pools` shows who has how much; raise the limit that the reason names, or lower --memory",
    "loop": "give the process more CPU, or find out what keeps it busy",
    "ticker": "run `kvstow bypass --load --store`, save the log, and restart the process",
}
"""By the name of the check of /readyz."""
_SEE_LOG = "see the log of the process"
CERTIFICATE_DAYS = 7
_DAY_SECONDS = 86_400


def check_readiness(evidence: Evidence) -> Iterator[FindingView]:
    """Failed checks of /readyz, except for a drain, which `check_switches` reports."""
    readiness = evidence.readiness
    for one in evidence.verdict.findings:
        if one.fails_probe and not (one.name == "engine" and evidence.drain.active):
            yield make_finding(
                "readiness",
                "error",
                f"/readyz fails at {one.name}: {one.failure}",
                "load balancers send no traffic here, or requests are served without the cache",
                _READINESS_FIXES.get(one.name, _SEE_LOG),
                usable_slots=readiness.usable_slots,
                capacity_slots=readiness.capacity_slots,
            )


def check_certificate(evidence: Evidence) -> Iterator[FindingView]:
    """A TLS certificate that has expired, or is about to."""
    left = evidence.certificate_seconds_left
    if left is None:
        raise NothingToMeasure("the admin server does not use TLS")
    days = left / _DAY_SECONDS
    if days < CERTIFICATE_DAYS:
        yield make_finding(
            "certificate",
            "warning" if left > 0 else "error",
            f"the certificate of the admin server expires in {days:.1f} days"
            if left > 0
            else f"the certificate of the admin server expired {-days:.1f} days ago",
            "clients that verify it cannot connect: Prometheus, operators, ranks on other nodes",
            "renew the files; they are reloaded when they change, and the log (kvstow.tls) says if they are not usable",
            seconds_left=round(left),
        )


def check_token_files(evidence: Evidence) -> Iterator[FindingView]:
    """Token files that other users of the machine may read or change."""
    if evidence.exposed_files is None:
        raise NothingToMeasure("no token file is set")
    for setting, exposure in evidence.exposed_files.items():
        yield make_finding(
            "token_files",
            "warning",
            f"{setting}: {exposure}",
            "anyone who can read a token has its rights, and anyone who can write the file can add tokens",
            "chmod 600 (in Kubernetes: defaultMode 0440 for the volume, with an fsGroup)",
            exposed_files=len(evidence.exposed_files),
        )


def _drainer(evidence: Evidence) -> str:
    if evidence.node is None:
        return "the engine"
    return "the pool" if evidence.pool else "the node"


def check_switches(evidence: Evidence) -> Iterator[FindingView]:
    """What an operator has switched off."""
    bypass = evidence.bypass
    if off := bypassed(bypass):
        yield make_finding(
            "switches",
            "info" if bypass.ttl_seconds_left is not None else "warning",
            bypass_words(bypass),
            "the cache has no effect in that direction",
            "run `kvstow bypass --off` when the bypass is no longer needed",
            bypassed_directions=len(off),
        )
    if evidence.drain.active:
        yield make_finding(
            "switches",
            "warning",
            f"{_drainer(evidence)} is draining (mode {evidence.drain.mode})",
            "the cache accepts nothing new" + ("" if evidence.pool else ", and /readyz fails"),
            f"run `kvstow undrain --pool {evidence.pool}` to let it serve again"
            if evidence.pool
            else "run `kvstow undrain` to keep this process in service",
            pending_transfers=evidence.drain.pending_transfers,
        )
    if evidence.desired is not None and evidence.desired.paused:
        of_pool = f" --pool {evidence.pool}" if evidence.node else ""
        readiness = evidence.readiness
        yield make_finding(
            "switches",
            "warning" if readiness.usable_slots < readiness.capacity_slots else "info",
            "pinning is paused",
            f"the pool stays at {readiness.usable_slots} of {readiness.capacity_slots} slots",
            f"run `kvstow pinning resume{of_pool}` when the pause is no longer needed",
            usable_slots=readiness.usable_slots,
            capacity_slots=readiness.capacity_slots,
        )
