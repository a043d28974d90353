"""The memory of one pool: its rows, the workers that have them, and how rows are granted and revoked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial

from kvstow.attach.calls import ExtentBytes, ExtentGrant, GrantedExtents, PopulatedExtents, RevokedExtents
from kvstow.attach.channel import close_fds
from kvstow.control.administration import Sweep
from kvstow.control.indexjournal import IndexJournal
from kvstow.errors import ConflictError, PinError
from kvstow.memfd import open_for_client
from kvstow.memory.extents import Extent
from kvstow.memory.nodememory import NodeMemory
from kvstow.memory.rows import Row
from kvstow_service.node.pools.memoryholder import MemoryHolder
from kvstow_service.node.pools.nodepool import NodePool

MAX_FDS = 250
"""How many extents one frame carries."""
_SLICES_PER_TURN = 16
USERS_SECONDS = 1.0
"""The age up to which `PoolMemory.users_from` returns what it found before. It takes the pool's lock to look."""

Post = Callable[[Callable[[], object]], object]
"""Has the attach server's thread call something."""

logger = logging.getLogger("kvstow.node")


class PoolWorker:
    """A worker's share of memory. `place` is the index of its extent in a row. `rows` has the extents that it was sent,
    by the number of the row."""

    __slots__ = ("client", "has_all", "place", "rank", "rows", "session")

    def __init__(self, session: MemoryHolder, rank: int) -> None:
        self.session, self.rank, self.place = session, rank, session.pool.place_of(rank)
        self.client = session.client(rank)
        self.rows: dict[int, int] = {}
        self.has_all = not session.control.is_engine
        """Whether the worker has reported that it has all of the pool's memory: see `GrantedExtents`. The node's own
        transfers have nothing of an earlier service, so they need no such message."""


class PoolMemory:
    """Brings a pool and its workers in line with the rows that the budget has given it. Used by the memory thread.

    The pool itself counts as a client of its extents, under `holder`, from the moment it gets a row until it has
    evicted the row's blocks. No extent changes hands before that.

    Three orders matter. The pool has a row before a worker gets it. A mapping is recorded in the budget before its
    descriptor is sent. Workers are asked to release a row only when none of its slots is in use any more.
    """

    def __init__(self, pool: NodePool, memory: NodeMemory, post: Post, on_smaller: Callable[[], object]) -> None:
        """`on_smaller` is called with `post` when the pool has lost slots."""
        self.pool, self.holder = pool, f"pool {pool.name}"
        self.workers: dict[str, PoolWorker] = {}
        self.notice: str | None = None
        """A sentence that says why memory that the pool should get or give back must wait, else None."""
        self.failure: str | None = None
        """A sentence that says why a worker lacks the pool's memory, else None."""
        self.waits = False
        """Whether there is something to try again soon."""
        self.claims: set[str] = set()
        """The sessions of an earlier service that may come back for the pool's memory."""
        self._users: set[str] = set()
        """The sessions of engines that used slots of recalled rows when `users_from` last looked."""
        self._users_at = -USERS_SECONDS
        self._memory, self._budget, self._post = memory, memory.budget, post
        self._on_smaller = on_smaller
        self._held: dict[int, tuple[int, ...]] = {}
        """The extents of the rows that the pool holds, by the row's number."""
        self._sweep: Sweep | None = None
        self._num_full = 0
        """How many leading rows are populated."""
        self._announced: dict[int, int] = {}
        """How many populated bytes of each extent were announced to the workers."""
        self._num_announced = 0
        """How many leading rows were announced as populated."""
        self._wanted_rows = 0

    @property
    def is_empty(self) -> bool:
        """Whether it has no memory, and no worker of an engine."""
        has_engines = any(worker.session.control.is_engine for worker in self.workers.values())
        return not self._held and not has_engines and not self._budget.pool(self.pool.name).rows

    def users_from(self, low: int) -> set[str]:
        """The sessions of engines that use slots from `low` on, or did so within the last second."""
        now = time.monotonic()
        if now - self._users_at >= USERS_SECONDS:
            with self.pool.lock:
                sessions = self.pool.attached()
            self._users = {one.name for one in sessions if one.is_engine and one.uses_slots_from(low)}
            self._users_at = now
        return self._users

    def want(self) -> bool:
        """Ask for as many whole rows as are used, plus one. Returns True if that is more than before."""
        row_slots = self._budget.pool(self.pool.name).layout.row_slots
        rows = 1 - (-self.pool.used_slots // row_slots)
        if rows <= self._wanted_rows:
            return False
        self._wanted_rows = rows
        self.pool.grow_above = (rows - 1) * row_slots
        self._budget.pool(self.pool.name).wanted = rows * row_slots
        return True

    def follow(self) -> bool:
        """Call after each change of the budget. Returns True if the budget has to decide again."""
        rows = self._budget.pool(self.pool.name).rows
        active = sum(not row.recalled for row in rows.values())
        notice, failure = self.notice, self.failure
        self.notice, self.failure, self.waits = None, None, False
        self._take(rows, active)
        changed = self._give_back(active)
        self._show(rows)
        changed |= self._give_up_sealed(rows)
        for worker in list(self.workers.values()):
            changed |= self._grant(worker, rows)
        if self.notice is not None and self.notice != notice:
            logger.info("%s", self.notice)
        if self.failure is not None and self.failure != failure:
            logger.warning("%s", self.failure)
        return changed

    def restore(self) -> None:
        """Take the rows that have survived a restart. Call before the budget decides."""
        rows = self._budget.pool(self.pool.name).rows
        self._take(rows, len(rows))
        self._show(rows)

    def dissolve(self) -> None:
        """Remove the memory of a pool that is gone and has no sessions."""
        for number in sorted(self._held, reverse=True):
            self._drop_claim(number)

    # -- growing --------------------------------------------------------------------------------------------

    def _take(self, rows: Mapping[int, Row], active: int) -> None:
        for number in range(len(self._held), active):
            self._held[number] = rows[number].extents
            for extent in rows[number].extents:
                self._budget.record_mapping(self.holder, extent, is_process=False)
        try:
            while len(self.pool.extents) < active:
                row = rows[len(self.pool.extents)]
                if isinstance(self.pool.journal, IndexJournal):
                    self.pool.journal.reserve(row.first_slot, row.first_slot + row.num_slots)
                self.pool.add_extent(row.num_slots)
        except ConflictError as error:
            self.notice, self.waits = f"pool {self.pool.name} gets no memory yet: {error}", True
        except PinError as error:
            self.failure, self.waits = f"pool {self.pool.name} gets no memory yet: {error}", True

    def _show(self, rows: Mapping[int, Row]) -> None:
        """Let the pool use what is populated on all ranks, and announce to the workers how far they may map."""
        shown = len(self.pool.extents)
        self._num_full = min(self._num_full, shown)
        while self._num_full < shown and self._populated_slots(rows[self._num_full]) == rows[self._num_full].num_slots:
            self._num_full += 1
        slots = 0
        if shown:
            last = rows[min(self._num_full, shown - 1)]
            slots = last.first_slot + self._populated_slots(last)
        while self.pool.populated_slots < slots:
            self.pool.set_populated(min(slots, self.pool.populated_slots + self.pool.slice_slots))
        self._announce_populated(rows)

    def _populated_slots(self, row: Row) -> int:
        layout = self._budget.pool(self.pool.name).layout
        least = row.num_slots
        for number, rank in zip(row.extents, layout.ranks, strict=True):
            extent = self._memory.extents.get(number)
            least = min(least, 0 if extent is None else extent.populated_bytes // rank.slot_stride)
        return least

    def _announce_populated(self, rows: Mapping[int, Row]) -> None:
        first = min(self._num_announced, self._num_full)
        for place in range(len(self.pool.stored_slot_bytes)):
            news = []
            for number in range(first, len(self.pool.extents)):
                extent_id = rows[number].extents[place]
                extent = self._memory.extents.get(extent_id)
                if extent is not None and self._announced.get(extent_id, 0) < extent.populated_bytes:
                    self._announced[extent_id] = extent.populated_bytes
                    news.append((number, ExtentBytes(extent_id, extent.populated_bytes)))
            for worker in self.workers.values() if news else ():
                if worker.place == place and (known := tuple(one for number, one in news if number in worker.rows)):
                    worker.session.link.push(PopulatedExtents(known), rank=worker.rank)
        self._num_announced = self._num_full

    def _give_up_sealed(self, rows: Mapping[int, Row]) -> bool:
        """Give up sealed extents of rows that are not populated yet, because the populator skips them. Returns True if
        there are any."""
        for number in range(self._num_full, len(self.pool.extents)):
            for extent_id in () if rows[number].recalled else rows[number].extents:
                extent = self._memory.extents.get(extent_id)
                if extent is not None and not extent.is_sound:
                    self._give_up(extent_id)
                    return True
        return False

    def _give_up(self, extent_id: int) -> None:
        self._budget.give_up(extent_id)
        self.failure = f"an engine has sealed memory of pool {self.pool.name}, so it is taken back"

    # -- handing out ----------------------------------------------------------------------------------------

    def _grant(self, worker: PoolWorker, rows: Mapping[int, Row]) -> bool:
        """Send the worker the extents that it lacks. The first message is sent even without extents, so that the worker
        releases those of an earlier service. Returns True if an extent was given up instead."""
        if worker.has_all and len(worker.rows) == len(self.pool.extents):
            return False
        given_up = False
        grants, extents = list[ExtentGrant](), list[Extent]()
        for number in range(len(self.pool.extents)):
            if number in worker.rows or rows[number].recalled:
                continue
            row = rows[number]
            extent_id = row.extents[worker.place]
            extent = self._memory.extents.get(extent_id)
            if extent is not None and not extent.is_sound:
                self._give_up(extent_id)
                given_up = True
                break
            if extent is not None:
                slots = (row.first_slot, row.num_slots)
                grants.append(ExtentGrant(extent_id, number, *slots, extent.num_bytes, extent.populated_bytes))
                extents.append(extent)
        for start in range(0, len(grants) if worker.has_all else max(1, len(grants)), MAX_FDS):
            end = start + MAX_FDS
            if not self._send(worker, grants[start:end], extents[start:end], is_all=end >= len(grants)):
                return given_up
        worker.has_all = True
        return given_up

    def _send(self, worker: PoolWorker, grants: list[ExtentGrant], extents: list[Extent], *, is_all: bool) -> bool:
        """Send the extents. Returns False if nothing was sent."""
        session = worker.session
        if grants:
            try:
                session.control.map_memory(worker.client)
            except ConflictError:
                return False  # the worker was just lost
        for grant in grants:
            self._budget.record_mapping(worker.client, grant.extent_id)
        stride = self._budget.pool(self.pool.name).layout.ranks[worker.place].slot_stride
        fds = list[int]()
        try:
            for extent in extents:
                fds.append(open_for_client(extent.fd))
            # Two actions of one thread, in this order: the worker cannot mention an extent that is not in `RankMemory`.
            self._post(partial(session.ranks[worker.rank].granted, grants))
            session.link.push(GrantedExtents(stride, tuple(grants), is_all), rank=worker.rank, fds=fds)
        except OSError as error:
            for grant in grants:
                self._budget.record_unmapping(worker.client, grant.extent_id)
            self.failure = f"worker {worker.client} cannot be sent its memory: {error.strerror or error}"
            self.waits = True
            return False
        finally:
            close_fds(fds)
        worker.rows.update((grant.number, grant.extent_id) for grant in grants)
        return True

    # -- shrinking ------------------------------------------------------------------------------------------

    def _give_back(self, active: int) -> bool:
        surplus = len(self.pool.extents) - active
        if self._sweep is None and surplus > 0:
            self._sweep = self.pool.drop_extents(surplus)
        if self._sweep is not None:
            self._evict(self._sweep)
        left = [number for number in self._held if number >= max(active, len(self.pool.extents))]
        for number in sorted(left, reverse=True):
            self._revoke(number)
            self._drop_claim(number)
        return bool(left)

    def _evict(self, sweep: Sweep) -> None:
        for _ in range(_SLICES_PER_TURN):
            if not sweep.step():
                self._sweep = None
                self._post(self._on_smaller)
                logger.info("pool %s has given up memory; it has %d slots now", self.pool.name, self.pool.capacity)
                return
            if sweep.waiting:
                break
        self.waits = True

    def _revoke(self, number: int) -> None:
        for worker in self.workers.values():
            extent = worker.rows.pop(number, None)
            if extent is not None:
                session, rank = worker.session, worker.rank
                self._post(partial(session.ranks[rank].revoked, (extent,)))
                session.link.push(RevokedExtents((extent,)), rank=rank)

    def revoke_all(self) -> None:
        """Ask the workers to release all rows, because the service ends."""
        for worker in self.workers.values():
            if worker.rows:
                worker.session.link.push(RevokedExtents(tuple(worker.rows.values()), at_end=True), rank=worker.rank)

    def _drop_claim(self, number: int) -> None:
        """Drop the pool's own claim to a row, whose slots no longer hold anything of the pool."""
        for extent in self._held.pop(number):
            self._announced.pop(extent, None)
            self._budget.record_unmapping(self.holder, extent)
