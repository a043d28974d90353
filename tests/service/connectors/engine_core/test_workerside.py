"""The worker side: each step's ops are started once, and each load is reported to vLLM exactly once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.doubles.fakes import Latch
from tests.doubles.rank import ready_report

from kvstow.devices.base import Fence
from kvstow.messages import Completion, DesiredState, Direction, Mark, Op, RankReport, StepPlan
from kvstow_service.connectors.engine_core.stepplan import FinishedLoads, PlannedStep
from kvstow_service.connectors.engine_core.workerside import NoDataPlane, WorkerSide

NOTHING = FinishedLoads(set(), set(), set())


class FakePlane(NoDataPlane):
    """A data plane that completes what a test says."""

    def __init__(self, boot_id: str = "boot") -> None:
        super().__init__(0, 64)
        self.boot_id = boot_id
        self.submitted: list[tuple[tuple[int, ...], Fence | None]] = []
        self.completions: list[Completion] = []
        self.listeners: list[Callable[[], None]] = []
        self.desired: list[DesiredState] = []
        self.fails_at_close: tuple[int, ...] = ()
        self.ends = True
        self.at_close: Callable[[], None] = lambda: None
        self.driven = 0
        self.at_ease: list[bool] = []
        self.host_steps: list[str] = []
        self.works: list[Fence | None] = []

    def start(self, *, at_ease: bool = False) -> None:
        self.at_ease.append(at_ease)

    def begin_step(self) -> None:
        self.host_steps.append("begin")

    def launched(self, work: Fence | None = None) -> None:
        self.host_steps.append("launched")
        self.works.append(work)

    def end_step(self) -> None:
        self.host_steps.append("end")

    def submit(self, plan: StepPlan, after: Fence | None = None) -> None:
        self.submitted.append((tuple(op.op_id for op in plan.ops), after))

    def drive(self) -> None:
        self.driven += 1

    def take_completions(self) -> list[Completion]:
        taken, self.completions = self.completions, []
        return taken

    def report(self) -> RankReport:
        return ready_report(64, 1, boot_id=self.boot_id)

    def apply(self, desired: DesiredState) -> None:
        super().apply(desired)
        self.desired.append(desired)

    def add_listener(self, callback: Callable[[], None]) -> None:
        self.listeners.append(callback)

    def close(self, timeout: float = 5.0) -> bool:
        self.at_close()
        self.completions += [Completion(op_id, "failed", "closed") for op_id in self.fails_at_close]
        return self.ends

    def send(self, op_id: int, mark: Mark = "done") -> None:
        self.completions.append(Completion(op_id, mark))


class Rank:
    """A worker side over a fake plane; `fence` is what the compute stream would record."""

    def __init__(self, *, loads_wait: bool = True) -> None:
        self.plane, self.fence, self.fences = FakePlane(), Latch(), 0
        self.side = WorkerSide(0, self.plane, loads_wait=loads_wait)
        self.side.fence = self.record

    def record(self) -> Fence:
        self.fences += 1
        return self.fence


def op(op_id: int, direction: Direction, *blocks: int) -> Op:
    return Op(op_id, direction, blocks, tuple(range(len(blocks))))


def step(
    number: int,
    *,
    stores: tuple[Op, ...] = (),
    loads: dict[str, Op] | None = None,
    lost: dict[str, tuple[int, ...]] | None = None,
) -> PlannedStep:
    loads = loads or {}
    return PlannedStep(number, StepPlan(stores), StepPlan(tuple(loads.values())), tuple(loads), lost or {})


STORE = op(1, "store", 4)
LOAD = op(2, "load", 5, 6)


def test_a_step_is_submitted_once_however_often_it_is_begun() -> None:
    rank = Rank()
    for _ in range(3):
        rank.side.begin_step(step(1, stores=(STORE,), loads={"r": LOAD}))
    assert rank.plane.submitted == [((2,), rank.fence), ((1,), rank.fence)]
    assert rank.fences == 1
    rank.side.begin_step(step(2, stores=(op(3, "store", 4),)))
    assert len(rank.plane.submitted) == 3


def test_loads_wait_for_nothing_where_vllm_frees_late_and_stores_still_do() -> None:
    rank = Rank(loads_wait=False)
    rank.side.begin_step(step(1, stores=(STORE,), loads={"r": LOAD}))
    assert rank.plane.submitted == [((2,), None), ((1,), rank.fence)]
    rank = Rank(loads_wait=False)
    rank.side.begin_step(step(1, loads={"r": LOAD}))
    assert rank.fences == 0


def test_only_loads_are_begun_on_vllms_thread() -> None:
    """A request waits for a load; a store in the way of the step's own kernels would make all wait."""
    rank = Rank()
    rank.side.begin_step(step(1, stores=(STORE,)))
    assert rank.plane.driven == 0
    rank.side.begin_step(step(2, loads={"r": LOAD}))
    assert rank.plane.driven == 1


def test_an_empty_step_costs_nothing() -> None:
    rank = Rank()
    rank.side.begin_step(PlannedStep(1, StepPlan(), StepPlan(), (), {}))
    assert (rank.plane.submitted, rank.fences) == ([], 0)
    assert rank.side.take_finished_loads() == NOTHING


@pytest.mark.parametrize(("mark", "failed", "bad"), [("done", set(), set()), ("failed", {"r"}, {5, 6})])
def test_a_load_is_reported_once_with_its_completion(mark: Mark, failed: set[str], bad: set[int]) -> None:
    rank = Rank()
    rank.side.begin_step(step(1, stores=(STORE,), loads={"r": LOAD}))
    assert rank.side.take_finished_loads() == NOTHING
    assert rank.side.take_boot_completions() == ()
    rank.plane.send(2, mark)
    assert rank.side.take_finished_loads() == FinishedLoads({"r"}, failed, bad)
    (batch,) = rank.side.take_boot_completions()
    assert (batch.boot_id, [completion.op_id for completion in batch.completions]) == ("boot", [2])
    assert rank.side.take_finished_loads() == NOTHING
    assert rank.side.take_boot_completions() == ()


def test_each_load_of_a_step_ends_with_its_own_op() -> None:
    rank = Rank()
    rank.side.begin_step(step(1, loads={"r": LOAD, "q": op(4, "load", 7), "s": op(3, "load", 9)}))
    rank.plane.send(4)
    assert rank.side.take_finished_loads() == FinishedLoads({"q"}, set(), set())
    rank.plane.send(2, "failed")
    rank.plane.send(3)
    assert rank.side.take_finished_loads() == FinishedLoads({"r", "s"}, {"r"}, {5, 6})


def test_completions_after_the_snapshot_are_in_the_next_one() -> None:
    """Done and failed belong together: no completion is sent before its load is reported as finished."""
    rank = Rank()
    rank.side.begin_step(step(1, loads={"r": LOAD}))
    assert rank.side.take_finished_loads() == NOTHING
    rank.plane.send(2)
    assert rank.side.take_boot_completions() == ()
    assert rank.side.take_finished_loads().done == {"r"}
    assert len(rank.side.take_boot_completions()) == 1


def test_a_source_that_is_free_ends_nothing() -> None:
    rank = Rank()
    rank.side.begin_step(step(1, loads={"r": LOAD}))
    rank.plane.send(2, "source_free")
    assert rank.side.take_finished_loads() == NOTHING
    assert len(rank.side.take_boot_completions()) == 1


def test_a_lost_load_ends_at_once_and_those_beside_it_with_their_ops() -> None:
    rank = Rank()
    rank.side.begin_step(step(1, loads={"r": LOAD}, lost={"q": (7, 9)}))
    assert rank.side.take_finished_loads() == FinishedLoads({"q"}, {"q"}, {7, 9})
    rank.plane.send(2)
    assert rank.side.take_finished_loads() == FinishedLoads({"r"}, set(), set())


def test_another_plane_takes_over_and_ops_under_way_fail() -> None:
    rank, old_news = Rank(), "boot"
    rank.side.begin_step(step(1, loads={"r": LOAD}))
    rank.plane.fails_at_close = (2,)
    assert rank.side.close_plane()
    again = FakePlane("again")
    rank.side.replace_plane(again)
    assert rank.side.take_finished_loads() == FinishedLoads({"r"}, {"r"}, {5, 6})
    assert [batch.boot_id for batch in rank.side.take_boot_completions()] == [old_news]
    rank.side.begin_step(step(2, loads={"q": op(3, "load", 7)}))
    assert again.submitted == [((3,), rank.fence)]


def test_the_old_boot_is_the_visible_one_until_its_data_plane_has_ended() -> None:
    """A new boot tells the engine that the old one accesses no memory any more: its loads have failed then."""
    rank = Rank()
    seen = list[str]()
    rank.plane.at_close = lambda: seen.append(rank.side.report().boot_id)
    assert rank.side.close_plane()
    seen.append(rank.side.report().boot_id)
    rank.side.replace_plane(FakePlane("again"))
    seen.append(rank.side.report().boot_id)
    assert seen == ["boot", "boot", "again"]


def test_completions_of_a_data_plane_that_does_not_end_are_still_collected() -> None:
    rank = Rank()
    rank.side.begin_step(step(1, loads={"r": LOAD}))
    rank.plane.ends = False
    assert not rank.side.close_plane()
    assert rank.side.take_finished_loads() == NOTHING
    rank.plane.send(2, "failed")
    assert rank.side.take_finished_loads().failed == {"r"}


def test_a_new_data_plane_begins_with_the_desired_state() -> None:
    rank = Rank()
    between, again = FakePlane("between"), FakePlane("again")
    rank.side.replace_plane(between)
    assert between.desired == [], "nothing was wanted yet"
    desired = DesiredState("engine", 3, number=7)
    rank.side.apply(desired)
    rank.side.replace_plane(again)
    assert again.desired == [desired]


def test_the_agent_reports_the_current_data_plane() -> None:
    rank, calls = Rank(), []
    rank.side.add_listener(lambda: calls.append(rank.side.report().boot_id))
    rank.plane.listeners[0]()
    again = FakePlane("again")
    rank.side.replace_plane(again)
    again.listeners[0]()
    assert calls == ["boot", "again", "again"]
    desired = DesiredState("engine", 1, number=1)
    rank.side.apply(desired)
    assert (again.desired, rank.plane.desired) == ([desired], [])
    assert again.at_ease == [False], "a server that answers has started"


def test_pinning_learns_of_each_step_once_and_when_it_is_launched() -> None:
    rank = Rank()
    rank.side.begin_step(step(1))
    rank.side.begin_step(step(1))
    assert rank.plane.host_steps == ["begin"]
    rank.side.launched()
    rank.side.take_finished_loads()
    assert rank.plane.host_steps == ["begin", "launched", "end"]
    assert rank.plane.works == [None], "nothing is pinned: an event would be recorded for nothing"


def test_pinning_is_given_the_work_of_a_step() -> None:
    rank = Rank()
    rank.plane.is_pinning = True
    fence = Latch()
    rank.side.fence = lambda: fence
    rank.side.begin_step(step(1))
    rank.side.launched()
    assert rank.plane.works == [fence]


def test_stores_fail_while_the_rank_knows_more_of_its_weights_than_the_scheduler() -> None:
    rank = Rank()
    rank.side.stores_fail_because = "weights_changed: a test"
    rank.side.begin_step(step(1, stores=(STORE,), loads={"r": LOAD}))
    assert rank.plane.submitted == [((2,), rank.fence)]
    ((boot, completions),) = rank.side.take_boot_completions()
    assert (boot, completions) == ("boot", (Completion(1, "failed", "weights_changed: a test"),))
    rank.side.stores_fail_because = None
    rank.side.begin_step(step(2, stores=(op(3, "store", 4),)))
    assert rank.plane.submitted[1:] == [((3,), rank.fence)]


def test_loads_that_nobody_needs_do_not_fail_with_the_stores() -> None:
    """A load that fails takes its blocks from all engines that share them."""
    rank = Rank()
    rank.side.stores_fail_because = "weights_changed: a test"
    rank.side.begin_step(step(1, stores=(STORE, op(7, "load"))))
    assert rank.plane.submitted == [((7,), rank.fence)]
    ((_, completions),) = rank.side.take_boot_completions()
    assert [each.op_id for each in completions] == [STORE.op_id]
