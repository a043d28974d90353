"""What the admin API sees of a node."""

from __future__ import annotations

import time
from collections import Counter

from kvstow.status import HostedNamespace, HostedSession, KeptMemory, MemoryStatus, MemoryWait
from kvstow_api.directory import HostedPool
from kvstow_service.node.node import Node
from kvstow_service.node.pools.nodepool import NodePool
from kvstow_service.tiers.hostedtiers import HostedTiers


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
    def tier(self) -> HostedTiers | None:
        return None if self._node.tier is None else self._node.tier.view

    def pools(self) -> list[HostedPool]:
        return [self._hosted(pool) for pool in self._node.host.pools()]

    def find_pool(self, name: str) -> HostedPool | None:
        pool = self._node.host.find_pool(name)
        return None if pool is None else self._hosted(pool)

    def delete_pool(self, name: str) -> None:
        self._node.host.delete_pool(name)

    def sessions(self) -> list[HostedSession]:
        return self._node.host.sessions()

    def detach(self, session_id: str, *, kill: bool) -> bool:
        return self._node.detach(session_id, kill=kill)

    def namespaces(self) -> list[HostedNamespace]:
        return self._node.host.namespaces()

    @property
    def rejected(self) -> dict[str, int]:
        return self._node.rejected

    def memory(self) -> MemoryStatus:
        node, memory, records = self._node, self._node.memory, self._node.records
        pools, now = self.pools(), time.monotonic()
        return MemoryStatus(
            target_bytes=memory.total_bytes,
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
            max_capacity_slots=self._node.memory.total_bytes // slot_bytes,
            granted_bytes=pool.granted_bytes,
            due_bytes=pool.due_bytes,
            model=pool.model,
            is_resizable=False,
            stored_slot_bytes=slot_bytes,
        )
