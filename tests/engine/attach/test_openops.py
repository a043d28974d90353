from __future__ import annotations

from kvstow.attach.calls import SettledOp
from kvstow.attach.hello import count_of, number_of, unique_id
from kvstow.attach.openops import OpenOps
from kvstow.messages import Completion, Mark


def opened(num_ranks: int = 2, *, replicated: bool = False) -> OpenOps:
    ops = OpenOps(num_ranks, replicated=replicated)
    ops.begin_session(1)
    return ops


def taken(ops: OpenOps) -> list[tuple[int, Mark]]:
    found = [(settled.op_id, settled.mark) for settled in ops.settled]
    ops.settled.clear()
    return found


def test_ids_say_which_session_they_are_of() -> None:
    assert (number_of(unique_id(3, 17)), count_of(unique_id(3, 17))) == (3, 17)
    assert unique_id(1, 17) != unique_id(2, 17)


def test_a_load_ends_with_the_last_rank_without_waiting_for_the_service() -> None:
    ops = opened()
    op = ops.start("load", (4,), (9,), 77, "r")
    assert ops.complete(0, Completion(op.op_id, "done")) == Completion(77, "done")
    assert taken(ops) == []
    assert ops.complete(1, Completion(op.op_id, "done", num_bytes=5)) == Completion(77, "done", num_bytes=5)
    assert taken(ops) == [(op.op_id, "done")]
    ops.take_results([SettledOp(77, "load", "done")])
    assert (taken(ops), len(ops)) == ([], 0)


def test_a_load_that_one_rank_failed_ends_with_the_last_rank() -> None:
    ops = opened()
    op = ops.start("load", (4,), (9,), 77, "r")
    ops.complete(0, Completion(op.op_id, "failed", "broken"))
    assert taken(ops) == []
    ops.complete(1, Completion(op.op_id, "done"))
    (settled,) = ops.settled
    assert (settled.mark, settled.error, settled.request_id, settled.blocks) == ("failed", "rank 0: broken", "r", (4,))


def test_a_store_gives_its_blocks_back_early_and_is_stored_when_the_service_says_so() -> None:
    ops = opened()
    op = ops.start("store", (4,), (9,), 77, "r")
    ops.complete(0, Completion(op.op_id, "source_free"))
    assert taken(ops) == []
    ops.complete(1, Completion(op.op_id, "done"))
    assert taken(ops) == [(op.op_id, "source_free")]
    ops.complete(0, Completion(op.op_id, "done"))
    assert (taken(ops), ops.num_awaited) == ([], 1)
    ops.take_results([SettledOp(77, "store", "source_free"), SettledOp(77, "store", "done")])
    assert (taken(ops), len(ops), ops.num_awaited) == ([(op.op_id, "done")], 0, 0)


def test_rank_0_stores_what_all_ranks_have() -> None:
    ops = opened(replicated=True)
    store, load = ops.start("store", (4,), (9,), 77, ""), ops.start("load", (4,), (9,), 78, "")
    assert ops.complete(1, Completion(store.op_id, "done")) is None
    ops.complete(0, Completion(store.op_id, "done"))
    assert taken(ops) == [(store.op_id, "source_free")]
    ops.complete(0, Completion(load.op_id, "done"))
    assert taken(ops) == []
    ops.complete(1, Completion(load.op_id, "done"))
    assert taken(ops) == [(load.op_id, "done")]


def test_an_abandoned_store_ends_for_the_host_and_its_late_completions_still_reach_the_service() -> None:
    ops = opened()
    op = ops.start("store", (4,), (9,), 77, "")
    ops.complete(0, Completion(op.op_id, "done"))
    ops.take_results([SettledOp(77, "store", "failed", "stuck")])
    assert (taken(ops), len(ops), ops.num_awaited) == ([(op.op_id, "failed")], 1, 0)
    assert ops.complete(1, Completion(op.op_id, "done")) == Completion(77, "done")
    assert (taken(ops), len(ops), ops.num_awaited) == ([], 0, 0)


def test_repeated_and_unknown_completions_are_counted_and_said_to_nobody() -> None:
    ops = opened()
    op = ops.start("store", (4,), (9,), 77, "")
    ops.complete(0, Completion(op.op_id, "source_free"))
    assert ops.complete(0, Completion(op.op_id, "source_free")) is None
    assert ops.complete(0, Completion(op.op_id + 1, "done")) is None
    assert ops.stale_completions == 2


def test_without_a_service_loads_end_by_their_ranks_and_stores_fail_once_they_have_read_their_blocks() -> None:
    ops = opened()
    load, store = ops.start("load", (4,), (9,), 77, ""), ops.start("store", (5,), (10,), 78, "")
    finished = ops.start("store", (6,), (11,), 79, "")
    for rank in (0, 1):
        ops.complete(rank, Completion(finished.op_id, "done"))
    taken(ops)
    ops.end_session()
    assert taken(ops) == [(finished.op_id, "failed")]
    for rank in (0, 1):
        assert ops.complete(rank, Completion(load.op_id, "done")) is None
    assert taken(ops) == [(load.op_id, "done")]
    for rank in (0, 1):
        ops.complete(rank, Completion(store.op_id, "source_free"))
    assert taken(ops) == [(store.op_id, "source_free")]
    for rank in (0, 1):
        ops.complete(rank, Completion(store.op_id, "done"))
    assert (taken(ops), len(ops)) == ([(store.op_id, "failed")], 0)


def test_a_late_completion_of_an_old_session_is_not_said_in_a_new_one() -> None:
    """The new service has given the same number to another op."""
    ops = opened(num_ranks=1)
    old = ops.start("store", (4,), (9,), 77, "")
    ops.end_session()
    ops.begin_session(2)
    new = ops.start("store", (5,), (9,), 77, "")
    assert ops.complete(0, Completion(old.op_id, "done")) is None
    assert taken(ops) == [(old.op_id, "failed")]
    assert ops.complete(0, Completion(new.op_id, "done")) == Completion(77, "done")
    ops.take_results([SettledOp(77, "store", "done")])
    assert taken(ops) == [(new.op_id, "source_free"), (new.op_id, "done")]
