"""What the engines of a pool hand back to a new service when the previous one was killed together with its keeper."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping, Sequence
from typing import Any

from kvstow.attach.channel import close_fds
from kvstow.attach.identity import PoolIdentity
from kvstow.attach.jsonobject import JsonObject
from kvstow.control.indexjournal import IndexJournal
from kvstow.errors import JournalError
from kvstow.memfd import MemfdIdentity, identify_memfd
from kvstow.memory.nodememory import NAME_PREFIX as EXTENT_PREFIX
from kvstow.memory.nodememory import identity_of
from kvstow_service.node.survival.keepermessages import Held
from kvstow_service.node.survival.poolrecord import PoolRecord
from kvstow_service.node.survival.workerrecord import WorkerRecord

JOURNAL, SERVICE = "journal", "service"
JOURNAL_PREFIX, WORKER_PREFIX = "journal-", "worker-"

_MAX_DESCRIPTORS = 16_384
_SERVICE_SECONDS = 5.0


class Handover:
    """Owns the descriptors until `take` or `close`. Used by one thread at a time.

    The journal names all extents and workers. Only the previous service could write to it, so nothing depends on what
    an engine says. A worker counts as alive if nobody has handed over its pidfd.
    """

    def __init__(self) -> None:
        self._deposits: dict[str, int] = {}
        self._extents: dict[MemfdIdentity, int] = {}

    @property
    def has_journal(self) -> bool:
        return JOURNAL in self._deposits

    @property
    def num_extents(self) -> int:
        return len(self._extents)

    def put_deposits(self, names: Sequence[str], fds: Sequence[int]) -> None:
        """Takes ownership of the descriptors. If names are equal, the first one counts."""
        for name, fd in zip(names, fds, strict=True):
            self._put(self._deposits, name, fd)

    def put_extents(self, fds: Sequence[int]) -> None:
        """Takes ownership of the descriptors."""
        for fd in fds:
            self._put(self._extents, identify_memfd(fd), fd)

    def _put(self, held: dict[Any, int], key: object, fd: int) -> None:
        if key in held or len(self._deposits) + len(self._extents) >= _MAX_DESCRIPTORS:
            os.close(fd)
        else:
            held[key] = fd

    def take(self, identity: PoolIdentity, first_extent: int) -> dict[str, Held]:
        """Everything that belongs to the pool, named as at a keeper. The caller owns the descriptors. The extents are
        numbered from `first_extent` on. Waits up to 5 s for the end of the previous service. Raises `KvstowError`, and
        takes nothing, if that service has not ended by then, or if the journal is that of another layout."""
        service = self._deposits.get(SERVICE)
        if service is None or not select.select([service], [], [], _SERVICE_SECONDS)[0]:
            raise JournalError("the previous service still runs, or its end cannot be seen")
        content = IndexJournal.look(self._deposits[JOURNAL])
        record = PoolRecord.from_json(content["pool"])
        if record.identity != identity:
            raise JournalError(f"the journal is that of pool {record.name}, whose engines have another layout")
        if "roster" not in content:
            raise JournalError(f"the journal of pool {record.name} names no workers and extents")
        roster = JsonObject(content["roster"], "roster of a pool")
        extents = _extents(record.name, roster.texts("extents"))
        workers = [WorkerRecord.from_text(text) for text in roster.texts("workers")]
        if any(worker.pool != record.name for worker in workers):
            raise JournalError(f"the journal of pool {record.name} names workers of another pool")
        kept = {f"{JOURNAL_PREFIX}{record.name}": Held(self._deposits.pop(JOURNAL), "")}
        there = [(text, self._extents.pop(key)) for key, text in extents.items() if key in self._extents]
        kept |= {f"{EXTENT_PREFIX}{number}": Held(fd, text) for number, (text, fd) in enumerate(there, first_extent)}
        try:
            kept |= {f"{WORKER_PREFIX}{worker.client}": self._held(worker) for worker in workers}
        except OSError:
            close_fds([held.fd for held in kept.values()])
            raise
        self.close()
        return kept

    def _held(self, worker: WorkerRecord) -> Held:
        pidfd = self._deposits.pop(f"{WORKER_PREFIX}{worker.client}", None) if worker.has_pidfd else None
        if pidfd is None:
            return Held(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), worker.without_pidfd().to_text())
        return Held(pidfd, worker.to_text())

    def close(self) -> None:
        """Idempotent."""
        close_fds([*self._deposits.values(), *self._extents.values()])
        self._deposits.clear()
        self._extents.clear()


def _extents(pool: str, texts: Sequence[str]) -> Mapping[MemfdIdentity, str]:
    """How the previous service has described the extents in the pool's rows, by identity."""
    try:
        return {identity_of(text, pool): text for text in texts}
    except (ValueError, TypeError) as error:
        raise JournalError(f"the journal of pool {pool} has a roster that cannot be read: {error}") from error
