"""Conditions of pools: their memory, their engines and ranks, and their speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from kvstow.bytesize import format_size
from kvstow.messages import SLOW_KERNEL
from kvstow.stats import EngineStats
from kvstow.status import RankStatus, SessionStatus
from kvstow_api.conditions.evidence import Evidence, Found, NothingToMeasure, condition, make_condition
from kvstow_api.directory import HostMemory
from kvstow_api.figures import ends_of_now
from kvstow_api.texts import counted, duration

SHARE_RATIO = 0.5
"""A pool with less than this part of the memory that is due to it is short of memory."""
GIVEN_BACK_BYTES = 64 << 20  # less memory than this is not reported
PIN_FIXES = {
    "memlock": "raise RLIMIT_MEMLOCK of the process, or set lock to false in kv_connector_extra_config",
    "cgroup_limit": "raise the memory limit of the container or shrink the pool, then `kvstow pinning retry`",
    "out_of_memory": "free memory on the machine or shrink the pool, then `kvstow pinning retry`",
    "hugepages": "reserve more 2 MiB pages on the node (sysctl vm.nr_hugepages) and for the pod (hugepages-2Mi), or "
    "shrink the pool; then `kvstow pinning retry`",
    "driver": "look up the driver's error in the rank's log, then `kvstow pinning retry`; what a broken "
    "driver has lost comes back with the next start of the whole engine",
}


NODE_MEMORY_FIX = (
    "free memory on the machine, or raise the limit that this names: it is tried again every 10 s. A start with a "
    "smaller --memory is the last resort, because without --state it empties the cache"
)


@condition("pinning", "pool", "ranks")
def find_pinning(evidence: Evidence) -> Found:
    for rank in evidence.readiness.ranks:
        if rank.error_reason in PIN_FIXES:
            yield make_condition(
                "error",
                f"{evidence.name_of(rank)} stopped pinning at {format_size(rank.pinned_bytes)} of "
                f"{format_size(rank.target_bytes)}: {rank.error or rank.error_reason}",
                "the pool has only as many usable slots as the rank with the fewest",
                PIN_FIXES[rank.error_reason],
                rank,
                pinned_bytes=rank.pinned_bytes,
                target_bytes=rank.target_bytes,
            )


@condition("giving_back", "pool")
def find_giving_back(evidence: Evidence) -> Found:
    """Find ranks that have more memory than their smaller pool needs. A node has none, because its memory moves from
    pool to pool."""
    for rank in evidence.readiness.ranks:
        left = rank.resident_bytes - rank.target_bytes
        if not evidence.is_node and left > GIVEN_BACK_BYTES:
            yield make_condition(
                "info",
                f"{evidence.name_of(rank)} has yet to give back {format_size(left)} of memory",
                "memory of a pool that has become smaller is unregistered chunk by chunk, slowly beside busy steps",
                "nothing; `kvstow get ranks -o wide` shows what is resident",
                rank,
                left_bytes=left,
            )


@condition("memory_limit", "host")
def find_memory_limit(evidence: Evidence) -> Found:
    host = evidence.measured.memory
    if host is None or host.headroom_bytes is None:
        raise NothingToMeasure("the memory limit cannot be read")
    failed = evidence.is_node and evidence.memory.failure
    if failed or any(rank.error_reason in PIN_FIXES for rank in evidence.readiness.ranks):
        return  # refused memory has a condition of its own
    needed = evidence.bytes_to_come
    numbers = {"needed_bytes": needed, "headroom_bytes": host.headroom_bytes, "reserve_bytes": host.reserve_bytes}
    if needed and needed + host.reserve_bytes > host.headroom_bytes:
        yield make_condition(
            "error",
            f"{format_size(needed)} are still to be {'populated' if evidence.is_node else 'pinned'}, but {host.limit}",
            "if all ranks are on this host, pinning will stop before the pool has its full size"
            if not evidence.is_node
            else "populating will stop before the node has all of its memory",
            _more_memory(evidence, host),
            **numbers,
        )
    elif host.headroom_bytes < host.reserve_bytes:
        yield make_condition(
            "warning",
            f"{host.limit}, less than the reserve of {format_size(host.reserve_bytes)}",
            "the kernel cannot reclaim pinned memory, so the next allocation may get the process killed",
            _more_memory(evidence, host),
            **numbers,
        )


def _more_memory(evidence: Evidence, host: HostMemory) -> str:
    """Return what helps if the host has too little memory. Nobody can shrink the pools of a node, which share its
    memory."""
    if evidence.is_node:
        return NODE_MEMORY_FIX
    if host.huge_pages == "reserved":
        return PIN_FIXES["hugepages"]
    return "raise the memory limit of the container (pool plus overhead), or shrink the pool"


@condition("huge_pages", "host")
def find_huge_pages(evidence: Evidence) -> Found:
    if evidence.is_node:
        raise NothingToMeasure("memory of a node gets huge pages whatever the machine's setting is")
    if evidence.measured.memory is None or not evidence.measured.memory.huge_pages:
        raise NothingToMeasure("the kernel's setting for transparent huge pages cannot be read")
    if evidence.measured.memory.huge_pages == "never":
        yield make_condition(
            "warning",
            "transparent huge pages are disabled on this machine",
            "with small pages, registering memory with a GPU takes 1.6 to 1.9 times as long",
            "on the node, echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, for the next start of the engine",
            pinned_bytes=sum(rank.pinned_bytes for rank in evidence.readiness.ranks),
        )


@condition("share", "pool")
def find_share(evidence: Evidence) -> Found:
    granted, due = evidence.granted_bytes, evidence.due_bytes
    if granted < SHARE_RATIO * due:
        yield make_condition(
            "warning",
            f"it has {format_size(granted)} of memory, and should have {format_size(due)}",
            "another pool should give memory back and has not yet: an engine uses it, or does not release it",
            "the conditions memory_wait and memory_kept name the engine that it waits for, if there is one",
            granted_bytes=granted,
            due_bytes=due,
        )


@condition("numa", "pool")
def find_numa(evidence: Evidence) -> Found:
    for rank in evidence.reporting:
        if rank.notice and "NUMA" in rank.notice:
            yield make_condition(
                "warning",
                f"{evidence.name_of(rank)}: {rank.notice}",
                "copies between sockets are slower, and share one link",
                "allow mbind (seccomp profile or CAP_SYS_NICE), or start the rank with numactl on the device's node",
                rank,
                pinned_bytes=rank.pinned_bytes,
            )


@condition("memlock", "pool")
def find_memlock(evidence: Evidence) -> Found:
    """Find pools that should be locked and are not. RLIMIT_MEMLOCK does not apply to memory that CUDA registers."""
    for rank in evidence.reporting:
        if rank.pin_mode == "populate" and rank.notice and "RLIMIT_MEMLOCK" in rank.notice:
            yield make_condition(
                "warning",
                f"{evidence.name_of(rank)} has locked {format_size(rank.locked_bytes)} of "
                f"{format_size(rank.pinned_bytes)}",
                "on a machine with swap, memory that is not locked may be swapped out",
                "raise LimitMEMLOCK of the container runtime (CAP_IPC_LOCK helps only root), or disable swap",
                rank,
                locked_bytes=rank.locked_bytes,
                pinned_bytes=rank.pinned_bytes,
            )


_WITHOUT_HITS = "its engine's requests are served without the cache"
_DROPS: Mapping[str, tuple[str, str]] = {
    "dropped_cpu_full": ("every slot is in use", ""),
    "dropped_not_ready": ("not every rank can copy", "see `kvstow get ranks`"),
    "failed": (
        "copies have failed, or their engine has ended",
        "the log (kvstow.engine) says which: an engine that has ended or was detached needs nothing; if copies fail, "
        "look up the error of the first rank",
    ),
}
"""Why stores were dropped although no operator asked for that, and the remedy, by outcome."""
_BUSY: Mapping[str, tuple[str, str]] = {
    "quarantined": (
        "in quarantine",
        "`kvstow get sessions` shows whose processes may still write them, until these end",
    ),
    "leased": ("leased by requests that wait for their loads", "`kvstow get transfers` shows the loads"),
    "filling": ("being filled", "`kvstow get transfers` shows the stores: the link is too slow for them"),
}
"""The states of slots that cannot be evicted, in words, and what ends them."""


@condition("engine_failed", "pool", "engine")
def find_failed(evidence: Evidence) -> Found:
    state, reason = evidence.readiness.state, evidence.readiness.reason
    if evidence.integrity_error:
        yield make_condition(
            "error",
            f"its records are inconsistent: {evidence.integrity_error}",
            "this is a defect of KVStow, and what is cached cannot be trusted",
            "run `kvstow bypass --load --store`, save the log, and restart the process: its cache must not be used",
        )
        return
    has_other_reason = any(session.state == "stuck" for session in evidence.sessions) or any(
        _is_bad(rank) or _silence(evidence, rank) for rank in evidence.readiness.ranks
    )
    if not evidence.is_node and (state == "stopped" or (state == "degraded" and not has_other_reason)):
        yield make_condition(
            "error",
            f"the engine is {state}: {reason}",
            "requests are served without the cache",
            "the log has the reason; if it does not recover, restart the process when its requests have ended",
        )


@condition("rank_silent", "pool", "ranks")
def find_silent_ranks(evidence: Evidence) -> Found:
    """Find ranks that do not report. They need not report during the start-up grace."""
    for rank in evidence.readiness.ranks:
        silence = _silence(evidence, rank)
        if silence:
            who = f" (pid {rank.pid} on {rank.host})" if rank.pid is not None else ""
            yield make_condition(
                "error",
                f"{evidence.name_of(rank)}{who} {silence}",
                f"it and its transfers may be stopped or hang; {_WITHOUT_HITS} until it reports again",
                _silence_fix(evidence, rank),
                rank,
                silent_seconds=rank.last_report_age_seconds or 0.0,
            )


def _silence_fix(evidence: Evidence, rank: RankStatus) -> str:
    if rank.pid is None:
        return "look for the rank's process, and at its log"
    if any(one.pid == rank.pid and one.process == "stopped" for one in evidence.sessions if one.id == rank.session):
        return f"`kill -CONT {rank.pid}` on {rank.host} lets its process go on, which is stopped"
    return f"look at the process: `ps -o stat,wchan -p {rank.pid}` on {rank.host} (T is stopped), and its log"


def _silence(evidence: Evidence, rank: RankStatus) -> str:
    age = rank.last_report_age_seconds
    if age is None:
        return "" if rank.session in evidence.starting else "has never reported"
    return f"has been silent for {duration(age)}" if age > evidence.report_timeout else ""


@condition("rank_failed", "pool", "ranks")
def find_failed_ranks(evidence: Evidence) -> Found:
    for rank in evidence.readiness.ranks:
        if _is_bad(rank) and rank.error_reason not in PIN_FIXES and not _silence(evidence, rank):
            reason = ": ".join(part for part in (rank.error_reason, rank.error) if part)
            yield make_condition(
                "error",
                f"{evidence.name_of(rank)} is {rank.state}" + (f" ({reason})" if reason else ""),
                _WITHOUT_HITS,
                "see the rank's log (kvstow.agent, kvstow.dataplane); it works again after the engine's next start",
                rank,
                pinned_bytes=rank.pinned_bytes,
            )


def _is_bad(rank: RankStatus) -> bool:
    return rank.state in ("degraded", "failed", "stopped")


def rank_failure(rank: RankStatus, report_timeout: float) -> bool:
    age = rank.last_report_age_seconds
    return age is None or age > report_timeout or _is_bad(rank)


@condition("session_stuck", "host", "transfers")
def find_stuck(evidence: Evidence) -> Found:
    for session in evidence.sessions:
        if session.state == "stuck":
            end = f"`kvstow detach {session.id} --kill`" if evidence.is_node else "a restart of the pod"
            end = f"if they do not go on, {end} ends the engine and its requests"
            yield make_condition(
                "error",
                f"{session_name(evidence, session)} is stuck: "
                f"its oldest transfer is {duration(session.oldest_seconds)} old",
                "it loads and stores nothing, and the slots of its transfers are kept from all others",
                f"`kvstow get transfers` names what they wait for: check the logs and GPUs of these ranks, or the "
                f"process that plans transfers; {end}",
                session,
                oldest_seconds=session.oldest_seconds,
                in_flight=session.in_flight,
            )


@condition("session_stopped", "node")
def find_stopped(evidence: Evidence) -> Found:
    live = [session for session in evidence.sessions if session.state != "lost"]
    if live and all(session.process == "unknown" for session in live):
        raise NothingToMeasure("the service does not see the processes of its engines (another pid namespace)")
    for session in live:
        if session.process == "stopped":
            yield make_condition(
                "error",
                f"the process of {session_name(evidence, session)} is stopped (pid {session.pid} on {session.host})",
                "its engine answers no request and uses no cache until the process goes on",
                f"`kill -CONT {session.pid}` on {session.host} lets it go on; a debugger stops it in the same way",
                session,
                oldest_seconds=session.oldest_seconds,
            )


def session_name(evidence: Evidence, session: SessionStatus) -> str:
    if not evidence.is_node:
        return "the engine"
    return f"session {session.id} ({session.engine}, pool {session.pool})"


@condition("no_slots", "pool", "pool", "pinned")
def find_no_slots(evidence: Evidence) -> Found:
    live = [session for session in evidence.sessions if session.state != "lost"]
    if live and not evidence.readiness.usable_slots:
        yield make_condition(
            "info" if any(session.id in evidence.starting for session in live) else "warning",
            "no slot is usable yet",
            "nothing can be stored or found",
            "`kvstow get ranks` shows how far each rank is",
            capacity_slots=evidence.readiness.capacity_slots,
        )


@condition("growing", "pool", "pinned")
def find_growing(evidence: Evidence) -> Found:
    """Find pools that do not have all of their slots yet. The engines of a node register these one after another."""
    readiness = evidence.readiness
    usable, whole = readiness.usable_slots, readiness.capacity_slots
    if evidence.is_node:
        if evidence.bytes_to_come and evidence.slot_bytes:
            whole = max(whole, evidence.due_bytes // evidence.slot_bytes)
        attached = [one.registered_slots for one in evidence.sessions if one.state in ("attached", "stuck")]
        usable = min([usable, *attached])
    if not usable or usable >= whole:
        return
    lacking = _since(evidence, lambda stats: stats.evicted_for_capacity + stats.stores.get("dropped_cpu_full", 0))
    paused = evidence.desired is not None and evidence.desired.paused
    yield make_condition(
        "warning" if lacking else "info",
        f"the pool is still growing: {usable:,} of {whole:,} slots"
        + (f", and {counted(lacking, 'block')} were evicted or dropped meanwhile" if lacking else ""),
        "what was stored early makes room for what comes later, so early requests find less of it again",
        f"`kvstow pinning resume{evidence.of_pool}`"
        if paused
        else "`kvstow wait --for=pinned` before sending requests that should be found again",
        usable_slots=usable,
        capacity_slots=whole,
        evicted_blocks=lacking,
    )


@condition("stores_dropped", "pool")
def find_dropped_stores(evidence: Evidence) -> Found:
    """Find blocks that were offered in the last seconds and not stored, by reason. Stores that an operator has switched
    off do not count."""
    offered = _since(
        evidence, lambda stats: sum(count for name, count in stats.stores.items() if name != "skipped_bypass")
    )
    has_other_condition = any(session.state in ("stuck", "lost") for session in evidence.sessions)
    for outcome, (words, fix) in _DROPS.items():
        dropped = _since(evidence, lambda stats, outcome=outcome: stats.stores.get(outcome, 0))  # type: ignore[misc]
        if dropped and not (outcome == "failed" and has_other_condition):
            slots = evidence.recent[-1].stats.pool.slots
            busy = Counter({state: getattr(slots, state) for state in _BUSY} if outcome == "dropped_cpu_full" else {})
            states = [(state, count) for state, count in busy.most_common() if count]
            yield make_condition(
                "warning",
                f"{dropped:,} of {offered:,} blocks were not stored in the last seconds: {words}"
                + (f" ({', '.join(f'{count:,} {_BUSY[state][0]}' for state, count in states)})" if states else ""),
                "requests compute them again when they need them",
                fix
                or (_BUSY[states[0][0]][1] if states else "")
                or f"enlarge the pool: `kvstow describe pool{' ' + evidence.pool if evidence.of_pool else ''}`",
                dropped_blocks=dropped,
                offered_blocks=offered,
            )


def _since(evidence: Evidence, counter: Callable[[EngineStats], int]) -> int:
    if len(evidence.recent) < 2:
        return 0
    first, last = ends_of_now(evidence.recent)
    return max(0, counter(last.stats) - counter(first.stats))


CLOCK_SECONDS = 1.0
"""By how much the clock of a rank may differ from that of the server, in seconds."""
LINK_BYTES = 1 << 30  # the rate of a rank that has moved fewer bytes says little
LINK_RATIO = 0.5
"""A rank is slow if its rate is below this part of the fastest one."""
THRASHING_REUSE = 0.1
"""A pool is thrashing if it has fewer hits than this per evicted block."""


@condition("clocks", "host")
def find_clocks(evidence: Evidence) -> Found:
    if not evidence.clock_offsets:
        raise NothingToMeasure("no rank on another host has reported")
    for rank, offset in sorted(evidence.clock_offsets.items()):
        if abs(offset) > CLOCK_SECONDS:
            yield make_condition(
                "warning",
                f"the clock of rank {rank} differs from the server's by {offset:+.1f} s",
                "log lines of the two cannot be ordered by time; KVStow itself does not depend on clocks",
                "synchronize the clock of that node (NTP, chrony)",
                rank=rank,
                offset_seconds=round(offset, 3),
            )


@condition("links", "pool")
def find_links(evidence: Evidence) -> Found:
    rates = {direction: _rates(evidence.reporting, direction) for direction in ("load", "store")}
    compared = {direction: of_ranks for direction, of_ranks in rates.items() if len(of_ranks) > 1}
    if not compared:
        raise NothingToMeasure(f"fewer than 2 ranks have moved {format_size(LINK_BYTES)} in one direction")
    for direction, of_ranks in compared.items():
        fastest = max(rate for _, rate in of_ranks)
        for rank, rate in of_ranks:
            if rate < LINK_RATIO * fastest:
                yield make_condition(
                    "warning",
                    f"{evidence.name_of(rank)} {direction}s at {format_size(int(rate))}/s, "
                    f"the fastest rank at {format_size(int(fastest))}/s",
                    "a transfer ends when its slowest rank has finished, so this rank slows all of them down",
                    "compare PCIe width and generation (nvidia-smi -q), NUMA binding, and other users of the link",
                    rank,
                    bytes_per_second=rate,
                    fastest_bytes_per_second=fastest,
                )


def _rates(ranks: Iterable[RankStatus], direction: str) -> list[tuple[RankStatus, float]]:
    """Return bytes per busy second for the ranks that have moved at least `LINK_BYTES`. The engines of a node have
    ranks of the same numbers."""
    moved = (
        (rank, getattr(rank, f"{direction}_bytes_total"), getattr(rank, f"{direction}_busy_seconds")) for rank in ranks
    )
    return [(rank, total / busy) for rank, total, busy in moved if total >= LINK_BYTES and busy > 0]


@condition("slow_kernel", "pool")
def find_slow_kernels(evidence: Evidence) -> Found:
    rates = [
        (rank, kernel, engine)
        for rank in evidence.reporting
        if (kernel := rank.layer_kernel_bytes_per_second) is not None
        and (engine := rank.layer_engine_bytes_per_second) is not None
    ]
    if not rates:
        raise NothingToMeasure("no rank has two ways for loads by layer")
    for rank, kernel, engine in rates:
        if kernel < SLOW_KERNEL * engine:
            yield make_condition(
                "info",
                f"on {evidence.name_of(rank)} a kernel reads host memory at {format_size(int(kernel))}/s, "
                f"the copy engine at {format_size(int(engine))}/s",
                "loads by layer come by the copy engine here, in groups of layers: the first layers come later",
                "nothing has to be done. If other machines of this kind are faster, compare IOMMU settings, NUMA "
                "binding and huge pages",
                rank,
                kernel_bytes_per_second=kernel,
                engine_bytes_per_second=engine,
            )


@condition("thrashing", "pool")
def find_thrashing(evidence: Evidence) -> Found:
    samples = evidence.kept
    if len(samples) < 2:
        raise NothingToMeasure("the server has not sampled its counters for long enough")
    first, last = samples[0], samples[-1]
    evicted = last.stats.evicted_for_capacity - first.stats.evicted_for_capacity
    hits = last.stats.lookups.hit_blocks - first.stats.lookups.hit_blocks
    slots = last.stats.pool.usable_slots
    if slots and evicted >= slots and hits < THRASHING_REUSE * evicted:
        seconds = last.time - first.time
        yield make_condition(
            "warning",
            f"in {seconds:.0f} s {evicted} blocks were evicted from {slots} slots, for {hits} hits",
            "blocks are evicted before their prefix is requested again, so stores cost bandwidth and save little",
            f"enlarge the pool as far as that helps (`kvstow get curve{evidence.of_pool}`), route requests with a "
            "common prefix to the same engine, or bypass stores",
            evicted_blocks=evicted,
            hit_blocks=hits,
            usable_slots=slots,
            window_seconds=seconds,
        )


@condition("pool_size", "pool")
def find_size(evidence: Evidence) -> Found:
    curve = evidence.curve
    if curve is None or not curve.items:
        raise NothingToMeasure(curve.advice if curve is not None else "there is no curve")
    better = curve.next_useful or curve.enough
    if better is None or evidence.bytes_to_come:  # a growing pool will soon have another size
        return
    if not evidence.is_node:
        fix = (
            f"`kvstow resize {format_size(better.num_slots * curve.slot_bytes).replace(' ', '')}`, up to the maximum "
            "of this host (`kvstow get pools -o wide`); `kvstow get curve` shows all sizes"
        )
    else:
        fix = (
            f"start `kvstow serve` with another `--memory` the next time; other pools get a share of it, too. "
            f"`kvstow get curve{evidence.of_pool}` shows all sizes"
        )
    yield make_condition(
        "info",
        curve.advice,
        "memory that adds hits saves prefill, and memory that adds none could serve something else",
        fix,
        capacity_bytes=curve.num_bytes,
        better_bytes=better.num_bytes,
        ratio=next(size.ratio for size in curve.items if size.times == 1),
        better_ratio=better.ratio,
        requests=curve.requests,
        blocks=curve.blocks,
    )
