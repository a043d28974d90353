"""The roster: everything that the next service must know about the node, except the contents of the slots.

A service writes it for the keeper. The next service reads it to find out what the previous one has left. It is plain
data.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import msgspec
from msgspec import Struct

from kvstow.attach.hello import Hello
from kvstow.attach.identity import NamespaceIdentity, PoolIdentity
from kvstow.attach.peer import Peer, pid_of
from kvstow.attach.wire import read_value
from kvstow.config import HugePages
from kvstow.control.indexjournal import IndexJournal, packed_copy, read_header
from kvstow.errors import JournalError, KeeperError, KvstowError
from kvstow.memfd import MemfdIdentity, create_memfd, identify_memfd, require_memfd
from kvstow.memory.budget import MemoryBudget
from kvstow.memory.extents import Extent
from kvstow.memory.region import round_up
from kvstow.memory.rows import PoolLayout, RankLayout
from kvstow_service.node.survival.keeper import is_readable

logger = logging.getLogger("kvstow.node")

ROSTER_NAME = "kvstow-roster"
_COPY_BYTES = 32 << 20
"""The size of each of the two copies of the content, in bytes. The memfd takes memory only where it is written. If a
roster does not fit, the service loses its keeper, so no single user may come near this size: 64 pools, with identities
from hellos of 64 KiB, and 1,024 workers take 5 MiB."""
_STATE_BYTES = 4096
_FILE_BYTES = _STATE_BYTES + 2 * _COPY_BYTES
_VOID, _VALID, _IN_RECOVERY = b"\0", b"\1", b"\2"
ROSTER_LABEL = "roster"
EXTENT_PREFIX, LOST_PREFIX = "extent-", "lost-"


class PoolRecord(Struct, frozen=True):
    """A pool. `extent_bytes` and `slot_alignment` are settings of the service that made it. They determine its rows."""

    name: str
    model: str
    owner: int
    identity: PoolIdentity
    extent_bytes: int
    slot_alignment: int = 1

    @property
    def layout(self) -> PoolLayout:
        """How the pool's slots lie in its extents. Slots begin at multiples of `slot_alignment`, because a store below
        the pools may need that."""
        strides = [round_up(num_bytes, self.slot_alignment) for num_bytes in self.identity.stored_slot_bytes]
        return PoolLayout(self.owner, tuple(map(RankLayout, strides)), self.extent_bytes)


class WorkerRecord(Struct, frozen=True, kw_only=True):
    """A worker that may use the memory. `number` is the number of its session in the pool's journal. `hello` lacks the
    session's token, which only the engine knows, and `token_digest` is the digest of that token. `has_pidfd` says
    whether the keeper has a pidfd of the process, which shows when it ends."""

    session_id: str
    token_digest: str
    number: int
    pool: str
    namespace: str
    wanted_slots: int | None
    hello: Hello
    uid: int
    gid: int
    has_pidfd: bool

    @property
    def client(self) -> str:
        """The worker's name in the records of memory."""
        return f"{self.session_id}/{self.hello.rank}"


class Roster:
    """A JSON document in a memfd, which the keeper has too. What the service writes is valid at once, and the keeper
    takes no part in it.

    A service that loses its keeper marks the roster as void, because that keeper may lack descriptors, or hold some for
    too long. A service that starts marks the roster before it reads it, and does not read one that is already marked.
    So the content of a roster can make one start fail, but not two.
    """

    def __init__(self, fd: int) -> None:
        """Takes ownership of `fd`. Use `create`."""
        self.fd = fd
        self._sequence = 0

    @classmethod
    def create(cls) -> Self:
        """Create a roster, which is void until it is written. Raises `PinError`."""
        return cls(create_memfd(ROSTER_NAME, _FILE_BYTES))

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the whole content in one step. If it raises `JournalError` or `OSError`, the content is unchanged."""
        data = packed_copy(self._sequence + 1, content, _COPY_BYTES)
        at = _STATE_BYTES + (self._sequence + 1) % 2 * _COPY_BYTES
        if os.pwrite(self.fd, data, at) != len(data):
            raise JournalError("there is no memory for the roster of the node")
        self._sequence += 1
        if self._sequence == 1:
            os.pwrite(self.fd, _VALID, 0)

    def void(self) -> None:
        """Make the roster void. No reader takes anything from it after that."""
        os.pwrite(self.fd, _VOID, 0)

    @staticmethod
    def read(fd: int) -> Mapping[str, Any]:
        """Mark the roster, and return what an earlier service has written. The caller still owns `fd`. Raises
        `ForeignMemoryError`, `OSError` or `JournalError`."""
        require_memfd(fd, ROSTER_NAME, _FILE_BYTES)
        state = os.pread(fd, 1, 0)
        if state == _IN_RECOVERY:
            raise JournalError("a start that has read the roster before has not come to its end")
        if state != _VALID:
            raise JournalError("the service that wrote the roster has lost its keeper since")
        os.pwrite(fd, _IN_RECOVERY, 0)
        return read_header(os.pread(fd, 2 * _COPY_BYTES, _STATE_BYTES), _COPY_BYTES).found

    def close(self) -> None:
        """Close this process's descriptor. The keeper still has its own. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def journal_label(journal: IndexJournal) -> str:
    return f"journal-{identify_memfd(journal.fd).inode}"


def worker_label(client: str) -> str:
    return f"worker-{client}"


class _ExtentRecord(Struct, frozen=True, array_like=True):
    number: int
    num_bytes: int
    numa_node: int | None
    owner: int | None
    identity: MemfdIdentity
    is_spare: bool


class SurvivingRow(Struct, frozen=True, array_like=True):
    first_slot: int
    num_slots: int
    extents: tuple[int, ...]


class _PoolContent(Struct, frozen=True):
    record: PoolRecord
    journal: str
    rows: tuple[SurvivingRow, ...]
    workers: tuple[WorkerRecord, ...]


def roster_content(
    extents: Mapping[int, Extent],
    budget: MemoryBudget,
    pools: Mapping[str, tuple[PoolRecord, IndexJournal]],
    workers: Iterable[WorkerRecord],
) -> dict[str, Any]:
    """Make the content that `read_survivors` reads. Each extent is spare, or in a row, or belongs to a pool that has
    ended. O(extents)."""
    booked = budget.extents
    of_pool: dict[str, list[WorkerRecord]] = {}
    for worker in workers:
        of_pool.setdefault(worker.pool, []).append(worker)
    return {
        "extents": [
            [one, extent.num_bytes, extent.numa_node, booked[one].owner, extent.identity, booked[one].is_spare]
            for one, extent in extents.items()
        ],
        "pools": [
            msgspec.to_builtins(
                _PoolContent(
                    record,
                    journal_label(journal),
                    tuple(
                        SurvivingRow(row.first_slot, row.num_slots, row.extents)
                        for _, row in sorted(budget.pool(name).rows.items())
                    ),
                    tuple(of_pool.get(name, ())),
                )
            )
            for name, (record, journal) in pools.items()
        ],
    }


class SurvivingWorker(NamedTuple):
    """A worker that may still use the memory. `pidfd` belongs to the `Survivors`."""

    record: WorkerRecord
    pidfd: int | None

    def peer(self) -> Peer:
        """Return the worker's process, with a pidfd that the caller owns. In another pid namespace, its number may have
        changed."""
        pidfd = None if self.pidfd is None else os.dup(self.pidfd)
        return Peer(0 if pidfd is None else pid_of(pidfd), self.record.uid, self.record.gid, pidfd)


@dataclass(slots=True)
class SurvivingPool:
    """A pool of an earlier service. Its `rows` are complete, and follow each other without gaps from slot 0 on.
    `namespaces` are those that have an identity, by name."""

    record: PoolRecord
    journal: IndexJournal
    namespaces: dict[str, NamespaceIdentity]
    rows: list[SurvivingRow]
    workers: list[SurvivingWorker]


@dataclass(slots=True)
class Survivors:
    """What an earlier service has left. `extents` holds the extents of rows and the spare ones, each with its owner.
    `given_up` holds descriptors of memory that must not be used again, because its users are unknown. It owns all
    descriptors."""

    extents: dict[int, tuple[Extent, int | None]] = field(default_factory=dict)
    pools: list[SurvivingPool] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)


def read_survivors(kept: Mapping[str, int], huge_pages: HugePages) -> Survivors:
    """Read the roster, and take ownership of the descriptors. Memory is given up if the roster does not name it, or if
    the keeper lacks a part of it."""
    found, spare = Survivors(), set[int]()
    try:
        content = Roster.read(kept[ROSTER_LABEL]) if kept else {"extents": (), "pools": ()}
        for record in msgspec.convert(content["extents"], tuple[_ExtentRecord, ...]):
            if (extent := _read_extent(kept, record, huge_pages)) is not None:
                found.extents[record.number] = extent, record.owner
                if record.is_spare:
                    spare.add(record.number)
        for described in content["pools"]:
            try:
                found.pools.append(_read_pool(kept, described, found.extents))
            except Exception as error:  # noqa: BLE001 - a bad record of one user must not cost others their caches
                name = described["record"]["name"]
                why = error if isinstance(error, KvstowError) else repr(error)
                logger.warning("pool %s of an earlier service is not used: %s", name, why)
    except Exception as error:  # noqa: BLE001 - a cold cache is better than no service
        why = "there is no roster" if isinstance(error, KeyError) else str(error) or repr(error)
        logger.warning("the service starts with an empty cache, as nothing of an earlier one can be used: %s", why)
        for pool in found.pools:
            pool.journal.close()
        found = Survivors()
    in_rows = {number for pool in found.pools for row in pool.rows for number in row.extents}
    found.extents = {number: one for number, one in found.extents.items() if number in in_rows | spare}
    pidfds = {worker.pidfd for pool in found.pools for worker in pool.workers}
    used = {extent.fd for extent, _ in found.extents.values()} | pidfds
    for label, fd in kept.items():
        if fd not in used:
            if label.startswith((EXTENT_PREFIX, LOST_PREFIX)):
                found.given_up.append(fd)
            else:
                os.close(fd)
    return found


def _read_extent(kept: Mapping[str, int], record: _ExtentRecord, huge_pages: HugePages) -> Extent | None:
    fd = kept.get(f"{EXTENT_PREFIX}{record.number}")
    try:
        if fd is not None:
            return Extent.adopt(fd, record.num_bytes, huge_pages, record.numa_node, identity=record.identity)
    except KvstowError as error:
        logger.warning("extent %d of an earlier service is not used: %s", record.number, error)
    return None


def _read_pool(
    kept: Mapping[str, int], described: Any, extents: Mapping[int, tuple[Extent, int | None]]
) -> SurvivingPool:
    content = read_value(described, _PoolContent, "the record of a pool")
    workers, label = content.workers, content.journal
    missing = [one for one in workers if one.has_pidfd and worker_label(one.client) not in kept]
    if missing or label not in kept:
        what = f"the worker {missing[0].client}" if missing else "its journal"
        raise KeeperError(f"the keeper does not have {what}")
    with ExitStack() as undo:
        fd = os.dup(kept[label])
        undo.callback(os.close, fd)
        journal = IndexJournal.open(fd)
        namespaces = {
            one.name: read_value(one.note, NamespaceIdentity, "the record of a namespace")
            for one in journal.namespaces().values()
            if one.note is not None
        }
        rows = _sound_rows(content, extents)
        pidfds = [(one, kept[worker_label(one.client)] if one.has_pidfd else None) for one in workers]
        living = [SurvivingWorker(one, fd) for one, fd in pidfds if fd is None or not is_readable(fd)]
        undo.pop_all()
        return SurvivingPool(content.record, journal, namespaces, rows, living)


def _sound_rows(pool: _PoolContent, extents: Mapping[int, tuple[Extent, int | None]]) -> list[SurvivingRow]:
    """Return the rows below the first incomplete one. That row and those above it are lost."""
    sound: list[SurvivingRow] = []
    end = 0
    for row in pool.rows:
        sizes = [extents[number][0].num_bytes for number in row.extents if number in extents]
        if row.first_slot != end or not pool.record.layout.has_row(row.num_slots, sizes):
            break
        sound.append(row)
        end += row.num_slots
    return sound
