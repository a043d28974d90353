"""The identity of a vLLM engine: whose memory it can share, and whose blocks, on its node and on others."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from kvstow.attach.identity import DRAFTER_WEIGHTS, FleetWeights, GroupIdentity, NamespaceIdentity, PoolIdentity
from kvstow_service.connectors.engine_core.hubcache import find_snapshot
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.metadata import RankHello
from kvstow_service.connectors.engine_core.processstart import program_start
from kvstow_service.connectors.vllm.modelfiles import model_files
from kvstow_service.connectors.vllm.unshared import tags_extra_keys, unknown, why_unshared
from kvstow_service.connectors.vllm.valuesettings import are_dummies, digest_of, value_settings
from kvstow_service.connectors.vllm.weightsid import Weights, identify_weights

_PROBE_BLOCKS = 3


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
    weights = _weights(config, config.model_config, weights_id)
    drafter = _drafter_weights(config, weights_id)
    probe = hash_probe(config.cache_config.prefix_caching_hash_algo, hash_tokens)
    settings, unreadable = _settings(config, drafter)
    unshared = unreadable or why_unshared(config, weights, drafter)
    if unshared:
        probe = f"{probe}-{secrets.token_hex(8)}"
    return NamespaceIdentity(
        model=weights.model,
        weights_id=weights.weights_id or "unknown",
        weights_source=weights.source,
        hash_probe=probe,
        value_settings=tuple(settings.items()),
        unshared=unshared,
    )


def _settings(config: Any, drafter: Weights | None) -> tuple[dict[str, str], str]:
    """What changes values, and why some of it is unknown; empty if nothing is."""
    unreadable, settings = "", {}
    try:
        settings = value_settings(config)
        files = model_files(config, program_start())
        if files is not None:
            settings["model_files"], unreadable = files.digest, files.why_unshared(config.model_config)
    except OSError as error:
        unreadable = f"files_unknown: what the model needs besides its weights cannot be read ({error})"
    if drafter is not None:
        settings[DRAFTER_WEIGHTS] = drafter.weights_id or "unknown"
    return settings, unreadable


def fleet_weights(config: Any, weights_id: str | None) -> FleetWeights:
    """The name of this engine's weights on every node. `weights_id`: as configured. Reads samples of a model that is a
    folder (`digest_of_weights`), and of a drafter that is one. If the files cannot be read, there is no name, and the
    error is the reason."""
    try:
        return _read_fleet_weights(config, weights_id)
    except OSError as error:
        return FleetWeights(
            reason=f"weights_unknown: the files of the weights cannot be read ({error}); set weights_id"
        )


def _read_fleet_weights(config: Any, weights_id: str | None) -> FleetWeights:
    """Raises `OSError`."""
    names = []
    for weights in (_weights(config, config.model_config, weights_id), _drafter_weights(config, weights_id)):
        if weights is None:
            continue
        if weights.source != "configured" and are_dummies(config):
            return FleetWeights(reason="weights_unknown: load_format is dummy; set weights_id")
        name = weights.fleet_id()
        if not name:
            return FleetWeights(reason=unknown(weights, config))
        names.append(name)
    return FleetWeights(" and ".join(dict.fromkeys(names)))


def hash_probe(algorithm: str, hash_tokens: int) -> str:
    """The hashes that this process computes for known tokens, and for a name that a hash may cover."""
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
    find = partial(find_snapshot, cache=getattr(config.load_config, "download_dir", None))
    return identify_weights(model.model, getattr(model, "revision", None), configured, find)


def _drafter_weights(config: Any, configured: str | None) -> Weights | None:
    """The drafter's weights. vLLM names the model itself as the drafter if the drafter has no weights of its own.
    `configured`: the model's `weights_id`."""
    drafter = getattr(config.speculative_config, "draft_model_config", None)
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
