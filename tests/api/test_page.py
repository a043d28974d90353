"""The status page: its content, its security policy, and its stream."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.tieredhost import URL, TieredHost

from kvstow.control.engine import OffloadEngine
from kvstow.testing.fakes import FakeClock
from kvstow.tier.tierstatus import TierCounters
from kvstow_api.appstate import AppState
from kvstow_api.directory import EmbeddedDirectory
from kvstow_api.page.status import INTERVAL, SECTIONS, Content, StatusPage, polylines, read_content, size_plot

pytestmark = pytest.mark.anyio

LIMIT = 20_000


class Document(HTMLParser):
    """Tags that were opened, their attributes, and the texts between them."""

    VOID = ("meta", "link", "br", "rect", "line", "polyline")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def attributes(self, name: str) -> list[str | None]:
        return [attributes[name] for _, attributes in self.tags if name in attributes]


@pytest.fixture
async def page(launch: Any, ranks: Any) -> StatusPage:
    apps: list[Any] = []
    await launch(apps.append)
    page: StatusPage = apps[0].state.page
    return page


def sections_in(chunk: bytes) -> list[str]:
    return re.findall(r"^event: (\w+)$", chunk.decode(), re.MULTILINE)


async def test_the_page_is_one_small_document_without_external_resources(client: httpx.AsyncClient, ranks: Any) -> None:
    answer = await client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert len(answer.content) < LIMIT
    document = Document(answer.text)
    assert document.open == []
    assert document.attributes("src") == []
    assert set(document.attributes("href")) == {
        "data:,", "#content", "readyz?verbose", "v1/doctor", "v1/stats", "metrics", "openapi.json",
    }  # fmt: skip


async def test_every_link_works(client: httpx.AsyncClient) -> None:
    for href in Document((await client.get("/")).text).attributes("href"):
        if href and not href.startswith(("data:", "#")):
            assert (await client.get(f"/{href}")).status_code == 200


async def test_the_policy_allows_only_the_pages_own_style_and_script(client: httpx.AsyncClient) -> None:
    answer = await client.get("/")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    document = Document(answer.text)
    assert document.attributes("style") == []  # the policy would not let it work
    assert not [name for _, attributes in document.tags for name in attributes if name.startswith("on")]


async def test_without_scripts_the_page_refreshes(client: httpx.AsyncClient) -> None:
    assert '<noscript><meta http-equiv="refresh" content="5"></noscript>' in (await client.get("/")).text


async def test_the_page_shows_what_an_operator_looks_for_first(
    client: httpx.AsyncClient, ranks: Any, keys: list[bytes]
) -> None:
    ranks.store(keys[:3])
    ranks.begin_store(keys[3:5])
    ranks.engine.admin.evict(slots=1).run()
    text = " ".join(" ".join(Document((await client.get("/")).text).texts).split())
    told = [
        f"kvstow {socket.gethostname()} ready",
        "rank 1 ready 64 KiB node, pid 1001, cuda:1",
        "cached 2",
        "filling 2",
        "stores 1 8 KiB",
        "operator 1",
    ]
    told += ["store queued 2 blocks, 0 ms, waits for rank 0, 1", "since 20"]
    assert [words for words in told if words not in text] == []


async def test_switches_are_shown_with_the_command_that_undoes_them(
    client: httpx.AsyncClient, ranks: Any, clock: FakeClock
) -> None:
    assert "kvstow bypass" not in (await client.get("/")).text
    clock.advance(INTERVAL)
    ranks.engine.admin.set_bypass(load=True, store=False, ttl_seconds=600.0)
    ranks.engine.admin.pause_pinning(True)
    text = (await client.get("/")).text
    assert "loads are bypassed for another 10m 0s" in text
    assert "<code>kvstow bypass --off</code>" in text
    assert "<code>kvstow pinning resume</code>" in text


async def test_the_worst_conditions_are_shown_if_there_are_many(launch: Any, ranks: Any) -> None:
    checks = {f"check{number}": lambda: "it burns" for number in range(20)}
    ranks.report(pinned_slots=4, state="pinning")
    text = (await (await launch(ready_checks=checks)).get("/")).text
    assert text.count("it burns") == 12
    assert "and 9 more conditions: kvstow doctor" in text
    assert "still growing" not in text


async def test_the_bar_shows_the_whole_pool(client: httpx.AsyncClient, ranks: Any, clock: FakeClock) -> None:
    assert "not pinned" not in (await client.get("/")).text
    clock.advance(INTERVAL)
    ranks.report(pinned_slots=4, state="pinning")
    text = (await client.get("/")).text
    assert '<rect class="free" x="0" width="250" height="10"/>' in text
    assert '<rect class="not-pinned" x="250" width="750" height="10"/>' in text
    assert '<li class="not-pinned">not pinned <b>12</b></li>' in text


async def test_the_model_is_shown(launch: Any, ranks: Any) -> None:
    assert "some/model, test, version" in (await (await launch(settings={"model": "some/model"})).get("/")).text


async def test_present_figures_are_those_of_the_api(
    launch: Any, ranks: Any, keys: list[bytes], clock: FakeClock
) -> None:
    apps: list[Any] = []
    client: httpx.AsyncClient = await launch(apps.append)
    page, use = apps[0].state.page, apps[0].state.kvstow
    ranks.store(keys[:2])
    use.sampler.tick()
    ranks.engine.release_lease(ranks.engine.acquire(keys[:4]))
    ranks.engine.admin.drain("stop_stores", None)
    ranks.engine.begin_store(keys[4:8], range(4))
    use.sampler.tick()
    now = (await client.get("/v1/curves")).json()["now"]
    assert now["hit_ratio"] == 0.5
    assert now["dropped_blocks_per_second"] > 0 == now["evicted_blocks_per_second"]
    text = (await page.document()).decode()
    assert '<b class="figure">50.0 %</b>' in text
    assert re.search(r"evicted for capacity: 0\.0 blocks/s, dropped: [\d.]+ blocks/s", text)


async def test_the_latest_events_are_shown_as_text(launch: Any, ranks: Any) -> None:
    apps: list[Any] = []
    client = await launch(apps.append)
    apps[0].state.kvstow.sampler.tick()
    await client.put("/v1/bypass", json={"load": False})
    await client.post("/v1/pools/host/evict", json={"slots": 1}, params={"wait": 20})
    text = " ".join(" ".join(Document((await client.get("/")).text).texts).split())
    told = ["state ready: all slots are pinned", "rank 1 is ready", "operation evict succeeded"]
    told += ["change PUT /v1/bypass by uid:1234"]
    assert [words for words in told if words not in text] == []


async def test_events_of_the_tier_are_shown(launch: Any, engine: OffloadEngine, tiered_host: TieredHost) -> None:
    apps: list[Any] = []
    client = await launch(apps.append, directory=tiered_host.directory(16))
    number = tiered_host.begin()
    apps[0].state.kvstow.sampler.tick()
    tiered_host.change(number, state="down", reason="no master")
    apps[0].state.kvstow.sampler.tick()
    text = " ".join(" ".join(Document((await client.get("/")).text).texts).split())
    assert "tier of a1 is on" in text
    assert "tier of a1 is down: no master" in text


async def test_failures_are_shown(launch: Any, ranks: Any) -> None:
    ranks.engine.report(ranks.make_report(1, state="degraded", error_reason="memlock", error="no more memory"))
    text = (await (await launch()).get("/")).text
    assert '<li class="error"><b>error</b> rank 1 stopped pinning at 64 KiB of 64 KiB: no more memory' in text


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</style>&amp;"])
async def test_values_are_escaped(launch: Any, ranks: Any, hostile: str) -> None:
    ranks.engine.report(ranks.make_report(1, state="degraded", error_reason=hostile, error=hostile))
    ranks.engine.report(ranks.make_report(0, boot_id=hostile))
    client = await launch(version=hostile, mode=hostile)
    await client.put("/v1/bypass", json={"load": False}, headers={"x-request-id": hostile})
    text = (await client.get("/")).text
    assert hostile not in text
    plain = (await (await launch()).get("/")).text
    assert {tag for tag, _ in Document(text).tags} == {tag for tag, _ in Document(plain).tags}


async def test_the_page_needs_the_credentials_of_reads(launch: Any, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("a")
    (tmp_path / "viewer").write_text("v")
    client = await launch(token_file=tmp_path / "admin", viewer_token_file=tmp_path / "viewer", caller=None)
    assert (await client.get("/")).status_code == 401
    assert (await client.get("/page/live")).status_code == 401
    assert (await client.get("/", headers={"Authorization": "Bearer v"})).status_code == 200


async def test_many_ranks_do_not_make_the_page_long(launch: Any) -> None:
    from kvstow.config import EngineConfig
    from kvstow.control.engine import OffloadEngine

    engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=16, num_ranks=64))
    answer = await (await launch(directory=EmbeddedDirectory(engine, 4))).get("/")
    assert "and 48 more ranks" in answer.text
    assert len(answer.content) < LIMIT


async def test_the_stream_sends_all_sections_and_then_those_that_change(
    page: StatusPage, ranks: Any, clock: FakeClock
) -> None:
    stream = page.open(poll=0.0)
    assert (await anext(stream)).startswith(b"retry: ")
    assert sections_in(await anext(stream)) == list(SECTIONS)
    ranks.engine.admin.drain("all", None)
    clock.advance(INTERVAL)
    chunk = await anext(stream)
    assert "state" in sections_in(chunk)
    assert b' <span class="pill draining">draining</span></h1>\n' in chunk
    assert "memory" not in sections_in(chunk)
    await stream.aclose()  # type: ignore[attr-defined]


async def test_a_stream_without_changes_sends_comments(
    page: StatusPage, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstow_api.page.status.SILENT_SECONDS", 2.0)  # before a silent rank is news
    stream = page.open(poll=0.0)
    for _ in range(2):
        await anext(stream)
    clock.advance(2.0)  # time alone is no news
    assert (await anext(stream)).startswith(b":")
    await stream.aclose()  # type: ignore[attr-defined]


async def test_all_viewers_share_one_rendering_a_second(
    page: StatusPage, ranks: Any, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Content] = []

    def counted(app: AppState, asked: str | None) -> Content:
        reads.append(read_content(app, asked))
        return reads[-1]

    monkeypatch.setattr("kvstow_api.page.status.read_content", counted)
    streams = [page.open(poll=0.0) for _ in range(20)]
    for stream in streams:
        await anext(stream)
    first = [await anext(stream) for stream in streams]
    assert {chunk == first[0] for chunk in first} == {True}
    await page.document()
    assert len(reads) == 1
    ranks.engine.admin.drain("all", None)
    clock.advance(INTERVAL)
    changed = [await anext(stream) for stream in streams]
    assert all(b"draining" in chunk for chunk in changed)
    assert b"draining" in await page.document()
    assert len(reads) == 2
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]


async def test_an_unchanged_page_is_not_encoded_again(page: StatusPage, ranks: Any, clock: FakeClock) -> None:
    document = await page.document()
    clock.advance(INTERVAL)
    assert await page.document() is document


async def test_a_late_viewer_gets_all_sections_as_they_are_now(page: StatusPage, ranks: Any, clock: FakeClock) -> None:
    await page.document()
    ranks.engine.admin.drain("all", None)
    clock.advance(INTERVAL)
    await page.document()
    late = page.open(poll=0.0)
    await anext(late)
    chunk = await anext(late)
    assert sections_in(chunk) == list(SECTIONS)
    assert b"draining" in chunk
    await late.aclose()  # type: ignore[attr-defined]


def test_a_curve_has_a_polyline_for_each_run_without_a_gap() -> None:
    def drawn(*points: float | None) -> tuple[str, ...]:
        return polylines(points, 4, 1.0)

    assert drawn(0.0, 1.0, None, 0.5) == ("0,46.0 100,2.0", "300,24.0 301,24.0")
    assert drawn(1.0) == ("300,2.0 301,2.0",)
    assert drawn(None, None) == ()
    assert drawn() == ()


async def test_the_page_shows_the_fleet_tier(
    launch: Any, engine: OffloadEngine, tiered_host: TieredHost, clock: FakeClock, ranks: Any
) -> None:
    client = await launch(directory=tiered_host.directory(16))

    async def text() -> str:
        clock.advance(INTERVAL)
        document = Document((await client.get("/")).text)
        assert document.open == []
        return " ".join(" ".join(document.texts).split())

    assert f"Store below the pools no engine uses it {URL}" in await text()
    number = tiered_host.begin()
    tiered_host.change(number, counters=TierCounters(read_blocks=4321))
    shown = await text()
    assert "Store below the pools namespace state reading" in shown
    assert "a1 on" in shown
    assert "4,321" in shown
    assert URL in shown
    tiered_host.change(number, state="down", reason="no answer in 0.5 s")
    shown = await text()
    assert "a1 down" in shown
    assert "no answer in 0.5 s" in shown


def test_sizes_are_in_the_middle_of_columns_that_are_equally_wide() -> None:
    plot = size_plot([0.0, 0.25, 0.5], 0.5)
    assert plot.spots == (("50.0", "46.0"), ("150.0", "24.0"), ("250.0", "2.0"))
    assert plot.line == "50.0,46.0 150.0,24.0 250.0,2.0"
    assert size_plot([], 0.5).spots == ()
