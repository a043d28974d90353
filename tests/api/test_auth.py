from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvstow.errors import ConfigError
from kvstow_api.routes import ROUTERS
from kvstow_api.tokens import TokenFile, require_token

pytestmark = pytest.mark.anyio

ADMIN = {"Authorization": "Bearer admin-token"}
AGENT = {"Authorization": "Bearer agent-token"}

CHANGES = [
    ("PATCH", "/v1/pools/host", {"policy": "arc"}),
    ("POST", "/v1/pools/host/evict", {"slots": 1}),
    ("POST", "/v1/pools/host/purge", {"all": True}),
    ("POST", "/v1/pools/host/pin", {"keys": ["00aa"]}),
    ("POST", "/v1/pools/host/unpin", {"all": True}),
    ("POST", "/v1/pools/host/retry", None),
    ("DELETE", "/v1/pools/host/blocks/{key}", None),
    ("PUT", "/v1/drain", {"mode": "all"}),
    ("DELETE", "/v1/drain", None),
    ("PUT", "/v1/bypass", {"load": True}),
    ("DELETE", "/v1/operations/{operation_id}", None),
    ("POST", "/v1/operations/{operation_id}/cancel", None),
    ("POST", "/v1/lookup", {"keys": ["00aa"]}),
    ("PATCH", "/v1/config", {"runtime": {"policy": "arc"}}),
    ("PUT", "/v1/loglevel", {"level": "info", "logger": "kvstow.api", "ttl_seconds": 60}),
    ("PUT", "/v1/namespaces/{rest:path}", None),
    ("DELETE", "/v1/namespaces/{rest:path}", None),
    ("POST", "/v1/ranks/{rank}/report", {}),
]


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("admin-token\n")
    return path


@pytest.fixture
async def guarded(launch: Any, token_file: Path, ranks: Any) -> httpx.AsyncClient:
    """A client of an application that has both tokens."""
    client: httpx.AsyncClient = await launch(token_file=token_file, agent_token="agent-token")
    return client


async def ask(client: httpx.AsyncClient, change: tuple[str, str, Any], headers: dict[str, str]) -> httpx.Response:
    method, path, body = change
    path = path.replace("{rank}", "0").replace("{operation_id}", "absent").replace("{key}", "00aa")
    return await client.request(method, path, json=body, headers=headers)


def test_the_changes_tested_here_are_all_there_are() -> None:
    routes = {
        (method, route.path.replace("{pool}", "host"))  # type: ignore[attr-defined]
        for router in ROUTERS
        for route in router.routes
        for method in route.methods - {"GET", "HEAD"}  # type: ignore[attr-defined]
    }
    assert routes == {(method, path) for method, path, _ in CHANGES}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": "Basic admin-token"},
        {"Authorization": "admin-token"},
    ],
)
async def test_a_change_without_a_good_token_is_refused(
    guarded: httpx.AsyncClient, change: tuple[str, str, Any], headers: dict[str, str]
) -> None:
    answer = await ask(guarded, change, headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.json()["code"] == "unauthorized"


@pytest.mark.parametrize("change", CHANGES)
async def test_the_admin_token_opens_every_change(guarded: httpx.AsyncClient, change: tuple[str, str, Any]) -> None:
    assert (await ask(guarded, change, ADMIN)).status_code in (200, 202, 404, 422)


@pytest.mark.parametrize("change", CHANGES)
async def test_the_agent_token_opens_only_the_report(guarded: httpx.AsyncClient, change: tuple[str, str, Any]) -> None:
    expected = 422 if change[1].endswith("/report") else 403
    assert (await ask(guarded, change, AGENT)).status_code == expected


async def test_two_authorization_headers_are_refused(guarded: httpx.AsyncClient) -> None:
    headers = [("Authorization", "Bearer admin-token"), ("Authorization", "Bearer admin-token")]
    assert (await guarded.delete("/v1/drain", headers=headers)).status_code == 401


@pytest.mark.parametrize("path", ["/livez", "/metrics", "/v1/info", "/v1/pools/host", "/v1/drain", "/openapi.json"])
async def test_reading_is_open(guarded: httpx.AsyncClient, path: str) -> None:
    assert (await guarded.get(path)).status_code == 200


@pytest.mark.parametrize("change", CHANGES)
async def test_without_a_token_file_changes_are_open(
    client: httpx.AsyncClient, ranks: Any, change: tuple[str, str, Any]
) -> None:
    assert (await ask(client, change, {})).status_code in (200, 202, 404, 422)


async def test_a_new_token_works_at_once_and_the_old_one_no_longer(
    guarded: httpx.AsyncClient, token_file: Path
) -> None:
    token_file.write_text("a-newer-token")
    assert (await guarded.delete("/v1/drain", headers=ADMIN)).status_code == 401
    newer = {"Authorization": "Bearer a-newer-token"}
    assert (await guarded.delete("/v1/drain", headers=newer)).status_code == 200


async def test_a_token_file_may_hold_the_old_and_the_new_token(guarded: httpx.AsyncClient, token_file: Path) -> None:
    token_file.write_text("a-newer-token\n\nadmin-token\n")
    for token in ("a-newer-token", "admin-token"):
        headers = {"Authorization": f"Bearer {token}"}
        assert (await guarded.delete("/v1/drain", headers=headers)).status_code == 200


@pytest.mark.parametrize("content", [None, "", " \n"])
async def test_when_the_token_file_is_lost_changes_are_refused(
    guarded: httpx.AsyncClient, token_file: Path, content: str | None
) -> None:
    if content is None:
        token_file.unlink()
    else:
        token_file.write_text(content)
    answer = await guarded.delete("/v1/drain", headers=ADMIN)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"
    assert answer.json()["retry_after"] == 5
    assert str(token_file) not in answer.text
    token_file.write_text("admin-token")
    assert (await guarded.delete("/v1/drain", headers=ADMIN)).status_code == 200


@pytest.mark.parametrize("content", [b"", b"\n", b"two words"])
def test_a_token_file_without_a_token_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="at least one"):
        TokenFile(path)


def test_a_token_file_is_read_again_only_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"one")
    tokens = TokenFile(path)
    status = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert tokens.accepts(b"one")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert not tokens.accepts(b"one")
    assert tokens.accepts(b"two")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_an_open_address_needs_a_token_file(host: str) -> None:
    with pytest.raises(ConfigError, match="not a loopback address"):
        require_token(host, None)
    require_token(host, Path("token"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", None])
def test_a_local_address_needs_none(host: str | None) -> None:
    require_token(host, None)


async def test_pages_of_other_sites_change_nothing_where_no_token_is_needed(launch: Any, ranks: Any) -> None:
    client: httpx.AsyncClient = await launch()
    refused = await client.post("/v1/pools/host/retry", headers={"Origin": "http://evil.example"})
    assert (refused.status_code, refused.headers["content-type"]) == (403, "application/problem+json")
    own = f"http://{client.base_url.netloc.decode()}"
    assert (await client.post("/v1/pools/host/retry", headers={"Origin": own})).status_code == 202
