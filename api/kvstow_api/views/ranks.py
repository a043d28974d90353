"""The answers about ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvstow.status import HostedSession, RankStatus


@dataclass(frozen=True, kw_only=True)
class RankView(RankStatus):
    """A rank as it last reported, of the engine `session`, which uses `pool`. `boot_id` and `last_report_age_seconds`
    are null before it has reported."""

    pool: str
    session: str

    @classmethod
    def of(cls, rank: RankStatus, session: HostedSession) -> RankView:
        figures = {field.name: getattr(rank, field.name) for field in fields(rank)}
        return cls(**figures, pool=session.pool, session=session.session_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksView:
    """In the order of the sessions, the oldest first."""

    items: list[RankView]
