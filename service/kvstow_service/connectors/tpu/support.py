"""What KVStow does not support in tpu-inference. Refused before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from kvstow.errors import ConfigError
from kvstow_service.connectors.engine_core.kvgroups import KVGroups
from kvstow_service.connectors.engine_core.options import ConnectorOptions, misuse, size

_OF_TENSORS = {
    "attach": "works with vLLM on GPUs alone: a JAX engine has memory of its own",
    "weights_id": "needs attach, which works with vLLM on GPUs alone",
    "attach_require_sharing": "needs attach, which works with vLLM on GPUs alone",
    "copy_strategy": "is for CUDA devices",
}


@dataclass(frozen=True, slots=True)
class TPUOptions(ConnectorOptions):
    """`bytes_in_flight` is the device memory of a host that stores may use at once; loads may use as much again. The
    host's devices share it. tpu-inference sets nothing aside for it."""

    bytes_in_flight: Annotated[int, size] = 512 << 20

    @classmethod
    def parse(cls, extra: Mapping[str, Any] | None) -> Self:
        for key, why in _OF_TENSORS.items():
            if (extra or {}).get(key) is not None:
                raise misuse(key, None, why)
        return super(TPUOptions, cls).parse(extra)  # `super()` fails: with slots, the class is created a second time


def require_supported(config: Any) -> None:
    """Raises `ConfigError` for a `VllmConfig` that KVStow does not support."""
    parallel, sharding = config.parallel_config, getattr(config, "sharding_config", None)
    if sharding is None:
        allowed = "kvstow_service.connectors.vllm: this one is for tpu-inference"
        raise ConfigError("kv_connector_module_path", "kvstow_service.connectors.tpu", allowed)
    if sharding.total_dp_size > 1:
        allowed = (
            "1 in a process: tpu-inference's data-parallel scheduler drops what KVStow sends with a step. Give each "
            "replica a process (TPU_MULTIPROCESS_DP=1, without enable_dp_attention)"
        )
        raise ConfigError("data parallelism", sharding.total_dp_size, allowed)
    if parallel.pipeline_parallel_size > 1:
        allowed = "1: only the last pipeline stage of tpu-inference hands on what KVStow reports"
        raise ConfigError("pipeline_parallel_size", parallel.pipeline_parallel_size, allowed)
    if parallel.decode_context_parallel_size > 1:
        raise ConfigError("decode_context_parallel_size", parallel.decode_context_parallel_size, "1")
    if (config.additional_config or {}).get("enable_continue_decode"):
        allowed = "false: blocks would be written in steps that the connector does not see"
        raise ConfigError("additional_config: enable_continue_decode", True, allowed)


def require_kept(groups: KVGroups) -> None:
    """Raises `ConfigError` for KV groups that are not plain arrays in tpu-inference."""
    if groups.has_states:
        raise ConfigError("the model's KV cache", "recurrent states", "attention layers only, on TPUs")
    if groups.left_out:
        value = "groups that vLLM does not find by prefix"
        raise ConfigError("the model's KV cache", value, "attention layers without them, on TPUs")
