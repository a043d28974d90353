"""A simulated rank: its memory is a dict, and its copies run when the test says so, in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from kvstow.control.engine import OffloadEngine
from kvstow.control.session import Session
from kvstow.endings import NO_ENDING, Ending
from kvstow.messages import Completion, DesiredState, Mark, Op, RankReport, RankState

Content = bytes | None

NOTHING_DESIRED = DesiredState("", 0, number=0)
_boots = count(1)


def ready_report(slot_bytes: int, slots: int, **changes: Any) -> RankReport:
    """The report of a rank that has pinned all slots that it should have. `changes` replace fields of it."""
    report = RankReport(
        rank=0,
        boot_id="boot",
        state="ready",
        slot_bytes=slot_bytes,
        pinned_slots=slots,
        target_slots=slots,
        pinned_bytes=slots * slot_bytes,
        target_bytes=slots * slot_bytes,
        sender="process",
        number=1,
    )
    return replace(report, **changes)


class FakeRank:
    """One rank of a session, without threads.

    `blocks[b]` and `slots[s]` are the contents of device blocks and host slots; None if never written or lost. A
    submitted op waits until `run` copies and reports it. Nothing here checks the engine: a wrong decision of the engine
    shows as wrong content.
    """

    def __init__(self, engine: Session, rank: int = 0, memory: dict[int, Content] | None = None) -> None:
        """`memory`: slots that belong to the host of a shared pool, and not to the rank; it only registers them."""
        self.engine = engine
        self.rank = rank
        self.has_memory = memory is None
        self.boot_id = f"boot-{next(_boots)}"
        self.state: RankState = "ready"
        self.error: str | None = None
        self.pinned = 0
        self.applied = NOTHING_DESIRED
        self.sender, self.reports = self.boot_id, 0
        self.received: deque[DesiredState] = deque(maxlen=8)
        self.sent: deque[RankReport] = deque(maxlen=8)
        self.blocks: dict[int, Content] = {}
        self.slots: dict[int, Content] = {} if memory is None else memory
        self.queue: dict[int, Op] = {}
        self.staging: dict[int, list[Content]] = {}

    def report(self, boot_id: str | None = None) -> DesiredState:
        """Send a report (of another boot, to simulate a late one). Applies the desired state that it gets; only the
        next report shows that."""
        self.reports += 1
        slot_bytes = self.engine.pool.config.slot_bytes_of(self.rank)
        target = self.engine.desired().capacity_slots
        report = RankReport(
            rank=self.rank,
            boot_id=boot_id or self.boot_id,
            state=self.state,
            slot_bytes=slot_bytes,
            pinned_slots=self.pinned,
            target_slots=target,
            pinned_bytes=self.pinned * slot_bytes,
            target_bytes=target * slot_bytes,
            error=self.error,
            pending_ops=len(self.queue),
            host="host",
            pid=1000 + self.rank,
            device=f"fake:{self.rank}",
            engine_id=self.applied.engine_id,
            applied=self.applied.number,
            sender=boot_id or self.sender,
            number=self.reports,
        )
        self.sent.append(report)
        desired = self.engine.report(report)
        if boot_id is None:
            self.received.append(desired)
            self.receive(desired)
        return desired

    def receive(self, desired: DesiredState) -> None:
        """Get a desired state, possibly late."""
        if desired.replaces(self.applied):
            self._keep(min(self.pinned, desired.capacity_slots))
            self.applied = desired

    def pin(self, num_slots: int) -> DesiredState:
        """Pin the slots below `num_slots`, and report it. Contents above are lost."""
        self._keep(num_slots)
        return self.report()

    def _keep(self, num_slots: int) -> None:
        self.pinned = num_slots
        if self.has_memory:
            self.slots = {slot: content for slot, content in self.slots.items() if slot < num_slots}

    def restart(self, pinned: int = 0, *, same_process: bool = False) -> None:
        """Restart without memory and queue, with a new boot id. In the same process, as after a sleep, the numbers of
        reports continue."""
        self.boot_id = f"boot-{next(_boots)}"
        self.state, self.error = "ready", None
        self.applied = NOTHING_DESIRED
        if not same_process:
            self.sender, self.reports = self.boot_id, 0
        if self.has_memory:
            self.slots.clear()
        self.blocks.clear()
        self.queue.clear()
        self.staging.clear()
        self.pin(pinned)

    def submit(self, *ops: Op | None) -> None:
        for op in ops:
            if op is not None:
                self.queue[op.op_id] = op

    def gather(self, op_id: int) -> None:
        """Read the blocks of a queued store into staging, and report that its source is free."""
        self.staging.setdefault(op_id, list(map(self.blocks.get, self.queue[op_id].blocks)))
        self.send(op_id, "source_free")

    def run(self, op_id: int, *, fail: bool = False) -> None:
        """Copy a queued op and report it. If it fails, it corrupts what it would have written."""
        op = self.queue.pop(op_id)
        if op.direction == "store":
            contents = self.staging.pop(op_id, list(map(self.blocks.get, op.blocks)))
            self.slots.update(zip(op.slots, contents, strict=True))
        else:
            contents = list(map(self.slots.get, op.slots))
            self.blocks.update(zip(op.blocks, contents, strict=True))
        if fail:
            spoiled, numbers = (self.slots, op.slots) if op.direction == "store" else (self.blocks, op.blocks)
            spoiled.update(dict.fromkeys(numbers))
        self.send(op_id, "failed" if fail else "done")

    def run_all(self) -> None:
        for op_id in list(self.queue):
            self.run(op_id)

    def send(self, op_id: int, mark: Mark, *, boot_id: str | None = None) -> None:
        """Report a mark of an op, true or not."""
        error = "injected" if mark == "failed" else None
        self.engine.complete(self.rank, boot_id or self.boot_id, [Completion(op_id, mark, error, seconds=0.001)])


def make_ranks(engine: OffloadEngine, pinned: int | None = None) -> list[FakeRank]:
    """All ranks of the engine, reporting `pinned` slots (by default all)."""
    ranks = [FakeRank(engine, rank) for rank in range(engine.config.num_ranks)]
    for rank in ranks:
        rank.pin(engine.config.capacity_slots if pinned is None else pinned)
    return ranks


def write_blocks(ranks: Iterable[FakeRank], blocks: Iterable[int], keys: Iterable[bytes]) -> None:
    """Compute: write the content of `keys[i]` into block `blocks[i]` of every rank."""
    pairs = list(zip(blocks, keys, strict=True))
    for rank in ranks:
        rank.blocks.update(pairs)


def store_keys(engine: OffloadEngine, ranks: Sequence[FakeRank], keys: Sequence[bytes]) -> None:
    """Compute these keys' blocks on all ranks, store them, and finish the store and all else that is queued."""
    blocks = range(len(keys))
    write_blocks(ranks, blocks, keys)
    op = engine.begin_store(keys, blocks).op
    for rank in ranks:
        rank.submit(op)
        rank.run_all()
    engine.take_settled()


def use_keys(session: Session, keys: Sequence[bytes], ending: Ending = NO_ENDING, **options: Any) -> None:
    """A request that uses these keys begins, and ends at once. `options`: of `Session.admit`."""
    session.end_request(session.admit(keys, **options), ending)
