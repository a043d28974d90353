"""The identity of a vLLM engine: whose memory it can share, and whose blocks, on its node and on others."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from kvstow.attach.identity import DRAFTER_WEIGHTS, FleetWeights, GroupIdentity, NamespaceIdentity, PoolIdentity
from kvstow_service.connectors.engine_core.hubcache import find_cached
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.metadata import RankHello
from kvstow_service.connectors.engine_core.processstart import program_start
from kvstow_service.connectors.vllm.modelfiles import ModelFiles, read_model_files
from kvstow_service.connectors.vllm.weightsid import Weights, identify_weights

logger = logging.getLogger("kvstow.vllm")

_PROBE_BLOCKS = 3
_OF_NO_VALUE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
"""Fields of a model's configuration that change no KV, or that are settings of their own."""
_MULTIMODAL = (
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)
"""Settings of the engine that decide what becomes of an image. vLLM's hash of an image covers those of its request
alone."""
_COMMIT = re.compile("[0-9a-f]{40}")
_LONG_ROPES = {"longrope", "su", "dynamic"}
"""Kinds of rope scaling that depend on the longest request."""


def pool_identity(
    config: Any, kv_cache_config: Any, groups: KVGroups, hellos: Sequence[RankHello], *, replicated: bool
) -> PoolIdentity:
    """`hellos` of all ranks, in order."""
    parallel = config.parallel_config
    first, *others = hellos
    layers = {index: group.layer_names for index, group in enumerate(kv_cache_config.kv_cache_groups)}
    return PoolIdentity(
        slot_bytes=tuple([hello.slot_bytes for hello in hellos]),
        regions=first.regions,
        other_regions=tuple([(hello.rank, hello.regions) for hello in others if hello.regions != first.regions]),
        kv_cache_dtype=str(config.cache_config.cache_dtype),
        groups=tuple([_group(group, layers[group.index]) for group in groups.groups]),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        prefill_context_parallel=getattr(parallel, "prefill_context_parallel_size", 1),
        decode_context_parallel=parallel.decode_context_parallel_size,
        replicated=replicated,
    )


def namespace_identity(config: Any, hash_tokens: int, weights_id: str | None) -> NamespaceIdentity:
    """Call it once vLLM has initialized its block hashes. `weights_id`: as configured."""
    model = config.model_config
    weights = _weights(model, weights_id)
    drafter = _drafter_weights(config, weights_id)
    probe = hash_probe(config.cache_config.prefix_caching_hash_algo, hash_tokens)
    files = _model_files(config)
    unshared = _unshared(config, weights, drafter) or _unshared_files(config, files)
    if unshared:
        probe = f"{probe}-{secrets.token_hex(8)}"
    return NamespaceIdentity(
        model=weights.model,
        weights_id=weights.weights_id or "unknown",
        weights_source=weights.source,
        hash_probe=probe,
        value_settings=tuple(_value_settings(config, drafter, files).items()),
        unshared=unshared,
    )


def fleet_weights(config: Any, weights_id: str | None) -> FleetWeights:
    """The name of this engine's weights on every node: see `read_fleet_weights`. If the files cannot be read, there is
    no name, and the error is the reason."""
    try:
        return read_fleet_weights(config, weights_id)
    except OSError as error:
        return FleetWeights(
            reason=f"weights_unknown: the files of the weights cannot be read ({error}); set weights_id"
        )


def read_fleet_weights(config: Any, weights_id: str | None, *, loaded_by: float = inf) -> FleetWeights:
    """The name of this engine's weights on every node. `weights_id`: as configured. Reads samples of a model that is a
    folder (`digest_of_weights`), and of a drafter that is one. Raises `OSError`. Files that have changed after
    `loaded_by`, in seconds since the epoch, may not be those that were loaded."""
    names = []
    for weights in (_weights(config.model_config, weights_id), _drafter_weights(config, weights_id)):
        if weights is None:
            continue
        if weights.source != "configured" and _are_dummies(config):
            return FleetWeights(reason="weights_unknown: load_format is dummy; set weights_id")
        name = weights.fleet_id()
        if not name:
            return FleetWeights(reason=_unknown(weights, config))
        if weights.changed_after(loaded_by):
            return FleetWeights(reason="weights_unknown: their files have changed since vLLM started; set weights_id")
        names.append(name)
    return FleetWeights(" and ".join(dict.fromkeys(names)))


def hash_probe(algorithm: str, hash_tokens: int) -> str:
    """The hashes that this process computes for known tokens, and for a name that a hash may cover."""
    function = get_hash_fn_by_name(algorithm)
    parts = [b"tagged" if _tags_extra_keys() else b""]
    for extra_keys in (None, ("kvstow-lora",), (("image-hash", 0),), ("kvstow-salt", "kvstow-embedding")):
        parent: Any = None
        for number in range(_PROBE_BLOCKS):
            tokens = range(number * hash_tokens, (number + 1) * hash_tokens)
            parent = kv_cache_utils.hash_block_tokens(function, parent, list(tokens), extra_keys)
        parts.append(bytes(parent))
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


def _unshared(config: Any, weights: Weights, drafter: Weights | None) -> str:
    """Why no other engine may share this one's blocks; empty if they may."""
    if not _are_reproducible(config.cache_config.prefix_caching_hash_algo):
        return (
            "hashes_not_reproducible: this vLLM hashes tokens with a seed of its own; set PYTHONHASHSEED to the same "
            "value for all engines"
        )
    if config.lora_config is not None and not _tags_extra_keys():
        return "lora_names_not_unique: this vLLM hashes the name of a LoRA adapter alone; vLLM 0.32 hashes its path too"
    for one in (weights, drafter):
        if one is not None and not one.weights_id:
            return _unknown(one, config)
    if getattr(config.cache_config, "calculate_kv_scales", False):
        return (
            "kv_scales_not_fixed: calculate_kv_scales takes the scales of the KV cache from the first requests of each "
            "engine; use a model that comes with scales"
        )
    return ""


def _unshared_files(config: Any, files: ModelFiles | str) -> str:
    """The same, for the files of the processor and of remote code."""
    if isinstance(files, str):
        return files
    if files.others and not _COMMIT.fullmatch(str(config.model_config.code_revision)):
        return "files_unknown: the model's code comes from another repository; set code_revision to a commit"
    if files.changed is not None:
        return f"files_changed: {files.changed} has changed since vLLM started, which may have read it before; restart"
    return ""


def _unknown(weights: Weights, config: Any) -> str:
    is_drafter = weights.model != config.model_config.model
    remedy = "take the drafter from a folder or the cache of the Hugging Face Hub" if is_drafter else "set weights_id"
    return f"weights_unknown: nothing identifies the weights of {weights.model}; {remedy}"


def _are_dummies(config: Any) -> bool:
    return str(getattr(getattr(config, "load_config", None), "load_format", "")) == "dummy"


def _are_reproducible(algorithm: str) -> bool:
    function = get_hash_fn_by_name(algorithm)
    seeds = os.environ.get("PYTHONHASHSEED"), getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    return any(seed is not None and function(seed) == kv_cache_utils.NONE_HASH for seed in seeds)


def _tags_extra_keys() -> bool:
    """Whether hashes cover a LoRA adapter's path in addition to its name."""
    return hasattr(kv_cache_utils, "to_event_extra_keys")


def _weights(model: Any, configured: str | None) -> Weights:
    return identify_weights(model.model, getattr(model, "revision", None), configured, find_cached)


def _drafter_weights(config: Any, configured: str | None) -> Weights | None:
    """The drafter's weights. vLLM names the model itself as the drafter if the drafter has no weights of its own.
    `configured`: the model's `weights_id`."""
    drafter = getattr(config.speculative_config, "draft_model_config", None)
    if drafter is None:
        return None
    return _weights(drafter, configured if drafter.model == config.model_config.model else None)


def _model_files(config: Any) -> ModelFiles | str:
    """Those that count for this model, besides weights and configuration; why they are unknown if they are."""
    model = config.model_config
    has_processor, has_code = getattr(model, "multimodal_config", None) is not None, model.trust_remote_code
    if not has_processor and not has_code:
        return ModelFiles("", others=False, changed=None)
    places = []
    names = [(model.model, model.revision), (model.hf_config_path, None)]
    names += [(model.tokenizer, model.tokenizer_revision)] if has_processor else []
    for name, revision in dict.fromkeys(names):
        if not name or Path(name).is_file():
            continue
        cached = None if Path(name).is_dir() else find_cached(name, revision)
        place = Path(name) if cached is None else cached.parent
        if not place.is_dir():
            return f"files_unknown: {name} is neither a folder nor in the cache of the Hugging Face Hub"
        places.append(place)
    try:
        return read_model_files(places, processor=has_processor, code=has_code, loaded_by=program_start())
    except OSError as error:
        return f"files_unknown: the files of the processor or of remote code cannot be read ({error})"


def _value_settings(config: Any, drafter_weights: Weights | None, files: ModelFiles | str) -> dict[str, str]:
    """Settings that change the values in the KV cache."""
    model, cache, drafter = config.model_config, config.cache_config, config.speculative_config
    described: Mapping[str, Any] = model.hf_config.to_dict()
    settings = {
        "model_config": _digest({name: value for name, value in described.items() if name not in _OF_NO_VALUE}),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "calculate_kv_scales": str(getattr(cache, "calculate_kv_scales", False)),
    }
    if isinstance(files, ModelFiles) and files.digest:
        settings["model_files"] = files.digest
    multimodal = getattr(model, "multimodal_config", None)
    for name in _MULTIMODAL if multimodal is not None else ():
        if value := getattr(multimodal, name, None):  # what is off is the same in versions that do not have it
            settings[name] = _digest(value)
    if _are_dummies(config):
        settings["load_format"] = "dummy"
    if _LONG_ROPES & {kind for rope in _ropes(described) for kind in (rope.get("rope_type"), rope.get("type"))}:
        settings["max_model_len"] = str(model.max_model_len)
    if drafter is not None:
        settings["drafter"] = str(drafter.method)
        if drafter_weights is not None:
            settings[DRAFTER_WEIGHTS] = drafter_weights.weights_id or "unknown"
    return settings


def _ropes(described: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """All rope settings in a model's configuration, which may be nested."""
    found = []
    for name, value in described.items():
        if isinstance(value, Mapping):
            found += [value] if name in ("rope_scaling", "rope_parameters") else []
            found += _ropes(value)
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _group(group: KVGroup, layers: Sequence[str]) -> GroupIdentity:
    kind = "full" if group.is_full else "state" if group.is_state else "chunk" if group.chunk is not None else "window"
    return GroupIdentity(
        kind=f"{kind} {_digest(sorted(layers))}",
        block_tokens=group.block_tokens,
        hash_tokens=group.block_tokens // group.hashes_per_block,
        window=group.window if group.chunk is None else group.chunk,
    )
