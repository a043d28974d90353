"""The input and the output of the checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstow.messages import DesiredState
from kvstow.status import BypassStatus, DrainStatus, HostedNamespace, MemoryStatus, RankStatus, Readiness
from kvstow_api.figures import Sample
from kvstow_api.hostedtier import TierMeasurements
from kvstow_api.measurements import HostMemory, OrphanedMemory
from kvstow_api.probe import Verdict
from kvstow_api.views.doctor import FindingView, Severity
from kvstow_api.views.ranks import RankView
from kvstow_api.views.sessions import SessionView
from kvstow_api.views.tier import TierView


class Evidence(NamedTuple):
    """The input of all checks, of a host or of one of its pools. `verdict` is that of /readyz. `desired` is None for a
    host, and `samples` are empty: its pools have them. `host` is None if the host measures nothing,
    `certificate_seconds_left` if the server does not use TLS. `exposed_files` describes the access that other users
    have to each token file, by the name of its setting; None if no token file is set."""

    verdict: Verdict
    readiness: Readiness
    desired: DesiredState | None
    drain: DrainStatus
    bypass: BypassStatus
    samples: Sequence[Sample]
    clock_offsets: Mapping[int, float]
    host: HostMemory | None
    certificate_seconds_left: float | None
    exposed_files: Mapping[str, str] | None
    node: NodeEvidence | None = None
    """None where the server is embedded in an engine."""
    tier: TierEvidence | None = None
    """None while no store is attached."""
    pool: str = ""
    """The pool whose evidence this is; empty for that of the host."""
    granted_bytes: int = 0
    due_bytes: int = 0
    """Of a pool: see `HostedPool`."""

    @property
    def bytes_to_come(self) -> int:
        """Memory that is to be populated yet."""
        if self.node is not None:
            return max(0, self.node.memory.target_bytes - self.node.memory.populated_bytes)
        return sum(max(0, rank.target_bytes - rank.pinned_bytes) for rank in self.readiness.ranks)

    @property
    def reporting(self) -> list[RankStatus]:
        """The ranks that have reported. Raises `NothingToMeasure` if none has."""
        ranks = [rank for rank in self.readiness.ranks if rank.boot_id is not None]
        if not ranks:
            raise NothingToMeasure("no rank has reported")
        return ranks


class NodeEvidence(NamedTuple):
    """Of a server that engines attach to. `rejected` and `trust_eof`: see `Directory`. `orphans`: memory of node
    services that none uses, as far as this one sees."""

    memory: MemoryStatus
    sessions: Sequence[SessionView]
    rejected: Mapping[str, int]
    namespaces: Sequence[HostedNamespace]
    trust_eof: float | None
    orphans: Sequence[OrphanedMemory]


class TierEvidence(NamedTuple):
    """Of the fleet tier. `pool_bytes`: memory of all pools on this host."""

    view: TierView
    measured: TierMeasurements
    pool_bytes: int


class NothingToMeasure(Exception):
    """Raised by a check that lacks evidence; the message says which."""


def make_finding(
    check: str, severity: Severity, what: str, why: str, fix: str, session: str | None = None, /, **evidence: float
) -> FindingView:
    return FindingView(check=check, severity=severity, what=what, why=why, fix=fix, session=session, evidence=evidence)


def rank_name(evidence: Evidence, rank: RankStatus) -> str:
    """A rank, for sentences. The engines of a node have ranks of the same numbers."""
    session = session_of(rank)
    return f"rank {rank.rank}" if evidence.node is None or session is None else f"rank {rank.rank} of session {session}"


def session_of(rank: RankStatus) -> str | None:
    return rank.session if isinstance(rank, RankView) else None
