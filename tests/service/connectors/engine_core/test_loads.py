"""Loads: what goes into which GPU block, and how a load that has become impossible ends."""

from __future__ import annotations

from string import ascii_lowercase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.service.connectors.engine_core.vllmhost import (
    FULL,
    LARGE,
    ONE_GROUP,
    WITH_WINDOW,
    FakeRequest,
    VllmHost,
    keys_of,
)

from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.loadpolicy import LoadPath, LoadPolicy
from kvstow_service.connectors.engine_core.stepplan import PlannedStep

PROMPT = "abcdefghijklm"  # 12 tokens can be loaded, in 6 blocks of 2
TWO_SIZES = KVGroups((FULL, LARGE), 6)
KINDS = {
    "full": ONE_GROUP,
    "window": WITH_WINDOW,
    "window of another block size": KVGroups((FULL, KVGroup(1, 6, 3, window=7)), 6),
    "two block sizes": TWO_SIZES,
    "all": KVGroups((FULL, LARGE, KVGroup(2, 4, 2, chunk=8), KVGroup(3, 2, 1, window=5)), 12),
}


def make_host(groups: KVGroups = ONE_GROUP, num_ranks: int = 1, path: LoadPath = "async") -> VllmHost:
    host = VllmHost(groups, num_ranks=num_ranks, path=path)
    for group in host.groups.groups:
        host.store(*keys_of(PROMPT, group))
    return host


def targets(plan: PlannedStep) -> list[tuple[int, ...]]:
    return [op.blocks for op in plan.loads.ops]


def test_blocks_that_the_gpu_has_are_not_written() -> None:
    host, first, request = make_host(), FakeRequest("f", "abcd"), FakeRequest("r", PROMPT)
    host.run(first)
    assert host.ask(request, 4) == 8
    host.admit(request, local=4, load=8)
    assert targets(host.step()) == [tuple(request.block_ids[0][2:])]
    assert host.contents(request) == keys_of(PROMPT)


@pytest.mark.parametrize(("admitted", "blocks"), [(12, 6), (8, 4), (7, 4), (1, 1)])
def test_as_much_as_was_admitted_is_loaded(admitted: int, blocks: int) -> None:
    """Of a block that is admitted in part all is loaded: its tokens are those of the request anyway."""
    host, request = make_host(), FakeRequest("r", PROMPT)
    assert host.ask(request) == 12
    host.admit(request, load=admitted)
    assert targets(host.step()) == [tuple(request.block_ids[0])]
    assert host.contents(request) == keys_of(PROMPT)[:blocks]
    assert host.leases == 0


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_each_block_is_loaded_from_its_own_slot(kind: str, data: st.DataObject) -> None:
    groups = KINDS[kind]
    local = data.draw(st.integers(0, 24 // groups.alignment), "local") * groups.alignment
    stored = data.draw(st.integers(0, 26), "stored")
    host, first, request = VllmHost(groups, gpu_blocks=99), *(FakeRequest(name, ascii_lowercase) for name in "fr")
    for group in groups.groups:
        host.store(*keys_of(request.tokens[:stored], group))
    first.tokens = request.tokens[:local]
    host.run(first)
    host.ask(request, data.draw(st.integers(0, local // groups.alignment), "asked") * groups.alignment)
    found = host.ask(request, local)
    if not found:
        return
    host.admit(request, local=local, load=found)
    assert len(host.step().loads.ops) == 1
    for group in groups.groups:
        needed = slice(group.first_block(local + found), (local + found) // group.block_tokens)
        assert host.contents(request, group)[needed] == keys_of(request.tokens, group)[needed]
    assert host.engine.stats().pool.slots.leased == 0


def test_a_load_that_ends_where_blocks_of_all_groups_end_may_be_shorter_than_the_hit() -> None:
    host, request = make_host(TWO_SIZES), FakeRequest("r", PROMPT)
    assert host.ask(request) == 12
    host.admit(request, load=6)
    plan = host.step()
    assert (targets(plan), plan.lost_loads) == ([(*request.block_ids[0], *request.block_ids[1])], {})
    assert host.contents(request) == keys_of(PROMPT)[:3]
    assert host.contents(request, LARGE) == keys_of(PROMPT, LARGE)[:1]
    assert host.leases == 0


def test_a_shorter_load_than_the_windows_were_found_for_is_lost() -> None:
    host, request = make_host(WITH_WINDOW), FakeRequest("r", PROMPT)
    assert host.ask(request) == 12
    host.admit(request, load=8)
    plan = host.step()
    assert plan.loads.ops == ()
    full, window = request.block_ids
    assert plan.lost_loads == {"r": (*full[:2], full[2], window[2], full[3], window[3])}
    assert host.leases == 0


def test_more_than_was_found_is_lost() -> None:
    host, request = make_host(), FakeRequest("r", PROMPT + "nopq")
    assert host.ask(request) == 12
    host.admit(request, load=14)
    plan = host.step()
    assert (plan.loads.ops, plan.lost_loads) == ((), {"r": tuple(request.block_ids[0])})


def test_a_load_without_a_hit_is_lost() -> None:
    host, request = make_host(), FakeRequest("r", PROMPT)
    host.admit(request, load=12)
    assert host.step().lost_loads == {"r": tuple(request.block_ids[0])}


def test_a_hit_whose_rank_restarts_is_lost() -> None:
    host, request = make_host(), FakeRequest("r", PROMPT)
    assert host.ask(request) == 12
    host.ranks[0].restart(pinned=64)
    host.admit(request, load=12)
    plan = host.step()
    assert (plan.loads.ops, plan.load_requests) == ((), ())
    assert plan.lost_loads == {"r": tuple(request.block_ids[0])}
    assert host.leases == 0
    assert host.step().lost_loads == {}


def test_a_block_that_vllm_does_not_give_loses_the_load() -> None:
    host, request = make_host(WITH_WINDOW), FakeRequest("r", PROMPT)
    assert host.ask(request) == 12
    full, window = list(range(1, 7)), [0, 0, 0, 0, 0, 7]
    host.side.admit(request, [full, window], 12)
    plan = host.step()
    assert (plan.loads.ops, plan.load_requests) == ((), ())
    assert plan.lost_loads == {"r": (*full[:5], 0, full[5], 7)}
    assert host.leases == 0
    assert host.engine.stats().pool.slots.leased == 0


def test_slots_are_held_from_the_look_up_to_the_end_of_the_load() -> None:
    host, request = make_host(), FakeRequest("r", PROMPT)
    host.ask(request)
    assert (host.leases, host.engine.stats().pool.slots.leased) == (1, 6)
    host.admit(request, load=8)
    assert host.leases == 0
    host.step(copy=False)
    assert host.engine.stats().pool.slots.leased == 6
    host.copy()
    assert host.engine.stats().pool.slots.leased == 0
    host.engine.check_integrity()


def test_a_hit_that_another_connector_loads_is_let_go() -> None:
    """MultiConnector asks all of its connectors, and tells those that it has not chosen of no tokens."""
    host, request = make_host(), FakeRequest("r", PROMPT)
    assert host.ask(request) == 12
    assert host.leases == 1
    host.admit(request)
    assert host.leases == 0
    assert host.engine.stats().pool.slots.leased == 0
    assert host.step().loads.ops == ()


def preempted_after_a_failed_load() -> tuple[VllmHost, FakeRequest]:
    host, request = make_host(), FakeRequest("r", PROMPT)
    host.admit(request, load=host.ask(request))
    (op,) = host.step(copy=False).loads.ops
    host.ranks[0].run(op.op_id, fail=True)
    host.preempt(request)
    return host, request


def test_a_request_that_comes_back_after_its_load_failed_counts_as_a_miss() -> None:
    host, request = preempted_after_a_failed_load()
    assert host.ask(request) == 0
    host.admit(request, 13)
    assert host.engine.stats().lookups.results["miss"] == 1


def test_a_request_whose_load_failed_is_computed_even_if_its_blocks_are_there_again() -> None:
    host, request = preempted_after_a_failed_load()
    host.step()
    host.store(*keys_of(PROMPT))
    assert host.ask(request) == 0
    assert host.leases == 0
    host.admit(request, 2)
    host.step({request: 2})
    host.preempt(request)
    assert host.ask(request) == 12


def test_a_load_whose_admission_raised_is_reported_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    host, request = make_host(), FakeRequest("r", PROMPT)
    found = host.ask(request)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("injected")

    monkeypatch.setattr(host.engine, "begin_load", fail)
    with pytest.raises(MemoryError, match="injected"):
        host.admit(request, load=found)
    host.side.fail_admission(request, request.block_ids, found)
    plan = host.step()
    assert (plan.loads.ops, plan.lost_loads) == ((), {"r": tuple(request.block_ids[0])})
    assert host.ask(request) == 0


def test_loads_begin_although_the_plan_of_their_step_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    host, request = make_host(), FakeRequest("r", PROMPT)
    host.admit(request, load=host.ask(request))

    def fail(*_: object) -> None:
        raise MemoryError("injected")

    monkeypatch.setattr(host.control, "store_room", fail)
    with pytest.raises(MemoryError, match="injected"):
        host.step()
    plan = host.side.take_planned()
    assert plan.load_requests == ("r",)


def test_loaded_blocks_are_not_stored_again_and_later_ones_are() -> None:
    host, request = make_host(), FakeRequest("r", PROMPT + "nopq")
    host.admit(request, load=host.ask(request))
    host.step()
    host.engine.admin.purge(everything=True).run()
    host.resume(request, 5)
    host.step({request: 5})
    host.finish(request)
    host.step()
    assert host.stored() == set(keys_of(request.tokens)[6:])


@pytest.mark.parametrize("failing", [0, 1])
def test_a_load_that_one_rank_failed_is_stored_as_computed(failing: int) -> None:
    host, request = make_host(TWO_SIZES, num_ranks=2), FakeRequest("r", PROMPT)
    host.admit(request, load=host.ask(request))
    (op,) = host.step(copy=False).loads.ops
    for rank in host.ranks:
        rank.run(op.op_id, fail=rank.rank == failing)
    host.engine.admin.purge(everything=True).run()
    host.step()
    host.resume(request, 13, computed=0)
    host.step({request: 13})
    host.finish(request)
    host.step()
    assert host.stored() == {*keys_of(PROMPT), *keys_of(PROMPT, LARGE)}


def test_a_load_that_is_done_after_one_that_failed_is_not_stored_again() -> None:
    host, request = make_host(), FakeRequest("r", PROMPT)
    host.admit(request, load=host.ask(request))
    (op,) = host.step(copy=False).loads.ops
    host.ranks[0].run(op.op_id, fail=True)
    host.step()
    host.preempt(request)
    host.admit(request, 2)
    host.step({request: 2})
    host.preempt(request)
    host.store(*keys_of(PROMPT))
    host.admit(request, load=host.ask(request))
    assert host.step().loads.ops
    host.engine.admin.purge(everything=True).run()
    host.resume(request, 1)
    host.step({request: 1})
    host.finish(request)
    assert host.step().stores.ops == ()


# -- by layer ---------------------------------------------------------------------------------------------------


def host_by_layer(groups: KVGroups = ONE_GROUP) -> VllmHost:
    return make_host(groups, path="layer")


@pytest.mark.parametrize("groups", [ONE_GROUP, WITH_WINDOW], ids=["one group", "with a window"])
def test_a_load_by_layer_is_planned_for_the_step_that_admits_its_request(groups: KVGroups) -> None:
    host, request = host_by_layer(groups), FakeRequest("r", PROMPT)
    assert host.ask(request) == 12
    assert host.side.loads_by_layer(request)
    host.admit(request, load=12)
    plan = host.step()
    assert (plan.loads.ops, plan.lost_loads, len(plan.layered.ops)) == ((), {}, 1)
    assert host.contents(request) == keys_of(PROMPT)


def test_a_request_that_gets_no_blocks_for_its_load_by_layer_asks_again_and_loads_before_the_step() -> None:
    """vLLM may find no room after it was told of the load, and asks again in each step."""
    host, request = host_by_layer(), FakeRequest("r", PROMPT)
    assert host.ask(request) == 12
    assert host.step().layered.ops == ()
    assert host.leases == 1
    assert host.ask(request) == 12
    host.admit(request, load=12)
    assert len(host.step().layered.ops) == 1
    assert host.leases == 0


def test_a_request_that_ends_before_it_has_blocks_holds_nothing() -> None:
    host, request = host_by_layer(), FakeRequest("r", PROMPT)
    assert host.ask(request) == 12
    host.side.finish(request, request.block_ids)
    assert (host.leases, host.step().layered.ops) == (0, ())


@pytest.mark.parametrize("is_faster", [True, False])
def test_the_last_block_of_a_whole_prompt_is_loaded_alone_if_that_is_faster(
    is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadPolicy, "loads_last_block", is_faster)
    host, first, request = make_host(), FakeRequest("f", PROMPT[:10]), FakeRequest("r", PROMPT[:12])
    host.run(first)
    assert host.ask(request, 10) == (2 if is_faster else 0)
    if is_faster:
        host.admit(request, local=10, load=2)
        assert targets(host.step()) == [(request.block_ids[0][5],)]
        assert host.contents(request) == keys_of(PROMPT[:12])


def test_choices_are_counted() -> None:
    host, request = host_by_layer(), FakeRequest("r", PROMPT)
    host.ask(request)
    host.admit(request, load=12)
    choices = host.engine.stats().transfers.choices
    assert {choice: count for choice, count in choices.items() if count} == {"layer_setting": 1}
