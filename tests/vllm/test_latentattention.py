"""Latent attention (MLA) on two ranks, which have the same KV: the node service keeps it once, and what rank 0 has
stored is what both ranks load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import A, Setup, assert_same, eventually, prompt, running
from tests.vllm.models import write_latent_model
from tests.vllm.nodeservice import is_attached, running_service

pytestmark = pytest.mark.vllm

BLOCK_TOKENS = 16
"""The CPU's backend for latent attention takes no others."""
BLOCKS = len(A) // BLOCK_TOKENS
GPU_BLOCKS = 66
OTHERS = [prompt(560, seed=30 + number) for number in range(2)]
"""Prompts that together need more blocks than a rank has, so nothing is left of what it had before. The first extent of
the pool has room for them all."""
SLOT_BYTES = 4 * BLOCK_TOKENS * (512 + 64) * 4
"""Of one rank: layers, tokens, latents and rope, fp32."""


@pytest.fixture
def cached_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM switches prefix caching off for these models on CPUs, where it does not attend to a cached prefix as it
    should: a hit's answer is not that of a miss. So hits are compared with vLLM's own."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def checked(platform: Any, config: Any) -> None:
        check(platform, config)
        config.cache_config.enable_prefix_caching = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(checked))


@pytest.mark.usefixtures("cached_prefixes")
def test_what_rank_0_has_stored_is_what_both_ranks_load(tmp_path: Path) -> None:
    model = write_latent_model(tmp_path / "model")
    settings = {"worker_extension_cls": "tests.vllm.kvbytes.KVBytes"}
    with running_service(tmp_path) as service:
        extra = {"attach": service.attach, "weights_id": "test"}
        setup = Setup(model, extra, gpu_blocks=GPU_BLOCKS, tp=2, processes=True, settings=settings)
        with running(setup) as engine:
            eventually(lambda: is_attached(service), "an attached engine")
            engine.ask(A)
            own_hit = engine.ask(A)
            eventually(lambda: service.sessions()[0]["in_flight"] == 0, "the end of all stores")
            (pool,) = service.pools()
            assert pool["slot_bytes"] == SLOT_BYTES
            assert pool["granted_bytes"] < 2 * pool["capacity_slots"] * SLOT_BYTES, "each rank has memory of its own"
            engine.ask(*OTHERS, tokens=1)
            eventually(engine.llm.reset_prefix_cache, "a reset of the prefix cache")
            host_hit = engine.ask(A)
            assert [answer.cached for answer in (*own_hit, *host_hit)] == [BLOCKS * BLOCK_TOKENS] * 2
            assert_same(host_hit, own_hit)
            # Last: the engine takes a call of its ranks that it does not know for a change of the weights.
            first, second = engine.llm.collective_rpc("kv_digests")
            assert first == second
            assert len(first) > BLOCKS
