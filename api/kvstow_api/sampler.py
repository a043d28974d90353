"""Samples the pools once a second: counters for figures and curves, changes of state for the journal. The counters of
ranks go on when engines come and go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence

from kvstow.status import RankStatus, SessionState, SessionStatus
from kvstow_api.directory import Directory, HostedPool, host_readiness
from kvstow_api.figures import (
    CURVE_INTERVAL,
    CURVE_POINTS,
    NOW_SECONDS,
    Sample,
    SessionSample,
    sample_session,
    session_now,
)
from kvstow_api.journal import Journal

_BOOTS = 1024  # of a pool that are remembered


def _busy(rank: RankStatus) -> Counter[str]:
    return Counter({"load": rank.load_busy_seconds, "store": rank.store_busy_seconds})


class RankCounters:
    """Sums of what ranks count, by pool and number of the rank. They never shrink while the pool lives: a rank counts
    from zero when it restarts, but its former boot stays in the sum.

    An engine that attaches again comes with the boots and counters that it had, which are not added twice. What a rank
    copies before the first `note` of it, or counts between the last one and its end, is missing. Used on the event
    loop. O(ranks).
    """

    def __init__(self) -> None:
        self._pools: dict[str, _PoolCounters] = {}

    def note(self, pools: Sequence[HostedPool], sessions: Iterable[SessionStatus]) -> None:
        """Add what the ranks have counted since the last call. Pools that are gone are forgotten."""
        ids = {pool.name: pool.facade.engine_id for pool in pools}
        self._pools = {one: self._pools.get(one) or _PoolCounters() for one in ids.values()}
        for session in sessions:
            if session.pool in ids:
                for rank in session.ranks:
                    self._pools[ids[session.pool]].note(rank)

    def of_pool(self, pool: HostedPool) -> list[Mapping[str, float]]:
        """By number of the rank: the seconds in which it was copying (`load` and `store`), and failures to pin, by
        reason."""
        counters = self._pools.get(pool.facade.engine_id) or _PoolCounters()
        return [counters.sums.get(rank, Counter()) for rank in range(pool.facade.config.num_ranks)]


class _PoolCounters:
    def __init__(self) -> None:
        self.sums: dict[int, Counter[str]] = {}
        self._boots: OrderedDict[tuple[int, str], Counter[str]] = OrderedDict()
        """What each boot of a rank had counted, the one that was seen last at the end."""

    def note(self, rank: RankStatus) -> None:
        if rank.boot_id is None:
            return
        name, now = (rank.rank, rank.boot_id), _busy(rank) + Counter(rank.pin_failures)
        # A rank that was there before this server comes with what it has copied in its whole life.
        before = self._boots.get(name, _busy(rank))
        self.sums[rank.rank] = self.sums.get(rank.rank, Counter()) + (now - before)  # no count falls
        self._boots[name] = now
        self._boots.move_to_end(name)
        while len(self._boots) > _BOOTS:
            self._boots.popitem(last=False)


logger = logging.getLogger("kvstow.api")

_INTERVAL = 1.0
_TICKS_PER_POINT = round(CURVE_INTERVAL / _INTERVAL)
_TICKS_PER_REJECTED = 10
REJECTED_SECONDS = 600.0
"""How long a refusal of an engine is a condition."""
_STATES: Mapping[SessionState, str] = {
    "attaching": "not all ranks have reported and registered slots",
    "attached": "it loads and stores",
    "stuck": "a transfer is too old",
    "lost": "its connection has ended, and processes of it may still reach the memory",
}


class Sampler:
    """Runs on the event loop. A sample is O(pools + ranks + namespaces with a tier)."""

    def __init__(self, directory: Directory, journal: Journal) -> None:
        self._directory, self._journal = directory, journal
        self._pools: dict[str, PoolSamples] = {}
        self._sessions: dict[str, _SessionSamples] = {}
        self._ranks: dict[tuple[str, int], tuple[str, str | None, str | None]] = {}
        self._tiers: dict[tuple[str, str], str] = {}
        """The state of each tier, by its pool and namespace."""
        self.rank_counters = RankCounters()
        self._node_state: str | None = None
        self._rejected: deque[Mapping[str, int]] = deque(
            maxlen=round(REJECTED_SECONDS / _INTERVAL) // _TICKS_PER_REJECTED
        )
        self._ticks = 0
        self._failing = False

    def of_pool(self, pool: str) -> PoolSamples:
        """The samples of a pool; empty until its first one."""
        return self._pools.get(pool) or PoolSamples("")

    def rejected_lately(self) -> Mapping[str, int]:
        """Connections of engines that were refused within `REJECTED_SECONDS`, by reason."""
        now, before = self._directory.rejected, self._rejected[0] if self._rejected else {}
        return {reason: count - before.get(reason, 0) for reason, count in now.items()}

    def now_of_session(self, session: SessionStatus) -> SessionStatus:
        """With the rates of the last seconds."""
        samples = self._sessions.get(session.id)
        return session if samples is None else session_now(session, samples.recent)

    def tick(self) -> None:
        """Take a sample of each pool and each session. The curves have every fifth one, beginning with the first. They
        end with their pool."""
        directory = self._directory
        if directory.is_node:
            self._note_node()
            if self._ticks % _TICKS_PER_REJECTED == 0:
                self._rejected.append(dict(directory.rejected))
            self._ticks += 1
        former, self._pools = self._pools, {}
        pools, sessions = directory.pools(), directory.sessions()
        self.rank_counters.note(pools, sessions)
        for pool in pools:
            samples = former.get(pool.name)
            if samples is None or samples.engine_id != pool.facade.engine_id:
                samples = PoolSamples(pool.facade.engine_id)
            self._pools[pool.name] = samples
            self._sample(pool, samples)
        noted, self._ranks = self._ranks, {}
        left, self._sessions = self._sessions, {}
        for session in sessions:
            self._sample_session(session, left.pop(session.id, None))
            if session.state != "lost":
                for rank in session.ranks:
                    self._note_changes(session, rank, noted)
        for ended in left.values():
            self._note_session(ended.session, "over", "none of its processes can reach the memory")
        self._note_tiers()

    def _note_tiers(self) -> None:
        tier = self._directory.tier
        before, self._tiers = self._tiers, {}
        for one in () if tier is None else tier.tiers():
            name = one.pool, one.namespace
            self._tiers[name] = one.state
            if before.pop(name, None) != one.state:
                self._note_tier(*name, one.store, one.state, one.reason)
        for pool, namespace in before:
            self._note_tier(pool, namespace, None, "over", "no engine can use the namespace any more")

    def _note_tier(self, pool: str, namespace: str, store: str | None, state: str, reason: str) -> None:
        self._journal.add("tier", pool=pool, namespace=namespace, store=store, state=state, reason=reason)

    def _sample_session(self, session: SessionStatus, samples: _SessionSamples | None) -> None:
        state = session.state
        if samples is None:
            samples = _SessionSamples(session)
        if state != samples.state:
            self._note_session(session, state, _STATES[state])
        samples.session, samples.state = session, state
        sample = sample_session(session.ranks, time.monotonic())
        if sample is not None:
            samples.recent.append(sample)
        self._sessions[session.id] = samples

    def _note_session(self, session: SessionStatus, state: str, reason: str) -> None:
        name = f"session {session.id} ({session.engine}, pool {session.pool})"
        logger.info("%s is %s: %s", name, state, reason)
        self._journal.add(
            "session",
            pool=session.pool,
            session=session.id,
            engine=session.engine,
            model=session.model,
            state=state,
            reason=reason,
        )

    def _sample(self, pool: HostedPool, samples: PoolSamples) -> None:
        readiness = pool.facade.readiness()
        if readiness.state != samples.state and not self._is_growth(samples.state, readiness.state):
            self._journal.add("state", pool=pool.name, state=readiness.state, reason=readiness.reason)
            logger.info("pool %s is %s: %s", pool.name, readiness.state, readiness.reason)
            samples.state = readiness.state
        samples.policy_changes, changes = pool.facade.policy_changes(samples.policy_changes)
        for change in changes:
            self._journal.add("policy", pool=pool.name, **change._asdict())
        samples.claim_switches, switches = pool.facade.claim_switches(samples.claim_switches)
        for switch in switches:
            self._journal.add("hints", pool=pool.name, **switch._asdict())
        samples.add(Sample(time.monotonic(), pool.facade.stats()))

    def _note_node(self) -> None:
        readiness = host_readiness(self._directory)
        if readiness.state != self._node_state:
            self._journal.add("state", pool=None, state=readiness.state, reason=readiness.reason)
            logger.info("the node is %s: %s", readiness.state, readiness.reason)
            self._node_state = readiness.state

    def _note_changes(
        self,
        session: SessionStatus,
        rank: RankStatus,
        noted: dict[tuple[str, int], tuple[str, str | None, str | None]],
    ) -> None:
        name, now = (session.id, rank.rank), (rank.state, rank.boot_id, rank.error)
        before = noted.get(name)
        if before is not None and before[1:] == now[1:] and self._is_growth(before[0], rank.state):
            self._ranks[name] = before
            return
        self._ranks[name] = now
        if before != now:
            self._journal.add(
                "rank",
                pool=session.pool,
                session=session.id,
                rank=rank.rank,
                state=rank.state,
                boot_id=rank.boot_id,
                error=rank.error,
            )

    def _is_growth(self, before: str | None, state: str) -> bool:
        """Whether the only change is that a pool of a node, or a rank, has more memory. That happens with every row, so
        it is not an event."""
        return self._directory.is_node and (before, state) == ("ready", "pinning")

    async def run(self) -> None:
        while True:
            try:
                self.tick()
                self._failing = False
            except Exception:  # the next sample may succeed
                if not self._failing:
                    logger.exception("sampling the pools failed")
                self._failing = True
            await asyncio.sleep(_INTERVAL)


class _SessionSamples:
    """The last samples of a session, and its last state that was noted."""

    def __init__(self, session: SessionStatus) -> None:
        self.session = session
        self.state: SessionState | None = None
        self.recent: deque[SessionSample] = deque(maxlen=round(NOW_SECONDS / _INTERVAL) + 1)


class PoolSamples:
    """The samples of one life of a pool."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.state: str | None = None
        self.policy_changes = 0
        """How many of the pool's own changes of its order of eviction are in the journal."""
        self.claim_switches = 0
        """The same, for hints that were switched off or on."""
        self.kept: deque[Sample] = deque(maxlen=CURVE_POINTS + 1)
        self.recent: deque[Sample] = deque(maxlen=round(NOW_SECONDS / _INTERVAL) + 1)
        self._ticks = 0

    def add(self, sample: Sample) -> None:
        self.recent.append(sample)
        if self._ticks % _TICKS_PER_POINT == 0:
            self.kept.append(sample)
        self._ticks += 1
