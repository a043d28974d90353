"""TPUOffloadConnector: KVStow in tpu-inference.

A rank is a host process with all its devices, whatever the tensor parallelism. tpu-inference hands over its model
runner instead of tensors, and carries no handshake, so ranks send their hello with their first step. In each step, it
calls `bind_connector_metadata` before it takes the KV cache from the runner. At that point, stores gather the blocks
that older steps have computed, and the loads that the step names are written to their blocks. A step names loads whose
bytes are in staging memory on every rank.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from kvstow.control.launchorder import LaunchOrder
from kvstow_service.connectors.engine_core.connector import OffloadConnector
from kvstow_service.connectors.engine_core.embeddedschedulerhost import EmbeddedSchedulerHost
from kvstow_service.connectors.engine_core.metadata import KVStowMetadata, KVStowWorkerMetadata, RankUpdate
from kvstow_service.connectors.engine_core.schedulerhost import EngineSetup, SchedulerHost
from kvstow_service.connectors.engine_core.vllmprocess import VLLMProcess
from kvstow_service.connectors.tpu.support import EndedLoads, TPUOptions, require_kept, require_supported

if TYPE_CHECKING:
    from kvstow_service.connectors.engine_core.workerhost import WorkerHost
    from kvstow_service.connectors.tpu.runnerhost import Runner, RunnerHost

logger = logging.getLogger("kvstow.vllm")


class TPUOffloadConnector(OffloadConnector):
    """The connector for tpu-inference. The worker's half starts with `register_runner`, and the scheduler's half when
    all hosts have made a step."""

    _options = TPUOptions
    _rank: RunnerHost

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        require_supported(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._bad_blocks: set[int] = set()
        self._ended = EndedLoads()
        self._order: LaunchOrder | None = None  # made when the ranks are known

    def _make_host(self, setup: EngineSetup) -> SchedulerHost:
        require_kept(setup.groups)
        if self._fails_requests:
            logger.warning(
                "a failed load of this model (several KV groups or a window) is not computed: the first such request "
                "waits until it is aborted, and loads are bypassed from then on"
            )
        ranks_unknown = replace(setup.process, num_ranks=0)  # the ranks report how many they are
        packages = ("tpu-inference", "jax")
        return EmbeddedSchedulerHost(setup._replace(process=ranks_unknown, packages=packages, by_layer=False))

    def _make_rank(self, options: Any, process: VLLMProcess, vllm_config: Any, kv_cache_config: Any) -> WorkerHost:
        import jax

        from kvstow_service.connectors.tpu.runnerhost import RunnerHost

        host = replace(process, rank=jax.process_index(), num_ranks=jax.process_count(), ranks_per_node=1)
        return RunnerHost(options, host, kv_cache_config.num_blocks)

    # -- both halves ----------------------------------------------------------------------------------------

    def get_finished_count(self) -> int | None:
        """How many workers have to report a load before vLLM takes it as ended. No worker reports one, because
        `update_connector_output` does."""
        return 1

    # -- worker ---------------------------------------------------------------------------------------------

    def register_runner(self, runner: Runner) -> None:
        self._rank.register(runner)

    def _begin_step(self, metadata: KVStowMetadata) -> None:
        self._rank.begin_turn(metadata.launches)
        super()._begin_step(metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._bad_blocks = self._rank.side.take_finished_loads().bad_blocks
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._fails_requests else self._bad_blocks

    def _make_update(self) -> RankUpdate:
        return super()._make_update()._replace(ended_loads=self._rank.side.ended_loads, staged=self._rank.take_staged())

    # -- scheduler ------------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> KVStowMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        if self._order is None and self._host.side is not None:
            self._order = LaunchOrder(self._host.num_ranks)
        if metadata.plan is not None:
            self._ended.expect(metadata.plan)
        if self._order is None:
            return metadata
        launches = self._order.take()
        if metadata.plan is not None:
            self._order.expect(metadata.plan.loads.ops)
        return replace(metadata, launches=launches)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        metadata = connector_output.kv_connector_worker_meta
        if not isinstance(metadata, KVStowWorkerMetadata):
            return
        for rank, updates in metadata.updates.items():
            for update in updates:
                self._ended.add(rank, update.ended_loads, self._host.num_ranks)
                if self._order is not None:
                    completions = chain.from_iterable(batch.completions for batch in update.completions)
                    self._order.note(rank, update.staged, completions)
        if ended := self._ended.take_ended():
            if self._fails_requests:
                nothing, all_ended = set[str](), ended
                ended = self._host.ask(
                    "loads that have ended", lambda side: side.failed_loads.continuing(all_ended), nothing
                )
            connector_output.finished_recving = {*(connector_output.finished_recving or ()), *ended}
