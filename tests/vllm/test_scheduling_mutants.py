"""Each mutant takes one safeguard of the connector out, or breaks one of its promises to vLLM; the runs of
`test_scheduling` must notice."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.engine.control.mutants import (
    first_rank_decides,
    visible_at_submission,
)
from tests.service.connectors.engine_core.connectorhosts import rank_host_of
from tests.vllm.harness.device import SimulatedDevice, SimulatedTicket
from tests.vllm.harness.run import run
from tests.vllm.harness.setup import Setup
from tests.vllm.harness.stream import ComputeStream
from tests.vllm.harness.worker import SteppedWorker

from kvstow.control.engine import OffloadEngine
from kvstow.control.pool import Pool
from kvstow.messages import Completion, Mark, Op, StepPlan
from kvstow_service.connectors.engine_core.stepplan import FinishedLoads
from kvstow_service.connectors.engine_core.workerside import WorkerSide

pytestmark = pytest.mark.vllm

Mutate = Callable[[pytest.MonkeyPatch], None]
CONNECTOR = "kvstow_service.connectors.vllm"
SHARED = "kvstow_service.connectors.engine_core"


def stores_do_not_hold_their_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{SHARED}.gpublocks.GPUBlocks.hold_sources", lambda self, op_id, block_ids: None)


def stores_never_let_their_blocks_go(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{SHARED}.gpublocks.GPUBlocks.free_sources", lambda self, op_id, to_front=False: None)


def stores_do_not_wait_for_the_forward(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ComputeStream, "fence", lambda self: None)


def loads_write_zeros(patch: pytest.MonkeyPatch) -> None:
    run_second = SimulatedDevice.run_second

    def zero(self: SimulatedDevice, ticket: SimulatedTicket) -> Mark:
        if ticket.direction == "load":
            ticket.staged = [np.zeros_like(pages) for pages in ticket.staged]
        return run_second(self, ticket)

    patch.setattr(SimulatedDevice, "run_second", zero)


def load_blocks_are_rotated(patch: pytest.MonkeyPatch) -> None:
    begin_load = OffloadEngine.begin_load

    def rotate(self: OffloadEngine, lease: Any, blocks: list[int], **rest: Any) -> Op:
        return begin_load(self, lease, [*blocks[1:], blocks[0]], **rest)

    patch.setattr(OffloadEngine, "begin_load", rotate)


def loads_are_done_at_submission(patch: pytest.MonkeyPatch) -> None:
    submit, take_completions = SteppedWorker.submit, SteppedWorker.take_completions
    early: dict[int, list[Completion]] = {}

    def note(self: SteppedWorker, plan: StepPlan, after: Any = None) -> None:
        submit(self, plan, after)
        early.setdefault(id(self), []).extend(Completion(op.op_id, "done") for op in plan.ops if op.direction == "load")

    def add(self: SteppedWorker) -> list[Completion]:
        return take_completions(self) + early.pop(id(self), [])

    patch.setattr(SteppedWorker, "submit", note)
    patch.setattr(SteppedWorker, "take_completions", add)


def aborted_loads_are_not_reported(patch: pytest.MonkeyPatch) -> None:
    connector = f"{CONNECTOR}.KVStowConnector.get_transfer_results"
    from kvstow_service.connectors.vllm import KVStowConnector

    get_transfer_results = KVStowConnector.get_transfer_results
    finished: set[str] = set()

    def drop(self: Any, finished_req_ids: set[str]) -> Any:
        finished.update(finished_req_ids)
        results = get_transfer_results(self, finished_req_ids)
        results.finished_recving -= finished
        return results

    patch.setattr(connector, drop)


def failed_loads_are_done(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{CONNECTOR}.KVStowConnector.get_block_ids_with_load_errors", lambda self: set())


def windows_fail_by_block(patch: pytest.MonkeyPatch) -> None:
    """Failed loads are reported as loads that are done, and their blocks as blocks that are bad."""
    take, bad = WorkerSide.take_finished_loads, dict[WorkerSide, set[int]]()

    def take_as_done(self: WorkerSide) -> FinishedLoads:
        finished = take(self)
        bad[self] = finished.bad_blocks
        return finished._replace(failed=set())

    patch.setattr(WorkerSide, "take_finished_loads", take_as_done)
    patch.setattr(
        f"{CONNECTOR}.KVStowConnector.get_block_ids_with_load_errors",
        lambda self: bad.pop(rank_host_of(self).side, set()),
    )


def windows_lack_a_block(patch: pytest.MonkeyPatch) -> None:
    from kvstow_service.connectors.engine_core.kvgroups import KVGroup

    first_block = KVGroup.first_block

    def one_less(self: KVGroup, num_tokens: int) -> int:
        return first_block(self, num_tokens) + (self.window is not None)

    patch.setattr(KVGroup, "first_block", one_less)


def left_out_groups_count_as_loaded(patch: pytest.MonkeyPatch) -> None:
    from kvstow_service.connectors.vllm import KVStowConnector

    patch.setattr(KVStowConnector, "get_loaded_kv_cache_group_ids", lambda self, request: (0, 1))


def resets_keep_the_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{SHARED}.schedulerside.SchedulerSide.reset", lambda self: True)


def dead_boots_are_served(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pool, "lose", lambda self, low: None)


def ended_leases_are_not_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{SHARED}.loads.Loads._release_lease", lambda self, tracked: setattr(tracked.load, "hit", None))


def blocks_that_wait_for_slots_are_not_held(patch: pytest.MonkeyPatch) -> None:
    from kvstow_service.connectors.engine_core.gpublocks import GPUBlocks

    hold = GPUBlocks.hold_sources

    def hold_ops(self: GPUBlocks, op_id: int, block_ids: list[int]) -> None:
        if op_id > 0:
            hold(self, op_id, block_ids)

    patch.setattr(GPUBlocks, "hold_sources", hold_ops)


def ranks_leave_sessions_under_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kvstow.attach.worker.OpGate.is_quiet", lambda self: True)


def unwanted_answers_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{SHARED}.controlplane.AttachedControl.discard", lambda self, answer: None)


class Mutant(NamedTuple):
    """`symptom`: how one of the problems that the run reports begins."""

    mutate: Mutate
    symptom: str
    setup: Setup


SYNC = Setup("sync mutant")
SHORT = Setup("short mutant", requests=60)
ASYNC = Setup("async mutant", asynchronous=True, seed=3)
LATE = Setup("late mutant", delay=(30, 90))
SLOW = Setup("mutant of two slow ranks", ranks=2, delay=(1, 3), gap=300)
REPLAYED = Setup("mutant of a replayed window", layers="replayed", blocks=72)
HYBRID = Setup("hybrid mutant", layers="hybrid", blocks=90)
RESTARTS = Setup("mutant of restarts", ranks=2, operator_rate=0.02, operations=("restart_rank",))
ATTACHED = Setup("attached mutant", attached=True, answers=(1, 3, 12), abort_rate=0.1)
LOST = Setup(
    "mutant of lost sessions",
    attached=True,
    slots=64,
    delay=(1, 14),
    gap=200,
    operator_rate=0.05,
    operations=("lose_session",),
)
WEIGHTS = Setup("mutant of weights", operator_rate=0.02, operations=("change_weights",))

MUTANTS = [
    Mutant(stores_do_not_hold_their_blocks, "wrong read", LATE),
    Mutant(stores_do_not_hold_their_blocks, "wrong read", dataclasses.replace(LATE, asynchronous=True)),
    Mutant(stores_never_let_their_blocks_go, "stuck", SHORT),
    Mutant(stores_do_not_wait_for_the_forward, "wrong read", ASYNC),
    Mutant(visible_at_submission, "wrong read", SLOW),
    Mutant(first_rank_decides, "wrong read", SLOW),
    Mutant(loads_write_zeros, "wrong read", SYNC),
    Mutant(load_blocks_are_rotated, "wrong read", SYNC),
    Mutant(loads_are_done_at_submission, "wrong read", ASYNC),
    Mutant(aborted_loads_are_not_reported, "stuck", Setup("abort mutant", requests=90, abort_rate=0.1, delay=(6, 30))),
    Mutant(failed_loads_are_done, "wrong read", Setup("failure mutant", bad_slots=30)),
    Mutant(windows_fail_by_block, "wrong read", Setup("window mutant", layers="window", failure_rate=0.2)),
    Mutant(windows_lack_a_block, "wrong read", HYBRID),
    Mutant(left_out_groups_count_as_loaded, "wrong read", REPLAYED),
    Mutant(resets_keep_the_keys, "wrong read", WEIGHTS),
    Mutant(dead_boots_are_served, "wrong read", RESTARTS),
    Mutant(ended_leases_are_not_released, "leases leaked", SHORT),
    Mutant(blocks_that_wait_for_slots_are_not_held, "wrong read", ATTACHED),
    Mutant(ranks_leave_sessions_under_way, "wrong read", LOST),
    Mutant(unwanted_answers_are_kept, "leases leaked", ATTACHED),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.mutate.__name__}-{mutant.setup.name}")
def test_a_broken_promise_is_noticed(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mutant.mutate(monkeypatch)
    caplog.set_level(logging.CRITICAL, logger="kvstow")
    report = run(mutant.setup, monkeypatch, stop_at_problem=True)
    assert any(problem.startswith(mutant.symptom) for problem in report.problems), report
