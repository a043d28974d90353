"""KV events of blocks that adapters have computed: routers know them by vLLM's hash, which is not in their keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.service.connectors.engine_core.router import LaterBlocks, make_feed
from tests.service.connectors.engine_core.test_adapters import PROMPT, ask, make_adapters, mixed, request_with, write
from tests.service.connectors.engine_core.vllmhost import VllmHost, hashes_of

from kvstow_service.connectors.engine_core.kvevents import EmbeddedBlocks


def hashes_in(events: list[Any]) -> list[bytes]:
    return [block_hash for event in events for block_hash in event.block_hashes]


@pytest.mark.parametrize("lazy_blocks", [None, 32], ids=["eager", "lazy"])
def test_events_have_vllms_hashes(lazy_blocks: int | None, tmp_path: Path) -> None:
    adapters, path = make_adapters(), write(tmp_path / "a")
    source: Any = LaterBlocks()
    feed = make_feed(source)
    host = VllmHost(adapters=adapters, lazy_blocks=lazy_blocks, events=feed)
    source.blocks = EmbeddedBlocks(host.engine)
    request: Any = request_with(path)
    request.lora_request.adapter_id, request.lora_request.name = 1, "french"
    host.ask(request)
    host.run(request)
    host.step({request: 0})
    host.finish(request)
    for _ in range(3):
        host.step()
    stored = feed.take_events()
    assert sorted(hashes_in(stored)) == sorted(hashes_of(PROMPT))
    adapter = ask(adapters, path)
    host.engine.admin.remove_block(mixed(adapter)[-1])
    assert hashes_in(feed.take_events()) == hashes_of(PROMPT)[-1:]
    host.engine.admin.purge(everything=True).run()
    assert sorted(hashes_in(feed.take_events())) == sorted(hashes_of(PROMPT)[:-1])
