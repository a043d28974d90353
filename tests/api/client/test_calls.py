"""Every call against the real application: what it sends is understood, and what comes back has the type it says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, get_args, get_origin, get_type_hints

import httpx
import pytest
from tests.api.conftest import AGENT_TOKEN

from kvstow.messages import DesiredState
from kvstow.stats import EngineStats
from kvstow.status import BlockStatus, BypassStatus, DrainStatus, LookupResult, ProtectionResult, RankStatus
from kvstow_api import client
from kvstow_api.answers import (
    BlocksView,
    DoctorView,
    InfoView,
    LogLevelsView,
    LogLevelView,
    NamespacesView,
    OperationsView,
    OperationView,
    PinningView,
    PlanView,
    PoolsView,
    PoolView,
    RanksView,
    ReadinessView,
    RemovedView,
    SessionsView,
    TierView,
    TransfersView,
)
from kvstow_api.client import ApiError, Call, Client, Endpoint, calls
from kvstow_api.client.eventstream import Subscription
from kvstow_api.figures import CurvesView
from kvstow_api.routes import ROUTERS

KEY = "000000000000"


@pytest.fixture
def kvstow(serve: Any, ranks: Any, keys: list[bytes], tmp_path: Path) -> Iterator[Client]:
    """A client of the application, whose pool holds four blocks."""
    ranks.store(keys[:4])
    serve(uds=tmp_path / "admin.sock")
    with Client(f"unix:{tmp_path}/admin.sock") as made:
        yield made


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bytes], None]:
    """Clients that are made from now on get this answer, whatever they ask."""

    def answer(status: int, body: bytes) -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(status, content=body))
        monkeypatch.setattr(httpx, "HTTPTransport", lambda **given: transport)

    return answer


CALLS: list[tuple[Call[Any], type]] = [
    (calls.info(), InfoView),
    (calls.readiness(), ReadinessView),
    (calls.tier(), TierView),
    (calls.readiness(pool="host"), ReadinessView),
    (calls.sessions(), SessionsView),
    (calls.namespaces(), NamespacesView),
    (calls.stats(), EngineStats),
    (calls.curves(), CurvesView),
    (calls.doctor(), DoctorView),
    (calls.pools(), PoolsView),
    (calls.pool(), PoolView),
    (calls.resize(slots=20), PoolView),
    (calls.resize(num_bytes=20 * 4096, if_match="*", wait=20), PoolView),
    (calls.plan_resize(slots=2), PlanView),
    (calls.set_policy("arc"), PoolView),
    (calls.change_pool({"policy": "arc"}, if_match="*"), PoolView),
    (calls.plan_pool({"capacity_slots": 3}), PlanView),
    (calls.evict(slots=1, wait=20), RemovedView),
    (calls.evict(num_bytes=1, dry_run=True, wait=20), RemovedView),
    (calls.evict(idle_seconds=0.5, wait=20), RemovedView),
    (calls.purge(everything=True, wait=20), RemovedView),
    (calls.purge(keys=[KEY], wait=20), RemovedView),
    (calls.purge(key_prefixes=["0000"], dry_run=True, wait=20), RemovedView),
    (calls.purge(age_seconds=0, wait=20), RemovedView),
    (calls.protect([KEY], ttl_seconds=5), ProtectionResult),
    (calls.unprotect([KEY]), ProtectionResult),
    (calls.unprotect(None), ProtectionResult),
    (calls.retry_pinning(), PinningView),
    (calls.pause_pinning(), PoolView),
    (calls.resume_pinning(), PoolView),
    (calls.blocks(page_size=2), BlocksView),
    (calls.block(KEY), BlockStatus),
    (calls.remove_block(KEY), type(None)),
    (calls.lookup([KEY, "00ff"]), LookupResult),
    (calls.ranks(), RanksView),
    (calls.rank(1), RankStatus),
    (calls.transfers(direction="load", state="running", slowest=3), TransfersView),
    (calls.drain_status(), DrainStatus),
    (calls.drain(mode="stop_stores", deadline_seconds=1), DrainStatus),
    (calls.undrain(), DrainStatus),
    (calls.bypass_status(), BypassStatus),
    (calls.bypass(load=True, store=False, ttl_seconds=1), BypassStatus),
    (calls.operations(kind="evict", state="succeeded", page_size=5), OperationsView),
    (calls.log_levels(), LogLevelsView),
    (calls.set_log_level("info", logger="kvstow.api"), LogLevelView),
    (calls.probe("livez"), calls.ProbeResult),
    (calls.metrics(), str),
]


@pytest.mark.parametrize(("call", "kind"), CALLS)
def test_an_answer_has_the_type_that_its_call_says(kvstow: Client, call: Call[Any], kind: type) -> None:
    answer = kvstow.send(call)
    assert isinstance(answer, kind)
    check_types(answer)


def check_types(view: Any) -> None:
    """Every field of a view holds what its annotation says, as far down as views go."""
    if not is_dataclass(view):
        return
    hints = get_type_hints(type(view))
    for field in fields(view):
        value, hint = getattr(view, field.name), hints[field.name]
        if get_origin(hint) is list:
            item = get_args(hint)[0]
            assert all(not isinstance(item, type) or isinstance(part, item) for part in value), field.name
            for part in value:
                check_types(part)
        elif isinstance(hint, type):
            assert isinstance(value, hint), (type(view), field.name)
            check_types(value)


def test_calls_has_those_of_every_resource() -> None:
    modules = [import_module(f"{client.__name__}.{found.name}") for found in iter_modules(client.__path__)]
    made = {
        name
        for module in modules
        for name, value in inspect.getmembers(module, inspect.isfunction)
        if value.__module__ == module.__name__ and str(inspect.signature(value).return_annotation).startswith("Call[")
    }
    assert made - {"get", "work"} == {name for name in calls.__all__ if name.islower()}


def test_every_route_has_a_call(kvstow: Client) -> None:
    rank_report = "/v1/ranks/{rank}/report"
    more: list[Call[Any]] = [
        calls.delete_pool("host"),
        calls.detach("s1"),
        calls.operation("evict-0", wait=1),
        calls.cancel("evict-0"),
        calls.forget("evict-0"),
    ]
    called = {(call.method, call.path) for call in [*(call for call, _ in CALLS), *more]}
    given = {"{pool}": "host", "{key}": KEY, "{rank}": "1", "{operation_id}": "evict-0", "{session_id}": "s1"}
    for router in ROUTERS:
        for route in router.routes:
            path: str = route.path  # type: ignore[attr-defined]
            if not route.include_in_schema or not path.startswith("/v1"):  # type: ignore[attr-defined]
                continue
            if path in (rank_report, "/v1/events"):
                continue
            for name, value in given.items():
                path = path.replace(name, value)
            assert {(method, path) for method in route.methods} <= called  # type: ignore[attr-defined]


def test_an_operation_is_followed_to_its_end(kvstow: Client, ranks: Any, keys: list[bytes]) -> None:
    lease = ranks.lease(keys[:4])
    started = kvstow.send(calls.resize(slots=1, wait=0))
    assert isinstance(started, OperationView)
    with pytest.raises(ApiError) as running:
        kvstow.send(calls.forget(started.id))
    assert running.value.status == 409
    ranks.engine.release_lease(lease)
    ended = kvstow.send(calls.operation(started.id, wait=20))
    assert (ended.state, ended.created.tzinfo is not None) == ("succeeded", True)
    assert kvstow.send(calls.cancel(started.id)) == ended
    kvstow.send(calls.forget(started.id))
    with pytest.raises(ApiError) as gone:
        kvstow.send(calls.operation(started.id))
    assert gone.value.status == 404


def test_a_report_is_answered_with_what_is_wanted(serve: Any, ranks: Any) -> None:
    with Client(Endpoint(serve().url, token=AGENT_TOKEN)) as agent:
        answer = agent.send(calls.report(ranks.make_report(0), clock=1.5))
    assert answer == DesiredState(ranks.engine.engine_id, 16, number=1)


def test_a_problem_comes_as_an_error_that_carries_it(kvstow: Client) -> None:
    with pytest.raises(ApiError, match="policy") as caught:
        kvstow.send(calls.set_policy("mru"))
    problem = caught.value.problem
    assert problem is not None
    assert (problem.status, problem.code, problem.errors[0].field) == (422, "invalid_request", "policy")
    assert caught.value.status == 422


def test_a_failed_probe_is_an_answer(kvstow: Client, ranks: Any) -> None:
    ranks.engine.admin.drain("all", None)
    result = kvstow.send(calls.probe("readyz"))
    assert not result.ok
    assert "drains" in result.text


@pytest.mark.parametrize("body", [b"no JSON", b"{}", b'{"items": 3}', b"[]"])
def test_an_answer_of_another_shape_is_an_error(body: bytes, answering: Any) -> None:
    answering(200, body)
    words = "^http://127.0.0.1:8000 does not seem to be KVStow, .* unexpected answer to GET /v1/pools"
    with Client("http://127.0.0.1:8000") as client, pytest.raises(ApiError, match=words):
        client.send(calls.pools())


@pytest.mark.parametrize("body", [b"<html>", b'{"detail": "Not Found"}'])
def test_a_server_that_is_another_is_named(body: bytes, answering: Any) -> None:
    answering(404, body)
    words = "^http://127.0.0.1:8000 does not seem to be KVStow: it answers with status 404"
    with Client("http://127.0.0.1:8000") as client:
        with pytest.raises(ApiError, match=words) as caught:
            client.send(calls.pools())
        with pytest.raises(ApiError, match=words):
            next(client.events(Subscription()))
    assert (caught.value.status, caught.value.problem) == (404, None)
