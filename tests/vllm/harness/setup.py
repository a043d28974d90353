"""What is varied between runs, and vLLM's configuration for it."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvstow_service.connectors.engine_core.schedulerside import STEP_BLOCKS

BLOCK_TOKENS = 16
VALUE_BYTES = 8
WINDOW = 40
MAX_MODEL_LEN = 512
TOKENS_PER_STEP = 128
RUNNING = 8

Layers = Literal["full", "window", "hybrid", "mixed", "wide hybrid", "late window", "scratch", "replayed"]


@dataclass(frozen=True)
class Setup:
    """One run.

    `blocks` of the device are few, so that preemption is common. Copies read `delay` ticks after their submission,
    three of which are a step, and stores write up to `gap` ticks later. `slots` below `bad_slots` can never be read.
    Rates are per step (`abort_rate`, `operator_rate`), op (`failure_rate`) or request (`repeat_rate`: an earlier prompt
    in whole blocks) or arrival (`fan_rate`: several requests at once that begin like an earlier one). `operations`
    names the operator's actions, by default all.

    `attached`: to a node service whose answers come `answers` steps later, one of these at random. `by_layer`: whether
    loads go within their step. `refusal_rate`: how often a rank whose session has ended waits no longer for its host,
    each time that it looks. `layers`: two
    of full attention; two with a window; two of each, in two groups; one of each with blocks of 16 and 32 tokens; two
    of each with blocks of 32 tokens and a window of 96; one of each with blocks of 256 and 32 tokens, and a window of
    512; one of full attention, and scratch; one of full attention, and one whose window vLLM computes anew where a hit
    ends. `stages`: the ranks are stages of a pipeline.
    `drafts`: tokens that are proposed, and partly rejected, in each decode step. `step_blocks`: how many the connector
    offers to its pool in a step.
    """

    name: str
    layers: Layers = "full"
    asynchronous: bool = False
    attached: bool = False
    answers: tuple[int, ...] = (0, 1, 1, 1, 3)
    by_layer: bool = False
    refusal_rate: float = 0.0
    lazy: bool = False
    ranks: int = 1
    stages: bool = False
    drafts: int = 0
    layout: str = "LBHNC"
    seed: int = 1
    requests: int = 140
    blocks: int = 50
    slots: int = 128
    delay: tuple[int, int] = (1, 14)
    gap: int = 14
    repeat_rate: float = 0.0
    fan_rate: float = 0.0
    abort_rate: float = 0.03
    failure_rate: float = 0.0
    bad_slots: int = 0
    operator_rate: float = 0.0
    operations: tuple[str, ...] = ()
    step_blocks: int = STEP_BLOCKS
    tokens_per_step: int = TOKENS_PER_STEP
    max_model_len: int = MAX_MODEL_LEN


class Geometry(NamedTuple):
    """`scheduler_block` and `hash_block` in tokens."""

    workers: KVCacheConfig
    scheduler: KVCacheConfig
    scheduler_block: int
    hash_block: int


def make_vllm_config(setup: Setup, connector_module: str, extra: dict[str, Any]) -> VllmConfig:
    """Of an engine with `setup.ranks` ranks. On a CPU vLLM refuses asynchronous scheduling, and drafts
    beside it; so both are put in afterwards."""
    size = "pipeline_parallel_size" if setup.stages else "tensor_parallel_size"
    parallel = ParallelConfig(**{size: setup.ranks}, distributed_executor_backend="mp")
    config = VllmConfig(
        model_config=_model(setup.max_model_len),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=RUNNING,
            max_num_batched_tokens=setup.tokens_per_step,
            max_model_len=setup.max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            scheduler_reserve_full_isl=False,  # admits more than fits: more preemptions
        ),
        parallel_config=parallel,
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVStowConnector",
            kv_connector_module_path=connector_module,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
    )
    config.scheduler_config.async_scheduling = setup.asynchronous
    config.cache_config.kv_cache_layout = setup.layout
    if setup.drafts:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=setup.drafts,
            prompt_lookup_max=3,
            target_model_config=config.model_config,
            target_parallel_config=parallel,
        )
    return config


def make_geometry(setup: Setup, config: VllmConfig) -> Geometry:
    """As the engine core resolves it; fills in `config` like it does."""
    groups = get_kv_cache_groups(config, _layer_specs(setup.layers))
    page_bytes = max(sum(group.kv_cache_spec.page_size_bytes for _ in group.layer_names) for group in groups)
    workers = get_kv_cache_config_from_groups(config, groups, setup.blocks * page_bytes)
    scheduler = generate_scheduler_kv_cache_config([workers])
    config.cache_config.num_gpu_blocks = scheduler.num_blocks
    config.cache_config.block_size = min(group.kv_cache_spec.block_size for group in groups)
    blocks = resolve_kv_cache_block_sizes(scheduler, config)
    alignment = resolve_cache_hit_alignment_tokens(scheduler, config, *blocks)
    for each in (workers, scheduler):
        each.kv_cache_layout = setup.layout
        each.hash_block_size = blocks[1]
        each.cache_hit_alignment_tokens = alignment
    return Geometry(workers, scheduler, *blocks)


def of_rank(config: VllmConfig, rank: int) -> VllmConfig:
    """The configuration as the worker of `rank` gets it."""
    config = copy.copy(config)
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.rank = rank
    return config


def _layer_specs(layers: Layers) -> dict[str, KVCacheSpec]:
    """Eight bytes, one value, per token and layer; sixteen where the pages of blocks of unequal size must agree."""
    shape = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 2}
    full = FullAttentionSpec(**shape, dtype=torch.float16)
    wide = FullAttentionSpec(**shape, dtype=torch.float32)
    window = SlidingWindowSpec(**shape, dtype=torch.float16, sliding_window=WINDOW)
    if layers == "full":
        return {"layer.0": full, "layer.1": full}
    if layers == "window":
        return {"layer.0": window, "layer.1": window}
    if layers == "hybrid":
        return _hybrid(full, window)
    if layers == "wide hybrid":
        return _hybrid(full.copy_with_new_block_size(32), replace(window, block_size=32, sliding_window=96))
    if layers == "late window":
        return {
            "layer.0": full.copy_with_new_block_size(256),
            "layer.1": replace(window, block_size=32, head_size=16, head_size_v=16, sliding_window=512),
        }
    if layers == "scratch":
        ring = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=4, dtype=torch.float16)
        return {"layer.0": full, "layer.1": ring}
    if layers == "replayed":
        sizes = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float16}
        return {"layer.0": full, "layer.1": SlidingWindowMLASpec(**sizes, sliding_window=WINDOW, bounded_replay=True)}
    return {"layer.0": wide, "layer.1": window}


def _hybrid(full: KVCacheSpec, window: KVCacheSpec) -> dict[str, KVCacheSpec]:
    return {"layer.0": full, "layer.1": window, "layer.2": full, "layer.3": window}


@cache
def _model(max_model_len: int) -> ModelConfig:
    """A tiny Llama of which there are no weights."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_LLAMA))
        return ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len)


_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
