"""The scheduler's half as vLLM's process hosts it: with an engine and an admin server of its own, or attached."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from vllm.utils.network_utils import get_ip

import kvstow
from kvstow.attach.ticket import SessionTicket
from kvstow.bytesize import format_size
from kvstow.control.engine import OffloadEngine
from kvstow.errors import ConfigError, KvstowError
from kvstow.messages import DesiredState, RankReport
from kvstow_service.admin.adminoptions import AdminOptions
from kvstow_service.admin.agent import AdminAddress
from kvstow_service.admin.embedded import EmbeddedAdmin
from kvstow_service.admin.tls import TlsFiles
from kvstow_service.connectors.engine_core.controlplane import ControlPlane, EmbeddedControl
from kvstow_service.connectors.engine_core.gpublocks import BlockPool
from kvstow_service.connectors.engine_core.kvevents import EventFeed
from kvstow_service.connectors.engine_core.kvgroups import KVGroups
from kvstow_service.connectors.engine_core.metadata import RankHello, RankUpdate
from kvstow_service.connectors.engine_core.metricsexport import StatsFeed
from kvstow_service.connectors.engine_core.offloadmetrics import EngineFigures
from kvstow_service.connectors.engine_core.options import ConnectorOptions, misuse, refusal
from kvstow_service.connectors.engine_core.schedulerside import STEP_BLOCKS, SchedulerSide
from kvstow_service.connectors.engine_core.stepplan import TierPlan
from kvstow_service.connectors.engine_core.vllmprocess import VLLMProcess, this_node
from kvstow_service.connectors.engine_core.workerside import RankClient

if TYPE_CHECKING:
    from kvstow_service.connectors.engine_core.embeddedtier import EmbeddedTier
    from kvstow_service.connectors.engine_core.tieridentity import TierIdentity

_HEAD_START_SECONDS = 1.0  # of vLLM's start, which ends soon after; until then ranks report with the steps

logger = logging.getLogger("kvstow.vllm")

T = TypeVar("T")


class Offload(NamedTuple):
    """What there is once every rank is known. `events`: None where vLLM publishes no KV events."""

    control: ControlPlane
    side: SchedulerSide
    stats: StatsFeed
    events: EventFeed | None


class SchedulerHost(ABC):
    """Makes the scheduler side and what it needs, as soon as every rank has reported its slot size.

    Used by the scheduler's thread. Until then every request is a miss.
    """

    _lazy_steps = 2
    """Lazy stores look ahead as far as that many steps can evict: as many as a store holds its GPU blocks."""

    def __init__(self, options: ConnectorOptions, process: VLLMProcess, groups: KVGroups) -> None:
        """Starts nothing."""
        self.offload: Offload | None = None
        self._options, self._process, self._groups = options, process, groups
        self._pool: BlockPool | None = None
        self._hellos: dict[int, RankHello] = {}
        self._desired: dict[int, DesiredState] = {}  # answers to what ranks have reported with their steps
        self._has_failed = False
        self.num_ranks = process.num_ranks
        """0 until a rank has said it, where vLLM's configuration does not."""

    # What hosts differ in.

    @abstractmethod
    def _make_offload(self, pool: BlockPool, hellos: list[RankHello]) -> Offload | None:
        """`hellos` of all ranks, in order. None if there can be no offload; it was said why."""

    @abstractmethod
    def _take_report(self, report: RankReport) -> DesiredState | None:
        """A rank has reported with a step. Raises `KvstowError` for a report that is not accepted."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent; vLLM does not always call it."""

    @property
    def address_for_remote_ranks(self) -> AdminAddress | None:
        """For the agents of other nodes, which cannot look for it themselves."""
        return None

    @property
    def ticket(self) -> SessionTicket | None:
        """Of the session with the node service, for the workers."""
        return None

    @property
    def wants_steps(self) -> bool:
        """Whether vLLM should make steps although it has no requests, for other reasons than transfers."""
        return False

    def plan_tier(self, step: Any) -> TierPlan | None:
        """What the ranks do with the store of the fleet tier in this step. Never raises."""
        return None

    # What they have in common.

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool
        self._make_when_known()

    def add_rank(self, hello: RankHello) -> None:
        self._hellos.setdefault(hello.rank, hello)
        self.num_ranks = hello.num_ranks or self.num_ranks
        self._make_when_known()

    def ask(self, what: str, call: Callable[[Offload], T], otherwise: T) -> T:
        """What `call` returns; `otherwise` while a rank is unknown, or if `call` raises. The error would end vLLM's
        process. So vLLM goes on without offload, and log, counter and readiness report the error in `what`."""
        if self.offload is None:
            return otherwise
        try:
            return call(self.offload)
        except Exception as error:  # noqa: BLE001 - vLLM must go on
            self._fail(what, error)
            return otherwise

    def receive(self, rank: int, update: RankUpdate) -> None:
        """Process what a rank sends after a step. Never raises."""
        try:
            self._process_update(rank, update)
        except Exception as error:  # noqa: BLE001 - vLLM must go on
            self._fail(f"update of rank {rank}", error)

    def take_desired(self) -> Mapping[int, DesiredState]:
        """The desired states of the ranks that have reported with a step since the last call."""
        desired, self._desired = self._desired, {}
        return desired

    def _process_update(self, rank: int, update: RankUpdate) -> None:
        if update.hello is not None:
            self.add_rank(update.hello)
        if self.offload is None:
            return
        if update.report is not None:
            desired = self._take_report(update.report)
            if desired is not None:
                self._desired[rank] = desired
        for boot_id, completions in update.completions:
            self.offload.control.complete(rank, boot_id, completions)
        if update.tier_step:
            self._step_ended(update.tier_step)
        if update.tier_client is not None:
            self._note_tier_client(rank, update.tier_client)

    def _step_ended(self, number: int) -> None:  # noqa: B027 - not every host has a tier
        """A step with this `TierPlan` has ended."""

    def _note_tier_client(self, rank: int, client: RankClient) -> None:  # noqa: B027
        """What a rank says of its client of the store."""

    def _fail(self, what: str, error: Exception) -> None:
        if not self._has_failed:
            logger.error("%s: KVStow has failed; vLLM serves without offload until it restarts", what, exc_info=error)
        self._has_failed = True
        if self.offload is None:
            return
        self.offload.control.fail(f"{what}: {error!r}")
        try:  # vLLM may be waiting for the GPU blocks of stores whose end is no longer reported
            self.offload.side.release_gpu_blocks()
        except Exception:
            logger.exception("some GPU blocks stay referenced until vLLM restarts")

    def _make_when_known(self) -> None:
        if self.offload is not None or self._pool is None or len(self._hellos) < max(1, self.num_ranks):
            return
        if self._has_failed:  # the same error, at every step
            return
        self.offload = self._make_offload(self._pool, [self._hellos[rank] for rank in range(self.num_ranks)])

    def _make_side(
        self, control: ControlPlane, pool: BlockPool, stats: StatsFeed, events: EventFeed | None
    ) -> SchedulerSide:
        return SchedulerSide(
            control,
            self._groups,
            pool,
            lazy_blocks=self._lazy_steps * self._blocks_per_step if self._options.lazy_offload else None,
            events=events,
            observe=stats.observe,
            step_blocks=self._step_blocks,
        )

    @property
    def _slot_tokens(self) -> int | None:
        return self._groups.alignment if len(self._groups.groups) == 1 else None

    @property
    def _blocks_per_step(self) -> int:
        """How many blocks one step can take from the GPU's free queue, or complete: those of all its tokens, and one
        for each request, whose tokens may begin in the middle of a block. Not those that loads take."""
        process = self._process
        # A probe (8 requests at once, 64 tokens a step) evicted at least 65 blocks. Lazy stores took 59 blocks without
        # those of requests, and 87 with them.
        full = sum(process.max_batched_tokens // group.block_tokens for group in self._groups.groups)
        return full + process.max_requests * len(self._groups.groups)

    @property
    def _step_blocks(self) -> int:
        return max(STEP_BLOCKS, 2 * self._blocks_per_step)


class EmbeddedSchedulerHost(SchedulerHost):
    """With an engine and an admin server in vLLM's process."""

    def __init__(
        self,
        options: ConnectorOptions,
        process: VLLMProcess,
        groups: KVGroups,
        *,
        build: Mapping[str, str],
        make_events: Callable[[OffloadEngine], EventFeed | None],
        tier_identity: Callable[[list[RankHello]], TierIdentity] | None = None,
    ) -> None:
        """`tier_identity`: asked for when all ranks are known; None where there can be no tier. Raises
        `ConfigError` for options with which no admin server may be started, or a tier that does not work with this
        model."""
        super().__init__(options, process, groups)
        self.engine: OffloadEngine | None = None
        self.admin: EmbeddedAdmin | None = None
        self._build, self._make_events = build, make_events
        self._admin_options = _admin_options(options, process)
        if options.tier is not None and not groups.is_plain:
            raise refusal("tier", options.tier, "none for a model with several KV groups, or a window")
        self._spans_nodes = False
        self._tier_identity = tier_identity
        self.tier: EmbeddedTier | None = None

    @property
    def wants_steps(self) -> bool:
        """Steps bring the ends of transfers."""
        return self.tier is not None and not self._has_failed and self.tier.wants_steps

    def plan_tier(self, step: Any) -> TierPlan | None:
        return None if self.tier is None else self.tier.plan(step)

    def _step_ended(self, number: int) -> None:
        if self.tier is not None:
            self.tier.ended(number)

    def _note_tier_client(self, rank: int, client: RankClient) -> None:
        if self.tier is not None:
            self.tier.note_client(rank, client)

    @property
    def address_for_remote_ranks(self) -> AdminAddress | None:
        return self.admin.address_for_remote_ranks if self.admin is not None and self._spans_nodes else None

    def close(self) -> None:
        if self.admin is not None:
            self.admin.stop()
        if self.tier is not None:
            self.tier.end()
        if self.engine is not None:
            self.engine.close()

    def _take_report(self, report: RankReport) -> DesiredState | None:
        assert self.engine is not None
        try:
            return self.engine.report(report)
        except KvstowError as error:
            self.engine.count_error("rank_report")
            logger.warning("rank %d: its report is not accepted: %s", report.rank, error)
            return None

    def _make_offload(self, pool: BlockPool, hellos: list[RankHello]) -> Offload:
        sizes = [hello.slot_bytes for hello in hellos]
        self._spans_nodes = {hello.node for hello in hellos} != {this_node()}
        engine = OffloadEngine(self._options.engine_config(sizes, self._groups.alignment))
        events = self._make_events(engine)
        stats = StatsFeed(EngineFigures(engine, sum(sizes), self._slot_tokens))
        control = EmbeddedControl(engine)
        side = self._make_side(control, pool, stats, events)
        self.engine = engine
        if self._options.tier is not None:
            self.tier = self._open_tier(control, self._options.tier, hellos)
        admin = EmbeddedAdmin(
            engine,
            self._admin_options,
            identity=self._process.engine_id,
            mode="vllm",
            max_capacity_slots=self._max_slots(hellos),
            settings={**self._options.public(), "model": self._process.model, "engine_id": self._process.engine_id},
            build=self._build,
            tier=None if self.tier is None else self.tier.host,
            node_host=get_ip() if self._spans_nodes else "",
            head_start=_HEAD_START_SECONDS,
            freezes_heap=True,
        )
        self.admin = admin
        admin.start()
        slots = engine.config.capacity_slots
        logger.info(
            "KVStow %s keeps %d blocks of %d tokens in %s of host memory, over %d ranks; stores are %s",
            *(kvstow.__version__, slots, self._groups.alignment, format_size(slots * sum(sizes)), len(sizes)),
            "lazy" if self._options.lazy_offload else "eager",
        )
        return Offload(control, side, stats, events)

    def _open_tier(self, control: EmbeddedControl, url: str, hellos: list[RankHello]) -> EmbeddedTier:
        """The store is connected to in the background."""
        from kvstow_service.connectors.engine_core.embeddedtier import EmbeddedTier  # only with a tier
        from kvstow_service.tiers import stores
        from kvstow_service.tiers.tierhost import TierChoice

        assert self.engine is not None
        assert self._tier_identity is not None
        process = self._process
        tier = EmbeddedTier(
            self.engine,
            control,
            self._tier_identity(hellos),
            model=process.model,
            max_step_tokens=process.max_batched_tokens,
            replicated=process.replicated,
            shares_memory=self._options.shares_memory,
        )
        tier.begin(TierChoice(url, stores.open_store(url), self._options.tier_write))
        return tier

    def _max_slots(self, hellos: list[RankHello]) -> int:
        """The largest size of a resize: on each node, the slots of its ranks share the available memory."""
        fitting = [
            min(hello.node_bytes for hello in ranks) // sum(hello.slot_bytes for hello in ranks)
            for node in {hello.node for hello in hellos}
            if (ranks := [hello for hello in hellos if hello.node == node])
        ]
        wanted = self._options.max_slots([hello.slot_bytes for hello in hellos], min(fitting))
        return min(wanted, *(hello.max_slots for hello in hellos))


def _admin_options(options: ConnectorOptions, process: VLLMProcess) -> AdminOptions:
    """Each data-parallel engine has a port of its own."""
    tls = None
    if options.tls_cert is not None:
        tls = TlsFiles(options.tls_cert, options.tls_key, options.tls_client_ca)
    elif options.tls_key is not None or options.tls_client_ca is not None:
        raise misuse("tls_cert", None, "is needed by tls_key and tls_client_ca")
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
