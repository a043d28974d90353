"""The methods that vLLM's scheduler and its workers call on a connector. Each passes its call to the right half.

The contract is vLLM's `KVConnectorBase_V1`, from 0.30 to 0.33; the vLLM of tpu-inference may be older. A version of
vLLM does not call hooks that it does not know.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.v1.core.sched import output

from kvstow.attach.hello import NO_HOLD
from kvstow.errors import CopyError
from kvstow_service.connectors.engine_core.kvgroups import kv_groups
from kvstow_service.connectors.engine_core.metadata import KVStowMetadata, KVStowWorkerMetadata, RankHello, RankUpdate
from kvstow_service.connectors.engine_core.metricsexport import KVStowPromMetrics, KVStowStats
from kvstow_service.connectors.engine_core.options import ConnectorOptions, misuse, say_size
from kvstow_service.connectors.engine_core.schedulerhost import EngineSetup, SchedulerHost
from kvstow_service.connectors.engine_core.vllmprocess import VLLMProcess, hash_block_tokens, join_vllm_log

if TYPE_CHECKING:
    from kvstow_service.connectors.engine_core.workerhost import WorkerHost


class OffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """One half of KVStow in a process of vLLM; the role says which half. It is the base of all connectors, which differ
    in where the KV cache is, and in how they learn that loads have ended.

    Importing and creating it starts no thread and opens nothing. The worker's half starts with its KV cache. The
    scheduler's half starts when all ranks have sent their hello. Raises `ConfigError` for options or a model that
    KVStow does not support.
    """

    _half: SchedulerHost | WorkerHost
    _host: SchedulerHost  # only in the scheduler's half
    _rank: WorkerHost  # only in a worker's half

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_vllm_log()
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        options = self._options.parse(extra)
        if role == KVConnectorRole.SCHEDULER:
            say_size(options, extra)
        engine_config = get_current_vllm_config_or_none() or vllm_config  # vLLM sets it only for its workers
        process = VLLMProcess.of(vllm_config, kv_cache_config, engine_config.kv_transfer_config)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        groups = kv_groups(
            specs,
            hash_block_tokens(vllm_config, kv_cache_config),
            process.context_parallel,
            kept=getattr(kv_cache_config, "prefix_cacheable_group_ids", None),  # vLLM 0.30
            hands_states_over=hasattr(output, "KVConnectorBlockState"),
        )
        if groups.has_states and options.lazy_offload:
            raise misuse("lazy_offload", None, "does not work with recurrent layers")
        self._fails_requests = not groups.is_plain  # vLLM understands bad blocks only of plain models
        process = replace(process, takes_steps_back=process.takes_steps_back and groups.is_plain)
        self._takes_back = process.takes_steps_back
        self._has_sent_hello = False
        self._promised_by_layer: str | None = None  # the request whose load by layer was promised to vLLM
        self._num_layered = 0  # loads by layer that the step being planned must have
        self._lost: str | None = None
        self._timed_step = 0  # the step that this rank computes, if it is timed
        if role == KVConnectorRole.SCHEDULER:
            setup = EngineSetup(options, process, groups, vllm_config, kv_cache_config)
            self._half = self._host = self._make_host(setup)
        else:
            self._half = self._rank = self._make_rank(options, process, vllm_config, kv_cache_config)

    # -- what connectors differ in --------------------------------------------------------------------------

    _options: type[ConnectorOptions] = ConnectorOptions

    @abstractmethod
    def _make_host(self, setup: EngineSetup) -> SchedulerHost: ...

    @abstractmethod
    def _make_rank(self, options: Any, process: VLLMProcess, vllm_config: Any, kv_cache_config: Any) -> WorkerHost:
        """Make the worker's half, which takes no memory yet."""

    # -- both halves ----------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        self._half.close()

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a store that is dropped is a miss later

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStowStats:
        return KVStowStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVStowPromMetrics:
        return KVStowPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- worker: one step -----------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Does nothing, because the loads that vLLM waits for began with the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing, because vLLM computes no request before the load that the request waits for has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing, because blocks are stored whole, after all layers have written them."""

    def wait_for_save(self) -> None:
        """Does not wait, because no step computes into a block that is being stored. vLLM calls this when it has
        launched a forward pass. Pinning may begin then."""
        self._rank.side.launched()

    def build_connector_worker_meta(self) -> KVStowWorkerMetadata | None:
        update = self._make_update()
        return KVStowWorkerMetadata({self._rank.side.rank: [update]}) if any(update) else None

    def _make_update(self) -> RankUpdate:
        rank = self._rank
        hello = None if self._has_sent_hello else rank.hello  # of several connectors, vLLM gives only one the handshake
        self._has_sent_hello |= hello is not None
        return rank.news()._replace(
            completions=rank.side.take_boot_completions(),
            hello=hello,
            timed_step=self._timed_step,
            layers_off=rank.side.take_layers_off(),
        )

    def _begin_step(self, metadata: KVStowMetadata) -> None:
        rank = self._rank
        if metadata.lost is not None:
            raise CopyError(f"this step computes with blocks that cannot be loaded: {metadata.lost}")
        rank.follow(metadata)
        self._timed_step = 0
        if metadata.plan is not None:
            rank.side.begin_step(metadata.plan)
            if metadata.plan.is_timed and rank.side.rank == 0:
                self._timed_step = metadata.plan.number

    # -- scheduler: what the engine is made of --------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._host.bind(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._add_ranks(metadata.values())

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._add_ranks(metadata.values())

    def _add_ranks(self, hellos: Iterable[Any]) -> None:
        for hello in hellos:
            if isinstance(hello, RankHello):
                self._host.add_rank(hello)

    # -- scheduler: requests --------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        self._host.ask("arrival of a request", lambda side: side.expect(request), None)
        # vLLM's scheduler reads this field as a dict after this hook, but a client's `extra_args` may hold anything.
        if not isinstance(getattr(request, "kv_transfer_params", None), (dict, type(None))):
            request.kv_transfer_params = None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        nothing: int | None = 0
        found = self._host.ask("lookup", lambda side: side.find_hit(request, num_computed_tokens), nothing)
        by_layer = bool(found) and self._host.ask(
            "way of a load", lambda side: side.loads_by_layer(request), False, admits=True
        )
        self._promised_by_layer = request.request_id if by_layer else None
        return found, bool(found) and not by_layer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        admission = request, blocks.get_block_ids(), num_external_tokens
        is_admitted = self._host.ask("admission", lambda side: side.admit(*admission), False, admits=True)
        if num_external_tokens and self._promised_by_layer == request.request_id:
            self._num_layered += 1
            if not is_admitted:  # vLLM computes with these blocks in this step, and cannot take that back
                self._lost = f"request {request.request_id}: its load by layer could not be planned"
        elif num_external_tokens and not is_admitted:
            self._host.ask("load", lambda side: side.fail_admission(*admission), None)
        self._promised_by_layer = None

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        what = "sources of a hit"
        fetched, store = self._host.ask(what, lambda side: (side.fetched_tokens(request), side.store), (0, ""))
        fetched = min(fetched, num_external_tokens)
        # vLLM has no name of its own for a remote store.
        below = CacheHitSource.DISK if store == "disk" else CacheHitSource.EXTERNAL_UNSPECIFIED
        counts = {CacheHitSource.HOST: num_external_tokens - fetched, below: fetched}
        return {source: count for source, count in counts.items() if count}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request's blocks may be freed at once: blocks that are being stored have their own references."""
        self._host.ask("end of a request", lambda side: side.finish(request, block_ids), None)
        return False, None

    # -- scheduler: one step --------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> KVStowMetadata:
        host = self._host
        ticket = host.ticket  # read before planning, which may begin another session than that of this step's ops
        plan = host.ask("plan of a step", lambda side: side.plan_step(scheduler_output), None)
        if plan is None:  # vLLM waits for the loads of the requests that it has admitted
            plan = host.ask("loads of a step", lambda side: side.take_planned(), None)
        hold = host.ask("gates of the ranks", lambda _: host.hold_of(plan), NO_HOLD)
        lost, wanted = self._lost, self._num_layered
        self._lost, self._num_layered = None, 0
        if lost is None and wanted > (0 if plan is None else len(plan.layered.ops)):
            lost = "the plan of the step is incomplete"
        changes = host.expected_weight_changes()
        return KVStowMetadata(plan, host.address_for_ranks, ticket, hold, lost=lost, weight_changes=changes)

    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, KVStowWorkerMetadata):
            for rank, updates in metadata.updates.items():
                for update in updates:
                    self._host.receive(rank, update)
            self._host.ask("transfers that have ended", lambda side: side.settle(), None)
        if self._takes_back and (bad := connector_output.invalid_block_ids):
            self._host.ask("blocks that were not loaded", lambda side: side.take_back(bad), None)

    def has_pending_push_work(self) -> bool:
        is_pending = self._host.ask("stores under way", lambda side: side.has_pending_stores, False)
        return is_pending or self._host.wants_steps

    def has_pending_block_frees(self) -> bool:
        return self._host.ask("GPU blocks of stores", lambda side: side.holds_gpu_blocks, False)

    def take_events(self) -> Iterable[Any]:
        return self._host.ask("KV events", lambda side: side.events.take_events() if side.events else (), ())

    def get_kv_connector_stats(self) -> KVStowStats | None:
        """The scheduler's statistics. vLLM asks both halves, but a worker's half has none."""
        host = self._half
        return (
            host.ask("statistics", lambda _: host.stats.take_stats(), None) if isinstance(host, SchedulerHost) else None
        )

    def reset_cache(self) -> bool | None:
        is_empty = self._host.side is None
        return self._host.ask("reset", lambda side: side.reset(), is_empty)
