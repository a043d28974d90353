"""The settings of a vLLM engine that change the values in its KV cache, beyond rounding.

The order of a sum, and with it the last bits of its result, differs between batches of one engine already. Which kernel
computes does not count, unless it computes with another precision, or approximates. Settings that change where memory
lies belong to `PoolIdentity`. `tests/vllm/valuesources.py` has a verdict on every setting of vLLM.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "additional_config": (),
    "attention_config": (
        "backend",
        "backend_per_kind",
        "disable_flashinfer_q_quantization",
        "indexer_kv_dtype",
        "indexer_sparse_logits",
        "mla_prefill_backend",
        "use_non_causal",
        "use_prefill_query_quantization",
    ),
    "cache_config": (
        "calculate_kv_scales",
        "kv_cache_dtype_skip_layers",
        "kv_cache_layout",
        "kv_sharing_fast_prefill",
        "mamba_cache_dtype",
        "mamba_cache_mode",
        "mamba_ssm_cache_dtype",
        "swa_bounded_replay",
        "use_kda_recoverssm",
        "use_replayssm",
    ),
    "diffusion_config": ("canvas_length", "max_denoising_steps"),
    "ec_transfer_config": ("ec_connector", "ec_connector_extra_config", "ec_role"),
    "kernel_config": ("linear_backend", "linear_backend_per_quant", "moe_backend", "sparse_indexer_topk_backend"),
    "load_config": ("ignore_patterns", "model_loader_extra_config"),
    "mamba_config": ("enable_stochastic_rounding", "stochastic_rounding_philox_rounds"),
    "model_config": (
        "convert",
        "disable_sliding_window",
        "dtype",
        "model_class_overrides",
        "model_impl",
        "quantization",
        "quantization_config",
    ),
    "multimodal_config": (
        "media_io_kwargs",
        "mm_device_do_normalize",
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",
        "mm_processor_kwargs",
        "video_pruning_method",
        "video_pruning_rate",
    ),
    "parallel_config": ("all2all_backend", "worker_cls", "worker_extension_cls"),
    "speculative_config": (
        "attention_backend",
        "disable_eagle_block_drop",
        "disable_lookahead_block_hashes",
        "index_share_for_mtp_iteration",
        "kv_cache_dtype",
        "method",
        "moe_backend",
        "parallel_drafting",
        "quantization",
        "use_heterogeneous_vocab",
    ),
}
"""By part of the configuration. A part without names counts as a whole. vLLM's hash of an image covers the settings of
its request, and not those of the engine."""
VARIABLES: Final = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_DISABLED_KERNELS",
    "VLLM_ENABLE_HPC_OPS",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_MOE_GEMM_TYPE",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE",
    "VLLM_MLA_DISABLE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD",
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD",
    "VLLM_PLUGINS",
    "VLLM_PP_LAYER_PARTITION",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN",
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT",
    "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE",
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16",
    "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB",
    "VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_ROCM_USE_AITER_FP4BMM",
    "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM",
    "VLLM_ROCM_USE_AITER_FP8BMM",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4",
    "VLLM_SSM_CONV_STATE_LAYOUT",
    "VLLM_TEST_FORCE_LOAD_FORMAT",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_USE_FLASHINFER_MOE_INT4",
    "VLLM_VIDEO_LOADER_BACKEND",
)
"""Variables of the environment, which count as they are written."""
_OF_NO_VALUE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
"""Fields of a model's configuration that change no KV, or that are settings of their own."""
_LONG_ROPES = {"longrope", "su", "dynamic"}
"""Kinds of rope scaling that depend on the longest request."""


def value_settings(config: Any) -> dict[str, str]:
    """Those that are set, by name. What is off or automatic is the same as in versions that do not have the setting.
    Raises `OSError` for a file of scales that cannot be read."""
    settings = {"hf_config": described_digest(config.model_config)}
    for part, names in FIELDS.items():
        section = _part(config, part)
        values = {name: getattr(section, name, None) for name in names} if names else {"": section}
        for name, value in values.items():
            if value and value != "auto":
                settings[f"{part}.{name}".rstrip(".")] = _text(name, value)
    settings |= {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    if are_dummies(config):
        settings["dummy weights"] = f"seed {config.model_config.seed}"
    if _is_long(config.model_config):
        settings["model_config.max_model_len"] = str(config.model_config.max_model_len)
    drafter = getattr(config.speculative_config, "draft_model_config", None)
    if drafter is not None:
        settings["drafter.hf_config"] = described_digest(drafter)
        settings["drafter.dtype"] = str(drafter.dtype)
    return settings


def described_digest(model: Any) -> str:
    """Of the model's configuration as vLLM has it, with all overrides."""
    described = model.hf_config.to_dict()
    return digest_of({name: value for name, value in described.items() if name not in _OF_NO_VALUE})


def are_dummies(config: Any) -> bool:
    return str(getattr(getattr(config, "load_config", None), "load_format", "")) == "dummy"


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _part(config: Any, name: str) -> Any:
    owner = config.model_config if name == "multimodal_config" else config
    return getattr(owner, name, None)


def _text(name: str, value: Any) -> str:
    if name.endswith("_path"):
        return hashlib.sha256(Path(value).read_bytes()).hexdigest()[:16]
    if isinstance(value, Mapping | list | tuple | set):
        return digest_of(sorted(map(str, value)) if isinstance(value, set) else value)
    text = str(value)
    return text if len(text) <= 100 else digest_of(text)


def _is_long(model: Any) -> bool:
    ropes = _ropes(model.hf_config.to_dict())
    return bool(_LONG_ROPES & {kind for rope in ropes for kind in (rope.get("rope_type"), rope.get("type"))})


def _ropes(described: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """All rope settings in a model's configuration, which may be nested."""
    found = []
    for name, value in described.items():
        if isinstance(value, Mapping):
            found += [value] if name in ("rope_scaling", "rope_parameters") else []
            found += _ropes(value)
    return found
