"""What a vLLM engine says of itself to the node service: whose memory it can share, and whose blocks."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from kvstow.attach.identity import GroupIdentity, NamespaceIdentity, PoolIdentity
from kvstow.errors import ConfigError
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.metadata import RankHello
from kvstow_service.connectors.vllm.weightsid import Weights, identify_weights

logger = logging.getLogger("kvstow.vllm")

_PROBE_BLOCKS = 3
_OF_NO_VALUE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
"""Of a model's configuration: what changes no KV, or is a setting of its own."""
_LONG_ROPES = {"longrope", "su", "dynamic"}
"""Kinds of rope scaling that depend on the longest request."""


def pool_identity(
    config: Any, kv_cache_config: Any, groups: KVGroups, hellos: Sequence[RankHello], *, replicated: bool
) -> PoolIdentity:
    """`hellos` of all ranks, in order. Raises `ConfigError` if they are on several nodes."""
    if len({hello.node for hello in hellos}) > 1:
        allowed = "none where an engine's ranks are on several nodes: each has a service of its own"
        raise ConfigError("kv_connector_extra_config: attach", "set", allowed)
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
    """vLLM must have initialized its block hashes. `weights_id`: as configured."""
    model = config.model_config
    weights = _weights(model, weights_id)
    probe, unshared = hash_probe(config.cache_config.prefix_caching_hash_algo, hash_tokens), _unshared(config, weights)
    if unshared:
        probe = f"{probe}-{secrets.token_hex(8)}"
    return NamespaceIdentity(
        model=weights.model,
        weights_id=weights.weights_id or "unknown",
        weights_source=weights.source,
        hash_probe=probe,
        value_settings=tuple(_value_settings(config).items()),
        unshared=unshared,
    )


def hash_probe(algorithm: str, hash_tokens: int) -> str:
    """What this process makes of known tokens, and of a name that a hash may cover."""
    function = get_hash_fn_by_name(algorithm)
    parts = [b"tagged" if _tags_extra_keys() else b""]
    for extra_keys in (None, ("kvstow-lora",), (("image-hash", 0),), ("kvstow-salt", "kvstow-embedding")):
        parent: Any = None
        for number in range(_PROBE_BLOCKS):
            tokens = range(number * hash_tokens, (number + 1) * hash_tokens)
            parent = kv_cache_utils.hash_block_tokens(function, parent, list(tokens), extra_keys)
        parts.append(bytes(parent))
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


def _unshared(config: Any, weights: Weights) -> str:
    """Why no other engine may share this one's blocks; empty if they may."""
    if not _are_reproducible(config.cache_config.prefix_caching_hash_algo):
        return (
            "hashes_not_reproducible: this vLLM hashes tokens with a seed of its own; set PYTHONHASHSEED to the same "
            "value for all engines"
        )
    if config.lora_config is not None and not _tags_extra_keys():
        return "lora_names_not_unique: this vLLM hashes the name of a LoRA adapter alone; vLLM 0.32 hashes its path too"
    if not weights.weights_id:
        return f"weights_unknown: nothing identifies the weights of {weights.model}; set weights_id"
    return ""


def _are_reproducible(algorithm: str) -> bool:
    function = get_hash_fn_by_name(algorithm)
    seeds = os.environ.get("PYTHONHASHSEED"), getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    return any(seed is not None and function(seed) == kv_cache_utils.NONE_HASH for seed in seeds)


def _tags_extra_keys() -> bool:
    """Whether hashes cover a LoRA adapter's path beside its name."""
    return hasattr(kv_cache_utils, "to_event_extra_keys")


def _weights(model: Any, configured: str | None) -> Weights:
    return identify_weights(model.model, getattr(model, "revision", None), configured, _find_cached)


def _find_cached(repository: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache  # type: ignore[import-not-found, unused-ignore]

    try:
        found = try_to_load_from_cache(repository, "config.json", revision=revision)
    except Exception as error:  # noqa: BLE001 - a name that is no repository, such as s3://bucket
        logger.debug("the weights of %s are not in the cache: %s", repository, error)
        return None
    return Path(found) if isinstance(found, str) else None


def _value_settings(config: Any) -> dict[str, str]:
    """Settings on which the values in the KV cache depend."""
    model, cache, drafter = config.model_config, config.cache_config, config.speculative_config
    described: Mapping[str, Any] = model.hf_config.to_dict()
    settings = {
        "model_config": _digest({name: value for name, value in described.items() if name not in _OF_NO_VALUE}),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "calculate_kv_scales": str(getattr(cache, "calculate_kv_scales", False)),
    }
    if _LONG_ROPES & {kind for rope in _ropes(described) for kind in (rope.get("rope_type"), rope.get("type"))}:
        settings["max_model_len"] = str(model.max_model_len)
    if drafter is not None:
        settings["drafter"] = str(drafter.method)
        if (draft := getattr(drafter, "draft_model_config", None)) is not None:
            settings["drafter_weights"] = _weights(draft, None).weights_id or secrets.token_hex(8)
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
