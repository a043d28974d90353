"""The calls about the engines that use the pools: sessions, namespaces, ranks and transfers."""

from __future__ import annotations

import json
from urllib.parse import quote

from kvstow.messages import DesiredState, Direction, RankReport
from kvstow.status import RankStatus, TransferState
from kvstow_api.answers import DetachView, NamespacesView, RanksView, SessionsView, TransfersView
from kvstow_api.client.call import Call, decoded, get, params


def sessions() -> Call[SessionsView]:
    return get("/v1/sessions", SessionsView)


def detach(session_id: str, *, kill: bool = False) -> Call[DetachView]:
    """End an engine's connections, and kill its processes if asked to. What it holds is freed when its processes have
    ended; then `sessions` does not list it any more."""
    path = f"/v1/sessions/{quote(session_id, safe='')}"
    return Call("DELETE", path, decoded(DetachView), params(kill=kill or None))


def namespaces() -> Call[NamespacesView]:
    return get("/v1/namespaces", NamespacesView)


def ranks(*, pool: str | None = None, session: str | None = None) -> Call[RanksView]:
    """Of all engines, of those of one pool, or of one engine."""
    return get("/v1/ranks", RanksView, pool=pool, session=session)


def rank(number: int, *, pool: str | None = None, session: str | None = None) -> Call[RankStatus]:
    """Fails with status 409 if several of these engines have a rank of this number."""
    return get(f"/v1/ranks/{number}", RankStatus, pool=pool, session=session)


def report(message: RankReport, *, clock: float) -> Call[DesiredState]:
    """The report of a rank's agent. `clock`: its time of day, in seconds since 1970, which the server compares."""
    return Call(
        "POST",
        f"/v1/ranks/{message.rank}/report",
        lambda reply: DesiredState.from_json(json.loads(reply.body)),
        body=message.to_json(),
        headers={"X-KVStow-Clock": f"{clock:.6f}"},
    )


def transfers(
    *,
    direction: Direction | None = None,
    state: TransferState | None = None,
    slowest: int | None = None,
    pool: str | None = None,
    session: str | None = None,
) -> Call[TransfersView]:
    """Of all pools, of one, or of one engine."""
    given = {"direction": direction, "state": state, "slowest": slowest, "pool": pool, "session": session}
    return get("/v1/transfers", TransfersView, **given)
