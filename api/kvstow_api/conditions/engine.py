"""Conditions of engines, their ranks and the slots that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from kvstow.stats import EngineStats
from kvstow.status import RankStatus, SessionStatus
from kvstow_api.answers import ConditionView
from kvstow_api.conditions.evidence import Evidence, make_condition, rank_name
from kvstow_api.conditions.memory import PIN_FIXES
from kvstow_api.figures import ends_of_now
from kvstow_api.numberformat import counted, duration

_WITHOUT_HITS = "its engine's requests are served without the cache"
_DROPS: Mapping[str, tuple[str, str]] = {
    "dropped_cpu_full": ("every slot is in use", ""),
    "dropped_not_ready": ("not every rank can copy", "see `kvstow get ranks`"),
    "failed": ("copies fail", "the log of the engine says why; look up the error of the first rank that failed"),
}
"""Outcomes of stores that nobody has asked for: in words, and what mends it."""
_BUSY: Mapping[str, tuple[str, str]] = {
    "protected": ("protected by an operator", "`kvstow unprotect` lets them be evicted"),
    "quarantined": ("in quarantine", "`kvstow get sessions` shows whose processes may still write them; detach those"),
    "leased": ("leased by requests that wait for their loads", "`kvstow get transfers` shows the loads"),
    "filling": ("being filled", "`kvstow get transfers` shows the stores: the link is too slow for them"),
}
"""States in which a slot cannot be evicted, in words, and what ends them."""


def find_failed(evidence: Evidence) -> Iterator[ConditionView]:
    """An engine, or its records, that only a restart repairs."""
    state, reason = evidence.readiness.state, evidence.readiness.reason
    if evidence.integrity_error:
        yield make_condition(
            "error",
            f"its records are inconsistent: {evidence.integrity_error}",
            "this is a defect of KVStow, and what is cached cannot be trusted",
            "run `kvstow bypass --load --store`, save the log, and restart the process",
        )
    elif evidence.node is None and (state == "stopped" or (state == "degraded" and not _has_other_reason(evidence))):
        yield make_condition(
            "error",
            f"the engine is {state}: {reason}",
            "requests are served without the cache",
            "the log has the time and the reason; restart the process",
        )


def _has_other_reason(evidence: Evidence) -> bool:
    is_stuck = any(session.state == "stuck" for session in evidence.sessions)
    return is_stuck or any(_is_bad(rank) or _silence(evidence, rank) for rank in evidence.readiness.ranks)


def find_silent_ranks(evidence: Evidence) -> Iterator[ConditionView]:
    """Ranks that do not report. During the start-up grace they need not have."""
    for rank in evidence.readiness.ranks:
        silence = _silence(evidence, rank)
        if silence:
            who = f" (pid {rank.pid} on {rank.host})" if rank.pid is not None else ""
            yield make_condition(
                "error",
                f"{rank_name(evidence, rank)}{who} {silence}",
                f"it may be stopped or hang, and its transfers with it; until then {_WITHOUT_HITS}",
                f"look at the process: `ps -o stat,wchan -p {rank.pid}` on {rank.host} (T is stopped), and its log"
                if rank.pid is not None
                else "look for the rank's process, and at its log",
                rank,
                silent_seconds=rank.last_report_age_seconds or 0.0,
            )


def _silence(evidence: Evidence, rank: RankStatus) -> str:
    age = rank.last_report_age_seconds
    if age is None:
        return "" if rank.session in evidence.starting else "has never reported"
    return f"has been silent for {duration(age)}" if age > evidence.report_timeout else ""


def find_failed_ranks(evidence: Evidence) -> Iterator[ConditionView]:
    """Ranks that cannot copy, or say that they are not well."""
    for rank in evidence.readiness.ranks:
        if _is_bad(rank) and rank.error_reason not in PIN_FIXES and not _silence(evidence, rank):
            reason = ": ".join(part for part in (rank.error_reason, rank.error) if part)
            yield make_condition(
                "error",
                f"{rank_name(evidence, rank)} is {rank.state}" + (f" ({reason})" if reason else ""),
                _WITHOUT_HITS,
                "see the rank's log (kvstow.agent, kvstow.dataplane); if it has failed, restart its process",
                rank,
                pinned_bytes=rank.pinned_bytes,
            )


def _is_bad(rank: RankStatus) -> bool:
    return rank.state in ("degraded", "failed", "stopped")


def rank_failure(rank: RankStatus, report_timeout: float) -> bool:
    """Whether the rank does not report, or cannot pin or copy."""
    age = rank.last_report_age_seconds
    return age is None or age > report_timeout or _is_bad(rank)


def find_stuck(evidence: Evidence) -> Iterator[ConditionView]:
    """Engines whose oldest transfer is too old."""
    for session in evidence.sessions:
        if session.state == "stuck":
            end = f"`kvstow detach {session.id} --kill` ends it" if evidence.node else "a restart of the pod ends it"
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


def session_name(evidence: Evidence, session: SessionStatus) -> str:
    if evidence.node is None:
        return "the engine"
    return f"session {session.id} ({session.engine}, pool {session.pool})"


def find_no_slots(evidence: Evidence) -> Iterator[ConditionView]:
    """Pools that engines use, and that have no slot yet."""
    live = [session for session in evidence.sessions if session.state != "lost"]
    if live and not evidence.readiness.usable_slots:
        yield make_condition(
            "info" if any(session.id in evidence.starting for session in live) else "warning",
            "no slot is usable yet",
            "nothing can be stored or found",
            "`kvstow get ranks` shows how far each rank is",
            capacity_slots=evidence.readiness.capacity_slots,
        )


def find_growing(evidence: Evidence) -> Iterator[ConditionView]:
    """Pools that do not have all of their slots yet. Engines of a node register what the pool has one after another."""
    readiness = evidence.readiness
    usable, whole = readiness.usable_slots, readiness.capacity_slots
    if evidence.node is not None:
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


def find_dropped_stores(evidence: Evidence) -> Iterator[ConditionView]:
    """Blocks that were offered in the last seconds and not stored, by reason. Not what an operator has switched off."""
    offered = _since(
        evidence, lambda stats: sum(count for name, count in stats.stores.items() if name != "skipped_bypass")
    )
    is_told = any(session.state in ("stuck", "lost") for session in evidence.sessions)
    for outcome, (words, fix) in _DROPS.items():
        dropped = _since(evidence, partial(_outcome, outcome))
        if dropped and not (outcome == "failed" and is_told):  # with the engine that stores them
            states = _busy_states(evidence.recent[-1].stats) if outcome == "dropped_cpu_full" else []
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


def _outcome(name: str, stats: EngineStats) -> int:
    return stats.stores.get(name, 0)


def _busy_states(stats: EngineStats) -> list[tuple[str, int]]:
    """The states in which slots cannot be evicted, the commonest first."""
    counts = [(state, getattr(stats.pool.slots, state)) for state in _BUSY]
    return sorted((one for one in counts if one[1]), key=lambda one: -one[1])


def _since(evidence: Evidence, counter: Callable[[EngineStats], int]) -> int:
    """How much a counter has grown within the last seconds."""
    if len(evidence.recent) < 2:
        return 0
    first, last = ends_of_now(evidence.recent)
    return max(0, counter(last.stats) - counter(first.stats))
