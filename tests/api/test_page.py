"""The status page: a static document, its security policy, and the licence of what is in it."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.anyio

LIMIT = 100_000
UPLOT = {
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""The files of uPlot 1.6.32 as npm has them, and their SHA-256."""


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


async def test_the_page_is_one_document_without_external_resources(client: httpx.AsyncClient, ranks: Any) -> None:
    answer = await client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert len(answer.content) < LIMIT
    document = Document(answer.text)
    assert document.open == []
    assert document.attributes("src") == []
    assert set(document.attributes("href")) == {
        "data:,", "#content", "readyz?verbose", "v1/doctor", "v1/overview", "metrics", "docs",
    }  # fmt: skip


async def test_the_page_is_static(client: httpx.AsyncClient, ranks: Any, keys: list[bytes]) -> None:
    first = await client.get("/")
    ranks.store(keys[:3])
    assert (await client.get("/", params={"pool": "gone"})).content == first.content


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


def test_the_chart_library_is_the_one_that_npm_has_with_its_licence() -> None:
    folder = files("kvstow_api.page") / "uplot"
    found = {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in folder.iterdir()}
    assert found == UPLOT


async def test_the_page_needs_the_credentials_of_reads(launch: Any, token_file: Path, viewer_file: Path) -> None:
    client = await launch(token_file=token_file, viewer_token_file=viewer_file, caller=None)
    for path in ("/", "/docs", "/v1/overview"):
        assert (await client.get(path)).status_code == 401
        assert (await client.get(path, headers={"Authorization": "Bearer viewer-token"})).status_code == 200
