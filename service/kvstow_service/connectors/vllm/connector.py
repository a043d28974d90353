"""KVStowConnector: KVStow in vLLM with torch.

Versions of vLLM differ in which worker hooks a step calls, and in which order. The worker side begins the step at the
first hook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvstow.errors import ConfigError
from kvstow_service.connectors.engine_core.connector import OffloadConnector
from kvstow_service.connectors.engine_core.metadata import KVStowMetadata, RankHello, RankUpdate
from kvstow_service.connectors.engine_core.schedulerhost import EngineSetup, SchedulerHost
from kvstow_service.connectors.engine_core.stepplan import FinishedLoads
from kvstow_service.connectors.engine_core.vllmprocess import VLLMProcess
from kvstow_service.connectors.vllm import weightwatch

if TYPE_CHECKING:
    import torch

    from kvstow_service.connectors.engine_core.workerhost import WorkerHost


class KVStowConnector(OffloadConnector):
    """The connector for vLLM. The worker's half starts with `register_kv_caches`, and the scheduler's half with the
    ranks' handshake.

    Raises `ConfigError` in a vLLM older than 0.30, which has no way to report that the load of a request has failed.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        if not hasattr(base, "KVConnectorTransferResults"):
            raise ConfigError("vLLM", vllm.__version__, "0.30 or newer: upgrade vLLM, or remove KVStowConnector")
        self._watch = weightwatch.watch_of(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._finished = FinishedLoads(set(), set(), set())
        self._expected_changes = 0  # how many changes of weights the scheduler side knows of

    def _make_host(self, setup: EngineSetup) -> SchedulerHost:
        # Each is imported only if it is used. The first imports the engine, which adds 0.03 s to vLLM's start.
        if setup.options.attach is None:
            from kvstow_service.connectors.engine_core.embeddedschedulerhost import EmbeddedSchedulerHost

            kind: type[SchedulerHost] = EmbeddedSchedulerHost
        else:
            from kvstow_service.connectors.vllm.attachedschedulerhost import AttachedSchedulerHost

            kind = AttachedSchedulerHost
        host = kind(setup)
        weightwatch.watch_executors()
        self._watch.listener, host.calls_asked = host.weights_may_change, lambda: self._watch.asked
        return host

    def _make_rank(self, options: Any, process: VLLMProcess, vllm_config: Any, kv_cache_config: Any) -> WorkerHost:
        from kvstow_service.connectors.vllm import tensorhost

        weightwatch.watch_ranks()
        self._watch.begin_serving()
        if options.attach is None:
            return tensorhost.EmbeddedWorkerHost(options, process, kv_cache_config.num_blocks)
        return tensorhost.AttachedWorkerHost(options, process, kv_cache_config.num_blocks, self._watch.loaded)

    def shutdown(self) -> None:
        self._watch.listener = weightwatch.ignore
        super().shutdown()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True

    # -- worker: the KV cache -------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._rank.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        self._rank.suspend()

    def restore_kv_caches(self) -> None:
        self._rank.resume()

    def get_handshake_metadata(self) -> RankHello | None:
        """Inside MultiConnector vLLM gives the handshake of one connector to all, and another one, such as NIXL's, may
        need its own. There the rank introduces itself with its first update."""
        hello = self._rank.hello
        return hello if hello is not None and hello.is_alone else None

    def _begin_step(self, metadata: KVStowMetadata) -> None:
        self._expected_changes = metadata.weight_changes.get(self._rank.side.rank, 0)
        is_unknown = self._watch.noticed > self._expected_changes
        self._rank.side.stores_fail_because = self._watch.last if is_unknown else None
        super()._begin_step(metadata)

    def _make_update(self) -> RankUpdate:
        update, noticed = super()._make_update(), self._watch.noticed
        if noticed <= self._expected_changes:  # no rank notices a call of a method that none has
            return update
        return update._replace(weight_changes=(noticed, self._watch.last))

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._begin_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads that this step computes with. A CUDA graph that holds the attention calls no hooks when it is
        replayed. In model runner V2, the context of such a step has no metadata."""
        mode = getattr(forward_context.cudagraph_runtime_mode, "name", "NONE")
        self._rank.side.load_layers(hooks_run=bool(forward_context.attn_metadata) and mode != "FULL")

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._rank.side.wait_for_layer(layer_name)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._finished = self._rank.side.take_finished_loads()
        return None, self._finished.done or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Like `get_finished`. Reports failed loads by request if vLLM cannot handle bad blocks."""
        _, done = self.get_finished(finished_req_ids)
        failed = self._finished.failed if self._fails_requests else set()
        return base.KVConnectorTransferResults(finished_recving=done or set(), failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The bad blocks of the loads that `get_finished` has just returned. Each is returned once."""
        finished, self._finished = self._finished, FinishedLoads(set(), set(), set())
        return set() if self._fails_requests else finished.bad_blocks
