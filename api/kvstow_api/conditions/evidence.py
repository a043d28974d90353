"""The table of conditions, and what they are found from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from kvstow.messages import DesiredState
from kvstow.status import (
    BypassStatus,
    DrainStatus,
    MemoryStatus,
    MemoryWait,
    NamespaceStatus,
    RankStatus,
    Readiness,
    SessionStatus,
    UserLimit,
)
from kvstow.tier.tierstatus import TierStatus
from kvstow_api.answers import NO_TIER, ConditionView, PoolCurveView, Severity, TierView
from kvstow_api.figures import Sample
from kvstow_api.hostwatch import Measured


class Evidence(NamedTuple):
    """Of a host, or of one of its pools. `failures`: what checks of the host's process report, by their names.
    `sessions`: of the host or the pool. `starting`: the sessions that are new, and need not have reported. `desired` is
    None for a host, and `kept` and `recent` are empty: its pools have these samples. `certificate_seconds_left` is None
    if the server does not use TLS. `exposed_files` describes the access that other users have to each token file, by
    the name of its setting; None if no token file is set. `unusable_files`: why a token file cannot be used now.

    Of a server that engines attach to (`is_node`): its `memory`, `namespaces`, `trust_eof` and `user_limits` (see
    `Directory`);
    `rejected`: connections in the last minutes, by reason. `tier` has no store while none is attached.

    `pool`: the pool whose evidence this is; empty for that of the host. `granted_bytes` and `due_bytes`: see
    `HostedPool`; `slot_bytes` are those of all ranks together. `curve`: what other sizes would hit."""

    readiness: Readiness
    drain: DrainStatus
    bypass: BypassStatus
    failures: Mapping[str, str] = {}
    sessions: Sequence[SessionStatus] = ()
    starting: Collection[str] = ()
    report_timeout: float = 5.0
    desired: DesiredState | None = None
    kept: Sequence[Sample] = ()
    recent: Sequence[Sample] = ()
    clock_offsets: Mapping[int, float] = {}
    measured: Measured = Measured()
    certificate_seconds_left: float | None = None
    exposed_files: Mapping[str, str] | None = None
    unusable_files: Mapping[str, str] = {}
    is_node: bool = False
    memory: MemoryStatus = MemoryStatus(0, 0)
    rejected: Mapping[str, int] = {}
    namespaces: Sequence[NamespaceStatus] = ()
    trust_eof: float | None = None
    user_limits: Sequence[UserLimit] = ()
    tier: TierView = NO_TIER
    pool: str = ""
    granted_bytes: int = 0
    due_bytes: int = 0
    slot_bytes: int = 0
    integrity_error: str | None = None
    curve: PoolCurveView | None = None

    @property
    def bytes_to_come(self) -> int:
        if self.is_node:
            return max(0, self.memory.target_bytes - self.memory.populated_bytes)
        return sum(max(0, rank.target_bytes - rank.pinned_bytes) for rank in self.readiness.ranks)

    @property
    def of_pool(self) -> str:
        return f" --pool {self.pool}" if self.is_node and self.pool else ""

    def name_of(self, rank: RankStatus) -> str:
        """For sentences. The engines of a node have ranks of the same numbers."""
        return f"rank {rank.rank} of session {rank.session}" if self.is_node else f"rank {rank.rank}"

    @property
    def reporting(self) -> list[RankStatus]:
        """The ranks that have reported. Raises `NothingToMeasure` if none has."""
        ranks = [rank for rank in self.readiness.ranks if rank.boot_id is not None]
        if not ranks:
            raise NothingToMeasure("no rank has reported")
        return ranks


Found = Iterator[ConditionView]


class Condition(NamedTuple):
    """`of`: what it is looked for in. `find` yields it once for each that it concerns, or raises `NothingToMeasure`.
    `checks`: the checks of /readyz that fail while it lasts."""

    name: str
    of: Literal["host", "pool", "node", "tier"]
    find: Callable[[Evidence], Found]
    checks: tuple[str, ...]


TABLE: list[Condition] = []
"""All conditions, once `hosts` and `pools` are imported."""


def condition(
    name: str, of: Literal["host", "pool", "node", "tier"], *checks: str
) -> Callable[[Callable[[Evidence], Found]], Callable[[Evidence], Found]]:

    def enter(find: Callable[[Evidence], Found]) -> Callable[[Evidence], Found]:
        TABLE.append(Condition(name, of, find, checks))
        return find

    return enter


class NothingToMeasure(Exception):
    """Raised where evidence is missing; the message says which."""


def make_condition(
    severity: Severity,
    what: str,
    why: str,
    fix: str,
    who: SessionStatus | RankStatus | TierStatus | MemoryWait | None = None,
    /,
    **evidence: float,
) -> ConditionView:
    """`who`: what it concerns. The table adds the name."""
    return ConditionView(
        name="",
        severity=severity,
        what=what,
        why=why,
        fix=fix,
        pool=who.pool if isinstance(who, TierStatus | MemoryWait | SessionStatus) else None,
        session=who.id if isinstance(who, SessionStatus) else getattr(who, "session", None),
        rank=getattr(who, "rank", None),
        evidence=evidence,
    )
