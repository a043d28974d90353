"""What a running vLLM publishes about KVStow: in its own metrics, and as KV events."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import A_BLOCKS, BLOCK, SLOT_BYTES, A, B, Engine, Setup, eventually, running

pytestmark = pytest.mark.vllm


class Published:
    """The events that vLLM publishes, GPU's and host memory's."""

    def __init__(self, engine: Engine) -> None:
        self.events: list[Any] = []
        publisher = engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_event_publisher
        publisher.publish = lambda batch: self.events.extend(batch.events)

    def blocks(self, kind: str, medium: str) -> list[Any]:
        """Hashes in the order of their events."""
        told = [event for event in self.events if type(event).__name__ == kind and event.medium == medium]
        return [block for event in told for block in event.block_hashes]


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    from vllm.config import KVEventsConfig

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with running(Setup(model, extra={}, settings={"kv_events_config": events})) as engine:
        yield engine


def test_metrics_and_events_follow_stores_loads_and_purges(engine: Engine) -> None:
    published = Published(engine)

    def reaches(metric: str, blocks: int) -> None:
        def reached() -> bool:
            engine.step()
            return engine.counter(f"vllm:kv_offload_{metric}") == blocks * SLOT_BYTES

        eventually(reached, f"{blocks} blocks in {metric}")

    engine.ask(A, tokens=1)
    reaches("store_bytes", A_BLOCKS)
    assert published.blocks("BlockStored", "CPU") == published.blocks("BlockStored", "GPU")
    first = next(event for event in published.events if event.medium == "CPU")
    assert first.token_ids == list(A[: len(first.token_ids)])
    assert (first.block_size, first.parent_block_hash) == (BLOCK, None)

    engine.forget_gpu()
    engine.ask(B, tokens=1)
    reaches("load_bytes", 512 // BLOCK)
    reaches("store_bytes", A_BLOCKS + 2)  # B's own blocks

    stored = published.blocks("BlockStored", "CPU")
    engine.admin.post("/v1/pools/host/purge", json={"all": True}).raise_for_status()
    engine.ask(A[:BLOCK], tokens=1)
    assert sorted(published.blocks("BlockRemoved", "CPU")) == sorted(stored)
