"""The doctor: measured facts in, findings in words out. Nothing is asked and nothing changed here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from kvstow.bytesize import format_size
from kvstow.control.gate import BypassStatus, DrainStatus
from kvstow.messages import DesiredState
from kvstow.stats import RankStatus, Readiness
from kvstow_api.health import Verdict
from kvstow_api.hostfacts import HostFacts
from kvstow_api.views.doctor import DoctorView, FindingView, Severity
from kvstow_api.views.history import SampleView

CLOCK_SECONDS = 1.0
LINK_BYTES = 1 << 30  # moved by a rank before its rate says something
LINK_RATIO = 0.5
THRASHING_WINDOW = timedelta(minutes=10)
THRASHING_REUSE = 0.1

_SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
_PIN_FIXES = {
    "memlock": "raise RLIMIT_MEMLOCK of the process, or switch locking off (--no-lock)",
    "cgroup_limit": "raise the memory limit of the container, or make the pool smaller; then retry pinning",
    "out_of_memory": "free memory on the machine, or make the pool smaller; then retry pinning",
    "driver": "see the rank's log for the driver's error; then retry pinning, or restart the rank",
}


_READINESS_FIXES = {
    "engine": "the log says when it began and why; restart the process",
    "ranks": "see the rank's log (kvstow.agent); one that has failed comes back only with a restart of its process",
    "transfers": "`kvstow get transfers` names the ranks they wait for: see their logs and GPUs; "
    "a rank that does not go on needs a restart",
    "pool": "`kvstow get ranks` shows how far each rank is",
    "pinned": "`kvstow get ranks` shows how far each rank is",
    "loop": "give the process more CPU, or find what keeps it busy",
    "keeper": "`kvstow bypass --load --store`, keep the log, then restart the process",
}
"""By the name of a check of /readyz."""
_SEE_LOG = "see the log of the process"


class Evidence(NamedTuple):
    """All that the checks look at. `verdict` is that of /readyz; `host` is None where the host measures nothing."""

    verdict: Verdict
    readiness: Readiness
    desired: DesiredState
    drain: DrainStatus
    bypass: BypassStatus
    samples: Sequence[SampleView]
    clock_offsets: Mapping[int, float]
    host: HostFacts | None


class NothingToMeasure(Exception):
    """Raised by a check that has no facts; says which it lacks."""


Check = Callable[[Evidence], Iterator[FindingView]]


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


def check_readiness(evidence: Evidence) -> Iterator[FindingView]:
    """What fails /readyz, but for a drain: that is a switch."""
    readiness = evidence.readiness
    for one in evidence.verdict.findings:
        if one.fails_probe and not (one.name == "engine" and evidence.drain.active):
            yield _finding(
                "readiness",
                "error",
                f"/readyz fails: {one.name}: {one.failure}",
                "traffic is kept away from here, or served without the cache",
                _READINESS_FIXES.get(one.name, _SEE_LOG),
                usable_slots=readiness.usable_slots,
                capacity_slots=readiness.capacity_slots,
            )


def check_pinning(evidence: Evidence) -> Iterator[FindingView]:
    """Ranks that could not pin all of the pool."""
    for rank in evidence.readiness.ranks:
        if rank.error_reason in _PIN_FIXES:
            yield _finding(
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
        yield _finding(
            "memory",
            "error",
            f"{format_size(needed)} are still to be pinned by all ranks, but {host.limit}",
            "pinning will stop short of the pool's size, if all ranks are on this host",
            "raise the memory limit of the container (pool and overhead), or make the pool smaller",
            **numbers,
        )
    elif host.headroom_bytes < host.reserve_bytes:
        yield _finding(
            "memory",
            "warning",
            f"{host.limit}: less than the reserve of {format_size(host.reserve_bytes)}",
            "pinned memory cannot be taken back, so the next allocation may get the process killed",
            "raise the memory limit of the container, or make the pool smaller",
            **numbers,
        )


def check_huge_pages(evidence: Evidence) -> Iterator[FindingView]:
    """Whether the kernel gives huge pages to who asks for them."""
    if evidence.host is None or not evidence.host.huge_pages:
        raise NothingToMeasure("the kernel's setting cannot be read")
    if evidence.host.huge_pages == "never":
        yield _finding(
            "huge_pages",
            "warning",
            "transparent huge pages are switched off on this machine",
            "registering memory with a GPU takes 10 times as long with small pages",
            "on the node: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled; then restart the ranks",
            pinned_bytes=sum(rank.pinned_bytes for rank in evidence.readiness.ranks),
        )


def check_numa(evidence: Evidence) -> Iterator[FindingView]:
    """Pools that could not be bound to the NUMA node of their device."""
    for rank in _reporting(evidence):
        if rank.notice and "NUMA" in rank.notice:
            yield _finding(
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
    for rank in _reporting(evidence):
        if rank.pin_mode == "populate" and rank.notice and "RLIMIT_MEMLOCK" in rank.notice:
            yield _finding(
                "memlock",
                "warning",
                f"rank {rank.rank}: {format_size(rank.locked_bytes)} of {format_size(rank.pinned_bytes)} are locked",
                "the machine may swap what is only populated; without swap it makes no difference",
                "raise LimitMEMLOCK of the container runtime (CAP_IPC_LOCK helps root only), or run without swap",
                rank=rank.rank,
                locked_bytes=rank.locked_bytes,
                pinned_bytes=rank.pinned_bytes,
            )


def check_clocks(evidence: Evidence) -> Iterator[FindingView]:
    """Clocks of ranks that are not the server's."""
    if not evidence.clock_offsets:
        raise NothingToMeasure("no rank has told its time")
    for rank, offset in sorted(evidence.clock_offsets.items()):
        if abs(offset) > CLOCK_SECONDS:
            yield _finding(
                "clocks",
                "warning",
                f"the clock of rank {rank} is {offset:+.1f} s from the server's",
                "lines of the two logs cannot be put in order; KVStow itself does not depend on it",
                "let NTP or chrony keep the time on that node",
                rank=rank,
                offset_seconds=round(offset, 3),
            )


def check_links(evidence: Evidence) -> Iterator[FindingView]:
    """Ranks that move bytes at less than half the rate of the fastest."""
    rates = {direction: _rates(_reporting(evidence), direction) for direction in ("load", "store")}
    compared = {direction: of_ranks for direction, of_ranks in rates.items() if len(of_ranks) > 1}
    if not compared:
        raise NothingToMeasure(f"fewer than 2 ranks have moved {format_size(LINK_BYTES)} in one direction")
    for direction, of_ranks in compared.items():
        fastest = max(of_ranks.values())
        for number, rate in of_ranks.items():
            if rate < LINK_RATIO * fastest:
                yield _finding(
                    "links",
                    "warning",
                    f"rank {number} {direction}s at {format_size(int(rate))}/s, "
                    f"the fastest rank at {format_size(int(fastest))}/s",
                    "every transfer ends with its slowest rank, so this one holds all of them up",
                    "compare PCIe width and generation (nvidia-smi -q), NUMA binding, and what else uses the link",
                    rank=number,
                    bytes_per_second=rate,
                    fastest_bytes_per_second=fastest,
                )


def _rates(ranks: Iterable[RankStatus], direction: str) -> dict[int, float]:
    """Bytes per busy second, of ranks that have moved enough."""
    moved = {
        rank.rank: (rank.load_bytes_total, rank.load_busy_seconds)
        if direction == "load"
        else (rank.store_bytes_total, rank.store_busy_seconds)
        for rank in ranks
    }
    return {rank: num_bytes / busy for rank, (num_bytes, busy) in moved.items() if num_bytes >= LINK_BYTES and busy > 0}


def check_thrashing(evidence: Evidence) -> Iterator[FindingView]:
    """A pool whose whole content is replaced before it is of use."""
    samples = evidence.samples
    if len(samples) < 2:
        raise NothingToMeasure("the server has not watched the counters for long enough")
    last = samples[-1]
    first = next(sample for sample in samples if last.time - sample.time <= THRASHING_WINDOW)
    evicted, hits = last.evicted_blocks - first.evicted_blocks, last.hit_blocks - first.hit_blocks
    if last.usable_slots and evicted >= last.usable_slots and hits < THRASHING_REUSE * evicted:
        seconds = (last.time - first.time).total_seconds()
        yield _finding(
            "thrashing",
            "warning",
            f"in {seconds:.0f} s {evicted} blocks were evicted from {last.usable_slots} slots, for {hits} hits",
            "blocks leave before their prefix comes again: stores cost bandwidth, and hardly anything is saved",
            "make the pool larger, route requests with a common prefix to the same engine, or bypass stores",
            evicted_blocks=evicted,
            hit_blocks=hits,
            usable_slots=last.usable_slots,
            window_seconds=seconds,
        )


def check_switches(evidence: Evidence) -> Iterator[FindingView]:
    """What an operator has switched off."""
    bypass = evidence.bypass
    off = [name for name, is_off in (("loads", bypass.load), ("stores", bypass.store)) if is_off]
    if off:
        left = bypass.ttl_seconds_left
        yield _finding(
            "switches",
            "info" if left is not None else "warning",
            f"{' and '.join(off)} are bypassed" + ("" if left is None else f" for {left:.0f} s more"),
            "the cache saves nothing in that direction",
            "`kvstow bypass --off`, when the reason is gone",
            bypassed_directions=len(off),
        )
    if evidence.drain.active:
        yield _finding(
            "switches",
            "warning",
            f"the engine is being drained (mode {evidence.drain.mode})",
            "the cache takes nothing new, and /readyz fails",
            "`kvstow undrain`, if the process is to go on",
            pending_transfers=evidence.drain.pending_transfers,
        )
    if evidence.desired.paused:
        readiness = evidence.readiness
        yield _finding(
            "switches",
            "warning" if readiness.usable_slots < readiness.capacity_slots else "info",
            "pinning is paused",
            f"the pool stays at {readiness.usable_slots} of {readiness.capacity_slots} slots",
            "`kvstow pinning resume`, when the reason is gone",
            usable_slots=readiness.usable_slots,
            capacity_slots=readiness.capacity_slots,
        )


CHECKS: Mapping[str, Check] = {
    "readiness": check_readiness,
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


def _finding(check: str, severity: Severity, what: str, why: str, fix: str, **evidence: float) -> FindingView:
    return FindingView(check=check, severity=severity, what=what, why=why, fix=fix, evidence=evidence)


def _reporting(evidence: Evidence) -> list[RankStatus]:
    ranks = [rank for rank in evidence.readiness.ranks if rank.boot_id is not None]
    if not ranks:
        raise NothingToMeasure("no rank has reported")
    return ranks
