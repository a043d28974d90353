"""In which step loads are launched."""

from __future__ import annotations

from kvstow.control.launchorder import LaunchOrder
from kvstow.messages import Completion, LoadLaunch, Op, StagedLoad


def load(op_id: int, num_blocks: int = 4) -> Op:
    blocks = tuple(range(num_blocks))
    return Op(op_id, "load", blocks, blocks)


def ended(op_id: int) -> Completion:
    return Completion(op_id, "failed")


def test_a_load_is_launched_when_all_ranks_have_staged_it() -> None:
    order = LaunchOrder(3)
    order.expect([load(1)])
    for rank in (2, 0):
        order.note(rank, [StagedLoad(1, 1)], [])
        assert order.take() == ()
    order.note(1, [StagedLoad(1, 1)], [])
    assert order.take() == (LoadLaunch(1, 4, 0, 1),)
    assert order.take() == ()
    for rank in range(3):
        order.note(rank, [], [Completion(1, "done")])
    assert order.take() == ()
    assert len(order) == 0


def test_a_long_load_is_launched_piece_by_piece() -> None:
    order = LaunchOrder(2)
    order.expect([load(1, 64)])
    order.note(0, [StagedLoad(1, 3), StagedLoad(1, 4)], [])
    order.note(1, [StagedLoad(1, 2)], [])
    assert order.take() == (LoadLaunch(1, 64, 0, 2),)
    order.note(1, [StagedLoad(1, 5)], [])
    assert order.take() == (LoadLaunch(1, 64, 2, 4),)


def test_loads_are_launched_in_the_order_of_their_plans() -> None:
    order = LaunchOrder(1)
    order.expect([load(1), load(2), load(3)])
    order.note(0, [StagedLoad(3, 1), StagedLoad(1, 1)], [])
    assert [launch.op_id for launch in order.take()] == [1, 3]
    order.note(0, [StagedLoad(2, 1)], [])
    assert [launch.op_id for launch in order.take()] == [2]


def test_a_rank_on_which_a_load_has_ended_delays_the_others_no_longer() -> None:
    order = LaunchOrder(2)
    order.expect([load(1)])
    order.note(1, [], [ended(1)])
    assert order.take() == ()
    order.note(0, [StagedLoad(1, 2)], [])
    assert order.take() == (LoadLaunch(1, 4, 0, 2),)
    order.note(0, [], [ended(1)])
    assert order.take() == ()
    assert len(order) == 0


def test_reports_that_are_late_or_repeated_change_nothing() -> None:
    order = LaunchOrder(2)
    order.expect([load(1), Op(2, "store", (1,), (1,))])
    for _ in range(2):
        order.note(0, [StagedLoad(1, 1)], [Completion(2, "source_free"), Completion(2, "done")])
    assert order.take() == ()
    order.note(1, [StagedLoad(1, 1)], [])
    assert order.take() == (LoadLaunch(1, 4, 0, 1),)
    order.note(1, [StagedLoad(1, 1), StagedLoad(9, 1)], [ended(9)])
    assert order.take() == ()
    for rank in (0, 1):
        order.note(rank, [], [ended(1)])
    order.take()
    order.note(0, [StagedLoad(1, 5)], [ended(1)])
    assert order.take() == ()
    assert order.stale == 4
