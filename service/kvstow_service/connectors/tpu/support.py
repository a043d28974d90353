"""Tasks that tpu-inference leaves to the connector: refusing what KVStow does not support there, before anything
starts, and knowing which loads have ended on every host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from kvstow.errors import ConfigError
from kvstow_service.connectors.engine_core.kvgroups import KVGroups
from kvstow_service.connectors.engine_core.options import ConnectorOptions, misuse, size
from kvstow_service.connectors.engine_core.stepplan import LoadId, PlannedStep

_OF_TENSORS = {
    "attach": "works with vLLM on GPUs alone: a JAX engine has memory of its own",
    "weights_id": "needs attach, which works with vLLM on GPUs alone",
    "attach_require_sharing": "needs attach, which works with vLLM on GPUs alone",
    "copy_strategy": "is for CUDA devices: leave it out on TPUs",
}


@dataclass(frozen=True, slots=True)
class TPUOptions(ConnectorOptions):
    """The options on TPUs. `bytes_in_flight` is the device memory, in bytes, that the stores of a host may use at once;
    its loads may use the same amount again. The host's devices share it. tpu-inference sets nothing aside for it."""

    bytes_in_flight: Annotated[int, size] = 512 << 20

    @classmethod
    def parse(cls, extra: Mapping[str, Any] | None) -> Self:
        for key, why in _OF_TENSORS.items():
            if (extra or {}).get(key) is not None:
                raise misuse(key, None, why)
        return super(TPUOptions, cls).parse(extra)  # `super()` fails: with slots, the class is created a second time


def require_supported(config: Any) -> None:
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
        allowed = "1: only the last pipeline stage of tpu-inference passes on what KVStow reports"
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


class EndedLoads:
    """Counts the hosts that have reported the end of a load. vLLM cannot count them: it would wait for as many workers
    as there are chips, although a host reports once for all its chips. It also knows only requests, and a request may
    load more than once.

    `expect` adds the loads of a plan, and a load is over when each host has reported it. `stale` counts reports that
    are repeated or late.
    """

    def __init__(self) -> None:
        self._waiting: dict[LoadId, set[int]] = {}
        self._ended: set[str] = set()
        self.stale = 0

    def expect(self, plan: PlannedStep) -> None:
        for request_id in (*plan.load_requests, *plan.lost_loads):
            self._waiting[LoadId(request_id, plan.number)] = set()

    def add(self, rank: int, loads: Iterable[LoadId], num_ranks: int) -> None:
        """Note that `rank`, one of `num_ranks`, has reported the end of these loads."""
        for load in loads:
            ranks = self._waiting.get(load)
            if ranks is None or rank in ranks:
                self.stale += 1
                continue
            ranks.add(rank)
            if len(ranks) == num_ranks:
                del self._waiting[load]
                self._ended.add(load.request_id)

    def take_ended(self) -> set[str]:
        """The requests whose loads have ended since the last call."""
        ended, self._ended = self._ended, set()
        return ended
