from __future__ import annotations

import logging
from collections.abc import Iterator

import httpx
import pytest

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    names = ("kvstow", "kvstow.api", "kvstow.audit")
    before = [logging.getLogger(name).level for name in names]
    yield
    for name, level in zip(names, before, strict=True):
        logging.getLogger(name).setLevel(level)


async def test_levels_are_shown_and_set(client: httpx.AsyncClient) -> None:
    answer = await client.put("/v1/loglevel", json={"logger": "kvstow.api", "level": "debug"})
    assert answer.json() == {"logger": "kvstow.api", "level": "debug"}
    assert logging.getLogger("kvstow.api").isEnabledFor(logging.DEBUG)
    items = (await client.get("/v1/loglevel")).json()["items"]
    assert answer.json() in items
    assert items[0]["logger"] == "kvstow"
    assert all(item["logger"].startswith("kvstow") for item in items)
