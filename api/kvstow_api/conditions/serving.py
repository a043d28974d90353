"""Conditions of serving: what keeps traffic away, and what an operator has switched off."""

from __future__ import annotations

from collections.abc import Iterator

from kvstow_api.answers import ConditionView
from kvstow_api.conditions.evidence import Evidence, NothingToMeasure, make_condition
from kvstow_api.numberformat import counted
from kvstow_api.switches import bypass_words, bypassed

_PROCESS_FIXES = {
    "loop": "give the process more CPU, or find out what keeps it busy",
    "ticker": "run `kvstow bypass --load --store`, save the log, and restart the process",
}
"""By the name of the check."""
_SEE_LOG = "see the log of the process, and restart it"
CERTIFICATE_DAYS = 7
_DAY_SECONDS = 86_400


def find_process(evidence: Evidence) -> Iterator[ConditionView]:
    """Failed checks of the process itself."""
    for name, failure in evidence.failures.items():
        yield make_condition(
            "error",
            f"the check {name} fails: {failure}",
            "load balancers send no traffic here, or requests are served without the cache",
            _PROCESS_FIXES.get(name, _SEE_LOG),
        )


def find_certificate(evidence: Evidence) -> Iterator[ConditionView]:
    """A TLS certificate that has expired, or is about to."""
    left = evidence.certificate_seconds_left
    if left is None:
        raise NothingToMeasure("the admin server does not use TLS")
    days = left / _DAY_SECONDS
    if days < CERTIFICATE_DAYS:
        yield make_condition(
            "warning" if left > 0 else "error",
            f"the certificate of the admin server expires in {days:.1f} days"
            if left > 0
            else f"the certificate of the admin server expired {-days:.1f} days ago",
            "clients that verify it cannot connect: Prometheus, operators, ranks on other nodes",
            "renew the files; they are reloaded when they change, and the log (kvstow.tls) says if they are not usable",
            seconds_left=round(left),
        )


def find_token_files(evidence: Evidence) -> Iterator[ConditionView]:
    """Token files that other users of the machine may read or change."""
    if evidence.exposed_files is None:
        raise NothingToMeasure("no token file is set")
    for setting, exposure in evidence.exposed_files.items():
        yield make_condition(
            "warning",
            f"{setting}: {exposure}",
            "anyone who can read a token has its rights, and anyone who can write the file can add tokens",
            "chmod 600 (in Kubernetes: defaultMode 0440 for the volume, with an fsGroup)",
            exposed_files=len(evidence.exposed_files),
        )


def find_bypass(evidence: Evidence) -> Iterator[ConditionView]:
    """Directions that an operator has switched off."""
    bypass = evidence.bypass
    if off := bypassed(bypass):
        yield make_condition(
            "info" if bypass.ttl_seconds_left is not None else "warning",
            bypass_words(bypass),
            "the cache has no effect in that direction",
            f"`kvstow bypass --off{evidence.of_pool}`, when the bypass is no longer needed",
            bypassed_directions=len(off),
        )


def find_drain(evidence: Evidence) -> Iterator[ConditionView]:
    """A host or a pool that an operator drains."""
    drain = evidence.drain
    if drain.active:
        yield make_condition(
            "warning",
            f"an operator drains the {'engine' if evidence.node is None else 'pool' if evidence.pool else 'node'} "
            f"(mode {drain.mode}): "
            + ("nothing is in flight" if drain.drained else f"{counted(drain.pending_transfers, 'transfer')} left"),
            "the cache accepts nothing new" + ("" if evidence.pool else ", and /readyz fails"),
            f"`kvstow undrain{evidence.of_pool}` lets it serve again",
            pending_transfers=drain.pending_transfers,
        )


def find_pause(evidence: Evidence) -> Iterator[ConditionView]:
    """Pools whose pinning an operator has paused."""
    readiness = evidence.readiness
    if evidence.desired is not None and evidence.desired.paused:
        yield make_condition(
            "warning" if readiness.usable_slots < readiness.capacity_slots else "info",
            "pinning is paused",
            f"the pool stays at {readiness.usable_slots} of {readiness.capacity_slots} slots",
            f"`kvstow pinning resume{evidence.of_pool}`, when the pause is no longer needed",
            usable_slots=readiness.usable_slots,
            capacity_slots=readiness.capacity_slots,
        )
