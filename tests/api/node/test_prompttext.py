"""What engines have said of blocks is prompt text: nothing of the API shows it, to nobody."""

from __future__ import annotations

import logging
from array import array

import httpx
import pytest
from tests.api.fakenode import RANKS, FakeNode
from tests.api.node.conftest import KEYS, NAMES
from tests.api.test_events import Reader

from kvstow.descriptions import BlockDescription, DescribedBlocks
from kvstow.messages import Completion
from kvstow_api.journal import Journal
from kvstow_api.streams import EventStreams

pytestmark = pytest.mark.anyio
TOKENS = [271828, 314159, 161803, 141421]
SALT = "a salt of a tenant"
SECRETS = [*map(str, TOKENS), array("I", TOKENS).tobytes().hex(), SALT, "name-of-adapter", "name-of-session"]


@pytest.fixture
def described(node: FakeNode) -> FakeNode:
    """A node with blocks of which one engine has said what they hold: one that is visible, and one that it stores."""
    engine = node.attach(NAMES[0])
    block = BlockDescription(
        array("I", TOKENS).tobytes(), b"", b"", SALT.encode(), 7, "name-of-adapter", "name-of-session"
    )
    for key in KEYS[:2]:
        op = engine.begin_store([key])
        engine.control.describe_store(op.op_id, [0], DescribedBlocks.of([block]))
        if key == KEYS[0]:
            for rank in range(RANKS):
                engine.control.complete(rank, f"{engine.session_id}-{rank}", [Completion(op.op_id, "done")])
    assert len(engine.pool.events.descriptions) == 2
    return node


async def test_no_answer_shows_what_blocks_hold(
    described: FakeNode, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    schema = (await client.get("/openapi.json")).json()
    paths = [path for path, calls in schema["paths"].items() if "get" in calls]
    asked, shown = 0, ""
    for path in paths:
        if path in ("/v1/events", "/v1/pools/{pool}/events"):
            continue
        answer = await client.get(path.replace("{pool}", NAMES[0]).replace("{key}", KEYS[0].hex()))
        asked, shown = asked + (answer.status_code == 200), shown + answer.text
    assert asked > 20
    assert KEYS[0].hex() in shown, "blocks are shown to those who may see keys"
    assert [secret for secret in SECRETS if secret in shown + caplog.text] == []


async def test_no_event_shows_what_blocks_hold(described: FakeNode) -> None:
    pool = described.find_pool(NAMES[0])
    assert pool is not None
    reader = Reader(
        EventStreams(described, Journal()).open(("stored",), pool, after=f"{pool.facade.engine_id}-0-0", poll=0.001)
    )
    event = await reader.next()
    await reader.close()
    assert KEYS[0].hex() in str(event)
    assert [secret for secret in SECRETS if secret in str(event)] == []
