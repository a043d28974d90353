"""What the connector's scheduler half costs a step of vLLM. It runs in `.venv-vllm`, with vLLM's own BlockPool.

`python -m bench.step_probe SLOTS` prints JSON as its last line, with medians and p99 in seconds.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from bench.kvstow_subject import SLOT_BYTES, SimulatedWorker
from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.messages import Completion, Op
from kvstow_service.connectors.engine_core.controlplane import EmbeddedControl
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.loadpolicy import LoadPolicy
from kvstow_service.connectors.engine_core.schedulerside import SchedulerSide
from kvstow_service.connectors.engine_core.stepplan import PlannedStep

_TOKENS = 16
_RUNNING = 256
_LONG = 1000
_GPU_BLOCKS = 140_000
_BURST = 131_072
_REPEATS = 60
_GROUPS = KVGroups((KVGroup(0, _TOKENS, 1),), _TOKENS)


class _Scheduler:
    """Makes the calls of vLLM's scheduler, for requests whose every block is new."""

    def __init__(self, slots: int) -> None:
        self._engine = OffloadEngine(EngineConfig(slot_bytes=SLOT_BYTES, capacity_slots=slots))
        self._worker = SimulatedWorker(0, SLOT_BYTES, slots)
        self._engine.report(self._worker.report())
        self._pool = BlockPool(num_gpu_blocks=_GPU_BLOCKS, enable_caching=True, hash_block_size=_TOKENS)
        policy = LoadPolicy("async", 0.0, SLOT_BYTES)
        self.side = SchedulerSide(EmbeddedControl(self._engine), _GROUPS, self._pool, policy=policy)
        self.requests = 0

    def request(self, num_blocks: int, hashes: list[bytes] | None = None) -> Any:
        self.requests += 1
        return SimpleNamespace(
            request_id=f"request-{self.requests}",
            block_hashes=hashes or [os.urandom(32) for _ in range(num_blocks)],
            num_tokens=num_blocks * _TOKENS + 1,
            num_computed_tokens=0,
            num_output_placeholders=0,
            skip_reading_prefix_cache=False,
        )

    def start(self, request: Any) -> list[Any]:
        blocks: list[Any] = self._pool.get_new_blocks(len(request.block_hashes) + 1)
        self.side.admit(request, [[block.block_id for block in blocks]], 0)
        return blocks

    def compute(self, request: Any) -> list[Any]:
        """Admit the request, and run the step that computes its blocks. The next step can store them."""
        blocks = self.start(request)
        self.step(request)
        request.num_computed_tokens = len(request.block_hashes) * _TOKENS
        return blocks

    def end(self, request: Any, blocks: list[Any]) -> None:
        self.side.finish(request, [[block.block_id for block in blocks]])
        self._pool.free_blocks(reversed(blocks))

    def step(self, *running: Any) -> PlannedStep:
        tokens = dict.fromkeys((request.request_id for request in running), 1)
        cached = SimpleNamespace(req_ids=[*tokens], new_block_ids=[None] * len(tokens))
        step = SimpleNamespace(
            num_scheduled_tokens=tokens, total_num_scheduled_tokens=len(tokens), scheduled_cached_reqs=cached
        )
        return self.side.plan_step(step)

    def complete(self, ops: tuple[Op, ...]) -> None:
        done = [Completion(op.op_id, "done", None, len(op.slots) * SLOT_BYTES, 0.001) for op in ops]
        self._engine.complete(0, self._worker.boot_id, done)
        self.side.settle()


def measure(slots: int) -> dict[str, float]:
    scheduler = _Scheduler(slots)
    _fill(scheduler, slots)
    gc.freeze()  # as vLLM does after its start
    return {
        **_idle(scheduler, "idle"),
        **_store(scheduler),
        **_hit(scheduler),
        **_burst(scheduler),
    }


def _fill(scheduler: _Scheduler, slots: int) -> None:
    """Fill the pool, so that every store evicts."""
    for _ in range(slots // _LONG + 1):
        _run_once(scheduler, scheduler.request(_LONG))


def _run_once(scheduler: _Scheduler, request: Any) -> None:
    blocks = scheduler.compute(request)
    plan = scheduler.step(request)
    scheduler.complete(plan.stores.ops)
    scheduler.end(request, blocks)


def _idle(scheduler: _Scheduler, name: str) -> dict[str, float]:
    """Measure decode steps in which no request completes a block."""
    running = [scheduler.request(8) for _ in range(_RUNNING)]
    tables = [scheduler.compute(request) for request in running]
    scheduler.complete(scheduler.step(*running).stores.ops)

    def step() -> None:
        scheduler.step(*running)
        scheduler.side.settle()

    figures = _timed(name, step, 1000)
    for request, blocks in zip(running, tables, strict=True):
        scheduler.end(request, blocks)
    return figures


def _store(scheduler: _Scheduler) -> dict[str, float]:
    """Measure a step that plans to store 1,000 blocks of a prompt, and the step that learns of the completion."""
    planning, settling, ending = [], [], []
    for _ in range(_REPEATS):
        request = scheduler.request(_LONG)
        blocks = scheduler.compute(request)
        begun = time.perf_counter()
        plan = scheduler.step(request)
        planned = time.perf_counter()
        scheduler.complete(plan.stores.ops)
        planning.append(planned - begun)
        settled = time.perf_counter()
        settling.append(settled - planned)
        scheduler.side.finish(request, [[block.block_id for block in blocks]])
        ending.append(time.perf_counter() - settled)
        scheduler.end(request, blocks)
    return {**_figures("store", planning), **_figures("settle", settling), **_figures("end", ending)}


def _hit(scheduler: _Scheduler) -> dict[str, float]:
    """Measure the lookup, the admission and the plan of a request whose 1,000 blocks are all in the pool."""
    times, again = [], []
    for _ in range(_REPEATS):
        known = scheduler.request(_LONG)
        _run_once(scheduler, known)
        request = scheduler.request(_LONG, known.block_hashes)
        blocks = scheduler._pool.get_new_blocks(_LONG + 1)
        table = [[block.block_id for block in blocks]]
        begun = time.perf_counter()
        found = scheduler.side.find_hit(request, 0)
        asked = time.perf_counter()
        scheduler.side.find_hit(request, 0)
        asked_again = time.perf_counter()
        assert found == _LONG * _TOKENS
        scheduler.side.admit(request, table, found)
        plan = scheduler.step()
        times.append(time.perf_counter() - asked_again + asked - begun)
        again.append(asked_again - asked)
        scheduler.complete(plan.loads.ops)
        scheduler.end(request, blocks)
    return {**_figures("hit", times), **_figures("again", again)}


def _burst(scheduler: _Scheduler) -> dict[str, float]:
    """Measure a request that has all its blocks complete from the start: the plans while it runs, its end before all
    are stored, and the longest plan for the rest."""
    request = scheduler.request(_BURST)
    blocks = scheduler.compute(request)
    for block, block_hash in zip(blocks, request.block_hashes, strict=False):
        block.set_block_hash(block_hash + bytes(4), num_tokens=_TOKENS)
    table = [block.block_id for block in blocks]
    running = _hooks(scheduler, 16, request)
    begun = time.perf_counter()
    scheduler.side.finish(request, [table])
    ended = time.perf_counter() - begun
    scheduler._pool.free_blocks(reversed(blocks))
    left = _hooks(scheduler, 1000)
    rest = max(left, default=0.0)
    return {**_figures("burst", running), **_figures("burst_end", [ended]), **_figures("rest", [rest])}


def _hooks(scheduler: _Scheduler, most: int, *running: Any) -> list[float]:
    """Return the seconds of each plan, until there is nothing to store."""
    times: list[float] = []
    while len(times) < most and (running or scheduler.side.has_pending_stores):
        begun = time.perf_counter()
        plan = scheduler.step(*running)
        times.append(time.perf_counter() - begun)
        scheduler.complete(plan.stores.ops)
    return times


def _timed(name: str, call: Callable[[], object], repeats: int) -> dict[str, float]:
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return _figures(name, times)


def _figures(name: str, times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {name: ordered[len(ordered) // 2], f"{name}_p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]}


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
