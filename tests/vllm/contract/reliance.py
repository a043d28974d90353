"""What KVStow relies on in vLLM and its own sources do not show: versions, unused hooks, fields, orders of calls,
statements."""

from __future__ import annotations

BASE = ("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1")

NEWER: dict[str, str] = {
    "KVConnectorBase_V1.requires_kv_delivery": "0.28",
    "KVConnectorBase_V1.get_transfer_results": "0.30",
    "KVConnectorBase_V1.has_pending_block_frees": "0.30",
    "KVConnectorBase_V1.get_external_cache_hit_sources": "0.32",
    "KVCacheConfig.prefix_cacheable_group_ids": "0.30",
    "KVConnectorBase_V1.supports_sleep_mode": "0.33",
    "Request.session_id": "0.28",
    "Request.kv_hints": "0.31",
    "KvHintsEnvelope.actions": "0.31",
    "KvHintAction.action_type": "0.31",
    "KvHintAction.payload": "0.31",
    "KVConnectorBase_V1.unregister_kv_caches": "0.33",
    "KVConnectorBase_V1.restore_kv_caches": "0.33",
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorTransferResults": "0.30",
    "vllm.v1.metrics.cache_hit_source.CacheHitSource": "0.32",
}
"""What older versions lack, and do not call or reach: the first version that has it."""

LEFT_ALONE: dict[str, str] = {
    "role": "vLLM's own",
    "clear_connector_metadata": "vLLM's own",
    "has_connector_metadata": "vLLM's own",
    "bind_kv_cache_manager": "its default calls bind_gpu_block_pool, which all versions have",
    "set_host_xfer_buffer_ops": "for devices whose KV cache is copied through a host buffer of vLLM's",
    "get_kv_connector_kv_cache_events": "for events of workers; ours come from the scheduler's half",
    "get_required_kvcache_layout": "every layout is understood by its strides",
    "requires_piecewise_for_cudagraph": "no layer hook is needed, so full graphs are fine",
    "get_finished_count": "every rank reports, which is the default",
    "prefer_cross_layer_blocks": "False is right: layers are registered one by one (up to 0.28)",
    "register_cross_layers_kv_cache": "not called unless preferred (up to 0.28)",
    "supports_divergent_local_hybrid_hits": "False is right: hits start at one local prefix",
    "finish_forward": "nothing is submitted between forward and results",
    "reset_capture_state": "nothing is kept over a graph capture",
    "register_finished_partial_tail": "for Mamba states, which are not kept",
    "get_mem_pool_context": "the KV cache is allocated as usual",
    "get_loaded_kv_cache_group_ids": "the groups that vLLM finds by prefix are loaded, which is the default",
}
"""Hooks of vLLM's connector that KVStow leaves as they are, and why."""

CACHE_SPECS: dict[str, str] = {
    "AttentionSpec": "only a base class",
    "UniformTypeKVCacheSpecs": "layers of one kind, which counts",
}
"""Subclasses of vLLM's `KVCacheSpec` that are no kinds of KV cache. `kvgroups` says which kinds are served or
refused."""

LEFT_OUT = {"CircularBufferSpec", "KpoolTailSpec"}
"""Kinds of which vLLM finds no block by prefix: a request's state of its last few tokens, in one block (vLLM 0.30)."""

PROTOCOLS: dict[tuple[str, str], tuple[str, str]] = {
    ("trackedrequests", "Request"): ("vllm.v1.request", "Request"),
    ("gpublocks", "BlockPool"): ("vllm.v1.core.block_pool", "BlockPool"),
}
"""Our protocols, by module and name, and vLLM's classes that they stand for."""

FIELDS: dict[tuple[str, str], str] = {
    ("vllm.config.vllm", "VllmConfig"): """cache_config kv_events_config kv_transfer_config lora_config
        model_config parallel_config scheduler_config speculative_config""",
    ("vllm.config.kv_transfer", "KVTransferConfig"): """engine_id is_kv_consumer kv_connector kv_connector_extra_config
        kv_connector_module_path kv_load_failure_policy kv_role""",
    ("vllm.config.kv_events", "KVEventsConfig"): "enable_kv_cache_events",
    ("vllm.config.cache", "CacheConfig"): "cache_dtype enable_prefix_caching prefix_caching_hash_algo",
    ("vllm.config.model", "ModelConfig"): """dtype hf_config max_model_len model quantization revision
        served_model_name""",
    ("vllm.config.parallel", "ParallelConfig"): """data_parallel_index decode_context_parallel_size
        distributed_executor_backend local_world_size pipeline_parallel_size prefill_context_parallel_size rank
        tensor_parallel_size use_ray world_size""",
    ("vllm.config.scheduler", "SchedulerConfig"): "async_scheduling max_num_batched_tokens max_num_seqs",
    ("vllm.v1.kv_cache_interface", "KVCacheConfig"): "kv_cache_groups num_blocks prefix_cacheable_group_ids",
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec"): "kv_cache_spec layer_names",
    ("vllm.v1.kv_cache_interface", "FullAttentionSpec"): "block_size",
    ("vllm.v1.kv_cache_interface", "MLAAttentionSpec"): "block_size",
    ("vllm.v1.kv_cache_interface", "SlidingWindowSpec"): "block_size sliding_window",
    ("vllm.v1.kv_cache_interface", "ChunkedLocalAttentionSpec"): "attention_chunk_size block_size",
    ("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs"): "block_size kv_cache_specs",
    ("vllm.v1.core.sched.output", "SchedulerOutput"): "num_scheduled_tokens scheduled_cached_reqs",
    ("vllm.v1.core.sched.output", "CachedRequestData"): "new_block_ids req_ids",
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks"): "get_block_ids",
    ("vllm.v1.core.kv_cache_utils", "KVCacheBlock"): "block_hash block_id next_free_block",
    ("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue"): """fake_free_list_head fake_free_list_tail
        prepend_n remove""",
    ("vllm.v1.outputs", "KVConnectorOutput"): "finished_recving kv_connector_worker_meta",
    ("vllm.v1.request", "Request"): """all_token_ids block_hashes cache_salt kv_hints kv_transfer_params lora_request
        session_id""",
    ("vllm.v1.kv_hints.protocol", "KvHintsEnvelope"): "actions",
    ("vllm.v1.kv_hints.protocol", "KvHintAction"): "action_type payload",
    ("vllm.lora.request", "LoRARequest"): "adapter_id name",
    ("vllm.distributed.kv_events", "BlockStored"): """block_hashes block_size extra_keys group_idx kv_cache_spec_kind
        kv_cache_spec_sliding_window lora_id lora_name medium parent_block_hash token_ids""",
    ("vllm.distributed.kv_events", "BlockRemoved"): "block_hashes group_idx medium",
}
"""Attributes that are read of objects which vLLM hands over or makes."""

MODULE = "*"
"""Stands for a whole module: which of its functions does it, differs from version to version."""

_MIXIN = "vllm.v1.worker.kv_connector_model_runner_mixin"
_RUNNER_V2 = "vllm.v1.worker.gpu.kv_connector"
_SCHEDULER = "vllm.v1.core.sched.scheduler"

ORDERS: dict[tuple[str, str], tuple[str, ...]] = {
    (_MIXIN, "KVConnectorModelRunnerMixin._get_kv_connector_output"): (
        "bind_connector_metadata",
        "yield",  # the forward pass
        "get_finished|get_transfer_results",
        "get_block_ids_with_load_errors",
        "build_connector_worker_meta",
        "clear_connector_metadata",
    ),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.execute_model"): (
        "handle_preemptions",
        "maybe_get_kv_connector_output",
    ),
    (_RUNNER_V2, "ActiveKVConnector.__init__"): ("register_kv_caches",),
    (_RUNNER_V2, "ActiveKVConnector.pre_forward"): ("handle_preemptions", "bind_connector_metadata"),
    (_RUNNER_V2, "ActiveKVConnector.post_forward"): (
        "get_finished|get_transfer_results",
        "get_block_ids_with_load_errors",
        "build_connector_worker_meta",
        "clear_connector_metadata",
    ),
    (_SCHEDULER, "Scheduler.__init__"): ("bind_gpu_block_pool|bind_kv_cache_manager",),
    (_SCHEDULER, "Scheduler.schedule"): (
        "get_num_new_matched_tokens",
        "allocate_slots",
        "update_state_after_alloc",
        "build_connector_meta|_build_kv_connector_meta",
    ),
    (_SCHEDULER, "Scheduler.update_from_output"): (
        "_handle_invalid_blocks",
        "_update_from_kv_xfer_finished",
        "get_kv_connector_stats",
        "take_events",
    ),
    (_SCHEDULER, "Scheduler._update_from_kv_xfer_finished"): ("update_connector_output",),
    (_SCHEDULER, "Scheduler._connector_finished"): ("request_finished_all_groups",),
    (_SCHEDULER, "Scheduler._free_request"): ("_connector_finished",),
    (_SCHEDULER, "Scheduler.has_requests"): ("has_pending_push_work",),
    (_SCHEDULER, "Scheduler.reset_connector_cache"): ("reset_cache",),
    ("vllm.v1.worker.gpu_worker", MODULE): ("get_handshake_metadata",),
    ("vllm.v1.engine.core", MODULE): ("set_xfer_handshake_metadata_pp_aware",),
    ("vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory.get_connector_class"): (
        "import_module",
        "getattr",
    ),
}
"""Calls that a function of vLLM makes in this order; `a|b`: either."""

STATEMENTS: dict[tuple[str, str], str] = {
    (_SCHEDULER, "Scheduler._update_waiting_for_remote_kv"): "request.num_computed_tokens = request.num_tokens - 1",
}
"""What a function of vLLM does somewhere: here, after a hit that is all of a prompt, computes its last token."""
