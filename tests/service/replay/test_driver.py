"""The driver over ranks whose faults the test chooses: what a faulty data plane does must be seen or survived."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
from tests.doubles.rank import ready_report
from tests.embeddedreplay import EmbeddedOffload, LocalRanks, Worker, replay_driver

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.devices.base import Fence
from kvstow.errors import InvalidRequestError, LeaseError
from kvstow.messages import Completion, Op, RankReport, StepPlan
from kvstow.prefill import PrefillCost, PrefillNews
from kvstow.results import Awaited, Given, Lease, Settled, StoreGrant
from kvstow_service.replay.driver import ReplayDriver, blocks_needed
from kvstow_service.replay.kv import HostKV, Page
from kvstow_service.replay.trace import BLOCK_TOKENS, ReplayOptions, TraceRequest

PAGE = 24
SLOTS = 200
Step = Callable[[], Completion]
T = TypeVar("T")


@dataclass
class MemoryWorker:
    """A rank that copies between its KV cache and a plain array, op by op, when completions are taken.

    `fault(op)` returns how to do an op instead, as steps that each give a completion.
    """

    rank: int
    kv: Page
    fault: Callable[["MemoryWorker", Op], list[Step] | None] = lambda worker, op: None
    boot_id: str = field(default_factory=lambda: secrets.token_hex(4))

    def __post_init__(self) -> None:
        self.pool = np.zeros((SLOTS, self.kv.shape[1]), np.uint8)
        self.steps: list[Step] = []
        self.held = False

    def submit(self, plan: StepPlan, after: Fence | None = None) -> None:
        for op in plan.ops:
            self.steps += self.fault(self, op) or [lambda op=op: self.copy(op)]  # type: ignore[misc]

    def copy(self, op: Op) -> Completion:
        blocks, slots = list(op.blocks), list(op.slots)
        if op.direction == "store":
            self.pool[slots] = self.kv[blocks]
        else:
            self.kv[blocks] = self.pool[slots]
        return Completion(op.op_id, "done", num_bytes=len(op.blocks) * PAGE, seconds=0.001)

    def take_completions(self) -> list[Completion]:
        """One step at a time, so that steps of several ops and ranks interleave with the driver's."""
        return [self.steps.pop(0)()] if self.steps and not self.held else []

    def wait_completions(self, timeout: float) -> bool:
        return bool(self.steps) and not self.held

    def report(self) -> RankReport:
        return ready_report(PAGE, SLOTS, rank=self.rank, boot_id=self.boot_id)


@dataclass
class LateAnswer(Generic[T]):
    """Known at once, and shown some steps later."""

    value: T
    offload: "LateOffload"
    due: int

    @property
    def done(self) -> bool:
        return self.offload.steps >= self.due


class LateOffload(EmbeddedOffload):
    """Answers as the node service does: in order, steps after they were asked for."""

    def __init__(self, engine: OffloadEngine, workers: Sequence[Worker], delay: int) -> None:
        super().__init__(engine, workers)
        self.delay, self.steps = delay, 0

    def wait(self, seconds: float) -> None:
        """Does nothing, because answers come with the steps, not with the time."""

    def step(self) -> None:
        self.steps += 1

    def _late(self, answer: Awaited[T]) -> Given[T]:
        late: Any = LateAnswer(answer.value, self, self.steps + self.delay)
        return late  # type: ignore[no-any-return]

    def admit(self, number: int, keys: Sequence[bytes]) -> Given[Lease]:
        return self._late(super().admit(number, keys))

    def hold(self, keys: Sequence[bytes]) -> Given[Lease]:
        return self._late(super().hold(keys))

    def begin_load(self, lease: Lease, blocks: Sequence[int], request_id: str) -> Given[Op | None]:
        return self._late(super().begin_load(lease, blocks, request_id))

    def begin_store(self, keys: Sequence[bytes], blocks: Sequence[int], request_id: str) -> Given[StoreGrant]:
        return self._late(super().begin_store(keys, blocks, request_id))


@dataclass
class Bench:
    """A driver with all it drives."""

    engine: OffloadEngine
    workers: list[MemoryWorker]
    offload: EmbeddedOffload
    driver: ReplayDriver
    kv_blocks: int

    def assert_all_given_back(self) -> None:
        assert self.driver.free_blocks == self.kv_blocks
        assert self.engine.stats().pool.leases == 0
        self.engine.check_integrity()


@contextmanager
def bench(
    requests: Sequence[TraceRequest],
    options: ReplayOptions = ReplayOptions(),  # noqa: B008 - frozen
    *,
    ranks: int = 2,
    fault: Callable[[MemoryWorker, Op], list[Step] | None] = lambda worker, op: None,
    engine_type: type[OffloadEngine] = OffloadEngine,
    on_request: Callable[[int], None] = lambda finished: None,
    delay: int = 0,
    offload_type: type[EmbeddedOffload] = EmbeddedOffload,
    kv_blocks: int | None = None,
) -> Iterator[Bench]:
    engine = engine_type(EngineConfig(slot_bytes=PAGE, capacity_slots=SLOTS, num_ranks=ranks, policy="lru"))
    kv_blocks = kv_blocks or blocks_needed(requests, options.concurrency)
    caches = [np.zeros((kv_blocks, PAGE), np.uint8) for _ in range(ranks)]
    workers = [MemoryWorker(rank, cache, fault) for rank, cache in enumerate(caches)]
    for worker in workers:
        engine.report(worker.report())
    kv = [HostKV(rank, [cache]) for rank, cache in enumerate(caches)]
    offload = LateOffload(engine, workers, delay) if delay else offload_type(engine, workers)
    local = LocalRanks(workers, kv)
    driver = replay_driver(offload, local, requests, options, kv_blocks=kv_blocks, on_request=on_request)
    try:
        yield Bench(engine, workers, offload, driver, kv_blocks)
    finally:
        engine.close()


def loads_on_rank_1(op: Op, worker: MemoryWorker) -> bool:
    return worker.rank == 1 and op.direction == "load"


@pytest.mark.parametrize("concurrency", [1, 4])
def test_every_loaded_byte_of_sound_ranks_is_right(conversations: list[TraceRequest], concurrency: int) -> None:
    with bench(conversations, ReplayOptions(concurrency=concurrency)) as parts:
        result = parts.driver.run(Event())
        parts.assert_all_given_back()
    assert (result.requests, result.mismatches) == (len(conversations), 0)
    assert result.verified_bytes == result.loaded.num_bytes == result.loaded.blocks * PAGE * 2 > 0
    assert result.stored.num_bytes == result.stored.blocks * PAGE * 2
    assert result.evicted_blocks


@pytest.mark.parametrize("delay", [1, 5])
def test_answers_that_come_later_change_nothing_but_the_time(conversations: list[TraceRequest], delay: int) -> None:
    results = []
    for steps in (0, delay):
        with bench(conversations, delay=steps) as parts:
            results.append(parts.driver.run(Event()))
            parts.assert_all_given_back()
    at_once, later = results
    for result in results:
        result.seconds = result.request_seconds = result.loaded.seconds = result.stored.seconds = 0.0
    assert later == at_once
    assert later.loaded.num_bytes > 0


def test_requests_go_on_while_others_wait_for_answers(conversations: list[TraceRequest]) -> None:
    waiting: list[int] = []

    def count(finished: int) -> None:
        waiting.append(len(parts.driver.position.in_flight))

    with bench(conversations, ReplayOptions(concurrency=4), delay=3, on_request=count) as parts:
        result = parts.driver.run(Event())
        parts.assert_all_given_back()
    assert (result.requests, result.mismatches) == (len(conversations), 0)
    assert max(waiting) == 3


def test_what_prefills_cost_and_what_loads_have_saved_is_told_where_the_replay_has_a_speed(
    conversations: list[TraceRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[PrefillNews] = []
    monkeypatch.setattr(OffloadEngine, "note_prefill", lambda self, news: reported.append(news))
    with bench(conversations[:5]) as parts:
        parts.driver.run(Event())
    assert reported == []
    with bench(conversations[:5], ReplayOptions(prefill_rate=1e7)) as parts:
        result = parts.driver.run(Event())
    assert {news.cost for news in reported} == {PrefillCost(1e-7)}
    assert sum(news.hit_tokens for news in reported) == result.hit_blocks * BLOCK_TOKENS > 0
    assert sum(news.hit_seconds for news in reported) == pytest.approx(result.hit_blocks * BLOCK_TOKENS / 1e7)


def test_rates_are_bytes_over_the_busy_time_of_copies(conversations: list[TraceRequest]) -> None:
    loads = 0

    def count(worker: MemoryWorker, op: Op) -> None:
        nonlocal loads
        loads += op.direction == "load"

    with bench(conversations[:50], fault=count) as parts:
        result = parts.driver.run(Event())
    assert result.loaded.gbps == pytest.approx(result.loaded.num_bytes / (loads * 0.001) / 1e9)


def test_a_flipped_byte_on_one_rank_is_a_mismatch(conversations: list[TraceRequest]) -> None:
    def flip(worker: MemoryWorker, op: Op) -> list[Step] | None:
        def corrupted() -> Completion:
            completion = worker.copy(op)
            worker.kv[op.blocks[0], PAGE - 1] ^= 1
            return completion

        return [corrupted] if loads_on_rank_1(op, worker) else None

    with bench(conversations[:60], fault=flip) as parts:
        result = parts.driver.run(Event())
        parts.assert_all_given_back()
    assert not result.ok
    assert 0 < result.mismatches < result.loaded.blocks
    assert "rank 1" in result.first_mismatches[0]
    assert len(result.first_mismatches) == 5


def test_a_load_that_writes_nothing_is_a_mismatch(conversations: list[TraceRequest]) -> None:
    def skip(worker: MemoryWorker, op: Op) -> list[Step] | None:
        return [lambda: Completion(op.op_id, "done")] if loads_on_rank_1(op, worker) else None

    with bench(conversations, fault=skip) as parts:
        result = parts.driver.run(Event())
    assert result.mismatches == result.loaded.blocks > 0


def test_a_store_that_reads_blocks_after_it_freed_them_is_a_mismatch(conversations: list[TraceRequest]) -> None:
    def read_late(worker: MemoryWorker, op: Op) -> list[Step] | None:
        if op.direction == "load":
            return None
        return [lambda: Completion(op.op_id, "source_free"), lambda: worker.copy(op)]

    with bench(conversations, fault=read_late) as parts:
        result = parts.driver.run(Event())
    assert result.mismatches > 0


def test_a_store_that_reads_blocks_before_it_frees_them_is_right(conversations: list[TraceRequest]) -> None:
    def read_early(worker: MemoryWorker, op: Op) -> list[Step] | None:
        if op.direction == "load":
            return None
        done: list[Completion] = []

        def read() -> Completion:
            done.append(worker.copy(op))
            return Completion(op.op_id, "source_free")

        return [read, lambda: done[0]]

    with bench(conversations, ReplayOptions(concurrency=3), fault=read_early) as parts:
        result = parts.driver.run(Event())
        parts.assert_all_given_back()
    assert result.ok
    assert result.loaded.blocks > 0


def test_failed_loads_are_computed_again_and_stored_anew(conversations: list[TraceRequest]) -> None:
    failed: list[Op] = []

    def fail_the_first_three(worker: MemoryWorker, op: Op) -> list[Step] | None:
        if not loads_on_rank_1(op, worker) or len(failed) == 3:
            return None
        failed.append(op)
        worker.kv[list(op.blocks)] = 1  # a failed load may have written anything
        return [lambda: Completion(op.op_id, "failed", error="torn")]

    with bench(conversations, fault=fail_the_first_three) as parts:
        result = parts.driver.run(Event())
        parts.assert_all_given_back()
    assert result.loaded.failed == sum(len(op.blocks) for op in failed)
    assert (result.requests, result.mismatches) == (len(conversations), 0)
    assert result.hit_blocks == result.loaded.blocks + result.loaded.failed
    assert result.stored.blocks == result.blocks - result.loaded.blocks


def test_failed_stores_are_counted_and_missed_later(conversations: list[TraceRequest]) -> None:
    def fail(worker: MemoryWorker, op: Op) -> list[Step] | None:
        return [lambda: Completion(op.op_id, "failed", error="torn")] if worker.rank == 0 else None

    with bench(conversations[:20], fault=fail) as parts:
        result = parts.driver.run(Event())
        parts.assert_all_given_back()
    assert result.stored.failed == result.blocks
    assert (result.hit_blocks, result.stored.blocks) == (0, 0)


def test_a_broken_lease_is_a_miss(conversations: list[TraceRequest]) -> None:
    class Breaking(OffloadEngine):
        def begin_load(self, lease: Lease, blocks: Sequence[int], **options: Any) -> Op:
            raise LeaseError("broken")

    with bench(conversations, engine_type=Breaking) as parts:
        result = parts.driver.run(Event())
        parts.assert_all_given_back()
    assert (result.requests, result.hit_blocks) == (len(conversations), 0)


def test_dropped_stores_are_counted_by_reason(conversations: list[TraceRequest]) -> None:
    with bench(conversations[:10]) as parts:
        parts.engine.admin.drain("stop_stores", None)
        result = parts.driver.run(Event())
        parts.assert_all_given_back()
    assert result.dropped_stores == sum(result.drops.values()) == result.blocks
    assert list(result.drops) == ["dropped_draining"]


class StopAfterTen(Event):
    def on_request(self, finished: int) -> None:
        if finished == 10:
            self.set()


def test_a_stop_lets_what_is_in_flight_finish(conversations: list[TraceRequest]) -> None:
    stop = StopAfterTen()
    with bench(conversations, ReplayOptions(concurrency=4), on_request=stop.on_request) as parts:
        result = parts.driver.run(stop)
        parts.assert_all_given_back()
        assert parts.engine.stats().transfers.pending.loads == parts.engine.stats().transfers.pending.stores == 0
    assert 10 <= result.requests < 10 + 4
    assert result.abandoned == 0


def test_a_stop_ends_a_replay_of_which_nothing_is_stored(conversations: list[TraceRequest]) -> None:
    stop = StopAfterTen()
    with bench(conversations, ReplayOptions(concurrency=4), on_request=stop.on_request) as parts:
        parts.engine.admin.drain("all", None)  # every store is dropped: a request ends as it starts
        result = parts.driver.run(stop)
        parts.assert_all_given_back()
    assert 10 <= result.requests < 10 + 4 < len(conversations), "those that had started may end"


def test_ops_get_to_their_ranks_while_other_requests_end_as_they_start(conversations: list[TraceRequest]) -> None:
    finished: list[int] = [0]

    class Dropping(OffloadEngine):
        """Grants every eighth store; notes how many requests end between two looks at what is settled."""

        def begin_store(self, keys: Sequence[bytes], blocks: Sequence[int], *, request_id: str = "") -> StoreGrant:
            if int(request_id) % 8:
                return StoreGrant(None, (), {"dropped_not_ready": len(keys)})
            return super().begin_store(keys, blocks, request_id=request_id)

        def take_settled(self) -> list[Settled]:
            finished.append(0)
            return super().take_settled()

    def count(_: int) -> None:
        finished[-1] += 1

    options = ReplayOptions(concurrency=4)
    with bench(conversations, options, engine_type=Dropping, on_request=count) as parts:
        result = parts.driver.run(Event())
        parts.assert_all_given_back()
    assert result.stored.blocks > 0
    assert max(finished) <= 2 * options.concurrency


def test_a_stop_gives_up_what_does_not_finish_in_time(conversations: list[TraceRequest]) -> None:
    stop = Event()

    def hold(finished: int) -> None:
        if finished == 10:
            for worker in parts.workers:
                worker.held = True
            stop.set()

    options = ReplayOptions(concurrency=4, drain_seconds=0.0)
    with bench(conversations, options, on_request=hold) as parts:
        result = parts.driver.run(stop)
        parts.assert_all_given_back()
    assert (result.requests, result.abandoned) == (10, 3)


def test_an_engine_error_gives_leases_and_blocks_back(conversations: list[TraceRequest]) -> None:
    class Failing(OffloadEngine):
        def begin_load(self, lease: Lease, blocks: Sequence[int], **options: Any) -> Op:
            self.release_lease(lease)
            raise InvalidRequestError("defect")

    with bench(conversations, engine_type=Failing) as parts:
        with pytest.raises(InvalidRequestError, match="defect"):
            parts.driver.run(Event())
        parts.assert_all_given_back()


def test_a_request_that_does_not_fit_the_kv_cache_is_refused_at_once(conversations: list[TraceRequest]) -> None:
    with bench(conversations) as parts:
        ranks = LocalRanks(parts.workers)
        with pytest.raises(InvalidRequestError, match="the KV cache 3; allowed: "):
            replay_driver(parts.offload, ranks, conversations, ReplayOptions(), kv_blocks=3)


def test_requests_wait_until_they_are_due(conversations: list[TraceRequest]) -> None:
    with bench(conversations[:5], ReplayOptions(rate=100.0)) as parts:
        result = parts.driver.run(Event())
    assert result.seconds >= 0.04
    assert result.requests == 5


def test_figures_can_be_read_while_the_replay_runs(conversations: list[TraceRequest]) -> None:
    seen: list[int] = []
    with bench(conversations[:5], on_request=lambda finished: seen.append(parts.driver.result().requests)) as parts:
        parts.driver.run(Event())
    assert seen == [1, 2, 3, 4, 5]


# -- requests that overlap ---------------------------------------------------------------------------------------------


class Watched(EmbeddedOffload):
    """Notes when requests begin and end, by their first key, and how they end."""

    def __init__(self, engine: OffloadEngine, workers: Sequence[Worker]) -> None:
        super().__init__(engine, workers)
        self.noted: list[tuple[str, bytes, str | None]] = []
        self.first_keys: dict[int, bytes] = {}
        self.on_admit: Callable[[], None] = lambda: None
        self.on_step: Callable[[], None] = lambda: None

    def step(self) -> None:
        self.on_step()

    def admit(self, number: int, keys: Sequence[bytes]) -> Awaited[Lease]:
        self.first_keys[number] = keys[0]
        self.noted.append(("begins", keys[0], None))
        self.on_admit()
        return super().admit(number, keys)

    def end(self, number: int, stop: str | None) -> bool:
        self.noted.append(("ends", self.first_keys[number], stop))
        return super().end(number, stop)


def watched(parts: Bench) -> Watched:
    offload = parts.offload
    assert isinstance(offload, Watched)
    return offload


LONG = TraceRequest(0, 1, 1, (1, 2), end=100, stop="end_turn")
SHORT = TraceRequest(10, 1, 1, (3,), end=20, stop="tool_use")
LATER = TraceRequest(50, 1, 1, (4,), end=60, stop="")


def test_a_request_runs_until_it_has_ended_in_the_trace_and_keeps_its_blocks_so_long() -> None:
    free: list[int] = []

    def read_first(worker: MemoryWorker, op: Op) -> list[Step]:
        done = worker.copy(op)
        return [lambda: replace(done, mark="source_free"), lambda: done]

    with bench([LONG, SHORT, LATER], offload_type=Watched, fault=read_first) as parts:
        offload = watched(parts)
        offload.on_admit = lambda: free.append(parts.driver.free_blocks)
        result = parts.driver.run(Event())
        parts.assert_all_given_back()
    first, second, third = (request.keys()[0] for request in (LONG, SHORT, LATER))
    assert offload.noted[:4] == [
        ("begins", first, None),
        ("begins", second, None),
        ("ends", second, "tool_use"),
        ("begins", third, None),
    ]
    assert sorted(offload.noted[4:]) == sorted([("ends", first, "end_turn"), ("ends", third, "")])
    assert free == [1, 0, 0], "KV blocks of requests that run"
    assert (result.requests, result.mismatches, result.abandoned) == (3, 0, 0)


def test_without_room_for_the_next_request_the_one_that_ends_first_ends_early() -> None:
    with bench([LONG, SHORT, LATER], offload_type=Watched, kv_blocks=2) as parts:
        assert parts.driver.run(Event()).requests == 3
        parts.assert_all_given_back()
    assert [what for what, *_ in watched(parts).noted] == ["begins", "ends", "begins", "ends", "begins", "ends"]


def test_a_replay_needs_blocks_for_all_that_run_at_once() -> None:
    assert blocks_needed([LONG, SHORT, LATER], 1) == 3
    assert blocks_needed([LONG, SHORT, LATER], 3) == 3 + 2 * 2
    assert blocks_needed([one._replace(end=None) for one in (LONG, SHORT, LATER)], 3) == 3 * 2


def test_a_stop_ends_what_only_generates() -> None:
    """At the trace's own pace it would generate for days."""
    stop = Event()
    with bench([LONG._replace(end=1e9)], ReplayOptions(time_scale=1.0), offload_type=Watched) as parts:

        def stop_when_stored() -> None:
            if parts.driver.result().stored.blocks and parts.driver.position.in_flight:
                stop.set()

        watched(parts).on_step = stop_when_stored
        result = parts.driver.run(stop)
        parts.assert_all_given_back()
    assert (result.requests, result.abandoned) == (1, 0)
