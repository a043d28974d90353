"""Replays a trace with the calls that an inference connector makes to the control plane, in steps like a scheduler's.

A request leases the leading run of its keys, loads it into KV blocks, computes the rest, and stores that. Then it
generates its answer, and keeps its KV blocks meanwhile. In a replay at the trace's pace it ends at its end in the
trace. At a constant rate, generating takes no time. Otherwise it ends when the next request to start is one that began
after that end in the trace. While one request waits for an answer of the control plane, the others continue. Every
loaded byte is verified, and freed blocks are overwritten. So the replay notices a store that still reads its blocks
after `source_free`, and a load that writes nothing.

Threads: `run` does all work on the caller's thread. Meanwhile no other code may take settled ops or the workers'
completions. Any thread may call `result` and set the stop event.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import TypeVar

from kvstow.attach.wire import MOST_STORED
from kvstow.errors import InvalidRequestError
from kvstow.keys import BlockKey
from kvstow.messages import Completion, Op, StepPlan
from kvstow.prefill import PrefillCost, PrefillNews
from kvstow.results import Awaited, Lease, Settled, StoreGrant
from kvstow_service.replay.kv import Verification
from kvstow_service.replay.offload import AttachedOffload
from kvstow_service.replay.remoteranks import RemoteRanks
from kvstow_service.replay.result import Position, ReplayResult
from kvstow_service.replay.trace import BLOCK_TOKENS, ReplayOptions, TraceRequest, events

_log = logging.getLogger("kvstow.replay")

_WAIT = 0.05  # seconds after which the loop looks again for a stop and for news of the other ranks


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Computed:
    """An answer that is there at `moment`, when the model has computed a request's blocks."""

    moment: float
    value: None = None
    error: None = None

    @property
    def done(self) -> bool:
        return time.monotonic() >= self.moment


@dataclass(slots=True)
class _Job:
    """A running request. Its first `loaded` blocks come from the pool, and the ranks have copied `loaded_bytes` for
    them in `load_seconds`. Of the blocks after these, the first `offered` were offered to the pool. `blocks` is empty
    once they are freed.

    `hold` keeps the hit prefix leased until the rest is stored, so that the prefix goes back to the order of eviction
    last and outlives its continuation. `go_on` continues the request if the answer that it waits for is there, and
    returns whether it was. It is None while the request waits for a copy. `is_ending` says that the answer to the user
    is complete, and that blocks which the pool lacks are being stored.
    """

    number: int
    request: TraceRequest
    keys: list[BlockKey]
    blocks: list[int]
    hold: Awaited[Lease] | None = None
    go_on: Callable[[], bool] | None = None
    loaded: int = 0
    offered: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    started: float = 0.0
    is_ending: bool = False


class ReplayDriver:
    """One replay of `requests` over the ranks of one engine.

    Each rank's KV cache has `kv_blocks` blocks, and only the replay uses it while it runs. `on_request` is called on
    the thread of `run` with the number of finished requests. Raises `InvalidRequestError` for a request that does not
    fit the KV cache.
    """

    def __init__(
        self,
        offload: AttachedOffload,
        ranks: RemoteRanks,
        requests: Sequence[TraceRequest],
        options: ReplayOptions,
        *,
        kv_blocks: int,
        on_request: Callable[[int], None] = lambda finished: None,
    ) -> None:
        check_fits(requests, kv_blocks)
        self._offload, self._ranks = offload, ranks
        self._requests = requests
        self._options = options
        self._on_request = on_request
        self._free = deque(range(kv_blocks))
        """KV blocks that no request holds. They are reused in the order in which they were freed, as in an inference
        engine, so that a block is reused as late as possible."""
        self._next = 0
        self._jobs: dict[int, _Job] = {}
        self._asking: dict[int, _Job] = {}
        """Requests that wait for an answer, in the order in which they asked."""
        self._plan: list[Op] = []
        self._ops: dict[int, tuple[Op, _Job]] = {}
        self._generating: list[tuple[float, int]] = []
        """A heap of the requests that have stored everything: their ends in the trace, and their numbers."""
        self._unverified: deque[_Job] = deque()
        """Requests whose loads are being verified, in order."""
        self._tally = ReplayResult(ranks=len(ranks.workers))
        """Figures that are counted here while `run` is active."""
        self._model_is_free = 0.0
        """The time at which the model will have computed all blocks that it was given."""
        self._started = self._ended = 0.0

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def position(self) -> Position:
        return Position(tuple(self._jobs), self._next)

    def run(self, stop: threading.Event) -> ReplayResult:
        """Replay to the end, or until `stop` is set. After that no request starts, and running ones have
        `drain_seconds` to finish. In any case, all leases and KV blocks are given back."""
        self._started = time.monotonic()
        deadline = float("inf")
        try:
            while not self._finished(stop):
                self._offload.step()
                if stop.is_set():
                    deadline = min(deadline, time.monotonic() + self._options.drain_seconds)
                    if time.monotonic() >= deadline:
                        break
                has_moved = self._end_requests(stop)
                if not stop.is_set():
                    self._admit(stop)
                has_moved |= self._take_answers()
                self._submit_step()
                has_moved |= self._collect()
                if not has_moved and not self._finished(stop):
                    self._wait(stop)
        finally:
            self._abandon()
            self._ended = time.monotonic()
        return self.result()

    def result(self) -> ReplayResult:
        """Return the present figures. While `run` is active, they may be of slightly different times."""
        seconds = (self._ended or time.monotonic()) - self._started if self._started else 0.0
        tally = self._tally
        return replace(
            tally,
            seconds=seconds,
            drops=tally.drops.copy(),
            stored=replace(tally.stored),
            loaded=replace(tally.loaded),
            **self._offload.figures(),
        )

    def _finished(self, stop: threading.Event) -> bool:
        return not self._jobs and not self._ranks.is_verifying and (stop.is_set() or self._next == len(self._requests))

    # One step: requests start, their ops go to every rank, and final ops let their requests continue.

    def _end_requests(self, stop: threading.Event) -> bool:
        """End the generating requests whose time is over, in the order of their ends. Without a pace, they end when the
        next request may start, and not before: as in the trace, the request before that must have been stored. Returns
        whether there were any."""
        if not stop.is_set() and self._options.time_scale is None and self._in_flight >= self._options.concurrency:
            return False
        has_moved = False
        while self._generating and (stop.is_set() or self._is_over(self._generating[0][0])):
            self._end_first()
            has_moved = True
        return has_moved

    @property
    def _in_flight(self) -> int:
        """How many requests load, compute or store."""
        return len(self._jobs) - len(self._generating)

    def _end_first(self) -> None:
        _, number = heappop(self._generating)
        self._end(self._jobs[number])

    def _is_over(self, ended: float) -> bool:
        """Whether a request with this end in the trace is over. At a constant rate it always is, and so it is when no
        request is left to start. Without any pace, the timestamp of the next request to start stands for the present
        time, so that requests start and end in the trace's order."""
        if self._options.rate is not None or self._next == len(self._requests):
            return True
        due = self._options.due_end(ended, self._requests[0])
        return ended <= self._requests[self._next].timestamp if due is None else self._seconds_to(due) <= 0

    def _admit(self, stop: threading.Event) -> None:
        """Start requests until the limit for requests in flight is reached. A request that loads and stores nothing
        ends as soon as it starts, so the number of starts is limited too. Otherwise the ops of others would not reach
        their ranks."""
        for _ in range(self._options.concurrency):
            self._make_room()
            if stop.is_set() or not self._may_admit() or self._seconds_to_due() > 0:
                return
            self._start(self._next, self._requests[self._next])
            self._next += 1

    def _make_room(self) -> None:
        """Without a pace, end generating requests early if the next request needs their KV blocks to start."""
        if self._options.time_scale is not None or self._next == len(self._requests):
            return
        while self._generating and not self._in_flight and not self._may_admit():
            self._end_first()

    def _take_answers(self) -> bool:
        """Continue the requests whose answers have come. Returns whether there were any."""
        has_moved = False
        for job in list(self._asking.values()):
            while job.go_on is not None and job.go_on():
                has_moved = True
        return has_moved

    def _submit_step(self) -> None:
        """Submit the planned ops to the workers, which order them after the work that their devices have already."""
        if not self._plan:
            return
        plan = StepPlan(tuple(self._plan))
        for worker in self._ranks.workers:
            worker.submit(plan)
        self._plan.clear()

    def _collect(self) -> bool:
        """Take completions and results. Returns whether an op became final, or freed its blocks, on all ranks."""
        for rank, worker in enumerate(self._ranks.workers):
            if completions := worker.take_completions():
                self._count_copies(completions)
                self._offload.engine.complete(rank, worker.boot_id, completions)
        settled = self._offload.engine.take_settled()
        for entry in settled:
            self._advance(entry)
        for found in self._ranks.take_verifications():
            self._count_verified(self._unverified.popleft(), found)
        return bool(settled)

    def _wait(self, stop: threading.Event) -> None:
        may_admit = not stop.is_set() and self._may_admit()
        timeout = max(0.0, min(_WAIT, self._seconds_to_due())) if may_admit else _WAIT
        if (left := self._model_is_free - time.monotonic()) > 0:
            timeout = min(timeout, left)
        if self._generating:
            due_end = self._options.due_end(self._generating[0][0], self._requests[0])
            timeout = timeout if due_end is None else min(timeout, max(0.0, self._seconds_to(due_end)))
        self._offload.wait(timeout)

    def _may_admit(self) -> bool:
        """Whether there is a next request, and room for it. It need not be due."""
        if self._next == len(self._requests) or self._in_flight >= self._options.concurrency:
            return False
        return len(self._requests[self._next].hash_ids) <= len(self._free)

    def _seconds_to_due(self) -> float:
        due = self._options.due(self._next, self._requests[self._next], self._requests[0])
        return self._seconds_to(due) if due > 0 else 0.0

    def _seconds_to(self, due: float) -> float:
        """Return the seconds until a time that is given in seconds after the start of the replay."""
        return self._started + due - time.monotonic()

    # The life of a request.

    def _start(self, number: int, request: TraceRequest) -> None:
        job = _Job(number, request, request.keys(), [self._free.popleft() for _ in request.hash_ids])
        job.started = time.monotonic()
        self._jobs[number] = job
        self._tally.blocks += len(job.keys)
        if not number:
            self._tally.first_blocks = len(job.keys)
        self._ask(job, self._offload.admit(number, job.keys), self._found)

    def _ask(self, job: _Job, answer: Awaited[_T], then: Callable[[_Job, _T], None]) -> None:
        """Call `then` with the answer, now or as soon as it is there."""

        def go_on() -> bool:
            if not answer.done:
                return False
            job.go_on = None
            del self._asking[job.number]
            then(job, answer.value)
            return True

        job.go_on = go_on
        self._asking[job.number] = job
        go_on()

    def _found(self, job: _Job, lease: Lease) -> None:
        hits = lease.num_keys
        if not hits:
            self._store(job)
            return
        job.hold = self._offload.hold(job.keys[:hits])
        answer = self._offload.begin_load(lease, job.blocks[:hits], str(job.number))
        self._ask(job, answer, self._load_begun)

    def _load_begun(self, job: _Job, op: Op | None) -> None:
        """Load the hits. There is no op if the lease was broken meanwhile; its blocks then count as misses."""
        if op is None:
            self._release(job)
            self._store(job)
            return
        job.loaded = len(op.blocks)
        self._tally.hit_blocks += job.loaded
        if not job.number:
            self._tally.first_hit_blocks = job.loaded
        self._plan_op(op, job)

    def _store(self, job: _Job) -> None:
        """Compute the blocks that were not loaded, then store them. The engine skips those that another request has
        stored meanwhile."""
        now = time.monotonic()
        missing = len(job.keys) - job.loaded
        seconds = self._options.prefill_seconds(missing)
        if self._options.prefill_rate is not None:
            saved = self._options.prefill_seconds(job.loaded)
            cost = PrefillCost(1 / self._options.prefill_rate)
            self._offload.engine.note_prefill(PrefillNews(cost, job.loaded * BLOCK_TOKENS, saved))
        self._model_is_free = max(self._model_is_free, now) + seconds
        self._ask(job, _Computed(self._model_is_free if seconds else now), self._computed)

    def _computed(self, job: _Job, _: None) -> None:
        self._tally.request_seconds += time.monotonic() - job.started
        keys, blocks = job.keys[job.loaded :], job.blocks[job.loaded :]
        self._ranks.compute(keys, blocks)
        self._store_more(job)

    def _store_more(self, job: _Job) -> None:
        """Store the next part of the computed blocks."""
        part = slice(job.loaded + job.offered, job.loaded + job.offered + MOST_STORED)
        keys, blocks = job.keys[part], job.blocks[part]
        job.offered += len(keys)
        if keys:
            self._ask(job, self._offload.begin_store(keys, blocks, str(job.number)), self._store_begun)
        else:
            (self._forget if job.is_ending else self._generate)(job)

    def _store_begun(self, job: _Job, grant: StoreGrant) -> None:
        for outcome, count in grant.outcomes.items():
            if outcome.startswith("dropped") and count:
                self._tally.drops[outcome] += count
        if grant.op is not None:
            self._plan_op(grant.op, job)
        else:
            self._store_more(job)

    def _plan_op(self, op: Op, job: _Job) -> None:
        self._plan.append(op)
        self._ops[op.op_id] = op, job

    def _advance(self, settled: Settled) -> None:
        if settled.op_id not in self._ops:
            return  # the op is of an earlier replay on this engine, which was stopped
        op, job = self._ops[settled.op_id]
        if settled.mark == "source_free":
            is_offered = job.loaded + job.offered == len(job.keys)
            if self._is_over(job.request.ended) and is_offered and not job.is_ending:
                self._free_blocks(job)
            return
        del self._ops[settled.op_id]
        if op.direction == "load":
            self._loaded(job, settled)
            self._store(job)
        else:
            self._stored(settled)
            self._store_more(job)

    def _loaded(self, job: _Job, settled: Settled) -> None:
        if settled.mark == "done":
            self._unverified.append(job)
            self._ranks.verify(job.keys[: job.loaded], job.blocks[: job.loaded])
            return
        _log.warning("a load of %d blocks failed, computing them again: %s", job.loaded, settled.error)
        self._tally.loaded.failed += job.loaded
        job.loaded = 0
        self._release(job)

    def _stored(self, settled: Settled) -> None:
        if settled.mark == "done":
            self._tally.stored.blocks += len(settled.blocks)
            return
        _log.warning("a store of %d blocks failed: %s", len(settled.blocks), settled.error)
        self._tally.stored.failed += len(settled.blocks)

    def _generate(self, job: _Job) -> None:
        """Go on after everything is stored. The request keeps its KV blocks until its answer is complete, as in an
        inference engine."""
        self._release(job)
        heappush(self._generating, (job.request.ended, job.number))

    def _end(self, job: _Job) -> None:
        """End a request, whose answer is complete. Blocks that the pool has refused, or lent to others, are stored
        now."""
        if self._offload.end(job.number, job.request.stop) and job.blocks:
            job.is_ending, job.offered = True, -job.loaded  # offer all blocks, the loaded ones included
            self._store_more(job)
        else:
            self._forget(job)

    def _forget(self, job: _Job) -> None:
        self._free_blocks(job)
        del self._jobs[job.number]
        self._tally.requests += 1
        self._on_request(self._tally.requests)

    def _release(self, job: _Job) -> None:
        if job.hold is not None:
            self._offload.release(job.hold)
            job.hold = None

    def _free_blocks(self, job: _Job) -> None:
        self._ranks.scrub(job.blocks)
        self._free.extend(job.blocks)
        job.blocks = []

    def _abandon(self) -> None:
        """Give back the leases and KV blocks of unfinished requests. The blocks are not overwritten, because copies may
        still use them."""
        for job in self._jobs.values():
            self._release(job)
            self._free.extend(job.blocks)
        self._asking.clear()
        self._generating.clear()
        self._ops.clear()
        self._tally.abandoned = len(self._jobs)
        self._jobs.clear()

    # Figures.

    def _count_copies(self, completions: list[Completion]) -> None:
        for completion in completions:
            if completion.mark != "done" or completion.op_id not in self._ops:
                continue
            op, job = self._ops[completion.op_id]
            if op.direction == "load":
                job.loaded_bytes += completion.num_bytes
                job.load_seconds += completion.seconds
            else:
                self._tally.stored.num_bytes += completion.num_bytes
                self._tally.stored.seconds += completion.seconds

    def _count_verified(self, job: _Job, verified: Verification) -> None:
        """Count a load after its verification, so that the figures of loads agree with each other at any time."""
        found = self._tally
        found.loaded.blocks += job.loaded
        found.loaded.num_bytes += job.loaded_bytes
        found.loaded.seconds += job.load_seconds
        found.verified_bytes += verified.num_bytes
        if verified.mismatches:
            found.count_mismatches(verified.mismatches)
            _log.error("%d blocks loaded wrong; the first: %s", len(verified.mismatches), found.first_mismatches)


def blocks_needed(requests: Sequence[TraceRequest], concurrency: int) -> int:
    """Return the number of KV blocks that lets all requests run that overlap in the trace, and `concurrency - 1` more
    of the largest size."""
    most = running = 0
    for event in events(requests):
        running += -len(requests[event.number].hash_ids) if event.is_end else len(requests[event.number].hash_ids)
        most = max(most, running)
    return most + (concurrency - 1) * _largest(requests)


def _largest(requests: Sequence[TraceRequest]) -> int:
    return max((len(request.hash_ids) for request in requests), default=0)


def check_fits(requests: Sequence[TraceRequest], kv_blocks: int) -> None:
    """Raise `InvalidRequestError` for a request that does not fit a KV cache of this many blocks."""
    needed = _largest(requests)
    if needed > kv_blocks:
        raise InvalidRequestError(
            f"the largest request has {needed} blocks, the KV cache {kv_blocks}; allowed: {needed} or more"
        )
