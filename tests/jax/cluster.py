"""Ranks in processes of their own, and a scheduler that makes random plans for them."""

from __future__ import annotations

import os
import signal
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
from tests.jax.rankprocess import Outcome, RankSpec, Step, Verdict, run_rank

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.control.launchorder import LaunchOrder
from kvstow.errors import LeaseError
from kvstow.messages import Op, RankReport
from kvstow_service.replay.processes import Child

KEYS, SLOTS, BLOCKS = 40, 16, 24
PATIENCE = 60.0  # seconds for one answer; the first one compiles


class Cluster:
    """The processes. Any silence or death kills them all."""

    def __init__(self, ranks: Sequence[Mapping[str, str]], **options: Any) -> None:
        """`ranks`: the environment of each, besides this process's own. `options`: for `JaxRank`."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        self.ranks: list[Child] = []
        for rank, own in enumerate(ranks):
            with patch.dict(os.environ, {"PYTHONFAULTHANDLER": "1", **own}):
                self.ranks.append(Child(run_rank, RankSpec(rank, len(ranks), coordinator, options)))
        self.first = [self._answer(rank) for rank in self.ranks]

    def call(self, messages: list[Any]) -> list[Any]:
        for rank, message in zip(self.ranks, messages, strict=True):
            rank.send(message)
        return [self._answer(rank) for rank in self.ranks]

    def _answer(self, rank: Child) -> Any:
        if not rank.pipe.poll(PATIENCE):
            for one in self.ranks:
                os.kill(one.pid, signal.SIGABRT)  # each writes where its threads are
            ends = [one.describe_end() for one in self.ranks]
            raise TimeoutError(f"a rank has not answered for {PATIENCE} s; the ranks ended so: {ends}")
        return rank.pipe.recv()

    def end(self) -> None:
        for rank in self.ranks:
            rank.pipe.close()  # of all, as they end together
        assert [rank.join(PATIENCE) for rank in self.ranks] == [0] * len(self.ranks)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.join(0.0)


class Scheduler:
    """Random plans. `slow`: reports of the last rank arrive steps later. `twice`: every report arrives again later."""

    def __init__(self, cluster: Cluster, seed: int, *, slow: bool, twice: bool) -> None:
        self.cluster, self.random = cluster, np.random.default_rng(seed)
        self.slow, self.twice = slow, twice
        first: list[Outcome] = cluster.first
        self.num_ranks = len(first)
        slot_bytes = first[0].report.slot_bytes
        self.engine = OffloadEngine(EngineConfig(slot_bytes, SLOTS, num_ranks=self.num_ranks))
        self.order = LaunchOrder(self.num_ranks)
        self.late: deque[tuple[int, int, Outcome]] = deque()
        self.now = self.loaded = self.failed = self.stored = 0
        self.saved: dict[bytes, tuple[int, int]] = {}
        """By key: the store that wrote it, and its place there."""
        self.loads: dict[int, Op] = {}
        self.unknown: set[int] = set()
        """Blocks of loads that failed: the host computes them again."""
        self.reports: list[RankReport] = [outcome.report for outcome in first]
        self.desired = [self.engine.report(report) for report in self.reports]
        self.ended: list[int] = []

    def step(self, *, restart: int | None = None, hold: bool = False, plan: bool = True) -> None:
        ops, contents = self._plan() if plan else ([], {})
        busy = {block for op in self.loads.values() for block in op.blocks}
        free = [block for block in self.random.permutation(BLOCKS).tolist() if block not in busy]
        writes = {*free[: self.random.integers(0, 8)], *self.unknown}
        self.unknown.clear()
        launches = self.order.take()
        self.order.expect(ops)
        last = self.num_ranks - 1
        steps = [
            Step(
                tuple(ops),
                launches,
                contents,
                tuple(self.ended),
                tuple(sorted(writes)),
                self.desired[rank],
                restart=rank == restart,
                hold=hold and rank == last,
            )
            for rank in range(self.num_ranks)
        ]
        self.ended.clear()
        outcomes: list[Outcome] = self.cluster.call(steps)
        self.now += 1
        for rank, outcome in enumerate(outcomes):
            delay = int(self.random.integers(1, 6)) if self.slow and rank == last else 0
            self.late.append((self.now + delay, rank, outcome))
            if self.twice:
                self.late.append((self.now + delay + 3, rank, outcome))
        self._deliver()
        self.desired = [self.engine.report(outcome.report) for outcome in outcomes]

    def _plan(self) -> tuple[list[Op], dict[int, list[tuple[int, int]]]]:
        ops, contents = [], {}
        busy = {block for op in self.loads.values() for block in op.blocks} | self.unknown
        free = [block for block in self.random.permutation(BLOCKS).tolist() if block not in busy]
        keys = [bytes([key]) for key in self.random.integers(0, KEYS, self.random.integers(0, 7))][: len(free)]
        keys = [*keys[:-1], *keys[:1]]  # a duplicate in the batch
        grant = self.engine.begin_store(keys, free[: len(keys)])
        used: set[int] = set()
        if grant.op is not None:
            ops.append(grant.op)
            used = set(grant.op.blocks)
            key_of = dict(zip(free, keys, strict=False))
            written = [key_of[block] for block in grant.op.blocks]
            assert len(set(written)) == len(written), "a duplicate was allocated twice"
            self.saved |= {key: (grant.op.op_id, place) for place, key in enumerate(written)}
            self.stored += len(written)
        present = [key for key in self.saved if self.engine.contains([key])[0]]
        wanted = [present[at] for at in self.random.permutation(len(present))[:4]]
        targets = [block for block in free if block not in used][: len(wanted)]
        lease = self.engine.lease(wanted[: len(targets)]) if targets else None
        if lease is not None:
            try:
                op = self.engine.begin_load(lease, targets)
            except LeaseError:
                self.engine.release_lease(lease)
            else:
                ops.append(op)
                self.loads[op.op_id] = op
                contents[op.op_id] = [self.saved[key] for key in wanted[: len(targets)]]
        return ops, contents

    def _deliver(self) -> None:
        for item in [item for item in self.late if item[0] <= self.now]:
            self.late.remove(item)
            _, rank, outcome = item
            self.engine.complete(rank, outcome.boot, outcome.completions)
            self.order.note(rank, outcome.staged, outcome.completions)
        for settled in self.engine.take_settled():
            if settled.direction == "load" and settled.mark != "source_free":
                op = self.loads.pop(settled.op_id)
                if settled.mark == "done":
                    self.ended.append(op.op_id)
                    self.loaded += len(op.blocks)
                else:
                    self.unknown |= set(op.blocks)
                    self.failed += 1

    def finish(self) -> list[Verdict]:
        for _ in range(400):
            if not (self.engine.open_transfers or self.late or self.ended or self.unknown):
                break
            self.step(plan=False)
        assert self.engine.open_transfers == len(self.order) == 0
        self.engine.check_integrity()
        verdicts: list[Verdict] = self.cluster.call(["verdict"] * self.num_ranks)
        self.cluster.end()
        return verdicts
