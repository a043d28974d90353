"""Conditions of the fleet tier, where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvstow.bytesize import format_size
from kvstow.tier.tierstatus import TierStatus
from kvstow_api.answers import ConditionView, Severity
from kvstow_api.conditions.evidence import Evidence, TierEvidence, make_condition
from kvstow_api.numberformat import counted, duration


def find_failed_clients(evidence: Evidence) -> Iterator[ConditionView]:
    """Clients of the store that do not try again."""
    told = set[str]()
    for one in _tier(evidence).view.items:
        for client in one.clients:
            if client.health.state == "failed" and client.purpose not in told:  # the pools of a node share clients
                told.add(client.purpose)
                yield _of(
                    one,
                    "error",
                    f"{client.purpose} ({_name(one)}) have failed: {client.health.reason}",
                    "they do not try again by themselves, so nothing is put or fetched by them",
                    "remove the cause, then restart the service",
                    restarts=client.stats.restarts,
                )


def find_down(evidence: Evidence) -> Iterator[ConditionView]:
    """A store that gives no answers."""
    given = _tier(evidence)
    for one in given.view.items:
        if one.state == "down":
            yield _of(
                one,
                "warning",
                f"the store {given.view.url} is left alone by {_name(one)}: {one.reason}",
                "requests compute what other nodes have; nothing else is affected",
                "check that the store runs and that this node reaches it: `kvstow get tier`; it is tried every 5 s",
                opened=one.counters.breaker_opened,
                timeouts=sum(client.stats.timeouts for client in one.clients),
                restarts=sum(client.stats.restarts for client in one.clients),
            )


def find_off(evidence: Evidence) -> Iterator[ConditionView]:
    """Namespaces that do not use the store."""
    for one in _tier(evidence).view.items:
        if one.state == "off":
            yield _of(
                one,
                "warning",
                f"{_name(one)} does not use the store: {one.reason}",
                "its requests compute what other nodes have, and other nodes what it has",
                "remove the cause; an engine that has reset its prefix cache uses the store again when it restarts",
            )


def find_lost_time(evidence: Evidence) -> Iterator[ConditionView]:
    """Requests that wait longer for the store than computing takes."""
    for one in _tier(evidence).view.items:
        if loses_time(one):
            waited, saved = one.counters.wait_seconds, one.counters.saved_seconds
            yield _of(
                one,
                "warning",
                f"since the start, requests of {_name(one)} have waited {duration(waited)} for the store, and saved "
                f"{duration(saved)}",
                "without the store they would have been served sooner",
                "compare the rate of fetches with what the network should give (`kvstow get tier`); until it is "
                "fixed, start the service without --tier",
                wait_seconds=waited,
                saved_seconds=saved,
                cut_waits=one.counters.cut_waits,
                fetch_bytes_per_second=one.fetch_bytes_per_second or 0.0,
            )


def find_corrupt_objects(evidence: Evidence) -> Iterator[ConditionView]:
    """Objects that are not what was put."""
    told = set[str]()
    for one in _tier(evidence).view.items:
        corrupt = sum(client.stats.corrupt_objects for client in one.clients if client.purpose not in told)
        told |= {client.purpose for client in one.clients if client.stats.corrupt_objects}
        if corrupt:
            yield _of(
                one,
                "error",
                f"{counted(corrupt, 'object')} that {_name(one)} has fetched were not what was put",
                "they were not loaded, and were removed; but the store or the network changes bytes",
                "check memory, disks and network cards of the store's machines; to be sure, empty the store",
                corrupt_objects=corrupt,
                fetched_blocks=one.counters.fetched_blocks,
            )


def find_access(evidence: Evidence) -> Iterator[ConditionView]:
    """A store that strangers may reach."""
    given = _tier(evidence)
    addresses, is_guarded = given.measured.public_addresses, given.measured.has_access_control
    if addresses and not is_guarded:
        yield make_condition(
            "warning",
            f"the store {given.view.url} has the public address {', '.join(addresses)}, and has no access control",
            "anyone who can reach it can read and delete the blocks of all nodes",
            "bind it to an address of a private network, and let only the nodes reach its ports (in Kubernetes with a "
            "NetworkPolicy); a Redis can ask for a password",
            public_addresses=len(addresses),
        )


def find_memlock(evidence: Evidence) -> Iterator[ConditionView]:
    """A limit of locked memory that is too small for RDMA."""
    given = _tier(evidence)
    limit = given.measured.memlock_bytes
    if given.measured.pins_memory and limit is not None and limit < given.pool_bytes:
        yield make_condition(
            "warning",
            f"RDMA has to lock {format_size(given.pool_bytes)} of the pools, and RLIMIT_MEMLOCK is "
            f"{format_size(limit)}",
            "the network card cannot register the memory, so nothing is put or fetched",
            "LimitMEMLOCK=infinity for the service, in Kubernetes a setting of the container runtime; then restart it",
            memlock_bytes=limit,
            pool_bytes=given.pool_bytes,
        )


def loses_time(tier: TierStatus) -> bool:
    """Whether requests have waited longer than it would have taken to compute what they waited for, so far. Not known
    before the prefill speed is."""
    counters = tier.counters
    return tier.prefill_tokens_per_second is not None and counters.wait_seconds > max(1.0, counters.saved_seconds)


def _of(one: TierStatus, severity: Severity, what: str, why: str, fix: str, **found: float) -> ConditionView:
    return replace(make_condition(severity, what, why, fix, **found), pool=one.pool)


def _name(one: TierStatus) -> str:
    return one.namespace if one.namespace == one.pool else f"{one.namespace} of pool {one.pool}"


def _tier(evidence: Evidence) -> TierEvidence:
    assert evidence.tier is not None  # else nothing is looked for
    return evidence.tier
