"""A node of fake pools, its API, and a client of it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.api.fakenode import FakeNode
from tests.doubles.fakes import FakeClock

NAMES = ["a-000001", "b-000002", "c-000003"]
KEYS = [b"\x00\x00" + bytes([number]) * 4 for number in range(4)]


@pytest.fixture
def node(clock: FakeClock) -> FakeNode:
    return FakeNode(clock)


@pytest.fixture
async def client(launch: Any, node: FakeNode) -> httpx.AsyncClient:
    made: httpx.AsyncClient = await launch(directory=node, agent_token=None)
    return made


@pytest.fixture(params=[0, 1, 3])
def pools(request: pytest.FixtureRequest, node: FakeNode) -> list[str]:
    """The names of 0, 1 and 3 pools, each with one engine and one block."""
    names = NAMES[: request.param]
    for name in names:
        node.attach(name).store(KEYS[:1])
    return names


async def get(client: httpx.AsyncClient, path: str, status: int = 200) -> Any:
    answer = await client.get(path)
    assert answer.status_code == status, answer.text
    return answer.json() if answer.headers["content-type"].endswith("json") else answer.text
