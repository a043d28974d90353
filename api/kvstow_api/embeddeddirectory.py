"""The directory of a host that is embedded in an inference engine: one pool, one session, one namespace."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from kvstow.control.engine import OffloadEngine
from kvstow.errors import ConflictError, NotFoundError
from kvstow.status import MemoryStatus, NamespaceStatus, SessionState, SessionStatus
from kvstow_api.answers import POOL_NAME
from kvstow_api.directory import HostedPool, HostTier

_ALONE = "the pool is the memory of the engine that it is embedded in, and no other engine can attach to it"


class EmbeddedDirectory:
    """A `Directory` of one engine. `max_capacity_slots`: the limit of every resize, which is what the ranks' reserved
    address space can hold. `name`: what the inference engine is."""

    is_node = False
    trust_eof = None
    tier: HostTier | None = None
    """An embedded engine has none."""

    def __init__(
        self,
        engine: OffloadEngine,
        max_capacity_slots: int,
        *,
        name: str = "",
        model: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine_id = engine.engine_id
        self.switches = engine.admin
        self.take_report = engine.report
        self.errors: Mapping[str, int] = {}
        self.rejected: Mapping[str, int] = {}
        self._engine, self._name, self._model = engine, name, model
        self._max_capacity_slots = max_capacity_slots
        self._clock, self._started_at = clock, clock()

    def pools(self) -> Sequence[HostedPool]:
        return (self._pool(),)

    def find_pool(self, name: str) -> HostedPool | None:
        return self._pool() if name == POOL_NAME else None

    def _pool(self) -> HostedPool:
        """It has its memory for itself, so it always has what it should have."""
        num_bytes = self._engine.desired().capacity_slots * self._engine.config.total_slot_bytes
        return HostedPool(POOL_NAME, self._engine, self._max_capacity_slots, num_bytes, num_bytes, self._model)

    def delete_pool(self, name: str) -> None:
        if name != POOL_NAME:
            raise NotFoundError(f"there is no pool {name!r}; there is: {POOL_NAME}")
        raise ConflictError("the pool belongs to the engine that it is embedded in, and ends with its process")

    def sessions(self) -> Sequence[SessionStatus]:
        readiness, stats = self._engine.readiness(), self._engine.stats()
        pending = stats.transfers.pending
        state: SessionState = "attached" if readiness.usable_slots else "attaching"
        return (
            SessionStatus(
                id=self.engine_id,
                engine=self._name,
                model=self._model,
                pool=POOL_NAME,
                namespace=POOL_NAME,
                host=socket.gethostname(),
                pid=os.getpid(),
                state="stuck" if pending.stuck else state,
                age_seconds=self._clock() - self._started_at,
                in_flight=pending.loads + pending.stores,
                oldest_seconds=pending.oldest_seconds,
                leases=stats.pool.leases,
                leased_slots=stats.pool.slots.leased,
                registered_slots=readiness.usable_slots,
                quarantined_slots=stats.pool.slots.quarantined,
                processes=len({(rank.host, rank.pid) for rank in readiness.ranks if rank.pid is not None}),
                ranks=readiness.ranks,
            ),
        )

    def detach(self, session_id: str, *, kill: bool) -> bool:
        if session_id != self.engine_id:
            return False
        raise ConflictError("the engine embeds this server: stop its process to end the session")

    def namespaces(self) -> Sequence[NamespaceStatus]:
        slots = self._engine.stats().pool.slots
        return (
            NamespaceStatus(
                name=POOL_NAME,
                pool=POOL_NAME,
                model=self._model,
                sessions=1,
                blocks=slots.cached + slots.leased,
                dropped=False,
                sharing_off=(_ALONE,),
            ),
        )

    def memory(self) -> MemoryStatus:
        ranks = self._engine.readiness().ranks
        failures = [f"rank {rank.rank}: {rank.error or rank.error_reason}" for rank in ranks if rank.error_reason]
        pool = self._pool()
        return MemoryStatus(
            target_bytes=sum(rank.target_bytes for rank in ranks),
            populated_bytes=sum(rank.pinned_bytes for rank in ranks),
            failure="; ".join(failures) or None,
            granted_bytes=pool.granted_bytes,
            used_bytes=pool.used_bytes,
        )

    def count_error(self, code: str) -> None:
        self._engine.count_error(code)
