"""`kvstow get servers`: the server itself as a row, for a table of several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstow.status import MemoryStatus
    from kvstow_api.client import Client


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRow:
    """What `/v1/info` and `/v1/readiness` say of a server. `address`: where it listens. `sessions` have ranks; `ranks`
    counts those of all sessions."""

    address: str
    mode: str
    version: str
    model: str | None
    state: str
    reason: str
    memory: MemoryStatus
    pools: int
    sessions: int
    ranks: int
    uptime_seconds: float


@dataclass(frozen=True, slots=True)
class ServerList:
    """One item, as lists of the API have theirs."""

    items: list[ServerRow]


def read_servers(client: Client) -> ServerList:
    from kvstow_api.client import calls

    info, readiness = client.send(calls.info()), client.send(calls.readiness())
    row = ServerRow(
        address=next(iter(info.addresses), ""),
        mode=info.mode,
        version=info.version,
        model=info.settings.get("model"),
        state=readiness.state,
        reason=readiness.reason,
        memory=readiness.memory,
        pools=len(info.pools),
        sessions=len({rank.session for rank in readiness.ranks}),
        ranks=len(readiness.ranks),
        uptime_seconds=info.uptime_seconds,
    )
    return ServerList([row])
