"""Transfers between the blocks of a session and the store of the fleet tier."""

from __future__ import annotations

from collections.abc import Sequence

from kvstow.control.openop import LAST_RANK
from kvstow.control.placement import place_fetch
from kvstow.control.session import Session
from kvstow.messages import TierOp
from kvstow.results import TierSettled


class TierTraffic:
    """Starts puts and fetches of one session, for its ranks. Their ends come as completions, as those of loads and
    stores do (`Session.complete`).

    Every call is safe from any thread, holds the pool's lock for O(blocks given), and never waits. Keys are in prefix
    order, root first.
    """

    def __init__(self, session: Session, *, replicated: bool = False) -> None:
        """`replicated`: all ranks hold the same bytes, so one object for all of them is put, by rank 0. Ranks with
        memory of their own each fetch it."""
        self._session, self._pool = session, session.pool
        self._replicated = replicated

    def absent(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether it is neither visible nor being filled."""
        with self._pool.lock:
            namespace = self._session.namespace
            slots = namespace.keys.slots_of(keys)
            return [slot is None and key not in namespace.pending_stores for key, slot in zip(keys, slots, strict=True)]

    def begin_put(self, keys: Sequence[bytes], most: int) -> list[TierOp]:
        """Put those of the keys that are visible, at most `most` in one transfer. Keeps them from eviction until then;
        that counts as a use."""
        pool, session = self._pool, self._session
        with pool.lock:
            if session.acceptance.load_refusal(pool.clock()):
                return []
            slots = session.namespace.keys.slots_of(keys)
            found = [(key, slot) for key, slot in zip(keys, slots, strict=True) if slot is not None]
            ranks = {LAST_RANK} if self._replicated else pool.storing_ranks
            started: list[TierOp] = []
            for first in range(0, len(found), most):
                some = found[first : first + most]
                pool.index.hold([slot for _, slot in some])
                started.append(
                    session.ops.start_tier(
                        "put", tuple([key for key, _ in some]), tuple([slot for _, slot in some]), ranks, pool.clock()
                    )
                )
            return started

    def begin_fetch(self, keys: Sequence[bytes], most: int) -> list[TierOp]:
        """Fetch the leading ones of those keys that are neither visible nor being filled, as far as slots can be had,
        at most `most` in one transfer. Each transfer becomes visible on its own, when all ranks have finished it."""
        pool, session = self._pool, self._session
        with pool.lock:
            wanted, slots = place_fetch(session, keys)
            return [
                session.ops.start_tier(
                    "fetch",
                    tuple(wanted[first : first + most]),
                    tuple(slots[first : first + most]),
                    pool.storing_ranks,
                    pool.clock(),
                )
                for first in range(0, len(wanted), most)
            ]

    def cancel_fetches(self) -> int:
        """No fetch that is under way becomes visible; its slots are freed when all ranks have finished it. Returns how
        many keys that concerns."""
        with self._pool.lock:
            return self._session.ops.tier.cancel_fetches()

    def take_plans(self) -> list[tuple[int, TierOp]]:
        """Ranks, each with an op to give to it now, in order. The ops are for the boots that the ranks have now."""
        with self._pool.lock:
            return self._session.ops.tier.take_plans()

    def take_settled(self) -> list[TierSettled]:
        """All transfers that have ended since the last call, in order."""
        tier = self._session.ops.tier
        with self._pool.lock:
            settled = list(tier.settled)
            tier.settled.clear()
            return settled
