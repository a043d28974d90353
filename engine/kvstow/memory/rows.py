"""The records of a node's memory: its extents, the pools that they belong to, and the clients that have mapped them.

A pool's slots lie in rows of extents. A row has one extent for each rank, with the same slots in each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from kvstow.errors import ConfigError
from kvstow.memory.region import HUGE_PAGE_BYTES, round_up

UNIT_BYTES = HUGE_PAGE_BYTES
"""The sizes of extents are multiples of this."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The bytes from one slot of a rank to the next, and the NUMA node of the rank's device if it is known."""

    slot_stride: int
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Determines the sizes and the owner of a pool's extents.

    `owner` is the uid of the pool's trust domain. Memory that one owner has used is never given to another.
    `extent_bytes` is the usual size of an extent. A row may have fewer slots than `row_slots`.
    """

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
        """The slots of a whole row. They fill an extent of the rank with the largest slots."""
        return max(1, self.extent_bytes // self._largest_stride)

    @property
    def row_bytes(self) -> int:
        """The bytes of a whole row, over all ranks."""
        return sum(self.sizes(self.row_slots))

    def sizes(self, num_slots: int) -> list[int]:
        """Return the size of each rank's extent in a row of `num_slots` slots. In a whole row, the ranks with the
        largest slots have extents of the usual size, which exist before there is a pool."""
        usual = self.extent_bytes if num_slots == self.row_slots else 0
        largest = self._largest_stride
        return [
            max(usual if rank.slot_stride == largest else 0, round_up(num_slots * rank.slot_stride, UNIT_BYTES))
            for rank in self.ranks
        ]

    def has_row(self, num_slots: int, sizes: Sequence[int]) -> bool:
        """Whether a row of the pool may have `num_slots` slots in extents of these sizes."""
        return 0 < num_slots <= self.row_slots and self.sizes(num_slots) == list(sizes)

    def slots_within(self, num_bytes: int) -> int:
        """Return how many slots of one row fit into `num_bytes`."""
        if num_bytes >= self.row_bytes:
            return self.row_slots
        low, high = 0, self.row_slots - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if sum(self.sizes(middle)) <= num_bytes else (low, middle - 1)
        return low

    def bytes_of(self, num_slots: int) -> int:
        """Return the bytes of the whole rows, and of the last row, that hold `num_slots` slots."""
        rows, rest = divmod(num_slots, self.row_slots)
        return rows * self.row_bytes + (sum(self.sizes(rest)) if rest else 0)

    @property
    def _largest_stride(self) -> int:
        return max(rank.slot_stride for rank in self.ranks)


_Name = TypeVar("_Name")


def fair_shares(
    total: int, demands: Mapping[_Name, int], kept: Mapping[_Name, int] = MappingProxyType({})
) -> dict[_Name, int]:
    """Divide `total` in a max-min fair way: a name never gets more than it demands, and the rest is divided among the
    others.

    What a name has `kept` counts as a part of its share that nobody else can have. Each name in `kept` is also in
    `demands`. Neither the demands nor the returned shares include what was kept.
    """
    shares: dict[_Name, int] = {}
    left = total
    wanted = {name: demand + kept.get(name, 0) for name, demand in demands.items()}
    for count, (name, demand) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        shares[name] = min(demand, left // (len(wanted) - count))
        left -= shares[name]
    most = max(kept, key=lambda name: kept[name], default=None)
    if most is None or kept[most] <= shares[most]:
        return {name: share - kept.get(name, 0) for name, share in shares.items()}
    # This name has kept more than its share, so it gets nothing, and the others divide the rest.
    others = {name: demand for name, demand in demands.items() if name != most}
    kept_by_others = {name: num_bytes for name, num_bytes in kept.items() if name != most}
    return {most: 0, **fair_shares(max(0, total - kept[most]), others, kept_by_others)}


@dataclass(slots=True)
class BookedExtent:
    """The record of one extent. Others read it; only `MemoryBudget` changes it."""

    num_bytes: int
    numa_node: int | None
    owner: int | None = None
    """The last owner that has used it. Only this owner may use it again."""
    pool: str | None = None
    """The pool that it belongs to. None if it is spare."""
    row: int = 0
    """Its row in that pool."""
    recalled: bool = False
    """The pool has lost it, but clients may still have it mapped."""
    is_given_up: bool = False
    """It must not be used again. It is closed when its row has been recalled."""
    maps: Counter[str] = field(default_factory=Counter)
    """How often each client was handed the extent without having released it."""
    had: set[str] = field(default_factory=set)
    """The living clients that were ever handed the extent, whether they have released it or not."""
    is_kept: bool = False
    """It is closed, but a process still uses its memory."""

    @property
    def is_spare(self) -> bool:
        return self.pool is None

    @property
    def waiting_row(self) -> int | None:
        """The row of a pool that waits for this memory, or None."""
        return None if self.pool is None or self.recalled else self.row

    @property
    def may_change_hands(self) -> bool:
        """Whether its pool has lost it and every client has released it."""
        return self.recalled and not self.maps


@dataclass(slots=True)
class Row:
    """A row of a pool: one extent for each rank, all with the slots from `first_slot` on. `extents` holds their
    numbers, and 0 for an extent that was taken back. A `recalled` row waits until clients have released its extents.

    Others read it; only `MemoryBudget` changes it.
    """

    first_slot: int
    num_slots: int
    extents: tuple[int, ...]
    num_bytes: int
    recalled: bool = False


@dataclass(slots=True)
class BookedPool:
    """The record of one pool: the rows that it has, and the slots that its sessions request. Not locked.

    Rows are numbered from 0 and lie end to end: the first slot of a row follows the last slot of the row before. The
    last row is recalled first. While a recalled row is left, the pool gets no new one.
    """

    layout: PoolLayout
    idle_since: int
    """The moment at which its last session ended, on the budget's own count of moments."""
    requests: dict[str, int | None] = field(default_factory=dict)
    """The slots that each session requests. None requests all that there are."""
    wanted: int | None = None
    """The slots that the pool can use now, because extents are given on demand. None for all that it may have."""
    removed: bool = False
    """The pool is being removed: it loses its rows, and then its record."""
    rows: dict[int, Row] = field(default_factory=dict)

    def active_rows(self) -> list[int]:
        """Return the numbers of the rows that were not recalled."""
        return sorted(number for number, row in self.rows.items() if not row.recalled)

    def has_recalled_rows(self) -> bool:
        return any(row.recalled for row in self.rows.values())

    def held_bytes(self) -> int:
        """Return the bytes of the rows that were not recalled."""
        return sum(row.num_bytes for row in self.rows.values() if not row.recalled)

    def held_slots(self) -> int:
        """Return the slots of the rows that were not recalled."""
        return sum(row.num_slots for row in self.rows.values() if not row.recalled)

    def has_partial_row(self) -> bool:
        """Whether a row that was not recalled has fewer slots than a whole row."""
        return any(row.num_slots < self.layout.row_slots for row in self.rows.values() if not row.recalled)

    def demand_slots(self) -> int | None:
        """Return the slots that the pool should have, or None for all that there are."""
        if not self.requests or self.removed:
            return 0
        bounds = [bound for bound in (self._requested_slots(), self.wanted) if bound is not None]
        return min(bounds, default=None)

    def missing_slots(self, share: int) -> int:
        """Return the slots of the next row that the pool should get, within its demand and a share of `share` bytes. It
        does not matter whether there is memory for the row."""
        demand = self.demand_slots()
        within = self.layout.slots_within(max(0, share - self.held_bytes()))
        return within if demand is None else max(0, min(within, demand - self.held_slots()))

    def missing_bytes(self, share: int) -> int:
        """Return the bytes of all rows that the pool lacks within its demand and a share of `share` bytes. 0 while it
        can get no row, because a recalled one is left."""
        if self.has_recalled_rows():
            return 0
        layout, demand = self.layout, self.demand_slots()
        left = max(0, share - self.held_bytes())
        rows = left // layout.row_bytes
        if demand is not None:
            demand = max(0, demand - self.held_slots())
            rows = min(rows, demand // layout.row_slots)
        if self.has_partial_row():
            return rows * layout.row_bytes
        part = layout.slots_within(left - rows * layout.row_bytes)
        if demand is not None:
            part = min(part, demand - rows * layout.row_slots)
        return rows * layout.row_bytes + (sum(layout.sizes(part)) if part else 0)

    def next_row_slots(self, share: int, available: int, *, whole: bool) -> int:
        """Return the slots of the row that the pool gets now from `available` bytes. 0 if it gets none.

        A pool has at most one partial row. With `whole`, a pool that has rows, and a share for another whole one, gets
        no partial row: it waits until there is memory for the whole row.
        """
        if self.has_recalled_rows():
            return 0
        layout, slots = self.layout, self.missing_slots(share)
        if slots == layout.row_slots and layout.row_bytes <= available:
            return slots
        if self.has_partial_row():
            return 0
        if whole and slots == layout.row_slots and self.active_rows():
            return 0
        return min(slots, layout.slots_within(available))

    def _requested_slots(self) -> int | None:
        """Return the largest request of all sessions."""
        requests = list(self.requests.values())
        return None if None in requests else max(slots for slots in requests if slots is not None)
