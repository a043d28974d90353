"""A rank's computation waits for its load by layer: each layer for its own part, and what follows for all of it."""

from __future__ import annotations

from typing import Any

import pytest

from kvstow.errors import LoadRefusedError
from kvstow.messages import Op, StepPlan
from kvstow_service.connectors.engine_core.stepplan import FinishedLoads, PlannedStep
from kvstow_service.connectors.engine_core.workerside import LayerWaits, NoDataPlane, WorkerSide

PARTS = {"layer.0": 0, "layer.1": 1, "layer.2": 2, "shares.1": 1}


class FakeLoad:
    def __init__(self) -> None:
        self.waits: list[int] = []
        self.ticket: Any = None

    def wait(self, part: int) -> None:
        self.waits.append(part)


@pytest.fixture
def waits() -> LayerWaits:
    waits = LayerWaits()
    waits.part_of = PARTS
    return waits


def compute(waits: LayerWaits, *layers: str) -> None:
    for layer in layers:
        waits.layer(layer)


def test_each_layer_waits_for_its_own_part_as_often_as_its_hook_is_called(waits: LayerWaits) -> None:
    """Micro-batches call each hook twice, each with a stream of its own."""
    compute(waits, *PARTS)
    load = FakeLoad()
    waits.begin(load, 3, hooks_run=True)
    compute(waits, "layer.0", "layer.0", "layer.1", "shares.1", "unknown")
    assert load.waits == [0, 0, 1, 1]


def test_what_follows_the_step_waits_for_all_of_the_load(waits: LayerWaits) -> None:
    compute(waits, *PARTS)
    load = FakeLoad()
    waits.begin(load, 3, hooks_run=True)
    waits.end(3)
    assert load.waits == [2]
    compute(waits, "layer.0")
    waits.end(3)
    assert load.waits == [2]


def test_layers_whose_hook_was_never_called_are_waited_for_first(waits: LayerWaits) -> None:
    compute(waits, "layer.0", "layer.2", "shares.1")
    load = FakeLoad()
    waits.begin(load, 3, hooks_run=True)
    assert load.waits == [1]


def test_a_step_without_hooks_waits_for_everything_first(waits: LayerWaits) -> None:
    compute(waits, *PARTS)
    load = FakeLoad()
    waits.begin(load, 3, hooks_run=False)
    assert load.waits == [2]


def test_before_layers_are_known_everything_is_waited_for(waits: LayerWaits) -> None:
    waits.part_of = {}
    load = FakeLoad()
    waits.begin(load, 3, hooks_run=True)
    assert load.waits == [2]


def _step(boot: str) -> PlannedStep:
    layered = StepPlan((Op(1, "load", (5,), (0,), boots=(boot,)),))
    return PlannedStep(1, StepPlan(), StepPlan(), (), {}, layered)


class FakeLoads:
    """Notes after what a load was to begin."""

    num_parts, failure = 3, None

    def __init__(self, *, refuses: bool = False) -> None:
        self.after: list[Any] = []
        self._refuses = refuses

    def load(self, ops: Any, after: Any) -> FakeLoad:
        if self._refuses:
            raise LoadRefusedError("the session of this op has ended")
        self.after.append(after)
        return FakeLoad()


def _refusing(why: str, *, takes_back: bool) -> WorkerSide:
    """A rank in a step whose load by layer it refuses."""
    plane: Any = NoDataPlane(0, 64)
    if why != "no data plane":
        plane.layered = FakeLoads(refuses=why == "ended session")
    side = WorkerSide(0, plane, loads_wait=True, takes_back=takes_back)
    side.begin_step(_step("an older boot" if why == "older boot" else plane.boot_id))
    return side


REFUSALS = pytest.mark.parametrize("why", ["ended session", "older boot", "no data plane"])


@REFUSALS
def test_a_refused_load_is_reported_as_invalid_blocks_in_its_own_step(why: str) -> None:
    side = _refusing(why, takes_back=True)
    side.load_layers(hooks_run=True)
    assert side.take_finished_loads() == FinishedLoads(set(), set(), {5}), "vLLM waits for no load of the request"
    assert side.take_finished_loads().bad_blocks == set()
    failed = [one.mark for done in side.take_boot_completions() for one in done.completions]
    assert failed == ([] if why == "ended session" else ["failed"]), "the gate reports what it refuses"


@REFUSALS
def test_where_vllm_cannot_take_a_step_back_a_refused_load_ends_the_step(why: str) -> None:
    side = _refusing(why, takes_back=False)
    with pytest.raises(LoadRefusedError):
        side.load_layers(hooks_run=True)
    side.load_layers(hooks_run=True)  # nothing is left to load


def test_blocks_are_written_after_the_work_that_the_compute_stream_has_by_then() -> None:
    """A freed block may still be written by an older step, also where loads before the step wait for nothing."""
    plane: Any = NoDataPlane(0, 64)
    plane.layered = loads = FakeLoads()
    side = WorkerSide(0, plane, loads_wait=False)
    fence: Any = object()
    side.fence = lambda: fence
    side.begin_step(_step(plane.boot_id))
    side.load_layers(hooks_run=True)
    assert loads.after == [fence]
