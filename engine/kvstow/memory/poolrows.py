"""The rows of one pool, in the books of the node's budget."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstow.memory.rows import PoolLayout


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
    is recalled first, and while a recalled row is left, the pool gets no new one.
    """

    layout: PoolLayout
    idle_since: int
    asks: dict[str, int | None] = field(default_factory=dict)  # slots, by session
    wanted: int | None = None
    removed: bool = False
    rows: dict[int, Row] = field(default_factory=dict)

    def active_rows(self) -> list[int]:
        """The numbers of the rows that were not recalled."""
        return sorted(number for number, row in self.rows.items() if not row.recalled)

    def has_recalled_rows(self) -> bool:
        return any(row.recalled for row in self.rows.values())

    def held_bytes(self) -> int:
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
