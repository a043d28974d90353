"""The fleet tier of one namespace of a pool, for all engines that use it."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from math import lcm
from threading import Lock
from typing import NamedTuple

from kvstow.attach.identity import GroupIdentity, PoolIdentity
from kvstow.control.attachedsession import TierSession
from kvstow.control.fleettier import FleetTier, Prefetch, TierWait
from kvstow.keys import group_of
from kvstow.prefill import PrefillCost
from kvstow.tier.fingerprint import TIER_FAILED
from kvstow_service.connectors.engine_core.kvgroups import GroupNeeds, KVGroup, KVGroups
from kvstow_service.node.pools.nodepool import KnownNamespace
from kvstow_service.node.tier.pooltier import PoolTier


def groups_of(identity: PoolIdentity) -> KVGroups | None:
    """None if the model has kinds of groups that this version does not know."""
    groups = [_group(index, group) for index, group in enumerate(identity.groups)]
    known = tuple([group for group in groups if group is not None])
    if not known or len(known) < len(groups):
        return None
    return KVGroups(known, lcm(*(group.block_tokens for group in known)))


def needs_of(groups: KVGroups, keys: Sequence[bytes]) -> GroupNeeds | None:
    """What a hit needs, given the keys of a prompt's tokens, one group after the other, as engines send them. None if a
    group has no key.

    The keys may leave out the first tokens, as they do for tokens on the GPU. Then nobody knows where a chunk begins,
    and too little for a hit may be fetched. But engines ask for all tokens when a request arrives.
    """
    of_group: dict[int, list[bytes]] = {}
    for key in keys:
        of_group.setdefault(group_of(key), []).append(key)
    if len(of_group) < len(groups.groups):
        return None
    asked = [of_group[index] for index in sorted(of_group)]  # numbers may be left out: see `KVGroups`
    end = min(len(asked[group.index]) * group.block_tokens for group in groups.groups)
    return GroupNeeds(groups, lambda group, first, last: asked[group.index][first:last], end)


def _group(index: int, identity: GroupIdentity) -> KVGroup | None:
    tokens, window = identity.block_tokens, identity.window
    hashes = tokens // max(1, identity.hash_tokens)
    kind = identity.kind.partition(" ")[0]
    if kind.startswith("full"):
        return KVGroup(index, tokens, hashes)
    if kind == "window" and window is not None:
        return KVGroup(index, tokens, hashes, window=window)
    if kind == "chunk" and window:
        return KVGroup(index, tokens, hashes, chunk=window)
    if kind == "state":
        return KVGroup(index, tokens, hashes, is_state=True)
    return None


logger = logging.getLogger("kvstow.tier")


class _Request(NamedTuple):
    wait: TierWait
    then: Callable[[], object]


MOST_KEPT_BYTES, MOST_KEPT_CONTEXTS = 32 << 20, 8192
"""Of the keys of the latest contexts of a namespace."""
MOST_PREFETCHES = 64
"""That wait."""
LEAST_LEAD_SECONDS = 2.0
"""A prefetch begins so long before the next request is expected, or twice as long as it takes."""


class ContextKeys:
    """What the last request of each context has used, so that it can be fetched again. Bounded. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        """By context: the keys in one piece, and their width."""
        self._num_bytes = 0

    def note(self, context: bytes, chain: Sequence[bytes], *, release: bool) -> bool:
        """A request of the context has used this chain of keys. Whether it is kept."""
        with self._lock:
            self._forget(context)
            width = len(chain[0]) if chain else 0
            if release or not chain or any(len(key) != width for key in chain):
                return False
            self._kept[context] = b"".join(chain), width
            self._num_bytes += len(chain) * width
            while self._num_bytes > MOST_KEPT_BYTES or len(self._kept) > MOST_KEPT_CONTEXTS:
                self._forget(next(iter(self._kept)))
            return True

    def of(self, context: bytes) -> list[bytes]:
        """Root first; empty if nothing is known."""
        with self._lock:
            data, width = self._kept.get(context, (b"", 1))
        return [data[at : at + width] for at in range(0, len(data), width)]

    def _forget(self, context: bytes) -> None:
        data, _ = self._kept.pop(context, (b"", 1))
        self._num_bytes -= len(data)


class NamespaceTier:
    """The transfers belong to the node, in a session of its own, so they go on whether engines are attached or not.

    `may_have_more`, `ask`, `ask_prompt`, `note_prefill`, `note_use`, `prefetch` and `note_stored` may be called from
    any thread, and do not wait. The rest is for the tier's thread, which alone uses the `FleetTier`.
    """

    def __init__(
        self,
        pool_tier: PoolTier,
        namespace: KnownNamespace,
        control: TierSession,
        do: Callable[[Callable[[], object]], object],
        wake: Callable[[], object],
        post: Callable[[Callable[[], object]], object],
    ) -> None:
        """`do` has the tier's thread call something, and `post` the attach server's thread."""
        self.pool_tier, self.namespace, self.control = pool_tier, namespace, control
        self._do, self._wake, self._post = do, wake, post
        self._groups = groups_of(pool_tier.pool.identity)
        self.shown: FleetTier
        """Set by the tier's thread once it has begun."""
        self.fleet: FleetTier | None = None
        """The same while it may be used: None before that, and after `fail`."""
        self.is_closed = False
        """Whether no engine may use it any more."""
        self._early: deque[Sequence[bytes]] | None = deque(maxlen=1024)
        """Keys that were stored before `fleet` was made; None from then on. Used with the pool's lock held."""
        self._requests: list[_Request] = []
        self._contexts = ContextKeys()
        self._due_at: dict[bytes, float] = {}
        """By context: when to look again whether its next request is near."""
        self._due: list[tuple[float, bytes]] = []
        """The same as a heap, with entries that are outdated."""
        self._prefetches: deque[bytes] = deque(maxlen=MOST_PREFETCHES)
        self._prefetch: Prefetch | None = None

    # -- for any thread -------------------------------------------------------------------------------------

    @property
    def may_have_more(self) -> bool:
        """Whether a request to the store may pay off. Reads without a lock, so an outage may just have begun."""
        fleet = self.fleet
        return fleet is not None and fleet.may_fetch

    def ask(self, keys: Sequence[bytes], then: Callable[[], object]) -> None:
        """Look in the store for a request's keys that the pool lacks. Calls `then` once, on the attach server's thread,
        when no further block arrives for the request."""
        self._do(lambda: self._begin(keys, None, then))

    def ask_prompt(self, keys: Sequence[bytes], then: Callable[[], object]) -> None:
        """As `ask`, for the keys of all blocks of a prompt, one KV group after the other."""
        needs = None if self._groups is None else needs_of(self._groups, keys)
        if needs is None:
            self._post(then)
        else:
            self._do(lambda: self._begin(keys, needs, then))

    def note_prefill(self, cost: PrefillCost) -> None:
        """So much it costs an engine to compute prompts."""
        self._do(lambda: None if self.fleet is None else self.fleet.break_even.note_prefill(cost))

    def note_use(self, context: bytes, chain: Sequence[bytes], *, release: bool) -> None:
        """A request of this context has used this chain of keys."""
        if self._contexts.note(context, chain, release=release):
            self._do(lambda: self._schedule(context))

    def prefetch(self, context: bytes) -> int | None:
        """Begin to bring what the store has of the context into the pool. How many blocks its last request had used;
        None if none is known, or the store is not used."""
        count = len(self._contexts.of(context))
        if not count or not self.may_have_more:
            return None
        self._do(lambda: self._prefetches.append(context))
        return count

    def note_stored(self, keys: Sequence[bytes]) -> None:
        """An engine has stored these blocks. Called with the pool's lock held."""
        if self._early is not None:
            self._early.append(keys)
        elif self.control.on_stored is not None:
            self.control.on_stored(keys)
            self._wake()

    # -- the tier's thread ----------------------------------------------------------------------------------

    def begin(self, fleet: FleetTier) -> None:
        """Use this tier, and put what was stored before it was made."""
        with self.control.pool.lock:
            early, self._early = self._early or (), None
            self.shown = self.fleet = fleet
            for keys in early:
                self.note_stored(keys)

    def _begin(self, keys: Sequence[bytes], needs: GroupNeeds | None, then: Callable[[], object]) -> None:
        wait = None
        try:
            wait = None if self.fleet is None else self.fleet.look_for(keys, 0, needs)
        except Exception as error:  # noqa: BLE001 - the request continues with what the pool has
            self.fail(error)
        if wait is None:
            self._post(then)
        else:
            self._requests.append(_Request(wait, then))

    def step(self) -> None:
        """Handle results, answer the requests whose wait is over, and start transfers that are due."""
        fleet = self.fleet
        if fleet is None:
            with suppress(Exception):  # its state may be broken
                self.pool_tier.submit(self.control, self.shown.take_plans())  # transfers under way end as usual
            return
        fleet.step()
        self._go_on_prefetching(fleet)
        over = [one for one in self._requests if fleet.is_over(one.wait)]
        if over:
            self._requests = [one for one in self._requests if one.wait.state != "over"]
            for one in over:
                self._post(one.then)
        self.pool_tier.submit(self.control, fleet.take_plans())

    # -- prefetches: the tier's thread ----------------------------------------------------------------------

    def _schedule(self, context: bytes) -> None:
        """Look again when the next request of the context is near; fetch now if it is. A prefetch evicts what others
        have, so nothing is fetched for a context that never came back, or while hints are off."""
        self._due_at.pop(context, None)
        fleet, pool = self.fleet, self.pool_tier.pool
        if (claims := pool.facade.claims()) is None or not claims.is_on:
            return
        name = self.control.namespace.name
        expected = [one for one in pool.facade.context(context) if one.namespace == name and one.hits]
        if fleet is None or not expected or (seconds := expected[0].resume_in_seconds) is None or seconds < 0:
            return
        per_second = fleet.break_even.rate.per_second
        num_bytes = expected[0].blocks * pool.config.slot_bytes
        lead = max(LEAST_LEAD_SECONDS, 2 * num_bytes / per_second if per_second else 0.0)
        if seconds <= lead:
            self._prefetches.append(context)
        elif len(self._due_at) < MOST_KEPT_CONTEXTS:
            self._due_at[context] = at = pool.clock() + seconds - lead
            heappush(self._due, (at, context))
            if len(self._due) > 2 * len(self._due_at) + 64:
                self._due = sorted((at, one) for one, at in self._due_at.items())

    def _go_on_prefetching(self, fleet: FleetTier) -> None:
        """One at a time, and none while a request waits for the store."""
        now = self.control.pool.clock()
        while self._due and self._due[0][0] <= now:
            at, context = heappop(self._due)
            if self._due_at.get(context) == at:
                self._schedule(context)
        if self._requests:
            return
        if self._prefetch is None and self._prefetches:
            keys = self._contexts.of(self._prefetches.popleft())
            needs = None if self._groups is None or self._groups.is_plain else needs_of(self._groups, keys)
            if keys and (needs is not None or (self._groups is not None and self._groups.is_plain)):
                most = len(keys) if needs is not None else self.pool_tier.pool.slots.limit // 2
                self._prefetch = fleet.prefetch(keys[:most], needs)
        if self._prefetch is not None and fleet.is_prefetched(self._prefetch):
            self._prefetch = None

    @property
    def next_deadline(self) -> float | None:
        """The time at which the first wait ends at the latest, or a prefetch is due."""
        waits = [one.wait.until for one in self._requests]
        return min([*waits, *(at for at, _ in self._due[:1])], default=None)

    @property
    def is_idle(self) -> bool:
        return self.fleet is None or (self.fleet.is_idle and self._prefetch is None and not self._prefetches)

    @property
    def is_obsolete(self) -> bool:
        """Whether no engine will find the namespace's blocks again, and nothing is under way."""
        with self.control.pool.lock:
            namespace = self.control.namespace
            return (
                not len(self.control.ops)
                and not namespace.num_sessions
                and (namespace.is_dropped or namespace.is_empty)
            )

    def answer_all(self) -> None:
        """Answer all requests that wait."""
        requests, self._requests = self._requests, []
        for one in requests:
            self._post(one.then)

    def fail(self, error: Exception) -> None:
        """Log a defect, and turn the tier off for this namespace. Its status gives the reason."""
        logger.error("the tier of namespace %s has failed and is off", self.namespace.name, exc_info=error)
        self.control.on_stored = None
        self._due_at, self._due, self._prefetch = {}, [], None  # or the thread would never wait any more
        self._prefetches.clear()
        if self.fleet is not None:
            self.fleet = None
            with suppress(Exception):  # its state may be broken
                self.shown.turn_off(TIER_FAILED)
        self.answer_all()
