"""The identity of a vLLM engine, which decides with which engines it shares memory and blocks, on its node and on
others. If no other engine may share its blocks, this module says why."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from kvstow.attach.identity import DRAFTER_WEIGHTS, FleetWeights, GroupIdentity, NamespaceIdentity, PoolIdentity
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.metadata import LoadedFiles, RankHello
from kvstow_service.connectors.engine_core.vllmprocess import COMMIT, program_start, reference_of
from kvstow_service.connectors.vllm.modelpaths import ModelTrails, snapshot_finder
from kvstow_service.connectors.vllm.modelweights import Weights, identify_weights
from kvstow_service.connectors.vllm.valuesettings import (
    are_dummies,
    digest_of,
    drafter_of,
    model_files,
    value_settings,
)

_PROBE_BLOCKS = 3
"""How many blocks `hash_probe` hashes for each kind of extra key."""

_UNSEEN = "KVStow's plugin was not loaded: name kvstow in VLLM_PLUGINS, or do not set it"
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
"""Load formats that read the weights from where the model is. Other formats, such as those of plugins, may read them
from anywhere."""


def pool_identity(
    config: Any, kv_cache_config: Any, groups: KVGroups, hellos: Sequence[RankHello], *, replicated: bool
) -> PoolIdentity:
    """The identity of the pool that this engine uses. `hellos` are those of all ranks, in order."""
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


class EngineModel(NamedTuple):
    """The model of the engine, read when its ranks have loaded it. `settings`: see `value_settings`. `unreadable`: why
    no other engine may share its blocks because files cannot be read, as a sentence; empty if they can. `trails`: the
    places to which the paths of the model lead."""

    weights: Weights
    drafter: Weights | None
    fleet_weights: FleetWeights
    settings: Mapping[str, str]
    unreadable: str
    trails: ModelTrails


def read_model(config: Any, weights_id: str | None) -> EngineModel:
    """Read the model. `weights_id`: the configured one. Reads samples of weights that have no names of blobs in the
    cache of the Hub (`digest_of_weights`)."""
    trails = ModelTrails.of(config)
    unknown_weights, unreadable, settings = "", "", dict[str, str]()
    try:
        weights = _weights(config, config.model_config, weights_id)
        drafter = _drafter_weights(config, weights_id)
    except OSError as error:
        weights, drafter = Weights(config.model_config.model, "", "unknown"), None
        unknown_weights = f"weights_unknown: the files of the weights cannot be read ({error}); set weights_id"
    try:
        settings = value_settings(config)
        files = model_files(config, program_start())
        if files is not None:
            settings["model_files"], unreadable = files.digest, files.why_unshared(config.model_config)
    except OSError as error:
        unreadable = f"files_unknown: what the model needs besides its weights cannot be read ({error})"
    if drafter is not None:
        settings[DRAFTER_WEIGHTS] = drafter.weights_id or "unknown"
    fleet = FleetWeights(reason=unknown_weights) if unknown_weights else _fleet_weights(config, weights, drafter)
    return EngineModel(weights, drafter, fleet, settings, unreadable or unknown_weights, trails)


def namespace_identity(
    config: Any, hash_tokens: int, model: EngineModel, loaded: Sequence[LoadedFiles | None]
) -> NamespaceIdentity:
    """The identity of the engine's namespace. Call it after vLLM has initialized its block hashes. `loaded`: the files
    that each rank has loaded."""
    probe = hash_probe(config.cache_config.prefix_caching_hash_algo, hash_tokens)
    unshared = (
        model.unreadable or why_unshared(config, model.weights, model.drafter) or _why_not_loaded(config, model, loaded)
    )
    if unshared:
        probe = f"{probe}-{secrets.token_hex(8)}"
    return NamespaceIdentity(
        model=model.weights.model,
        weights_id=model.weights.weights_id or "unknown",
        weights_source=model.weights.source,
        hash_probe=probe,
        value_settings=tuple(model.settings.items()),
        unshared=unshared,
    )


def _fleet_weights(config: Any, *both: Weights | None) -> FleetWeights:
    """The name of this engine's weights on every node. If the files cannot be read, there is no name, and the error is
    the reason."""
    names: dict[str, None] = {}
    try:
        for weights in both:
            if weights is None:
                continue
            if weights.source != "configured" and are_dummies(config):
                return FleetWeights(reason="weights_unknown: load_format is dummy; set weights_id")
            if not (name := weights.fleet_id()):
                return FleetWeights(reason=unknown(weights, config))
            names[name] = None
    except OSError as error:
        reason = f"weights_unknown: the files of the weights cannot be read ({error}); set weights_id"
        return FleetWeights(reason=reason)
    return FleetWeights(" and ".join(names))


def _why_not_loaded(config: Any, model: EngineModel, loaded: Sequence[LoadedFiles | None]) -> str:
    """Why it is not certain that every rank has loaded the files of `model`, as a sentence; empty if it is."""
    kinds = {model.weights.source, model.drafter.source if model.drafter else ""}
    are_files = not are_dummies(config) and not kinds.isdisjoint({"snapshot", "files"})
    if not (are_files or model.trails.files.stamps):
        return ""
    for rank, one in enumerate(loaded):
        why = _UNSEEN if one is None else one.problem
        if why := why or model.trails.problem:
            return f"loading_unseen: it is unknown which files rank {rank} has loaded ({why})"
        assert one is not None
        for kind, matters, changed, here, there in (
            ("weights", are_files, one.changed_weights, model.trails.weights.digest, one.weights),
            ("files", True, one.changed_files, model.trails.files.digest, one.files),
        ):
            if matters and (changed or here != there):
                place = f"{changed} has changed" if changed else "links, folders or files on their paths have changed"
                return (
                    f"files_changed: {place} while rank {rank} loaded the model's {kind}, or since, so it may have "
                    "loaded another version; restart the engine"
                )
    return ""


def hash_probe(algorithm: str, hash_tokens: int) -> str:
    """A digest of the hashes that this process computes for known tokens and known extra keys. Two engines hash alike
    if their digests are equal."""
    function = get_hash_fn_by_name(algorithm)
    parts = [b"tagged" if tags_extra_keys() else b""]
    for extra_keys in (None, ("kvstow-lora",), (("image-hash", 0),), ("kvstow-salt", "kvstow-embedding")):
        parent: Any = None
        for number in range(_PROBE_BLOCKS):
            tokens = range(number * hash_tokens, (number + 1) * hash_tokens)
            parent = kv_cache_utils.hash_block_tokens(function, parent, list(tokens), extra_keys)
        parts.append(bytes(parent))
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


def _weights(config: Any, model: Any, configured: str | None) -> Weights:
    return identify_weights(model.model, getattr(model, "revision", None), configured, snapshot_finder(config))


def _drafter_weights(config: Any, configured: str | None) -> Weights | None:
    """The drafter's weights. vLLM names the model itself as the drafter if the drafter has no weights of its own.
    `configured`: the model's `weights_id`."""
    drafter = drafter_of(config)
    if drafter is None:
        return None
    return _weights(config, drafter, configured if drafter.model == config.model_config.model else None)


def _group(group: KVGroup, layers: Sequence[str]) -> GroupIdentity:
    kind = "full" if group.is_full else "state" if group.is_state else "chunk" if group.chunk is not None else "window"
    return GroupIdentity(
        kind=f"{kind} {digest_of(sorted(layers))}",
        block_tokens=group.block_tokens,
        hash_tokens=group.block_tokens // group.hashes_per_block,
        window=group.window if group.chunk is None else group.chunk,
    )


def why_unshared(config: Any, weights: Weights, drafter: Weights | None) -> str:
    """Why no other engine may share the blocks of this one, as a sentence; empty if others may."""
    if not _are_reproducible(config.cache_config.prefix_caching_hash_algo):
        return (
            "hashes_not_reproducible: this vLLM hashes tokens with a seed of its own; set PYTHONHASHSEED to the same "
            "value for all engines"
        )
    if config.lora_config is not None and not tags_extra_keys():
        return "lora_names_not_unique: this vLLM hashes the name of a LoRA adapter alone; vLLM 0.31 hashes its path too"
    if getattr(config, "weight_transfer_config", None) is not None:
        return "weights_not_fixed: weight_transfer_config lets the weights change while the engine runs"
    if config.parallel_config.worker_extension_cls and weights.source != "configured":
        return (
            "weights_not_fixed: worker_extension_cls adds code to the workers that may change the weights; set "
            "weights_id if it does not"
        )
    for model, one in ((config.model_config, weights), (drafter_of(config), drafter)):
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
    """Why it is not certain which weights the engine has loaded, as a sentence; empty if it is."""
    if not weights.weights_id:
        return unknown(weights, config)
    if weights.source == "configured":
        return ""
    load = config.load_config
    if str(getattr(load, "load_format", "auto")) not in _FROM_THE_MODEL:
        return f"weights_unknown: load_format {load.load_format} may take them from elsewhere; set weights_id"
    if weights.commit and _has_moved(load, model, weights):
        return (
            f"revision_moved: revision {model.revision or 'main'} of {weights.model} has become another commit since "
            "vLLM started, which may have read the one before; restart, or set revision to a commit"
        )
    return ""


def _has_moved(load: Any, model: Any, weights: Weights) -> bool:
    """Whether the commit may differ from the one that was loaded. It does not if the model is a path, or the revision a
    commit."""
    if Path(model.model).exists() or COMMIT.fullmatch(str(model.revision)):
        return False
    read = getattr(model.hf_config, "_commit_hash", None)
    if read is not None:
        return bool(read != weights.commit)
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
