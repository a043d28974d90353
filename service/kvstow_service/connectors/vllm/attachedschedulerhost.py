"""The scheduler's half of an engine that is attached to the node service."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import vllm
from msgspec.structs import replace

import kvstow
from kvstow.attach.hello import NO_HOLD, GateHold, RankSession, SessionTicket
from kvstow.attach.identity import NamespaceIdentity, PoolIdentity
from kvstow.bytesize import format_size
from kvstow.errors import ConfigError
from kvstow.stats import DIRECTIONS
from kvstow_service.connectors.engine_core.controlplane import AttachedControl
from kvstow_service.connectors.engine_core.gpublocks import BlockPool
from kvstow_service.connectors.engine_core.kvevents import AttachedBlocks
from kvstow_service.connectors.engine_core.metadata import RankHello, RankUpdate
from kvstow_service.connectors.engine_core.metricsexport import StatsFeed
from kvstow_service.connectors.engine_core.offloadmetrics import (
    ATTACH_STATE,
    ATTACHED,
    INFO,
    LOST_BLOCKS,
    SESSIONS_LOST,
    info_labels,
    usage,
)
from kvstow_service.connectors.engine_core.schedulerhost import EngineSetup, SchedulerHost
from kvstow_service.connectors.engine_core.schedulerside import SchedulerSide
from kvstow_service.connectors.engine_core.stepplan import PlannedStep
from kvstow_service.connectors.engine_core.vllmprocess import hash_block_tokens
from kvstow_service.connectors.vllm import engineidentity

logger = logging.getLogger("kvstow.vllm")

LOOKING_SECONDS = 2.0
"""For how many seconds after its start an engine without requests makes steps to find a service."""
JOINING_SECONDS = 10.0
"""For how many seconds after it has attached an engine makes steps until its ranks have memory."""


class AttachedSchedulerHost(SchedulerHost):
    """Uses the control plane of the node service. There is no admin server in vLLM's process: the service's admin
    server shows the pool and this engine's session."""

    _lazy_steps = 4

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._model = engineidentity.read_model(setup.vllm_config, setup.options.weights_id)
        self._control: AttachedControl | None = None
        self._sessions: dict[int, RankSession] = {}
        self._number = 0
        self._looking_until: float | None = None

    @property
    def ticket(self) -> SessionTicket | None:
        return None if self._control is None else self._control.ticket

    def hold_of(self, plan: PlannedStep | None) -> GateHold:
        if self._control is None or self.side is None:
            return NO_HOLD
        ops = () if plan is None else plan.ops
        return self._control.holds.next(self.ticket, ops, has_requests=self.side.has_requests)

    @property
    def wants_steps(self) -> bool:
        """Whether vLLM should make steps without requests. The ranks learn of a session only in steps, so an engine
        that has just started or attached makes some. The ranks also learn only in steps that no more ops come. An idle
        rank that waited for some would keep the service's memory."""
        if self._control is None:
            return super().wants_steps
        if self._control.holds.is_begun and self.side is not None and not self.side.has_requests:
            return True
        if self._has_failed:
            return False
        if self._looking_until is None:  # vLLM's start has ended
            self._looking_until = self._setup.clock() + LOOKING_SECONDS
        self._follow_session()
        if self.side is not None and self.side.events is not None and self.side.events.is_behind:
            return True
        if self._setup.clock() >= self._looking_until:
            return False
        return self.ticket is None or not self._control.is_attached or not self._memory()[0]

    def close(self) -> None:
        if self._control is not None:
            self._control.close()

    def _process_update(self, rank: int, update: RankUpdate) -> None:
        super()._process_update(rank, update)
        if update.session is not None:
            self._sessions[rank] = update.session
            if self._control is not None:
                self._control.holds.note(rank, update.session.hold)
            self._follow_session()

    def _make_side(self, pool: BlockPool, hellos: list[RankHello]) -> SchedulerSide | None:
        for hello in hellos:
            if not hello.regions:  # the rank has logged why
                logger.error("rank %d has no data plane, so this engine does not attach", hello.rank)
                self._has_failed = True
                return None
        if len({hello.node for hello in hellos}) > 1:
            allowed = "none if an engine's ranks are on several nodes: each node has its own service"
            raise ConfigError("kv_connector_extra_config: attach", "set", allowed)
        identity = engineidentity.pool_identity(
            self._setup.vllm_config,
            self._setup.kv_cache_config,
            self._setup.groups,
            hellos,
            replicated=self._setup.process.replicated,
        )
        options = self._setup.options
        assert options.attach is not None
        control = AttachedControl(
            options.attach,
            max(identity.slot_bytes),
            engine=self._setup.process.engine_id,
            engine_version=f"vllm {vllm.__version__}",
            pool=identity,
            namespace=self._find_namespace,
            fleet_weights=self._model.fleet_weights,
            wanted_bytes=options.cpu_bytes_to_use,
            require_sharing=options.attach_require_sharing,
        )
        self._control = control
        self.stats = StatsFeed(
            partial(self._read_figures, control, identity), lambda: control.open_transfers > 0, self._setup.clock
        )
        logger.info(
            "KVStow %s keeps blocks of %d tokens in memory of the node service at unix:%s, %s of it at most, for %d "
            "ranks; stores are %s; the service's admin API shows the pool, and this engine has none of its own",
            kvstow.__version__,
            self._setup.groups.alignment,
            options.attach,
            format_size(options.cpu_bytes_to_use) if options.cpu_bytes_to_use else "all",
            len(hellos),
            "lazy" if options.lazy_offload else "eager",
        )
        events = self._event_feed(AttachedBlocks(control, self._has_all_memory, self._setup.clock))
        return self._new_side(control, pool, events)

    def _read_figures(self, control: AttachedControl, identity: PoolIdentity) -> dict[str, Any]:
        """The figures of `read_family` for this engine's session. The service's own metrics have those of the whole
        pool."""
        refused = control.refused_stores["dropped_cpu_full"]
        values: dict[str, Any] = {"allocation_failure": refused, LOST_BLOCKS: self.lost_blocks}
        slot_bytes, (slots, is_whole) = sum(identity.slot_bytes), self._memory()
        for direction in DIRECTIONS:
            stored_once = identity.replicated and direction == "store"
            num_bytes = identity.slot_bytes[0] if stored_once else slot_bytes
            values[f"{direction}_bytes"] = control.moved_blocks[direction] * num_bytes
            values[f"{direction}_time"] = control.moved_seconds[direction]
        writing, reading = control.open_blocks("store"), control.open_blocks("load")
        values |= usage(writing, reading, slots)
        values[SESSIONS_LOST] = control.num_sessions - control.is_attached
        values[ATTACHED] = float(control.problem is None)
        state = control.state
        if state.state == "attached" and not slots:
            state = state._replace(state="no_memory")
        values[ATTACH_STATE] = state._asdict()
        if is_whole:
            values[INFO] = info_labels(slots, slot_bytes, self._slot_tokens)
        return values

    def _find_namespace(self) -> NamespaceIdentity:
        """The namespace of this engine. It is called when vLLM has initialized its block hashes."""
        hash_tokens = hash_block_tokens(self._setup.vllm_config, self._setup.kv_cache_config)
        loaded = [self._hellos[rank].loaded for rank in range(self.num_ranks)]
        namespace = engineidentity.namespace_identity(self._setup.vllm_config, hash_tokens, self._model, loaded)
        if self._weights_changed and not namespace.unshared:
            namespace = replace(namespace, unshared=self._weights_changed)
        if namespace.unshared:
            logger.warning("this engine shares no blocks with others: %s", namespace.unshared)
        return namespace

    def _follow_session(self) -> None:
        """Notice a new session, which the ranks have to join."""
        ticket = self.ticket
        if ticket is not None and ticket.number != self._number:
            assert self._control is not None
            self._number = ticket.number
            self._looking_until = self._setup.clock() + JOINING_SECONDS
            for reason in self._control.sharing_off:
                logger.warning("this engine shares no blocks with others: %s", reason)

    def _has_all_memory(self) -> bool:
        self._follow_session()
        slots, is_whole = self._memory()
        return slots > 0 and is_whole

    def _memory(self) -> tuple[int, bool]:
        """How many slots all ranks have in the current session, and whether no more will come."""
        ranks = [self._sessions.get(rank, RankSession()) for rank in range(self._setup.process.num_ranks)]
        if any(rank.number != self._number for rank in ranks):
            return 0, False
        return min(rank.slots for rank in ranks), all(rank.is_whole for rank in ranks)
