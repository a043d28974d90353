"""The two halves as vLLM's processes host them: what is built when, and what stays up when something cannot be."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.utils.network_utils import get_ip

import kvstow
from kvstow.bytesize import format_size
from kvstow.control.engine import OffloadEngine
from kvstow.errors import ConfigError, InsufficientMemoryError, KvstowError, SettingError
from kvstow.messageorder import ReportSequence
from kvstow.messages import DesiredState, RankReport
from kvstow_service.adminoptions import AdminOptions
from kvstow_service.agent import AdminAddress, RankAgent
from kvstow_service.connectors.vllm.gpublocks import BlockPool
from kvstow_service.connectors.vllm.kvevents import EventFeed
from kvstow_service.connectors.vllm.kvgroups import KVGroups
from kvstow_service.connectors.vllm.metadata import RankHello, RankNews
from kvstow_service.connectors.vllm.metrics import StatsFeed
from kvstow_service.connectors.vllm.options import ConnectorOptions
from kvstow_service.connectors.vllm.schedulerside import STEP_BLOCKS, SchedulerSide
from kvstow_service.connectors.vllm.vllmprocess import VLLMProcess, this_node
from kvstow_service.connectors.vllm.workerside import DataPlane, NoDataPlane, PlaneSource, WorkerSide
from kvstow_service.embedded import EmbeddedAdmin
from kvstow_service.rendezvous import Rendezvous
from kvstow_service.tls import TlsFiles

_HEAD_START_SECONDS = 1.0  # of vLLM's start, which ends soon after; until then ranks report with the steps
_REPORT_SECONDS = 1.5  # the agent reports every second

logger = logging.getLogger("kvstow.vllm")


class SchedulerHost:
    """The engine, its scheduler side and its admin server, made as soon as every rank has said how large its slots are.

    Used by the scheduler's thread. Until then every request is a miss.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        process: VLLMProcess,
        groups: KVGroups,
        *,
        build: Mapping[str, str],
        make_events: Callable[[OffloadEngine], EventFeed | None],
    ) -> None:
        """Raises `ConfigError` for an admin server that may not be started like this; starts nothing."""
        self.stats: StatsFeed | None = None
        self.events: EventFeed | None = None
        self.side: SchedulerSide | None = None
        self.engine: OffloadEngine | None = None
        self.admin: EmbeddedAdmin | None = None
        self._options, self._process, self._groups = options, process, groups
        self._build, self._make_events = build, make_events
        self._admin_options = _admin_options(options, process)
        self._pool: BlockPool | None = None
        self._hellos: dict[int, RankHello] = {}
        self._desired: dict[int, DesiredState] = {}  # answers to what ranks have reported with their steps
        self._spans_nodes = self._has_failed = False

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool
        self._build_when_known()

    def greet(self, hello: RankHello) -> None:
        self._hellos.setdefault(hello.rank, hello)
        self._build_when_known()

    @contextmanager
    def guarding(self, what: str) -> Iterator[None]:
        """Contain errors, which would otherwise reach vLLM's step and end the process: vLLM goes on without offload,
        and log, counter and readiness say so."""
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                logger.exception("%s: KVStow has failed; vLLM serves without offload until it restarts", what)
            self._has_failed = True
            if self.engine is not None:
                self.engine.fail(f"{what}: {error!r}")
                self._let_blocks_go()

    def _let_blocks_go(self) -> None:
        """vLLM may be waiting for the GPU blocks of stores whose end is never heard of now."""
        try:
            if self.side is not None:
                self.side.release_gpu_blocks()
        except Exception:
            logger.exception("some GPU blocks stay held until vLLM starts anew")

    def hear(self, rank: int, news: RankNews) -> None:
        """Process what a rank sends after a step. Never raises."""
        with self.guarding(f"news of rank {rank}"):
            self._take(rank, news)

    def _take(self, rank: int, news: RankNews) -> None:
        if news.hello is not None:
            self.greet(news.hello)
        if self.engine is None or self.side is None:
            return
        if news.report is not None:
            try:
                self._desired[rank] = self.engine.report(news.report)
            except KvstowError as error:
                self.engine.count_error("rank_report")
                logger.warning("rank %d: its report is not taken: %s", rank, error)
        for boot_id, completions in news.completions:
            self.side.complete(rank, boot_id, completions)

    def take_desired(self) -> Mapping[int, DesiredState]:
        """What is wanted of the ranks that have reported with a step since the last call."""
        desired, self._desired = self._desired, {}
        return desired

    @property
    def address_for_remote_ranks(self) -> AdminAddress | None:
        """For the agents of other nodes, which cannot look for it themselves."""
        if self.admin is None or not self._spans_nodes:
            return None
        return self.admin.address_for_remote_ranks

    def close(self) -> None:
        """Idempotent; vLLM does not always call it."""
        if self.admin is not None:
            self.admin.stop()
        if self.engine is not None:
            self.engine.close()

    def _build_when_known(self) -> None:
        if self.side is not None or self._pool is None or len(self._hellos) < self._process.num_ranks:
            return
        if self._has_failed:  # when ranks were heard of with a step
            return
        hellos = [self._hellos[rank] for rank in range(self._process.num_ranks)]
        sizes = [hello.slot_bytes for hello in hellos]
        self._spans_nodes = {hello.node for hello in hellos} != {this_node()}
        self.engine = OffloadEngine(self._options.engine_config(sizes, self._groups.alignment))
        self.events = self._make_events(self.engine)
        slot_tokens = self._groups.alignment if len(self._groups.groups) == 1 else None
        self.stats = StatsFeed(self.engine, sum(sizes), slot_tokens)
        self.side = SchedulerSide(
            self.engine,
            self._groups,
            self._pool,
            lazy_blocks=2 * self._blocks_per_step if self._options.lazy_offload else None,
            events=self.events,
            observe=self.stats.observe,
            step_blocks=self._step_blocks,
        )
        self.admin = EmbeddedAdmin(
            self.engine,
            self._admin_options,
            identity=self._process.engine_id,
            mode="vllm",
            max_capacity_slots=self._max_slots(hellos),
            settings={**self._options.public(), "model": self._process.model, "engine_id": self._process.engine_id},
            build=self._build,
            node_host=get_ip() if self._spans_nodes else "",
            head_start=_HEAD_START_SECONDS,
            freezes_heap=True,
        )
        self.admin.start()
        slots = self.engine.config.capacity_slots
        logger.info(
            "KVStow %s keeps %d blocks of %d tokens in %s of host memory, over %d ranks; stores are %s",
            *(kvstow.__version__, slots, self._groups.alignment, format_size(slots * sum(sizes)), len(sizes)),
            "lazy" if self._options.lazy_offload else "eager",
        )

    def _max_slots(self, hellos: list[RankHello]) -> int:
        """How far a resize may go: on each node, its ranks' slots share the available memory."""
        fitting = [
            min(hello.node_bytes for hello in ranks) // sum(hello.slot_bytes for hello in ranks)
            for node in {hello.node for hello in hellos}
            if (ranks := [hello for hello in hellos if hello.node == node])
        ]
        wanted = self._options.max_slots([hello.slot_bytes for hello in hellos], min(fitting))
        return min(wanted, *(hello.max_slots for hello in hellos))

    @property
    def _blocks_per_step(self) -> int:
        """How many blocks one step can take from the GPU's free queue, or complete."""
        return sum(-(-self._process.max_batched_tokens // group.block_tokens) for group in self._groups.groups)

    @property
    def _step_blocks(self) -> int:
        return max(STEP_BLOCKS, 2 * self._blocks_per_step)


def _admin_options(options: ConnectorOptions, process: VLLMProcess) -> AdminOptions:
    """Each data-parallel engine has a port of its own."""
    tls = None
    if options.tls_cert is not None:
        tls = TlsFiles(options.tls_cert, options.tls_key, options.tls_client_ca)
    elif options.tls_key is not None or options.tls_client_ca is not None:
        raise SettingError("kv_connector_extra_config: tls_cert", None, "is needed by tls_key and tls_client_ca")
    try:
        return AdminOptions(
            host=options.admin_host,
            port=options.admin_port + process.data_parallel_index if options.admin_port else 0,
            uds=options.admin_uds,
            token_file=options.token_file,
            viewer_token_file=options.viewer_token_file,
            readiness_require=options.readiness_require,
            allowed_hosts=options.allowed_hosts,
            tls=tls,
        )
    except ConfigError as error:
        key = f"admin_{error.key}" if error.key in ("host", "port") else error.key
        raise error.renamed(f"kv_connector_extra_config: {key}") from None


class WorkerHost:
    """One rank's worker side and agent. Used by the worker's main thread.

    At the start it refuses what the user has to change; whatever else goes wrong, then or later, leaves a rank that
    reports it, and vLLM serving without offload.
    """

    def __init__(self, options: ConnectorOptions, process: VLLMProcess, num_blocks: int) -> None:
        """Raises `InsufficientMemoryError`; takes nothing."""
        from kvstow_service.connectors.vllm.rankdataplane import require_memory

        if not process.recomputes and process.rank == 0:
            logger.warning(
                "kv_load_failure_policy is 'fail': a request whose load fails ends with an error; with 'recompute' "
                "it is computed instead"
            )
        self._options, self._process, self._num_blocks = options, process, num_blocks
        self._node_bytes = require_memory(options, process)
        self._max_bytes = options.reserved_bytes_of_rank(self._node_bytes)
        self._rendezvous = Rendezvous(process.engine_id)
        self._sender = ReportSequence()
        self._kv_caches: Mapping[str, Any] = {}
        self._source: PlaneSource | None = None
        self.side: WorkerSide | None = None
        self.agent: RankAgent | None = None
        self.hello: RankHello | None = None
        self._heard_of = 0  # reports that the agent had brought to the admin server
        self._report_at = 0.0

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Build the data plane around vLLM's KV cache, and begin to pin: returns before that is done, unless the user
        wants to wait."""
        self._kv_caches = kv_caches
        plane, slot_bytes = self._build(refusals=(ConfigError, InsufficientMemoryError))
        max_slots = self._max_bytes // slot_bytes
        self.hello = RankHello(self._process.rank, slot_bytes, max_slots, this_node(), self._node_bytes)
        from kvstow_service.connectors.vllm.rankdataplane import device_of, fence_of

        fence = fence_of(device_of(kv_caches))
        self.side = WorkerSide(self._process.rank, plane, fence=fence, loads_wait=not self._process.frees_late)
        self._source = PlaneSource(self.side)
        self.agent = RankAgent(self._process.rank, self._source, self._rendezvous)
        self.agent.start()
        self._start(plane)

    def report_without_agent(self) -> RankReport | None:
        """What the agent would say, once a second for as long as it reaches no server: serving depends on none."""
        now = time.monotonic()
        if self.side is None or self.agent is None or now < self._report_at:
            return None
        self._report_at = now + _REPORT_SECONDS
        sent, self._heard_of = self._heard_of, self.agent.stats.sent
        return self.side.plane.report() if self._heard_of == sent else None

    def follow(self, desired: Mapping[int, DesiredState]) -> None:
        """What the agent would do with the answer to its report."""
        own = desired.get(self._process.rank)
        if own is None or self._source is None:
            return
        try:
            self._source.apply(own)
        except Exception:  # vLLM's step goes on; the next report is answered again
            logger.exception("rank %d: what is wanted of it cannot be done", self._process.rank)

    def suspend(self) -> None:
        """vLLM is about to take its KV cache away."""
        if self.hello is not None:
            slot_bytes = self.hello.slot_bytes
            self._change(lambda: NoDataPlane(self._process.rank, slot_bytes, None, None, self._sender))

    def resume(self) -> None:
        """The KV cache is back, with nothing in it; the rank starts anew."""
        if (plane := self._change(lambda: self._build(refusals=())[0])) is not None:
            self._start(plane)

    def close(self) -> None:
        """Idempotent; vLLM does not always call it."""
        if self.agent is not None:
            self.agent.stop()
        if self.side is not None:
            self.side.plane.close()

    def _change(self, make: Callable[[], DataPlane]) -> DataPlane | None:
        """The data plane that has replaced the present one, after that has ended; None if there is none, or if it
        does not end. The rank then stays stopped: its engine waits for a copy that may still write."""
        if self.side is None or self._source is None:
            return None
        if not self.side.close_plane():
            logger.error("rank %d: its data plane does not end; vLLM serves without offload", self._process.rank)
            return None
        plane = make()
        self._source.switch(plane)
        return plane

    def _build(self, refusals: tuple[type[Exception], ...]) -> tuple[DataPlane, int]:
        """(the data plane, or what stands for it; the size of its slots). Raises the `refusals`."""
        from kvstow_service.connectors.vllm.kvgeometry import kv_geometry
        from kvstow_service.connectors.vllm.rankdataplane import build_plane

        process, slot_bytes = self._process, self.hello.slot_bytes if self.hello is not None else 1
        try:
            geometry = kv_geometry(self._kv_caches, self._num_blocks)
            slot_bytes = geometry.layout.slot_bytes
            pool_bytes = self._options.bytes_of_rank(process.num_ranks)
            most, options = self._max_bytes, self._options
            return build_plane(process.rank, pool_bytes, most, options, geometry, self._sender), slot_bytes
        except refusals:
            raise
        except Exception as error:
            logger.exception("rank %d has no data plane; vLLM serves without offload", process.rank)
            reason = getattr(error, "code", "internal")
            return NoDataPlane(process.rank, slot_bytes, reason, repr(error), self._sender), slot_bytes

    def _start(self, plane: DataPlane) -> None:
        from kvstow.dataplane import DataPlane
        from kvstow_service.connectors.vllm.rankdataplane import wait_until_pinned

        waits = not self._options.async_register_cache
        plane.start(at_ease=not waits)  # the rest of vLLM's start took 0.3 to 1.5 s longer beside the full pace
        if waits and isinstance(plane, DataPlane):
            wait_until_pinned(plane.pool)
