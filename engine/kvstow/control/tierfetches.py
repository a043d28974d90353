"""The fetches of a session's fleet tier that are under way."""

from __future__ import annotations

from collections.abc import Sequence

from kvstow.control.tierneeds import Found
from kvstow.control.tiertraffic import TierTraffic
from kvstow.results import TierSettled


class TierFetches:
    """Used by the thread of the host, except `num_blocks`. Contains a key while a fetch brings it."""

    def __init__(self, traffic: TierTraffic) -> None:
        self._traffic = traffic
        self._keys_of: dict[int, tuple[bytes, ...]] = {}
        self._worth: dict[int, float] = {}
        """How many blocks of tokens one key of each fetch saves computing."""
        self._op_of: dict[bytes, int] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._op_of

    @property
    def num_blocks(self) -> int:
        """From any thread."""
        return sum(map(len, list(self._keys_of.values())))

    def is_under_way(self, op_id: int) -> bool:
        return op_id in self._keys_of

    def ops_of(self, keys: Sequence[bytes]) -> list[int]:
        """The fetches that these keys are part of."""
        if not self._op_of:
            return []
        ops = dict.fromkeys(map(self._op_of.get, keys))
        return [op for op in ops if op is not None]

    def begin(self, fingerprint: str, keys: Sequence[bytes], found: Found, *, whole: bool = False) -> list[int]:
        """Fetch those of the keys, some of what was `found`, that the pool lacks. `whole`: see `begin_fetch`."""
        ops = self._traffic.begin_fetch(fingerprint, keys, whole=whole)
        for op in ops:
            self._keys_of[op.op_id] = op.keys
            self._worth[op.op_id] = found.blocks / len(found.keys)
            self._op_of.update(dict.fromkeys(op.keys, op.op_id))
        return [op.op_id for op in ops]

    def settle(self, settled: TierSettled) -> float:
        """One has ended. Returns how many blocks of tokens need not be computed."""
        for key in self._keys_of.pop(settled.op_id):
            if self._op_of.get(key) == settled.op_id:
                del self._op_of[key]
        return self._worth.pop(settled.op_id) * settled.moved
