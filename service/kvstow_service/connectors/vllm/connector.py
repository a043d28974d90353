"""KVStowConnector: vLLM's hooks, each passed on to the half that it is for.

The contract is vLLM's `KVConnectorBase_V1`, from 0.26 to 0.33. Hooks that a version does not know are not called there.
Whatever a version calls in a step, and in whatever order, the worker side begins the step at the first of these calls.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import vllm
from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.v1.core.sched import output

from kvstow_service.connectors.vllm.hosting import SchedulerHost, WorkerHost
from kvstow_service.connectors.vllm.kvevents import event_feed
from kvstow_service.connectors.vllm.kvgroups import kv_groups
from kvstow_service.connectors.vllm.logs import join_vllm_log
from kvstow_service.connectors.vllm.metadata import KVStowMetadata, KVStowWorkerMetadata, RankHello, RankNews
from kvstow_service.connectors.vllm.metrics import KVStowPromMetrics, KVStowStats
from kvstow_service.connectors.vllm.options import ConnectorOptions, refusal
from kvstow_service.connectors.vllm.vllmprocess import VLLMProcess, hash_block_tokens
from kvstow_service.connectors.vllm.workerside import FinishedLoads

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("kvstow.vllm")

_TELLS_FAILED_REQUESTS = hasattr(base, "KVConnectorTransferResults")  # vLLM 0.30


class KVStowConnector(KVConnectorBase_V1, SupportsHMA):
    """One half of KVStow in a vLLM process, which one the role says.

    Importing and making it starts no thread and opens nothing: the worker's half comes up with `register_kv_caches`,
    the scheduler's with the ranks' handshake. Raises `ConfigError` for options or a model that KVStow does not work
    with.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_vllm_log()
        options = ConnectorOptions.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        engine_config = get_current_vllm_config_or_none() or vllm_config  # vLLM sets it for its workers only
        process = VLLMProcess.of(vllm_config, kv_cache_config, engine_config.kv_transfer_config)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        groups = kv_groups(
            specs,
            hash_block_tokens(vllm_config, kv_cache_config),
            process.context_parallel,
            hands_states_over=hasattr(output, "KVConnectorBlockState"),
        )
        if groups.has_states and options.lazy_offload:
            raise refusal("lazy_offload", True, "false with recurrent layers")
        self._fails_requests = not groups.is_plain  # and not blocks
        self._scheduler: SchedulerHost | None = None
        self._worker: WorkerHost | None = None
        self._finished = FinishedLoads(set(), set(), set())
        self._has_greeted = False
        if role == KVConnectorRole.SCHEDULER:
            if self._fails_requests and not _TELLS_FAILED_REQUESTS:
                logger.warning(
                    "vLLM %s cannot be told of failed loads of this model (several KV groups or a window): the first "
                    "such request waits until it is aborted, and loads are bypassed from then on; 0.30 computes it",
                    vllm.__version__,
                )
            self._scheduler = SchedulerHost(
                options,
                process,
                groups,
                build={"vllm": vllm.__version__},
                make_events=lambda engine: event_feed(vllm_config, engine, specs),
            )
        else:
            self._worker = WorkerHost(options, process, kv_cache_config.num_blocks)

    # -- both halves ----------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        for half in (self._worker, self._scheduler):
            if half is not None:
                half.close()

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a store that is dropped is a miss later

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStowStats:
        return KVStowStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVStowPromMetrics:
        return KVStowPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- worker: the KV cache -------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._rank.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        self._rank.suspend()

    def restore_kv_caches(self) -> None:
        self._rank.resume()

    def get_handshake_metadata(self) -> RankHello | None:
        return self._rank.hello

    # -- worker: one step -----------------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._begin_step(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """The loads began with the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No request is computed before its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are stored as a whole, when all layers have written them."""

    def wait_for_save(self) -> None:
        """Nothing to wait for: no step computes into a block that is being stored. vLLM calls this when it has
        launched a forward pass: the moment at which pinning may use its thread."""
        if self._rank.side is not None:
            self._rank.side.launched()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        side = self._rank.side
        if side is not None:
            self._finished = side.take_finished_loads()
        return None, self._finished.done or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As `get_finished` (vLLM 0.30). Of failed loads it tells by request where blocks do not say enough."""
        _, done = self.get_finished(finished_req_ids)
        failed = self._finished.failed if self._fails_requests else set()
        return base.KVConnectorTransferResults(finished_recving=done or set(), failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Of the loads that `get_finished` has just told of; each is told of once."""
        finished, self._finished = self._finished, FinishedLoads(set(), set(), set())
        return set() if self._fails_requests else finished.bad_blocks

    def build_connector_worker_meta(self) -> KVStowWorkerMetadata | None:
        rank = self._rank
        if rank.side is None:
            return None
        hello = None if self._has_greeted else rank.hello  # a handshake reaches only one of several connectors
        self._has_greeted = True
        news = RankNews(tuple(rank.side.take_news()), hello, rank.report_without_agent())
        return KVStowWorkerMetadata({rank.side.rank: [news]}) if any(news) else None

    @property
    def _rank(self) -> WorkerHost:
        assert self._worker is not None, "this half is the scheduler's"
        return self._worker

    def _begin_step(self, metadata: KVStowMetadata) -> None:
        rank = self._rank
        if metadata.admin is not None and rank.agent is not None:
            rank.agent.offer(metadata.admin)
        if metadata.desired:
            rank.follow(metadata.desired)
        if metadata.plan is not None and rank.side is not None:
            rank.side.begin_step(metadata.plan)

    # -- scheduler: what the engine is made of --------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._host.bind(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._greet(metadata.values())

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._greet(metadata.values())

    def _greet(self, hellos: Iterable[Any]) -> None:
        for hello in hellos:
            if isinstance(hello, RankHello):
                self._host.greet(hello)

    @property
    def _host(self) -> SchedulerHost:
        assert self._scheduler is not None, "this half is a worker's"
        return self._scheduler

    # -- scheduler: requests --------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        side, found = self._host.side, 0
        if side is not None:
            with self._host.guarding("look-up"):
                found = side.find_hit(request, num_computed_tokens)
        return found, found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        side, is_admitted = self._host.side, False
        if side is None:
            return
        with self._host.guarding("admission"):
            side.admit(request, blocks.get_block_ids(), num_external_tokens)
            is_admitted = True
        if num_external_tokens and not is_admitted:
            with self._host.guarding("load"):
                side.lose(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        return {CacheHitSource.HOST: num_external_tokens} if num_external_tokens else {}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Its blocks may be freed at once: those that are stored have references of their own."""
        side = self._host.side
        if side is not None:
            with self._host.guarding("end of a request"):
                side.finish(request, block_ids)
        return False, None

    # -- scheduler: one step --------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> KVStowMetadata:
        host, side, plan = self._host, self._host.side, None
        if side is None:
            return KVStowMetadata()
        with host.guarding("plan of a step"):
            plan = side.plan_step(scheduler_output)
        if plan is None:  # vLLM waits for the loads of the requests that it has admitted
            plan = side.take_planned()
        return KVStowMetadata(plan, host.address_for_remote_ranks, host.take_desired())

    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, KVStowWorkerMetadata):
            self._hear(metadata)
        side = self._host.side
        if side is not None and self._fails_requests and not _TELLS_FAILED_REQUESTS:
            ended, connector_output.finished_recving = connector_output.finished_recving or (), set()
            with self._host.guarding("loads that have ended"):
                connector_output.finished_recving = side.failed_loads.continuing(ended)

    def _hear(self, metadata: KVStowWorkerMetadata) -> None:
        for rank, words in metadata.news.items():
            for news in words:
                self._host.hear(rank, news)
        if self._host.side is not None:
            with self._host.guarding("transfers that have ended"):
                self._host.side.settle()

    def has_pending_push_work(self) -> bool:
        side = self._host.side
        if side is not None:
            with self._host.guarding("stores under way"):
                return side.has_pending_stores
        return False

    def has_pending_block_frees(self) -> bool:
        side = self._host.side
        return side is not None and side.holds_gpu_blocks

    def take_events(self) -> Iterable[Any]:
        if self._host.events is not None:
            with self._host.guarding("KV events"):
                return self._host.events.take()
        return ()

    def get_kv_connector_stats(self) -> KVStowStats | None:
        host = self._scheduler
        if host is not None and host.stats is not None:
            with host.guarding("statistics"):
                return host.stats.take()
        return None

    def reset_cache(self) -> bool | None:
        side = self._host.side
        if side is None:
            return True
        with self._host.guarding("reset"):
            return side.reset()
        return False
