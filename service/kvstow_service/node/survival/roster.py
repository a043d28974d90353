"""The roster: all that the next service has to know of the node, except what the slots hold.

It is written for the keeper, and read as what an earlier service has left, as plain data.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self

import msgspec

from kvstow.attach.hello import Hello
from kvstow.attach.identity import NamespaceIdentity, PoolIdentity
from kvstow.attach.peer import Peer, pid_of
from kvstow.attach.wire import read_value
from kvstow.config import HugePages
from kvstow.control.indexjournal import IndexJournal, packed_copy, read_header
from kvstow.errors import JournalError, KvstowError
from kvstow.memfd import MemfdIdentity, create_memfd, identify_memfd, require_memfd
from kvstow.memory.budget import MemoryBudget
from kvstow.memory.extents import Extent
from kvstow.memory.rows import PoolLayout, RankLayout
from kvstow_service.node.survival.keeper import is_readable


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """`extent_bytes` is that of the service that made the pool. It determines the pool's rows."""

    name: str
    model: str
    owner: int
    identity: PoolIdentity
    extent_bytes: int

    @property
    def layout(self) -> PoolLayout:
        """How the pool's slots lie in extents."""
        return PoolLayout(self.owner, tuple(map(RankLayout, self.identity.stored_slot_bytes)), self.extent_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """`number` is the session's number in its pool, whose journal names it. `client` is the worker's name in the books
    of memory. `token_digest` is that of the session's token, which only the engine knows. `has_pidfd`: whether the end
    of the process can be seen, by a descriptor that the keeper has."""

    session_id: str
    client: str
    token_digest: str
    number: int
    pool: str
    namespace: str
    rank: int
    wanted_slots: int | None
    engine: str
    host: str
    pid: int
    device: str
    uid: int
    gid: int
    has_pidfd: bool

    def hello(self) -> Hello:
        """The worker's hello, as far as it is known."""
        return Hello(
            role="worker",
            engine=self.engine,
            host=self.host,
            pid=self.pid,
            rank=self.rank,
            device=self.device,
        )

    def peer(self, pidfd: int | None) -> Peer:
        """Takes ownership of the pidfd. In another pid namespace, the process may have another number than before."""
        return Peer(0 if pidfd is None else pid_of(pidfd), self.uid, self.gid, pidfd)


ROSTER_NAME = "kvstow-roster"
_COPY_BYTES = 32 << 20
"""Takes memory only as far as it is written. A roster that does not fit costs the keeper, so no single user may come
near this size: 64 pools, with identities from hellos of 64 KiB, and 1,024 workers take 5 MiB."""
_STATE_BYTES = 4096
_FILE_BYTES = _STATE_BYTES + 2 * _COPY_BYTES
_VOID, _VALID, _IN_RECOVERY = b"\0", b"\1", b"\2"


class Roster:
    """A JSON document in a memfd that the keeper has too. So what is written counts at once, whatever the keeper does.

    It is void when the service that writes it has lost its keeper, which may then lack descriptors, or hold some for
    too long. The start that reads the roster marks it first. The next start does not read a marked one, so no content
    can make two starts fail.
    """

    def __init__(self, fd: int) -> None:
        """Takes over `fd`. Use `create`."""
        self.fd = fd
        self._sequence = 0

    @classmethod
    def create(cls) -> Self:
        """A void one, until it is written. Raises `PinError`."""
        return cls(create_memfd(ROSTER_NAME, _FILE_BYTES))

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace the content, all at once. Raises `JournalError` or `OSError`, and then the former content stands."""
        data = packed_copy(self._sequence + 1, content, _COPY_BYTES)
        at = _STATE_BYTES + (self._sequence + 1) % 2 * _COPY_BYTES
        if os.pwrite(self.fd, data, at) != len(data):
            raise JournalError("there is no memory for the roster of the node")
        self._sequence += 1
        if self._sequence == 1:
            os.pwrite(self.fd, _VALID, 0)

    def void(self) -> None:
        """From now on the roster names nothing, for any reader."""
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
        """The keeper still has it. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


ROSTER_LABEL = "roster"
EXTENT_PREFIX, LOST_PREFIX = "extent-", "lost-"

logger = logging.getLogger("kvstow.node")


def journal_label(journal: IndexJournal) -> str:
    return f"journal-{identify_memfd(journal.fd).inode}"


def worker_label(client: str) -> str:
    return f"worker-{client}"


def roster_content(
    extents: Mapping[int, Extent],
    budget: MemoryBudget,
    pools: Mapping[str, tuple[PoolRecord, IndexJournal]],
    workers: Iterable[WorkerRecord],
) -> dict[str, Any]:
    """What `read_survivors` reads. An extent is spare, or in a row, or of a pool that is gone. O(extents)."""
    booked = budget.extents
    return {
        "extents": {
            number: [
                extent.num_bytes,
                extent.numa_node,
                booked[number].owner,
                extent.identity,
                booked[number].is_spare,
            ]
            for number, extent in extents.items()
        },
        "pools": [
            {
                "record": {**asdict(record), "identity": msgspec.to_builtins(record.identity)},
                "journal": journal_label(journal),
                "rows": [
                    [row.first_slot, row.num_slots, row.extents] for _, row in sorted(budget.pool(name).rows.items())
                ],
            }
            for name, (record, journal) in pools.items()
        ],
        "workers": [asdict(worker) for worker in workers],
    }


class SurvivingExtent(NamedTuple):
    extent: Extent
    owner: int | None


class SurvivingRow(NamedTuple):
    first_slot: int
    num_slots: int
    extents: tuple[int, ...]


class SurvivingWorker(NamedTuple):
    """A worker that may still use the memory."""

    record: WorkerRecord
    pidfd: int | None


@dataclass(slots=True)
class SurvivingPool:
    """`rows` are whole, and lie end to end from slot 0 on. `namespaces`: those that have an identity, by name."""

    record: PoolRecord
    journal: IndexJournal
    namespaces: dict[str, NamespaceIdentity]
    rows: list[SurvivingRow]
    workers: list[SurvivingWorker]


@dataclass(slots=True)
class Survivors:
    """`extents` are those of the rows, and spare ones. `given_up`: memory that is not used again, because its users are
    not known. Owns all descriptors."""

    extents: dict[int, SurvivingExtent] = field(default_factory=dict)
    pools: list[SurvivingPool] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)


def read_survivors(kept: Mapping[str, int], huge_pages: HugePages) -> Survivors:
    """Takes over the descriptors. What the roster does not name, or what the keeper lacks, is given up."""
    reader = _RosterReader(kept, huge_pages)
    if kept:
        try:
            reader.read(Roster.read(kept[ROSTER_LABEL]))
        except Exception as error:  # noqa: BLE001 - a cold cache is better than no service
            why = "there is no roster" if isinstance(error, KeyError) else str(error) or repr(error)
            logger.warning("the service starts with an empty cache, as nothing of an earlier one can be used: %s", why)
            reader.forget()
    return reader.survivors()


class _RosterReader:
    def __init__(self, kept: Mapping[str, int], huge_pages: HugePages) -> None:
        self._kept, self._huge_pages = kept, huge_pages
        self._extents: dict[int, SurvivingExtent] = {}
        self._spare: set[int] = set()
        self._pools: list[SurvivingPool] = []

    def read(self, content: Mapping[str, Any]) -> None:
        for number, described in content["extents"].items():
            self._read_extent(int(number), *described)
        workers: dict[str, list[WorkerRecord]] = {}
        for described in content["workers"]:
            record = WorkerRecord(**described)
            workers.setdefault(record.pool, []).append(record)
        for described in content["pools"]:
            name = described["record"]["name"]
            try:
                self._read_pool(described, workers.get(name, []))
            except Exception as error:  # noqa: BLE001 - what one user's engines have sent costs no other user's cache
                logger.warning("pool %s of an earlier service is not used: %r", name, error)

    def _read_extent(
        self, number: int, num_bytes: int, node: int | None, owner: int | None, identity: list[int], is_spare: bool
    ) -> None:
        fd = self._kept.get(f"{EXTENT_PREFIX}{number}")
        if fd is None:
            return
        try:
            extent = Extent.adopt(fd, num_bytes, self._huge_pages, node, identity=MemfdIdentity(*identity))
        except KvstowError as error:
            logger.warning("extent %d of an earlier service is not used: %s", number, error)
            return
        self._extents[number] = SurvivingExtent(extent, owner)
        if is_spare:
            self._spare.add(number)

    def _read_pool(self, described: Mapping[str, Any], workers: list[WorkerRecord]) -> None:
        identity = read_value(described["record"]["identity"], PoolIdentity, "the identity of a pool")
        record = PoolRecord(**{**described["record"], "identity": identity})
        label = described["journal"]
        missing = [one for one in workers if one.has_pidfd and worker_label(one.client) not in self._kept]
        if missing or label not in self._kept:
            why = f"the worker {missing[0].client}" if missing else "its journal"
            logger.warning("pool %s of an earlier service is not used: the keeper does not have %s", record.name, why)
            return
        fd = os.dup(self._kept[label])
        try:
            journal = IndexJournal.open(fd)
        except (KvstowError, OSError) as error:
            os.close(fd)
            logger.warning("pool %s of an earlier service is not used: %s", record.name, error)
            return
        with ExitStack() as undo:
            undo.callback(journal.close)
            namespaces = {
                one.name: read_value(one.note, NamespaceIdentity, "the record of a namespace")
                for one in journal.namespaces().values()
                if one.note is not None
            }
            rows = self._sound_rows(record, described["rows"])
            living = [worker for one in workers if (worker := self._living(one)) is not None]
            self._pools.append(SurvivingPool(record, journal, namespaces, rows, living))
            undo.pop_all()

    def _sound_rows(self, record: PoolRecord, rows: list[list[Any]]) -> list[SurvivingRow]:
        """The rows from the first one on that are whole. Those above one that is not are lost."""
        sound: list[SurvivingRow] = []
        end = 0
        for first_slot, num_slots, numbers in rows:
            extents = [self._extents.get(number) for number in numbers]
            sizes = [one.extent.num_bytes for one in extents if one is not None]
            if first_slot != end or not record.layout.has_row(num_slots, sizes):
                break
            sound.append(SurvivingRow(first_slot, num_slots, tuple(numbers)))
            end += num_slots
        return sound

    def _living(self, record: WorkerRecord) -> SurvivingWorker | None:
        if not record.has_pidfd:
            return SurvivingWorker(record, None)
        pidfd = self._kept[worker_label(record.client)]
        return None if is_readable(pidfd) else SurvivingWorker(record, pidfd)

    def forget(self) -> None:
        """Use nothing."""
        for pool in self._pools:
            pool.journal.close()
        self._extents, self._spare, self._pools = {}, set(), []

    def survivors(self) -> Survivors:
        in_rows = {number for pool in self._pools for row in pool.rows for number in row.extents}
        extents = {number: one for number, one in self._extents.items() if number in in_rows | self._spare}
        pidfds = {worker.pidfd for pool in self._pools for worker in pool.workers}
        used = {one.extent.fd for one in extents.values()} | pidfds
        given_up = []
        for label, fd in self._kept.items():
            if fd not in used:
                if label.startswith((EXTENT_PREFIX, LOST_PREFIX)):
                    given_up.append(fd)
                else:
                    os.close(fd)
        return Survivors(extents, self._pools, given_up)
