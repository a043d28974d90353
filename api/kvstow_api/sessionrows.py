"""The row of a session on the status page and in `kvstow top`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from kvstow.status import SessionStatus
from kvstow_api.numberformat import ABSENT, duration, rate

SESSION_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "name": "session",
        "state": "state",
        "in_flight": "in flight",
        "oldest": "oldest",
        "holds": "holds",
        "pool": "pool",
        "loads": "loads",
        "stores": "stores",
        "engine": "engine",
        "ranks": "ranks",
        "registered": "registered",
        "age": "age",
        "process": "process",
    }
)
"""Fields of a `SessionRow` and their titles. The most important come first: a narrow terminal omits the last ones."""


class SessionRow(NamedTuple):
    """An engine as text. `name` is the session's id, `oldest` the age of its oldest transfer, and `holds` the number of
    slots that others cannot have because of it. `troubled`: a condition concerns the engine."""

    name: str
    state: str
    in_flight: str
    oldest: str
    holds: str
    pool: str
    loads: str
    stores: str
    engine: str
    ranks: str
    registered: str
    age: str
    process: str
    troubled: bool


assert tuple(SESSION_COLUMNS) == SessionRow._fields[:-1]


def session_row(session: SessionStatus, *, troubled: bool = False) -> SessionRow:
    process = "" if session.pid is None else f"pid {session.pid}"
    return SessionRow(
        name=session.id,
        state=session.state,
        in_flight=f"{session.in_flight:,}",
        oldest=duration(session.oldest_seconds) if session.in_flight else ABSENT,
        holds=f"{session.leased_slots + session.quarantined_slots:,}",
        pool=session.pool,
        loads=rate(session.load_bytes_per_second),
        stores=rate(session.store_bytes_per_second),
        engine=session.engine or ABSENT,
        ranks=f"{len(session.ranks)}",
        registered=f"{session.registered_slots:,}",
        age=_age(session.age_seconds),
        process=", ".join(filter(None, (session.host, process))) or ABSENT,
        troubled=troubled,
    )


def _age(seconds: float) -> str:
    """Changes once a minute: the status page sends its sections again when they change.

    >>> _age(59), _age(61), _age(7320)
    ('< 1 min', '1 min', '2 h 2 min')
    """
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min" if minutes else "< 1 min"
    return f"{minutes // 60} h {minutes % 60} min"
