"""Checks of a node: its memory, and the engines that attach to it."""

from __future__ import annotations

from collections.abc import Iterator

from kvstow.bytesize import format_size
from kvstow_api.doctor.evidence import Evidence, NodeEvidence, NothingToMeasure, make_finding
from kvstow_api.numberformat import counted, duration
from kvstow_api.poolchoice import NO_POOL
from kvstow_api.views.doctor import FindingView


def check_node_memory(evidence: Evidence) -> Iterator[FindingView]:
    """Memory that the node could not get, and memory that pools wait for."""
    memory = _node(evidence).memory
    if memory.failure:
        yield make_finding(
            "node_memory",
            "error",
            f"the node has {format_size(memory.populated_bytes)} of {format_size(memory.target_bytes)} of its memory: "
            f"{memory.failure}",
            "the pools get less memory than --memory promises",
            "raise the memory limit of the container, or lower --memory and restart the service",
            populated_bytes=memory.populated_bytes,
            target_bytes=memory.target_bytes,
        )
    for notice in memory.notices:
        yield make_finding(
            "node_memory",
            "info",
            notice,
            "memory moves from one pool to another only when nobody can reach it any more",
            "nothing, for some seconds; then check the engine that it waits for: `kvstow get sessions`",
            recalled_bytes=memory.recalled_bytes,
        )


def check_keeper(evidence: Evidence) -> Iterator[FindingView]:
    """A service whose keeper is gone."""
    memory = _node(evidence).memory
    if memory.keeper is None:
        raise NothingToMeasure("the service has no keeper (--state)")
    if memory.keeper == "gone":
        yield make_finding(
            "keeper",
            "warning",
            "the keeper is gone, and no other one can be started",
            "if the service crashes, the cache is lost",
            "the log (kvstow.keeper) says why; the service tries again every second",
            keeper_restarts=memory.keeper_restarts,
        )


def check_orphaned_memory(evidence: Evidence) -> Iterator[FindingView]:
    """Memory that an earlier service has left behind."""
    for orphan in _node(evidence).orphans:
        yield make_finding(
            "orphaned_memory",
            "warning",
            orphan.words,
            "this memory is taken twice: the service has populated its own",
            "end the process, or wait until it lets go of the memory",
            num_bytes=orphan.num_bytes,
        )


def check_sessions(evidence: Evidence) -> Iterator[FindingView]:
    """Engines that are stuck, or that have gone and left processes behind."""
    sessions = _node(evidence).sessions
    if not sessions:
        raise NothingToMeasure("no engine is attached")
    for session in sessions:
        name = f"session {session.id} ({session.engine}, pool {session.pool})"
        if session.state == "stuck":
            yield make_finding(
                "sessions",
                "error",
                f"{name} is stuck: its oldest transfer is {duration(session.oldest_seconds)} old",
                "the engine is served without the cache, and the slots of its transfers are kept from all others",
                f"check the engine's processes and GPUs; `kvstow detach {session.id} --kill` ends it",
                session.id,
                oldest_seconds=session.oldest_seconds,
                in_flight=session.in_flight,
            )
        if session.state == "lost":
            held = session.leased_slots + session.quarantined_slots
            yield make_finding(
                "sessions",
                "warning",
                f"{name} is lost, and {counted(session.processes, 'worker')} of it may still copy",
                f"{counted(held, 'slot')} stay reserved until these workers have ended",
                f"if they do not end by themselves, `kvstow detach {session.id} --kill` ends them",
                session.id,
                processes=session.processes,
                held_slots=held,
            )


def check_rejected(evidence: Evidence) -> Iterator[FindingView]:
    """Engines that could not attach, since the service started."""
    rejected = {reason: count for reason, count in _node(evidence).rejected.items() if count}
    if rejected:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in rejected.items())
        yield make_finding(
            "rejected",
            "info",
            f"connections of engines were refused or ended since the service started: {reasons}",
            "these engines serve without the cache until they can attach",
            "if the numbers grow, the log (kvstow.attach) says who was refused, and why",
            **{f"rejected_{reason}": count for reason, count in rejected.items()},
        )


def check_sharing(evidence: Evidence) -> Iterator[FindingView]:
    """Namespaces whose engines share no blocks with others."""
    namespaces = _node(evidence).namespaces
    if not namespaces:
        raise NothingToMeasure(NO_POOL)
    for namespace in namespaces:
        if namespace.sharing_off:
            reasons = "; ".join(namespace.sharing_off)
            yield make_finding(
                "sharing",
                "info",
                f"namespace {namespace.name} of pool {namespace.pool} is not shared: {reasons}",
                "engines of the same model compute and store the same blocks again",
                "set what the reason names, and restart the engine; `kvstow get namespaces` shows the result",
                sessions=namespace.sessions,
                blocks=namespace.blocks,
            )


def check_trust_eof(evidence: Evidence) -> Iterator[FindingView]:
    """Whether memory may be reused by time instead of by the end of a process."""
    seconds = _node(evidence).trust_eof
    if seconds is not None:
        yield make_finding(
            "trust_eof",
            "warning",
            f"a process whose end cannot be seen counts as ended {duration(seconds)} after its socket (--trust-eof)",
            "one that lives longer than that may write into slots that others use by then",
            "use a kernel from 6.5 on, or let the service see the engines' pids; then drop --trust-eof",
            trust_eof_seconds=seconds,
        )


def _node(evidence: Evidence) -> NodeEvidence:
    assert evidence.node is not None, "these checks are of nodes only"
    return evidence.node
