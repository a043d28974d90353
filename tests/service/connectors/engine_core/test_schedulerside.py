"""The scheduler side as a whole: leases, resets, boots, and what a step costs."""

from __future__ import annotations

from typing import Any

import pytest
from tests.service.connectors.engine_core.vllmhost import (
    ONE_GROUP,
    WITH_WINDOW,
    Cached,
    FakeRequest,
    Output,
    VllmHost,
    keys_of,
)

from kvstow_service.connectors.engine_core import stores
from kvstow_service.connectors.engine_core.kvgroups import KVGroups

PROMPT = "abcdefghi"  # 8 tokens can be loaded


def holding_host(groups: KVGroups = ONE_GROUP) -> tuple[VllmHost, FakeRequest]:
    """A host, and a request whose hit is held."""
    host, request = VllmHost(groups), FakeRequest("r", PROMPT)
    for group in groups.groups:
        host.store(*keys_of(PROMPT, group))
    assert host.ask(request) == 8
    assert host.leases == 1
    return host, request


def test_a_request_that_ends_before_its_admission_releases_its_hit() -> None:
    host, request = holding_host(WITH_WINDOW)
    host.side.finish(request, [[], []])
    assert host.leases == 0


def test_a_reset_releases_hits_and_the_request_is_a_miss() -> None:
    host, request = holding_host()
    assert host.side.reset()
    assert host.leases == 0
    assert host.ask(request) == 0


def test_a_new_request_of_a_known_name_releases_the_hit_of_the_old_one() -> None:
    host, _ = holding_host()
    assert host.ask(FakeRequest("r", "XYZ")) == 0
    assert host.leases == 0


def test_a_request_that_skips_the_cache_gets_no_hit_and_holds_nothing() -> None:
    host, request = holding_host()
    request.skip_reading_prefix_cache = True
    assert host.ask(request) == 0
    host.admit(request, 9)
    assert host.leases == 0


def test_the_end_of_an_unknown_request_is_ignored() -> None:
    host = VllmHost()
    host.side.finish(FakeRequest("r", PROMPT), [[1, 2]])
    assert host.step().stores.ops == ()


# -- reset ----------------------------------------------------------------------------------------------------


def test_after_a_reset_nothing_that_was_computed_before_is_stored() -> None:
    host, running, ended, flying = VllmHost(), *(FakeRequest(name, name * 9) for name in "abc")
    for request in (running, ended, flying):
        host.run(request)
    host.finish(flying)
    host.step(copy=False)  # its store is under way
    host.finish(ended)  # its store is planned
    assert host.side.reset()
    host.copy()
    running.tokens += "xyz"
    host.step({running: 3})
    host.step({running: 0})
    host.finish(running)
    host.step()
    host.step()
    assert host.stored() == set()
    assert not host.side.has_pending_stores
    assert host.engine.stats().pool.slots.free == 64


def test_a_request_that_is_admitted_after_a_reset_is_stored() -> None:
    host, request = VllmHost(), FakeRequest("r", PROMPT)
    host.run(request)
    assert host.side.reset()
    host.preempt(request)
    host.run(request)
    host.finish(request)
    host.step()
    assert host.stored() == set(keys_of(PROMPT))


def test_a_streamed_request_that_gets_more_input_after_a_reset_is_not_stored() -> None:
    """vLLM admits it again, with the blocks that it computed before the reset."""
    host, request = VllmHost(), FakeRequest("r", PROMPT)
    host.run(request)
    assert host.side.reset()
    request.tokens += "xyz"
    host.resume(request, 3)
    host.step({request: 3})
    host.finish(request)
    host.step()
    host.step()
    assert host.stored() == set()


def test_a_streamed_request_that_gets_more_input_is_not_counted_as_a_lookup_again() -> None:
    host, request = VllmHost(), FakeRequest("r", PROMPT)
    host.ask(request)
    host.run(request)
    before = host.engine.stats().lookups
    request.tokens += "xyz"
    host.resume(request, 3)
    assert host.engine.stats().lookups == before


def test_a_reset_waits_for_loads() -> None:
    host, request = holding_host()
    host.admit(request, load=8)
    assert not host.side.reset()
    host.step(copy=False)
    assert not host.side.reset()
    host.copy()
    assert host.side.reset()
    host.resume(request, 1)
    host.step({request: 1})
    host.finish(request)
    host.step()
    assert host.stored() == set()


# -- boots ----------------------------------------------------------------------------------------------------


def test_an_op_names_the_boots_that_it_began_for() -> None:
    host, request = VllmHost(num_ranks=2), FakeRequest("r", PROMPT)
    host.run(request)
    host.finish(request)
    before = tuple(rank.boot_id for rank in host.ranks)
    host.ranks[1].restart(pinned=64)
    plan = host.step()
    assert [op.boots for op in plan.stores.ops] == [before]
    again = host.step()
    assert [op.blocks for op in again.stores.ops] == [op.blocks for op in plan.stores.ops]
    assert [op.boots for op in again.stores.ops] == [tuple(rank.boot_id for rank in host.ranks)]


def test_a_first_report_between_two_stores_of_a_step_makes_no_rank_refuse_it() -> None:
    """Requests come while the ranks start: the first store of a step finds none, and a later one does."""
    host = VllmHost(reporting=False)
    first, second = FakeRequest("f", PROMPT), FakeRequest("s", "ABCDE")
    host.run(first)
    host.finish(first)  # which asks to store
    assert host.outcomes == {"dropped_not_ready": 4}
    host.ranks[0].pin(64)
    host.run(second)
    host.finish(second)
    plan = host.step(copy=False)
    assert plan.stores.ops
    assert {op.boots for op in plan.stores.ops} == {(host.ranks[0].boot_id,)}


def test_an_offer_is_stored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MOST_STORED", 1)
    host, _ = holding_host()
    other = FakeRequest("o", "ABCDE")
    host.run(other)
    host.finish(other)
    sizes = [len(op.blocks) for op in host.step(copy=False).stores.ops]
    assert len(sizes) > 1
    assert max(sizes) == 1


@pytest.mark.parametrize("begin", ["begin_store", "begin_load"])
def test_a_rank_that_restarts_while_an_op_is_planned_is_not_given_it(
    begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's other threads take reports at any time."""
    host, request = holding_host()
    before, begin_op = host.engine.ranks.boots, getattr(host.engine, begin)

    def restart_afterwards(*args: Any, **rest: Any) -> Any:
        begun = begin_op(*args, **rest)
        host.ranks[0].restart(pinned=64)
        return begun

    monkeypatch.setattr(host.engine, begin, restart_afterwards)
    if begin == "begin_load":
        host.admit(request, load=8)
    else:
        other = FakeRequest("o", "ABCDE")
        host.run(other)
        host.finish(other)
    plan = host.step(copy=False)
    ops = [*plan.loads.ops, *plan.stores.ops]
    assert ops[0].boots == before
    assert all(host.ranks[0].boot_id not in op.boots for op in ops)


# -- costs ----------------------------------------------------------------------------------------------------


class GuardedRequest(FakeRequest):
    """Fails the test when it is read, once `may_not_be_read` is set."""

    may_not_be_read = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("num_computed_tokens", "num_output_placeholders", "num_tokens", "block_hashes"):
            assert not object.__getattribute__(self, "may_not_be_read"), f"{name} is read"
        return object.__getattribute__(self, name)


def test_a_step_with_nothing_due_reads_no_request() -> None:
    host, request, waiting = VllmHost(), GuardedRequest("r", PROMPT), GuardedRequest("w", PROMPT)
    host.run(request)
    request.tokens += "j"
    host.step({request: 1})
    host.ask(waiting)
    host.step({request: 0})
    request.may_not_be_read = True
    assert host.side.plan_step(Output({"r": 1})).stores.ops == ()


def test_a_request_is_read_again_when_it_gets_a_block() -> None:
    host, request = VllmHost(), GuardedRequest("r", PROMPT + "j")
    host.run(request)
    host.step({request: 0})
    request.may_not_be_read = True
    new_block = Cached(["r"], [([9],)])
    with pytest.raises(AssertionError, match="is read"):
        host.side.plan_step(Output({"r": 1}, new_block))


def test_a_table_that_was_given_at_admission_is_not_followed_twice() -> None:
    """vLLM lists a request that resumes among those that run, with all of its blocks."""
    host, request = VllmHost(), FakeRequest("r", PROMPT[:8])
    host.admit(request, 8)
    host.side.plan_step(Output({"r": 8}, Cached(["r"], [request.block_ids])))
    request.num_computed_tokens = 8
    request.tokens += "ij"
    host.side.plan_step(Output({"r": 2}, Cached(["r"], [([30],)])))
    request.num_computed_tokens = 10
    (op,) = host.side.plan_step(Output({"r": 2}, Cached(["r"], [([31],)]))).stores.ops
    assert op.blocks == (30,)


def test_a_change_of_weights_waits_for_no_loads() -> None:
    """What they bring belongs to requests that are computed with old and new weights in any case."""
    host, request = holding_host()
    host.admit(request, load=8)
    host.step(copy=False)
    assert host.side.reset("weights_changed: a test")
    host.copy()
    host.resume(request, 1)
    host.step({request: 1})
    host.finish(request)
    host.step()
    assert host.ask(FakeRequest("other", request.tokens)) == 0, "nothing of before is found or stored"
