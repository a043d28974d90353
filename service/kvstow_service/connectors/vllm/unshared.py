"""Why no other engine may share the blocks of this one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from kvstow_service.connectors.engine_core.hubcache import COMMIT, reference_of
from kvstow_service.connectors.engine_core.processstart import process_start, program_start
from kvstow_service.connectors.vllm.weightsid import Weights

_FROM_THE_MODEL = {
    "auto",
    "bitsandbytes",
    "dummy",
    "fastsafetensors",
    "gguf",
    "hf",
    "instanttensor",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "runai_streamer_sharded",
    "safetensors",
    "sharded_state",
}
"""Load formats that take the weights from where the model is. Others, and those of plugins, may take any."""


def why_unshared(config: Any, weights: Weights, drafter: Weights | None) -> str:
    """The reason, as a sentence; empty if others may share them."""
    if not _are_reproducible(config.cache_config.prefix_caching_hash_algo):
        return (
            "hashes_not_reproducible: this vLLM hashes tokens with a seed of its own; set PYTHONHASHSEED to the same "
            "value for all engines"
        )
    if config.lora_config is not None and not tags_extra_keys():
        return "lora_names_not_unique: this vLLM hashes the name of a LoRA adapter alone; vLLM 0.31 hashes its path too"
    if getattr(config, "weight_transfer_config", None) is not None:
        return "weights_not_fixed: weight_transfer_config lets the weights change while the engine runs"
    draft_model = getattr(config.speculative_config, "draft_model_config", None)
    for model, one in ((config.model_config, weights), (draft_model, drafter)):
        if one is not None and (reason := _why_not_known(config, model, one)):
            return reason
    if _scales_change(config):
        return (
            "kv_scales_not_fixed: calculate_kv_scales, and fp8 for the attention of an encoder without a file of "
            "scales, take scales from the first requests of each engine; use a model that comes with scales"
        )
    return ""


def unknown(weights: Weights, config: Any) -> str:
    is_drafter = weights.model != config.model_config.model
    remedy = "take the drafter from a folder or the cache of the Hugging Face Hub" if is_drafter else "set weights_id"
    return f"weights_unknown: nothing identifies the weights of {weights.model}; {remedy}"


def tags_extra_keys() -> bool:
    """Whether hashes cover a LoRA adapter's path in addition to its name."""
    return hasattr(kv_cache_utils, "to_event_extra_keys")


def _why_not_known(config: Any, model: Any, weights: Weights) -> str:
    """Why it is not certain which weights the engine has loaded."""
    if not weights.weights_id:
        return unknown(weights, config)
    if weights.source == "configured":
        return ""
    load = config.load_config
    if str(getattr(load, "load_format", "auto")) not in _FROM_THE_MODEL:
        return f"weights_unknown: load_format {load.load_format} may take them from elsewhere; set weights_id"
    try:
        if weights.changed_after(process_start()):
            return (
                "files_changed: files of the weights have changed since vLLM started, which may have read them before; "
                "restart, or set weights_id"
            )
    except OSError as error:
        return f"weights_unknown: their files cannot be read ({error}); set weights_id"
    if weights.source == "snapshot" and _has_moved(load, model, weights):
        return (
            f"revision_moved: revision {model.revision or 'main'} of {weights.model} has become another commit since "
            "vLLM started, which may have read the one before; restart, or set revision to a commit"
        )
    return ""


def _has_moved(load: Any, model: Any, weights: Weights) -> bool:
    """Whether the commit may be another one than that which was loaded. A path and a commit mean one for good."""
    if Path(model.model).exists() or COMMIT.fullmatch(str(model.revision)):
        return False
    read = getattr(model.hf_config, "_commit_hash", None)
    if read is not None:
        return bool(read != weights.weights_id)
    reference = reference_of(model.model, model.revision, getattr(load, "download_dir", None))
    return reference is None or reference.stat().st_ctime > program_start()


def _are_reproducible(algorithm: str) -> bool:
    function = get_hash_fn_by_name(algorithm)
    seeds = os.environ.get("PYTHONHASHSEED"), getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    return any(seed is not None and function(seed) == kv_cache_utils.NONE_HASH for seed in seeds)


def _scales_change(config: Any) -> bool:
    multimodal = getattr(config.model_config, "multimodal_config", None)
    is_encoder_scaled = getattr(multimodal, "mm_encoder_attn_dtype", None) == "fp8"
    if is_encoder_scaled and not getattr(multimodal, "mm_encoder_fp8_scale_path", None):
        return True
    return bool(getattr(config.cache_config, "calculate_kv_scales", False))
