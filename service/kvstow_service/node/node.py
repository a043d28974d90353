"""The node service without its admin API: memory, control plane and the socket at which engines attach.

How a service takes over what the previous one has left with the keeper, and what the admin API sees, is here, too.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kvstow.config import HugePages
from kvstow.control.sharedpool import EarlierSession, recover
from kvstow.errors import ConflictError, IntegrityError
from kvstow.memory.budget import MemoryBudget
from kvstow.memory.extents import STEP_BYTES, Populator
from kvstow.memory.limits import MemoryLimits, limits_of
from kvstow.memory.nodememory import NodeMemory
from kvstow.memory.region import memory_nodes
from kvstow.status import KeptMemory, MemoryStatus, MemoryWait, NamespaceStatus, SessionStatus
from kvstow_api.directory import HostedPool
from kvstow_service.node.attach.attachserver import AttachServer, AttachSocket
from kvstow_service.node.attach.clients import REASONS
from kvstow_service.node.nodehost import NodeHost
from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import NodePool, PoolSettings
from kvstow_service.node.pools.noderecords import NodeRecords
from kvstow_service.node.survival.roster import SurvivingPool, SurvivingWorker, Survivors, read_survivors
from kvstow_service.node.tier.nodetier import NodeTier
from kvstow_service.tiers.stores import TierChoice

logger = logging.getLogger("kvstow.node")

DEFAULT_EXTENT_BYTES = 1 << 30

_RETRY_SECONDS = 10.0
_REVOKE_SECONDS = 5.0  # at the end, for threads that answer in milliseconds
_CHECK_SECONDS = 60.0
_MAX_CHECKED_SLOTS = 65_536  # the check holds a pool's lock for 1 us a slot


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Sizes are in bytes, times in seconds.

    `memory_bytes` is the budget over all pools and ranks. It is a multiple of 2 MiB, as is `extent_bytes`.
    `attach_group` is the group that may write to the socket, in addition to the service's user. Memory is populated in
    chunks of `populate_chunk_bytes`, with pauses of `populate_pause`. `trust_eof`: a process whose end cannot be seen
    counts as ended this long after its connection has ended; None refuses such processes. `state` is the folder of the
    keeper, with which everything survives a crash of this process; None for no keeper. `keep_timeout`: how long the
    keeper holds the memory without a service; None if others start the keeper. `tier` is the store of the fleet tier,
    if there is one.
    """

    memory_bytes: int
    attach_socket: Path
    attach_group: int | None = None
    extent_bytes: int = DEFAULT_EXTENT_BYTES
    huge_pages: HugePages = "advised"
    populate_chunk_bytes: int = STEP_BYTES
    populate_pause: float = 0.002
    trust_eof: float | None = None
    state: Path | None = None
    keep_timeout: float | None = 600.0
    tier: TierChoice | None = None
    pools: PoolSettings = field(default_factory=PoolSettings)


class Node:
    """Owns the memory, the control plane, the attach socket and their threads.

    `start` returns at once: from then on it answers engines, while memory is populated in the background. `close` ends
    the threads, and leaves to a keeper what a killed service would. `give_back` before it leaves nothing. Memory that
    engines have mapped is freed when they release it. Everything else may be called from any thread and does not
    wait.
    """

    def __init__(
        self,
        settings: NodeSettings,
        *,
        limits: MemoryLimits | None = None,
        on_failure: Callable[[str], object] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_failure` is called with a sentence when the service must end, as when a defect has ended a thread. Raises
        `ConfigError`, or `PinError` if there is no address space."""
        self.settings = settings
        self._on_failure = on_failure
        self._clock = clock
        self._running = ExitStack()
        budget = MemoryBudget(settings.memory_bytes, settings.extent_bytes, memory_nodes())
        self.populator = Populator(
            limits or limits_of(settings.huge_pages),
            chunk_bytes=settings.populate_chunk_bytes,
            pause=settings.populate_pause,
        )
        self.memory = MemoryThread(
            NodeMemory(budget, self.populator, huge_pages=settings.huge_pages),
            lambda action: self.server.post(action),
            on_smaller=lambda pool: self.host.follow_pool(pool),
            on_empty=lambda pool: self.host.close_if_unused(pool),
            on_failure=on_failure,
        )
        self.host = NodeHost(self.memory, settings=settings.pools, clock=clock)
        self.server: AttachServer
        """Set from `start` on."""
        self.tier: NodeTier | None = None
        """Set from `start` on, if there is one."""
        self._has_started = self._gives_back = False
        self.integrity_problem: str | None = None
        """What a check of the records has found. Only a restart repairs it."""
        self._next_retry, self._next_check = clock() + _RETRY_SECONDS, clock() + _CHECK_SECONDS

    def start(self) -> None:
        """Recovers what an earlier service has left: 2 s for a million blocks. Raises `ConflictError` if the socket
        cannot be used, or `KeeperError` if the state folder cannot, or the process of the service before does not end;
        call `close` then, too."""
        raise_descriptor_limit()
        if self.settings.state is not None:
            records = NodeRecords(self.settings.state, self.settings.keep_timeout, self._most_bytes())
            self.memory.records = records
            self._running.callback(lambda: records.finish(gives_back=self._gives_back))
        self._running.callback(self.memory.memory.close)
        self._running.callback(self.memory.close_records)
        socket = AttachSocket(self.settings.attach_socket, self.settings.attach_group)
        self._running.callback(socket.close)
        self.server = AttachServer(
            self.host,
            socket.listener,
            trust_eof=self.settings.trust_eof,
            on_failure=self._on_failure,
            clock=self._clock,
        )
        self._running.callback(self.server.close)
        self._running.callback(self.memory.close)  # before the server, which sends the last messages
        if self.records is not None:
            self._recover(self.records)
        if self.settings.tier is not None:
            self.tier = self.host.tier = NodeTier(
                self.settings.tier, self.memory, lambda action: self.server.post(action), self._clock
            )
        self.populator.start()
        self.memory.start()
        self.server.start()
        self._has_started = True
        self._running.callback(self._take_back)
        if self.tier is not None:
            self._running.callback(self.tier.close)  # first, because the workers of its store have memory, too

    def close(self) -> None:
        """Idempotent."""
        self._running.close()
        self.populator.close()
        self.host.close()

    def give_back(self) -> None:
        """Have `close` give everything back, and leave nothing for the next service."""
        self._gives_back = True

    def _recover(self, records: NodeRecords) -> None:
        recover_node(read_survivors(records.open(), self.settings.huge_pages), self.memory, self.host, self.server)
        self.memory.run_pending()
        records.join(self.memory.memory)

    def _most_bytes(self) -> int:
        """The most memory that a pool may ever have."""
        return max(self.settings.memory_bytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def _take_back(self) -> None:
        """Ask the engines to release all memory. Otherwise they would hold it for the next service."""
        if self._gives_back or self.records is None:
            self.memory.do(self.memory.revoke_all)
            for call_on_thread in (self.memory.do, self.server.post):
                done = threading.Event()
                call_on_thread(done.set)
                done.wait(_REVOKE_SECONDS)

    # -- for the admin process ------------------------------------------------------------------------------

    def tick(self) -> None:
        """Call it about once a second. Marks transfers as stuck, retries refused memory, and checks records."""
        self.host.tick()
        self.server.post(self.host.send_settled)
        now = self._clock()
        if now >= self._next_retry:
            self._next_retry = now + _RETRY_SECONDS
            if self.memory_failure() is not None:
                self.memory.do(self.memory.memory.retry)
        if now >= self._next_check:
            self._next_check = now + _CHECK_SECONDS
            self._check_integrity()

    def start_failure(self) -> str | None:
        """Why no engine can attach yet, or None."""
        if self._has_started:
            return None
        return "the service takes up what an earlier one has left; no engine can attach yet"

    def live_failure(self) -> str | None:
        """Why only a restart helps, or None."""
        if not self._has_started:
            return None
        return self.server.failure or self.memory.failure or self.integrity_problem

    def memory_failure(self) -> str | None:
        """Why the node, or a worker, has less memory than it should, or None."""
        missing = self.memory.memory.error
        if missing is not None:
            return str(missing)
        status = self.populator.status()
        if status.state in ("degraded", "failed"):
            return status.error or "the thread that populates memory has ended"
        if self.memory.faults:
            return f"{self.memory.faults} changes of the node's memory failed by a defect; the log says which"
        return next(iter(self.memory.figures.failures), None)

    @property
    def records(self) -> NodeRecords | None:
        """What survives a crash of this process. None without a state folder, and before `start`."""
        return self.memory.records

    @property
    def rejected(self) -> dict[str, int]:
        """Connections to the attach socket that were refused, or ended because of what they sent, by reason."""
        return dict.fromkeys(REASONS, 0) | (dict(self.server.tally.refused) if self._has_started else {})

    def detach(self, session_id: str, *, kill: bool = False) -> bool:
        """See `AttachServer.detach`. Raises `ConflictError` before engines can attach."""
        if not self._has_started:
            raise ConflictError(
                "no session can be detached yet: the service takes up what an earlier one has left; try again when "
                "/startupz says 200"
            )
        return self.server.detach(session_id, kill=kill)

    def _check_integrity(self) -> None:
        """Check pools without sessions, because no engine waits for their locks."""
        self.memory.do(self.memory.budget.check_integrity)
        for pool in self.host.pools():
            if self.host.has_sessions(pool) or pool.slots.in_service > _MAX_CHECKED_SLOTS:
                continue
            try:
                pool.facade.check_integrity()
            except IntegrityError as error:
                self.integrity_problem = f"the records of pool {pool.name} are inconsistent: {error}"
                logger.error("%s", self.integrity_problem)


def raise_descriptor_limit() -> None:
    """Raise this process's descriptor limit to its maximum: each extent takes one, each engine several."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def recover_node(survivors: Survivors, memory: MemoryThread, host: NodeHost, server: AttachServer) -> int:
    """Make a node of plain data, before any of its threads has started. Takes over the descriptors. Returns the number
    of blocks. 2 s for a million."""
    begun = time.monotonic()
    gc.disable()  # a million keys are made, and no cycle: looking for some took a quarter of the time
    try:
        num_blocks = _recover(survivors, memory, host, server)
    finally:
        gc.enable()
    if survivors.pools:
        seconds = time.monotonic() - begun
        logger.info("%d blocks in %d pools were recovered in %.2f s", num_blocks, len(survivors.pools), seconds)
    return num_blocks


def _recover(survivors: Survivors, memory: MemoryThread, host: NodeHost, server: AttachServer) -> int:
    memory.restore_memory(survivors)
    num_blocks = 0
    for found in survivors.pools:
        pool = host.restore_pool(found.record, found.namespaces)
        memory.restore_pool(pool, found, survivors)
        sessions = _sessions(found)
        earlier = [
            EarlierSession(
                workers[0].record.number, workers[0].record.engine, frozenset(one.client for one, _ in workers)
            )
            for workers in sessions.values()
        ]
        names = {tag: label.name for tag, label in found.journal.namespaces().items()}
        num_blocks += recover(pool, found.journal.recover(), names, earlier)
        for session_id, workers in sessions.items():
            record = workers[0].record
            peers = [(one.hello(), one.peer(None if pidfd is None else os.dup(pidfd))) for one, pidfd in workers]
            session = server.restore_session(session_id, record.token_digest, peers)
            session.hosted = host.restore_session(record, session)
    return num_blocks


def _sessions(found: SurvivingPool) -> dict[str, list[SurvivingWorker]]:
    """The workers of each session."""
    sessions: dict[str, list[SurvivingWorker]] = {}
    for worker in found.workers:
        sessions.setdefault(worker.record.session_id, []).append(worker)
    return sessions


class NodeDirectory:
    """The `Directory` of a `Node`. `errors` are those of the host that no pool counts, by code."""

    is_node = True
    take_report = None

    def __init__(self, node: Node) -> None:
        self.engine_id = node.host.engine_id
        self.switches = node.host.switches
        self.trust_eof = node.settings.trust_eof
        self.errors: Counter[str] = Counter()
        self._node = node

    @property
    def tier(self) -> NodeTier | None:
        return self._node.tier

    def pools(self) -> list[HostedPool]:
        return [self._hosted(pool) for pool in self._node.host.pools()]

    def find_pool(self, name: str) -> HostedPool | None:
        pool = self._node.host.find_pool(name)
        return None if pool is None else self._hosted(pool)

    def delete_pool(self, name: str) -> None:
        self._node.host.delete_pool(name)

    def sessions(self) -> list[SessionStatus]:
        return self._node.host.sessions()

    def detach(self, session_id: str, *, kill: bool) -> bool:
        return self._node.detach(session_id, kill=kill)

    def namespaces(self) -> list[NamespaceStatus]:
        return self._node.host.namespaces()

    @property
    def rejected(self) -> dict[str, int]:
        return self._node.rejected

    def memory(self) -> MemoryStatus:
        node, memory, records = self._node, self._node.memory, self._node.records
        pools, now = self.pools(), time.monotonic()
        return MemoryStatus(
            target_bytes=memory.budget.total_bytes,
            populated_bytes=node.populator.status().populated_bytes,
            failure=node.memory_failure(),
            granted_bytes=sum(pool.granted_bytes for pool in pools),
            used_bytes=sum(pool.used_bytes for pool in pools),
            recalled_bytes=memory.figures.recalled_bytes,
            waits=tuple(
                MemoryWait(one.pool, one.session, one.num_bytes, now - one.since) for one in memory.figures.waits
            ),
            kept=tuple(KeptMemory(one.sessions, one.num_bytes, now - one.since) for one in memory.figures.kept),
            notices=memory.figures.notices,
            keeper=None if records is None else "connected" if records.notice is None else "gone",
            keeper_restarts=0 if records is None else max(0, records.joins - 1),
        )

    def count_error(self, code: str) -> None:
        self.errors[code] += 1

    def _hosted(self, pool: NodePool) -> HostedPool:
        slot_bytes = sum(pool.stored_slot_bytes)
        return HostedPool(
            pool.name,
            pool.facade,
            max_capacity_slots=self._node.memory.budget.total_bytes // slot_bytes,
            granted_bytes=pool.granted_bytes,
            due_bytes=pool.due_bytes,
            model=pool.model,
            is_resizable=False,
            stored_slot_bytes=slot_bytes,
        )
