"""The calls about the server: what it is, how it is, its settings and log levels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from kvstow.stats import EngineStats
from kvstow_api.answers import DoctorView, InfoView, LogLevelsView, LogLevelView, ReadinessView, TierView
from kvstow_api.client.call import Call, Reply, decoded, get, params
from kvstow_api.figures import CurvesView

ProbeName = Literal["livez", "readyz", "startupz"]


class ProbeResult(NamedTuple):
    """Whether the probe passed, and its text."""

    ok: bool
    text: str


def info() -> Call[InfoView]:
    return get("/v1/info", InfoView)


def readiness(*, pool: str | None = None) -> Call[ReadinessView]:
    """Of the host, or of one pool."""
    return get("/v1/readiness", ReadinessView, pool=pool)


def tier() -> Call[TierView]:
    return get("/v1/tier", TierView)


def stats(*, pool: str | None = None) -> Call[EngineStats]:
    return get("/v1/stats", EngineStats, pool=pool)


def curves(*, pool: str | None = None) -> Call[CurvesView]:
    return get("/v1/curves", CurvesView, pool=pool)


def doctor() -> Call[DoctorView]:
    return get("/v1/doctor", DoctorView)


def probe(name: ProbeName, *, verbose: bool = True, exclude: Iterable[str] = ()) -> Call[ProbeResult]:
    given = params(verbose=verbose or None, exclude=",".join(exclude))
    return Call("GET", f"/{name}", _probe_result, given, accepts=frozenset({503}))


def metrics() -> Call[str]:
    return Call("GET", "/metrics", lambda reply: reply.body.decode())


def log_levels() -> Call[LogLevelsView]:
    return get("/v1/loglevel", LogLevelsView)


def set_log_level(level: str, *, logger: str = "kvstow") -> Call[LogLevelView]:
    """Until it is set again, or the server stops."""
    return Call("PUT", "/v1/loglevel", decoded(LogLevelView), body={"logger": logger, "level": level})


def _probe_result(reply: Reply) -> ProbeResult:
    return ProbeResult(reply.status == 200, reply.body.decode())
