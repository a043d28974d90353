"""Recovery: a pool takes up the blocks that an earlier service has left in its memory, and waits for the processes that
may still use them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from logging import INFO
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from kvstow.control.attachedsession import AttachedSession
from kvstow.control.pool import Pool, PoolSession
from kvstow.control.slotjournal import ANY_SESSION

if TYPE_CHECKING:
    from kvstow.control.indexjournal import RecoveredIndex
    from kvstow.control.sharedpool import SharedPool


class EarlierSession(NamedTuple):
    """A session of an earlier service. `number`: its id in the pool; `processes`: those with the pool's memory that may
    be alive."""

    number: int
    engine: str
    processes: frozenset[Hashable]


class EarlierUses:
    """What the processes of all earlier sessions may still use. The journal does not say which slots they were reading,
    so these are all that were in use. Until the last of the processes has died, the pool evicts nothing, and the slots
    that become free are kept in quarantine. Used with the pool's lock held."""

    def __init__(self, pool: Pool, session: PoolSession) -> None:
        self.session = session
        """Ends with the last process."""
        self._pool = pool
        self._was_used = pool.slots.copy()

    def keep(self, slots: Iterable[int]) -> list[int]:
        """Keep those of the slots that were in use, and return the others. O(slots given)."""
        kept: list[int] = []
        others: list[int] = []
        for slot in slots:
            (kept if self._was_used.is_used(slot) else others).append(slot)
        if kept:
            self.session.quarantined_slots += kept
            self._pool.index.keep_in_quarantine(kept)
            if self._pool.journal is not None:
                self._pool.journal.begin(kept, ANY_SESSION)
        return others


def recover(
    pool: SharedPool, found: RecoveredIndex, names: Mapping[int, str], sessions: Iterable[EarlierSession]
) -> int:
    """Take up what the pool's journal says, after the extents were added and before anybody attaches. `names`: of the
    namespaces, by number. `sessions`: all that the earlier service had. Returns the number of blocks.

    A slot that a session was writing is kept until its processes have died. Blocks in slots that are not populated are
    lost. Takes the lock for a slice at a time.
    """
    earlier = [one for one in sessions if one.processes]
    with pool.lock:
        limit = pool.slots.limit
        nameless = _drop(pool, found, names, {one.number for one in earlier}, limit)
    num_blocks = 0
    for tag, blocks in found.blocks.items():
        if tag in names:
            items = [item for item in blocks.items() if item[1] < limit]
            _restore(pool, names[tag], tag, items)
            num_blocks += len(items)
    with pool.lock:
        pool.last_session_id = max([0, *found.filling, *(one.number for one in earlier)])
        for one in earlier:
            _restore_session(pool, one, found.filling.get(one.number, ()))
        if earlier:
            everyone = frozenset[Hashable]().union(*(one.processes for one in earlier))
            session = _restore_session(pool, EarlierSession(ANY_SESSION, "earlier sessions", everyone), nameless)
            pool.earlier = EarlierUses(pool, session)
            pool.log(
                *(
                    INFO,
                    "%d blocks were recovered; nothing is evicted before %d processes have attached again or ended",
                ),
                *(num_blocks, len(everyone)),
            )
        pool.journal_namespaces()
    pool.write_log()
    return num_blocks


def _drop(pool: SharedPool, found: RecoveredIndex, names: Mapping[int, str], alive: set[int], limit: int) -> list[int]:
    """Note in the journal what is not recovered. Returns the slots without a block that any session may still read. The
    caller holds the lock."""
    blocks = [(tag in names, slot) for tag, of_tag in found.blocks.items() for slot in of_tag.values()]
    nameless = [slot for is_named, slot in blocks if not is_named and slot < limit]
    lost = [slot for _, slot in blocks if slot >= limit]
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


def _restore(pool: SharedPool, name: str, tag: int, items: Sequence[tuple[bytes, int]]) -> None:
    """Make the blocks of a namespace visible, in the order in which they were stored."""
    with pool.lock:
        namespace = pool.index.namespaces.restore(name, tag)
    for start in range(0, len(items), pool.slice_slots):
        keys, slots = zip(*sorted(items[start : start + pool.slice_slots], key=itemgetter(1)), strict=True)
        with pool.lock:
            pool.slots.take(slots)
            namespace.pending_stores.start(keys, slots)
            pool.index.publish(namespace, keys, slots, pool.clock())
    with pool.lock:
        pool.index.namespaces.leave(namespace)


def _restore_session(pool: SharedPool, earlier: EarlierSession, filling: Sequence[int]) -> AttachedSession:
    slots = [slot for slot in filling if slot < pool.slots.limit]
    pool.slots.take(slots)
    session = AttachedSession(pool, earlier.number, earlier.engine, "")
    session.processes.update(earlier.processes)
    session.quarantined_slots += slots
    pool.index.keep_in_quarantine(slots)
    session.end("the service has restarted")
    return session
