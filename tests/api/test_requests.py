from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from tests.api.conftest import send_report

pytestmark = pytest.mark.anyio


def counted(text: str, **labels: str) -> float:
    """The request counter with these labels."""
    for line in text.splitlines():
        if line.startswith("kvstow_http_requests_total{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


async def test_a_request_id_is_generated(client: httpx.AsyncClient) -> None:
    ids = {(await client.get("/livez")).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    assert all(re.fullmatch("[0-9a-f]{16}", name) for name in ids)


@pytest.mark.parametrize(
    ("given", "echoed"),
    [("req-1.A_b", "req-1.A_b"), ('a b\t"c\x7f\xe9<script>', "abcscript"), ("x" * 100, "x" * 64)],
)
async def test_unsafe_characters_of_a_request_id_are_dropped(
    client: httpx.AsyncClient, given: str, echoed: str
) -> None:
    headers = [(b"X-Request-Id", given.encode("latin-1"))]
    assert (await client.get("/livez", headers=headers)).headers["x-request-id"] == echoed


async def test_answers_are_not_cached_or_sniffed(client: httpx.AsyncClient) -> None:
    for path in ("/livez", "/v1/info", "/absent"):
        headers = (await client.get(path)).headers
        assert (headers["cache-control"], headers["x-content-type-options"]) == ("no-store", "nosniff")


async def test_requests_are_counted_by_template(client: httpx.AsyncClient, ranks: Any) -> None:
    for path in ("/v1/ranks/0", "/v1/ranks/1", "/v1/ranks/9", "/v1/nothing", "/v1/nothing/else"):
        await client.get(path)
    await client.post("/v1/info")
    await client.request("BREW", "/v1/info")
    text = (await client.get("/metrics")).text
    assert counted(text, method="GET", route="/v1/ranks/{rank}", code="200") == 2
    assert counted(text, method="GET", route="/v1/ranks/{rank}", code="404") == 1
    assert counted(text, method="GET", route="unmatched", code="404") == 2
    assert counted(text, method="POST", code="405") == 1
    assert counted(text, method="other", code="405") == 1
    assert "BREW" not in text
    assert "nothing" not in text


async def test_a_disconnect_is_counted(launch: Any) -> None:
    entered = asyncio.Event()

    def prepare(app: FastAPI) -> None:
        @app.get("/slow")
        async def route() -> None:
            entered.set()
            await asyncio.Event().wait()

    client = await launch(prepare)
    request = asyncio.create_task(client.get("/slow"))
    await entered.wait()
    assert "kvstow_http_requests_inflight 2" in (await client.get("/metrics")).text
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    text = (await client.get("/metrics")).text
    assert counted(text, route="/slow", code="499") == 1
    assert "kvstow_http_requests_inflight 1" in text


async def test_changes_are_audited_and_reads_are_not(
    launch: Any, ranks: Any, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = await launch(token_file=token_file, caller=None)
    with caplog.at_level(logging.INFO, "kvstow.audit"):
        await client.get("/v1/drain")
        await client.put("/v1/drain")
        headers = {"Authorization": "Bearer admin-token", "X-Request-Id": "r1"}
        await client.put("/v1/drain", headers=headers)
    lines = [record.getMessage() for record in caplog.records if record.name == "kvstow.audit"]
    assert len(lines) == 2
    assert "actor=- " in lines[0]
    assert "method=PUT route=/v1/drain path=/v1/drain status=401" in lines[0]
    assert "actor=admin " in lines[1]
    assert "method=PUT route=/v1/drain path=/v1/drain status=200 request_id=r1" in lines[1]
    assert "admin-token" not in caplog.text


async def test_the_audit_log_has_the_request_and_whether_it_changed_anything(
    client: httpx.AsyncClient, ranks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    evict = "/v1/pools/host/evict"
    with caplog.at_level(logging.INFO, "kvstow.audit"):
        await client.post(evict, json={"slots": 1}, params={"wait": 20})
        await client.post(evict, json={"slots": 1, "dry_run": True})
        await client.post(evict, json={"slots": "1\n"})
        await client.post(
            evict, content=b'{"slots":' + b" " * 1000 + b"2}", headers={"Content-Type": "application/json"}
        )
        await client.post("/v1/pools/host/retry")
    lines = [record.getMessage() for record in caplog.records if record.name == "kvstow.audit"]
    tails = [line[line.index("changed=") :] for line in lines]
    assert tails[:3] == [
        'changed=yes query=wait=20 body={"slots":1}',
        'changed=no query=- body={"slots":1,"dry_run":true}',
        'changed=no query=- body={"slots":"1\\\\n"}',
    ]
    assert tails[3].endswith(" ...")
    assert len(tails[3]) < 600
    assert tails[4] == "changed=yes query=- body=-"


async def test_reports_are_audited_at_debug_level(
    client: httpx.AsyncClient, ranks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvstow.audit"):
        await send_report(client, ranks.make_report(0))
    assert not [record for record in caplog.records if record.name == "kvstow.audit"]


async def test_a_path_cannot_forge_a_line_of_the_audit_log(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvstow.audit"):
        await client.post("/v1/a%0aactor=admin%20status=200")
    (record,) = [record for record in caplog.records if record.name == "kvstow.audit"]
    assert "\n" not in record.getMessage()
    assert "actor=uid:1234" in record.getMessage()
