"""Replays over the real CPU device."""

from threading import Event

import pytest
from tests.embeddedreplay import local_session

from kvstow.config import EngineConfig
from kvstow_service.replay.driver import blocks_needed
from kvstow_service.replay.trace import ReplayOptions, TraceRequest


@pytest.mark.parametrize(
    ("ranks", "slot_bytes", "concurrency"),
    [(1, 4096, 1), (3, 4096, 4), (1, 4099, 4), (3, 1, 1), (2, 65540, 4)],
)
def test_every_loaded_byte_is_right(
    conversations: list[TraceRequest], ranks: int, slot_bytes: int, concurrency: int
) -> None:
    config = EngineConfig(slot_bytes=slot_bytes, capacity_slots=300, num_ranks=ranks)
    kv_blocks = blocks_needed(conversations, concurrency)
    with local_session(config, kv_blocks) as session:
        driver = session.driver(conversations, ReplayOptions(concurrency=concurrency), kv_blocks=kv_blocks)
        result = driver.run(Event())
        assert driver.free_blocks == kv_blocks
        session.engine.check_integrity()
    assert (result.requests, result.mismatches, result.loaded.failed) == (len(conversations), 0, 0)
    assert result.verified_bytes == result.loaded.num_bytes == result.loaded.blocks * slot_bytes * ranks > 0
    assert result.evicted_blocks
    assert result.loaded.gbps > 0
    assert result.stored.gbps > 0
