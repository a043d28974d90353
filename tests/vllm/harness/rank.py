"""One rank: the worker half of the connector, called as vLLM's model runner calls it."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

from tests.vllm.harness.cache import KVCache
from tests.vllm.harness.setup import of_rank
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput

_CONTEXT: Any = SimpleNamespace(attn_metadata=None, cudagraph_runtime_mode=None)
"""Of a step in which no layer calls a hook."""


class Rank:
    """Its KV cache and its connector. `before` and `after` are the hooks around the launch of a forward."""

    def __init__(self, rank: int, config: VllmConfig, geometry: KVCacheConfig) -> None:
        self.rank = rank
        config = of_rank(config, rank)
        self.connector = KVConnectorFactory.create_connector(
            config=config, role=KVConnectorRole.WORKER, kv_cache_config=geometry
        )
        self.cache = KVCache(rank, config, geometry)
        self.connector.register_kv_caches(self.cache.tensors)
        self.connector.set_host_xfer_buffer_ops(lambda *_: None)

    def before(self, output: Any) -> None:
        metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        self.connector.handle_preemptions(metadata)
        self.connector.bind_connector_metadata(metadata)
        if output.has_sync_kv_loads:
            self.connector.start_load_kv(_CONTEXT)

    def after(self, output: Any) -> KVConnectorOutput:
        """What the rank reports of this step."""
        connector, report = self.connector, KVConnectorOutput()
        if not output.has_sync_kv_loads:
            connector.start_load_kv(_CONTEXT)
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        report.finished_sending, report.finished_recving = results.finished_sending, results.finished_recving
        report.failed_recving = results.failed_recving
        report.invalid_block_ids = connector.get_block_ids_with_load_errors()
        report.kv_connector_stats = connector.get_kv_connector_stats()
        report.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        report.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        copied: KVConnectorOutput = pickle.loads(pickle.dumps(report))
        return copied
