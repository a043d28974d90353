"""Conditions of a node: its memory, and the engines that attach to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvstow.bytesize import format_size
from kvstow_api.answers import ConditionView
from kvstow_api.conditions.engine import session_name
from kvstow_api.conditions.evidence import Evidence, NodeEvidence, NothingToMeasure, make_condition
from kvstow_api.numberformat import counted, duration
from kvstow_api.poolchoice import NO_POOL
from kvstow_api.sampler import REJECTED_SECONDS

_NAMED_RANKS = 3
_USUAL_SECONDS = 10.0
"""How long memory may take to change hands, before that is a matter for people."""


def find_memory(evidence: Evidence) -> Iterator[ConditionView]:
    """Memory that the node could not get."""
    memory = _node(evidence).memory
    if memory.failure:
        yield make_condition(
            "error",
            f"the node has {format_size(memory.populated_bytes)} of {format_size(memory.target_bytes)} of its memory: "
            f"{memory.failure}",
            "the pools get less memory than --memory promises",
            "raise the memory limit of the container, or lower --memory and restart the service",
            populated_bytes=memory.populated_bytes,
            target_bytes=memory.target_bytes,
        )


def find_populating(evidence: Evidence) -> Iterator[ConditionView]:
    """Memory that is still being populated, as after each start."""
    memory = _node(evidence).memory
    if memory.populated_bytes < memory.target_bytes and not memory.failure:
        yield make_condition(
            "info",
            f"{format_size(memory.populated_bytes)} of {format_size(memory.target_bytes)} of memory are populated",
            "pools grow with it",
            "`kvstow wait --for=pinned`",
            populated_bytes=memory.populated_bytes,
            target_bytes=memory.target_bytes,
        )


def find_waits(evidence: Evidence) -> Iterator[ConditionView]:
    """Pools that wait for memory that engines hold."""
    sessions = {session.id: session for session in evidence.sessions}
    for wait in _node(evidence).memory.waits:
        holder = sessions.get(wait.session)
        name = f"session {wait.session}" + (f" ({holder.engine}, pool {holder.pool})" if holder else " (which is gone)")
        yield replace(
            make_condition(
                "warning" if wait.seconds > _USUAL_SECONDS else "info",
                f"pool {wait.pool} waits for {format_size(wait.num_bytes)} that {name} holds",
                "memory moves from one pool to another only when nobody can reach it any more",
                f"nothing, for some seconds; if it lasts, `kvstow detach {wait.session} --kill` ends what holds it",
                num_bytes=wait.num_bytes,
            ),
            pool=wait.pool,
            session=wait.session,
        )
    for notice in _node(evidence).memory.notices:
        yield make_condition(
            "info",
            notice,
            "until then a pool has less memory than it should",
            "nothing, for some seconds; then `kvstow get operations` and `kvstow get transfers` show what is under way",
            recalled_bytes=_node(evidence).memory.recalled_bytes,
        )


def find_kept(evidence: Evidence) -> Iterator[ConditionView]:
    """Memory that engines have given back and have all the same."""
    by_id = {session.id: session for session in evidence.sessions}
    for kept in _node(evidence).memory.kept:
        there = [by_id[session] for session in kept.sessions if session in by_id]
        names = " or ".join(session_name(evidence, session) for session in there) or "an engine that is gone"
        first = there[0] if there else None
        yield make_condition(
            "warning" if kept.seconds > _USUAL_SECONDS else "info",
            f"some process still has {format_size(kept.num_bytes)} that {names} has given back",
            "this memory counts in --memory, and no pool gets it, until the kernel says that nobody has it",
            f"`kvstow detach {first.id} --kill` ends what had it"
            if first
            else "`kvstow doctor` on the machine, as root, shows processes that have memory of no service; end them",
            first,
            num_bytes=kept.num_bytes,
        )


def find_keeper(evidence: Evidence) -> Iterator[ConditionView]:
    """A service whose keeper is gone."""
    memory = _node(evidence).memory
    if memory.keeper is None:
        raise NothingToMeasure("the service has no keeper (--state)")
    if memory.keeper == "gone":
        yield make_condition(
            "warning",
            "the keeper is gone, and no other one can be started",
            "if the service crashes, the cache is lost",
            "`journalctl` or `kubectl logs` of the service says why (kvstow.keeper); it tries again every second",
            keeper_restarts=memory.keeper_restarts,
        )


def find_orphaned_memory(evidence: Evidence) -> Iterator[ConditionView]:
    """Memory that an earlier service has left behind."""
    for orphan in _node(evidence).orphans:
        yield make_condition(
            "warning",
            orphan.words,
            "this memory is taken twice: the service has populated its own",
            "end the process, or wait until it lets go of the memory",
            num_bytes=orphan.num_bytes,
        )


def find_lost(evidence: Evidence) -> Iterator[ConditionView]:
    """Engines that have gone and left processes behind."""
    for session in evidence.sessions:
        if session.state == "lost":
            held = session.leased_slots + session.quarantined_slots
            yield make_condition(
                "warning",
                f"{session_name(evidence, session)} is lost, and {counted(session.processes, 'worker')} of it may "
                "still copy",
                f"{counted(held, 'slot')} stay reserved until these workers have ended",
                f"if they do not end by themselves, `kvstow detach {session.id} --kill` ends them",
                session,
                processes=session.processes,
                held_slots=held,
            )


def find_attaching(evidence: Evidence) -> Iterator[ConditionView]:
    """Engines that have not registered a slot on every rank. Ranks that never report are told as silent."""
    for session in evidence.sessions:
        late = [rank.rank for rank in session.ranks if not rank.pinned_slots and rank.pid is not None]
        if session.state == "attaching" and (late or session.id in evidence.starting):
            ranks = f"rank {', '.join(map(str, late))}" if 0 < len(late) <= _NAMED_RANKS else f"{len(late)} ranks"
            yield make_condition(
                "info" if session.id in evidence.starting else "warning",
                f"{session_name(evidence, session)} is not attached yet: "
                + (f"no slot is registered on {ranks}" if late else "not all ranks have reported"),
                "until then the engine is served without the cache",
                f"`kvstow get ranks --session {session.id}` shows how far each is; the engine's log says what stops it",
                session,
                late_ranks=len(late),
            )


def find_rejected(evidence: Evidence) -> Iterator[ConditionView]:
    """Engines that could not attach lately."""
    rejected = {reason: count for reason, count in _node(evidence).rejected.items() if count}
    if rejected:
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in rejected.items())
        yield make_condition(
            "warning",
            f"connections of engines were refused or ended within {duration(REJECTED_SECONDS)}: {reasons}",
            "these engines serve without the cache until they can attach",
            "the log (kvstow.attach) says who was refused, and why; the runbook of KvstowSessionRejected, what to do",
            **{f"rejected_{reason}": count for reason, count in rejected.items()},
        )


def find_sharing(evidence: Evidence) -> Iterator[ConditionView]:
    """Namespaces whose engines share no blocks with others."""
    namespaces = _node(evidence).namespaces
    if not namespaces:
        raise NothingToMeasure(NO_POOL)
    for namespace in namespaces:
        if namespace.sharing_off:
            reasons = "; ".join(namespace.sharing_off)
            yield make_condition(
                "info",
                f"namespace {namespace.name} of pool {namespace.pool} is not shared: {reasons}",
                "engines of the same model compute and store the same blocks again",
                "set what the reason names, and restart the engine; `kvstow get namespaces` shows the result",
                sessions=namespace.sessions,
                blocks=namespace.blocks,
            )


def find_trust_eof(evidence: Evidence) -> Iterator[ConditionView]:
    """Whether memory may be reused by time instead of by the end of a process."""
    seconds = _node(evidence).trust_eof
    if seconds is not None:
        yield make_condition(
            "warning",
            f"a process whose end cannot be seen counts as ended {duration(seconds)} after its socket (--trust-eof)",
            "one that lives longer than that may write into slots that others use by then",
            "use a kernel from 6.5 on, or let the service see the engines' pids; then drop --trust-eof",
            trust_eof_seconds=seconds,
        )


def _node(evidence: Evidence) -> NodeEvidence:
    assert evidence.node is not None, "these conditions are of nodes only"
    return evidence.node
