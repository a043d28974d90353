"""Serving: what keeps traffic away, and what an operator has switched off."""

from __future__ import annotations

from collections.abc import Iterator

from kvstow_api.doctor.evidence import Evidence, NothingToMeasure, make_finding
from kvstow_api.views.doctor import FindingView
from kvstow_api.words import bypassed

_READINESS_FIXES = {
    "engine": "the log says when it began and why; restart the process",
    "ranks": "see the rank's log (kvstow.agent); one that has failed comes back only with a restart of its process",
    "transfers": "`kvstow get transfers` names the ranks they wait for: see their logs and GPUs; if it is the "
    "host, see the log of the process that plans transfers; if they do not go on, restart",
    "pool": "`kvstow get ranks` shows how far each rank is",
    "pinned": "`kvstow get ranks` shows how far each rank is",
    "loop": "give the process more CPU, or find what keeps it busy",
    "ticker": "`kvstow bypass --load --store`, keep the log, then restart the process",
}
"""By the name of a check of /readyz."""
_SEE_LOG = "see the log of the process"
CERTIFICATE_DAYS = 7
_DAY_SECONDS = 86_400


def check_readiness(evidence: Evidence) -> Iterator[FindingView]:
    """What fails /readyz, but for a drain: that is a switch."""
    readiness = evidence.readiness
    for one in evidence.verdict.findings:
        if one.fails_probe and not (one.name == "engine" and evidence.drain.active):
            yield make_finding(
                "readiness",
                "error",
                f"/readyz fails: {one.name}: {one.failure}",
                "traffic is kept away from here, or served without the cache",
                _READINESS_FIXES.get(one.name, _SEE_LOG),
                usable_slots=readiness.usable_slots,
                capacity_slots=readiness.capacity_slots,
            )


def check_certificate(evidence: Evidence) -> Iterator[FindingView]:
    """A TLS certificate that has ended, or is about to."""
    left = evidence.certificate_seconds_left
    if left is None:
        raise NothingToMeasure("the admin server speaks no TLS")
    days = left / _DAY_SECONDS
    if days < CERTIFICATE_DAYS:
        yield make_finding(
            "certificate",
            "warning" if left > 0 else "error",
            f"the certificate of the admin server ends in {days:.1f} days"
            if left > 0
            else f"the certificate of the admin server ended {-days:.1f} days ago",
            "without a valid one nobody who checks it reaches the server: Prometheus, operators, ranks on other nodes",
            "renew the files: they are read again when they change, and the log (kvstow.tls) says if they are refused",
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
            "a user who can read a token can do what its owner can, and one who can change the file can add tokens",
            "chmod 600 (in Kubernetes: defaultMode 0440 of the volume, beside an fsGroup)",
            exposed_files=len(evidence.exposed_files),
        )


def check_switches(evidence: Evidence) -> Iterator[FindingView]:
    """What an operator has switched off."""
    bypass = evidence.bypass
    off = bypassed(load=bypass.load, store=bypass.store)
    if off:
        left = bypass.ttl_seconds_left
        yield make_finding(
            "switches",
            "info" if left is not None else "warning",
            f"{' and '.join(off)} are bypassed" + ("" if left is None else f" for {left:.0f} s more"),
            "the cache saves nothing in that direction",
            "`kvstow bypass --off`, when the reason is gone",
            bypassed_directions=len(off),
        )
    if evidence.drain.active:
        yield make_finding(
            "switches",
            "warning",
            f"the engine is being drained (mode {evidence.drain.mode})",
            "the cache takes nothing new, and /readyz fails",
            "`kvstow undrain`, if the process is to go on",
            pending_transfers=evidence.drain.pending_transfers,
        )
    if evidence.desired.paused:
        readiness = evidence.readiness
        yield make_finding(
            "switches",
            "warning" if readiness.usable_slots < readiness.capacity_slots else "info",
            "pinning is paused",
            f"the pool stays at {readiness.usable_slots} of {readiness.capacity_slots} slots",
            "`kvstow pinning resume`, when the reason is gone",
            usable_slots=readiness.usable_slots,
            capacity_slots=readiness.capacity_slots,
        )
