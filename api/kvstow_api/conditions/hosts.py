"""Conditions of hosts: reasons for traffic to stay away, a node's memory, the engines that attach to it, and the store
below the pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstow.bytesize import format_size
from kvstow.status import KeeperState, MemoryFailure, SessionStatus
from kvstow.tier.blockstore import StorePart
from kvstow.tier.tierstatus import TierStatus
from kvstow_api.conditions.disks import FAULTS_OF_DISKS
from kvstow_api.conditions.evidence import Evidence, Found, NothingToMeasure, condition, make_condition
from kvstow_api.conditions.pools import NODE_MEMORY_FIX, session_name
from kvstow_api.directory import NO_POOL
from kvstow_api.sampler import REJECTED_SECONDS
from kvstow_api.texts import bypass_words, bypassed, counted, duration, populate_words

_PROCESS_FIXES = {
    "loop": "give the process more CPU, or find out what stops it or keeps it busy",
    "node": "nothing: `kvstow wait --for=ready` waits for the start, which takes 2 s for each million blocks",
    "ticker": "save the log. What is cached is served, but a transfer that hangs is not noticed until the process "
    "starts again: drain it first, and restart it when it can lose its cache",
}
"""What to do about a failing check of the host's process, by the name of the check."""
_SEE_LOG = "the log of the process says what has happened"
CERTIFICATE_DAYS = 7
"""A certificate that expires in fewer days than this is reported."""
_DAY_SECONDS = 86_400


@condition("process", "host")
def find_process(evidence: Evidence) -> Found:
    for name, failure in evidence.failures.items():
        yield make_condition(
            "error",
            f"the check {name} fails: {failure}",
            "load balancers send no traffic here, or requests are served without the cache",
            _PROCESS_FIXES.get(name, _SEE_LOG),
        )


@condition("certificate", "host")
def find_certificate(evidence: Evidence) -> Found:
    left = evidence.certificate_seconds_left
    if left is None:
        raise NothingToMeasure("the admin server does not use TLS")
    days = left / _DAY_SECONDS
    end = f"expires in {days:.1f} days" if left > 0 else f"expired {-days:.1f} days ago"
    since = "from then on, " if left > 0 else ""
    why = since + "clients that verify it cannot connect: Prometheus, operators, ranks on other nodes"
    if evidence.certificate_is_outdated:
        yield make_condition(
            "warning" if left > 0 else "error",
            f"the new TLS files cannot be used, so the admin server keeps its old certificate, which {end}",
            why,
            "the log (kvstow.tls) says which file is wrong, and why; usually the key is that of another certificate. "
            "Correct the files while the server runs, because it would not start with them",
            seconds_left=round(left),
        )
    elif days < CERTIFICATE_DAYS:
        yield make_condition(
            "warning" if left > 0 else "error",
            f"the certificate of the admin server {end}",
            why,
            "renew the files: the server uses them within a second, and needs no restart",
            seconds_left=round(left),
        )


@condition("token_files", "host")
def find_token_files(evidence: Evidence) -> Found:
    if evidence.exposed_files is None:
        raise NothingToMeasure("no token file is set")
    for setting, exposure in evidence.exposed_files.items():
        yield make_condition(
            "warning",
            f"{setting}: {exposure}",
            "anyone who can read a token has its rights, and anyone who can write the file can add tokens",
            "run `chmod 600` on the file (in Kubernetes, set defaultMode 0440 for the volume, with an fsGroup)",
            exposed_files=len(evidence.exposed_files),
        )


@condition("token_unusable", "host")
def find_unusable_tokens(evidence: Evidence) -> Found:
    if evidence.exposed_files is None:
        raise NothingToMeasure("no token file is set")
    for setting, problem in evidence.unusable_files.items():
        yield make_condition(
            "error",
            f"{setting} cannot be used: the file {problem}",
            "no token of it is accepted, so whoever has no other credential is refused",
            "put the tokens back, one a line: the file is read again within ten seconds. The server's Unix socket "
            "needs no token meanwhile",
            unusable_files=len(evidence.unusable_files),
        )


@condition("drain", "pool")
@condition("drain", "host", "engine")
def find_drain(evidence: Evidence) -> Found:
    drain = evidence.drain
    if drain.active:
        yield make_condition(
            "warning",
            f"the {'engine' if not evidence.is_node else 'pool' if evidence.pool else 'node'} drains "
            f"(mode {drain.mode}): "
            + ("nothing is in flight" if drain.drained else f"{counted(drain.pending_transfers, 'transfer')} left"),
            "the cache accepts nothing new" + ("" if evidence.pool else ", and /readyz fails"),
            f"`kvstow undrain{evidence.of_pool}` lets it serve again, unless its process is about to stop",
            pending_transfers=drain.pending_transfers,
        )


@condition("bypass", "pool")
@condition("bypass", "host")
def find_bypass(evidence: Evidence) -> Found:
    bypass = evidence.bypass
    if off := bypassed(bypass):
        yield make_condition(
            "info" if bypass.ttl_seconds_left is not None else "warning",
            bypass_words(bypass),
            "the cache has no effect in that direction",
            f"`kvstow bypass --off{evidence.of_pool}`, when the bypass is no longer needed",
            bypassed_directions=len(off),
        )


@condition("pinning_paused", "pool")
def find_pause(evidence: Evidence) -> Found:
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


# -- a server that engines attach to ----------------------------------------------------------------------------------


_NAMED_RANKS = 3
_NAMED_PROCESSES = 5
_USUAL_SECONDS = 10.0
"""How long memory may take to move between pools before people should look, in seconds."""


_MEMORY_FIXES: Mapping[MemoryFailure | None, str] = {
    "refused": NODE_MEMORY_FIX,
    "engine": "`kvstow get sessions -o wide` shows the engines of this pool; it is tried again by itself",
}
_DEFECT_FIX = "save the log (kvstow.node), and report it: what is populated goes on serving"


@condition("node_memory", "node", "memory")
def find_memory(evidence: Evidence) -> Found:
    memory = evidence.memory
    if memory.failure:
        yield make_condition(
            "error",
            f"the node has {format_size(memory.populated_bytes)} of {format_size(memory.target_bytes)} of its memory: "
            f"{memory.failure}",
            "the pools get less memory than --memory promises",
            _MEMORY_FIXES.get(memory.failure_kind, _DEFECT_FIX),
            populated_bytes=memory.populated_bytes,
            target_bytes=memory.target_bytes,
        )


@condition("populating", "node", "pinned")
def find_populating(evidence: Evidence) -> Found:
    memory = evidence.memory
    if memory.populated_bytes < memory.target_bytes and not memory.failure:
        yield make_condition(
            "info",
            populate_words(memory),
            "pools grow with it",
            "`kvstow wait --for=pinned`",
            populated_bytes=memory.populated_bytes,
            target_bytes=memory.target_bytes,
        )


@condition("memory_wait", "node")
def find_waits(evidence: Evidence) -> Found:
    sessions = {session.id: session for session in evidence.sessions}
    for wait in evidence.memory.waits:
        holder = sessions.get(wait.session)
        name = f"session {wait.session}" + (f" ({holder.engine}, pool {holder.pool})" if holder else " (which is gone)")
        way = (
            f"`kvstow detach {wait.session}` takes it from the engine, which then serves without the cache until it "
            "attaches again"
            if holder and holder.state != "lost"
            else f"`kvstow detach {wait.session} --kill` ends the processes that are left"
        )
        yield make_condition(
            "warning" if wait.seconds > _USUAL_SECONDS else "info",
            f"pool {wait.pool} waits for {format_size(wait.num_bytes)} that {name} holds",
            "memory moves from one pool to another only when nobody can reach it any more",
            f"nothing, for some seconds; if it lasts, {way}",
            wait,
            num_bytes=wait.num_bytes,
        )
    for notice in evidence.memory.notices:
        yield make_condition(
            "info",
            notice,
            "until then a pool has less memory than it should",
            "nothing, for some seconds; then `kvstow get operations` and `kvstow get transfers` show what is under way",
            recalled_bytes=evidence.memory.recalled_bytes,
        )


@condition("memory_kept", "node")
def find_kept(evidence: Evidence) -> Found:
    by_id = {session.id: session for session in evidence.sessions}
    for kept in evidence.memory.kept:
        there = [by_id[session] for session in kept.sessions if session in by_id]
        names = [session_name(evidence, session) for session in there]
        names += [f"session {session}, which has detached," for session in kept.sessions if session not in by_id]
        who = " or ".join(names) or "an engine that is gone"
        first = there[0].id if there else next(iter(kept.sessions), None)
        yield make_condition(
            "warning" if kept.seconds > _USUAL_SECONDS else "info",
            f"some process still has {format_size(kept.num_bytes)} that {who} has given back",
            "this memory counts in --memory, and no pool gets it, until the kernel says that nobody has it",
            "nothing, for some seconds. If it lasts, restart that engine when its requests have ended; "
            f"`kvstow detach {first} --kill` ends it and its requests at once"
            if first
            else "nothing, while engines start or end; the condition orphaned_memory names processes that have memory "
            "of no service, where they are visible",
            there[0] if there else None,
            num_bytes=kept.num_bytes,
        )


@condition("user_limit", "node")
def find_user_limits(evidence: Evidence) -> Found:
    by_id = {session.id: session for session in evidence.sessions}
    for limit in evidence.user_limits:
        holders = [session_name(evidence, by_id[one]) for one in limit.sessions[:_NAMED_RANKS] if one in by_id]
        first = next(iter(limit.sessions), None)
        yield make_condition(
            "warning",
            f"engines of uid {limit.uid} hold {limit.held:,} {limit.what}, and may hold {limit.most:,}"
            + (f"; among them: {', '.join(holders)}" if holders else ""),
            "they get no more until they end some, which the service cannot do; engines of other users are served",
            f"`kvstow detach {first} --kill` ends the processes that are left of the first"
            if first and first in by_id and by_id[first].state == "lost"
            else f"ask this user to end engines on the node: `ps -u {limit.uid}` shows the processes",
            by_id.get(first or ""),
            held=limit.held,
            most=limit.most,
        )


_KEEPER_FIXES: Mapping[KeeperState, str] = {
    "gone": "with --no-start-keeper, start the keeper's container or unit again (`kvstow keeper --state`); otherwise "
    "the service starts one by itself, and its log (kvstow.keeper) says what stops it. It looks for a keeper every "
    "second. Leave the service running until one is there, because a restart loses the cache",
    "silent": "`ps -o stat,wchan -p {pid}` on the machine shows why: T is stopped, and `kill -CONT {pid}` lets it go "
    "on. Leave the service running until then, because a restart loses the cache",
    "connected": "free memory on the machine. Leave the service running: the index is here, and in use",
}


@condition("keeper", "node")
def find_keeper(evidence: Evidence) -> Found:
    memory = evidence.memory
    if memory.keeper is None:
        raise NothingToMeasure("the service has no keeper (--state)")
    for unsaved in memory.unsaved:
        yield make_condition(
            "warning",
            unsaved,
            "engines are served as before, but if the service ends meanwhile, this part of the cache is lost",
            _KEEPER_FIXES[memory.keeper].format(pid=memory.keeper_pid),
            keeper_restarts=memory.keeper_restarts,
        )


@condition("orphaned_memory", "node")
def find_orphaned_memory(evidence: Evidence) -> Found:
    """Find orphaned memory, in one finding for all processes that have it. The owner is unknown here: the memory may
    belong to engines that still serve, and whose service is about to come back."""
    orphans = evidence.measured.orphans or ()
    if orphans:
        taken = sum(one.num_bytes for one in orphans)
        names = [f"{one.pid} ({one.command})" for one in orphans[:_NAMED_PROCESSES]]
        names += [f"{len(orphans) - len(names)} more"] if len(orphans) > len(names) else []
        yield make_condition(
            "warning",
            f"{counted(len(orphans), 'process', 'processes')} on this machine "
            f"{'has' if len(orphans) == 1 else 'have'} memory that no running service has"
            + (f" ({format_size(taken)})" if taken else "")
            + f": {', '.join(names)}",
            "they may be engines that serve requests while their service restarts; if that service does not come back, "
            "the machine lacks this memory",
            "nothing, while a service restarts: its engines use or release this memory when they attach again. If it "
            f"lasts, `ps -o user,lstart,args -p {','.join(str(one.pid) for one in orphans[:_NAMED_PROCESSES])}` shows "
            "whose processes they are",
            num_bytes=taken,
            processes=len(orphans),
        )


@condition("session_lost", "node")
def find_lost(evidence: Evidence) -> Found:
    for session in evidence.sessions:
        if session.state == "lost":
            held = session.leased_slots + session.quarantined_slots
            yield make_condition(
                "warning",
                f"{session_name(evidence, session)} is lost, and {counted(session.processes, 'worker')} of it may "
                f"still copy{_pids_of(session)}",
                f"{counted(held, 'slot')} and the memory that they have mapped stay reserved until they have ended",
                _lost_fix(evidence, session),
                session,
                processes=session.processes,
                held_slots=held,
            )


def _pids(session: SessionStatus) -> list[int]:
    return [rank.pid for rank in session.ranks if rank.pid is not None]


def _pids_of(session: SessionStatus) -> str:
    pids = _pids(session)
    return f" (its workers were the processes {', '.join(map(str, pids))} on {session.host})" if pids else ""


def _lost_fix(evidence: Evidence, lost: SessionStatus) -> str:
    """Return what to do about a lost session. Its processes may serve: an engine attaches again as a new session."""
    pids = _pids(lost)
    for session in evidence.sessions:
        if session.state != "lost" and set(pids) & set(_pids(session)):
            return f"nothing: these processes have attached again as session {session.id}, and release it by themselves"
    look = f"`ps -o pid,stat,wchan -p {','.join(map(str, pids))}` on {lost.host} shows which are left" if pids else ""
    end = f"`kvstow detach {lost.id} --kill` ends them" + ("" if pids else ", unless their engine has attached again")
    return f"they usually end within seconds. If they do not, {look}{', and ' if look else ''}{end}"


@condition("session_attaching", "node")
def find_attaching(evidence: Evidence) -> Found:
    """Find engines that have not registered a slot on every rank. Ranks that never report are found as silent."""
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


@condition("rejected", "node")
def find_rejected(evidence: Evidence) -> Found:
    rejected = {reason: count for reason, count in evidence.rejected.items() if count}
    if rejected:
        reasons = ", ".join(f"{counted(count, 'time')} for the reason {reason}" for reason, count in rejected.items())
        yield make_condition(
            "warning",
            f"connections to the attach socket were refused or ended within {duration(REJECTED_SECONDS)}: {reasons}",
            "an engine whose connection this was serves without the cache until it can attach",
            "the log (kvstow.attach) names each process and the reason, and the runbook of KvstowSessionRejected says "
            "what to do about each reason",
            **{f"rejected_{reason}": count for reason, count in rejected.items()},
        )


@condition("sharing", "node")
def find_sharing(evidence: Evidence) -> Found:
    namespaces = evidence.namespaces
    if not namespaces:
        raise NothingToMeasure(NO_POOL)
    for namespace in namespaces:
        if namespace.sharing_off:
            reasons = "; ".join(namespace.sharing_off)
            yield make_condition(
                "info",
                f"namespace {namespace.name} of pool {namespace.pool} is not shared: {reasons}",
                "engines of the same model compute and store the same blocks again",
                "set what the reason names for the next start of the engine; `kvstow get namespaces` shows the result",
                sessions=namespace.sessions,
                blocks=namespace.blocks,
            )


@condition("trust_eof", "node")
def find_trust_eof(evidence: Evidence) -> Found:
    seconds = evidence.trust_eof
    if seconds is not None:
        yield make_condition(
            "warning",
            f"a process whose end cannot be seen counts as ended {duration(seconds)} after its socket (--trust-eof)",
            "one that lives longer than that may write into slots that others use by then",
            "use a kernel from 6.5 on, or let the service see the engines' pids; then drop --trust-eof",
            trust_eof_seconds=seconds,
        )


# -- the store below the pools -----------------------------------------------------------------------------------------


@condition("tier_client", "tier", "tier")
def find_failed_parts(evidence: Evidence) -> Found:
    for part in _clients(evidence):
        if part.state == "failed":
            yield make_condition(
                "error",
                f"{part.name} of the store {evidence.tier.url} have failed: {part.reason}",
                "nothing is written or read by them",
                "remove the cause. They start again with the service: with --state and --keep-on-stop it keeps its "
                "cache, otherwise a restart costs more than they bring",
                restarts=part.counters.restarts,
            )


@condition("tier_down", "tier", "tier")
def find_down(evidence: Evidence) -> Found:
    tier = evidence.tier
    if tier.store == "disk" and any(part.state in FAULTS_OF_DISKS for part in tier.parts):
        return  # the conditions of the disks say which one, why, and what helps
    attempts = {
        "timeouts": sum(part.counters.timeouts for part in tier.parts),
        "restarts": sum(part.counters.restarts for part in tier.parts),
    }
    fix = (
        "check that the store runs and that this node reaches it: `kvstow get tier`; it is tried every 5 s"
        if tier.store != "disk"
        else "nothing, for some seconds: the service starts the process of a disk again; if it lasts, the log "
        "(kvstow.disk) says why"
    )
    for one in tier.items:
        if one.state == "down":
            yield make_condition(
                "warning",
                f"the store {tier.url} is not used for {_name(one)}: {one.reason}",
                "requests compute what the store has; nothing else is affected",
                fix,
                one,
                **attempts,
            )
    # Before an engine uses the store, report it only once each of its parts has failed to start.
    if not tier.items and tier.parts and all(one.state == "starting" and one.counters.restarts for one in tier.parts):
        yield make_condition(
            "warning",
            f"the store {tier.url} does not answer: {'; '.join(dict.fromkeys(one.reason for one in tier.parts))}",
            "the first engine will compute what the store has; nothing else is affected",
            fix,
            **attempts,
        )


@condition("tier_off", "tier")
def find_off(evidence: Evidence) -> Found:
    for one in evidence.tier.items:
        if one.state == "off":
            yield make_condition(
                "warning",
                f"{_name(one)} does not use the store: {one.reason}",
                "its requests compute what other nodes have, and other nodes what it has",
                "remove the cause; an engine that has reset its prefix cache uses the store again when it restarts",
                one,
            )


@condition("tier_time", "tier")
def find_lost_time(evidence: Evidence) -> Found:
    for one in evidence.tier.items:
        if loses_time(one):
            waited, saved = one.counters.wait_seconds, one.counters.saved_seconds
            yield make_condition(
                "warning",
                f"since the start, requests of {_name(one)} have waited {duration(waited)} for the store, and saved "
                f"{duration(saved)}",
                "without the store they would have been served sooner",
                "compare the rate of reads with what the store should give (`kvstow get tier`). A start without the "
                "store ends the loss; only with --state and --keep-on-stop it keeps the cache",
                one,
                wait_seconds=waited,
                saved_seconds=saved,
                cut_waits=one.counters.cut_waits,
                read_bytes_per_second=sum(part.read_bytes_per_second or 0.0 for part in evidence.tier.parts),
            )


@condition("tier_objects", "tier")
def find_corrupt_objects(evidence: Evidence) -> Found:
    for part in _clients(evidence):
        if corrupt := evidence.corrupt.get(part.name):
            yield make_condition(
                "error",
                f"within a day, {counted(corrupt, 'block')} that {part.name} have read were not what was written",
                "they were not loaded, and were removed; but the store or the network changes bytes",
                "check memory, disks and network cards of the store's machines; every block is checked before it is "
                "used, so nothing has to be emptied",
                corrupt_blocks=corrupt,
                read_blocks=part.counters.read_blocks,
            )


@condition("tier_access", "tier")
def find_access(evidence: Evidence) -> Found:
    measured = evidence.measured.tier
    if measured is not None and measured.public_addresses:
        yield make_condition(
            "warning",
            f"the store {evidence.tier.url} has the public address {', '.join(measured.public_addresses)}, and asks "
            "nobody who he is",
            "anyone who can reach it can read and delete the blocks of all nodes",
            "bind it to an address of a private network, and let only the nodes reach its ports (in Kubernetes with a "
            "NetworkPolicy)",
            public_addresses=len(measured.public_addresses),
        )


@condition("tier_memlock", "tier")
def find_tier_memlock(evidence: Evidence) -> Found:
    measured, needed = evidence.measured.tier, evidence.granted_bytes
    limit = None if measured is None or not measured.pins_memory else measured.memlock_bytes
    if limit is not None and limit < needed:
        yield make_condition(
            "warning",
            f"RDMA has to lock {format_size(needed)} of the pools, and RLIMIT_MEMLOCK is {format_size(limit)}",
            "the network card cannot register the memory, so nothing is written or read",
            "LimitMEMLOCK=infinity for the next start of the service, in Kubernetes a setting of the container runtime",
            memlock_bytes=limit,
            pool_bytes=needed,
        )


def _clients(evidence: Evidence) -> Sequence[StorePart]:
    """Return the processes that are clients of a fleet's store. Disks have conditions of their own."""
    return () if evidence.tier.store == "disk" else evidence.tier.parts


def loses_time(tier: TierStatus) -> bool:
    """Whether, so far, requests have waited longer for blocks than computing these would have taken. Unknown until the
    prefill speed is known."""
    counters = tier.counters
    return tier.prefill_tokens_per_second is not None and counters.wait_seconds > max(1.0, counters.saved_seconds)


def _name(one: TierStatus) -> str:
    return one.namespace if one.namespace == one.pool else f"{one.namespace} of pool {one.pool}"
