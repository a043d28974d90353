"""The books of a node's memory: which extents there are, whose they are, and which clients have mapped them.

A pool's slots lie in rows of extents. Row `i` is one extent for each rank, with the same slots in each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

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


_Name = TypeVar("_Name")


def fair_shares(
    total: int, demands: Mapping[_Name, int], kept: Mapping[_Name, int] = MappingProxyType({})
) -> dict[_Name, int]:
    """Max-min fair: nobody gets more than they ask for, and what one leaves is divided among the others. What somebody
    has `kept` is a part of their share that cannot be divided. Their names are in `demands`, too, which do not include
    it. Shares do not include it either."""
    shares: dict[_Name, int] = {}
    left = total
    wanted = {name: demand + kept.get(name, 0) for name, demand in demands.items()}
    for count, (name, demand) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        shares[name] = min(demand, left // (len(wanted) - count))
        left -= shares[name]
    most = max(kept, key=lambda name: kept[name], default=None)
    if most is None or kept[most] <= shares[most]:
        return {name: share - kept.get(name, 0) for name, share in shares.items()}
    # It has kept more than its share, so the others divide what is left.
    others = {name: demand for name, demand in demands.items() if name != most}
    kept_by_others = {name: num_bytes for name, num_bytes in kept.items() if name != most}
    return {most: 0, **fair_shares(max(0, total - kept[most]), others, kept_by_others)}


@dataclass(slots=True)
class BookedExtent:
    """`owner`: the last one that had it; `pool` and `row`: where it is, if it is not spare; `recalled`: its pool has
    lost it; `is_given_up`: it cannot be handed out again; `maps`: by client, how often it was handed out and not
    given back; `had`: the clients that it was ever handed out to, and that live; `is_kept`: it was closed, and some
    process has it still."""

    num_bytes: int
    numa_node: int | None
    owner: int | None = None
    pool: str | None = None
    row: int = 0
    recalled: bool = False
    is_given_up: bool = False
    maps: Counter[str] = field(default_factory=Counter)
    had: set[str] = field(default_factory=set)
    is_kept: bool = False

    @property
    def is_spare(self) -> bool:
        return self.pool is None

    @property
    def waiting_row(self) -> int | None:
        """The row of a pool that waits for this memory; None if none does."""
        return None if self.pool is None or self.recalled else self.row

    @property
    def may_change_hands(self) -> bool:
        """Its pool has lost it, and every client has released it."""
        return self.recalled and not self.maps


@dataclass(slots=True)
class Row:
    """One extent for each rank of the layout, with the slots from `first_slot` on. A `recalled` row is on its way back.

    Read by others, changed by `MemoryBudget`. An extent is 0 once it is taken back.
    """

    first_slot: int
    num_slots: int
    extents: tuple[int, ...]
    num_bytes: int
    recalled: bool = False


@dataclass(slots=True)
class BookedPool:
    """What a pool has, what its sessions ask for, and so which rows it lacks. Not locked.

    Rows are numbered from 0 and lie end to end: a row's first slot follows the last one of the row before. The last row
    is recalled first, and while a recalled row is left, the pool gets no new one. `asks`: slots, by session; `wanted`:
    the slots that the pool can use now, or None for all that it may have, as extents are given on demand.
    """

    layout: PoolLayout
    idle_since: int
    asks: dict[str, int | None] = field(default_factory=dict)
    wanted: int | None = None
    removed: bool = False
    rows: dict[int, Row] = field(default_factory=dict)

    def active_rows(self) -> list[int]:
        """The numbers of the rows that were not recalled."""
        return sorted(number for number, row in self.rows.items() if not row.recalled)

    def has_recalled_rows(self) -> bool:
        return any(row.recalled for row in self.rows.values())

    def held_bytes(self) -> int:
        """Without what was recalled."""
        return sum(row.num_bytes for row in self.rows.values() if not row.recalled)

    def held_slots(self) -> int:
        return sum(row.num_slots for row in self.rows.values() if not row.recalled)

    def has_part_row(self) -> bool:
        return any(row.num_slots < self.layout.row_slots for row in self.rows.values() if not row.recalled)

    def demand_slots(self) -> int | None:
        """The slots that the pool should have; None for all that there are."""
        if not self.asks or self.removed:
            return 0
        bounds = [bound for bound in (self._asked(), self.wanted) if bound is not None]
        return min(bounds, default=None)

    def missing_slots(self, share: int) -> int:
        """Slots of the next row, as far as demand and a share of so many bytes go, wherever the memory is."""
        demand = self.demand_slots()
        within = self.layout.slots_within(max(0, share - self.held_bytes()))
        return within if demand is None else max(0, min(within, demand - self.held_slots()))

    def missing_bytes(self, share: int) -> int:
        """Bytes of the rows that the pool lacks up to its demand and share, and could get now."""
        if self.has_recalled_rows():
            return 0
        layout, demand = self.layout, self.demand_slots()
        left = max(0, share - self.held_bytes())
        rows = left // layout.row_bytes
        if demand is not None:
            demand = max(0, demand - self.held_slots())
            rows = min(rows, demand // layout.row_slots)
        if self.has_part_row():
            return rows * layout.row_bytes
        part = layout.slots_within(left - rows * layout.row_bytes)
        if demand is not None:
            part = min(part, demand - rows * layout.row_slots)
        return rows * layout.row_bytes + (sum(layout.sizes(part)) if part else 0)

    def next_row_slots(self, share: int, available: int, *, whole: bool) -> int:
        """Slots of the row that the pool gets now, from so many available bytes; 0 for none. It has at most one row
        that is not whole. `whole`: a pool that has rows, and a share for a whole one more, waits until there is memory
        for that."""
        if self.has_recalled_rows():
            return 0
        layout, slots = self.layout, self.missing_slots(share)
        if slots == layout.row_slots and layout.row_bytes <= available:
            return slots
        if self.has_part_row():
            return 0
        if whole and slots == layout.row_slots and self.active_rows():
            return 0
        return min(slots, layout.slots_within(available))

    def _asked(self) -> int | None:
        asks = list(self.asks.values())
        return None if None in asks else max(ask for ask in asks if ask is not None)
