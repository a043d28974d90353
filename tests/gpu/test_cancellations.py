"""Ten thousand ops of a host whose requests come, change their mind and are cancelled, over the real control plane."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.dataplane import DataPlane
from kvstow.devices.cuda import CudaFence
from kvstow.messages import Op, StepPlan

_OPS = 10_000
_KEYS = 40
_SLOTS = 24  # fewer than keys: stores evict all the time
_IN_FLIGHT = 8


class Host:
    """Blocks `0.._KEYS - 1` of the KV cache hold the contents that keys name; a load goes into a block above them."""

    def __init__(self, rank: Any) -> None:
        self.rank = rank
        self.engine = OffloadEngine(EngineConfig(slot_bytes=rank.pool.slot_bytes, capacity_slots=_SLOTS))
        self.worker = DataPlane(0, rank.pool, rank.device)
        self.engine.report(self.worker.report())
        self.chance = random.Random(0)
        self.free = list(range(_KEYS, rank.num_blocks))
        self.pending: dict[int, tuple[Op, tuple[int, ...], bool]] = {}
        self.verified = self.cancelled = self.ops = 0
        self.expected = rank.blocks(range(_KEYS))

    def step(self) -> None:
        numbers = self.chance.sample(range(_KEYS), self.chance.randint(1, 4))
        keys = [number.to_bytes(16, "big") for number in numbers]
        if self.chance.random() < 0.5:
            self.submit(self.engine.begin_store(keys, numbers).op, tuple(numbers), cancelled=False)
            return
        lease = self.engine.acquire(keys)
        count = len(lease.slots)
        if not count or count > len(self.free) or self.chance.random() < 0.2:
            self.engine.release_lease(lease)  # the request was cancelled before its load
            return
        blocks = [self.free.pop() for _ in range(count)]
        op = self.engine.begin_load(lease, blocks)
        self.submit(op, tuple(numbers[:count]), cancelled=self.chance.random() < 0.3)

    def submit(self, op: Op | None, numbers: tuple[int, ...], *, cancelled: bool) -> None:
        if op is not None:
            self.ops += 1
            self.pending[op.op_id] = (op, numbers, cancelled)
            fence = CudaFence.record(torch.cuda.current_stream()) if self.chance.random() < 0.5 else None
            self.worker.submit(StepPlan((op,)), fence)

    def settle(self, most_pending: int) -> None:
        """Take completions until at most so many ops are pending."""
        deadline = time.monotonic() + 30.0
        while len(self.pending) > most_pending:
            assert time.monotonic() < deadline, "an op does not end"
            self.worker.wait_completions(1.0)
            self.engine.complete(0, self.worker.boot_id, self.worker.take_completions())
            for settled in self.engine.take_settled():
                if settled.mark != "source_free":
                    assert settled.mark == "done", settled.error
                    self.end(*self.pending.pop(settled.op_id))

    def end(self, op: Op, numbers: tuple[int, ...], cancelled: bool) -> None:
        if op.direction == "store":
            return
        if cancelled:
            self.cancelled += 1  # nobody looks; its blocks are free only now, when no copy writes them any more
        else:
            self.verified += len(numbers)
            np.testing.assert_array_equal(self.rank.blocks(op.blocks), self.expected[list(numbers)])
        self.free += op.blocks


@pytest.fixture
def host(make_rank: Callable[..., Any]) -> Iterator[Host]:
    rank = make_rank([4096, 1000, 8192], blocks=_KEYS + 64, slots=_SLOTS, threshold_bytes=8192, staging_bytes=32 << 10)
    host = Host(rank)
    yield host
    host.worker.close()
    host.engine.close()


def test_cancelled_requests_harm_nobody_and_leave_nothing(host: Host) -> None:
    while host.ops < _OPS:
        host.step()
        host.settle(_IN_FLIGHT)
    host.settle(0)
    stats = host.engine.stats()
    assert (stats.pool.leases, stats.pool.slots.leased, stats.pool.slots.filling, stats.transfers.pending.loads) == (
        0,
        0,
        0,
        0,
    )
    assert len(host.free) == host.rank.num_blocks - _KEYS
    assert host.verified > _OPS / 5
    assert host.cancelled > _OPS / 20
    assert stats.evictions["capacity"] > _OPS / 20
    host.engine.check_integrity()
