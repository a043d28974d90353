"""The table of conditions, and the evidence in which they are searched."""

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
    """The evidence of a host, or of one of its pools.

    `failures` are the reports of failing checks of the host's process, by the names of the checks. `sessions` are those
    of the host or the pool. `starting` are the ids of new sessions, whose ranks need not have reported yet. For a host,
    `desired` is None, and `kept` and `recent` are empty, because only pools have these samples.
    `certificate_seconds_left` is None if the server does not use TLS. `certificate_is_outdated` says that it cannot use
    its newer TLS files. `exposed_files` describes the access that other users have to each token file, by the name of
    its setting, or is None if no token file is set. `unusable_files` says why a token file cannot be used now.

    If engines attach to the server (`is_node`), `memory`, `namespaces`, `trust_eof` and `user_limits` are those of its
    `Directory`. `rejected` counts the refused connections of the last minutes, by reason. `tier` has no store if none
    is attached. `corrupt` counts the blocks of the last day that were not what was written, by part of the store.

    `pool` is the name of the pool, and empty for a host. For `granted_bytes` and `due_bytes`, see `HostedPool`.
    `slot_bytes` are those of all ranks together. `curve` tells what other sizes would hit."""

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
    certificate_is_outdated: bool = False
    exposed_files: Mapping[str, str] | None = None
    unusable_files: Mapping[str, str] = {}
    is_node: bool = False
    memory: MemoryStatus = MemoryStatus(0, 0)
    rejected: Mapping[str, int] = {}
    namespaces: Sequence[NamespaceStatus] = ()
    trust_eof: float | None = None
    user_limits: Sequence[UserLimit] = ()
    tier: TierView = NO_TIER
    corrupt: Mapping[str, int] = {}
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
        """Name a rank in a sentence. On a node, engines have ranks of the same numbers, so the session is named,
        too."""
        return f"rank {rank.rank} of session {rank.session}" if self.is_node else f"rank {rank.rank}"

    @property
    def reporting(self) -> list[RankStatus]:
        """The ranks that have reported. Raises `NothingToMeasure` if no rank has."""
        ranks = [rank for rank in self.readiness.ranks if rank.boot_id is not None]
        if not ranks:
            raise NothingToMeasure("no rank has reported")
        return ranks


Found = Iterator[ConditionView]


class Condition(NamedTuple):
    """A condition of the table. `of` says what it is searched in. `find` yields one finding for
    each thing that it concerns, or raises `NothingToMeasure`. `checks` are the checks of /readyz that fail while it
    lasts."""

    name: str
    of: Literal["host", "pool", "node", "tier"]
    find: Callable[[Evidence], Found]
    checks: tuple[str, ...]


TABLE: list[Condition] = []
"""All conditions, once `disks`, `hosts` and `pools` are imported."""


def condition(
    name: str, of: Literal["host", "pool", "node", "tier"], *checks: str
) -> Callable[[Callable[[Evidence], Found]], Callable[[Evidence], Found]]:

    def enter(find: Callable[[Evidence], Found]) -> Callable[[Evidence], Found]:
        TABLE.append(Condition(name, of, find, checks))
        return find

    return enter


class NothingToMeasure(Exception):
    """Raised if evidence is missing. The message says which."""


def make_condition(
    severity: Severity,
    what: str,
    why: str,
    fix: str,
    who: SessionStatus | RankStatus | TierStatus | MemoryWait | None = None,
    /,
    **evidence: float,
) -> ConditionView:
    """Make a finding. `who` is what it concerns. The table adds the name."""
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
