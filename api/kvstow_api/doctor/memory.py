"""Memory: whether it can be pinned, and where it lies."""

from __future__ import annotations

from collections.abc import Iterator

from kvstow.bytesize import format_size
from kvstow_api.doctor.evidence import Evidence, NothingToMeasure, make_finding
from kvstow_api.views.doctor import FindingView

_PIN_FIXES = {
    "memlock": "raise RLIMIT_MEMLOCK of the process, or switch locking off (--no-lock)",
    "cgroup_limit": "raise the memory limit of the container, or make the pool smaller; then retry pinning",
    "out_of_memory": "free memory on the machine, or make the pool smaller; then retry pinning",
    "hugepages": "reserve more 2 MiB pages on the node (sysctl vm.nr_hugepages) and for the pod (hugepages-2Mi), or "
    "make the pool smaller; then retry pinning",
    "driver": "see the rank's log for the driver's error; then retry pinning, or restart the rank",
}


def check_pinning(evidence: Evidence) -> Iterator[FindingView]:
    """Ranks that could not pin all of the pool."""
    for rank in evidence.readiness.ranks:
        if rank.error_reason in _PIN_FIXES:
            yield make_finding(
                "pinning",
                "error",
                f"rank {rank.rank} stopped pinning at {format_size(rank.pinned_bytes)} of "
                f"{format_size(rank.target_bytes)}: {rank.error or rank.error_reason}",
                "the pool has only as many slots as the rank with the fewest",
                _PIN_FIXES[rank.error_reason],
                rank=rank.rank,
                pinned_bytes=rank.pinned_bytes,
                target_bytes=rank.target_bytes,
            )


def check_memory(evidence: Evidence) -> Iterator[FindingView]:
    """What is still to be pinned against what the memory limit leaves."""
    host = evidence.host
    if host is None or host.headroom_bytes is None:
        raise NothingToMeasure("no memory limit can be read")
    needed = sum(max(0, rank.target_bytes - rank.pinned_bytes) for rank in evidence.readiness.ranks)
    numbers = {"needed_bytes": needed, "headroom_bytes": host.headroom_bytes, "reserve_bytes": host.reserve_bytes}
    if needed and needed + host.reserve_bytes > host.headroom_bytes:
        yield make_finding(
            "memory",
            "error",
            f"{format_size(needed)} are still to be pinned by all ranks, but {host.limit}",
            "pinning will stop short of the pool's size, if all ranks are on this host",
            _PIN_FIXES["hugepages"]
            if host.huge_pages == "reserved"
            else "raise the memory limit of the container (pool and overhead), or make the pool smaller",
            **numbers,
        )
    elif host.headroom_bytes < host.reserve_bytes:
        yield make_finding(
            "memory",
            "warning",
            f"{host.limit}: less than the reserve of {format_size(host.reserve_bytes)}",
            "pinned memory cannot be taken back, so the next allocation may get the process killed",
            "raise the memory limit of the container, or make the pool smaller",
            **numbers,
        )


def check_huge_pages(evidence: Evidence) -> Iterator[FindingView]:
    """Whether the kernel gives huge pages to who asks for them; pools in reserved ones ask for none."""
    if evidence.host is None or not evidence.host.huge_pages:
        raise NothingToMeasure("the kernel's setting cannot be read")
    if evidence.host.huge_pages == "never":
        yield make_finding(
            "huge_pages",
            "warning",
            "transparent huge pages are switched off on this machine",
            "registering memory with a GPU takes 10 times as long with small pages",
            "on the node: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled; then restart the ranks",
            pinned_bytes=sum(rank.pinned_bytes for rank in evidence.readiness.ranks),
        )


def check_numa(evidence: Evidence) -> Iterator[FindingView]:
    """Pools that could not be bound to the NUMA node of their device."""
    for rank in evidence.reporting:
        if rank.notice and "NUMA" in rank.notice:
            yield make_finding(
                "numa",
                "warning",
                f"rank {rank.rank}: {rank.notice}",
                "copies that cross the sockets share their link, and are slower",
                "allow mbind (seccomp profile, or CAP_SYS_NICE), or start the rank with numactl on the device's node",
                rank=rank.rank,
                pinned_bytes=rank.pinned_bytes,
            )


def check_memlock(evidence: Evidence) -> Iterator[FindingView]:
    """Pools that should be locked, and are not. CUDA registers memory without asking RLIMIT_MEMLOCK."""
    for rank in evidence.reporting:
        if rank.pin_mode == "populate" and rank.notice and "RLIMIT_MEMLOCK" in rank.notice:
            yield make_finding(
                "memlock",
                "warning",
                f"rank {rank.rank}: {format_size(rank.locked_bytes)} of {format_size(rank.pinned_bytes)} are locked",
                "the machine may swap what is only populated; without swap it makes no difference",
                "raise LimitMEMLOCK of the container runtime (CAP_IPC_LOCK helps root only), or run without swap",
                rank=rank.rank,
                locked_bytes=rank.locked_bytes,
                pinned_bytes=rank.pinned_bytes,
            )
