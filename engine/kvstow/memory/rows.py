"""Rows: how a pool's slots lie in extents. Row `i` is one extent for each rank, with the same slots in each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstow.errors import ConfigError
from kvstow.memory.region import HUGE_PAGE_BYTES, round_up

UNIT_BYTES = HUGE_PAGE_BYTES  # sizes of extents are multiples of it


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Bytes from one slot to the next, and the NUMA node of the rank's device where it is known."""

    slot_stride: int
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """What a pool's extents depend on. `owner` is the trust domain, a uid: memory that one owner has used is handed to
    no other. A row may have fewer slots than `row_slots`."""

    owner: int
    ranks: tuple[RankLayout, ...]
    extent_bytes: int

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ConfigError("ranks of a pool", 0, "1 or more")
        for rank in self.ranks:
            if rank.slot_stride <= 0:
                raise ConfigError("bytes of a slot", rank.slot_stride, "more than 0")

    @property
    def row_slots(self) -> int:
        """Slots of a whole row: as many as fit into an extent of the rank with the largest slots."""
        return max(1, self.extent_bytes // self._largest)

    @property
    def row_bytes(self) -> int:
        """Bytes of a whole row, over all ranks."""
        return sum(self.sizes(self.row_slots))

    def sizes(self, num_slots: int) -> list[int]:
        """The size of each rank's extent in a row of so many slots. In a whole row, the ranks with the largest slots
        have extents of the usual size, which exist before there is a pool."""
        usual = self.extent_bytes if num_slots == self.row_slots else 0
        return [
            max(usual if rank.slot_stride == self._largest else 0, round_up(num_slots * rank.slot_stride, UNIT_BYTES))
            for rank in self.ranks
        ]

    def has_row(self, num_slots: int, sizes: Sequence[int]) -> bool:
        """Whether a row of the pool may have so many slots, in extents of these sizes."""
        return 0 < num_slots <= self.row_slots and self.sizes(num_slots) == list(sizes)

    def slots_within(self, num_bytes: int) -> int:
        """How many slots of a row fit into `num_bytes`; a whole row's at most."""
        if num_bytes >= self.row_bytes:
            return self.row_slots
        low, high = 0, self.row_slots - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if sum(self.sizes(middle)) <= num_bytes else (low, middle - 1)
        return low

    def bytes_of(self, num_slots: int) -> int:
        """Bytes of whole rows and one last row for so many slots."""
        rows, rest = divmod(num_slots, self.row_slots)
        return rows * self.row_bytes + (sum(self.sizes(rest)) if rest else 0)

    @property
    def _largest(self) -> int:
        return max(rank.slot_stride for rank in self.ranks)


def fair_shares(total: int, demands: Mapping[str, int]) -> dict[str, int]:
    """Max-min fair: no pool gets more than it asks for, and what one leaves is divided among the others."""
    shares: dict[str, int] = {}
    left = total
    for count, (name, demand) in enumerate(sorted(demands.items(), key=lambda item: item[1])):
        shares[name] = min(demand, left // (len(demands) - count))
        left -= shares[name]
    return shares
