"""Eager stores: which blocks, when, and that their bytes are those of their keys."""

from __future__ import annotations

import pytest
from tests.service.connectors.engine_core.vllmhost import (
    FULL,
    SHORT_WINDOW,
    WITH_SHORT_WINDOW,
    FakeRequest,
    VllmHost,
    keys_of,
)

from kvstow.messages import Mark
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.stepplan import PlannedStep

PROMPT = "abcdefgh"


def blocks_of(plan: PlannedStep) -> list[int]:
    return [block for op in plan.stores.ops for block in op.blocks]


def test_each_block_is_offered_once() -> None:
    """A chunked prefill and a decode, with tokens that end in and between blocks."""
    host, request = VllmHost(), FakeRequest("r", PROMPT)
    host.admit(request, 3)
    offered = blocks_of(host.step({request: 3}))
    for count in (1, 4, 1, 1, 1, 1, 1):
        if request.num_computed_tokens == request.num_tokens:
            request.tokens += chr(ord("a") + request.num_tokens)
        count = min(count, request.num_tokens - request.num_computed_tokens)
        offered += blocks_of(host.step({request: count}))
        assert len(offered) == (request.num_computed_tokens - count) // 2
    blocks = request.block_ids[0]
    host.finish(request)
    offered += blocks_of(host.step())
    assert offered == blocks[: request.num_computed_tokens // 2]
    assert host.outcomes == {"stored": len(offered)}
    assert host.stored() == set(keys_of(request.tokens))


def test_tokens_of_a_step_in_flight_are_not_stored() -> None:
    """With asynchronous scheduling the count of computed tokens runs ahead of the sampler."""
    host, request = VllmHost(), FakeRequest("r", PROMPT)
    host.run(request)
    request.tokens += "ij"
    request.num_computed_tokens, request.num_output_placeholders = 10, 3
    assert len(blocks_of(host.step({request: 0}))) == 3
    request.num_output_placeholders = 2
    assert len(blocks_of(host.step({request: 0}))) == 1


def test_a_block_of_the_gpu_that_the_pool_has_lost_is_stored_again() -> None:
    host, first, second = VllmHost(), FakeRequest("1", PROMPT), FakeRequest("2", PROMPT + "i")
    host.run(first)
    host.finish(first)
    host.step()
    host.engine.admin.purge(everything=True).run()
    host.run(second, local=8)
    host.finish(second)
    host.step()
    assert host.stored() == set(keys_of(PROMPT))


def test_the_first_step_of_a_request_stores_nothing_of_what_it_found_on_the_gpu() -> None:
    host, first, second = VllmHost(), FakeRequest("1", PROMPT), FakeRequest("2", PROMPT + "i")
    host.run(first)
    host.admit(second, 1, local=8)
    assert second.num_computed_tokens == 8  # complete, as far as vLLM's count goes
    assert blocks_of(host.step({second: 1})) == []
    second.tokens += "j"
    assert blocks_of(host.step({second: 1})) == second.block_ids[0][:4]
    assert host.stored() == set(keys_of(PROMPT))


def test_the_first_step_after_a_load_stores_nothing_of_what_the_gpu_had() -> None:
    host, first, second = VllmHost(), FakeRequest("1", PROMPT), FakeRequest("2", PROMPT + "ijklm")
    host.store(*keys_of(PROMPT + "ijkl"))
    host.run(first)
    host.admit(second, local=8, load=host.ask(second, 8))
    host.step()
    host.engine.admin.purge(everything=True).run()
    host.resume(second, 1)
    assert blocks_of(host.step({second: 1})) == []
    second.tokens += "n"
    assert blocks_of(host.step({second: 1})) == second.block_ids[0][:4]
    assert host.stored() == set(keys_of(PROMPT))


def test_two_requests_with_the_same_prompt_store_it_once() -> None:
    host, first, second = VllmHost(), FakeRequest("1", PROMPT), FakeRequest("2", PROMPT)
    host.admit(first, 8)
    host.admit(second, 8)
    host.step({first: 8, second: 8})
    for request in (first, second):
        request.tokens += "i"
    assert blocks_of(host.step({first: 1, second: 1})) == first.block_ids[0][:4]
    assert host.engine.stats().stores["skipped_duplicate"] == 4


def test_a_request_that_does_not_run_is_left_alone() -> None:
    """A preempted request has no blocks: its tables may belong to another one."""
    host, first, second = VllmHost(gpu_blocks=6), FakeRequest("1", PROMPT), FakeRequest("2", "ABCDEFGH")
    host.run(first)
    host.preempt(first)
    host.run(second)
    second.tokens += "I"
    host.step({second: 1})
    assert host.stored() == set(keys_of("ABCDEFGH"))
    host.finish(second)
    host.finish(first)
    host.step()
    assert host.stored() == set(keys_of("ABCDEFGH"))


def test_a_request_that_comes_back_after_preemption_is_stored_from_its_new_blocks() -> None:
    host, first, second = VllmHost(gpu_blocks=6), FakeRequest("1", PROMPT), FakeRequest("2", "ABCDEFGH")
    host.run(first)
    host.preempt(first)
    host.run(second)
    host.finish(second)
    host.step()
    host.step()
    host.run(first)
    first.tokens += "i"
    host.step({first: 1})
    assert host.stored() == {*keys_of(PROMPT), *keys_of("ABCDEFGH")}


def test_a_request_aborted_during_its_load_stores_nothing() -> None:
    """vLLM counts the promised tokens as computed."""
    host, request = VllmHost(), FakeRequest("r", PROMPT + "i")
    host.store(*keys_of(PROMPT))
    host.admit(request, load=host.ask(request))
    host.step(copy=False)
    host.engine.admin.purge(everything=True).run()
    blocks = request.block_ids
    host.side.finish(request, blocks)
    assert blocks_of(host.step()) == []
    assert host.stored() == set()


def test_a_request_aborted_between_its_load_and_its_first_step_stores_nothing() -> None:
    host, request = VllmHost(), FakeRequest("r", PROMPT + "i")
    host.store(*keys_of(PROMPT))
    host.admit(request, load=host.ask(request))
    (op,) = host.step(copy=False).loads.ops
    host.ranks[0].run(op.op_id, fail=True)
    host.side.settle()
    host.resume(request, 1)
    host.finish(request)
    assert blocks_of(host.step()) == []


def test_the_last_blocks_are_those_that_vllm_names() -> None:
    host, request = VllmHost(WITH_SHORT_WINDOW), FakeRequest("r", PROMPT)
    host.run(request)
    full, window = request.block_ids
    for block in window[:2]:
        host.pool.blocks[block].block_hash = None  # other requests have them now
    host.side.finish(request, [full[:3], [0, 0, *window[2:]]])
    assert blocks_of(host.step(copy=False)) == [*full[:2], full[2], window[2]]


def test_blocks_that_left_the_window_with_the_last_step_are_stored() -> None:
    """vLLM has taken them out of the table that it hands over, though it caches them still."""
    host, request = VllmHost(WITH_SHORT_WINDOW), FakeRequest("r", PROMPT)
    host.run(request)
    full, window = request.block_ids
    host.side.finish(request, [full, [0, 0, 0, window[3]]])
    assert set(blocks_of(host.step())) == {*full, *window}
    assert host.stored() == {*keys_of(PROMPT), *keys_of(PROMPT, SHORT_WINDOW)}


def test_blocks_that_vllm_names_late_are_offered_late() -> None:
    """Drafters of several modules: vLLM caches a block only when the tokens behind it are computed."""
    late = KVGroup(1, 2, 1, window=3, late_tokens=2)
    host, request = VllmHost(KVGroups((FULL, late), 2)), FakeRequest("r", PROMPT)
    host.run(request)
    counts = []
    for more in "ijkl":
        request.tokens += more
        counts.append(len(blocks_of(host.step({request: 1}))))
    assert counts == [6, 0, 2, 0]


def test_a_block_that_left_the_window_and_belongs_to_another_request_is_not_stored() -> None:
    host, request, other = VllmHost(WITH_SHORT_WINDOW), FakeRequest("r", PROMPT), FakeRequest("o", "AB")
    host.run(request)
    window = request.block_ids[1]
    request.tokens += "i"
    host.schedule(request, 1)
    host.hand_out_next(window[0], window[1])
    host.admit(other, 2)
    assert other.block_ids == ([window[0]], [window[1]])
    plan = host.step({request: 1, other: 2}, copy=False)
    assert set(blocks_of(plan)) & set(window) == {window[2], window[3]}
    host.copy()
    assert host.stored() == {*keys_of(PROMPT), *keys_of(PROMPT, SHORT_WINDOW)[2:]}


def test_a_block_that_left_the_window_and_is_written_in_this_step_is_not_stored() -> None:
    """Its hash is right: its new owner is about to compute the same tokens. It still holds those of a third request."""
    host, request, twin, third = VllmHost(WITH_SHORT_WINDOW), *(FakeRequest(name, PROMPT) for name in "rt3")
    host.run(request)
    window = request.block_ids[1]
    request.tokens += "i"
    request.num_output_placeholders = 8  # nothing is confirmed, but vLLM frees what has left the window
    host.schedule(request, 1)
    third.tokens = "AB"
    host.hand_out_next(window[0])
    host.admit(third, 2)
    host.step({request: 1, third: 2})
    host.preempt(third)
    request.num_output_placeholders = 0
    request.tokens += "j"
    host.schedule(request, 1)
    others = [block for block in host.pool.free if block not in window][:4]
    host.hand_out_next(*others, window[0])
    host.admit(twin, 8)
    assert twin.block_ids[1][0] == window[0]
    plan = host.step({request: 1, twin: 8})
    assert set(blocks_of(plan)) & set(window) == set(window[1:])
    host.stored()


MARKS: list[tuple[Mark, ...]] = [("done",), ("failed",), ("source_free", "done"), ("source_free", "failed")]


@pytest.mark.parametrize("marks", MARKS)
def test_the_source_is_referenced_until_every_rank_has_read_it(marks: tuple[Mark, ...]) -> None:
    host, request = VllmHost(num_ranks=2), FakeRequest("r", PROMPT)
    host.run(request)
    blocks = [host.pool.blocks[block] for block in request.block_ids[0]]
    host.finish(request)
    (op,) = host.step(copy=False).stores.ops
    assert [block.ref_cnt for block in blocks] == [1] * 4
    for rank in host.ranks:
        assert [block.ref_cnt for block in blocks] == [1] * 4
        assert host.side.holds_gpu_blocks
        rank.send(op.op_id, marks[0])
        host.side.settle()
    assert [block.ref_cnt for block in blocks] == [0] * 4
    assert not host.side.holds_gpu_blocks
    for mark in marks[1:]:
        assert host.side.has_pending_stores
        for rank in host.ranks:
            rank.send(op.op_id, mark)
    assert host.side.has_pending_stores == (marks[-1] == "failed")  # then it is stored again
    assert [block.ref_cnt for block in blocks] == [0] * 4


def test_the_source_of_an_abandoned_store_is_released_once() -> None:
    host, request = VllmHost(), FakeRequest("r", PROMPT)
    host.run(request)
    host.finish(request)
    free = len(host.pool.free)
    assert host.step(copy=False).stores.ops
    host.clock.advance(host.engine.config.transfer_timeout + 1)
    host.engine.tick()
    host.side.settle()
    assert len(host.pool.free) == free + 4
    host.copy()
    host.side.settle()
    assert len(host.pool.free) == free + 4


def host_with_a_store_given_up() -> tuple[VllmHost, int]:
    """Its second rank reports, but never completes the store."""
    host, request = VllmHost(num_ranks=2), FakeRequest("r", PROMPT)
    host.run(request)
    host.finish(request)
    (op,) = host.step(copy=False).stores.ops
    host.ranks[0].run(op.op_id)
    host.clock.advance(host.engine.config.transfer_timeout + 1)
    host.engine.tick()
    for rank in host.ranks:
        rank.report()
    return host, op.op_id


@pytest.mark.parametrize("fails", [False, True])
def test_an_abandoned_store_asks_for_no_steps(fails: bool) -> None:
    """An idle vLLM would step as long as the rank is silent. Its completion comes with the next step that is needed."""
    host, op_id = host_with_a_store_given_up()
    for _ in range(2):
        assert not host.side.has_pending_stores
        assert not host.side.holds_gpu_blocks
        assert host.engine.readiness().state == "degraded"
        host.ranks[1].send(op_id, "source_free")
        assert host.step(copy=False).stores.ops == ()
    host.ranks[1].run(op_id, fail=fails)
    assert host.engine.readiness().state == "ready"
    assert host.side.has_pending_stores  # the GPU still has the blocks of the abandoned store
    host.step()
    assert host.stored() == set(keys_of(PROMPT))
    assert not host.side.has_pending_stores
    host.engine.check_integrity()


def test_an_abandoned_store_is_planned_again_when_the_silent_rank_restarts() -> None:
    host, _ = host_with_a_store_given_up()
    assert not host.side.has_pending_stores
    on_the_gpu = dict(host.ranks[1].blocks)
    host.ranks[1].restart(pinned=64)
    host.ranks[1].blocks.update(on_the_gpu)  # its pool alone is new
    assert host.side.has_pending_stores
    host.step()
    assert host.stored() == set(keys_of(PROMPT))
    assert not host.side.has_pending_stores


def test_blocks_of_a_request_that_is_gone_are_not_handed_out_while_they_are_read() -> None:
    host, first, second = VllmHost(gpu_blocks=9), FakeRequest("1", PROMPT), FakeRequest("2", "ABCDEFGH")
    host.run(first)
    host.finish(first)
    host.step(copy=False)
    host.run(second, copy=False)
    host.copy()
    host.step()
    assert host.stored() == set(keys_of(PROMPT))


def test_released_blocks_are_evicted_from_the_end_of_the_prefix_on() -> None:
    host, request = VllmHost(), FakeRequest("r", PROMPT)
    host.run(request)
    blocks = request.block_ids[0]
    host.finish(request)
    host.step()
    assert not host.side.has_pending_stores
    assert host.pool.free[-4:] == blocks[::-1]
