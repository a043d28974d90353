"""Every call against the real application: what it sends is understood, and what comes back has the type it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import httpx
import pytest

from kvstow.stats import EngineStats
from kvstow.status import BlockStatus, BypassStatus, DrainStatus, LookupResult, RankStatus
from kvstow_api.answers import (
    BlocksView,
    ContextsView,
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
from kvstow_api.client import ApiError, Client, ProbeResult, Route, routes
from kvstow_api.routes import clienttable

KEY = "000000000000"
ANY = {"If-Match": "*"}


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


Given = dict[str, Any]
CALLS: list[tuple[Route[Any], Any, Given, type]] = [
    (routes.get_info, None, {}, InfoView),
    (routes.get_readiness, None, {}, ReadinessView),
    (routes.get_tier, None, {}, TierView),
    (routes.get_readiness, None, {"pool": "host"}, ReadinessView),
    (routes.list_sessions, None, {}, SessionsView),
    (routes.list_namespaces, None, {}, NamespacesView),
    (routes.get_stats, None, {}, EngineStats),
    (routes.get_doctor, None, {}, DoctorView),
    (routes.list_pools, None, {}, PoolsView),
    (routes.get_pool, None, {"pool": "host"}, PoolView),
    (routes.change_pool, {"capacity_slots": 20}, {"pool": "host"}, PoolView),
    (routes.change_pool, {"capacity_bytes": 20 * 4096}, {"pool": "host", "wait": 20, "headers": ANY}, PoolView),
    (routes.change_pool.returning(PlanView), {"capacity_slots": 2, "dry_run": True}, {"pool": "host"}, PlanView),
    (routes.change_pool, {"policy": "lru", "capacity_slots": None}, {"pool": "host", "headers": ANY}, PoolView),
    (routes.evict, {"slots": 1, "bytes": None}, {"pool": "host", "wait": 20}, RemovedView),
    (routes.evict, {"bytes": 1, "dry_run": True}, {"pool": "host", "wait": 20}, RemovedView),
    (routes.purge, {"all": True}, {"pool": "host", "wait": 20}, RemovedView),
    (routes.purge, {"keys": [KEY]}, {"pool": "host", "wait": 20}, RemovedView),
    (routes.retry, None, {"pool": "host"}, PinningView),
    (routes.list_blocks, None, {"pool": "host", "page_size": 2, "page_token": None}, BlocksView),
    (routes.get_block, None, {"pool": "host", "key": KEY}, BlockStatus),
    (routes.remove_block, None, {"pool": "host", "key": KEY}, type(None)),
    (routes.lookup, {"keys": [KEY, "00ff"]}, {}, LookupResult),
    (routes.list_contexts, None, {"page_size": 2, "page_token": None}, ContextsView),
    (routes.list_ranks, None, {}, RanksView),
    (routes.get_rank, None, {"rank": 1}, RankStatus),
    (routes.list_transfers, None, {"direction": "load", "state": "running", "slowest": 3}, TransfersView),
    (routes.get_drain, None, {}, DrainStatus),
    (routes.start_drain, {"mode": "stop_stores", "deadline_seconds": None}, {}, DrainStatus),
    (routes.end_drain, None, {}, DrainStatus),
    (routes.get_bypass, None, {}, BypassStatus),
    (routes.set_bypass, {"load": True, "store": False, "ttl_seconds": 1}, {}, BypassStatus),
    (routes.list_operations, None, {"kind": "evict", "state": "succeeded", "page_size": 5}, OperationsView),
    (routes.get_log_levels, None, {}, LogLevelsView),
    (routes.set_log_level, {"level": "info", "logger": "kvstow.api"}, {}, LogLevelView),
    (routes.livez, None, {"verbose": True}, ProbeResult),
    (routes.metrics, None, {}, str),
]


@pytest.mark.parametrize(("route", "body", "given", "kind"), CALLS)
def test_an_answer_has_the_type_that_its_route_says(
    kvstow: Client, route: Route[Any], body: Any, given: Given, kind: type
) -> None:
    answer = kvstow.call(route, body, **given)
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


def test_the_table_of_routes_is_that_of_the_application() -> None:
    assert clienttable.PATH.read_text() == clienttable.table(), "python -m kvstow_api.routes.clienttable"


def test_a_name_in_a_path_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.raw_path)
        return httpx.Response(404)

    monkeypatch.setattr(httpx, "HTTPTransport", lambda **given: httpx.MockTransport(answer))
    with Client("http://127.0.0.1:8000") as client, pytest.raises(ApiError):
        client.call(routes.get_pool, pool="a/../b?c")
    assert asked == [b"/v1/pools/a%2F..%2Fb%3Fc"]


def test_an_operation_is_followed_to_its_end(kvstow: Client, ranks: Any, keys: list[bytes]) -> None:
    lease = ranks.lease(keys[:4])
    started = kvstow.call(routes.change_pool, {"capacity_slots": 1}, pool="host", wait=0)
    assert isinstance(started, OperationView)
    with pytest.raises(ApiError) as running:
        kvstow.call(routes.forget_operation, operation_id=started.id)
    assert running.value.status == 409
    ranks.engine.release_lease(lease)
    ended = kvstow.call(routes.get_operation, operation_id=started.id, wait=20)
    assert (ended.state, ended.created.tzinfo is not None) == ("succeeded", True)
    assert kvstow.call(routes.cancel_operation, operation_id=started.id) == ended
    kvstow.call(routes.forget_operation, operation_id=started.id)
    with pytest.raises(ApiError) as gone:
        kvstow.call(routes.get_operation, operation_id=started.id)
    assert gone.value.status == 404


def test_a_problem_comes_as_an_error_that_carries_it(kvstow: Client) -> None:
    with pytest.raises(ApiError, match="policy") as caught:
        kvstow.call(routes.change_pool, {"policy": "mru"}, pool="host")
    problem = caught.value.problem
    assert problem is not None
    assert (problem.status, problem.code, problem.errors[0].field) == (422, "invalid_request", "policy")
    assert caught.value.status == 422


def test_a_failed_probe_is_an_answer(kvstow: Client, ranks: Any) -> None:
    ranks.engine.admin.drain("all", None)
    result = kvstow.call(routes.readyz, verbose=True)
    assert not result.ok
    assert "drains" in result.text


@pytest.mark.parametrize("body", [b"no JSON", b"{}", b'{"items": 3}', b"[]"])
def test_an_answer_of_another_shape_is_an_error(body: bytes, answering: Any) -> None:
    answering(200, body)
    words = "^http://127.0.0.1:8000 does not seem to be KVStow, .* unexpected answer to GET /v1/pools"
    with Client("http://127.0.0.1:8000") as client, pytest.raises(ApiError, match=words):
        client.call(routes.list_pools)


@pytest.mark.parametrize("body", [b"<html>", b'{"detail": "Not Found"}'])
def test_a_server_that_is_another_is_named(body: bytes, answering: Any) -> None:
    answering(404, body)
    words = "^http://127.0.0.1:8000 does not seem to be KVStow: it answers with status 404"
    with Client("http://127.0.0.1:8000") as client:
        with pytest.raises(ApiError, match=words) as caught:
            client.call(routes.list_pools)
        with pytest.raises(ApiError, match=words):
            next(client.events())
    assert (caught.value.status, caught.value.problem) == (404, None)
