"""What a session puts into the store of its fleet tier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import inf

from kvstow.control.tiertraffic import TierTraffic
from kvstow.results import TierSettled
from kvstow.tier.autowrite import AutoWrite
from kvstow.tier.putpace import PutPace
from kvstow.tier.store import StoreCapacity
from kvstow.tier.writepolicy import WriteMode, WritePolicy

_MAX_SEEN = 8
"""Blocks whose uses are remembered, for each slot of the pool."""
_LEAST_SEEN = 1 << 16
"""The same, for a small pool: 10 MB."""
_RESERVE = 8
"""With `back`, one slot of so many is kept free."""


class TierPuts:
    """Used by the thread of the host, except `num_blocks` and what `WritePolicy` allows others."""

    def __init__(
        self,
        traffic: TierTraffic,
        write: WriteMode,
        capacity: StoreCapacity | None,
        clock: Callable[[], float],
        *,
        slots: int,
        block_bytes: int,
    ) -> None:
        """`slots`: the most that the pool may have. `block_bytes`: the size of a block in the store."""
        self._traffic = traffic
        self._is_back = write == "back"
        self._max_in_store = max(_LEAST_SEEN, _MAX_SEEN * slots)
        self._max_putting = max(traffic.most, slots // 8)
        pace = None if capacity is None else capacity.put_bytes_per_second
        self.policy = WritePolicy(
            write,
            max(traffic.most, slots),
            self._max_in_store,
            clock,
            auto=AutoWrite(None if capacity is None else capacity.num_bytes, block_bytes, clock),
            pace=PutPace(inf if pace is None else pace / block_bytes, clock),
        )
        self._putting: dict[int, int] = {}
        """Blocks of each put under way."""
        self._in_store: OrderedDict[bytes, None] = OrderedDict()
        """With `back`: keys that were put or fetched not long ago, and need not be put again."""

    @property
    def num_blocks(self) -> int:
        """Under way. From any thread."""
        return sum(list(self._putting.values()))

    def is_under_way(self, op_id: int) -> bool:
        return op_id in self._putting

    def begin(self, fingerprint: str) -> None:
        """Put what is due."""
        room = self._max_putting - self.num_blocks
        if room <= 0:
            return
        if self._is_back:
            wanted, room = self._traffic.capacity_slots // _RESERVE, self.policy.allowed(room)
            ops = self._traffic.put_coldest(fingerprint, wanted, self._in_store, most=room)
            self.policy.note_taken(sum(len(op.keys) for op in ops))
        else:
            taken = self.policy.take(room)
            if not taken:
                return
            ops = self._traffic.begin_put(fingerprint, taken)
            self.policy.put_back(self._traffic.out_of_reach(taken))
        self._putting.update({op.op_id: len(op.keys) for op in ops})

    def settle(self, settled: TierSettled) -> None:
        """One has ended."""
        del self._putting[settled.op_id]
        if settled.full:
            self.policy.note_full()
        elif settled.moved:
            self.policy.note_put()

    def note_in_store(self, keys: Sequence[bytes]) -> None:
        """They were put, or fetched."""
        if not self._is_back:
            return
        self._in_store.update(dict.fromkeys(keys))
        while len(self._in_store) > self._max_in_store:
            self._in_store.popitem(last=False)

    def forget_store(self) -> None:
        """Nothing is known of what the store has."""
        self._in_store.clear()
