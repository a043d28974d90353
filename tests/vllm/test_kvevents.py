"""KV events in a real vLLM: ours must match its own events of the GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.doubles.rank import make_ranks

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.keys import make_key
from kvstow_service.connectors.engine_core.kvevents import EmbeddedBlocks, event_feed
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest

pytestmark = pytest.mark.vllm

SLOT = 4096
HASH_TOKENS = 16
ENABLED = SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=True))


def make_request(**options: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(HASH_TOKENS, sha256)
    tokens = list(range(100, 200))
    return Request("r", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher, **options)


def gpu_events(request: Any, first: int, end: int, group: KVGroup) -> list[Any]:
    """vLLM's events for the same blocks in its own cache."""
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(16, True, HASH_TOKENS, enable_kv_cache_events=True)
    pool.cache_full_blocks(request, pool.get_new_blocks(end), first, end, group.block_tokens, group.index)
    events: list[Any] = pool.take_events()
    return events


def fields(event: Any) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__}


class Host:
    """An engine with one rank, and the feed of vLLM's events."""

    def __init__(self) -> None:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

        sizes: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        self.specs = [FullAttentionSpec(**sizes), SlidingWindowSpec(**sizes, sliding_window=64)]
        self.engine = OffloadEngine(EngineConfig(slot_bytes=SLOT, capacity_slots=16))
        (self.rank,) = make_ranks(self.engine)
        self.feed = event_feed(ENABLED, EmbeddedBlocks(self.engine), self.specs)
        if self.feed is not None:
            self.feed.follow_requests(KVGroups((KVGroup(0, 16, 1), KVGroup(1, 32, 2, window=64)), 32), {}, 100)

    def store(self, request: Any, first: int, end: int, group: KVGroup) -> None:
        assert self.feed is not None
        step = group.hashes_per_block
        keys = [make_key(group.index, request.block_hashes[(i + 1) * step - 1]) for i in range(first, end)]
        self.feed.known.follow(TrackedRequest(request, 2))
        grant = self.engine.begin_store(keys, range(len(keys)))
        assert grant.op is not None
        self.feed.granted(keys, grant)
        self.rank.send(grant.op.op_id, "done")

    def take(self) -> list[Any]:
        assert self.feed is not None
        return self.feed.take_events()


@pytest.fixture(params=["0", "1"], ids=["bytes", "int"])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Host:
    """With block hashes in events as bytes, and as the integers of older routers."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", request.param)
    return Host()


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("group", [KVGroup(0, 16, 1), KVGroup(1, 32, 2, window=64)], ids=["full", "window"])
@pytest.mark.parametrize("kind", ["plain", "salted", "lora"])
def test_a_stored_block_is_announced_as_on_the_gpu(host: Host, first: int, group: KVGroup, kind: str) -> None:
    from vllm.lora.request import LoRARequest

    options: dict[str, Any] = {
        "plain": {},
        "salted": {"cache_salt": "salt"},
        "lora": {"lora_request": LoRARequest("french", 7, "nowhere")},
    }[kind]
    request = make_request(**options)
    host.store(request, first, 3, group)
    (ours,), (theirs,) = host.take(), gpu_events(request, first, 3, group)
    added = {"medium": "CPU", "locality": "LOCAL", "kv_cache_spec_kind": ours.kv_cache_spec_kind}
    added["kv_cache_spec_sliding_window"] = ours.kv_cache_spec_sliding_window
    assert type(ours) is type(theirs)
    assert fields(ours) == fields(theirs) | added
    assert ours.kv_cache_spec_kind == ("full_attention" if group.is_full else "sliding_window")
    assert ours.kv_cache_spec_sliding_window == group.window


def test_a_removal_is_announced_as_on_the_gpu(host: Host) -> None:
    from vllm.distributed.kv_events import BlockRemoved
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    request = make_request()
    host.store(request, 0, 2, KVGroup(0, 16, 1))
    host.take()
    assert host.engine.admin.purge(everything=True).run().finished
    hashes = [maybe_convert_block_hash(block_hash) for block_hash in request.block_hashes[:2]]
    assert host.take() == [BlockRemoved(hashes, "CPU", group_idx=0, locality="LOCAL")]


def test_vllm_publishes_them(host: Host) -> None:
    from vllm.distributed.kv_events import KVEventBatch
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    host.store(make_request(), 0, 2, KVGroup(0, 16, 1))
    batch = KVEventBatch(ts=1.0, events=host.take())
    assert MsgpackDecoder(KVEventBatch).decode(MsgpackEncoder().encode(batch)) == batch


@pytest.mark.parametrize("config", [None, SimpleNamespace(enable_kv_cache_events=False)])
def test_without_kv_events_there_is_no_feed(config: Any) -> None:
    host = Host()
    assert event_feed(SimpleNamespace(kv_events_config=config), EmbeddedBlocks(host.engine), host.specs) is None
