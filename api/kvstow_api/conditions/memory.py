"""Conditions of memory: whether it can be pinned, and where it is."""

from __future__ import annotations

from collections.abc import Iterator

from kvstow.bytesize import format_size
from kvstow_api.answers import ConditionView
from kvstow_api.conditions.evidence import Evidence, NothingToMeasure, make_condition, rank_name

SHARE_RATIO = 0.5
GIVEN_BACK_BYTES = 64 << 20  # less is no matter
PIN_FIXES = {
    "memlock": "raise RLIMIT_MEMLOCK of the process, or set lock to false in kv_connector_extra_config",
    "cgroup_limit": "raise the memory limit of the container or shrink the pool, then `kvstow pinning retry`",
    "out_of_memory": "free memory on the machine or shrink the pool, then `kvstow pinning retry`",
    "hugepages": "reserve more 2 MiB pages on the node (sysctl vm.nr_hugepages) and for the pod (hugepages-2Mi), or "
    "shrink the pool; then `kvstow pinning retry`",
    "driver": "look up the driver's error in the rank's log, then `kvstow pinning retry`, or restart the rank",
}


def find_pinning(evidence: Evidence) -> Iterator[ConditionView]:
    """Ranks that could not pin the whole pool."""
    for rank in evidence.readiness.ranks:
        if rank.error_reason in PIN_FIXES:
            yield make_condition(
                "error",
                f"{rank_name(evidence, rank)} stopped pinning at {format_size(rank.pinned_bytes)} of "
                f"{format_size(rank.target_bytes)}: {rank.error or rank.error_reason}",
                "the pool has only as many usable slots as the rank with the fewest",
                PIN_FIXES[rank.error_reason],
                rank,
                pinned_bytes=rank.pinned_bytes,
                target_bytes=rank.target_bytes,
            )


def find_giving_back(evidence: Evidence) -> Iterator[ConditionView]:
    """Ranks that have more memory than their smaller pool needs. On a node, memory goes from pool to pool."""
    for rank in evidence.readiness.ranks:
        left = rank.resident_bytes - rank.target_bytes
        if evidence.node is None and left > GIVEN_BACK_BYTES:
            yield make_condition(
                "info",
                f"{rank_name(evidence, rank)} has yet to give back {format_size(left)} of memory",
                "memory of a pool that has become smaller is unregistered chunk by chunk, slowly beside busy steps",
                "nothing; `kvstow get ranks -o wide` shows what is resident",
                rank,
                left_bytes=left,
            )


def find_memory_limit(evidence: Evidence) -> Iterator[ConditionView]:
    """Memory still to be pinned, compared with what the memory limit leaves."""
    host = evidence.host
    if host is None or host.headroom_bytes is None:
        raise NothingToMeasure("the memory limit cannot be read")
    failed = evidence.node is not None and evidence.node.memory.failure
    if failed or any(rank.error_reason in PIN_FIXES for rank in evidence.readiness.ranks):
        return  # what has been refused is told already, with the reason
    needed = evidence.bytes_to_come
    numbers = {"needed_bytes": needed, "headroom_bytes": host.headroom_bytes, "reserve_bytes": host.reserve_bytes}
    if needed and needed + host.reserve_bytes > host.headroom_bytes:
        yield make_condition(
            "error",
            f"{format_size(needed)} are still to be pinned, but {host.limit}",
            "if all ranks are on this host, pinning will stop before the pool has its full size"
            if evidence.node is None
            else "populating will stop before the node has all of its memory",
            PIN_FIXES["hugepages"]
            if host.huge_pages == "reserved"
            else "raise the memory limit of the container (pool plus overhead), or shrink the pool",
            **numbers,
        )
    elif host.headroom_bytes < host.reserve_bytes:
        yield make_condition(
            "warning",
            f"{host.limit}, less than the reserve of {format_size(host.reserve_bytes)}",
            "the kernel cannot reclaim pinned memory, so the next allocation may get the process killed",
            "raise the memory limit of the container, or shrink the pool",
            **numbers,
        )


def find_huge_pages(evidence: Evidence) -> Iterator[ConditionView]:
    """Transparent huge pages switched off; pools in reserved huge pages do not need them."""
    if evidence.node is not None:
        raise NothingToMeasure("memory of a node gets huge pages whatever the machine's setting is")
    if evidence.host is None or not evidence.host.huge_pages:
        raise NothingToMeasure("the kernel's setting for transparent huge pages cannot be read")
    if evidence.host.huge_pages == "never":
        yield make_condition(
            "warning",
            "transparent huge pages are disabled on this machine",
            "with small pages, registering memory with a GPU takes 10 times as long",
            "on the node, echo madvise > /sys/kernel/mm/transparent_hugepage/enabled; then restart the ranks",
            pinned_bytes=sum(rank.pinned_bytes for rank in evidence.readiness.ranks),
        )


def find_share(evidence: Evidence) -> Iterator[ConditionView]:
    """Pools with less than half of the memory that they should have."""
    granted, due = evidence.granted_bytes, evidence.due_bytes
    if granted < SHARE_RATIO * due:
        yield make_condition(
            "warning",
            f"{format_size(granted)} of memory, and it should have {format_size(due)}",
            "another pool should give memory back and has not yet: an engine uses it, or does not let go of it",
            "`kvstow doctor` names the engine that it waits for, if there is one: end or detach it",
            granted_bytes=granted,
            due_bytes=due,
        )


def find_numa(evidence: Evidence) -> Iterator[ConditionView]:
    """Pools that are not bound to the NUMA node of their device."""
    for rank in evidence.reporting:
        if rank.notice and "NUMA" in rank.notice:
            yield make_condition(
                "warning",
                f"{rank_name(evidence, rank)}: {rank.notice}",
                "copies between sockets are slower, and share one link",
                "allow mbind (seccomp profile or CAP_SYS_NICE), or start the rank with numactl on the device's node",
                rank,
                pinned_bytes=rank.pinned_bytes,
            )


def find_memlock(evidence: Evidence) -> Iterator[ConditionView]:
    """Pools that should be locked and are not. RLIMIT_MEMLOCK does not apply to memory that CUDA registers."""
    for rank in evidence.reporting:
        if rank.pin_mode == "populate" and rank.notice and "RLIMIT_MEMLOCK" in rank.notice:
            yield make_condition(
                "warning",
                f"{rank_name(evidence, rank)} has locked {format_size(rank.locked_bytes)} of "
                f"{format_size(rank.pinned_bytes)}",
                "on a machine with swap, memory that is not locked may be swapped out",
                "raise LimitMEMLOCK of the container runtime (CAP_IPC_LOCK helps only root), or disable swap",
                rank,
                locked_bytes=rank.locked_bytes,
                pinned_bytes=rank.pinned_bytes,
            )
