"""The node's budget: decides which extents there are, and which pool has them. It touches no memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from kvstow.bytesize import format_size
from kvstow.errors import ConfigError, ConflictError, IntegrityError, InvalidRequestError, NotFoundError
from kvstow.memory.rows import UNIT_BYTES, BookedExtent, BookedPool, PoolLayout, Row, fair_shares
from kvstow.owners import most_of


class Create(NamedTuple):
    """Create the extent with this number."""

    extent: int
    num_bytes: int
    numa_node: int | None


class Give(NamedTuple):
    """Give the extent to this rank, for this row of the pool. The row's slots begin with `first_slot`. They are usable
    once all extents of the row are given and populated."""

    extent: int
    pool: str
    rank: int
    row: int
    first_slot: int
    num_slots: int


class Recall(NamedTuple):
    """Take the last row from the pool: evict the blocks in its slots, allocate none of the slots, and ask each client
    that has mapped one of the extents to release it."""

    pool: str
    row: int
    extents: tuple[int, ...]


class TakeBack(NamedTuple):
    """Make the extent spare. It leaves the pool, because no client has it mapped any more."""

    extent: int
    pool: str


class Close(NamedTuple):
    """Give the memory of a spare extent back to the machine, here and at the keeper. If the extent is in `closed`, it
    counts as allocated until `free`."""

    extent: int


Step = Create | Give | Recall | TakeBack | Close


class RowExtent(NamedTuple):
    """An extent of a row that is restored."""

    number: int
    num_bytes: int
    numa_node: int | None


class MemoryBudget:
    """Divides `total_bytes` among pools, in extents.

    Extents exist before there is a pool, so that they can be populated. They are spread over the NUMA nodes. A pool
    whose sessions request more slots gets spare extents. When there are none, the budget recalls extents from pools
    without sessions, beginning with the pool that has been without one the longest. After that it recalls them from
    pools above their fair share, beginning with the owner that is furthest above its own share. Owners share first,
    and then the pools of each owner, so an owner gains nothing by having many pools.

    Guarantees: the extents never exceed the total, except after a restart or a reduction of the total; no extent is
    created then. An extent belongs to one row of one pool. It changes hands only after its pool has lost it, and after
    each client that had it mapped has released it or has died. An extent that one owner has used is never given to
    another: it is closed, and counts as allocated until `free` reports that its memory is free. So a client that keeps
    memory which it claims to have released makes the node smaller, never larger. The rows of a pool lie end to end: see
    `BookedPool`.

    `plan` decides. The caller carries out the steps in their order before it calls anything else. Not locked.
    """

    def __init__(
        self, total_bytes: int, extent_bytes: int = 1 << 30, numa_nodes: Sequence[int | None] = (None,)
    ) -> None:
        """Raises `ConfigError`."""
        _require_units("memory", total_bytes)
        _require_units("extent size", extent_bytes)
        self.total_bytes, self.extent_bytes = total_bytes, extent_bytes
        self.extents: dict[int, BookedExtent] = {}
        """All extents by number, except the closed ones. Others may read it. No number is used twice."""
        self.closed: dict[int, BookedExtent] = {}
        """The closed extents whose memory the kernel has not taken back yet. Only extents that were handed out are
        here."""
        self.allocated_bytes = 0
        """The memory of all extents, including the closed ones."""
        self._numa_nodes = tuple(numa_nodes) or (None,)
        self._last_number = 0
        self._pools: dict[str, BookedPool] = {}
        self._moments = count(1)
        """Numbers that put the ends of sessions in order."""

    # -- actions of engines, clients and operators ------------------------------------------------------------

    def add_pool(self, name: str, layout: PoolLayout) -> None:
        """Add a pool without extents. A pool of an earlier service may have another extent size than the budget. Raises
        `ConflictError` if there is a pool of that name."""
        if name in self._pools:
            raise ConflictError(f"there is a pool {name} already")
        self._pools[name] = BookedPool(layout, next(self._moments))

    def remove_pool(self, name: str) -> None:
        """Recall all extents of a pool. The pool is removed once clients have released them. Raises `ConflictError` if
        it has sessions."""
        pool = self.pool(name)
        if pool.requests:
            raise ConflictError(f"pool {name} has sessions: {', '.join(sorted(pool.requests))}")
        pool.removed = True

    def attach(self, name: str, session: str, slots: int | None = None) -> None:
        """Begin a session that requests `slots` slots, or all that there are. The pool gets the largest request of its
        sessions, and not their sum, because they share blocks."""
        pool = self.pool(name)
        if pool.removed:
            raise ConflictError(f"pool {name} is being removed")
        pool.requests[session] = slots

    def detach(self, name: str, session: str) -> None:
        """End a session. Its pool keeps its extents until other pools need them."""
        pool = self.pool(name)
        if pool.requests.pop(session, 0) != 0 and not pool.requests:
            pool.idle_since = next(self._moments)

    def set_nodes(self, name: str, nodes: Sequence[int | None]) -> None:
        """Set the NUMA node of each rank's device, for new rows. None is an unknown node, and changes nothing."""
        pool = self.pool(name)
        ranks = zip(pool.layout.ranks, nodes, strict=True)
        known = tuple(rank if node is None else replace(rank, numa_node=node) for rank, node in ranks)
        pool.layout = replace(pool.layout, ranks=known)

    def record_mapping(self, client: str, number: int, *, is_process: bool = True) -> None:
        """Record that a client maps the extent, before the client gets the extent's descriptor. Raises `ConflictError`
        if it must not get it. With `is_process` False, the client gets no descriptor."""
        extent = self.find(number)
        if extent.is_spare or extent.recalled:
            raise ConflictError(f"extent {number} is not in use, or was recalled: it may not be mapped")
        extent.maps[client] += 1
        if is_process:
            extent.had.add(client)

    def record_unmapping(self, client: str, number: int) -> None:
        """Record that the client reports the extent as released. Raises `InvalidRequestError` if the client has no
        mapping of it."""
        maps = self.find(number).maps
        if client not in maps:
            raise InvalidRequestError(f"{client} has no mapping of extent {number}")
        maps[client] -= 1
        if not maps[client]:
            del maps[client]

    def record_death(self, client: str) -> None:
        """Record that the client's process has ended, as its pidfd shows. It has no mappings any more."""
        for extent in (*self.extents.values(), *self.closed.values()):
            extent.maps.pop(client, None)
            extent.had.discard(client)

    def record_departure(self, client: str) -> None:
        """Record that the client reports all extents as released. Its process lives, so it may keep some
        nevertheless."""
        for extent in (*self.extents.values(), *self.closed.values()):
            extent.maps.pop(client, None)

    def clients(self) -> set[str]:
        """Return the living clients that were ever handed one of the present extents. O(extents x clients)."""
        return {client for extent in (*self.extents.values(), *self.closed.values()) for client in extent.had}

    def restore_spare(self, number: int, num_bytes: int, numa_node: int | None, owner: int | None) -> None:
        """Restore an extent of an earlier service that belongs to no pool."""
        self._restore(number, BookedExtent(num_bytes, numa_node, owner))

    def restore_row(self, name: str, first_slot: int, num_slots: int, extents: Sequence[RowExtent]) -> None:
        """Restore the next row of a pool of an earlier service. The caller then records the mappings of clients that
        may be alive. Raises `ConflictError` if the pool cannot have such a row."""
        pool = self.pool(name)
        sizes = [one.num_bytes for one in extents]
        if first_slot != pool.held_slots() or not pool.layout.has_row(num_slots, sizes):
            raise ConflictError(
                f"pool {name} cannot have a row of {num_slots} slots from slot {first_slot} on, in extents of {sizes} "
                "bytes"
            )
        row = len(pool.rows)
        for one in extents:
            self._restore(one.number, BookedExtent(one.num_bytes, one.numa_node, pool.layout.owner, name, row))
        pool.rows[row] = Row(first_slot, num_slots, tuple(one.number for one in extents), sum(sizes))

    def _restore(self, number: int, extent: BookedExtent) -> None:
        _require_units("size of an extent", extent.num_bytes)
        if number in self.extents:
            raise ConflictError(f"extent {number} is restored twice")
        self._add(number, extent)

    def _add(self, number: int, extent: BookedExtent) -> None:
        self.extents[number] = extent
        self.allocated_bytes += extent.num_bytes
        self._last_number = max(self._last_number, number)

    def restore_closed(self, num_bytes: int) -> int:
        """Record memory of an earlier service that is never used again. Returns a number that no other extent has."""
        number = min((0, *self.closed)) - 1
        self.closed[number] = BookedExtent(num_bytes, None, is_kept=True)
        self.allocated_bytes += num_bytes
        return number

    def give_up(self, number: int) -> None:
        """Hand out the extent no more. `plan` recalls its row and the rows above it, and then closes the extent."""
        self.find(number).is_given_up = True

    def keep(self, number: int) -> None:
        """Record that a process still uses the memory of a closed extent, so that nothing waits for this memory."""
        self.closed[number].is_kept = True

    def free(self, number: int) -> None:
        """Record that the kernel has taken back the memory of a closed extent, so that others can have it."""
        self.allocated_bytes -= self.closed.pop(number).num_bytes

    # -- the present state ------------------------------------------------------------------------------------

    def pool(self, name: str) -> BookedPool:
        """Return the record of a pool. The caller may change `wanted`, and read the rest. Raises `NotFoundError`."""
        if name not in self._pools:
            raise NotFoundError(f"there is no pool {name}")
        return self._pools[name]

    def find(self, number: int) -> BookedExtent:
        """Return the record of an extent. Raises `NotFoundError`."""
        if number not in self.extents:
            raise NotFoundError(f"there is no extent {number}")
        return self.extents[number]

    def mappers(self, number: int) -> list[str]:
        """Return the clients that have not released the extent."""
        return sorted(self.find(number).maps)

    @property
    def spare_bytes(self) -> int:
        """The memory of extents that belong to no pool."""
        return sum(extent.num_bytes for extent in self.extents.values() if extent.is_spare)

    @property
    def recalled_bytes(self) -> int:
        """The memory of recalled extents that clients have not released yet."""
        return sum(extent.num_bytes for extent in self.extents.values() if extent.recalled)

    @property
    def closing_bytes(self) -> int:
        """The memory of closed extents that will soon be free, because no process is known to keep it."""
        return sum(extent.num_bytes for extent in self.closed.values() if not extent.is_kept)

    def fair_shares(self) -> dict[str, int]:
        """Return the bytes that each pool with sessions may have in any case, if it demands them.

        Owners share the total, and then the pools of each owner divide its share. Memory that an owner's processes will
        not give back counts in that owner's share. Such an owner may have and keep together at most half of what the
        other owners do not keep. Otherwise it could keep all memory in the end, part by part.
        """
        demands: dict[int | None, dict[str, int]] = {}
        for name, pool in self._pools.items():
            if pool.requests:
                slots = pool.demand_slots()
                demand = self.total_bytes if slots is None else pool.layout.bytes_of(slots)
                demands.setdefault(pool.layout.owner, {})[name] = demand
        kept = self.kept_bytes()
        wanted = {owner: sum(demands.get(owner, {}).values()) for owner in {*demands, *kept}}
        for owner, num_bytes in kept.items():
            most = most_of(self.total_bytes, kept.total() - num_bytes)
            wanted[owner] = min(wanted[owner], max(0, most - num_bytes))
        owner_shares = fair_shares(self.total_bytes, wanted, kept)
        shares: dict[str, int] = {}
        for owner, pool_demands in demands.items():
            shares |= fair_shares(owner_shares[owner], pool_demands)
        return shares

    def kept_bytes(self) -> Counter[int | None]:
        """Return the closed memory that processes will not give back, by owner. The owner of an earlier service's
        memory is unknown, so it is None."""
        kept: Counter[int | None] = Counter()
        for extent in self.closed.values():
            if extent.is_kept:
                kept[extent.owner] += extent.num_bytes
        return kept

    def held_bytes(self) -> Counter[int]:
        """Return the memory of each owner's pools, without recalled extents."""
        held: Counter[int] = Counter()
        for pool in self._pools.values():
            held[pool.layout.owner] += pool.held_bytes()
        return held

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if rows and extents contradict each other."""
        in_rows: Counter[int] = Counter()
        for name, pool in self._pools.items():
            for number, row in pool.rows.items():
                for extent in filter(None, row.extents):
                    in_rows[extent] += 1
                    found = self.extents.get(extent)
                    if found is None or (found.pool, found.row, found.owner) != (name, number, pool.layout.owner):
                        raise IntegrityError(f"extent {extent} is in row {number} of {name}, and is {found}")
        for extent, found in self.extents.items():
            if in_rows[extent] != (0 if found.is_spare else 1) or (found.is_spare and found.maps):
                raise IntegrityError(f"extent {extent} is in {in_rows[extent]} rows, and is {found}")

    # -- decisions ------------------------------------------------------------------------------------------

    def plan(self) -> list[Step]:
        """Decide what is to be done now, and return the steps. A second call with nothing in between returns none."""
        steps: list[Step] = []
        self._recall_lost(steps)
        self._take_back(steps)
        self._close_surplus(steps)
        shares = self.fair_shares()
        self._give_rows(steps, shares, whole=True)
        while self._recall_for(steps, shares):
            self._take_back(steps)  # no client may have mapped the recalled rows
            self._close_surplus(steps)
            self._give_rows(steps, shares, whole=True)
        if not self.recalled_bytes:
            self._give_rows(steps, shares, whole=False)
        if not self.closing_bytes:  # a row may wait for this memory, and must not find the rest taken
            self._create_spares(steps)
        return steps

    def _recall_lost(self, steps: list[Step]) -> None:
        """Recall the rows of pools that are being removed. Also recall each row with an extent that was given up, and
        the rows above it."""
        lost: dict[str, int] = {name: 0 for name, pool in self._pools.items() if pool.removed}
        for extent in self.extents.values():
            if extent.is_given_up and extent.pool is not None:
                lost[extent.pool] = min(extent.row, lost.get(extent.pool, extent.row))
        for name, first in lost.items():
            for number, row in sorted(self._pools[name].rows.items(), reverse=True):
                if number >= first and not row.recalled:
                    self._recall(steps, name, number)

    def _take_back(self, steps: list[Step]) -> None:
        for number, extent in list(self.extents.items()):
            if extent.pool is None or not extent.may_change_hands:
                continue
            pool = self._pools[extent.pool]
            row = pool.rows[extent.row]
            row.extents = tuple(0 if other == number else other for other in row.extents)
            if not any(row.extents):
                del pool.rows[extent.row]
            steps.append(TakeBack(number, extent.pool))
            extent.pool, extent.recalled = None, False
            if extent.is_given_up:
                self._close(number)
                steps.append(Close(number))
        for name in [name for name, pool in self._pools.items() if pool.removed and not pool.rows]:
            del self._pools[name]

    def _close_surplus(self, steps: list[Step]) -> None:
        while self._remaining_bytes > self.total_bytes and self.spare_bytes:
            self._close_spare(steps, owner=None)

    def _give_rows(self, steps: list[Step], shares: dict[str, int], *, whole: bool) -> None:
        """Give one row at a time to the owner with the least memory, and to the smallest of its pools. For `whole`, see
        `BookedPool.next_row_slots`."""

        def order(name: str) -> tuple[int, int, str]:
            pool = self._pools[name]
            return owner_bytes[pool.layout.owner], pool.held_bytes(), name

        while True:
            available, owner_bytes = self._available(), self.held_bytes()
            for name in sorted(shares, key=order):
                if slots := self._pools[name].next_row_slots(shares[name], available, whole=whole):
                    if not self._give_row(steps, name, slots):
                        return
                    break
            else:
                return

    @property
    def _remaining_bytes(self) -> int:
        """The bytes that stay allocated once the closing extents are free."""
        return self.allocated_bytes - self.closing_bytes

    def _available(self) -> int:
        """Return the bytes that can be given soon, because they are spare, closing or not allocated."""
        return self.total_bytes - self._remaining_bytes + self.spare_bytes

    def _give_row(self, steps: list[Step], name: str, num_slots: int) -> bool:
        """Give the pool its next row. Returns False, and gives nothing, if closing extents must be free first."""
        pool = self._pools[name]
        number, first_slot = len(pool.rows), pool.held_slots()
        sizes, spares = pool.layout.sizes(num_slots), list[int | None]()
        for size, rank_layout in zip(sizes, pool.layout.ranks, strict=True):
            spares.append(self._find_spare(size, rank_layout.numa_node, pool.layout.owner, spares))
        missing = sum(size for size, spare in zip(sizes, spares, strict=True) if spare is None)
        if not self._make_room(steps, missing, pool.layout.owner, spares):
            return False
        extents = []
        for rank, (size, extent) in enumerate(zip(sizes, spares, strict=True)):
            if extent is None:
                node = pool.layout.ranks[rank].numa_node
                extent = self._create(steps, size, self._emptiest_node() if node is None else node)
            found = self.extents[extent]
            found.owner, found.pool, found.row = pool.layout.owner, name, number
            steps.append(Give(extent, name, rank, number, first_slot, num_slots))
            extents.append(extent)
        num_bytes = sum(self.extents[extent].num_bytes for extent in extents)
        pool.rows[number] = Row(first_slot, num_slots, tuple(extents), num_bytes)
        return True

    def _make_room(self, steps: list[Step], num_bytes: int, owner: int, taken: Container[int | None]) -> bool:
        """Close spare extents, except those in `taken`, until new extents of `num_bytes` fit below the total. Returns
        whether they fit at once, and not only when the closing extents are free."""
        while self.total_bytes - self._remaining_bytes < num_bytes:
            self._close_spare(steps, owner, taken)
        return self.total_bytes - self.allocated_bytes >= num_bytes

    def _close_spare(self, steps: list[Step], owner: int | None, taken: Container[int | None] = ()) -> None:
        """Close one spare extent: if possible one that this owner must not have, and of those the newest, because the
        newest is populated last."""
        spares = (
            (number, extent.owner) for number, extent in self.extents.items() if extent.is_spare and number not in taken
        )
        number, _ = max(spares, key=lambda spare: (spare[1] not in (None, owner), spare[0]))
        self._close(number)
        steps.append(Close(number))

    def _close(self, number: int) -> None:
        """Close an extent. If it was handed out, it counts as allocated until the kernel has its memory back."""
        extent = self.extents.pop(number)
        if extent.owner is None:
            self.allocated_bytes -= extent.num_bytes
        else:
            self.closed[number] = extent

    def _find_spare(
        self, num_bytes: int, node: int | None, owner: int, taken: Container[int | None] = ()
    ) -> int | None:
        """Find a spare extent of this size that the owner may have. It lies on the given node, or else on the node with
        the most spare memory. The oldest one is chosen, because it is populated first."""
        by_node = self._bytes_by_node(spare_only=True)
        fitting = [
            (extent.numa_node != node, -by_node[extent.numa_node], number)
            for number, extent in self.extents.items()
            if extent.is_spare
            and extent.num_bytes == num_bytes
            and extent.owner in (None, owner)
            and number not in taken
        ]
        return min(fitting)[-1] if fitting else None

    def _emptiest_node(self) -> int | None:
        by_node = self._bytes_by_node(spare_only=False)
        return min(self._numa_nodes, key=lambda node: by_node[node])

    def _bytes_by_node(self, *, spare_only: bool) -> Counter[int | None]:
        by_node: Counter[int | None] = Counter()
        for extent in self.extents.values():
            if extent.is_spare or not spare_only:
                by_node[extent.numa_node] += extent.num_bytes
        return by_node

    def _create_spares(self, steps: list[Step]) -> None:
        while (left := self.total_bytes - self.allocated_bytes) >= UNIT_BYTES:
            self._create(steps, min(left, self.extent_bytes), self._emptiest_node())

    def _create(self, steps: list[Step], num_bytes: int, node: int | None) -> int:
        number = self._last_number + 1
        self._add(number, BookedExtent(num_bytes, node))
        steps.append(Create(number, num_bytes, node))
        return number

    def _recall_for(self, steps: list[Step], shares: dict[str, int]) -> bool:
        """Recall rows for pools that have less than their share. Returns whether any row was recalled."""
        surplus = max(0, self._remaining_bytes - self.total_bytes)
        needed = sum(self._pools[name].missing_bytes(share) for name, share in shares.items())
        missing = surplus + needed - max(0, self._available()) - self.recalled_bytes
        before = len(steps)
        for may_cross in (False, True) if surplus or self._is_starving(shares) else (False,):
            for name, row in recall_order(self._pools, shares, may_cross=may_cross):
                if missing <= 0:
                    break
                missing -= self._recall(steps, name, row)
        return len(steps) > before

    def _is_starving(self, shares: dict[str, int]) -> bool:
        """Whether a pool has no row although its share is large enough for one."""
        pools = ((self._pools[name], share) for name, share in shares.items())
        return any(not pool.rows and pool.missing_slots(share) > 0 for pool, share in pools)

    def _recall(self, steps: list[Step], name: str, number: int) -> int:
        """Recall a row. Returns its size in bytes."""
        row = self._pools[name].rows[number]
        row.recalled = True
        extents = tuple(filter(None, row.extents))
        for extent in extents:
            self.extents[extent].recalled = True
        steps.append(Recall(name, number, extents))
        return row.num_bytes


def _require_units(what: str, num_bytes: int) -> None:
    if num_bytes <= 0 or num_bytes % UNIT_BYTES:
        raise ConfigError(what, format_size(num_bytes), "a multiple of 2 MiB, more than 0")


def recall_order(
    pools: Mapping[str, BookedPool], shares: Mapping[str, int], *, may_cross: bool
) -> list[tuple[str, int]]:
    """Return the rows that may be recalled, in this order, as pairs of pool and row.

    First come the rows of pools without sessions, which have no share. Then come rows of pools above their share, until
    they are no longer above it: the next row is always that of the owner furthest above the shares of its pools, and of
    that owner's largest pool. With `may_cross`, the row that brings a pool below its share may also be recalled.
    """
    idle = sorted((pool.idle_since, name) for name, pool in pools.items() if name not in shares)
    order = [(name, row) for _, name in idle for row in reversed(pools[name].active_rows())]
    held = {name: pools[name].held_bytes() for name in shares}
    rows = {name: pools[name].active_rows() for name in shares}
    owners = {name: pools[name].layout.owner for name in shares}
    above: Counter[int] = Counter()
    for name, owner in owners.items():
        above[owner] += held[name] - shares[name]

    def may_lose_a_row(name: str) -> bool:
        if not rows[name]:
            return False
        if may_cross:
            return held[name] > shares[name]
        return held[name] - pools[name].rows[rows[name][-1]].num_bytes >= shares[name]

    while losers := [name for name in shares if may_lose_a_row(name)]:
        largest = max(losers, key=lambda name: (above[owners[name]], held[name], name))
        row = rows[largest].pop()
        held[largest] -= pools[largest].rows[row].num_bytes
        above[owners[largest]] -= pools[largest].rows[row].num_bytes
        order.append((largest, row))
    return order
