from __future__ import annotations

import asyncio
import base64
import os
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.conftest import AGENT, AGENT_TOKEN, CALLER_UID, send_report

from kvstow.attach.peer import overflow_uid
from kvstow.errors import ConfigError
from kvstow_api import auth
from kvstow_api.hostsettings import TokenFile, require_token
from kvstow_api.routes import ROUTERS

pytestmark = pytest.mark.anyio

ADMIN = {"Authorization": "Bearer admin-token"}
VIEWER = {"Authorization": "Bearer viewer-token"}

ADDRESSES = ("http://127.0.0.1:9595", "unix:/run/kvstow-admin/admin.sock")

REPORT: tuple[str, str, Any] = ("POST", "/v1/ranks/{rank}/report", {})
CHANGES: list[tuple[str, str, Any]] = [
    ("PATCH", "/v1/pools/host", {"policy": "lru"}),
    ("POST", "/v1/pools/host/evict", {"slots": 1}),
    ("POST", "/v1/pools/host/purge", {"all": True}),
    ("POST", "/v1/pools/host/retry", None),
    ("POST", "/v1/pools/host/trace", {"seconds": 0.001}),
    ("DELETE", "/v1/pools/host/blocks/{key}", None),
    ("DELETE", "/v1/pools/host", None),
    ("PATCH", "/v1/contexts/{context}", {"resume_in_seconds": 5}),
    ("DELETE", "/v1/contexts/{context}", None),
    ("POST", "/v1/contexts/{context}/prefetch", None),
    ("DELETE", "/v1/sessions/{session_id}", None),
    ("PUT", "/v1/drain", {"mode": "all"}),
    ("DELETE", "/v1/drain", None),
    ("PUT", "/v1/bypass", {"load": True}),
    ("DELETE", "/v1/operations/{operation_id}", None),
    ("POST", "/v1/operations/{operation_id}/cancel", None),
    ("PUT", "/v1/loglevel", {"level": "info", "logger": "kvstow.api"}),
    REPORT,
]
KNOWN = {"{rank}": "0", "{operation_id}": "absent", "{key}": "00aa", "{pool}": "host", "{session_id}": "absent"}
KNOWN["{context}"] = "00" * 16
OPEN = ("/livez", "/readyz", "/health", "/healthz", "/startupz", "/metrics")
STREAMS = ("/v1/events",)
FOR_ADMINS = "/v1/contexts/{context}"
READING = [
    ("GET", route.path, None)  # type: ignore[attr-defined]
    for router in ROUTERS
    for route in router.routes
    if "GET" in route.methods and not route.path.startswith(OPEN)  # type: ignore[attr-defined]
    if route.path not in (*STREAMS, FOR_ADMINS)  # type: ignore[attr-defined]
] + [("POST", "/v1/lookup", {"keys": ["00aa"]})]
REFUSED = [
    {},
    {"Authorization": "Bearer wrong"},
    {"Authorization": "Bearer "},
    {"Authorization": "Basic admin-token"},
    {"Authorization": "admin-token"},
]


def basic(credentials: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(credentials.encode()).decode()}"}


@pytest.fixture
async def guarded(launch: Any, token_file: Path, ranks: Any) -> httpx.AsyncClient:
    """A client, over TCP, of an application that has an admin's and an agent's token."""
    client: httpx.AsyncClient = await launch(token_file=token_file, caller=None, addresses=ADDRESSES)
    return client


@pytest.fixture
async def private(launch: Any, token_file: Path, viewer_file: Path, ranks: Any) -> httpx.AsyncClient:
    """As `guarded`, with a viewer's token."""
    files = {"token_file": token_file, "viewer_token_file": viewer_file}
    client: httpx.AsyncClient = await launch(**files, caller=None)
    return client


async def ask(client: httpx.AsyncClient, change: tuple[str, str, Any], headers: dict[str, str]) -> httpx.Response:
    method, path, body = change
    for name, given in KNOWN.items():
        path = path.replace(name, given)
    return await client.request(method, path, json=body, headers=headers)


def test_every_route_is_open_read_or_a_change() -> None:
    """Of those that are read, streams are not walked: test_streamlimit.py and test_events.py open them."""
    routes = {
        (method, route.path.replace("{pool}", "host") if method != "GET" else route.path)  # type: ignore[attr-defined]
        for router in ROUTERS
        for route in router.routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
        if not (method == "GET" and route.path.startswith(OPEN))  # type: ignore[attr-defined]
    }
    classes = {route[:2] for route in [*READING, *CHANGES]}
    assert routes - classes == {("GET", path) for path in (*STREAMS, FOR_ADMINS)}
    assert classes <= routes


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_needs_the_same_token_as_other_reads(private: httpx.AsyncClient, path: str) -> None:
    for headers, status in [({}, 401), (AGENT, 403)]:
        assert (await private.get(path, headers=headers)).status_code == status


async def statuses(
    client: httpx.AsyncClient, routes: list[tuple[str, str, Any]], headers: dict[str, str]
) -> dict[tuple[str, str], int]:
    """What each of `routes` answers."""
    return {route[:2]: (await ask(client, route, headers)).status_code for route in routes}


def all_are(status: int, routes: list[tuple[str, str, Any]]) -> dict[tuple[str, str], int]:
    return {route[:2]: status for route in routes}


def refused(found: dict[tuple[str, str], int], allowed: tuple[int, ...]) -> dict[tuple[str, str], int]:
    return {route: status for route, status in found.items() if status not in allowed}


@pytest.mark.parametrize("headers", REFUSED)
async def test_a_change_without_a_valid_token_is_refused(guarded: httpx.AsyncClient, headers: dict[str, str]) -> None:
    for change in CHANGES:
        answer = await ask(guarded, change, headers)
        assert answer.status_code == 401, change
        assert answer.headers["www-authenticate"].startswith("Bearer"), change
        assert answer.json()["code"] == "unauthorized", change
        assert (ADDRESSES[1] in answer.json()["detail"]) is (change is not REPORT), change


async def test_the_admin_token_allows_every_change(guarded: httpx.AsyncClient) -> None:
    assert refused(await statuses(guarded, CHANGES, ADMIN), (200, 202, 404, 409, 415, 422)) == {}


async def test_the_agent_token_allows_only_the_report(guarded: httpx.AsyncClient) -> None:
    expected = all_are(403, CHANGES) | {REPORT[:2]: 415}
    assert await statuses(guarded, CHANGES, AGENT) == expected


async def test_two_authorization_headers_are_refused(guarded: httpx.AsyncClient) -> None:
    headers = [("Authorization", "Bearer admin-token"), ("Authorization", "Bearer admin-token")]
    assert (await guarded.delete("/v1/drain", headers=headers)).status_code == 401


@pytest.mark.parametrize("headers", REFUSED)
async def test_with_viewer_tokens_configured_reading_needs_a_token(
    private: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    assert await statuses(private, READING, headers) == all_are(401, READING)


@pytest.mark.parametrize("headers", [VIEWER, ADMIN])
async def test_viewers_and_admins_read(private: httpx.AsyncClient, headers: dict[str, str]) -> None:
    assert refused(await statuses(private, READING, headers), (200, 404)) == {}


async def test_the_agent_token_does_not_allow_guarded_reads(private: httpx.AsyncClient) -> None:
    assert await statuses(private, READING, AGENT) == all_are(403, READING)


@pytest.mark.parametrize("token", ["viewer-token", "admin-token"])
async def test_a_browser_reads_with_a_token_as_password(private: httpx.AsyncClient, token: str) -> None:
    for read in READING:
        asked = await ask(private, read, {})
        assert 'Basic realm="kvstow"' in asked.headers["www-authenticate"], read
    assert refused(await statuses(private, READING, basic(f"anybody:{token}")), (200, 404)) == {}


@pytest.mark.parametrize("given", ["viewer-token", "viewer-token:", ":", "anybody:wrong"])
async def test_a_wrong_password_is_refused(private: httpx.AsyncClient, given: str) -> None:
    assert (await private.get("/v1/info", headers=basic(given))).status_code == 401


async def test_a_password_does_not_allow_changes(guarded: httpx.AsyncClient) -> None:
    for change in CHANGES:
        answer = await ask(guarded, change, basic("anybody:admin-token"))
        assert answer.status_code == 401, change
        assert "Basic" not in answer.headers["www-authenticate"], change


async def test_a_viewer_token_does_not_allow_changes(private: httpx.AsyncClient) -> None:
    for change in CHANGES:
        answer = await ask(private, change, VIEWER)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), change


async def test_a_viewer_token_is_unknown_without_a_viewer_token_file(guarded: httpx.AsyncClient) -> None:
    assert await statuses(guarded, CHANGES, VIEWER) == all_are(401, CHANGES)


@pytest.mark.parametrize("path", [*OPEN, "/livez/server"])
async def test_probes_and_metrics_stay_open(private: httpx.AsyncClient, path: str) -> None:
    assert (await private.get(path)).status_code == 200


async def test_a_path_that_only_looks_like_a_probe_is_guarded(private: httpx.AsyncClient) -> None:
    for path in ("/livez/../v1/pools", "/metrics/v1", "/livez/server/v1", "//v1/pools"):
        assert (await private.get(path)).status_code in (401, 404), path
    assert (await private.get("/metrics/v1")).status_code == 401


async def test_viewer_tokens_are_reloaded_when_their_file_changes(
    private: httpx.AsyncClient, viewer_file: Path
) -> None:
    viewer_file.write_text("another-viewer")
    assert (await private.get("/v1/info", headers=VIEWER)).status_code == 401
    assert (await private.get("/v1/info", headers={"Authorization": "Bearer another-viewer"})).status_code == 200
    viewer_file.unlink()
    assert (await private.get("/v1/info", headers=VIEWER)).status_code == 503
    assert (await private.get("/v1/info", headers=ADMIN)).status_code == 200
    assert (await private.get("/readyz")).status_code == 200


async def test_a_viewer_is_let_in_while_the_file_of_the_admins_is_empty(
    private: httpx.AsyncClient, token_file: Path
) -> None:
    token_file.write_text("")
    assert (await private.get("/v1/info", headers=VIEWER)).status_code == 200
    assert (await private.get("/v1/info", headers=ADMIN)).status_code == 503


async def test_a_verified_certificate_counts_as_an_admin(launch: Any, ranks: Any) -> None:
    async def with_certificate(app: Any, scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"state": {"client_certificate": "ops"}}, receive, send)

    client: httpx.AsyncClient = await launch(client_certificates=True, caller=None)
    assert (await client.delete("/v1/drain")).status_code == 401
    transport = httpx.ASGITransport(partial(with_certificate, launch.app))
    async with httpx.AsyncClient(transport=transport, base_url="http://kvstow") as known:
        assert (await known.delete("/v1/drain")).status_code == 200
        elsewhere = {"Origin": "http://evil.example"}  # whose pages a browser would send the certificate with
        assert (await known.delete("/v1/drain", headers=elsewhere)).status_code == 403
    entries, _ = launch.state.journal.after(0)
    assert [entry.data["actor"] for entry in entries if entry.type == "change"] == ["certificate:ops"]


async def test_certificates_count_only_if_configured(launch: Any, ranks: Any, token_file: Path) -> None:
    await launch(token_file=token_file)

    async def forged(scope: Any, receive: Any, send: Any) -> None:
        await launch.app(scope | {"state": {"client_certificate": "ops"}}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(forged), base_url="http://kvstow") as client:
        assert (await client.delete("/v1/drain")).status_code == 401


@pytest.mark.parametrize("path", ["/livez", "/metrics", "/v1/info", "/v1/pools/host", "/v1/drain", "/openapi.json"])
async def test_reading_is_open(guarded: httpx.AsyncClient, path: str) -> None:
    assert (await guarded.get(path)).status_code == 200


KEYS = re.compile(r"/v1/pools/\{pool\}/blocks(/\{key\})?|/v1/lookup")
READING_KEYS = [read for read in READING if KEYS.fullmatch(read[1])]
READING_WITHOUT_KEYS = [read for read in READING if read not in READING_KEYS]


async def test_keys_are_shown_to_viewers_and_admins_alone(
    launch: Any, ranks: Any, keys: list[bytes], token_file: Path
) -> None:
    """A key is a hash of a prompt: keys tell what others ask, and a look-up tests a guess."""
    ranks.store(keys[:4])
    client: httpx.AsyncClient = await launch(caller=None, addresses=ADDRESSES, token_file=token_file)
    assert len(READING_KEYS) == 3
    assert await statuses(client, READING_KEYS, {}) == all_are(401, READING_KEYS)
    assert refused(await statuses(client, READING_KEYS, ADMIN), (200, 404)) == {}
    for types in ("stored", "state,removed"):
        answer = await client.get(f"/v1/events?types={types}")
        assert answer.status_code == 401
        assert ADDRESSES[1] in answer.json()["detail"]


CHANGES_OF_PEOPLE = [change for change in CHANGES if change is not REPORT]


@pytest.mark.parametrize("headers", [{}, ADMIN, basic("anybody:admin-token")])
async def test_over_tcp_a_server_without_a_credential_only_reads(
    launch: Any, ranks: Any, keys: list[bytes], headers: dict[str, str]
) -> None:
    ranks.store(keys[:4])
    client: httpx.AsyncClient = await launch(caller=None, addresses=ADDRESSES)
    assert refused(await statuses(client, READING_WITHOUT_KEYS, headers), (200, 404)) == {}
    assert await statuses(client, READING_KEYS, headers) == all_are(403, READING_KEYS)
    for change in CHANGES_OF_PEOPLE:
        answer = await ask(client, change, headers)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), change
        assert ADDRESSES[1] in answer.json()["detail"], change
    assert all(ranks.engine.contains(keys[:4]))


async def test_a_server_without_a_socket_says_so(launch: Any, ranks: Any) -> None:
    client: httpx.AsyncClient = await launch(caller=None, addresses=ADDRESSES[:1])
    assert "the server has no Unix socket; its log says why" in (await client.delete("/v1/drain")).json()["detail"]


@pytest.mark.parametrize("has_tokens", [False, True])
async def test_the_caller_of_the_socket_makes_every_change(
    launch: Any, ranks: Any, token_file: Path, viewer_file: Path, has_tokens: bool
) -> None:
    """Even with a token file that is gone: nothing but the kernel says who it is."""
    files = {"token_file": token_file, "viewer_token_file": viewer_file} if has_tokens else {}
    client: httpx.AsyncClient = await launch(**files)
    token_file.unlink()
    for headers in ({}, VIEWER, ADMIN):
        assert refused(await statuses(client, CHANGES_OF_PEOPLE, headers), (200, 202, 404, 409, 422)) == {}
    entries, _ = launch.state.journal.after(0)
    assert {entry.data["actor"] for entry in entries if entry.type == "change"} == {f"uid:{CALLER_UID}"}


async def test_the_overflow_uid_is_nobodys(launch: Any, ranks: Any) -> None:
    """All users whom the kernel cannot name here have this number, also where the server's user has it, too."""
    client: httpx.AsyncClient = await launch(caller=overflow_uid(), addresses=ADDRESSES)
    assert set((await statuses(client, CHANGES_OF_PEOPLE, {})).values()) == {403}
    assert (await client.get("/v1/pools/host")).status_code == 200
    assert f"uid {overflow_uid()} is the kernel's overflow uid" in (await client.delete("/v1/drain")).json()["detail"]


@pytest.mark.parametrize("headers", REFUSED)
@pytest.mark.parametrize("agent_token", [AGENT_TOKEN, None])
async def test_a_report_needs_a_credential_where_changes_need_none(
    launch: Any, ranks: Any, keys: list[bytes], agent_token: str | None, headers: dict[str, str]
) -> None:
    ranks.store(keys[:4])
    client: httpx.AsyncClient = await launch(agent_token=agent_token)
    answer = await send_report(client, ranks.make_report(0, boot_id="forged"), headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
    assert ranks.engine.readiness().ranks[0].boot_id == "boot-0"
    assert all(ranks.engine.contains(keys[:4]))


async def test_a_replaced_token_works_immediately_and_the_old_one_no_longer(
    guarded: httpx.AsyncClient, token_file: Path
) -> None:
    token_file.write_text("a-newer-token")
    assert (await guarded.delete("/v1/drain", headers=ADMIN)).status_code == 401
    newer = {"Authorization": "Bearer a-newer-token"}
    assert (await guarded.delete("/v1/drain", headers=newer)).status_code == 200


async def test_a_token_file_may_have_the_old_and_the_new_token(guarded: httpx.AsyncClient, token_file: Path) -> None:
    token_file.write_text("a-newer-token\n\nadmin-token\n")
    for token in ("a-newer-token", "admin-token"):
        headers = {"Authorization": f"Bearer {token}"}
        assert (await guarded.delete("/v1/drain", headers=headers)).status_code == 200


@pytest.mark.parametrize("content", [None, "", " \n"])
async def test_changes_are_refused_while_the_token_file_is_missing(
    guarded: httpx.AsyncClient, token_file: Path, content: str | None
) -> None:
    if content is None:
        token_file.unlink()
    else:
        token_file.write_text(content)
    answer = await guarded.delete("/v1/drain", headers=ADMIN)
    assert answer.status_code == 503
    assert "retry-after" not in answer.headers, "nobody knows when it will be mended"
    assert "token_file (" in answer.json()["detail"]
    assert "an operator has to mend the file" in answer.json()["detail"]
    assert str(token_file) not in answer.text
    token_file.write_text("admin-token")
    assert (await guarded.delete("/v1/drain", headers=ADMIN)).status_code == 200


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"token\n" * 101])
def test_a_token_file_has_a_hundred_tokens_at_most_and_one_at_least(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="1 to 100 lines"):
        TokenFile(path)
    path.write_bytes(b"token\n" * 100)
    assert TokenFile(path).accepts(b"token")


def test_a_token_file_is_reloaded_only_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"one")
    tokens = TokenFile(path)
    status = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    tokens.renew()
    assert tokens.accepts(b"one")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    tokens.renew()
    assert not tokens.accepts(b"one")
    assert tokens.accepts(b"two")


async def test_a_missing_token_file_is_logged_once_a_minute(
    guarded: httpx.AsyncClient, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody may send a token."""
    token_file.unlink()
    for _ in range(5):
        await guarded.delete("/v1/drain", headers={"Authorization": "Bearer guess"})
    (line,) = (record for record in caplog.records if record.name == "kvstow.api")
    assert "a token file is not usable: token_file" in line.getMessage()


def make_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 500 << 20)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "not a regular file"),
        (make_huge, "larger than 1048576 bytes"),
        (Path.mkdir, "not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    ],
)
async def test_pipes_and_devices_as_token_files_are_refused_without_blocking(
    guarded: httpx.AsyncClient, token_file: Path, make: Any, reason: str
) -> None:
    token_file.unlink()
    make(token_file)
    with pytest.raises(ConfigError, match=reason):
        TokenFile(token_file)
    assert (await guarded.delete("/v1/drain", headers=ADMIN)).status_code == 503


async def test_a_slow_file_system_does_not_delay_other_requests(
    guarded: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it take more than one thread, however many tokens are shown."""
    looks: list[TokenFile] = []
    release = threading.Event()

    def hang(self: TokenFile) -> None:
        looks.append(self)
        assert release.wait(30.0)

    monkeypatch.setattr(TokenFile, "renew", hang)
    waiting = [asyncio.create_task(guarded.delete("/v1/drain", headers=ADMIN)) for _ in range(50)]
    try:
        assert (await guarded.get("/livez")).status_code == 200
        report = await send_report(guarded, b"none")
        assert report.status_code == 422, "the agent's token is in no file"
        assert not any(task.done() for task in waiting)
    finally:
        release.set()
    assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
    assert 1 <= len(looks) <= 2, "one for all callers, and one of the watch over the host"


async def test_a_file_system_that_hangs_leaves_the_tokens_as_they_were(
    guarded: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "_MAX_RENEWAL_SECONDS", 0.01)
    release = threading.Event()
    monkeypatch.setattr(TokenFile, "renew", lambda self: release.wait(30.0))
    try:
        assert (await guarded.delete("/v1/drain", headers=ADMIN)).status_code == 200
        assert (await guarded.delete("/v1/drain", headers=VIEWER)).status_code == 401
    finally:
        release.set()


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (0o600, None),
        (0o440, None),  # as Kubernetes hands a Secret to a container that does not run as root
        (0o644, "other users may read it (mode 0644)"),
        (0o620, "other users may change it (mode 0620)"),
        (0o606, "other users may read and change it (mode 0606)"),
    ],
)
async def test_a_token_file_that_others_may_use_is_reported(
    launch: Any, token_file: Path, ranks: Any, caplog: pytest.LogCaptureFixture, mode: int, words: str | None
) -> None:
    """At the start, and by the doctor as it is now; the path stays in the log."""
    token_file.chmod(mode)
    client: httpx.AsyncClient = await launch(token_file=token_file)
    told = [] if words is None else [f"token_file: {words}"]
    assert [record.message for record in caplog.records] == [line.replace(":", f" {token_file}:") for line in told]
    conditions = (await client.get("/v1/doctor")).json()["conditions"]
    assert [one["what"] for one in conditions if one["name"] == "token_files"] == told
    token_file.chmod(0o600)
    await client.delete("/v1/drain", headers=ADMIN)
    conditions = (await client.get("/v1/doctor")).json()["conditions"]
    assert "token_files" not in [one["name"] for one in conditions]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_an_open_address_needs_a_token_file(host: str) -> None:
    with pytest.raises(ConfigError, match="is reachable from other machines"):
        require_token(host, None)
    require_token(host, Path("token"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", None])
def test_a_local_address_needs_none(host: str | None) -> None:
    require_token(host, None)


@pytest.mark.parametrize("given", [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://[::1"}])
async def test_pages_of_other_sites_cannot_make_changes_without_a_token(
    launch: Any, ranks: Any, given: dict[str, str]
) -> None:
    client: httpx.AsyncClient = await launch()
    refused = await client.post("/v1/pools/host/retry", headers=given)
    assert (refused.status_code, refused.headers["content-type"]) == (403, "application/problem+json")
    for own in ("localhost:9595", "127.0.0.1:9595", "[::1]:9595"):
        headers = {"Origin": f"http://{own}", "Host": own}
        assert (await client.post("/v1/pools/host/retry", headers=headers)).status_code == 202


@pytest.mark.parametrize("site", ["cross-site", "same-site", "something-new"])
async def test_requests_marked_as_cross_site_are_refused(launch: Any, ranks: Any, site: str) -> None:
    """Also where the browser sends no Origin, and also reads: each stream that a page opens occupies a place."""
    client: httpx.AsyncClient = await launch()
    refused = await client.post("/v1/pools/host/retry", headers={"Sec-Fetch-Site": site})
    assert refused.status_code == 403
    for own in ("same-origin", "none"):
        assert (await client.post("/v1/pools/host/retry", headers={"Sec-Fetch-Site": own})).status_code == 202
        assert (await client.get("/v1/info", headers={"Sec-Fetch-Site": own})).status_code == 200
    for path in ("/v1/info", "/v1/events", "/v1/overview", "/"):
        assert (await client.get(path, headers={"Sec-Fetch-Site": site})).status_code == 403
        frame = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
        assert (await client.get(path, headers=frame)).status_code == 403
    link = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert (await client.get("/", headers=link)).status_code == 200
    assert (await client.post("/v1/pools/host/retry", headers=link)).status_code == 403


async def test_each_challenge_has_a_line_of_its_own_and_basic_is_first(private: httpx.AsyncClient) -> None:
    """Chromium asks for a password only if the first challenge of a line is one that it knows."""
    answer = await private.get("/")
    assert answer.headers.get_list("www-authenticate") == ['Basic realm="kvstow"', 'Bearer realm="kvstow"']
