"""What the admin API sees of a node."""

from __future__ import annotations

from collections import Counter

from kvstow.status import HostedNamespace, HostedSession, MemoryStatus
from kvstow_api.directory import HostedPool
from kvstow_service.node.node import Node
from kvstow_service.node.pools.nodepool import NodePool


class NodeDirectory:
    """The `Directory` of a `Node`. `errors`: those of the host, by code, as far as no pool counts them."""

    is_node = True
    take_report = None

    def __init__(self, node: Node) -> None:
        self.engine_id = node.host.engine_id
        self.switches = node.host.switches
        self.trust_eof = node.settings.trust_eof
        self.errors: Counter[str] = Counter()
        self._node = node

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

    def memory(self) -> MemoryStatus:
        return MemoryStatus(
            target_bytes=self._node.memory.total_bytes,
            populated_bytes=self._node.populator.status().populated_bytes,
            failure=self._node.memory_failure(),
        )

    def count_error(self, code: str) -> None:
        self.errors[code] += 1

    def _hosted(self, pool: NodePool) -> HostedPool:
        most = self._node.memory.total_bytes // sum(pool.identity.slot_bytes)
        return HostedPool(pool.name, pool.facade, most, pool.model, is_resizable=False)
