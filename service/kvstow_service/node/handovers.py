"""What engines hand back from the previous service, by pool, and which pools are being adopted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstow.attach.channel import close_fds
from kvstow.attach.extentcalls import ExtentBytes
from kvstow.attach.identity import PoolIdentity
from kvstow_service.node.pools.nodepool import NodePool
from kvstow_service.node.survival.handover import JOURNAL, Handover


class Handovers:
    """The handovers of all pools, until each is adopted.

    Used by the attach server's thread. Any thread may call `forget`.
    """

    def __init__(self) -> None:
        self.kept_extents = 0
        """Extents that engines have handed back, and that were granted to them again."""
        self.given_up_extents = 0
        """Extents that engines have handed back, and that belong to no pool of this service."""
        self.adopt: Callable[[NodePool, Handover, Sequence[str]], object] | None = None
        """Begins the adoption of a handover, on the attach server's thread. Takes a pool that has no memory yet, and
        its sessions. Calls `end_adoption` at the end. None without a state folder."""
        self._handovers: dict[str, Handover] = {}
        self._adopting: dict[PoolIdentity, bool] = {}
        """True while an adoption runs. False if it has failed: pools of this layout are not adopted again."""

    def is_adopting(self, identity: PoolIdentity) -> bool:
        return self._adopting.get(identity, False)

    def may_adopt(self, identity: PoolIdentity) -> bool:
        """Whether a new pool of this layout may be replaced with one of the previous service."""
        return self.adopt is not None and identity not in self._adopting

    def put_deposits(self, pool: NodePool, names: Sequence[str], fds: Sequence[int]) -> None:
        """Takes ownership of the descriptors. Closes them if the pool's journal has not come first."""
        if not pool.may_be_adopted or (JOURNAL not in names and pool.name not in self._handovers):
            close_fds(fds)
            return
        self._handovers.setdefault(pool.name, Handover()).put_deposits(names, fds)

    def put_extents(
        self, pool: NodePool, extents: Sequence[ExtentBytes], fds: Sequence[int], has_placed: Callable[[int], bool]
    ) -> list[int]:
        """Takes ownership of the descriptors, and returns the ids of the extents that are kept. `has_placed` says
        whether a descriptor is an extent that the worker has in the pool.

        If the pool has no memory yet, and one of its workers has returned the journal of the previous service, all
        extents are kept until the pool is adopted: see `Adoption`. Otherwise, only extents that the pool already has
        are kept. Other memory is given up, because nobody knows who else may still write to it.
        """
        handover = self._handovers.get(pool.name)
        if handover is not None and pool.may_be_adopted:
            handover.put_extents(fds)
            return [extent.extent_id for extent in extents]
        try:
            kept = [extent.extent_id for extent, fd in zip(extents, fds, strict=False) if has_placed(fd)]
        finally:
            close_fds(fds)
        self.kept_extents += len(kept)
        self.given_up_extents += len(fds) - len(kept)
        return kept

    def begin_adoption(self, pool: NodePool, session_ids: Sequence[str]) -> bool:
        """Begin an adoption that replaces the pool, to which these sessions belong. Returns whether there is one. After
        this call, the pool can no longer be adopted."""
        handover = self._handovers.pop(pool.name, None)
        may_be_adopted, pool.may_be_adopted = pool.may_be_adopted, False
        if handover is None or not may_be_adopted or self.adopt is None:
            return False
        self._adopting[pool.identity] = True
        self.adopt(pool, handover, session_ids)
        return True

    def end_adoption(self, identity: PoolIdentity, *, is_adopted: bool) -> None:
        """Engines of this layout may attach again: to the adopted pool or, if that has failed, to a new pool."""
        if is_adopted:
            del self._adopting[identity]
        else:
            self._adopting[identity] = False

    def forget(self, pool: str) -> None:
        """The pool can no longer be found."""
        if (handover := self._handovers.pop(pool, None)) is not None:
            handover.close()

    def close(self) -> None:
        """Call after the threads have ended. Idempotent."""
        for handover in self._handovers.values():
            handover.close()
