"""Transfers between the blocks of a session and the store of the fleet tier."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from math import inf
from typing import NamedTuple

from kvstow.control.openop import LAST_RANK, OpenTierOp
from kvstow.control.placement import has_room, place_fetch
from kvstow.control.session import Session
from kvstow.messages import TierDirection, TierOp
from kvstow.results import TierSettled


class Reach(NamedTuple):
    """`end`: the first key that is not visible. `is_filling`: it is in a slot that is being filled."""

    end: int
    is_filling: bool


class TierTraffic:
    """Starts puts and fetches of one session, for its ranks. Their ends come as completions, as those of loads and
    stores do (`Session.complete`).

    Every call is safe from any thread, holds the pool's lock for O(blocks given), and never waits. Keys are in prefix
    order, root first. `most`: blocks in one transfer.
    """

    def __init__(self, session: Session, *, most: int, replicated: bool = False) -> None:
        """`replicated`: all ranks hold the same bytes, so one object for all of them is put, by rank 0. Ranks with
        memory of their own each fetch it."""
        self._session, self._pool = session, session.pool
        self.most, self._replicated = most, replicated
        self._is_closed = False

    def close(self) -> bool:
        """Begin no transfer any more; what is under way goes on. False if it was closed before."""
        with self._pool.lock:
            was_open, self._is_closed = not self._is_closed, True
            return was_open

    @property
    def capacity_slots(self) -> int:
        with self._pool.lock:
            return self._pool.capacity

    def visible_until(self, keys: Sequence[bytes], start: int) -> Reach:
        """How far the keys from `start` on are visible. O(visible keys)."""
        rest = keys[start:] if start else keys
        with self._pool.lock:
            namespace = self._session.namespace
            end = start + sum(map(len, namespace.keys.leading_runs(rest)))
            return Reach(end, end < len(keys) and keys[end] in namespace.pending_stores)

    def visible(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether it is visible."""
        with self._pool.lock:
            return [slot is not None for slot in self._session.namespace.keys.slots_of(keys)]

    def absent(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys that are neither visible nor being filled."""
        with self._pool.lock:
            namespace = self._session.namespace
            pending = namespace.pending_stores
            slots = namespace.keys.slots_of(keys)
            if namespace.needs_all(keys, slots):
                return list(keys)
            return [key for key, slot in zip(keys, slots, strict=True) if slot is None and key not in pending]

    def begin_put(self, fingerprint: str, keys: Sequence[bytes]) -> list[TierOp]:
        """Put those of the keys that are visible. Keeps them from eviction until then, and makes them the last ones in
        its order; a policy that tells new blocks from used ones does not count it as a use."""
        pool, session = self._pool, self._session
        with pool.lock:
            if self._is_closed or session.acceptance.load_refusal(pool.clock()):
                return []
            slots = session.visible_slots(keys)
            found = [(key, slot) for key, slot in zip(keys, slots, strict=True) if slot is not None]
            pool.index.hold([slot for _, slot in found], is_put=True)
            return self._start("put", fingerprint, [key for key, _ in found], [slot for _, slot in found])

    def out_of_reach(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys that are visible, but in memory that the session has not registered yet."""
        with self._pool.lock:
            end = self._session.watermark
            if end is None:
                return []
            slots = self._session.namespace.keys.slots_of(keys)
            return [key for key, slot in zip(keys, slots, strict=True) if slot is not None and slot >= end]

    def put_coldest(self, fingerprint: str, wanted_free: int, known: Collection[bytes], *, most: int) -> list[TierOp]:
        """Evict blocks until so many slots are free, and put them first: their slots are free when the put has ended.
        Looks at no more than `most` blocks, and leaves those that are `known` to be in the store."""
        pool, session = self._pool, self._session
        with pool.lock:
            missing = wanted_free - pool.slots.free
            if self._is_closed or missing <= 0 or session.acceptance.load_refusal(pool.clock()):
                return []
            if pool.earlier is not None:  # the slots would go to quarantine, so no number of puts would be enough
                return []
            # Of all sessions: the tiers of other namespaces make room in the same pool.
            ops = (entry for one in pool.sessions for entry in one.ops)
            missing -= sum(len(entry.held) for entry in ops if entry.op.direction == "put")
            key_of = pool.index.slot_keys.key_of
            coldest = [(slot, key_of[slot]) for slot in islice(session.namespace.policy, max(0, min(most, missing)))]
            end = inf if session.watermark is None else session.watermark
            found = [(slot, key) for slot, key in coldest if key is not None and key not in known and slot < end]
            slots = [slot for slot, _ in found]
            pool.index.hold(slots)
            pool.remove_blocks(slots, "capacity")
            return self._start("put", fingerprint, [key for _, key in found], slots)

    def has_room(self, keys: Sequence[bytes]) -> bool:
        """Whether slots can be had to fetch all of the keys that are neither visible nor being filled, while the
        visible ones stay."""
        with self._pool.lock:
            return has_room(self._session, keys)

    def begin_fetch(self, fingerprint: str, keys: Sequence[bytes], *, whole: bool = False) -> list[TierOp]:
        """Fetch the leading ones of those keys that are neither visible nor being filled, as far as slots can be had;
        `whole`: all or none of them. Each transfer becomes visible on its own, when all ranks have finished it."""
        with self._pool.lock:
            if self._is_closed:
                return []
            wanted, slots = place_fetch(self._session, keys, whole=whole)
            return self._start("fetch", fingerprint, wanted, slots)

    def _start(
        self, direction: TierDirection, fingerprint: str, keys: Sequence[bytes], slots: Sequence[int]
    ) -> list[TierOp]:
        pool = self._pool
        ranks: Collection[int] = pool.storing_ranks
        if direction == "put" and self._replicated:
            ranks = {LAST_RANK}
        now = pool.clock()
        start = self._session.ops.start_tier
        parts = [slice(first, first + self.most) for first in range(0, len(keys), self.most)]
        return [start(direction, fingerprint, tuple(keys[part]), tuple(slots[part]), ranks, now) for part in parts]

    def cancel_fetches(self) -> int:
        """No fetch that is under way becomes visible; its slots are freed when all ranks have finished it. Returns how
        many keys would have become visible."""
        with self._pool.lock:
            return self._session.ops.tier.cancel_fetches()

    def take_plans(self) -> list[tuple[int, TierOp]]:
        """Ranks, each with an op to give to it now, in order. The ops are for the boots that the ranks have now."""
        with self._pool.lock:
            return self._session.ops.tier.take_plans()

    @property
    def in_flight(self) -> int:
        """Transfers that have not ended on all ranks."""
        with self._pool.lock:
            return sum(isinstance(entry, OpenTierOp) for entry in self._session.ops)

    def take_settled(self) -> list[TierSettled]:
        """All transfers that have ended since the last call, in order."""
        tier = self._session.ops.tier
        if not tier.settled:
            return []
        with self._pool.lock:
            settled = list(tier.settled)
            tier.settled.clear()
            return settled
