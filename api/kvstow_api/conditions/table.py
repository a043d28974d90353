"""The one table of conditions. The doctor, the status page, `kvstow top`, /readyz and the alerts read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from kvstow_api.answers import ConditionView, DoctorView, Severity
from kvstow_api.conditions import engine, memory, node, serving, speed, tier
from kvstow_api.conditions.evidence import Evidence, NothingToMeasure
from kvstow_api.poolchoice import NO_POOL

_SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


class Condition(NamedTuple):
    """`of`: what it is looked for in. `find` yields it once for each that it concerns, or raises `NothingToMeasure`.
    `check`: the check of /readyz that fails while it lasts."""

    name: str
    of: Literal["host", "pool", "node", "tier"]
    find: Callable[[Evidence], Iterator[ConditionView]]
    checks: tuple[str, ...] = ()


TABLE = (
    Condition("process", "host", serving.find_process),
    Condition("drain", "host", serving.find_drain, ("engine",)),
    Condition("bypass", "host", serving.find_bypass),
    Condition("session_stuck", "host", engine.find_stuck, ("transfers",)),
    Condition("memory_limit", "host", memory.find_memory_limit),
    Condition("huge_pages", "host", memory.find_huge_pages),
    Condition("certificate", "host", serving.find_certificate),
    Condition("token_files", "host", serving.find_token_files),
    Condition("clocks", "host", speed.find_clocks),
    # -- of each pool
    Condition("engine_failed", "pool", engine.find_failed, ("engine",)),
    Condition("rank_silent", "pool", engine.find_silent_ranks, ("ranks",)),
    Condition("rank_failed", "pool", engine.find_failed_ranks, ("ranks",)),
    Condition("pinning", "pool", memory.find_pinning, ("ranks",)),
    Condition("giving_back", "pool", memory.find_giving_back),
    Condition("no_slots", "pool", engine.find_no_slots, ("pool", "pinned")),
    Condition("growing", "pool", engine.find_growing, ("pinned",)),
    Condition("stores_dropped", "pool", engine.find_dropped_stores),
    Condition("drain", "pool", serving.find_drain),
    Condition("bypass", "pool", serving.find_bypass),
    Condition("pinning_paused", "pool", serving.find_pause),
    Condition("share", "pool", memory.find_share),
    Condition("numa", "pool", memory.find_numa),
    Condition("memlock", "pool", memory.find_memlock),
    Condition("links", "pool", speed.find_links),
    Condition("thrashing", "pool", speed.find_thrashing),
    # -- of a server that engines attach to
    Condition("node_memory", "node", node.find_memory, ("memory",)),
    Condition("populating", "node", node.find_populating, ("pinned",)),
    Condition("memory_wait", "node", node.find_waits),
    Condition("memory_kept", "node", node.find_kept),
    Condition("keeper", "node", node.find_keeper),
    Condition("orphaned_memory", "node", node.find_orphaned_memory),
    Condition("session_lost", "node", node.find_lost),
    Condition("session_attaching", "node", node.find_attaching),
    Condition("rejected", "node", node.find_rejected),
    Condition("sharing", "node", node.find_sharing),
    Condition("trust_eof", "node", node.find_trust_eof),
    # -- while a store is attached
    Condition("tier_client", "tier", tier.find_failed_clients, ("tier",)),
    Condition("tier_down", "tier", tier.find_down, ("tier",)),
    Condition("tier_off", "tier", tier.find_off),
    Condition("tier_time", "tier", tier.find_lost_time),
    Condition("tier_objects", "tier", tier.find_corrupt_objects),
    Condition("tier_access", "tier", tier.find_access),
    Condition("tier_memlock", "tier", tier.find_memlock),
)


def find_conditions(host: Evidence, pools: Sequence[Evidence]) -> DoctorView:
    """Everything that there is, the worst first."""
    found: list[ConditionView] = []
    checked: dict[str, None] = {}
    skipped: dict[str, str] = {}
    for condition, evidence in _looks(host, pools):
        try:
            found += _concerned(condition, evidence)
            checked[condition.name] = None
        except NothingToMeasure as reason:
            skipped[condition.name] = _before(evidence) + str(reason)
    if not pools:
        skipped |= {one.name: NO_POOL for one in TABLE if one.of == "pool"}
    return DoctorView(
        time=datetime.now(UTC),
        healthy=all(one.severity == "info" for one in found),
        conditions=sorted(found, key=lambda one: _SEVERITIES.index(one.severity)),
        checked=list(checked),
        skipped={name: reason for name, reason in skipped.items() if name not in checked},
    )


def failures_of(host: Evidence, pools: Sequence[Evidence]) -> dict[str, str]:
    """Why checks of /readyz fail, by their names."""
    failures: dict[str, list[str]] = {}
    for condition, evidence in _looks(host, pools):
        if condition.checks:
            found = [one.what for one in _concerned(condition, evidence)]
            for check in condition.checks:
                # Pools of a node grow and shrink while it serves; its memory is populated once.
                if check != "pinned" or evidence.node is None or not evidence.pool:
                    failures.setdefault(check, []).extend(found)
    return {check: "; ".join(words) for check, words in failures.items() if words}


def _looks(host: Evidence, pools: Sequence[Evidence]) -> Iterator[tuple[Condition, Evidence]]:
    there = {"host": True, "node": host.node is not None, "tier": host.tier is not None, "pool": False}
    for condition in TABLE:
        if there[condition.of]:
            yield condition, host
    for pool in pools:
        yield from ((condition, pool) for condition in TABLE if condition.of == "pool")


def _concerned(condition: Condition, evidence: Evidence) -> Iterator[ConditionView]:
    for one in condition.find(evidence):
        pool = evidence.pool or one.pool
        yield replace(one, name=condition.name, pool=pool or None, what=_before(evidence) + one.what)


def _before(evidence: Evidence) -> str:
    return f"pool {evidence.pool}: " if evidence.node is not None and evidence.pool else ""
