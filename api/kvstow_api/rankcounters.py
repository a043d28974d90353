"""Counters of ranks that go on when engines come and go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvstow.status import RankStatus, SessionStatus
from kvstow_api.directory import HostedPool

_BOOTS = 1024  # of a pool that are remembered


class CountedRank(NamedTuple):
    """What the ranks of one number have counted, in all engines of a pool."""

    load_busy_seconds: float = 0.0
    store_busy_seconds: float = 0.0
    pin_failures: Mapping[str, int] = {}

    @classmethod
    def of(cls, rank: RankStatus) -> CountedRank:
        return cls(rank.load_busy_seconds, rank.store_busy_seconds, dict(rank.pin_failures))

    def grown(self, before: CountedRank, now: CountedRank) -> CountedRank:
        """With what one of the ranks has counted since `before`."""
        failures = dict(self.pin_failures)
        for reason, count in now.pin_failures.items():
            failures[reason] = failures.get(reason, 0) + max(0, count - before.pin_failures.get(reason, 0))
        return CountedRank(
            self.load_busy_seconds + max(0.0, now.load_busy_seconds - before.load_busy_seconds),
            self.store_busy_seconds + max(0.0, now.store_busy_seconds - before.store_busy_seconds),
            failures,
        )


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

    def of_pool(self, pool: HostedPool) -> list[CountedRank]:
        """By number of the rank."""
        counters = self._pools.get(pool.facade.engine_id) or _PoolCounters()
        return [counters.sums.get(rank, CountedRank()) for rank in range(pool.facade.config.num_ranks)]


class _PoolCounters:
    def __init__(self) -> None:
        self.sums: dict[int, CountedRank] = {}
        self._boots: OrderedDict[tuple[int, str], CountedRank] = OrderedDict()
        """What each boot of a rank had counted, the one that was seen last at the end."""

    def note(self, rank: RankStatus) -> None:
        if rank.boot_id is None:
            return
        name, now = (rank.rank, rank.boot_id), CountedRank.of(rank)
        # A rank that was there before this server comes with what it has copied in its whole life.
        before = self._boots.get(name) or now._replace(pin_failures={})
        self.sums[rank.rank] = self.sums.get(rank.rank, CountedRank()).grown(before, now)
        self._boots[name] = now
        self._boots.move_to_end(name)
        while len(self._boots) > _BOOTS:
            self._boots.popitem(last=False)
