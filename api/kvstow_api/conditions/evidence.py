"""What conditions are found from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kvstow.messages import DesiredState
from kvstow.status import (
    BypassStatus,
    ClaimsStatus,
    DrainStatus,
    MemoryStatus,
    NamespaceStatus,
    RankStatus,
    Readiness,
    SessionStatus,
)
from kvstow_api.answers import ConditionView, PoolCurveView, Severity, TierView
from kvstow_api.directory import HostMemory, OrphanedMemory, TierMeasurements
from kvstow_api.figures import Sample


class Evidence(NamedTuple):
    """Of a host, or of one of its pools. `failures`: what checks of the host's process report, by their names.
    `sessions`: of the host or the pool. `starting`: the sessions that are new, and need not have reported. `desired` is
    None for a host, and `kept` and `recent` are empty: its pools have these samples. `host` is None if the host
    measures nothing, `certificate_seconds_left` if the server does not use TLS. `exposed_files` describes the access
    that other users have to each token file, by the name of its setting; None if no token file is set."""

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
    host: HostMemory | None = None
    certificate_seconds_left: float | None = None
    exposed_files: Mapping[str, str] | None = None
    node: NodeEvidence | None = None
    """None where the server is embedded in an engine."""
    tier: TierEvidence | None = None
    """None while no store is attached."""
    pool: str = ""
    """The pool whose evidence this is; empty for that of the host."""
    granted_bytes: int = 0
    due_bytes: int = 0
    slot_bytes: int = 0
    """Of a pool: see `HostedPool`; `slot_bytes` are those of all ranks together."""
    integrity_error: str | None = None
    curve: PoolCurveView | None = None
    """Of a pool: what other sizes would hit."""
    claims: ClaimsStatus | None = None
    """Of a pool: what hints do in it."""

    @property
    def bytes_to_come(self) -> int:
        """Memory that is to be populated yet."""
        if self.node is not None:
            return max(0, self.node.memory.target_bytes - self.node.memory.populated_bytes)
        return sum(max(0, rank.target_bytes - rank.pinned_bytes) for rank in self.readiness.ranks)

    @property
    def of_pool(self) -> str:
        """Names the pool in a command, where there may be several."""
        return f" --pool {self.pool}" if self.node is not None and self.pool else ""

    @property
    def reporting(self) -> list[RankStatus]:
        """The ranks that have reported. Raises `NothingToMeasure` if none has."""
        ranks = [rank for rank in self.readiness.ranks if rank.boot_id is not None]
        if not ranks:
            raise NothingToMeasure("no rank has reported")
        return ranks


class NodeEvidence(NamedTuple):
    """Of a server that engines attach to. `rejected`: in the last minutes, by reason. `trust_eof`: see `Directory`.
    `orphans`: memory of node services that none uses, as far as this one sees."""

    memory: MemoryStatus
    rejected: Mapping[str, int]
    namespaces: Sequence[NamespaceStatus]
    trust_eof: float | None
    orphans: Sequence[OrphanedMemory]


class TierEvidence(NamedTuple):
    """Of the fleet tier. `pool_bytes`: memory of all pools on this host."""

    view: TierView
    measured: TierMeasurements
    pool_bytes: int


class NothingToMeasure(Exception):
    """Raised where evidence is missing; the message says which."""


def make_condition(
    severity: Severity,
    what: str,
    why: str,
    fix: str,
    who: SessionStatus | RankStatus | None = None,
    /,
    **evidence: float,
) -> ConditionView:
    """`who`: the engine or the rank that it concerns. The table adds the name."""
    rank = who.rank if isinstance(who, RankStatus) else None
    session = who.id if isinstance(who, SessionStatus) else who.session if who else None
    return ConditionView(
        name="", severity=severity, what=what, why=why, fix=fix, session=session, rank=rank, evidence=evidence
    )


def rank_name(evidence: Evidence, rank: RankStatus) -> str:
    """A rank, for sentences. The engines of a node have ranks of the same numbers."""
    return f"rank {rank.rank}" if evidence.node is None else f"rank {rank.rank} of session {rank.session}"
