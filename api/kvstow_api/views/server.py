"""The answers about the server and what it serves."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, get_args

from kvstow.stats import EngineState, FaultStats, LookupStats, PoolStats, TransferStats
from kvstow.status import MemoryStatus, Readiness
from kvstow.tier.tierstatus import TierState
from kvstow_api.views.doctor import ConditionView
from kvstow_api.views.ranks import RankView


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoView:
    """`host_name`: the machine or the pod that it runs on. `addresses`: where the server listens. `attach`: what
    engines have as `attach` to use it, null where none can attach. `node`: engines attach to this server and leave it;
    otherwise it is embedded in the only one. `engine_id` is new in each life of the engine or the node.
    `token_required`: whether changes need a bearer token, or a client certificate."""

    name: str = "kvstow"
    version: str
    mode: str
    node: bool
    host_name: str
    attach: str | None
    addresses: list[str]
    engine_id: str
    started: datetime
    uptime_seconds: float
    token_required: bool
    num_ranks: int
    pools: list[str]
    build: dict[str, str]
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReadinessView:
    """Whether a pool serves, and the reason."""

    pool: str
    model: str
    state: EngineState
    reason: str
    usable_slots: int
    capacity_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReadinessView:
    """Whether a namespace of a pool uses the store of the fleet tier: see `TierPoolView`."""

    pool: str
    namespace: str
    state: TierState
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessView(Readiness):
    """The state of the host, of each pool, and of the ranks of all sessions. Slots are those of all pools. `memory` is
    that of all pools and ranks. No state depends on those of the `tiers`. `conditions`: what is wrong, the worst
    first."""

    ranks: tuple[RankView, ...]
    pools: list[PoolReadinessView]
    memory: MemoryStatus
    tiers: list[TierReadinessView] = field(default_factory=list)
    conditions: list[ConditionView] = field(default_factory=list)


Section = Literal["pool", "transfers", "lookups", "stores", "evictions", "faults"]
SECTIONS: tuple[Section, ...] = get_args(Section)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsView:
    """Counters of the pool `pool_name` since it was made. Sections that were not requested are null. `stores` counts
    blocks by outcome, `evictions` by reason."""

    pool_name: str
    model: str
    state: EngineState
    pool: PoolStats | None = None
    transfers: TransferStats | None = None
    lookups: LookupStats | None = None
    stores: dict[str, int] | None = None
    evictions: dict[str, int] | None = None
    faults: FaultStats | None = None
