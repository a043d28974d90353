"""The node service without its admin API: memory, control plane and the socket at which engines attach."""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from kvstow.config import HugePages
from kvstow.errors import ConflictError, IntegrityError
from kvstow.memory.budget import MemoryBudget
from kvstow.memory.extents import STEP_BYTES
from kvstow.memory.limits import MemoryLimits, limits_of
from kvstow.memory.nodememory import NodeMemory
from kvstow.memory.numa import memory_nodes
from kvstow.memory.populator import Populator
from kvstow_service.node.attach.attachserver import AttachServer
from kvstow_service.node.attach.attachsocket import AttachSocket
from kvstow_service.node.attach.attachtally import REASONS
from kvstow_service.node.nodehost import NodeHost
from kvstow_service.node.noderecovery import NodeRecovery
from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import PoolSettings
from kvstow_service.node.survival.survivingmemory import SurvivingMemory
from kvstow_service.node.tier.nodetier import NodeTier
from kvstow_service.tiers.hostedtiers import TierChoice

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
    keeper holds the memory without a service; None if others start the keeper. `keep_on_stop`: leave the memory with
    the keeper in `close`, too. `tier` is the store of the fleet tier, if there is one.
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
    keep_on_stop: bool = False
    tier: TierChoice | None = None
    pools: PoolSettings = field(default_factory=PoolSettings)


class Node:
    """Owns the memory, the control plane, the attach socket and their threads.

    `start` returns at once: from then on it answers engines, while memory is populated in the background. `close` ends
    the threads and gives everything back. Memory that engines have mapped is freed when they let go of it. Everything
    else may be called from any thread and does not wait.
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
            on_empty=lambda pool: self.host.drop_if_unused(pool),
            on_failure=on_failure,
        )
        self.host = NodeHost(self.memory, settings=settings.pools, clock=clock)
        self.server: AttachServer
        """Set from `start` on."""
        self.tier: NodeTier | None = None
        """Set from `start` on, if there is one."""
        self._keeper: SurvivingMemory | None = None
        self._has_started = False
        self.integrity_problem: str | None = None
        """What a check of the records has found. Only a restart repairs it."""
        self._next_retry, self._next_check = clock() + _RETRY_SECONDS, clock() + _CHECK_SECONDS

    def start(self) -> None:
        """Recovers what an earlier service has left: 2 s for a million blocks. Raises `ConflictError` if the socket
        cannot be used, or `KeeperError`; `close` then gives back what was taken."""
        raise_descriptor_limit()
        if self.settings.state is not None:
            self._keeper = SurvivingMemory(self.settings.state, self.settings.keep_timeout)
            self._running.callback(self._leave_keeper, self._keeper)
            self.memory.pools.use_keeper(self._keeper)
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
        if self._keeper is not None:
            NodeRecovery(self._keeper, self.memory, self.host, self.server).run()
        if self.settings.tier is not None:
            self.tier = self.host.tier = NodeTier(
                self.settings.tier, self.memory, lambda action: self.server.post(action), self._clock
            )
        self._has_started = True
        self.populator.start()
        self.memory.start()
        self.server.start()
        self._running.callback(self._take_back)
        if self.tier is not None:
            self._running.callback(self.tier.close)  # first, because the workers of its store have memory, too

    def close(self) -> None:
        """Idempotent."""
        self._running.close()
        self.populator.close()
        self.host.close()

    @property
    def _keeps(self) -> bool:
        """Whether the next service finds everything, even after a failure."""
        if self._keeper is None:
            return False
        return self.settings.keep_on_stop or not self._has_started or self.live_failure() is not None

    def _take_back(self) -> None:
        """Ask the engines to let go of all memory. Otherwise they would hold it for the next service."""
        if not self._keeps:
            for revoke_or_send in (self.memory.revoke_all, self.server.post):
                done = threading.Event()
                revoke_or_send(done.set)
                done.wait(_REVOKE_SECONDS)

    def _leave_keeper(self, keeper: SurvivingMemory) -> None:
        if self._keeps:
            keeper.leave()
        else:
            keeper.end()

    # -- for the admin process ------------------------------------------------------------------------------

    def tick(self) -> None:
        """Call it about once a second. Marks transfers as stuck, retries refused memory, and checks records."""
        self.host.tick()
        self.server.post(self.host.send_settled)
        now = self._clock()
        if now >= self._next_retry:
            self._next_retry = now + _RETRY_SECONDS
            if self.memory_failure() is not None:
                self.memory.retry()
        if now >= self._next_check:
            self._next_check = now + _CHECK_SECONDS
            self._check_integrity()

    def live_failure(self) -> str | None:
        """Why only a restart helps, or None."""
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
    def keeper(self) -> SurvivingMemory | None:
        """What survives a crash of this process. None without a state folder, and before `start`."""
        return self._keeper

    @property
    def rejected(self) -> dict[str, int]:
        """Connections to the attach socket that were refused, or ended because of what they sent, by reason."""
        return dict.fromkeys(REASONS, 0) | (dict(self.server.figures().refused) if self._has_started else {})

    def detach(self, session_id: str, *, kill: bool = False) -> bool:
        """See `AttachServer.detach`. Raises `ConflictError` before engines can attach."""
        if not self._has_started:
            raise ConflictError(
                "no session can be detached yet: the service takes up what an earlier one has left; try again when "
                "/startupz says 200"
            )
        return self.server.detach(session_id, kill=kill)

    def _check_integrity(self) -> None:
        """Check pools without sessions, because nobody waits for their locks."""
        self.memory.check_integrity()
        for pool in self.host.pools():
            if pool.num_sessions or pool.slots.in_service > _MAX_CHECKED_SLOTS:
                continue
            try:
                pool.check_integrity()
            except IntegrityError as error:
                self.integrity_problem = f"the records of pool {pool.name} are inconsistent: {error}"
                logger.error("%s", self.integrity_problem)


def raise_descriptor_limit() -> None:
    """Raise this process's descriptor limit to its maximum: each extent takes one, each engine several."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
