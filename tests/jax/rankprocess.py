"""One rank of several in a process of its own, with JAX's distributed runtime: it does what a scheduler in another
process tells it, step by step. `python rankprocess.py SOCKET RANK RANKS COORDINATOR`."""

from __future__ import annotations

import hashlib
import sys
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from tests.jax.rank import JaxRank

from kvstow.devices.jax.programs import DevicePrograms
from kvstow.devices.jax.rangecopier import CopyJob
from kvstow.messages import Completion, DesiredState, Op, RankReport, StepPlan


@dataclass(frozen=True)
class Step:
    """What a rank does. `contents`: by load, the store of each block and its place there. `loaded`: loads that have
    ended well on all ranks. `hold`: the copy thread must wait."""

    ops: tuple[Op, ...] = ()
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
    report: RankReport


@dataclass(frozen=True)
class Verdict:
    """`ledgers`: a hash of what was launched, by kind of program."""

    wrong_elements: int
    ledgers: dict[str, str]
    launches: int
    hidden_collectives: int


class RankProcess:
    def __init__(self, rank: int) -> None:
        self.rank = JaxRank(rank=rank, num_slots=16)
        self.launches: dict[str, list[list[int]]] = {"gather": [], "scatter": []}
        self.hidden_collectives = self.wrong_elements = 0
        self.may_copy = threading.Event()
        self.saved: dict[int, list[np.ndarray]] = {}
        self.loads: dict[int, tuple[Op, list[tuple[int, int]]]] = {}
        self._watch()
        self._gate()

    def _watch(self) -> None:
        first = jax.local_devices()[0]
        for kind, launches in self.launches.items():
            original = getattr(DevicePrograms, kind)

            def spy(
                one: Any, shards: Any, blocks: Any, *rest: Any, original: Any = original, to: Any = launches
            ) -> Any:
                if one.device == first:
                    to.append(list(blocks))
                return original(one, shards, blocks, *rest)

            setattr(DevicePrograms, kind, spy)
        for name in ("assert_equal", "broadcast_one_to_all", "process_allgather"):
            original = getattr(multihost_utils, name)

            def count(*arguments: Any, original: Any = original, **options: Any) -> Any:
                self.hidden_collectives += 1
                return original(*arguments, **options)

            setattr(multihost_utils, name, count)

    def _gate(self) -> None:
        copier = self.rank.device._copier
        original = copier.start

        def start(ranges: Any) -> CopyJob:
            self.may_copy.wait(60)
            return original(ranges)

        copier.start = start  # type: ignore[method-assign]

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
            rank.boot()
            self._gate()
        for op_id in step.loaded:
            op, contents = self.loads[op_id]
            for block, (store, place) in zip(op.blocks, contents, strict=True):
                rank.put([block], [layer[[place]] for layer in self.saved[store]])
        if step.loaded:
            blocks = [block for op_id in step.loaded for block in self.loads[op_id][0].blocks]
            self.wrong_elements += rank.wrong_elements(blocks)
        if step.desired is not None:
            rank.plane.apply(step.desired)
        for op in step.ops:
            if op.direction == "store":
                self.saved[op.op_id] = rank.blocks(op.blocks)
            else:
                self.loads[op.op_id] = op, step.contents[op.op_id]
        rank.plane.submit(StepPlan(step.ops))
        rank.overwrite(step.writes)  # a program of all ranks, also without writes
        rank.plane.drive()
        return Outcome(boot, (*ended, *rank.plane.take_completions()), rank.plane.report())

    def verdict(self) -> Verdict:
        ledgers = {
            kind: hashlib.sha256(repr(launches).encode()).hexdigest() for kind, launches in self.launches.items()
        }
        launches = sum(map(len, self.launches.values()))
        self.wrong_elements += self.rank.wrong_elements()
        return Verdict(self.wrong_elements, ledgers, launches, self.hidden_collectives)


def main(socket: str, rank: str, num_ranks: str, coordinator: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, int(num_ranks), int(rank))
    with Client(socket, "AF_UNIX") as scheduler:
        scheduler.send(int(rank))
        serve(RankProcess(int(rank)), scheduler)
    jax.distributed.shutdown()


def serve(process: RankProcess, scheduler: Connection[Any, Any]) -> None:
    process.may_copy.set()
    scheduler.send(Outcome(process.rank.plane.boot_id, (), process.rank.plane.report()))
    while (message := scheduler.recv()) is not None:
        scheduler.send(process.step(message) if isinstance(message, Step) else process.verdict())
    process.rank.close()


if __name__ == "__main__":
    from tests.jax import rankprocess  # by its own name, as its messages are pickled

    rankprocess.main(*sys.argv[1:])
