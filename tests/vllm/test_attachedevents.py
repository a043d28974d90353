"""KV events of vLLM engines that are attached: a router that follows them knows what each engine finds in the pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import A_BLOCKS, BLOCK, A, Engine, Setup, eventually, prompt, running
from tests.vllm.nodeservice import NodeService, running_service, until_attached

pytestmark = pytest.mark.vllm

_TINY = prompt(9, seed=200)
EVENTS = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}


class Router:
    """Follows the events of an engine in this process. `host[block hash]`: the last announcement of host memory."""

    def __init__(self, engine: Engine) -> None:
        self.host: dict[Any, Any] = {}
        self._engine = engine
        engine.scheduler.kv_event_publisher.publish = self._follow

    def _follow(self, batch: Any) -> None:
        for event in batch.events:
            if getattr(event, "medium", None) != "CPU":
                continue
            for block_hash in event.block_hashes:
                if hasattr(event, "token_ids"):
                    self.host[block_hash] = event
                else:
                    del self.host[block_hash]

    def has_blocks(self, count: int) -> None:
        eventually(lambda: self._step() and len(self.host) == count, f"{count} announced blocks")

    def _step(self) -> bool:
        """Steps with a request of less than a block: without requests vLLM publishes nothing."""
        self._engine.ask(_TINY, tokens=1)
        return True


@pytest.fixture
def service(tmp_path: Path) -> Iterator[NodeService]:
    with running_service(tmp_path, "16MiB", "--state", str(tmp_path / "state")) as service:
        yield service


def test_a_router_knows_what_the_pool_has(model: Path, service: NodeService) -> None:
    """What is stored, evicted, gone with the service and back with it, and left behind by a reset."""
    with running(Setup(model, {"attach": service.attach}, settings=EVENTS)) as engine:
        router = Router(engine)
        until_attached(engine, service)
        engine.ask(A)
        engine.forget_gpu()
        router.has_blocks(service.used_slots())
        assert len(router.host) >= A_BLOCKS
        first = next(event for event in router.host.values() if event.parent_block_hash is None)
        assert tuple(first.token_ids) == A[: len(first.token_ids)]
        assert (first.block_size, first.medium) == (BLOCK, "CPU")
        stored = len(router.host)
        for seed in range(100, 108):
            engine.ask(prompt(602, seed))
            engine.forget_gpu()
        router.has_blocks(service.used_slots())
        assert len(router.host) > stored
        assert first not in router.host.values(), "it had to be evicted"
        service.kill()
        router.has_blocks(0)
        service.start()
        until_attached(engine, service)
        router.has_blocks(service.used_slots())
        assert len(router.host) > stored
        engine.llm.reset_prefix_cache(reset_connector=True)
        router.has_blocks(0)
