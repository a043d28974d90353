"""KV events of vLLM engines that are attached: a router that follows them knows what each engine finds in the pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import A_BLOCKS, BLOCK, A, B, Engine, Prompt, Setup, eventually, prompt, running
from tests.vllm.nodeservice import NodeService, is_attached, running_service, until_attached

pytestmark = pytest.mark.vllm

_TINY = prompt(9, seed=200)
EVENTS = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}


class Router:
    """Follows the events of an engine in this process. `host[block hash]`: the tokens of a block of host memory, and
    the hash of the block before it."""

    def __init__(self, engine: Engine) -> None:
        self.host: dict[Any, tuple[tuple[int, ...], Any]] = {}
        self._engine = engine
        engine.scheduler.kv_event_publisher.publish = self._follow

    def _follow(self, batch: Any) -> None:
        for event in batch.events:
            if getattr(event, "medium", None) != "CPU":
                continue
            if not hasattr(event, "token_ids"):
                for block_hash in event.block_hashes:
                    del self.host[block_hash]
                continue
            count, parent = len(event.block_hashes), event.parent_block_hash
            assert (event.block_size, len(event.token_ids)) == (BLOCK, BLOCK * count)
            assert event.extra_keys == [None] * count
            for number, block_hash in enumerate(event.block_hashes):
                tokens = tuple(event.token_ids[number * BLOCK : (number + 1) * BLOCK])
                self.host[block_hash] = tokens, parent
                parent = block_hash

    def prompts(self) -> set[Prompt]:
        """The tokens of each announced block, and of all before it, as far as these are announced."""
        found: set[Prompt] = set()
        for block in self.host.values():
            tokens, parent = block
            while parent in self.host:
                before, parent = self.host[parent]
                tokens = before + tokens
            found.add(tokens)
        return found

    def has_blocks(self, count: int) -> None:
        eventually(lambda: self._step() and len(self.host) == count, f"{count} announced blocks")

    def is_attached(self, service: NodeService) -> None:
        """An engine that has lost its session long after it began makes no steps to find the service again."""
        eventually(lambda: self._step() and is_attached(service), "an attached engine")

    def knows(self, prompts: set[Prompt]) -> None:
        eventually(lambda: self._step() and prompts <= self.prompts(), f"{len(prompts)} announced blocks")

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
        assert router.prompts() >= {A[: BLOCK * number] for number in range(1, A_BLOCKS + 1)}
        stored = len(router.host)
        for seed in range(100, 108):
            engine.ask(prompt(602, seed))
            engine.forget_gpu()
        router.has_blocks(service.used_slots())
        assert len(router.host) > stored
        assert A[:BLOCK] not in router.prompts(), "it had to be evicted"
        service.kill()
        router.has_blocks(0)
        service.start()
        router.is_attached(service)
        router.has_blocks(service.used_slots())
        assert len(router.host) > stored
        engine.llm.reset_prefix_cache(reset_connector=True)
        router.has_blocks(0)


A_PREFIXES = {A[: BLOCK * number] for number in range(1, A_BLOCKS + 1)}


def test_another_engines_blocks_are_announced_and_recovered_ones_at_their_next_use(
    model: Path, service: NodeService
) -> None:
    setup = Setup(model, {"attach": service.attach}, settings=EVENTS)
    with running(setup) as first:
        until_attached(first, service)
        first.ask(A)
        first.settle()
    with running(setup) as second:
        router = Router(second)
        until_attached(second, service)
        router.has_blocks(service.used_slots())
        assert router.prompts() >= A_PREFIXES
    service.kill()
    service.start()
    with running(setup) as third:
        router = Router(third)
        until_attached(third, service)
        assert service.used_slots() >= A_BLOCKS
        third.ask(_TINY, _TINY)
        assert router.host == {}, "the service does not know what the blocks hold that it has recovered"
        third.ask(B)  # it loads the blocks that it shares with A
        router.knows({B[: BLOCK * number] for number in range(1, len(B) // BLOCK + 1)})
        assert A[: 17 * BLOCK] not in router.prompts(), "nobody has used it"
        third.ask(A)
        router.knows(A_PREFIXES)


@pytest.mark.parametrize("attaches", [False, True], ids=["embedded", "attached"])
def test_lazy_stores_are_announced_with_their_tokens(model: Path, service: NodeService, *, attaches: bool) -> None:
    extra = {"lazy_offload": True, **({"attach": service.attach} if attaches else {})}
    with running(Setup(model, extra, settings=EVENTS, gpu_blocks=72)) as engine:
        router = Router(engine)
        if attaches:
            until_attached(engine, service)
        engine.ask(A, tokens=1)
        engine.ask(prompt(602, seed=100), tokens=1)
        router.knows(A_PREFIXES)


@pytest.mark.parametrize("attaches", [False, True], ids=["embedded", "attached"])
def test_the_backlog_is_announced_with_its_tokens(model: Path, service: NodeService, *, attaches: bool) -> None:
    """The pool refuses the stores of a request until the request has ended."""
    with running(Setup(model, {"attach": service.attach} if attaches else {}, settings=EVENTS)) as engine:
        router = Router(engine)
        if attaches:
            until_attached(engine, service)

        def bypass(*, is_on: bool) -> None:
            if attaches:
                service.bypass_stores(is_on=is_on)
            else:
                engine.admin.put("/v1/bypass", json={"load": False, "store": is_on}).raise_for_status()

        bypass(is_on=True)
        engine.ask(A, tokens=1)
        assert router.host == {}
        bypass(is_on=False)
        router.knows(A_PREFIXES)
