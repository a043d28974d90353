"""The session in which the host of a shared pool moves blocks to and from the fleet tier."""

from __future__ import annotations

from kvstow.control.attachedsession import AttachedSession
from kvstow.control.namespaces import Namespace
from kvstow.control.pool import Pool
from kvstow.errors import ConflictError
from kvstow.messages import RankReport

_BOOT = "tier"
"""Its ranks are the host's transfers, which restart only with the host."""


class TierSession(AttachedSession):
    """A session of the host's own, for one namespace; made by `SharedPool.attach_tier`.

    Its slots are kept like those of an engine's session: until `SharedPool.process_died` was called for each process
    that `map_memory` has named, or until `close`. Otherwise it is no engine: it does not count as a session of its
    namespace, and no figure of the pool's engines includes it. All such sessions of a pool have one number, by which
    the next service knows their slots.
    """

    is_engine = False

    def __init__(self, pool: Pool, session_id: int, namespace: Namespace) -> None:
        self._joins = namespace
        super().__init__(pool, session_id, "fleet tier", namespace.name)
        self.name, self.label = "fleet tier", "fleet tier: "
        for rank in range(len(self.ranks)):
            report = RankReport.without_pool(rank, _BOOT, "ready", pool.config.slot_bytes_of(rank))
            self.ranks.update(report, pool.clock())
        self.adapt_to_pool()

    @property
    def boot_id(self) -> str:
        """The same for every rank."""
        return _BOOT

    def join_namespace(self, name: str) -> Namespace:
        return self._joins

    def leave_namespace(self) -> None:
        """Does nothing: the namespace does not count this session."""

    def set_registered(self, registered_slots: int, applied: int) -> None:
        """`set_memory` for every rank."""
        for rank in range(len(self.ranks)):
            self.set_memory(rank, registered_slots, applied)

    def close(self) -> None:
        """End the session. No transfer may be under way; raises `ConflictError` otherwise, and changes nothing."""
        with self.pool.lock:
            if len(self.ops):
                raise ConflictError(f"{self.label}{len(self.ops)} transfers are under way")
            self.processes.clear()
            self.end("the node service has closed it")
        self.pool.write_log()
