"""The status page of a node: rows of pools and sessions, and a page of each pool."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.api.fakenode import FakeNode
from tests.api.node.conftest import KEYS, get
from tests.api.test_page import Document

from kvstow.testing.fakes import FakeClock
from kvstow_api.page.status import INTERVAL, StatusPage

pytestmark = pytest.mark.anyio


@pytest.fixture
async def apps() -> list[Any]:
    return []


@pytest.fixture
async def client(launch: Any, node: FakeNode, apps: list[Any]) -> httpx.AsyncClient:
    started: httpx.AsyncClient = await launch(apps.append, directory=node)
    return started


@pytest.fixture
def page(client: httpx.AsyncClient, apps: list[Any]) -> StatusPage:
    found: StatusPage = apps[0].state.page
    return found


def text_of(html: str) -> str:
    return " ".join(" ".join(Document(html).texts).split())


async def test_the_page_shows_pools_and_engines(client: httpx.AsyncClient, node: FakeNode, pools: list[str]) -> None:
    text = await get(client, "/")
    for name in pools:
        assert name in text
    for engine in node.engines:
        assert engine.session_id in text
    section = text.partition('<section id="pools">')[2].partition("</section>")[0]
    assert ("no engine has attached yet" in section) == (not pools)
    assert ("Hit ratio" in text) == (len(pools) == 1), "figures are of one pool"


async def test_every_pool_and_every_session_has_a_row(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.attach("a-1").store(KEYS)
    node.attach("a-1").begin_store([b"\x00\x09"])
    node.attach("b-2", reports=False)
    document = Document((await client.get("/")).text)
    assert document.open == []
    text = " ".join(" ".join(document.texts).split())
    told = ["a-1 ready 128 KiB", "b-2 ready 128 KiB", "s1 attached 0 - 0 a-1 - - fake", "s2 attached 1 0 ms 0 a-1"]
    told += ["s3 attaching 0 - 0 b-2", "is not attached yet: not all ranks have reported"]
    assert [words for words in told if words not in text] == []
    links = [href for href in document.attributes("href") if href and href.startswith("?")]
    assert links == ["?pool=a-1", "?pool=b-2"]
    assert "Hit ratio" not in text


async def test_a_chosen_pool_narrows_everything_below_the_pools(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.attach("a-1").store(KEYS)
    node.attach("b-2").begin_store(KEYS[:2])
    document = Document((await client.get("/", params={"pool": "b-2"})).text)
    text = " ".join(" ".join(document.texts).split())
    told = ["a-1 ready", "b-2 ready", "Sessions of pool b-2", "s2 attached", "Ranks of pool b-2", "filling 2"]
    assert [words for words in told if words not in text] == []
    assert "s1 attached" not in text
    assert document.attributes("aria-current") == ["true"]
    assert "?" in document.attributes("href"), "a link back to all pools"


async def test_the_only_pool_needs_no_choice(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.attach("a-1").store(KEYS)
    document = Document((await client.get("/")).text)
    assert not [href for href in document.attributes("href") if href and href.startswith("?")]
    assert "cached 4" in " ".join(" ".join(document.texts).split())


async def test_an_embedded_engine_has_a_row_for_its_pool_and_one_for_itself(launch: Any, ranks: Any) -> None:
    text = text_of((await (await launch()).get("/")).text)
    assert "host ready 128 KiB" in text
    assert "attached 0 - 0" in text
    assert "rank 1 ready 64 KiB" in text


async def test_a_name_that_no_pool_has_is_said(client: httpx.AsyncClient, node: FakeNode) -> None:
    node.attach("a-1")
    text = text_of((await client.get("/", params={"pool": "gone"})).text)
    assert "there is no pool of the name that you have chosen" in text
    assert "a-1 ready" in text


async def test_names_that_no_pool_has_cost_no_memory(page: StatusPage, node: FakeNode) -> None:
    node.attach("a-1")
    for number in range(20):
        await page.document(f"unknown-{number}")
    for name in (None, "a-1"):
        await page.document(name)
    assert len(page._views) == 3


async def test_viewers_of_the_same_pool_share_a_page(page: StatusPage, node: FakeNode) -> None:
    node.attach("a-1")
    node.attach("b-2")
    assert await page.document("a-1") is await page.document("a-1")
    assert await page.document("a-1") != await page.document("b-2")


async def test_the_stream_of_a_pool_goes_on_when_the_pool_is_gone(
    page: StatusPage, node: FakeNode, clock: FakeClock
) -> None:
    engine = node.attach("b-2")
    node.attach("a-1")
    stream = page.open("b-2", poll=0.0)
    await anext(stream)
    assert b"Sessions of pool b-2" in await anext(stream)
    node.end(engine)
    node.delete_pool("b-2")
    clock.advance(INTERVAL)
    gone = await anext(stream)
    assert b"there is no pool of the name that you have chosen" in gone
    assert b"event: events" in gone, "all sections are new"
    assert b"b-2" not in gone
    await stream.aclose()  # type: ignore[attr-defined]


async def test_events_are_those_of_the_pool_and_of_the_node(
    client: httpx.AsyncClient, node: FakeNode, apps: list[Any]
) -> None:
    node.attach("a-1")
    node.attach("b-2")
    apps[0].state.kvstow.sampler.tick()
    text = text_of((await client.get("/", params={"pool": "b-2"})).text)
    events = text[text.index("Latest events") :]
    assert "state b-2: ready" in events
    assert "state ready: no engine has attached yet" in events
    assert "a-1" not in events


async def test_many_sessions_do_not_make_the_page_long(client: httpx.AsyncClient, node: FakeNode) -> None:
    engines = [node.attach("a-1") for _ in range(200)]
    engines[150].control.lose("it ended")
    answer = await client.get("/")
    text = text_of(answer.text)
    assert "and 168 more sessions" in text
    assert "s151 lost" in text, "trouble comes before others"
    assert len(answer.content) < 40_000


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a&b=c d"])
async def test_names_are_escaped(client: httpx.AsyncClient, node: FakeNode, hostile: str) -> None:
    node.attach(hostile)
    node.attach("b-2")
    html = (await client.get("/")).text
    assert "<script>alert" not in html
    assert "<img" not in html
    (link, _) = [href for href in Document(html).attributes("href") if href and href.startswith("?")]
    assert "Sessions of pool" in (await client.get(f"/{link}")).text
