"""Hits of a pool with a store below it, on whole traces, through the real control plane.

The store is a model with the rules of the store on disks. Its places are ordered by their last use. Its budget of
writes begins empty and fills within an hour. The lower half is reserved for blocks that were used twice. Reads are
queued, and made at a limited rate. A pool of few slots takes some minutes for a trace of twelve hours.
"""

from __future__ import annotations

import gzip
import json
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import chain
from math import inf
from pathlib import Path
from typing import NamedTuple

from tests.doubles.fakes import FakeClock
from tests.doubles.rank import use_keys

from bench.policytraces import DATA
from bench.report import Table, verdict
from kvstow.config import EngineConfig
from kvstow.control.pooltier import PoolTier
from kvstow.control.session import result_of
from kvstow.control.sharedpool import SharedPool
from kvstow.keys import make_key
from kvstow.messages import Completion, Op, RankReport
from kvstow.prefill import PrefillCost
from kvstow.tier.blockstore import (
    BlockTransfer,
    Expectation,
    PartCounters,
    Piece,
    Purged,
    PurgeWish,
    StoredExtent,
    StoredLayout,
    StorePart,
)

BLOCK_TOKENS = 512
BLOCK_BYTES = 64 << 20
"""The size of a block of 512 tokens of an 8B model."""
COMPUTE_SECONDS = 0.04
"""How long one H200 takes to compute such a block."""
FINE = 32
"""How many blocks of vLLM's size are in one block of the trace."""
_BUDGET_SECONDS = 3600.0


class DiskRequest(NamedTuple):
    """A request. `runs` of block ids are pairs of a first id and a count."""

    at: float
    runs: tuple[tuple[int, int], ...]

    @property
    def num_blocks(self) -> int:
        return sum(count for _, count in self.runs)


def read(path: Path) -> list[DiskRequest]:
    """Read a trace with `runs` or with `hash_ids`."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [_request(json.loads(line)) for line in lines]


def _request(found: dict[str, list[int]]) -> DiskRequest:
    flat = found.get("runs")
    if flat is None:
        flat = list(chain.from_iterable((one, 1) for one in found["hash_ids"]))
    return DiskRequest(float(found["timestamp"]) / 1000, tuple(zip(flat[::2], flat[1::2], strict=True)))  # type: ignore[arg-type]


class ModelDisk:
    """A `BlockStore` and its only pool. `run` delivers the pieces of reads. It moves no bytes."""

    name = shown = "disk"
    slot_alignment = 1
    answers_at_once = True

    def __init__(self, places: int, clock: FakeClock) -> None:
        self._places, self._clock = places, clock
        self.writes_per_second = inf
        """How many blocks may be written per second, on average."""
        self.reads_per_second = inf
        self.written = self.read_blocks = 0
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._budget, self._budget_at = 0.0, clock()
        self._used: set[bytes] = set()
        """Blocks that were used when the store did not have them."""
        self._backlog, self._backlog_at = 0.0, clock()
        self._pieces: deque[Piece] = deque()
        self._on_end: Callable[[Sequence[Piece]], object] = lambda pieces: None

    def start(self, witness: int) -> None: ...

    def close(self) -> None: ...

    def join(self, layout: StoredLayout, on_end: Callable[[Sequence[Piece]], object]) -> ModelDisk:
        self._on_end = on_end
        return self

    def parts(self) -> Sequence[StorePart]:
        return [StorePart(name="model", state="on", counters=PartCounters())]

    def run(self) -> None:
        while self._pieces:
            self._on_end([self._pieces.popleft()])

    def has(
        self, fingerprint: str, keys: Sequence[bytes], on_answer: Callable[[Sequence[bool]], object]
    ) -> Sequence[bool]:
        return list(map(self._blocks.__contains__, keys))

    def offer(self, fingerprint: str, keys: Sequence[bytes], *, is_use: bool) -> Sequence[int]:
        blocks = self._blocks
        lacking = [index for index, key in enumerate(keys) if key not in blocks]
        for key in reversed(keys):  # so that the root is the youngest
            if key in blocks:
                blocks.move_to_end(key)
        if self.writes_per_second == inf or not lacking:
            return lacking
        self._fill_budget()
        most = max(1.0, _BUDGET_SECONDS * self.writes_per_second)
        budget, wanted = self._budget, []
        for index in lacking:
            if budget >= 1 and (keys[index] in self._used or budget >= most / 2):
                wanted.append(index)
                budget -= 1
        if is_use:
            self._used.update(keys[index] for index in lacking)
        return wanted

    def _fill_budget(self) -> None:
        now, most = self._clock(), max(1.0, _BUDGET_SECONDS * self.writes_per_second)
        self._budget = min(most, self._budget + (now - self._budget_at) * self.writes_per_second)
        self._budget_at = now

    def expect(self, num_blocks: int) -> Expectation:
        if self.reads_per_second == inf:
            return Expectation(0.0, 0, 0.0)
        now = self._clock()
        self._backlog = max(0.0, self._backlog - (now - self._backlog_at))
        self._backlog_at = now
        return Expectation(self._backlog + num_blocks / self.reads_per_second, int(self._backlog > 0), self._backlog)

    def read(self, transfer: BlockTransfer) -> None:
        if self.reads_per_second != inf:
            self._backlog = self.expect(len(transfer.keys)).seconds or 0.0
        pairs = list(zip(transfer.keys, transfer.slots, strict=True))
        good = tuple(slot for key, slot in pairs if key in self._blocks)
        self.read_blocks += len(good)
        self._pieces.append(Piece(transfer.op_id, good, tuple(slot for key, slot in pairs if key not in self._blocks)))

    def write(self, transfer: BlockTransfer) -> None:
        good = transfer.slots
        if self.writes_per_second != inf:
            self._fill_budget()
            good = transfer.slots[: int(self._budget)]
            self._budget -= len(good)
        self._blocks.update(dict.fromkeys(transfer.keys[: len(good)]))
        self.written += len(good)
        while len(self._blocks) > self._places:
            self._blocks.popitem(last=False)
        self._pieces.append(Piece(transfer.op_id, good, transfer.slots[len(good) :]))

    def cancel(self, op_id: int) -> None: ...

    def purge(self, wish: PurgeWish, then: Callable[[Purged], object], *, dry_run: bool = False) -> None: ...

    def add_extent(self, rank: int, extent: StoredExtent, fd: int, then: Callable[[str], object]) -> None: ...

    def remove_extent(self, rank: int, extent_id: int, then: Callable[[], object]) -> None: ...

    def leave(self, then: Callable[[], object]) -> None: ...


class DiskResult(NamedTuple):
    """The hits among all `blocks`, and how many of them came from the store. `seconds` are CPU time."""

    blocks: int
    hits: int
    from_store: int
    written: int
    seconds: float

    @property
    def percent(self) -> float:
        return 100 * self.hits / self.blocks

    @property
    def microseconds(self) -> float:
        """CPU time for each block of a request."""
        return 1e6 * self.seconds / self.blocks


class TieredPool:
    """A pool with a model of a disk below it, one engine and one rank, in the time of a trace."""

    def __init__(self, slots: int, places: int, *, fine: int = 1, policy: str = "auto") -> None:
        """`fine`: blocks of the pool in one block of the trace."""
        self._fine, self._clock = fine, FakeClock()
        config = EngineConfig(
            slot_bytes=BLOCK_BYTES // fine,
            capacity_slots=slots * fine,
            block_tokens=BLOCK_TOKENS // fine,
            policy=policy,
            curve=False,
        )
        pool = SharedPool(config, clock=self._clock)
        pool.add_extent(slots * fine)
        pool.set_populated(slots * fine)
        self.disk = ModelDisk(places * fine, self._clock)
        self._session = pool.attach("engine", "model")
        report = RankReport.without_pool(0, "boot", "ready", config.slot_bytes)
        self._session.report(replace(report, sender="rank", number=1))
        self._session.set_memory(0, slots * fine, pool.target.desired.number)
        layout = StoredLayout("pool", (config.slot_bytes,), "identity", "owner")
        self._pool = pool
        self._tier = PoolTier(pool, self._session.namespace, self.disk, layout)
        self._tier.session.set_registered(slots * fine, pool.target.desired.number)
        self._of = self._tier.enter(self._session, "model", "fingerprint")
        self._tier.note_prefill(self._of, PrefillCost(COMPUTE_SECONDS / BLOCK_TOKENS))

    def serve(self, at: float, keys: Sequence[bytes]) -> tuple[int, int]:
        """Serve a request at this time. Returns its hits, and how many of them came from the store."""
        session, tier = self._session, self._tier
        self._clock.advance(at - self._clock())
        lease = session.acquire(keys, count=False)
        in_memory = lease.num_keys
        if in_memory < len(keys):
            wait = result_of(tier.look_for(self._of, session, keys, lambda: None, first=in_memory))
            if wait is not None:
                self.disk.run()
                assert wait.is_over
                longer = session.acquire(keys, count=False)
                session.release_leases([lease.lease_id, *(one.lease_id for one in wait.leases)])
                lease = longer
                self._free_owed()
        hits = lease.num_keys
        if hits:
            self._end(session.begin_load(lease, range(hits)))
        self._free_owed()
        if hits < len(keys):
            new = keys[hits:]
            self._end(session.begin_store(new, range(len(new))).op)
            tier.write_stored()
            self.disk.run()
        use_keys(session, keys)
        result_of(tier.note_use(self._of, keys))
        self.disk.run()
        return hits, hits - in_memory

    def _free_owed(self) -> None:
        """Slots of ended leases are freed in steps, which a host makes while it has nothing else to do."""
        while self._pool.debts.pay():
            pass

    def _end(self, op: Op | None) -> None:
        if op is not None:
            self._session.complete(0, "boot", [Completion(op.op_id, "done")])
            self._session.take_settled()


def replay(pool: TieredPool, requests: Sequence[DiskRequest], *, fine: int = 1) -> DiskResult:
    began = time.process_time()
    blocks = hits = from_store = 0
    keys = _Keys(fine)
    making = 0.0
    for request in requests:
        before = time.process_time()
        chain_keys = keys.of(request)
        making += time.process_time() - before
        found, fetched = pool.serve(request.at, chain_keys)
        blocks += len(chain_keys)
        hits += found
        from_store += fetched
    return DiskResult(blocks, hits, from_store, pool.disk.written, time.process_time() - began - making)


class _Keys:
    """Keys as an engine makes them, which end with a hash."""

    def __init__(self, fine: int) -> None:
        self._fine = fine
        self._known: dict[int, list[bytes]] = {}

    def of(self, request: DiskRequest) -> list[bytes]:
        found: list[bytes] = []
        for first, count in request.runs:
            for block in range(first, first + count):
                keys = self._known.get(block)
                if keys is None:
                    keys = self._known[block] = list(self._made(block))
                found += keys
        return found

    def _made(self, block: int) -> Iterator[bytes]:
        for part in range(self._fine):
            yield make_key(0, blake2b((block * self._fine + part).to_bytes(8, "big"), digest_size=32).digest())


class Case(NamedTuple):
    """`share` is relative to what would be written without a limit, which is every distinct block once. `rate` is that
    of reads, in GB/s."""

    trace: str
    slots: int
    places: int
    least: float
    share: float | None = None
    rate: float | None = None
    fine: int = 1
    requests: int | None = None

    def __str__(self) -> str:
        bounds = [f"{self.share:.2g} of the writes"] if self.share else []
        bounds += [f"{self.rate:g} GB/s"] if self.rate else []
        size = f", {FINE} times as many blocks" if self.fine > 1 else ""
        return f"{self.trace}, {self.slots:,} + {self.places:,}{size}, {', '.join(bounds) or 'no bound'}"


AGENTS, FEW_AGENTS, CHATS = "agents-710.runs.jsonl.gz", "agents-120.runs.jsonl.gz", "conversation_trace.jsonl"
CASES = {
    "agents": Case(AGENTS, 4000, 16_000, 93.0),
    "agents-quarter": Case(AGENTS, 4000, 16_000, 76.0, share=0.25),
    "agents-slow": Case(AGENTS, 4000, 16_000, 82.0, rate=7.0),
    "agents-few": Case(FEW_AGENTS, 1000, 4000, 0.0),
    "agents-few-fine": Case(FEW_AGENTS, 1000, 4000, 0.0, fine=FINE),
    "chats": Case(CHATS, 2000, 32_000, 33.0),
    "chats-quarter": Case(CHATS, 2000, 32_000, 21.5, share=0.25),
}


def measure(case: Case, *, policy: str = "auto") -> DiskResult:
    requests = read(DATA / case.trace)[: case.requests]
    pool = TieredPool(case.slots, case.places, fine=case.fine, policy=policy)
    if case.share is not None:
        distinct = {block for one in requests for first, count in one.runs for block in range(first, first + count)}
        duration = requests[-1].at - requests[0].at
        pool.disk.writes_per_second = case.share * len(distinct) * case.fine / duration
    if case.rate is not None:
        pool.disk.reads_per_second = case.rate * 1e9 * case.fine / BLOCK_BYTES
    return replay(pool, requests, fine=case.fine)


def run(names: Sequence[str], say: Callable[[str], None]) -> list[Table]:
    rows: list[list[str]] = []
    for name in names:
        case = CASES[name]
        if not (DATA / case.trace).exists():
            say(f"disk, {name}: there is no trace at {DATA / case.trace}")
            continue
        result = measure(case)
        say(f"disk, {case}: {result.percent:.2f} %")
        bar = f"{case.least:g} %, {verdict(result.percent >= case.least)}" if case.least else ""
        rows.append(
            [
                str(case),
                f"{result.percent:.2f} %",
                bar,
                f"{result.written:,}",
                f"{result.microseconds:.1f} us",
            ]
        )
    head = ["trace, blocks in the pool and in the store", "blocks that hit", "bar", "written", "CPU for each block"]
    return [Table("Hits with a model of a disk below the pool", head, rows)]
