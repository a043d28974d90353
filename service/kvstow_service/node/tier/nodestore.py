"""The store below the pools of a node: the parts that engines use and those that operators use."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Final

from msgspec.structs import replace

from kvstow.attach.identity import FleetWeights
from kvstow.control.pooltier import PoolTier
from kvstow.errors import ConflictError, NotFoundError
from kvstow.tier.blockstore import BlockStore, Purged, PurgeWish, StoredLayout, StorePart
from kvstow.tier.fingerprint import WEIGHTS_CHANGED, Fingerprint, fingerprint
from kvstow.tier.tierstatus import TierCounters, TierStatus
from kvstow_api.directory import TierLabels, TierMeasurements
from kvstow_service.node.pools.memoryholder import MemoryHolder
from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import KnownNamespace, NodePool
from kvstow_service.node.pools.nodesession import SessionTier
from kvstow_service.node.tier.hitneeds import groups_of, needs_of
from kvstow_service.node.tier.tiermemory import TierMemory

logger = logging.getLogger("kvstow.tier")

_END_SECONDS = 60.0
"""How long `close` waits for the transfers of a pool with the store."""
_ENDS: Final = "the service ends, so what the store has of the pool stays there: purge the pool after the next start"
_GROUPS: Final = "groups_unknown: the model has kinds of KV groups that this version of KVStow does not know"


class FormerPool:
    """The store below a pool that no engine has used since the service started: see `PoolStore`. It offers what
    administration needs. Blocks that are purged before the first engine comes back leave the store, too."""

    def __init__(self, store: BlockStore, layout: StoredLayout) -> None:
        self._store, self._layout = store, layout
        self._lock = Lock()
        self._num_purges = 0
        self._tier: PoolTier | None = None
        """Set when an engine has come back."""

    def purge(self, wish: PurgeWish, then: Callable[[Purged], object], *, dry_run: bool = False) -> None:
        if self._tier is not None:
            self._tier.purge(wish, then, dry_run=dry_run)
            return
        stored = self._store.join(self._layout, lambda pieces: None)
        stored.purge(wish, then, dry_run=dry_run)
        stored.leave(lambda: None)

    def begin_purge(self) -> None:
        with self._lock:
            self._num_purges += 1
            if self._tier is not None:
                self._tier.begin_purge()

    def end_purge(self) -> None:
        with self._lock:
            self._num_purges -= 1
            if self._tier is not None:
                self._tier.end_purge()

    def expect_context(self, context: bytes) -> None:
        """Do nothing. A pool without engines has no contexts yet."""

    def follow(self, tier: PoolTier) -> None:
        """Forward to `tier` from now on, because an engine has come back. Purges under way are made known to it."""
        with self._lock:
            self._tier = tier
            for _ in range(self._num_purges):
                tier.begin_purge()


class NodeStore:
    """Makes a `PoolTier` for each pool whose engines may use the store. For the methods that operators use, see
    `kvstow_api.directory.HostTier`.

    Only the attach server's thread calls `enter`, `follow_pool`, `next_deadline` and `expire`. Only `close` and
    `measure` wait.

    `_end` is the reading end of a pipe. This process holds the writing end until `close`, and each process of the store
    until it ends. So `_end` becomes readable when none of them has memory any more. With a keeper, the next service
    gets `_end`, and can wait for these processes, too.
    """

    def __init__(
        self,
        store: BlockStore,
        memory: MemoryThread,
        post: Callable[[Callable[[], object]], object],
        tenant_of: Callable[[int], str | None],
        measure: Callable[[], TierMeasurements] = lambda: TierMeasurements(()),
    ) -> None:
        """`post` makes the attach server's thread call something. `tenant_of` returns the tenant of a user (uid), or
        None if the user's blocks must not leave the memory. `measure` measures the store for `kvstow doctor`."""
        self.store, self.url = store.name, store.shown
        self._store, self._memory, self._post, self._tenant_of = store, memory, post, tenant_of
        self.measure = measure
        self._lock = Lock()
        """Guards the attributes below. Held for microseconds."""
        self._is_closed = False
        self._pools: dict[str, TierMemory] = {}
        self._ending: list[TierMemory] = []
        self._end, self._witness = os.pipe()
        try:
            store.start(self._witness)
        except BaseException:
            os.close(self._end)
            os.close(self._witness)
            raise

    # -- engines --------------------------------------------------------------------------------------------

    def enter(self, session: MemoryHolder, weights: FleetWeights) -> SessionTier | None:
        """Let the engine of this session use the store, for the session's present namespace. Returns None after
        `close`. Raises `ConflictError` if the pool was closed."""
        pool, namespace = session.pool, session.namespace
        with self._lock:
            if self._is_closed:
                return None
            memory = self._pools.get(pool.name)
            if memory is None:
                memory = self._pools[pool.name] = self._join(session)
        name = self._fingerprint_of(pool, namespace, weights)
        of = memory.tier.enter(session.control, namespace.identity.model, name.value, name.reason)
        groups = groups_of(pool.identity)
        return SessionTier(memory.tier, of, lambda keys: None if groups is None else needs_of(groups, keys))

    def _join(self, session: MemoryHolder) -> TierMemory:
        pool, former = session.pool, session.pool.tier
        groups = groups_of(pool.identity)
        is_plain = groups is None or groups.is_plain
        tier = PoolTier(
            pool,
            session.control.namespace,
            self._store,
            self._layout_of(pool),
            block_tokens=None if groups is None else groups.alignment,
            needs_of=None if is_plain or groups is None else partial(needs_of, groups),
            post=self._post,
            on_taken=partial(self._grow, pool),
        )
        if isinstance(former, FormerPool):
            former.follow(tier)
        memory = TierMemory(pool, session.namespace, tier, self._memory, self._post)
        memory.join(self._end)
        return memory

    def _layout_of(self, pool: NodePool) -> StoredLayout:
        owner = self._tenant_of(_uid_of(pool)) or f"uid:{_uid_of(pool)}"
        sizes = tuple(pool.config.slot_bytes_of(rank) for rank in pool.config.storing_ranks)
        return StoredLayout(pool.name, sizes, _identity_of(pool, owner), owner)

    def restore_pool(self, pool: NodePool) -> None:
        """Prepare the store of a pool of an earlier service, to which no engine has come back yet."""
        pool.tier = FormerPool(self._store, self._layout_of(pool))

    def _grow(self, pool: NodePool) -> None:
        """Ask for more memory if the pool needs it. Reads from the store take slots as stores of engines do, so they
        also make a pool grow that a restart has emptied."""
        if pool.used_slots > pool.grow_above >= 0:
            self._memory.do(self._memory.grow, pool)

    def _fingerprint_of(self, pool: NodePool, namespace: KnownNamespace, weights: FleetWeights) -> Fingerprint:
        """Return the name under which the store keeps the blocks of this namespace, or the reason why it has none."""
        if namespace.is_reset:
            return Fingerprint(None, WEIGHTS_CHANGED)
        if groups_of(pool.identity) is None:
            return Fingerprint(None, _GROUPS)
        return fingerprint(pool.identity, namespace.identity, weights, self._tenant_of(_uid_of(pool)))

    def follow_pool(self, pool: NodePool) -> None:
        """Let the store know that the pool has become smaller."""
        with self._lock:
            found = self._pools.get(pool.name)
        if found is not None:
            found.follow_pool()

    def next_deadline(self) -> float | None:
        """Return when to call `expire`, or None. O(requests that wait)."""
        deadlines = [one.tier.next_deadline for one in self._members()]
        return min([deadline for deadline in deadlines if deadline is not None], default=None)

    def expire(self) -> None:
        """End waits whose time is over: see `PoolTier.expire`."""
        for one in self._members():
            one.tier.expire()

    def forget_reset(self, tier: SessionTier, then: Callable[[Purged], object]) -> None:
        """Purge the former namespace of an engine that has reset its cache. No other engine uses this namespace, and it
        has a name in the store. The attach server's thread calls `then` when its blocks are deleted for good."""
        tier.pool.purge(PurgeWish(fingerprint=tier.of.fingerprint), lambda purged: self._post(partial(then, purged)))

    def drop_pool(
        self, pool: NodePool, then: Callable[[], object], on_purged: Callable[[Purged], object] | None = None
    ) -> None:
        """Release the memory of a pool that ends, then call `then`, from any thread. With `on_purged`, an operator has
        deleted the pool, so its blocks leave the store. `on_purged` is called, from any thread, when they are deleted
        for good."""
        with self._lock:
            is_closed, former = self._is_closed, pool.tier
            found = None if is_closed else self._pools.pop(pool.name, None)
            if found is not None:
                self._ending.append(found)
        if on_purged is not None:
            if is_closed:
                on_purged(Purged(0, _ENDS))
            elif former is None:
                on_purged(Purged(0))
            else:
                former.purge(PurgeWish(), on_purged)
        if found is None:
            then()
        else:
            found.begin_end(then)

    def _members(self) -> list[TierMemory]:
        with self._lock:
            return list(self._pools.values())

    # -- operators, on any thread -----------------------------------------------------------------------------

    def tiers(self) -> list[TierStatus]:
        return [status for one in self._members() for status in one.tier.statuses()]

    def parts(self) -> list[StorePart]:
        problems = [one.problem for one in self._members() if one.problem]
        parts = list(self._store.parts())
        if problems and parts:
            parts[0] = StorePart(name=parts[0].name, state="failed", reason=problems[0], counters=parts[0].counters)
        return parts

    def totals(self) -> dict[TierLabels, TierCounters]:
        return {
            TierLabels(self.store, one.pool.name, model): counters
            for one in self._members()
            for model, counters in one.tier.totals().items()
        }

    def prefetch(self, pool: str, context: bytes) -> int:
        with self._lock:
            found = self._pools.get(pool)
        count = None if found is None else found.tier.prefetch(context)
        if count is not None:
            return count
        if found is None or not any(one.state == "on" for one in found.tier.statuses()):
            raise ConflictError(f"pool {pool} does not use the store now: `kvstow get tier` says why")
        raise NotFoundError(f"no request of context {context.hex()} is known")

    # -- ends -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait until no process of the store uses a slot, but not forever. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            members, self._ending = [*self._ending, *self._pools.values()], []
            pools = list(self._pools.values())
        for one in pools:
            one.begin_end()
        self._store.close()
        for one in members:
            if not one.has_ended.wait(_END_SECONDS):
                logger.error("the store still has slots of pool %s; they stay in quarantine", one.pool.name)
        os.close(self._end)
        os.close(self._witness)


def _uid_of(pool: NodePool) -> int:
    assert pool.identity.uid is not None, "each pool of a node has an owner"
    return pool.identity.uid


def _identity_of(pool: NodePool, owner: str) -> str:
    """Return the identity of the pool for the store, which contains its owner: see `StoredLayout`."""
    parts = {"owner": owner, "pool": replace(pool.identity, uid=None).canonical_value()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("ascii")).hexdigest()[:32]
