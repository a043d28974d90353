"""The worker's half as an engine's process hosts it: a rank's data plane, and its messages to and from the
scheduler."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from kvstow.dataplane import DataPlane
from kvstow.devices.base import Fence
from kvstow.errors import ConfigError, InsufficientMemoryError
from kvstow.layout import KVLayout
from kvstow.memory.hostpool import HostPool
from kvstow.messageorder import ReportSequence
from kvstow.messages import RankReport, TierCompletion
from kvstow_service.admin.agent import RankAgent
from kvstow_service.admin.rendezvous import Rendezvous
from kvstow_service.connectors.engine_core.hostmemory import require_memory, wait_until_pinned
from kvstow_service.connectors.engine_core.metadata import KVStowMetadata, RankHello
from kvstow_service.connectors.engine_core.options import ConnectorOptions
from kvstow_service.connectors.engine_core.rankplane import NoDataPlane, RankDataPlane
from kvstow_service.connectors.engine_core.stepplan import TierPlan
from kvstow_service.connectors.engine_core.vllmprocess import VLLMProcess, this_node
from kvstow_service.connectors.engine_core.workerside import BootCompletions, RankClient, RankSession, WorkerSide

if TYPE_CHECKING:
    from kvstow_service.connectors.engine_core.ranktier import RankTier

_REPORT_SECONDS = 1.5  # the agent reports every second
_TELL_CLIENT_SECONDS = 0.5

logger = logging.getLogger("kvstow.vllm")


class Geometry(Protocol):
    """Where a block's bytes lie in the engine's KV cache."""

    @property
    def layout(self) -> KVLayout: ...


G = TypeVar("G", bound=Geometry)


class WorkerHost(ABC, Generic[G]):
    """One rank's worker side. Used by the worker's main thread.

    At the start, it refuses settings that the user has to change. After any other error, then or later, the rank
    reports the error, and vLLM serves without offload. The rank has no data plane until the KV cache is registered.
    """

    def __init__(self, options: ConnectorOptions, process: VLLMProcess) -> None:
        """Takes no memory yet."""
        if not process.recomputes and process.rank == 0:
            logger.warning(
                "kv_load_failure_policy is 'fail': a request whose load fails ends with an error; with 'recompute' "
                "it is computed instead"
            )
        self._options, self._process = options, process
        self._sender = ReportSequence()
        self._kv_cache: Any = None
        self.side = WorkerSide(process.rank, NoDataPlane(process.rank, 1), loads_wait=not process.frees_late)
        self.hello: RankHello | None = None
        """None until the KV cache is registered."""

    # What hosts differ in.

    @abstractmethod
    def _read_geometry(self, kv_cache: Any) -> G:
        """How the engine's KV cache lies in memory. Raises `ConfigError`."""

    def _fence_of(self, kv_cache: Any) -> Callable[[], Fence | None]:
        """Makes fences for the steps launched so far. None if the copies need none."""
        return lambda: None

    @abstractmethod
    def _make_plane(self, geometry: G) -> RankDataPlane:
        """Pins nothing yet. If it raises, nothing is left behind."""

    @abstractmethod
    def _make_hello(self, slot_bytes: int) -> RankHello: ...

    def _start(self, plane: RankDataPlane) -> None:
        plane.start(at_ease=True)  # at the full pace, the rest of vLLM's start took 0.3 to 1.5 s longer

    @abstractmethod
    def follow(self, metadata: KVStowMetadata) -> None:
        """Handle what came with a step, besides its plan."""

    @abstractmethod
    def news(self) -> tuple[RankReport | None, RankSession | None]:
        """Messages for the scheduler's half, after a step."""

    def take_completions(self) -> tuple[BootCompletions, ...]:
        """Completions for the scheduler's half, after a step."""
        return tuple(self.side.take_boot_completions())

    @property
    def tier_step(self) -> int:
        """See `RankUpdate`."""
        return 0

    def tier_client(self) -> RankClient | None:
        """See `RankUpdate`."""
        return None

    # What they have in common.

    def register(self, kv_cache: Any) -> None:
        """Build the data plane around the engine's KV cache, and begin to pin. Returns before pinning is done, unless
        the user wants to wait."""
        self._kv_cache = kv_cache
        plane, slot_bytes = self._build(refusals=(ConfigError, InsufficientMemoryError))
        self.hello = self._make_hello(slot_bytes)
        self.side.fence = self._fence_of(kv_cache)
        self.side.replace_plane(plane)
        self._start(plane)

    def suspend(self) -> None:
        """vLLM is about to take its KV cache away."""
        if self.hello is not None:
            slot_bytes = self.hello.slot_bytes
            self._restart(lambda: NoDataPlane(self._process.rank, slot_bytes, sender=self._sender))

    def resume(self) -> None:
        """The KV cache is back, with nothing in it: the rank restarts."""
        if self.hello is not None and (plane := self._restart(lambda: self._build(refusals=())[0])) is not None:
            self._start(plane)

    def close(self) -> None:
        """Idempotent; vLLM does not always call it."""
        self.side.plane.close()

    def _restart(self, make: Callable[[], RankDataPlane]) -> RankDataPlane | None:
        """Replace the data plane with the one that `make` returns. Returns None if the present one does not end. The
        rank then stays stopped, because its engine waits for a copy that may still write."""
        if not self.side.close_plane():
            logger.error("rank %d: its data plane does not end; vLLM serves without offload", self._process.rank)
            return None
        plane = make()
        self.side.replace_plane(plane)
        return plane

    def _build(self, refusals: tuple[type[Exception], ...]) -> tuple[RankDataPlane, int]:
        """The data plane or its replacement, and the size of its slots. Raises the `refusals`."""
        process, slot_bytes = self._process, self.hello.slot_bytes if self.hello is not None else 1
        try:
            geometry = self._read_geometry(self._kv_cache)
            slot_bytes = geometry.layout.slot_bytes
            plane = self._make_plane(geometry)
        except refusals:
            raise
        except Exception as error:
            logger.exception("rank %d has no data plane; vLLM serves without offload", process.rank)
            reason = getattr(error, "code", "internal")
            return NoDataPlane(process.rank, slot_bytes, reason, repr(error), self._sender), slot_bytes
        return plane, slot_bytes


class PoolWorkerHost(WorkerHost[G]):
    """A worker with a pool of its own and an agent."""

    def __init__(self, options: ConnectorOptions, process: VLLMProcess) -> None:
        """Raises `InsufficientMemoryError`."""
        super().__init__(options, process)
        self._node_bytes = require_memory(options, process)
        self._max_bytes = options.reserved_bytes_of_rank(self._node_bytes)
        self._rendezvous = Rendezvous(process.engine_id)
        self.agent: RankAgent | None = None
        self._reports_sent = 0  # reports that the agent had brought to the admin server
        self._report_at = 0.0
        self._tier: RankTier | None = None
        self._tier_url = options.tier or ""
        self._former_tiers: list[RankTier] = []  # their completions are still to come
        self._tier_number = 0
        self._told_client: RankClient | None = None
        self._tell_client_at = 0.0
        self._tier_ends: list[BootCompletions] = []

    def follow(self, metadata: KVStowMetadata) -> None:
        if metadata.admin is not None and self.agent is not None:
            self.agent.offer(metadata.admin)
        if metadata.tier is not None:
            self._follow_tier(metadata.tier)
        own = metadata.desired.get(self._process.rank)
        if own is None or self.hello is None:
            return
        try:  # as the agent does with the answers to its own reports
            self.side.apply(own)
        except Exception:  # vLLM's step continues; the next report is answered again
            logger.exception("rank %d cannot apply the desired state", self._process.rank)

    def news(self) -> tuple[RankReport | None, RankSession | None]:
        """What the agent would report, once a second while it reaches no server, because serving depends on no
        server."""
        now = time.monotonic()
        if self.agent is None or now < self._report_at:
            return None, None
        self._report_at = now + _REPORT_SECONDS
        before, self._reports_sent = self._reports_sent, self.agent.stats.sent
        return self.side.report() if self._reports_sent == before else None, None

    def take_completions(self) -> tuple[BootCompletions, ...]:
        for tier in (*self._former_tiers, *([self._tier] if self._tier is not None else ())):
            if ended := tier.take_completions():
                self._tier_ends.append(BootCompletions(tier.boot_id, tuple(ended)))
        ends, self._tier_ends = self._tier_ends, []
        return (*super().take_completions(), *ends)

    @property
    def tier_step(self) -> int:
        return self._tier_number if self._process.rank == 0 else 0

    def tier_client(self) -> RankClient | None:
        """Sent at most twice a second."""
        now = time.monotonic()
        if self._tier is None or now < self._tell_client_at:
            return None
        self._tell_client_at = now + _TELL_CLIENT_SECONDS
        before, self._told_client = self._told_client, self._tier.state()
        return self._told_client if self._told_client != before else None

    def close(self) -> None:
        if self.agent is not None:
            self.agent.stop()
        self._close_tier()
        super().close()

    def _restart(self, make: Callable[[], RankDataPlane]) -> RankDataPlane | None:
        self._close_tier()
        return super()._restart(make)

    def _open_tier(self, plane: RankDataPlane) -> None:
        """A rank that cannot open its store fails its transfers. Nothing else depends on the store."""
        if not (self._tier_url and isinstance(plane, DataPlane) and isinstance(plane.pool, HostPool)):
            return
        from kvstow_service.connectors.engine_core.ranktier import RankTier  # only with a tier
        from kvstow_service.tiers import stores

        process = self._process
        try:
            store = stores.open_store(self._tier_url)
            self._tier = RankTier(
                plane, plane.pool, store, process.rank, process.num_ranks, replicated=process.replicated
            )
        except Exception:
            logger.exception("rank %d: the tier's store cannot be used", process.rank)

    def _close_tier(self) -> None:
        """End all transfers: nothing touches the pool for a store after this."""
        tiers = [*self._former_tiers, *([self._tier] if self._tier is not None else ())]
        self._former_tiers, self._tier, self._told_client = [], None, None
        for tier in tiers:
            tier.close()
            if ended := tier.take_completions():
                self._tier_ends.append(BootCompletions(tier.boot_id, tuple(ended)))

    def _use_store(self, url: str) -> None:
        """An operator has attached another store, or detached this one. The ops of this store have ended."""
        tier, self._tier, self._tier_url, self._told_client = self._tier, None, url, None
        if tier is not None:
            tier.begin_close()
            self._former_tiers.append(tier)
        self._open_tier(self.side.plane)

    def _follow_tier(self, plan: TierPlan) -> None:
        """Begin the transfers of a step, once: later calls for the same step do nothing."""
        if plan.number == self._tier_number:
            return
        self._tier_number = plan.number
        if plan.url != self._tier_url:
            self._use_store(plan.url)
        rank, tier = self._process.rank, self._tier
        planned_for = plan.boots[rank] or ""
        for op in [op for of_rank, op in plan.ops if of_rank == rank]:
            if tier is not None and tier.boot_id == planned_for:
                tier.submit(op)
                continue
            why = "this rank has restarted since the op was planned, or has no client of the tier's store"
            refusal = (TierCompletion(op.op_id, "failed", why),)
            boots = {planned_for, self.side.plane.boot_id}  # it may have restarted during the planning
            self._tier_ends += [BootCompletions(boot_id, refusal) for boot_id in boots]

    def _make_hello(self, slot_bytes: int) -> RankHello:
        max_slots = self._max_bytes // slot_bytes
        return RankHello(
            self._process.rank, slot_bytes, max_slots, this_node(), self._node_bytes, num_ranks=self._process.num_ranks
        )

    def _start(self, plane: RankDataPlane) -> None:
        if self.agent is None:
            self.agent = RankAgent(self._process.rank, self.side, self._rendezvous)
            self.agent.start()
        self._open_tier(plane)
        if self._options.async_register_cache:
            super()._start(plane)
            return
        plane.start()
        if isinstance(plane, DataPlane):
            wait_until_pinned(plane.pool)
