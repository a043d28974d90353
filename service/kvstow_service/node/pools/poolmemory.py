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

logger = logging.getLogger("kvstow.node")

MAX_FDS = 250
"""How many extents one frame can carry."""
_SLICES_PER_TURN = 16
"""How many slices of a pool that shrinks are evicted before the thread handles other work."""
USERS_SECONDS = 1.0
"""How long `PoolMemory.users_from` returns an earlier result, in seconds, because it must take the pool's lock to
look."""

Post = Callable[[Callable[[], object]], object]
"""Makes the attach server's thread call something."""


class PoolWorker:
    """A worker and its extents. `place` is the index of its extent in each row. `rows` maps the numbers of rows to the
    extents that it was sent."""

    __slots__ = ("client", "has_all", "place", "rank", "rows", "session")

    def __init__(self, session: MemoryHolder, rank: int) -> None:
        self.session, self.rank, self.place = session, rank, session.pool.place_of(rank)
        self.client = session.client(rank)
        self.rows: dict[int, int] = {}
        self.has_all = not session.control.is_engine
        """Whether the worker was sent everything, with `is_all` of `GrantedExtents`. The transfers of the store below
        the pool have no extents of an earlier service to release, so they do not need it."""


class PoolMemory:
    """Makes a pool and its workers follow the rows that the budget has given the pool. Used by the memory thread.

    The pool itself counts as a client of its extents, under the name `holder`, from the moment at which it gets a row
    until it has evicted the row's blocks. No extent goes to another pool before that.

    Three orders matter. A pool has a row before a worker gets it. The budget records a mapping before the descriptor is
    sent. Workers are asked to release a row only when none of its slots is in use.
    """

    def __init__(self, pool: NodePool, memory: NodeMemory, post: Post, on_smaller: Callable[[], object]) -> None:
        """`post` is used to call `on_smaller` when the pool has lost slots."""
        self.pool, self.holder = pool, f"pool {pool.name}"
        self.workers: dict[str, PoolWorker] = {}
        self.notice: str | None = None
        """A sentence that says why the pool must wait for memory, or cannot give memory back yet. Otherwise None."""
        self.failure: str | None = None
        """A sentence that says why a worker lacks memory of the pool. Otherwise None."""
        self.waits = False
        """Whether there is an action to retry soon."""
        self.claims: set[str] = set()
        """The sessions of an earlier service that may attach again and need the pool's memory."""
        self._users: set[str] = set()
        """The engines' sessions that used slots of recalled rows at the last check of `users_from`."""
        self._users_at = -USERS_SECONDS
        self._memory, self._budget, self._post = memory, memory.budget, post
        self._on_smaller = on_smaller
        self._held: dict[int, tuple[int, ...]] = {}
        """The extents of the rows that the pool holds, by row number."""
        self._sweep: Sweep | None = None
        self._num_full = 0
        """How many rows, counted from row 0 on, are populated."""
        self._announced: dict[int, int] = {}
        """How many populated bytes of each extent the workers know of."""
        self._num_announced = 0
        """How many rows, counted from row 0 on, the workers know to be populated."""
        self._wanted_rows = 0

    @property
    def is_empty(self) -> bool:
        """Whether the pool has no memory, and no engine's worker."""
        has_engines = any(worker.session.control.is_engine for worker in self.workers.values())
        return not self._held and not has_engines and not self._budget.pool(self.pool.name).rows

    def users_from(self, low: int) -> set[str]:
        """Return the engines' sessions that use slots from `low` on. The result may be a second old."""
        now = time.monotonic()
        if now - self._users_at >= USERS_SECONDS:
            with self.pool.lock:
                sessions = self.pool.attached()
            self._users = {one.name for one in sessions if one.is_engine and one.uses_slots_from(low)}
            self._users_at = now
        return self._users

    def want(self) -> bool:
        """Ask for one whole row more than the used slots need. Returns True if that is more than before."""
        row_slots = self._budget.pool(self.pool.name).layout.row_slots
        rows = 1 - (-self.pool.used_slots // row_slots)
        if rows <= self._wanted_rows:
            return False
        self._wanted_rows = rows
        self.pool.grow_above = (rows - 1) * row_slots
        self._budget.pool(self.pool.name).wanted = rows * row_slots
        return True

    def follow(self) -> bool:
        """Follow the budget. Call this after each change of it. Returns True if the budget must decide again."""
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
        """Take the rows that have survived a restart. Call this before the budget decides."""
        rows = self._budget.pool(self.pool.name).rows
        self._take(rows, len(rows))
        self._show(rows)

    def dissolve(self) -> None:
        """Drop the memory of a pool that has ended and has no sessions."""
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
        """Let the pool use the slots that are populated on all ranks, and tell the workers how far they may map."""
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
                    worker.session.push(PopulatedExtents(known), rank=worker.rank)
        self._num_announced = self._num_full

    def _give_up_sealed(self, rows: Mapping[int, Row]) -> bool:
        """Give up sealed extents of rows that are not fully populated. The populator skips them, so such a row would
        never be complete. Returns True if there was one."""
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
        """Send the worker the extents that it lacks. The first message is sent even if it has no extents, so that the
        worker releases those of an earlier service. Returns True if an unsound extent was given up."""
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
                return False  # the worker's session has just been lost
        for grant in grants:
            self._budget.record_mapping(worker.client, grant.extent_id)
        stride = self._budget.pool(self.pool.name).layout.ranks[worker.place].slot_stride
        fds = list[int]()
        try:
            for extent in extents:
                fds.append(open_for_client(extent.fd))
            # One thread makes both calls in this order, so `RankMemory` has the extents before the worker names them.
            self._post(partial(session.ranks[worker.rank].granted, grants))
            session.push(GrantedExtents(stride, tuple(grants), is_all), rank=worker.rank, fds=fds)
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
                session.push(RevokedExtents((extent,)), rank=rank)

    def revoke_all(self) -> None:
        """Ask the workers to release all rows, because the service ends."""
        for worker in self.workers.values():
            if worker.rows:
                worker.session.push(RevokedExtents(tuple(worker.rows.values()), at_end=True), rank=worker.rank)

    def _drop_claim(self, number: int) -> None:
        """Drop the pool's own mapping of a row, whose slots hold none of its blocks any more."""
        for extent in self._held.pop(number):
            self._announced.pop(extent, None)
            self._budget.record_unmapping(self.holder, extent)
