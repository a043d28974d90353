"""One rank of several in a process of its own, with JAX's distributed runtime: it makes the steps that a scheduler in
another process sends."""

from __future__ import annotations

import hashlib
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from tests.jax.rank import JaxRank

from kvstow.devices.jax.hostcopies import CopyJob, RangeCopier
from kvstow.devices.jax.programs import DevicePrograms
from kvstow.messages import Completion, DesiredState, LoadLaunch, Op, RankReport, StagedLoad, StepPlan
from kvstow_service.replay.processes import Pipe


@dataclass(frozen=True)
class Step:
    """What a rank does. `contents`: by load, the store of each block and its place there. `loaded`: loads that have
    ended well on all ranks. `hold`: the copy thread must wait."""

    ops: tuple[Op, ...] = ()
    launches: tuple[LoadLaunch, ...] = ()
    contents: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    loaded: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    desired: DesiredState | None = None
    restart: bool = False
    hold: bool = False


@dataclass(frozen=True)
class Outcome:
    boot: str
    completions: tuple[Completion, ...]
    staged: tuple[StagedLoad, ...]
    report: RankReport


@dataclass(frozen=True)
class Verdict:
    """`ledger`: a hash of what was launched: programs and transfers of all devices, in one order."""

    wrong_elements: int
    ledger: str
    launches: int
    hidden_collectives: int


class RankProcess:
    def __init__(self, rank: int, options: dict[str, Any]) -> None:
        self.rank = JaxRank(rank=rank, num_slots=16, **options)
        self.ledger = hashlib.sha256()
        self.launches = 0
        self.hidden_collectives = self.wrong_elements = 0
        self.is_booting = False
        self.may_copy = threading.Event()
        self.saved: dict[int, list[np.ndarray]] = {}
        self.loads: dict[int, tuple[Op, list[tuple[int, int]]]] = {}
        self._watch()
        self._gate()

    def _watch(self) -> None:
        """Each launch with its device and what it was compiled for. The blocks of a gather are the same on all ranks;
        a scatter writes none where its load has failed."""
        devices = jax.local_devices()

        def gather(one: Any, shards: Any, blocks: Any, *rest: Any) -> Any:
            rows = launch_gather(one, shards, blocks, *rest)
            self._note("gather", devices.index(one.device), rows.shape, list(blocks))
            return rows

        def scatter(one: Any, shards: Any, blocks: Any, rows: Any) -> Any:
            self._note("scatter", devices.index(one.device), rows.shape)
            return launch_scatter(one, shards, blocks, rows)

        def put(value: Any, sharding: Any) -> Any:
            if not self.is_booting:
                (device,) = sharding.device_set
                self._note("transfer", devices.index(device), value.shape, sharding.memory_kind)
            return device_put(value, sharding)

        launch_gather, launch_scatter, device_put = DevicePrograms.gather, DevicePrograms.scatter, jax.device_put
        DevicePrograms.gather, DevicePrograms.scatter, jax.device_put = gather, scatter, put  # type: ignore[assignment, method-assign]
        for name in ("assert_equal", "broadcast_one_to_all", "process_allgather"):
            original = getattr(multihost_utils, name)

            def count(*arguments: Any, original: Any = original, **options: Any) -> Any:
                self.hidden_collectives += 1
                return original(*arguments, **options)

            setattr(multihost_utils, name, count)

    def _note(self, *launch: Any) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.ledger.update(repr(launch).encode())
        self.launches += 1

    def _gate(self) -> None:
        original = RangeCopier.start

        def start(copier: RangeCopier, ranges: Any) -> CopyJob:
            self.may_copy.wait(60)
            return original(copier, ranges)

        RangeCopier.start = start  # type: ignore[assignment, method-assign]

    def step(self, step: Step) -> Outcome:
        rank = self.rank
        if step.hold:
            self.may_copy.clear()
        else:
            self.may_copy.set()
        ended: list[Completion] = []
        boot = rank.plane.boot_id
        if step.restart:
            self.may_copy.set()
            rank.plane.close()
            ended = rank.plane.take_completions()
            self.is_booting = True
            rank.boot()
            self.is_booting = False
        for op_id in step.loaded:
            op, contents = self.loads[op_id]
            for block, (store, place) in zip(op.blocks, contents, strict=True):
                rank.put([block], [layer[[place]] for layer in self.saved[store]])
        if step.loaded:
            blocks = [block for op_id in step.loaded for block in self.loads[op_id][0].blocks]
            self.wrong_elements += rank.wrong_elements(blocks)
        if step.desired is not None:
            rank.plane.apply(step.desired)
        rank.plane.submit(StepPlan(launches=step.launches))
        for op in step.ops:
            if op.direction == "store":
                self.saved[op.op_id] = rank.blocks(op.blocks)
            else:
                self.loads[op.op_id] = op, step.contents[op.op_id]
        rank.plane.submit(StepPlan(step.ops))
        rank.overwrite(step.writes)  # a program of all ranks, also without writes
        completions = (*ended, *rank.plane.take_completions())
        return Outcome(boot, completions, tuple(rank.plane.take_staged()), rank.plane.report())

    def verdict(self) -> Verdict:
        self.wrong_elements += self.rank.wrong_elements()
        return Verdict(self.wrong_elements, self.ledger.hexdigest(), self.launches, self.hidden_collectives)


@dataclass(frozen=True)
class RankSpec:
    rank: int
    num_ranks: int
    coordinator: str
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return f"rank {self.rank}"


def run_rank(scheduler: Pipe, spec: RankSpec) -> None:
    """Until the scheduler closes the pipe."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(spec.coordinator, spec.num_ranks, spec.rank)
    process = RankProcess(spec.rank, spec.options)
    process.may_copy.set()
    scheduler.send(Outcome(process.rank.plane.boot_id, (), (), process.rank.plane.report()))
    with suppress(EOFError):
        while True:
            message = scheduler.recv()
            scheduler.send(process.step(message) if isinstance(message, Step) else process.verdict())
    process.rank.close()
    jax.distributed.shutdown()
