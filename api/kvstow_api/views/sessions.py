"""The answers about sessions, their ranks and their namespaces."""

from __future__ import annotations

from dataclasses import dataclass

from kvstow.status import HostedNamespace, HostedSession, SessionState
from kvstow_api.figures import SessionNowView


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRankView:
    """A rank of an engine. `registered_slots`: the slots that it can copy to and from, counted from slot 0."""

    rank: int
    pid: int | None
    device: str | None
    registered_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """An engine that uses a pool. `pid`: its scheduler's process on `host`, null if unknown. `state`: `attaching` (not
    all ranks have reported and registered slots), `attached`, `stuck` (a transfer is too old), or `lost` (its
    connection has ended, and `processes` of it may still reach the memory).

    `in_flight`: transfers, the oldest for `oldest_seconds`. `leases`: those that no load has used. `quarantined_slots`
    are kept from others because processes of a lost session may still write them. `now`: figures of the last seconds.
    """

    id: str
    engine: str
    model: str
    pool: str
    namespace: str
    host: str
    pid: int | None
    state: SessionState
    age_seconds: float
    in_flight: int
    oldest_seconds: float
    leases: int
    leased_slots: int
    registered_slots: int
    quarantined_slots: int
    processes: int
    ranks: list[SessionRankView]
    now: SessionNowView

    @classmethod
    def of(cls, session: HostedSession, now: SessionNowView) -> SessionView:
        status = session.status
        return cls(
            id=session.session_id,
            engine=session.engine,
            model=session.model,
            pool=session.pool,
            namespace=session.namespace,
            host=session.host,
            pid=session.pid,
            state=status.state,
            age_seconds=session.age_seconds,
            in_flight=status.in_flight,
            oldest_seconds=status.oldest_seconds,
            leases=status.leases,
            leased_slots=status.leased_slots,
            registered_slots=status.registered_slots,
            quarantined_slots=status.quarantined_slots,
            processes=status.processes,
            ranks=[
                SessionRankView(rank=rank.rank, pid=rank.pid, device=rank.device, registered_slots=rank.pinned_slots)
                for rank in status.ranks
            ],
            now=now,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsView:
    """The oldest first. `rejected` counts, by reason, connections of engines that were refused, or ended for what they
    sent, since the host started."""

    items: list[SessionView]
    rejected: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachView:
    """What was begun: the session's connections end, and its processes are killed if `killed`. What it holds is freed
    when its processes have ended, which `GET /v1/sessions` shows: then the session is gone from it."""

    id: str
    killed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespacesView:
    items: list[HostedNamespace]
