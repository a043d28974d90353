"""KVStow's control plane as a subject: an engine whose ranks complete every copy at once."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import ParamSpec, TypeVar

from tests.doubles.rank import ready_report

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.keys import make_key
from kvstow.messages import Completion, DesiredState, RankReport, StepPlan

SLOT_BYTES = 2 << 20
P = ParamSpec("P")
R = TypeVar("R")


class SimulatedWorker:
    """A rank without memory, whose copies end at once. One thread uses it, and another one may report it."""

    def __init__(self, rank: int, slot_bytes: int, num_slots: int) -> None:
        self.boot_id = secrets.token_hex(8)
        self._report = ready_report(slot_bytes, num_slots, rank=rank, boot_id=self.boot_id, number=0)
        self._completions: list[Completion] = []

    def submit(self, plan: StepPlan) -> None:
        self._completions.extend(Completion(op.op_id, "done") for op in plan.ops)

    def take_completions(self) -> list[Completion]:
        taken, self._completions = self._completions, []
        return taken

    def wait_completions(self, timeout: float) -> bool:
        return bool(self._completions)

    def report(self) -> RankReport:
        self._report = replace(self._report, number=self._report.number + 1)
        return self._report

    def apply(self, desired: DesiredState) -> None:
        """Do nothing, because the rank has its slots from the start."""

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Do nothing, because the report never changes. So an agent reports only once a second."""


class EngineSubject:
    """An engine with one key group, as for a model with full attention."""

    def __init__(self, slots: int, *, policy: str = "auto", ranks: int = 1) -> None:
        self.engine = OffloadEngine(
            EngineConfig(slot_bytes=SLOT_BYTES, capacity_slots=slots, num_ranks=ranks, policy=policy)
        )
        self.workers = [SimulatedWorker(rank, SLOT_BYTES, slots) for rank in range(ranks)]
        for worker in self.workers:
            self.engine.report(worker.report())
        self._boots = [(rank, worker.boot_id) for rank, worker in enumerate(self.workers)]

    def keys(self, hashes: list[bytes]) -> list[bytes]:
        return [make_key(0, block_hash) for block_hash in hashes]

    def lookup(self, keys: Sequence[bytes]) -> int:
        return self.engine.lookup(keys)

    def use(self, keys: Sequence[bytes]) -> int:
        lease = self.engine.acquire(keys)
        self.engine.release_lease(lease)
        return len(lease.slots)

    def store(self, keys: Sequence[bytes]) -> None:
        engine = self.engine
        grant = engine.begin_store(keys, range(len(keys)))
        if grant.op is not None:
            done = [Completion(grant.op.op_id, "done", None, len(keys) * SLOT_BYTES, 0.001)]
            for rank, boot_id in self._boots:
                engine.complete(rank, boot_id, done)
        engine.take_settled()

    def request(self, keys: Sequence[bytes]) -> int:
        lease = self.engine.acquire(keys)
        hits = len(lease.slots)
        if hits < len(keys):
            self.store(keys[hits:])
        self.engine.release_lease(lease)
        self.end(keys)
        return hits

    def end(self, keys: Sequence[bytes]) -> None:
        """Begin a request that uses these keys, and end it at once."""
        self.engine.end_request(self.engine.admit(keys))

    def own_operations(self) -> dict[str, Callable[[Sequence[bytes]], object]]:
        engine = self.engine
        return {"store_present": lambda keys: engine.begin_store(keys, range(len(keys))), "use_long": self.end}

    def curve_seconds(self, chains: Iterable[Sequence[bytes]]) -> float:
        """Return the seconds of CPU that the curve takes for each of these requests, on the thread that ticks."""
        pool, spent, count = self.engine.pool, 0.0, 0
        assert pool.requests.curve is not None
        for keys in chains:
            self.end(keys)
            began = time.thread_time()
            pool.requests.curve.follow(pool.slots.limit, is_lru=False)
            spent += time.thread_time() - began
            count += 1
        return spent / count

    def store_while_shrinking(self, keys: Sequence[bytes]) -> float:
        """Shrink the pool to 2 % while the blocks that are evicted first all lie above that. Returns the seconds that
        beginning a store takes meanwhile."""
        limit = self.engine.config.capacity_slots // 50
        kept: list[bytes] = []
        slot: int | None = 0
        while slot is not None and slot < limit:
            page = self.engine.blocks(slot, limit - slot)
            kept += [bytes.fromhex(block.key) for block in page.blocks]
            slot = page.next_slot
        self.end(kept)
        sweep = self.engine.admin.resize(limit)
        started = time.perf_counter()
        self.engine.begin_store(keys, range(len(keys)))
        seconds = time.perf_counter() - started
        sweep.cancel()
        return seconds

    def purge_slices(self) -> list[float]:
        sweep = self.engine.admin.purge(everything=True)
        times = []
        more = True
        while more:
            started = time.perf_counter()
            more = sweep.step()
            times.append(time.perf_counter() - started)
        return times
