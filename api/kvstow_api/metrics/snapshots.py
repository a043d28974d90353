"""What a scrape reads: every pool at about the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstow.stats import EngineStats
from kvstow.status import RankStatus, Readiness, SessionState
from kvstow_api.directory import HostedPool
from kvstow_api.rankcounters import CountedRank

POOL = ("pool", "model")
"""The labels of a pool: its name, and its model, which is empty if unknown."""
RANK = (*POOL, "rank")


class PoolSnapshot(NamedTuple):
    """A pool at the moment of a scrape. `ranks`: those of all its live engines, by number; `counted`: what the ranks of
    each number have counted in all its engines, ended ones included."""

    hosted: HostedPool
    stats: EngineStats
    readiness: Readiness
    ranks: Mapping[int, Sequence[RankStatus]]
    counted: Sequence[CountedRank]
    session_states: Mapping[SessionState, int]

    @property
    def labels(self) -> tuple[str, str]:
        """The values of `POOL`."""
        return self.hosted.name, self.hosted.model


class Snapshots(NamedTuple):
    """All pools of a host. `host_errors` are of no pool."""

    pools: Sequence[PoolSnapshot]
    host_errors: Mapping[str, int]

    def stats(self) -> list[tuple[tuple[str, str], EngineStats]]:
        """The values of `POOL`, and the counters of each pool."""
        return [(pool.labels, pool.stats) for pool in self.pools]
