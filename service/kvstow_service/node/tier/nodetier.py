"""The fleet tier of the node service: the clients of its store, and the threads that work for all its tiers."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from threading import Lock
from typing import Final

from kvstow.attach.identity import FleetWeights
from kvstow.control.fleettier import FleetTier, TierSettings
from kvstow.errors import ConflictError, NotFoundError
from kvstow.tier.fingerprint import WEIGHTS_CHANGED, Fingerprint, fingerprint
from kvstow.tier.store import ClientHealth, ClientStats, TierStore
from kvstow.tier.tierstatus import TierClient, TierCounters, TierStatus
from kvstow.tier.transfers import StoreTransfers
from kvstow_api.directory import TierLabels, TierMeasurements
from kvstow_service.node.pools.memoryholder import MemoryHolder
from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import KnownNamespace, NodePool
from kvstow_service.node.tier.namespacetier import NamespaceTier, groups_of
from kvstow_service.node.tier.pooltier import PoolTier
from kvstow_service.tiers.stores import measure_store, shown_url

logger = logging.getLogger("kvstow.tier")

_BUSY_SECONDS, _IDLE_SECONDS = 0.05, 1.0
"""Between two steps without news, while there is something to do, and while there is not."""
_END_SECONDS = 60.0
"""For transfers under way; each ends within 30 s."""
_GROUPS: Final = "groups_unknown: the model has kinds of KV groups that this version of KVStow does not know"


class ActionThread:
    """A thread that makes calls in their order. `do` never waits. It logs a call that raises, and makes the next."""

    def __init__(self, name: str) -> None:
        self._actions = SimpleQueue[Callable[[], object] | None]()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, action: Callable[[], object]) -> None:
        self._actions.put(action)

    def close(self) -> None:
        """Make the remaining calls, and end the thread. Idempotent."""
        self._actions.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (action := self._actions.get()) is not None:
            try:
                action()
            except Exception:
                logger.exception("an action on thread %s has failed; the others go on", self._thread.name)


class NodeTier:
    """A `FleetTier` for each namespace that engines use, and a `PoolTier` for each of their pools. One thread steps the
    tiers; another maps and unmaps memory, which takes as long as a network card needs. What operators see is that of
    `kvstow_api.directory.HostTier`.

    `enter`, `follow_pool` and `drop_pool` are for the attach server's thread, and do not wait. Until `close`, this
    process and each process of the store's transfers hold the other end of `_end`. It becomes readable, also for the
    next service, when no process touches memory for the transfers any more.
    """

    def __init__(
        self,
        url: str,
        store: TierStore,
        memory: MemoryThread,
        post: Callable[[Callable[[], object]], object],
        tenants: Mapping[int, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`post` has the attach server's thread call something. `tenants`: the names of the users (uids) that share
        blocks beyond the node. Only they use the store."""
        self.store, self.url, self._given_url = store.name, shown_url(url), url
        self._lock = Lock()
        """Guards what `enter` makes and `drop_pool` removes, until `close`, and what operators see. Held for
        moments."""
        self._is_closed = False
        self._pools: dict[str, PoolTier] = {}
        self._memory, self._post, self._tenants, self._clock = memory, post, tenants, clock
        with ExitStack() as opened:  # nothing stays open after an error
            self._end, self._witness = os.pipe()
            opened.callback(os.close, self._end)
            opened.callback(os.close, self._witness)
            self._transfers = StoreTransfers(store.open_transfers(self._witness))
            opened.callback(self._transfers.close)
            self._lookups = store.open_lookups()
            opened.pop_all()
        self._tiers: list[NamespaceTier] = []
        """Those that have begun. Changed by the tier's thread alone."""
        self._counted: dict[TierLabels, TierCounters] = {}
        """What tiers had counted when they were retired."""
        self._ending: list[PoolTier] = []
        """The tiers of deleted pools."""
        self._found: dict[int, NamespaceTier] = {}
        """By the `id` of the namespace; used by `enter` alone."""
        self._actions: deque[Callable[[], object]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._mapper = ActionThread("kvstow-tier-memory")
        self._thread = threading.Thread(target=self._run, name="kvstow-tier", daemon=True)
        self._thread.start()

    def do(self, action: Callable[[], object]) -> None:
        """Have the tier's thread call this."""
        self._actions.append(action)
        self._wake.set()

    # -- engines --------------------------------------------------------------------------------------------

    def enter(self, session: MemoryHolder, weights: FleetWeights) -> NamespaceTier | None:
        """The engine of this session is in its namespace from now on. Returns the tier of that namespace, or None after
        `close`. Raises `ConflictError` if the pool was closed."""
        with self._lock:
            if self._is_closed:
                return None
            namespace = session.control.namespace
            self._found = {key: one for key, one in self._found.items() if not one.is_closed}
            found = self._found.get(id(namespace))
            if found is None or found.control.namespace is not namespace:
                found = self._found[id(namespace)] = self._add(session, weights)
            session.control.on_stored = found.note_stored
            return found

    def follow_pool(self, pool: NodePool) -> None:
        """The pool has become smaller."""
        with self._lock:
            found = self._pools.get(pool.name)
        if found is not None:
            found.follow_pool()

    def drop_pool(self, pool: NodePool, then: Callable[[], object]) -> None:
        """The pool is deleted: release its memory, then call `then`, from any thread."""
        with self._lock:
            found = None if self._is_closed else self._pools.pop(pool.name, None)
            if found is not None:
                self._begin_end(found, then)  # a `close` that comes now waits for it
                return
        then()

    def _add(self, session: MemoryHolder, weights: FleetWeights) -> NamespaceTier:
        pool, namespace = session.pool, session.namespace
        control = pool.attach_tier(session.control.namespace)
        pool_tier = self._pools.get(pool.name)
        if pool_tier is None:
            base = pool.attach_tier(session.control.namespace)
            pool_tier = self._pools[pool.name] = PoolTier(
                pool, namespace, base, self._transfers, self._memory, self._mapper.do, self._post, self._wake.set
            )
            pool_tier.join(self._end)
        pool_tier.add(control)
        tier = NamespaceTier(pool_tier, namespace, control, self.do, self._wake.set, self._post)
        self.do(partial(self._begin, tier, weights))
        return tier

    def _begin(self, tier: NamespaceTier, weights: FleetWeights) -> None:
        pool = tier.pool_tier.pool
        name = self._fingerprint_of(pool, tier.namespace, weights)
        groups = groups_of(pool.identity)
        fleet = FleetTier(
            tier.control,
            self._lookups,
            TierSettings(replicated=pool.identity.replicated),
            name.value,
            off_reason=name.reason,
            name=self.store,
            most_slots=self._memory.budget.total_bytes // pool.config.total_slot_bytes,
            block_tokens=None if groups is None else groups.alignment,
            clock=self._clock,
            on_news=self._wake.set,
        )
        tier.begin(fleet)
        with self._lock:
            self._tiers.append(tier)

    def _fingerprint_of(self, pool: NodePool, namespace: KnownNamespace, weights: FleetWeights) -> Fingerprint:
        """The name under which engines in this namespace have their blocks in the store."""
        if namespace.is_reset:
            return Fingerprint(None, WEIGHTS_CHANGED)
        if groups_of(pool.identity) is None:
            return Fingerprint(None, _GROUPS)
        uid = pool.identity.uid
        assert uid is not None, "each pool of a node has an owner"
        return fingerprint(pool.identity, namespace.identity, weights, self._tenants.get(uid))

    # -- operators, on any thread -----------------------------------------------------------------------------

    def tiers(self) -> list[TierStatus]:
        """The clients of a pool are shown with the first of its namespaces."""
        with self._lock:
            known = [(tier, tier.shown.status()) for tier in self._tiers]
        first = {tier.pool_tier.pool.name: tier for tier, _ in reversed(known)}
        return [
            replace(
                status,
                pool=(pool := tier.pool_tier.pool.name),
                namespace=tier.namespace.name,
                model=tier.namespace.identity.model,
                clients=self._clients(tier.pool_tier) if first[pool] is tier else (),
            )
            for tier, status in known
        ]

    def _clients(self, pool_tier: PoolTier) -> tuple[TierClient, ...]:
        problem = pool_tier.problem
        clients = (
            TierClient("transfers of the node", self._transfers.client.health(), self._transfers.stats()),
            TierClient("look-ups of the node", self._lookups.health(), self._lookups.stats()),
        )
        if problem is None:
            return clients
        purpose = f"transfers of pool {pool_tier.pool.name}"
        return (*clients, TierClient(purpose, ClientHealth("failed", problem), ClientStats()))

    def totals(self) -> dict[TierLabels, TierCounters]:
        with self._lock:  # at once, or a tier that is retired meanwhile would count twice or not at all
            shown = {tier.labels for tier in self._tiers}
            return _sum({labels: one for labels, one in self._counted.items() if labels in shown}, self._tiers)

    def prefetch(self, pool: str, context: bytes) -> int:
        with self._lock:
            known = [tier for tier in self._tiers if tier.pool_tier.pool.name == pool]
        counts = [count for tier in known if (count := tier.prefetch(context)) is not None]
        if counts:
            return sum(counts)
        if not any(tier.may_have_more for tier in known):
            raise ConflictError(f"pool {pool} does not use the store now: `kvstow get tier` says why")
        raise NotFoundError(f"no request of context {context.hex()} is known")

    def measure(self) -> TierMeasurements:
        return measure_store(self._given_url)

    # -- ends -----------------------------------------------------------------------------------------------

    def _begin_end(self, pool_tier: PoolTier, then: Callable[[], object] = lambda: None) -> None:
        """End its transfers and release its memory, then call `then` on the tier's thread. Does not wait."""
        self._ending.append(pool_tier)
        self.do(partial(self._end_pool, pool_tier, then))

    def _end_pool(self, pool_tier: PoolTier, then: Callable[[], object]) -> None:
        for tier in [one for one in self._tiers if one.pool_tier is pool_tier]:
            self._guarded(partial(self._retire, tier))
        with self._lock:  # another pool of this name counts from zero
            self._counted = {one: counted for one, counted in self._counted.items() if one[1] != pool_tier.pool.name}
        pool_tier.begin_end(lambda: self.do(partial(self._end_sessions, pool_tier, then)))

    def _end_sessions(self, pool_tier: PoolTier, then: Callable[[], object]) -> None:
        try:
            with ExitStack() as stack:  # all of it is done, the last one first
                stack.callback(pool_tier.has_ended.set)
                stack.callback(then)
                stack.callback(pool_tier.end_sessions)
                pool_tier.take_completions()
        except Exception:  # noqa: BLE001 - the other pools continue
            pool_tier.note_defect("the end of its sessions")

    def _retire(self, tier: NamespaceTier) -> None:
        """Start nothing more for it, and do not show it."""
        with self._lock:
            self._tiers.remove(tier)
            with suppress(Exception):  # its state may be broken
                self._counted = _sum(self._counted, [tier])
        tier.is_closed, tier.fleet = True, None
        tier.answer_all()
        tier.pool_tier.submit(tier.control, tier.shown.take_plans())
        self._mapper.do(tier.shown.close)

    def _retire_all(self) -> None:
        for tier in list(self._tiers):
            self._retire(tier)

    def _retire_obsolete(self) -> None:
        """Retire the namespaces that no engine can enter any more, such as those of engines that reset their caches."""
        for tier in list(self._tiers):
            if tier.is_obsolete:
                self._retire(tier)
                tier.pool_tier.retire(tier.control)

    def close(self) -> None:
        """Wait until no process touches a slot for the store, and all ops have ended. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        retired = threading.Event()
        self.do(self._retire_all)
        self.do(retired.set)
        retired.wait(_END_SECONDS)
        self._transfers.close()  # what is under way ends with it
        for pool_tier in self._pools.values():
            self._begin_end(pool_tier)
        for pool_tier in self._ending:
            if not pool_tier.has_ended.wait(_END_SECONDS):
                logger.error("transfers of pool %s have not ended; its slots stay in quarantine", pool_tier.pool.name)
        self._stopping = True
        self._wake.set()
        self._thread.join()
        self._mapper.close()
        self._lookups.close()
        os.close(self._end)
        os.close(self._witness)

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping or self._actions:
                self._wake.wait(self._patience())
                self._wake.clear()
                self._step()
        except Exception as error:
            logger.exception("the thread of the fleet tier has ended; engines go on without the tier")
            for tier in self._tiers:
                tier.fail(error)

    def _patience(self) -> float:
        if self._actions:
            return 0.0
        longest = _IDLE_SECONDS if all(tier.is_idle for tier in self._tiers) else _BUSY_SECONDS
        deadlines = [tier.next_deadline for tier in self._tiers]
        left = [deadline - self._clock() for deadline in deadlines if deadline is not None]
        return max(0.0, min([longest, *left]))

    def _step(self) -> None:
        for _ in range(len(self._actions)):
            self._guarded(self._actions.popleft())
        for pool_tier in {id(tier.pool_tier): tier.pool_tier for tier in self._tiers}.values():
            self._guarded(pool_tier.take_completions)
        for tier in list(self._tiers):
            try:
                tier.step()
            except Exception as error:  # noqa: BLE001 - the other namespaces continue
                tier.fail(error)
        self._guarded(self._retire_obsolete)

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception:
            logger.exception("an action of the fleet tier has failed; the others go on")


def _sum(totals: Mapping[TierLabels, TierCounters], tiers: Iterable[NamespaceTier]) -> dict[TierLabels, TierCounters]:
    """`totals`, and what `tiers` have counted."""
    sums = dict(totals)
    for tier in tiers:
        sums[tier.labels] = sums.get(tier.labels, TierCounters()) + tier.shown.status().counters
    return sums
