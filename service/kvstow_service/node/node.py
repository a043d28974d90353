"""The node service without its admin server: memory, control plane and the socket at which engines attach.

This module also takes over what a previous service has left with the keeper.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue

from kvstow.control.administration import HostSwitches
from kvstow.control.sharedpool import EarlierSession, recover
from kvstow.errors import ConflictError, IntegrityError
from kvstow.memory.budget import MemoryBudget
from kvstow.memory.extents import Populator
from kvstow.memory.limits import MemoryLimits, limits_of
from kvstow.memory.nodememory import NodeMemory
from kvstow.memory.region import memory_nodes
from kvstow.status import MemoryFailure, MemoryStatus, NamespaceStatus, SessionStatus, UserLimit
from kvstow.tier.blockstore import BlockStore, Purged
from kvstow.tier.fingerprint import OWN_TENANT
from kvstow_api.directory import HostedPool
from kvstow_api.texts import counted
from kvstow_service.node.attach.attachserver import AttachServer, AttachSocket
from kvstow_service.node.attach.clients import REASONS
from kvstow_service.node.nodehost import NodeHost
from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import NodePool, PoolSettings
from kvstow_service.node.pools.noderecords import NodeRecords
from kvstow_service.node.settings import Settings
from kvstow_service.node.survival.roster import SurvivingPool, SurvivingWorker, read_survivors
from kvstow_service.node.tier.nodestore import NodeStore
from kvstow_service.stores.stores import measure_store

logger = logging.getLogger("kvstow.node")

_RETRY_SECONDS = 10.0  # between two attempts to get refused memory
_REVOKE_SECONDS = 5.0  # how long `close` waits for each of two threads, which usually answer in milliseconds
_CHECK_SECONDS = 60.0  # between two checks of the records
_PACE_TICKS = 6  # over how many ticks the rate of populating is measured
_PURGE_SECONDS = 60.0  # how long a deletion waits for the store: longer than a disk may hang before it counts as stuck
_MAX_CHECKED_SLOTS = 65_536  # larger pools are not checked, because the check holds a pool's lock for 1 us a slot


class Node:
    """Owns the memory, the control plane, the attach socket and their threads. It is the `Directory` of the admin API.

    `start` lets engines attach, and memory is populated in the background after that. `close` ends the threads, and
    leaves to the keeper what a killed service would leave. After `give_back`, it leaves nothing. Memory that engines
    have mapped is freed when they release it. All other methods may be called from any thread and do not wait, except
    `delete_pool`.
    """

    is_node = True
    take_report = None

    def __init__(
        self,
        settings: Settings,
        *,
        attach_group: int | None = None,
        store: BlockStore | None = None,
        limits: MemoryLimits | None = None,
        on_failure: Callable[[str], object] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`attach_group` is a group that may write to the attach socket, in addition to the service's user. `store` is
        the store that `settings.tier` names. `on_failure` is called with a sentence when the service must end, for
        example because a defect has ended a thread. Raises `PinError` if there is no address space."""
        self.settings = settings
        self._attach_group, self._store = attach_group, store
        self._on_failure, self._clock = on_failure, clock
        self._running = ExitStack()
        self.populator = Populator(
            limits or limits_of(settings.huge_pages), chunk_bytes=settings.pin_chunk, pause=settings.pin_pause
        )
        budget = MemoryBudget(settings.budget_bytes, settings.extent_size, memory_nodes())
        self.memory_thread = MemoryThread(
            NodeMemory(budget, self.populator, huge_pages=settings.huge_pages),
            lambda action: self.server.post(action),
            on_smaller=lambda pool: self.host.follow_pool(pool),
            on_empty=lambda pool: self.host.close_if_unused(pool),
            on_failure=on_failure,
        )
        alignment = 1 if store is None else store.slot_alignment
        pools = PoolSettings(settings.policy, settings.curve, settings.transfer_timeout, slot_alignment=alignment)
        self.host = NodeHost(self.memory_thread, settings=pools, clock=clock)
        self.server: AttachServer
        """Set by `start`."""
        self.tier: NodeStore | None = None
        """Set by `start` if there is a store."""
        self.errors: Counter[str] = Counter()
        self._has_started = self._recovers = self._gives_back = False
        self._populated = deque[tuple[float, int]](maxlen=_PACE_TICKS)
        """How many bytes were populated, at the times of the last ticks."""
        self.integrity_problem: str | None = None
        """What a check of the records has found, as a sentence. Only a restart repairs it."""
        self._next_retry, self._next_check = clock() + _RETRY_SECONDS, clock() + _CHECK_SECONDS

    def start(self) -> None:
        """Start the threads. First recover what an earlier service has left, which takes 2 s for a million blocks.
        Raises `ConflictError` if the socket cannot be used, and `KeeperError` if the state folder cannot be used or the
        process of the previous service does not end. Call `close` even then."""
        raise_descriptor_limit()
        settings, memory, started = self.settings, self.memory_thread, self._running
        if settings.state is not None:
            most_bytes = max(settings.budget_bytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
            records = NodeRecords(settings.state, settings.keep_timeout if settings.start_keeper else None, most_bytes)
            memory.records = records
            started.callback(lambda: records.finish(gives_back=self._gives_back))
        started.callback(memory.memory.close)
        started.callback(memory.close_records)
        socket = AttachSocket(settings.attach_path, self._attach_group)
        started.callback(socket.close)
        self.server = AttachServer(
            self.host,
            socket.listener,
            trust_eof=settings.trust_eof,
            on_failure=self._on_failure,
            clock=self._clock,
        )
        started.callback(self.server.close)
        started.callback(memory.close)  # before the server, which sends the last messages
        if memory.records is not None:
            self._recover(memory.records)
        if self._store is not None:
            measure = partial(measure_store, settings.tier)
            self.tier = self.host.tier = NodeStore(self._store, memory, self.server.post, tenants_of(settings), measure)
            for pool in self.host.pools():
                self.tier.restore_pool(pool)
        self.populator.start()
        memory.start()
        self.server.start()
        self._has_started = True
        started.callback(self._take_back)
        if self.tier is not None:
            started.callback(self.tier.close)  # runs first, because the store's processes have memory, too

    def close(self) -> None:
        """End the threads, and close everything. Idempotent."""
        self._running.close()
        self.populator.close()
        self.host.close()

    def give_back(self) -> None:
        """Have `close` give all memory back, so that the next service starts with nothing."""
        self._gives_back = True

    def _take_back(self) -> None:
        """Ask the engines to release all memory, unless the next service is to take it over."""
        if self._gives_back or self.memory_thread.records is None:
            self.memory_thread.do(self.memory_thread.revoke_all)
            for call_on_thread in (self.memory_thread.do, self.server.post):
                done = threading.Event()
                call_on_thread(done.set)
                done.wait(_REVOKE_SECONDS)

    # -- what an earlier service has left ---------------------------------------------------------------------

    def _recover(self, records: NodeRecords) -> None:
        """Take over what an earlier service has left. No thread runs yet."""
        begun, memory = time.monotonic(), self.memory_thread
        survivors = read_survivors(records.open(), self.settings.huge_pages)
        self._recovers = bool(survivors.extents or survivors.pools)
        gc.disable()  # recovery makes a million keys and no cycles, and collections took a quarter of its time
        try:
            memory.restore_memory(survivors)
            num_blocks = 0
            for found in survivors.pools:
                pool = self.host.restore_pool(found.record, found.namespaces)
                memory.restore_pool(pool, found, survivors)
                num_blocks += self._recover_pool(pool, found)
        finally:
            gc.enable()
        if survivors.pools:
            seconds = time.monotonic() - begun
            blocks, pools = counted(num_blocks, "block"), counted(len(survivors.pools), "pool")
            logger.info("the service has recovered %s in %s within %.2f s", blocks, pools, seconds)
        memory.run_pending()
        records.join(memory.memory)

    def _recover_pool(self, pool: NodePool, found: SurvivingPool) -> int:
        """Recover the blocks and the sessions of a pool. Returns the number of blocks."""
        sessions: dict[str, list[SurvivingWorker]] = {}
        for worker in found.workers:
            sessions.setdefault(worker.record.session_id, []).append(worker)
        earlier = list[EarlierSession]()
        for workers in sessions.values():
            record = workers[0].record
            processes = frozenset(one.record.client for one in workers)
            earlier.append(EarlierSession(record.number, record.hello.engine, processes, record.session_id))
        names = {tag: label.name for tag, label in found.journal.namespaces().items()}
        num_blocks = recover(pool, found.journal.recover(), names, earlier)
        for workers in sessions.values():
            session = self.host.restore_session(workers[0].record, self.server.send)
            self.server.restore_session(session, [(one.record.hello, one.peer()) for one in workers])
        return num_blocks

    # -- health ---------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Mark stuck transfers, retry refused memory, and check records. Call it about once a second."""
        self.host.tick()
        self.server.post(self.host.send_settled)
        now = self._clock()
        self._populated.append((now, self.populator.status().populated_bytes))
        if now >= self._next_retry:
            self._next_retry = now + _RETRY_SECONDS
            if self.memory_failure() is not None:
                self.memory_thread.do(self.memory_thread.memory.retry)
        if now >= self._next_check:
            self._next_check = now + _CHECK_SECONDS
            self._check_integrity()

    def start_failure(self) -> str | None:
        """Return a sentence that says why no engine can attach yet, or None."""
        if self._has_started:
            return None
        return f"the service {self._what_start_does()}; no engine can attach yet"

    def _what_start_does(self) -> str:
        return "takes up what an earlier one has left" if self._recovers else "is starting"

    def live_failure(self) -> str | None:
        """Return a sentence that says why the service must be restarted, or None."""
        if not self._has_started:
            return None
        return self.server.failure or self.memory_thread.failure or self.integrity_problem

    def memory_failure(self) -> str | None:
        """Return a sentence that says why the node, or a worker, has less memory than it should, or None."""
        failure = self._memory_failure()
        return None if failure is None else failure[1]

    def _memory_failure(self) -> tuple[MemoryFailure, str] | None:
        memory = self.memory_thread
        if memory.memory.error is not None:
            return "refused", str(memory.memory.error)
        status = self.populator.status()
        if status.state in ("degraded", "failed"):
            kind: MemoryFailure = "refused" if status.state == "degraded" else "defect"
            return kind, status.error or "the thread that populates memory has ended"
        if memory.faults:
            return "defect", f"{memory.faults} changes of the node's memory failed by a defect; the log says which"
        return next((("engine", words) for words in memory.figures.failures), None)

    def _check_integrity(self) -> None:
        """Check the records of pools without sessions, because no engine waits for their locks."""
        self.memory_thread.do(self.memory_thread.budget.check_integrity)
        for pool in self.host.pools():
            if self.host.has_sessions(pool) or pool.slots.in_service > _MAX_CHECKED_SLOTS:
                continue
            try:
                pool.facade.check_integrity()
            except IntegrityError as error:
                self.integrity_problem = f"the records of pool {pool.name} are inconsistent: {error}"
                logger.error("%s", self.integrity_problem)

    # -- the directory --------------------------------------------------------------------------------------

    @property
    def engine_id(self) -> str:
        return self.host.engine_id

    @property
    def switches(self) -> HostSwitches:
        return self.host.switches

    @property
    def trust_eof(self) -> float | None:
        return self.settings.trust_eof

    def sessions(self) -> list[SessionStatus]:
        return self.host.sessions()

    def namespaces(self) -> list[NamespaceStatus]:
        return self.host.namespaces()

    def delete_pool(self, name: str) -> Purged:
        """See `Directory.delete_pool`. If the store does not answer in time, the pool is deleted all the same, and the
        notice and the log name the store."""
        answers = SimpleQueue[Purged]()
        self.host.delete_pool(name, answers.put)
        try:
            purged = answers.get(timeout=_PURGE_SECONDS)
        except Empty:
            purged = Purged(0, f"the store below it has not answered within {_PURGE_SECONDS:.0f} s")
        if purged.notice:
            logger.warning("pool %s was deleted, but blocks of it may be left: %s", name, purged.notice)
        return purged

    @property
    def rejected(self) -> dict[str, int]:
        return dict.fromkeys(REASONS, 0) | (dict(self.server.tally.refused) if self._has_started else {})

    def user_limits(self) -> list[UserLimit]:
        return [*(self.server.user_limits() if self._has_started else ()), *self.host.user_limits()]

    def detach(self, session_id: str, *, kill: bool = False) -> bool:
        """See `AttachServer.detach`. Raises `ConflictError` before engines can attach."""
        if not self._has_started:
            raise ConflictError(
                f"no session can be detached yet: the service {self._what_start_does()}; try again when "
                "/startupz says 200"
            )
        if self.server.detach(session_id, kill=kill):
            return True
        if not any(session_id in kept.sessions for kept, _ in self.memory_thread.figures.kept):
            return False
        if not kill:
            raise ConflictError(
                f"session {session_id} has detached, and keeps memory all the same: --kill ends its processes"
            )
        self.memory_thread.do(self.memory_thread.kill_departed, session_id)
        return True

    def pools(self) -> list[HostedPool]:
        return [self._hosted(pool) for pool in self.host.pools()]

    def find_pool(self, name: str) -> HostedPool | None:
        pool = self.host.find_pool(name)
        return None if pool is None else self._hosted(pool)

    def _hosted(self, pool: NodePool) -> HostedPool:
        slot_bytes = sum(pool.stored_slot_bytes)
        return HostedPool(
            pool.name,
            pool.facade,
            max_capacity_slots=self.memory_thread.budget.total_bytes // slot_bytes,
            granted_bytes=pool.granted_bytes,
            due_bytes=pool.due_bytes,
            model=pool.model,
            is_resizable=False,
            stored_slot_bytes=slot_bytes,
        )

    def memory(self) -> MemoryStatus:
        figures, records = self.memory_thread.figures, self.memory_thread.records
        pools, now = self.pools(), time.monotonic()
        kind, failure = self._memory_failure() or (None, None)
        return MemoryStatus(
            target_bytes=self.memory_thread.budget.total_bytes,
            populated_bytes=self.populator.status().populated_bytes,
            failure=failure,
            failure_kind=kind,
            populate_bytes_per_second=self._populate_pace(),
            granted_bytes=sum(pool.granted_bytes for pool in pools),
            used_bytes=sum(pool.used_bytes for pool in pools),
            recalled_bytes=figures.recalled_bytes,
            waits=tuple(replace(wait, seconds=now - since) for wait, since in figures.waits),
            kept=tuple(replace(kept, seconds=now - since) for kept, since in figures.kept),
            notices=figures.notices,
            keeper=None if records is None else records.keeper,
            keeper_pid=None if records is None else records.keeper_pid,
            unsaved=() if records is None else records.unsaved,
            keeper_restarts=0 if records is None else max(0, records.joins - 1),
        )

    def _populate_pace(self) -> float | None:
        seen = list(self._populated)
        if len(seen) < 2 or seen[-1][1] <= seen[0][1]:
            return None
        return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])

    def count_error(self, code: str) -> None:
        self.errors[code] += 1


def tenants_of(settings: Settings) -> Callable[[int], str | None]:
    """Return a function from users (uids) to tenants. The users of a tenant share blocks in the store below the pools.
    The function returns None for a user whose blocks do not go there. On the node's own disks, each user is a separate
    tenant unless tenants are named."""
    if settings.tenants:
        return settings.tenants.get
    own = os.geteuid()
    if settings.disk:
        return lambda uid: OWN_TENANT if uid == own else f"uid:{uid}"
    return {own: OWN_TENANT}.get


def raise_descriptor_limit() -> None:
    """Raise this process's limit of descriptors to its maximum: each extent needs one, and each engine several."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
