"""Records for the next service: the memory, the index of each pool, and the workers that have memory."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstow.control.indexjournal import IndexJournal
from kvstow.errors import JournalError, KeeperBusyError, KeeperError, PinError
from kvstow.memory.nodememory import NodeMemory
from kvstow.status import KeeperState
from kvstow_service.node.pools.nodepool import NodePool
from kvstow_service.node.survival import keeper
from kvstow_service.node.survival.keeperclient import KeeperClient, start_keeper
from kvstow_service.node.survival.roster import (
    EXTENT_PREFIX,
    LOST_PREFIX,
    ROSTER_LABEL,
    PoolRecord,
    Roster,
    WorkerRecord,
    journal_label,
    roster_content,
    worker_label,
)

_WAIT_SECONDS = 5.0
"""How long a start waits for a keeper, and for the end of the previous service's process."""
_LEAST_SECONDS, _PAUSE_SECONDS = 1.0, 0.01
"""The least time that a start gives a keeper to answer a hello, and the pause between two attempts."""
_RETRY_SECONDS = 1.0
"""The time between two attempts to reach a keeper after the start."""
_ASK_SECONDS = 3.0
"""The time between two requests to a keeper to show that it still answers."""
_SILENT_SECONDS = 3.0
"""A keeper answers within microseconds. If it has owed an answer for this long, it is stopped or hangs."""
_JOIN_SECONDS = 0.1
"""How long the first `check` after a hello waits for the answer. If it takes longer, a later `check` takes it."""

logger = logging.getLogger("kvstow.keeper")


class NodeRecords:
    """Journals, pidfds and the roster, which this process and the keeper both have. Used by the memory thread.

    Only `save` records changes, and callers use nothing new before it. New descriptors go to the keeper first, and then
    into the roster. Those that are no longer needed leave the roster first, and then the keeper.

    A service that loses its keeper continues without one, and does not wait for another. The roster is void from then
    on, so that the next service would start with an empty cache. `notice` says so meanwhile. When `check` finds a
    keeper again, it gives it all descriptors in one step, in place of those that the keeper holds.
    """

    def __init__(
        self,
        folder: Path,
        keep_timeout: float | None,
        most_bytes: int,
        *,
        wait_seconds: float = _WAIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`most_bytes` is the most memory that a pool can ever have. If `keep_timeout` is None, this service does not
        start a keeper itself. `open` waits for `wait_seconds`, and `check` compares times of `clock`. Raises
        `KeeperError` if the state folder cannot be used."""
        keeper.require_state_folder(folder)
        self.problems: dict[str, str] = {}
        """By pool, a sentence that says why its index would not survive the service."""
        self.notice: str | None = None
        """A sentence for users while no keeper is connected, or while the keeper does not answer. Otherwise None."""
        self.joins = 0
        """How often a keeper has been given all descriptors."""
        self._folder, self._keep_timeout, self._most_bytes = folder, keep_timeout, most_bytes
        self._wait_seconds, self._clock = wait_seconds, clock
        self._life = secrets.token_hex(8)
        self._pools: dict[str, tuple[PoolRecord, IndexJournal]] = {}
        self._workers: dict[str, tuple[WorkerRecord, int]] = {}
        """Each worker and its pidfd, or -1, by the worker's name in the records of memory."""
        self._client: KeeperClient | None = None
        """A connection over which the hello was sent."""
        self._is_welcome = False
        self._retry_at = self._ask_at = 0.0
        self._roster: Roster | None = None
        """Set while the keeper holds all descriptors."""
        self._held: set[str] = set()
        """The labels of the descriptors that the keeper holds."""

    # -- the keeper -----------------------------------------------------------------------------------------

    def open(self) -> dict[str, int]:
        """Return what an earlier service has left, as descriptors that the caller owns. Without a usable keeper, there
        is nothing; if one comes later, `check` gives it all descriptors. Raises `KeeperBusyError` if the process of the
        previous service does not end."""
        deadline = time.monotonic() + self._wait_seconds
        while True:
            left = deadline - time.monotonic()
            busy = None
            try:
                if self._is_welcomed(max(_LEAST_SECONDS, left)):
                    assert self._client is not None
                    return self._client.take_all()
                self._warn("it does not answer")
                return {}
            except KeeperBusyError as error:
                busy = error
                self._hang_up()
            except KeeperError as error:
                self._part(str(error))
            if left <= 0:
                if busy is not None:
                    raise KeeperBusyError(
                        f"{busy}: it has the state folder {self._folder}; stop it, or choose another --state"
                    ) from busy
                return {}
            time.sleep(_PAUSE_SECONDS)

    def check(self, memory: NodeMemory) -> None:
        """Replace a keeper that has ended or that the next service would not find, and notice one that no longer
        answers, without waiting for it. Call this regularly, because other calls notice such a keeper only when they
        need it."""
        if self._roster is not None:
            try:
                self._ask()
                if self._client is not None and self._client.can_be_found():
                    return
                self._part(self._dismiss())
            except KeeperError:
                self._part("it has ended")
        if self._clock() < self._retry_at:
            return
        try:
            if self._is_welcomed(_JOIN_SECONDS if self._client is None else 0.0):
                self.join(memory)
        except KeeperError as error:
            self._part(str(error))
            self._retry_at = self._clock() + _RETRY_SECONDS

    @property
    def keeper(self) -> KeeperState:
        return "connected" if self.notice is None else "gone" if self._roster is None else "silent"

    @property
    def keeper_pid(self) -> int | None:
        return None if self._client is None else self._client.pid

    @property
    def unsaved(self) -> tuple[str, ...]:
        """Sentences that say what would not survive the service, and why."""
        return (*([self.notice] if self.notice is not None else ()), *self.problems.values())

    def _ask(self) -> None:
        """Check whether the keeper answers. A silent keeper still holds all descriptors, so nothing is lost if it
        continues. Raises `KeeperError` if it has ended."""
        assert self._client is not None
        owed, now = self._client.owed_seconds(), self._clock()
        if owed is None:
            if self.notice is not None:
                self.notice = None
                logger.info("the keeper answers again, and still holds everything")
            if now >= self._ask_at:
                self._client.ask()
                self._ask_at = now + _ASK_SECONDS
        elif owed >= _SILENT_SECONDS:
            self._report(f"the keeper (pid {self._client.pid}) does not answer: the memory may not survive the service")

    def _dismiss(self) -> str:
        """Have a keeper end that the next service would not find, and return why. Raises `KeeperError` if it has ended
        already."""
        assert self._client is not None
        if self.notice is None:  # it answers
            self._client.leave(gives_back=True)
        return f"the socket of the last one was removed from {self._folder}, so the next service would not find it"

    def join(self, memory: NodeMemory) -> None:
        """Give the keeper all descriptors, in place of those that it holds. Does nothing before its welcome."""
        if self._client is None or not self._is_welcome:
            return
        fds = self._descriptors(memory)
        try:
            self._roster = Roster.create()
            self._roster.write(self._content(memory))
            self._client.put({**fds, ROSTER_LABEL: self._roster.fd}, replaces=True)
        except (KeeperError, JournalError, PinError, OSError) as error:
            self._part(str(error))
            return
        self._held, self.notice = set(fds), None
        self.joins += 1
        if self.joins > 1:
            logger.info("a keeper holds everything again")

    def save(self, memory: NodeMemory) -> None:
        """Record the present state. Call this after each change, before anything new is used. O(extents)."""
        if self._roster is None:
            return
        assert self._client is not None
        try:
            fds = self._descriptors(memory)
            if new := {label: fd for label, fd in fds.items() if label not in self._held}:
                self._client.put(new)
            self._roster.write(self._content(memory))
            if gone := self._held - fds.keys():
                self._client.drop(gone)
        except (KeeperError, JournalError, OSError) as error:
            self._part(str(error))
            return
        except BaseException:
            self._part("the memory could not be recorded, because of a defect")
            raise
        self._held = set(fds)

    def finish(self, *, gives_back: bool) -> None:
        """Let the next service take over, although this process still runs: nothing in it uses the memory any more.
        With `gives_back`, the keeper closes all descriptors and ends instead."""
        if self._client is not None and self._is_welcome:
            try:
                self._client.leave(gives_back=gives_back)
            except KeeperError as error:
                logger.warning("the keeper does not know that the service ends: %s", error)
        self._hang_up()

    def _is_welcomed(self, seconds: float) -> bool:
        """Whether the keeper has sent its welcome, for which it waits up to `seconds`. Sends the hello first if that
        has not been done."""
        if self._client is None:
            self._client = self._connect()
            self._client.send_hello(self._life)
        if not self._is_welcome and self._client.has_news(seconds):
            self._client.take_welcome()
            self._is_welcome = True
        return self._is_welcome

    def _connect(self) -> KeeperClient:
        try:
            return KeeperClient(self._folder, self._clock)
        except KeeperError:
            if self._keep_timeout is None:
                raise
        start_keeper(self._folder, self._keep_timeout)
        return KeeperClient(self._folder, self._clock)

    def _part(self, why: str) -> None:
        """Continue without a keeper, and make void what it holds."""
        if self._roster is not None:
            self._roster.void()
        self._hang_up()
        self._warn(why)

    def _hang_up(self) -> None:
        if self._roster is not None:
            self._roster.close()
        if self._client is not None:
            self._client.close()
        self._roster, self._client, self._is_welcome = None, None, False
        self._held.clear()

    def _warn(self, why: str) -> None:
        self._report(f"there is no keeper, so the memory would not survive the service: {why}")

    def _report(self, notice: str) -> None:
        if notice != self.notice:  # `check` comes here at each attempt, once a second
            self.notice = notice
            logger.warning("%s", notice)

    def _descriptors(self, memory: NodeMemory) -> dict[str, int]:
        """Return all descriptors that must survive, by label. A label is never used for two things."""
        return {
            **{f"{EXTENT_PREFIX}{number}": extent.fd for number, extent in memory.extents.items()},
            **{f"{LOST_PREFIX}{extent.identity.inode}": extent.fd for extent in memory.given_up.values()},
            **{journal_label(journal): journal.fd for _, journal in self._pools.values()},
            **{worker_label(client): pidfd for client, (_, pidfd) in self._workers.items() if pidfd >= 0},
        }

    def _content(self, memory: NodeMemory) -> dict[str, Any]:
        workers = [record for record, _ in self._workers.values()]
        return roster_content(memory.extents, memory.budget, self._pools, workers)

    # -- pools and workers ----------------------------------------------------------------------------------

    def add_pool(self, pool: NodePool, record: PoolRecord) -> None:
        """Begin the pool's journal. If there is no memory for it, the pool continues without a journal."""
        most_slots = max(1, self._most_bytes // sum(pool.stored_slot_bytes))
        try:
            journal = IndexJournal.create(most_slots, {})
        except (PinError, JournalError) as error:
            self.problems[pool.name] = f"the index of pool {pool.name} would not survive the service: {error}"
            logger.warning("%s", self.problems[pool.name])
            return
        self.restore_pool(pool, record, journal)

    def restore_pool(self, pool: NodePool, record: PoolRecord, journal: IndexJournal) -> None:
        """Continue the journal of an earlier service, and take ownership of it."""
        self._pools[pool.name] = record, journal
        pool.begin_journal(journal)

    def remove_pool(self, pool: NodePool) -> None:
        self.problems.pop(pool.name, None)
        found = self._pools.pop(pool.name, None)
        if found is not None:
            pool.end_journal()
            found[1].close()

    def add_worker(self, record: WorkerRecord, pidfd: int | None) -> None:
        """Record a worker, and take ownership of its pidfd."""
        self._workers[record.client] = record, -1 if pidfd is None else pidfd

    def remove_worker(self, client: str) -> None:
        found = self._workers.pop(client, None)
        if found is not None and found[1] >= 0:
            os.close(found[1])

    def close(self, pools: list[NodePool]) -> None:
        """Close this process's records. The keeper still holds everything. Idempotent."""
        for pool in pools:
            pool.end_journal()
        for _, journal in self._pools.values():
            journal.close()
        for client in list(self._workers):
            self.remove_worker(client)
        self._pools.clear()
