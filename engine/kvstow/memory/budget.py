"""The node's budget: which extents there are, and which pool has them. Decisions only, no memory is touched here."""

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
    """Create an extent with this number."""

    extent: int
    num_bytes: int
    numa_node: int | None


class Give(NamedTuple):
    """The extent now belongs to this rank, in this row of the pool. The slots of a row, from `first_slot` on, are
    usable once all its extents are given, as far as they are populated."""

    extent: int
    pool: str
    rank: int
    row: int
    first_slot: int
    num_slots: int


class Recall(NamedTuple):
    """The pool loses its last row: evict what the slots hold, allocate none of them, and ask each client that mapped
    one of the extents to release it."""

    pool: str
    row: int
    extents: tuple[int, ...]


class TakeBack(NamedTuple):
    """No client has the extent any more, so it leaves the pool and is spare."""

    extent: int
    pool: str


class Close(NamedTuple):
    """Give the spare extent's memory back to the machine, here and at the keeper. An extent that is in `closed` counts
    as allocated until `free`."""

    extent: int


Step = Create | Give | Recall | TakeBack | Close


class MemoryBudget:
    """Shares `total_bytes` among pools, in extents.

    Extents exist before there is a pool, spread over the NUMA nodes, so that they can be populated. A pool whose
    sessions want more gets spare extents. When there are none, they are recalled from pools without sessions, starting
    with the pool that has had none for the longest time, then from pools above their fair share, those of the owner
    first that has the most above its own. However many pools an owner has, others lose nothing of theirs by it.

    Guarantees: the extents that exist never exceed the total, unless a restart or a lower total made it so; nothing is
    created then. An extent belongs to one row of one pool. It changes hands only after its pool has lost it, and each
    client that mapped it has released it or has died. An extent that one owner has used is never given to another: it
    is closed, and counts until `free` reports that its memory is free. So a client that keeps what it claims to have
    released makes the node smaller, never larger. The rows of a pool lie end to end: see `BookedPool`.

    `plan` decides; the caller carries out its steps in their order before it calls anything else. Not locked.
    """

    def __init__(
        self, total_bytes: int, extent_bytes: int = 1 << 30, numa_nodes: Sequence[int | None] = (None,)
    ) -> None:
        """Raises `ConfigError`."""
        _require_units("memory", total_bytes)
        _require_units("extent size", extent_bytes)
        self.total_bytes, self.extent_bytes = total_bytes, extent_bytes
        self.extents: dict[int, BookedExtent] = {}
        """All extents by number. Others read it. No number is used twice."""
        self.closed: dict[int, BookedExtent] = {}
        """The closed extents that were handed out, and whose memory the kernel has not taken back yet."""
        self.allocated_bytes = 0
        """The memory of all extents, including the closed ones."""
        self._numa_nodes = tuple(numa_nodes) or (None,)
        self._last_number = 0
        self._pools: dict[str, BookedPool] = {}
        self._moments = count(1)  # orders the ends of sessions

    # -- what engines, clients and operators do -------------------------------------------------------------

    def add_pool(self, name: str, layout: PoolLayout) -> None:
        """Raises `ConflictError` if the name is taken. A pool from before a restart may have extents of another size
        than the budget's."""
        if name in self._pools:
            raise ConflictError(f"there is a pool {name} already")
        self._pools[name] = BookedPool(layout, next(self._moments))

    def remove_pool(self, name: str) -> None:
        """Recall all its extents. The pool is gone once clients have released them. Raises `ConflictError` while it has
        sessions."""
        pool = self.pool(name)
        if pool.asks:
            raise ConflictError(f"pool {name} has sessions: {', '.join(sorted(pool.asks))}")
        pool.removed = True

    def attach(self, name: str, session: str, slots: int | None = None) -> None:
        """The session asks for this many slots, or for all that there are. The largest request of all sessions
        counts."""
        pool = self.pool(name)
        if pool.removed:
            raise ConflictError(f"pool {name} is being removed")
        pool.asks[session] = slots

    def detach(self, name: str, session: str) -> None:
        """The session has ended. Its pool keeps its extents until others need them."""
        pool = self.pool(name)
        if pool.asks.pop(session, 0) != 0 and not pool.asks:
            pool.idle_since = next(self._moments)

    def set_nodes(self, name: str, nodes: Sequence[int | None]) -> None:
        """Set the NUMA node of each rank's device for new rows. None changes nothing: the node is not known."""
        pool = self.pool(name)
        ranks = zip(pool.layout.ranks, nodes, strict=True)
        known = tuple(rank if node is None else replace(rank, numa_node=node) for rank, node in ranks)
        pool.layout = replace(pool.layout, ranks=known)

    def record_mapping(self, client: str, number: int, *, is_process: bool = True) -> None:
        """Call it before the client gets the extent's descriptor. Raises `ConflictError` if it must not get it. A
        client that is no process gets no descriptor."""
        extent = self.find(number)
        if extent.is_spare or extent.recalled:
            raise ConflictError(f"extent {number} is not in use, or was recalled: it may not be mapped")
        extent.maps[client] += 1
        if is_process:
            extent.had.add(client)

    def record_unmapping(self, client: str, number: int) -> None:
        """The client reports that it has released the extent. Raises `InvalidRequestError` if it had no mapping."""
        maps = self.find(number).maps
        if client not in maps:
            raise InvalidRequestError(f"{client} has no mapping of extent {number}")
        maps[client] -= 1
        if not maps[client]:
            del maps[client]

    def record_death(self, client: str) -> None:
        """The client's process has ended, as its pidfd shows: it has no mappings any more."""
        for extent in (*self.extents.values(), *self.closed.values()):
            extent.maps.pop(client, None)
            extent.had.discard(client)

    def record_departure(self, client: str) -> None:
        """The client reports that it has no mappings any more. Its process lives, and may keep some all the same."""
        for extent in (*self.extents.values(), *self.closed.values()):
            extent.maps.pop(client, None)

    def clients(self) -> set[str]:
        """The clients that were ever handed an extent which is still there, and that live. O(extents x clients)."""
        return {client for extent in (*self.extents.values(), *self.closed.values()) for client in extent.had}

    def restore_spare(self, number: int, num_bytes: int, numa_node: int | None, owner: int | None) -> None:
        """Restore an extent of an earlier service that belongs to no pool."""
        self._restore(number, BookedExtent(num_bytes, numa_node, owner))

    def restore_row(
        self, name: str, first_slot: int, num_slots: int, extents: Sequence[tuple[int, int, int | None]]
    ) -> None:
        """Restore the next row of a pool from before a restart: the number, size and NUMA node of each extent. The
        caller then records the mappings of clients that may be alive. Raises `ConflictError`."""
        pool = self.pool(name)
        sizes = [num_bytes for _, num_bytes, _ in extents]
        if first_slot != pool.held_slots() or not pool.layout.has_row(num_slots, sizes):
            raise ConflictError(f"{num_slots} slots from {first_slot} on, in {sizes} bytes, are no row of pool {name}")
        row = len(pool.rows)
        for number, num_bytes, node in extents:
            self._restore(number, BookedExtent(num_bytes, node, pool.layout.owner, name, row))
        pool.rows[row] = Row(first_slot, num_slots, tuple(number for number, _, _ in extents), sum(sizes))

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
        """Account for memory of an earlier service that is not used again. Returns a number that no other extent
        has."""
        number = min((0, *self.closed)) - 1
        self.closed[number] = BookedExtent(num_bytes, None, is_kept=True)
        self.allocated_bytes += num_bytes
        return number

    def give_up(self, number: int) -> None:
        """The extent cannot be handed out any more: take back its row and those above it, and close it."""
        self.find(number).is_given_up = True

    def keep(self, number: int) -> None:
        """Some process still has the memory of a closed extent: do not wait for it."""
        self.closed[number].is_kept = True

    def free(self, number: int) -> None:
        """The kernel has taken back the memory of a closed extent, so others can have it."""
        self.allocated_bytes -= self.closed.pop(number).num_bytes

    # -- what there is --------------------------------------------------------------------------------------

    def pool(self, name: str) -> BookedPool:
        """Others may set what it wants, and read the rest. Raises `NotFoundError`."""
        if name not in self._pools:
            raise NotFoundError(f"there is no pool {name}")
        return self._pools[name]

    def find(self, number: int) -> BookedExtent:
        """Raises `NotFoundError`."""
        if number not in self.extents:
            raise NotFoundError(f"there is no extent {number}")
        return self.extents[number]

    def mappers(self, number: int) -> list[str]:
        """The clients that have not released the extent."""
        return sorted(self.find(number).maps)

    @property
    def spare_bytes(self) -> int:
        return sum(extent.num_bytes for extent in self.extents.values() if extent.is_spare)

    @property
    def recalled_bytes(self) -> int:
        """The memory of extents that were recalled, and that clients still have."""
        return sum(extent.num_bytes for extent in self.extents.values() if extent.recalled)

    @property
    def closing_bytes(self) -> int:
        """The memory of closed extents that no process is known to keep."""
        return sum(extent.num_bytes for extent in self.closed.values() if not extent.is_kept)

    def fair_shares(self) -> dict[str, int]:
        """Bytes that each pool with sessions may have at least, if it wants them: first owners share, and then the
        pools of each. What processes keep of an owner's memory counts in that owner's share. Who keeps some gets no
        more than makes half of what other owners do not keep, so that no owner comes to keep everything in parts."""
        demands: dict[int | None, dict[str, int]] = {}
        for name, pool in self._pools.items():
            if pool.asks:
                slots = pool.demand_slots()
                demand = self.total_bytes if slots is None else pool.layout.bytes_of(slots)
                demands.setdefault(pool.layout.owner, {})[name] = demand
        kept = self.kept_bytes()
        wanted = {owner: sum(demands.get(owner, {}).values()) for owner in {*demands, *kept}}
        for owner, num_bytes in kept.items():
            most = most_of(self.total_bytes, kept.total() - num_bytes)
            wanted[owner] = min(wanted[owner], max(0, most - num_bytes))
        of_owners = fair_shares(self.total_bytes, wanted, kept)
        shares: dict[str, int] = {}
        for owner, of_pools in demands.items():
            shares |= fair_shares(of_owners[owner], of_pools)
        return shares

    def kept_bytes(self) -> Counter[int | None]:
        """What processes keep of the memory that is not used again, by owner. That of an earlier service has none."""
        kept: Counter[int | None] = Counter()
        for extent in self.closed.values():
            if extent.is_kept:
                kept[extent.owner] += extent.num_bytes
        return kept

    def held_bytes(self) -> Counter[int]:
        """What the pools of each owner have, without what was recalled."""
        held: Counter[int] = Counter()
        for pool in self._pools.values():
            held[pool.layout.owner] += pool.held_bytes()
        return held

    def check_integrity(self) -> None:
        """Raises `IntegrityError` where rows and extents contradict each other."""
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
        """What is to be done now. A second call without anything in between returns nothing."""
        steps: list[Step] = []
        self._recall_lost(steps)
        self._take_back(steps)
        self._close_surplus(steps)
        shares = self.fair_shares()
        self._give_rows(steps, shares, whole=True)
        while self._recall_for(steps, shares):
            self._take_back(steps)  # of rows that no client has mapped
            self._close_surplus(steps)
            self._give_rows(steps, shares, whole=True)
        if not self.recalled_bytes:
            self._give_rows(steps, shares, whole=False)
        if not self.closing_bytes:  # a row may wait for it, and would find the rest taken
            self._create_spares(steps)
        return steps

    def _recall_lost(self, steps: list[Step]) -> None:
        """Recall the rows of removed pools, and rows with an extent that was given up, with those above them."""
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
        """Row by row, to the owner with the least memory first, and of that owner's pools to the one with the least.
        `whole`: see `BookedPool.next_row_slots`."""

        def order(name: str) -> tuple[int, int, str]:
            pool = self._pools[name]
            return of_owners[pool.layout.owner], pool.held_bytes(), name

        while True:
            available, of_owners = self._available(), self.held_bytes()
            for name in sorted(shares, key=order):
                if slots := self._pools[name].next_row_slots(shares[name], available, whole=whole):
                    if not self._give_row(steps, name, slots):
                        return
                    break
            else:
                return

    @property
    def _remaining_bytes(self) -> int:
        """What is allocated once the extents that are being closed are free."""
        return self.allocated_bytes - self.closing_bytes

    def _available(self) -> int:
        """Bytes that can be given soon: spare, being closed, or not yet taken."""
        return self.total_bytes - self._remaining_bytes + self.spare_bytes

    def _give_row(self, steps: list[Step], name: str, num_slots: int) -> bool:
        """Returns False, and gives nothing, if memory that is being closed has to be free first."""
        pool = self._pools[name]
        number, first_slot = len(pool.rows), pool.held_slots()
        sizes, spares = pool.layout.sizes(num_slots), list[int | None]()
        for size, place in zip(sizes, pool.layout.ranks, strict=True):
            spares.append(self._find_spare(size, place.numa_node, pool.layout.owner, spares))
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
        """Close spare extents, but for those that are taken, until so many bytes can be taken for new ones. Returns
        whether they can be taken at once."""
        while self.total_bytes - self._remaining_bytes < num_bytes:
            self._close_spare(steps, owner, taken)
        return self.total_bytes - self.allocated_bytes >= num_bytes

    def _close_spare(self, steps: list[Step], owner: int | None, taken: Container[int | None] = ()) -> None:
        """Close the newest spare extent, which is populated last: one that this owner may not have, if there is any."""
        spares = (
            (number, extent.owner) for number, extent in self.extents.items() if extent.is_spare and number not in taken
        )
        number, _ = max(spares, key=lambda spare: (spare[1] not in (None, owner), spare[0]))
        self._close(number)
        steps.append(Close(number))

    def _close(self, number: int) -> None:
        """An extent that was handed out counts until the kernel has its memory back."""
        extent = self.extents.pop(number)
        if extent.owner is None:
            self.allocated_bytes -= extent.num_bytes
        else:
            self.closed[number] = extent

    def _find_spare(
        self, num_bytes: int, node: int | None, owner: int, taken: Container[int | None] = ()
    ) -> int | None:
        """A spare extent of this size that the owner may have: on the node, or else on the node with the most spare
        memory. The oldest of them, because it is populated first."""
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
        """Recall rows for pools that have less than their share, and whether there were any."""
        surplus = max(0, self._remaining_bytes - self.total_bytes)
        needed = sum(self._pools[name].missing_bytes(share) for name, share in shares.items())
        short = surplus + needed - max(0, self._available()) - self.recalled_bytes
        before = len(steps)
        for may_cross in (False, True) if surplus or self._is_starving(shares) else (False,):
            for name, row in recall_order(self._pools, shares, may_cross=may_cross):
                if short <= 0:
                    break
                short -= self._recall(steps, name, row)
        return len(steps) > before

    def _is_starving(self, shares: dict[str, int]) -> bool:
        """Whether a pool has no row, and a share for one."""
        pools = ((self._pools[name], share) for name, share in shares.items())
        return any(not pool.rows and pool.missing_slots(share) > 0 for pool, share in pools)

    def _recall(self, steps: list[Step], name: str, number: int) -> int:
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
    """Pools and numbers of rows that may be recalled: those of pools without sessions, which have no share, then those
    of pools above their share, as long as they are. The owner comes first that has the most above the shares of all its
    pools, and of those the largest. `may_cross`: also the row with which a pool falls below its share."""
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
