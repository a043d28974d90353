"""What stands in for a rank's data plane."""

from __future__ import annotations

from kvstow.messages import DesiredState, Op, StepPlan
from kvstow_service.connectors.engine_core.workerside import NoDataPlane


def test_a_rank_without_data_plane_keeps_the_newest_desired_state() -> None:
    plane = NoDataPlane(3, 64)
    for number in (2, 1):
        plane.apply(DesiredState("engine", 1, number=number))
    assert (plane.report().engine_id, plane.report().applied) == ("engine", 2)
    assert plane.applied.number == 2


def test_a_rank_without_data_plane_fails_every_op() -> None:
    rank = NoDataPlane(3, 64, "cuda", "no device")
    rank.submit(StepPlan((Op(1, "store", (4,), (0,)), Op(2, "load", (5,), (0,)))))
    assert [(each.op_id, each.mark) for each in rank.take_completions()] == [(1, "failed"), (2, "failed")]
    assert rank.take_completions() == []


def test_a_rank_without_data_plane_reports_why() -> None:
    report = NoDataPlane(3, 64, "cuda", "no device").report()
    assert (report.rank, report.state, report.error_reason, report.error) == (3, "failed", "cuda", "no device")
    assert (report.slot_bytes, report.pinned_slots, report.target_slots) == (64, 0, 0)
    asleep = NoDataPlane(3, 64).report()
    assert (asleep.state, asleep.error) == ("stopped", None)
