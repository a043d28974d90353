"""Which pool of a node a request is about, with no pool, one, and three."""

from __future__ import annotations

import httpx
import pytest
from tests.api.node.conftest import KEYS

from kvstow_api.routes import ROUTERS

pytestmark = pytest.mark.anyio


ONE_POOL = ["/v1/stats", "/v1/lookup"]
"""Routes about one pool that have nothing to say without one."""


async def ask(client: httpx.AsyncClient, path: str) -> httpx.Response:
    if path.startswith("/v1/lookup"):
        return await client.post(path, json={"keys": [KEYS[0].hex()]})
    return await client.get(path)


async def test_no_reading_route_fails(client: httpx.AsyncClient, pools: list[str]) -> None:
    for router in ROUTERS:
        for route in router.routes:
            path: str = route.path  # type: ignore[attr-defined]
            if "GET" not in route.methods or path == "/v1/events":  # type: ignore[attr-defined]
                continue
            answer = await client.get(path.replace("{pool}", "a-000001").replace("{rank}", "0"))
            assert answer.status_code in (200, 404, 409, 422), (path, answer.text)


@pytest.mark.parametrize("path", ONE_POOL)
async def test_a_pool_is_named_where_there_are_several(client: httpx.AsyncClient, pools: list[str], path: str) -> None:
    answer = await ask(client, path)
    if len(pools) == 3:
        body = answer.json()
        assert answer.status_code == 422
        assert body["errors"][0]["field"] == "pool"
        assert ", ".join(pools) in body["detail"]
    elif pools:
        assert answer.status_code == 200
    else:
        assert answer.status_code == 409
        assert answer.json()["detail"] == "no engine has attached yet, so there is no pool"
    for name in pools:
        assert (await ask(client, f"{path}?pool={name}")).status_code == 200
    assert (await ask(client, f"{path}?pool=unknown")).status_code == 404


@pytest.mark.parametrize("path", ["/v1/readiness", "/v1/drain", "/v1/bypass"])
async def test_the_whole_node_answers_without_a_name(client: httpx.AsyncClient, pools: list[str], path: str) -> None:
    assert (await client.get(path)).status_code == 200
    for name in pools:
        assert (await client.get(f"{path}?pool={name}")).status_code == 200
    assert (await client.get(f"{path}?pool=unknown")).status_code == 404
