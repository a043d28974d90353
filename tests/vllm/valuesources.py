"""A verdict on everything that vLLM 0.30 to 0.33 computes from: the fields of its configuration, its variables, and the
files that it reads. `test_valuesources` fails for one that is not here."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvstow_service.connectors.vllm import valuesettings

VERDICTS: Final = {
    "identity": "changes KV, and is one of the settings in the identity of a namespace (`valuesettings`)",
    "weights": "says which weights there are, which the identity names, or sharing is off (`engineidentity`)",
    "model": "part of the model's configuration as vLLM has read it; the identity has a digest of that",
    "files": "files of the model: the identity has a digest of them, or sharing is off (`model_files`)",
    "pool": "changes what lies where in memory, which is the identity of a pool",
    "hash": "vLLM's block hash covers what it changes",
    "probe": "changes vLLM's block hashes; the identity has a probe of them",
    "adapter": "how LoRA adapters are applied, which their keys cover (`adapters`)",
    "unshared": "lets KV or weights change while the engine runs: sharing is off",
    "refused": "KVStow refuses to start with it, or has one value for all its engines",
    "part": "a part of the configuration, which has verdicts of its own",
    "rounding": "which kernel computes, in which order and in which batches: the last bits of a result",
    "place": "where weights, blocks and processes are, how much memory they have, how fast they load and talk",
    "drawing": "which tokens are drawn, how they are guessed, and how answers look; keys cover tokens",
    "limits": "what is refused, and how long something may take",
    "watching": "logs, metrics, profiles and debugging",
    "building": "how vLLM was built or installed",
}

PARTS: Final = {
    "attention_config": "AttentionConfig",
    "cache_config": "CacheConfig",
    "diffusion_config": "DiffusionConfig",
    "ec_transfer_config": "ECTransferConfig",
    "kernel_config": "KernelConfig",
    "load_config": "LoadConfig",
    "mamba_config": "MambaConfig",
    "model_config": "ModelConfig",
    "multimodal_config": "MultiModalConfig",
    "parallel_config": "ParallelConfig",
    "speculative_config": "SpeculativeConfig",
}
"""The classes of the parts in `valuesettings`."""

FIELDS: Final[Mapping[str, Mapping[str, str]]] = {
    "AttentionConfig": {
        "rounding": """flash_attn_max_num_splits_for_cuda_graph flash_attn_version flex_attn_block_m flex_attn_block_n
            flex_attn_kv_block_size flex_attn_q_block_size indexer_tp_shard_min_rows minimax_m3_indexer_cp
            minimax_m3_msa_decode_backend sparse_mla_force_mqa tokenspeed_mla_min_split_kv
            tq_max_kv_splits_for_cuda_graph trtllm_ragged_backend use_trtllm_attention""",
        "place": "hisparse_config sparse_mla_prefill_workspace_factor",
    },
    "AudioDummyOptions": {"place": "length"},
    "AuxOutputConfig": {"watching": "enable_return_routed_experts max_bytes"},
    "BaseDummyOptions": {"limits": "count"},
    "CacheConfig": {
        "pool": """block_size cache_dtype effective_attention_block_size hash_block_size mamba_block_size
            mamba_page_size_padded skip_page_size_padded sliding_window user_specified_block_size
            user_specified_mamba_block_size""",
        "probe": "prefix_caching_hash_algo",
        "refused": "enable_prefix_caching is_attention_free",
        "place": """_block_size_resolved cache_hit_alignment_tokens enable_mamba_fine_grained_prefix_cache
            enable_mamba_shared_prefix_checkpoint gpu_memory_utilization kv_cache_max_concurrency
            kv_cache_memory_bytes kv_cache_size_tokens kv_offloading_backend kv_offloading_size num_cpu_blocks
            num_gpu_blocks num_gpu_blocks_override prefix_cache_retention_interval prefix_match_unit
            replayssm_buffer_len simple_cpu_offload_num_blocks""",
    },
    "CompilationConfig": {
        "rounding": """backend compile_mm_encoder compile_ranges_endpoints compile_sizes cudagraph_capture_sizes
            cudagraph_copy_inputs cudagraph_decoder_replay cudagraph_mm_encoder cudagraph_mode
            cudagraph_num_of_warmups cudagraph_specialize_lora custom_ops decoder_replay_cudagraph_capture_sizes
            decoder_replay_trim_threshold disabled_custom_ops dynamic_shapes_config enabled_custom_ops
            encoder_cudagraph_max_frames_per_batch encoder_cudagraph_max_vision_items_per_batch
            encoder_cudagraph_token_budgets fast_moe_cold_start inductor_compile_config inductor_passes
            ir_enable_torch_wrap max_cudagraph_capture_size mode pass_config splitting_ops
            use_inductor_graph_partition""",
        "place": """cache_dir compile_cache_save_format local_cache_dir static_all_moe_layers
            static_forward_context traced_files""",
        "watching": "compilation_time debug_dump_path encoder_compilation_time",
    },
    "DeviceConfig": {"rounding": "device device_type"},
    "DynamicShapesConfig": {"rounding": "assume_32_bit_indexing evaluate_guards type"},
    "ECTransferConfig": {
        "place": """ec_buffer_device ec_buffer_size ec_connector_module_path ec_ip ec_parallel_size ec_port ec_rank
            engine_id mm_encoder_output_widths""",
    },
    "EPLBConfig": {
        "rounding": "num_redundant_experts",
        "place": "communicator enable_migration_batching policy step_interval use_async window_size",
        "watching": "log_balancedness log_balancedness_interval",
    },
    "EncoderCacheManagerConfig": {"place": "encoder_cache_manager_cls manager_config"},
    "EngramConfig": {"place": "cpu_offload dp_shared_memory embedding_across_dp use_thp"},
    "FaultToleranceConfig": {"limits": "engine_recovery_timeout_sec"},
    "HiSparseConfig": {"place": "device_buffer_size eager_host_mirror"},
    "ImageDummyOptions": {"place": "height width"},
    "IrOpPriorityConfig": {"rounding": "fused_add_rms_norm gelu_and_mul_sparse rms_norm"},
    "KVEventsConfig": {
        "place": """buffer_steps enable_kv_cache_events endpoint hwm max_queue_size publisher replay_endpoint topic""",
    },
    "KVTransferConfig": {
        "refused": "kv_role",
        "place": """enable_permute_local_kv engine_id kv_buffer_device kv_buffer_size kv_connector
            kv_connector_extra_config kv_connector_module_path kv_ip kv_load_failure_policy kv_parallel_size kv_port
            kv_rank""",
    },
    "KernelConfig": {
        "rounding": """enable_cutedsl_warmup enable_flashinfer_autotune enable_jit_warmup
            enable_rocm_segmented_attn_autotune ir_op_priority monokernel""",
    },
    "LoRAConfig": {
        "adapter": """enable_mixed_moe_lora_format enable_moe_shared_loras enable_tower_connector_lora lora_dtype
            target_modules""",
        "hash": "default_mm_loras",
        "rounding": "fully_sharded_loras specialize_active_lora",
        "limits": "max_cpu_loras max_lora_cls_labels max_lora_rank max_loras",
    },
    "LoadConfig": {
        "weights": "download_dir load_format",
        "place": """device pt_load_map_location safetensors_load_strategy safetensors_prefetch_block_size
            safetensors_prefetch_num_threads use_tqdm_on_load""",
    },
    "LoggingConfig": {"watching": "configure_logging formatter log_level pylogging_config_file"},
    "MambaConfig": {
        "rounding": "backend ssu_algorithm",
    },
    "ModelArchitectureConfig": {
        "model": """architectures derived_max_model_len_and_key head_size hidden_size is_deepseek_mla is_mm_prefix_lm
            model_type num_experts num_experts_per_token per_layer_overrides quantization_config rswa_window
            text_model_type total_num_attention_heads total_num_hidden_layers total_num_kv_heads vocab_size""",
    },
    "ModelConfig": {
        "weights": "model model_weights revision",
        "model": "config_format hf_config hf_overrides hf_text_config max_model_len seed",
        "files": "code_revision hf_config_path tokenizer tokenizer_revision trust_remote_code",
        "part": "multimodal_config pooler_config",
        "hash": "enable_prompt_embeds io_processor_plugin skip_tokenizer_init tokenizer_mode",
        "rounding": "disable_cascade_attn enforce_eager",
        "drawing": """enable_return_routed_experts enable_trace_replay generation_config logits_processors
            logprobs_mode max_logprobs override_generation_config return_sampling_mask use_fp64_gumbel
            word_embeddings_untied_by_checkpoint""",
        "limits": """allow_deprecated_quantization allowed_local_media_path allowed_media_domains
            spec_target_max_model_len""",
        "place": """enable_cumem_allocator enable_nccl_comm_suspend enable_sleep_mode hf_token is_submodel_config
            renderer_num_workers runner served_model_name sleep_mode_backend sleep_mode_offload_cudagraph
            sleep_preserve_parameter_names""",
    },
    "MultiModalConfig": {
        "unshared": "mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path",
        "hash": "enable_mm_embeds interleave_mm_strings language_model_only mm_hasher_algorithm",
        "rounding": "mm_encoder_attn_backend mm_encoder_tp_mode",
        "refused": "allow_missing_mm_embeddings",
        "limits": "limit_per_prompt",
        "place": """mm_encoder_only mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type
            mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling""",
    },
    "ObservabilityConfig": {
        "watching": """collect_detailed_traces cudagraph_metrics custom_histogram_buckets
            enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_mfu_metrics
            enable_mm_processor_stats jit_monitor_mode jit_monitor_verbose kv_cache_metrics kv_cache_metrics_sample
            otlp_traces_endpoint per_request_spec_decode_metrics show_hidden_metrics_for_version""",
    },
    "OffloadConfig": {"place": "offload_backend prefetch uva"},
    "ParallelConfig": {
        "pool": """cp_kv_cache_interleave_size dcp_kv_cache_interleave_size decode_context_parallel_size
            pipeline_parallel_size tensor_parallel_size""",
        "refused": "distributed_executor_backend prefill_context_parallel_size",
        "rounding": """dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend dcp_q_replicate
            disable_custom_all_reduce enable_batch_sharded_sampling enable_dbo enable_eplb enable_expert_parallel
            enable_hc_sp eplb_config expert_placement_strategy is_moe_model ubatch_size""",
        "limits": "cpu_distributed_timeout_seconds distributed_timeout_seconds",
        "place": """_allow_auto_resolve_cp_interleave_size _api_process_count _api_process_rank _coord_store_port
            _data_parallel_master_port_list assigned_physical_gpu_ids data_parallel_backend
            data_parallel_external_lb data_parallel_hybrid_lb data_parallel_index data_parallel_master_ip
            data_parallel_master_port data_parallel_rank data_parallel_rank_local data_parallel_rpc_port
            data_parallel_size data_parallel_size_local disable_nccl_for_dp_synchronization dp_sync_interval
            elastic_ep_max_dp_size enable_elastic_ep enable_ep_weight_filter enable_fault_tolerance
            enable_shm_tensor_arena fault_tolerance_config master_addr master_port max_parallel_loading_workers
            nnodes node_rank numa_bind numa_bind_cpus numa_bind_nodes placement_group rank ray_runtime_env
            ray_workers_use_nsight sd_worker_cls world_size""",
    },
    "PassConfig": {
        "rounding": """eliminate_noops enable_qk_norm_rope_fusion enable_sp fi_allreduce_fusion_max_size_mb
            fuse_act_padding fuse_act_quant fuse_allreduce_rms fuse_attn_quant fuse_gemm_comms fuse_mla_dual_rms_norm
            fuse_norm_quant fuse_qk_norm_rope_kvcache fuse_rope_kvcache fuse_rope_kvcache_cat_mla
            rope_kvcache_fusion_max_token_num sp_min_token_num""",
    },
    "PoolerConfig": {
        "drawing": """dimensions enable_chunked_processing enable_flash_late_interaction logit_mean logit_sigma
            max_embed_len pooling_type returned_token_ids seq_pooling_type step_tag_id task tok_pooling_type
            use_activation""",
    },
    "PrefetchOffloadConfig": {
        "place": "offload_group_size offload_num_in_group offload_params offload_prefetch_step",
    },
    "ProfilerConfig": {
        "watching": """active_iterations capture_torch_profiler delay_iterations detailed_trace_annotation
            ignore_frontend max_iterations profiler proton_backend proton_context proton_data
            proton_graph_attribution proton_hook proton_mode proton_output_format proton_profiler_dir
            torch_profiler_activities torch_profiler_dir torch_profiler_dump_cuda_time_total
            torch_profiler_record_shapes torch_profiler_use_gzip torch_profiler_with_flops
            torch_profiler_with_memory torch_profiler_with_stack wait_iterations warmup_iterations""",
    },
    "QuantSpec": {"identity": "activation weight"},
    "QuantizationConfigArgs": {"identity": "ignore linear moe targets"},
    "Range": {"rounding": "end start"},
    "ReasoningConfig": {
        "drawing": """_enabled _natural_reasoning_end_token_ids _reasoning_end_token_ids _reasoning_start_token_ids
            reasoning_end_str reasoning_parser reasoning_start_str""",
    },
    "SchedulerConfig": {
        "rounding": """async_scheduling disable_chunked_mm_input enable_chunked_prefill long_prefill_token_threshold
            long_prefill_token_threshold_adaptive max_num_active_seqs max_num_batched_tokens
            max_num_scheduled_tokens max_num_seqs policy prefill_schedule_interval scheduler_cls""",
        "model": "is_multimodal_model runner_type",
        "pool": "disable_hybrid_kv_cache_manager",
        "limits": "max_num_queued_reqs max_num_queued_tokens",
        "place": """encoder_cache_size max_num_encoder_input_tokens scheduler_reserve_full_isl stream_interval
            watermark""",
    },
    "SpeculativeConfig": {
        "weights": "code_revision draft_load_config draft_model_config model revision",
        "part": "target_model_config target_parallel_config",
        "pool": "draft_parallel_config draft_tensor_parallel_size tensor_parallel_size",
        "rounding": "disable_padded_drafter_batch enforce_eager use_local_argmax_reduction",
        "drawing": """draft_lm_head_quantization draft_sample_method dspark_draft_topk enable_adaptive_verification
            fly_entropy_threshold fly_entropy_top_k fly_window_size num_speculative_tokens
            num_speculative_tokens_per_batch_size prompt_lookup_max prompt_lookup_min rejection_sample_method
            suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth
            suffix_decoding_min_token_prob synthetic_acceptance_length synthetic_acceptance_rates xpress_topc""",
        "limits": "max_model_len",
    },
    "SpeechToTextConfig": {"hash": "max_audio_clip_s min_energy_split_window_size overlap_chunk_second sample_rate"},
    "SpeechToTextParams": {
        "hash": "audio hotwords language model_config request_prompt stt_config task_type to_language",
    },
    "StructuredOutputsConfig": {
        "drawing": """backend disable_additional_properties disable_any_whitespace enable_in_reasoning
            reasoning_parser reasoning_parser_plugin""",
    },
    "UVAOffloadConfig": {"place": "cpu_offload_gb cpu_offload_params"},
    "VideoDummyOptions": {"place": "height num_frames width"},
    "VllmConfig": {
        "unshared": "weight_transfer_config",
        "model": "quant_config",
        "part": """attention_config aux_output_config cache_config compilation_config device_config diffusion_config
            ec_manager_config ec_transfer_config engram_config kernel_config kv_events_config kv_transfer_config
            load_config logging_config lora_config mamba_config model_config observability_config offload_config
            parallel_config profiler_config reasoning_config scheduler_config speculative_config
            structured_outputs_config watchdog_config watermark_config""",
        "rounding": "optimization_level performance_mode",
        "place": "instance_id shutdown_timeout",
    },
    "WatchdogConfig": {"limits": "check_interval dump_dir timeout"},
    "WatermarkConfig": {
        "drawing": """algorithm allow_target_only_watermarking alpha context_width deduplicate_contexts
            deduplicate_contexts_max_history key prf""",
    },
    "WeightTransferConfig": {"unshared": "backend"},
}
"""By class of vLLM's configuration, then by verdict. Settings in `valuesettings` are not here: their verdict is
"identity"."""

VARIABLES: Final[Mapping[str, str]] = {
    "weights": "VLLM_MODEL_REDIRECT_PATH VLLM_USE_MODELSCOPE",
    "pool": "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
    "hash": """VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS
        VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_MEDIA_CONNECTOR VLLM_SYSTEM_START_DATE VLLM_USE_FASTOKENS""",
    "adapter": "VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST",
    "rounding": """VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC VLLM_ALLREDUCE_USE_SYMM_MEM
        VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD VLLM_CPU_ATTN_SPLIT_KV
        VLLM_CPU_CI_ENV VLLM_DCP_Q_REPLICATE VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE
        VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION
        VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_DEEP_GEMM_WARMUP VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION
        VLLM_DISABLE_PYNCCL VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE
        VLLM_ENABLE_GEMM_RS VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE
        VLLM_ENABLE_PREGRAD_PASSES VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR
        VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS VLLM_GDN_DECODE_KERNEL VLLM_KIMI_K3_AUX_ATTN_RES_STREAM
        VLLM_KIMI_K3_GEMM_AR VLLM_KIMI_K3_GEMM_RS VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT VLLM_LORA_DISABLE_PDL
        VLLM_LORA_ENABLE_DUAL_STREAM VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MOE_SKIP_PADDING VLLM_MOE_USE_DEEP_GEMM
        VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_REPLICATE_EMBED VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS
        VLLM_ROCM_AITER_MLA_ASM_PADDING VLLM_ROCM_AITER_MLA_DCP_VERIFY VLLM_ROCM_AITER_MOE_DISPATCH_POLICY
        VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING VLLM_ROCM_MONO_DECODE VLLM_ROCM_USE_AITER
        VLLM_ROCM_USE_AITER_CUSTOM_AR VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_ROCM_USE_AITER_LINEAR
        VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_MLA VLLM_ROCM_USE_AITER_MOE
        VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_TRITON_GEMM VLLM_ROCM_USE_AITER_TRITON_ROPE
        VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION VLLM_ROCM_USE_SKINNY_GEMM
        VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
        VLLM_STEP5_SHARD_SP_SHARED_EXPERT VLLM_TARGET_DEVICE VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_TRITON_USE_TD
        VLLM_TUNED_CONFIG_FOLDER VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_USE_BYTECODE_HOOK
        VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_USE_DIRECT_DCP_A2A VLLM_USE_DIRECT_DCP_KV_GATHER
        VLLM_USE_DIRECT_DCP_Q_GATHER VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_USE_HW_AGNOSTIC VLLM_USE_LAYERNAME
        VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_NCCL_SYMM_MEM VLLM_USE_OINK_OPS VLLM_USE_STANDALONE_COMPILE
        VLLM_USE_TRITON_AWQ VLLM_USE_V2_MODEL_RUNNER VLLM_XLA_USE_SPMD VLLM_XPU_ENABLE_XPU_GRAPH
        VLLM_XPU_FORCE_N_CONTIG_WEIGHT VLLM_XPU_INC_WNA16_BACKEND VLLM_XPU_PP_MICROBATCH
        VLLM_ZENTORCH_WEIGHT_PREPACK""",
    "place": """CUDA_HOME CUDA_VISIBLE_DEVICES LD_LIBRARY_PATH LOCAL_RANK MOONCAKE_PREFERRED_SEGMENT
        MOONCAKE_REQUESTER_LOCAL_HOSTNAME S3_ACCESS_KEY_ID S3_ENDPOINT_URL S3_SECRET_ACCESS_KEY VLLM_ASSETS_CACHE
        VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_CACHE_ROOT VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_CONFIG_ROOT
        VLLM_CPU_KVCACHE_SPACE VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND VLLM_CUDART_SO_PATH
        VLLM_CUDA_COMPATIBILITY_PATH VLLM_DBO_COMM_SMS VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_DISABLE_COMPILE_CACHE
        VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_DP_MASTER_IP
        VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_EC_SIDE_CHANNEL_HOST
        VLLM_EC_SIDE_CHANNEL_PORT VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_ELASTIC_EP_SCALE_UP_LAUNCH
        VLLM_ENABLE_CUDAGRAPH_GC VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_ENABLE_STARTUP_PLAN
        VLLM_ENABLE_V1_MULTIPROCESSING VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
        VLLM_FORCE_AOT_LOAD VLLM_GPU_NIC_PCIE_MAPPING VLLM_HAS_FLASHINFER_CUBIN VLLM_HOST_IP
        VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS
        VLLM_LOOPBACK_IP VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS
        VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_MOONCAKE_BOOTSTRAP_PORT
        VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MQ_MAX_CHUNK_BYTES_MB
        VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH VLLM_NIC_SELECTION_VARS
        VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME
        VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT VLLM_PLE_CPU_OFFLOAD VLLM_PORT
        VLLM_PROCESS_NAME_PREFIX VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY
        VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY
        VLLM_RAY_PER_WORKER_GPUS VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_RPC_BASE_PATH VLLM_RUST_FRONTEND_PATH
        VLLM_SKIP_P2P_CHECK VLLM_TPU_USING_PATHWAYS VLLM_TRITON_JIT_WARMUP_NUM_THREADS
        VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE
        VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_WRAPPED_PP_COMM
        VLLM_USE_RUST_BENCH VLLM_USE_RUST_FRONTEND VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_USE_SPINLOOP_EXT
        VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA
        VLLM_WORKER_MULTIPROC_METHOD VLLM_WSL2_ENABLE_PIN_MEMORY VLLM_XGRAMMAR_CACHE_MB VLLM_XLA_CACHE_PATH""",
    "drawing": """VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT
        VLLM_ENABLE_COHERE_API VLLM_ENABLE_RESPONSES_API_STORE VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY
        VLLM_USE_FLASHINFER_SAMPLER VLLM_V1_USE_OUTLINES_CACHE VLLM_XPU_USE_SAMPLER_KERNEL""",
    "limits": """VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_API_KEY VLLM_AUDIO_FETCH_TIMEOUT
        VLLM_CHAT_TEMPLATE_FUEL VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_ENGINE_ITERATION_TIMEOUT_S
        VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_HTTP_MAX_REQUEST_BODY_SIZE
        VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_IMAGE_FETCH_TIMEOUT VLLM_MAX_AUDIO_CLIP_FILESIZE_MB
        VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_PREPROCESS_WORKERS
        VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_EMBED_DECODE_BYTES
        VLLM_MAX_IMAGE_PIXELS VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES
        VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS
        VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
        VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_P2P_MAX_PEERS
        VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_SKIP_MODEL_NAME_VALIDATION
        VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_VIDEO_FETCH_TIMEOUT VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS""",
    "watching": """FORCE_COLOR NO_COLOR VLLM_COMPUTE_NANS_IN_LOGITS VLLM_CONFIGURE_LOGGING
        VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_DEBUG_DUMP_PATH VLLM_DEBUG_LOG_API_SERVER_RESPONSE
        VLLM_DEBUG_MFU_METRICS VLLM_DEBUG_WORKSPACE VLLM_DISABLE_LOG_LOGO VLLM_DO_NOT_TRACK VLLM_GC_DEBUG
        VLLM_GPU_SYNC_CHECK VLLM_IMAGE_TAG VLLM_LOGGING_COLOR VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL
        VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION
        VLLM_LOG_STATS_INTERVAL VLLM_MOONCAKE_STORE_TIER_LOG VLLM_NO_USAGE_STATS VLLM_NVTX_SCOPES_FOR_PROFILING
        VLLM_PATTERN_MATCH_DEBUG VLLM_RAISE_ON_LOGIT_NANS VLLM_REQUEST_BODY_LOG_LEVEL VLLM_SERVER_DEV_MODE
        VLLM_TRACE_FUNCTION VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER VLLM_XLA_CHECK_RECOMPILATION""",
    "building": """CMAKE_BUILD_TYPE MAX_JOBS NVCC_THREADS VERBOSE VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL
        VLLM_DOCKER_BUILD_CONTEXT VLLM_MAIN_CUDA_VERSION VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX
        VLLM_SKIP_VERSION_SUFFIX VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST""",
}
"""Variables of the environment that vLLM reads, by verdict, but for those in `valuesettings`."""

FILES: Final[Mapping[str, str]] = {
    "identity": """custom_video.json modeling_model.py preprocessor_config.json processing_model.py
        processor_config.json sub/encoder.py tekken.json tokenizer_config.json video_preprocessor_config.json
        hf_quant_config.json quant_config.json quantize_config.json""",
    "weights": "consolidated.pth model-00001-of-00002.safetensors model.bin model.gguf model.safetensors.index.json",
    "model": "config.json",
    "hash": """added_tokens.json chat_template.json chat_template.jinja merges.txt special_tokens_map.json
        tokenizer.json tokenizer.model vocab.json""",
    "drawing": "generation_config.json README.md",
}
"""Files in a model's folder, by verdict: what counts for a model with a processor and remote code."""


def verdicts(table: Mapping[str, str]) -> dict[str, str]:
    """The verdict on each name."""
    found: dict[str, str] = {}
    for verdict, names in table.items():
        assert verdict in VERDICTS
        for name in names.split():
            assert name not in found, f"{name} has two verdicts"
            found[name] = verdict
    return found


def field_verdicts(kind: str) -> dict[str, str]:
    """The verdict on each field of this class of vLLM's configuration."""
    own = [name for part, names in valuesettings.FIELDS.items() if PARTS.get(part) == kind for name in names]
    if kind == "VllmConfig":
        own += [part for part, names in valuesettings.FIELDS.items() if not names]
    return _with_identity(FIELDS.get(kind, {}), own)


def variable_verdicts() -> dict[str, str]:
    return _with_identity(VARIABLES, valuesettings.VARIABLES)


def _with_identity(table: Mapping[str, str], own: Sequence[str]) -> dict[str, str]:
    found = verdicts(table)
    assert not found.keys() & set(own), "these have another verdict, and are in the identity"
    return found | dict.fromkeys(own, "identity")


_NO_FIELDS = ("ClassVar", "InitVar")


def config_fields(root: Path) -> dict[str, set[str]]:
    """The fields of each dataclass of vLLM's configuration. `root`: the folder that holds the package `vllm`."""
    found = {}
    for file in sorted((root / "vllm" / "config").glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            decorators = map(ast.unparse, node.decorator_list) if isinstance(node, ast.ClassDef) else ()
            if isinstance(node, ast.ClassDef) and any("config" in each or "dataclass" in each for each in decorators):
                found[node.name] = {
                    line.target.id
                    for line in node.body
                    if isinstance(line, ast.AnnAssign)
                    and isinstance(line.target, ast.Name)
                    and not any(word in ast.unparse(line.annotation) for word in _NO_FIELDS)
                }
    return found


def variables(root: Path) -> set[str]:
    """The variables of the environment that vLLM reads."""
    source = (root / "vllm" / "envs.py").read_text()
    return set(re.findall(r'^    "([A-Z][A-Z0-9_]+)":', source, re.MULTILINE))


def without_verdict(root: Path) -> list[str]:
    """Fields and variables of this version that are not above."""
    fields = [
        f"{name}.{field}"
        for name, found in config_fields(root).items()
        for field in found - field_verdicts(name).keys()
    ]
    return sorted([*fields, *(variables(root) - variable_verdicts().keys())])
