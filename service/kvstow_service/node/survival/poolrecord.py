"""What a restarted service has to know about a pool."""

from __future__ import annotations

from dataclasses import dataclass

from kvstow.attach.identity import PoolIdentity
from kvstow.memory.rows import PoolLayout, RankLayout


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """`extent_bytes` is that of the service that made the pool. It determines the pool's rows."""

    name: str
    model: str
    owner: int
    identity: PoolIdentity
    extent_bytes: int

    @property
    def layout(self) -> PoolLayout:
        """How the pool's slots lie in extents."""
        return PoolLayout(self.owner, tuple(map(RankLayout, self.identity.stored_slot_bytes)), self.extent_bytes)
