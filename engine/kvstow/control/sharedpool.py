"""Pools whose memory belongs to their host and outlives the engines that attach to it, and the recovery of the blocks
that an earlier service has left in such memory."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from logging import INFO
from operator import gt
from typing import NamedTuple

from kvstow.config import EngineConfig
from kvstow.control.administration import Administrator, Sweep, sweep_namespace
from kvstow.control.attachedsession import AttachedSession, TierSession
from kvstow.control.indexjournal import IndexJournal, RecoveredIndex
from kvstow.control.namespaces import Namespace, NamespaceLabel
from kvstow.control.pool import ANY_SESSION, SLICE_SLOTS, EarlierUses, Pool, PoolTarget
from kvstow.errors import ConflictError, InvalidRequestError, NotFoundError
from kvstow.messages import DesiredState
from kvstow.status import NamespaceStatus


class SharedPool(Pool):
    """A pool of extents. It begins with none, grows by whole extents at its end, and shrinks by removing the last ones.

    It does not use `config.capacity_slots`. The caller still owns the journal.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        slice_slots: int = SLICE_SLOTS,
        journal: IndexJournal | None = None,
    ) -> None:
        super().__init__(config, clock, PoolTarget(0), slice_slots=slice_slots)
        self.journal = journal
        self.admin = Administrator(self)
        self._extents: list[int] = []
        self._populated = 0
        self._last_lowering = 0
        self.last_session_id = 0
        self.last_op_id = secrets.randbits(32) << 20
        """It begins at random, so that late reports of engines about an earlier service's ops are not taken for reports
        about ops of this service."""
        self._journaled: dict[int, str] = {}
        """The names of namespaces in the journal."""

    # -- sessions -------------------------------------------------------------------------------------------

    def attach(self, engine: str, namespace: str = "") -> AttachedSession:
        """Make a session for an engine with this name, and return it. Sessions with the same namespace share blocks.
        Raises `ConflictError` if the pool was closed."""
        with self.lock:
            if self.acceptance.closed:
                raise ConflictError("the pool was closed")
            self.last_session_id += 1
            return AttachedSession(self, self.last_session_id, engine, namespace)

    def attach_tier(self, namespace: Namespace) -> TierSession:
        """Make the host's own session, for transfers of the store below the pool, and return it. Call this once. Raises
        `ConflictError` if the pool was closed."""
        with self.lock:
            if self.acceptance.closed:
                raise ConflictError("the pool was closed")
            self.last_session_id += 1
            return TierSession(self, self.last_session_id, namespace)

    def find_session(self, session_id: int) -> AttachedSession:
        """Return the session with this id. Raises `NotFoundError` if it has ended and none of its slots is kept any
        more."""
        with self.lock:
            for session in self.attached():
                if session.session_id == session_id:
                    return session
        raise NotFoundError(f"there is no session {session_id}")

    def process_died(self, process: Hashable) -> None:
        """Note that a process can neither read nor write the memory any more, because it has ended or has reported that
        all its copies have ended. Ignores a process that no session has named."""
        with self.lock:
            for session in self.attached():
                session.forget_process(process)
        self.write_log()

    def attached(self) -> list[AttachedSession]:
        """Return all sessions, including lost ones and the host's own. The caller holds the lock."""
        return [session for session in self.sessions if isinstance(session, AttachedSession)]

    def end_holds(self, held: Iterable[tuple[int, ...]]) -> None:
        self.debts.owe(held)  # in slices: a client may hold very many slots, and others wait for the lock

    # -- namespaces -----------------------------------------------------------------------------------------

    def namespaces(self) -> list[NamespaceStatus]:
        with self.lock:
            return [
                NamespaceStatus(
                    name=one.name,
                    pool=self.name,
                    sessions=one.num_sessions,
                    blocks=len(one.keys),
                    looked_up_blocks=one.lookups.queried,
                    hit_blocks=one.lookups.hits,
                    dropped=one.is_dropped,
                )
                for one in self.index.namespaces
            ]

    def drop_namespace(self, name: str) -> Sweep:
        """Remove all blocks of a namespace. From now on no session finds them; the sweep frees their slots. Raises
        `NotFoundError`, or `ConflictError` if it has sessions."""
        with self.lock:
            namespace = self.index.namespaces.drop(name)
            self.journal_namespaces()
        if namespace is None:
            raise NotFoundError(f"there is no namespace {name!r}")
        return sweep_namespace(self, namespace)

    def join_namespace(self, name: str) -> Namespace:
        namespace = super().join_namespace(name)
        if self._journaled.get(namespace.tag) != name:
            self.journal_namespaces()
        return namespace

    def journal_namespaces(self) -> None:
        """Record the namespaces in the journal. Call it after a namespace was added, before any block is stored in it,
        and after one was dropped. O(namespaces), and O(bytes that the journal has room for). The caller holds the
        lock."""
        if self.journal is None:
            return
        namespaces = self.index.namespaces
        used = [one for one in namespaces if one.num_sessions]
        unused = [one for one in namespaces.unused() if not one.is_dropped]
        named = (*used, *reversed(unused))
        self._journaled = {one.tag: one.name for one in named}
        # Labels are made one at a time: a client may have many namespaces with long ones, and only a few fit.
        self.journal.name_namespaces((one.tag, self.namespace_label(one.name)) for one in named)

    def namespace_label(self, name: str) -> NamespaceLabel:
        """Return what the journal records of a namespace. The caller holds the lock."""
        return NamespaceLabel(name)

    # -- memory ---------------------------------------------------------------------------------------------

    @property
    def extents(self) -> tuple[int, ...]:
        """How many slots each extent has."""
        return tuple(self._extents)

    def add_extent(self, num_slots: int) -> None:
        """Give the pool `num_slots` more slots, above the others. They are used once they are populated. Raises
        `ConflictError` while the pool is resized, or while a process may still use removed extents, because the new
        slots would have the same numbers."""
        if num_slots < 1:
            raise InvalidRequestError(f"an extent of {num_slots} slots; allowed: 1 or more")
        with self.lock:
            if not self._is_released():
                raise ConflictError("some engines still use memory that was taken from the pool")
            if self.target.is_resizing:
                raise ConflictError("the pool is being resized; wait for its operation, or cancel it")
            self._extents.append(num_slots)
            self.target.ceiling = ceiling = sum(self._extents)
            self.want(replace(self.target.desired, capacity_slots=ceiling))
            self.apply_limit()
        self.make_tables(ceiling)

    @property
    def populated_slots(self) -> int:
        """How many slots are populated on every rank. The caller needs no lock."""
        return self._populated

    def set_populated(self, num_slots: int) -> None:
        """Note that the slots below `num_slots` are populated on every rank. A smaller number than before changes
        nothing. Holds the lock for 60 ns for each new slot."""
        with self.lock:
            self._populated = max(self._populated, num_slots)
            self.apply_limit()
            for session in self.sessions:
                session.adapt_to_pool()

    def drop_extents(self, count: int = 1) -> Sweep:
        """Remove the last `count` extents. Their blocks are removed first, and the extents once their slots are not
        used any more. Their memory may be given to others once `is_released` is true. Raises `ConflictError` as
        `Administrator.resize` does."""
        extents = self.extents
        if not 1 <= count <= len(extents):
            raise InvalidRequestError(f"count is {count}; allowed: 1 to {len(extents)}, the extents of the pool")
        return self.admin.start_resize(sum(extents[:-count]))

    @property
    def is_released(self) -> bool:
        """Whether no process can reach the extents that were removed."""
        with self.lock:
            return self._is_released()

    def _is_released(self) -> bool:
        return all(session.has_released(self._last_lowering) for session in self.attached())

    def memory_slots(self) -> int:
        return min(self._populated, self.capacity)

    def silent_ranks(self) -> list[int]:
        return []

    def want(self, desired: DesiredState) -> None:
        is_lower = desired.capacity_slots < self.capacity
        super().want(desired)
        if is_lower:
            self._last_lowering = self.target.desired.number
            while sum(self._extents) > self.capacity:
                self._extents.pop()
            self._populated = min(self._populated, self.capacity)

    def check_size(self, capacity_slots: int) -> None:
        sizes = {0, *accumulate(self._extents)}
        if capacity_slots not in sizes:
            raise InvalidRequestError(
                f"capacity_slots is {capacity_slots}; allowed: whole extents of this pool, one of {sorted(sizes)}"
            )


class EarlierSession(NamedTuple):
    """A session of an earlier service. `number` is its id in the pool, and `name` the name by which operators know it.
    `processes` are the processes with the pool's memory that may be alive."""

    number: int
    engine: str
    processes: frozenset[Hashable]
    name: str = ""


def recover(
    pool: SharedPool, found: RecoveredIndex, names: Mapping[int, str], sessions: Iterable[EarlierSession]
) -> int:
    """Recover the blocks that the pool's journal records, and return their number. Call it after the extents were added
    and before an engine attaches. `names`: the names of the namespaces, by number. `sessions`: all sessions of the
    earlier service.

    A slot that a session was writing is kept until its processes have died. Blocks in slots that are not populated are
    lost. Takes the lock for a slice at a time.
    """
    earlier = [one for one in sessions if one.processes]
    with pool.lock:
        limit = pool.slots.limit
        nameless = _drop(pool, found, names, {one.number for one in earlier}, limit)
    num_blocks, pasts = 0, bytes(limit)
    if pool.journal is not None:
        pool.learn_from(pool.journal.learned())
        pasts = pool.journal.pasts(limit)
    for tag, blocks in found.blocks.items():
        if tag in names:
            num_blocks += _restore(pool, names[tag], tag, blocks, limit, pasts)
    with pool.lock:
        pool.last_session_id = max([0, *found.filling, *(one.number for one in earlier)])
        for one in earlier:
            _restore_session(pool, one, found.filling.get(one.number, ()))
        if earlier:
            everyone = frozenset[Hashable]().union(*(one.processes for one in earlier))
            unknown = EarlierSession(ANY_SESSION, "all engines of an earlier service", everyone, "unknown")
            session = _restore_session(pool, unknown, nameless)
            pool.earlier = EarlierUses(pool, session)
            pool.log(
                INFO,
                "%d blocks were recovered; the pool evicts none until %d processes have attached again or ended",
                num_blocks,
                len(everyone),
            )
        pool.journal_namespaces()
    pool.write_log()
    return num_blocks


def _drop(pool: SharedPool, found: RecoveredIndex, names: Mapping[int, str], alive: set[int], limit: int) -> list[int]:
    """Remove blocks that are not recovered from the journal. Returns slots without a block that sessions of the earlier
    service may still read. `alive`: the numbers of sessions whose processes may be alive. `limit`: slots from this
    number on are not populated. The caller holds the lock."""
    nameless = [slot for tag, blocks in found.blocks.items() if tag not in names for slot in blocks.values()]
    nameless = [slot for slot in nameless if slot < limit]
    lost = [slot for blocks in found.blocks.values() for slot in blocks.values() if slot >= limit]
    for number, slots in found.filling.items():
        lost += [slot for slot in slots if slot >= limit or number not in (*alive, ANY_SESSION)]
    orphans = [slot for slot in found.filling.get(ANY_SESSION, ()) if slot < limit]
    if not alive:
        lost += nameless + orphans
        nameless, orphans = [], []
    if pool.journal is not None:
        if nameless:
            pool.journal.begin(nameless, ANY_SESSION)
        if lost:
            pool.journal.clear(lost)
    return nameless + orphans


def _restore(pool: SharedPool, name: str, tag: int, blocks: Mapping[bytes, int], limit: int, pasts: bytes) -> int:
    """Make the blocks of a namespace visible, in the order in which they were stored, and return their number. There
    may be a million blocks, so it makes no object for a block except its key."""
    with pool.lock:
        namespace = pool.index.namespaces.restore(name, tag)
    all_keys, all_slots = list(blocks), list(blocks.values())
    if max(all_slots, default=0) >= limit:
        all_keys = [key for key, slot in blocks.items() if slot < limit]
        all_slots = [slot for slot in all_slots if slot < limit]
    for start in range(0, len(all_keys), pool.slice_slots):
        keys, slots = all_keys[start : start + pool.slice_slots], all_slots[start : start + pool.slice_slots]
        if any(map(gt, slots, slots[1:])):
            order = sorted(range(len(slots)), key=slots.__getitem__)
            keys, slots = [keys[index] for index in order], [slots[index] for index in order]
        with pool.lock:
            pool.slots.take(slots)
            pool.index.restore(namespace, keys, slots, bytes([pasts[slot] for slot in slots]), pool.clock())
    with pool.lock:
        pool.index.namespaces.leave(namespace)
    return len(all_keys)


def _restore_session(pool: SharedPool, earlier: EarlierSession, filling: Sequence[int]) -> AttachedSession:
    slots = [slot for slot in filling if slot < pool.slots.limit]
    pool.slots.take(slots)
    session = AttachedSession(pool, earlier.number, earlier.engine, "")
    if earlier.name:
        session.set_name(earlier.name)
    session.processes.update(earlier.processes)
    session.quarantined_slots += slots
    pool.index.quarantined.add(slots)
    session.end("the service has restarted")
    return session
