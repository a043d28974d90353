"""What a session puts into the store of its fleet tier."""

from __future__ import annotations

from collections.abc import Callable

from kvstow.control.tiertraffic import TierTraffic
from kvstow.results import TierSettled
from kvstow.tier.putqueue import PutQueue


class TierPuts:
    """Used by the thread of the host, except `num_blocks` and what `PutQueue` allows others."""

    def __init__(self, traffic: TierTraffic, clock: Callable[[], float], *, slots: int) -> None:
        """`slots`: the most that the pool may have."""
        self._traffic = traffic
        self._max_putting = max(traffic.most, slots // 8)
        self.queue = PutQueue(max(traffic.most, slots), clock)
        self._putting: dict[int, int] = {}
        """Blocks of each put under way."""

    @property
    def num_blocks(self) -> int:
        """Under way. From any thread."""
        return sum(list(self._putting.values()))

    def is_under_way(self, op_id: int) -> bool:
        return op_id in self._putting

    def begin(self, fingerprint: str) -> None:
        """Put what is due."""
        room = self._max_putting - self.num_blocks
        if room <= 0 or not (taken := self.queue.take(room)):
            return
        ops = self._traffic.begin_put(fingerprint, taken)
        self.queue.put_back(self._traffic.out_of_reach(taken))
        self._putting.update({op.op_id: len(op.keys) for op in ops})

    def settle(self, settled: TierSettled) -> None:
        """One has ended."""
        del self._putting[settled.op_id]
        if settled.full:
            self.queue.note_full()
        elif settled.moved:
            self.queue.note_put()
