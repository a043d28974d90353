"""The scheduler side of an attached engine: answers that come later, and sessions that end."""

from __future__ import annotations

from random import Random
from typing import Any, Literal

import pytest
from tests.service.connectors.engine_core.vllmhost import ONE_GROUP, WITH_WINDOW, FakeRequest, keys_of
from tests.service.connectors.vllm.attachedvllmhost import PROMPT, AttachedVllmHost, with_prompt

from kvstow.attach.hello import NO_HOLD, GateHold, SessionTicket, unique_id
from kvstow.messages import Op
from kvstow_service.connectors.engine_core.controlplane import (
    LAYER_WAIT_SECONDS,
    MOST_AHEAD,
    SILENT_SECONDS,
    SLOW_SECONDS,
    AttachState,
    GateHolds,
    sharing_word,
)
from kvstow_service.connectors.engine_core.kvgroups import KVGroups
from kvstow_service.connectors.engine_core.loads import WAIT_SECONDS


def test_a_lookup_is_sent_when_the_request_arrives_and_taken_in_the_next_step() -> None:
    host, request = with_prompt(delay=1), FakeRequest("r", PROMPT)
    host.expect(request)
    assert host.ask_now(request) is None, "vLLM asks again, and waits for nothing"
    host.step()
    assert host.ask_now(request) == 12
    assert host.leases == 1


def test_one_lookup_serves_whatever_the_gpu_has_by_then() -> None:
    host, request = with_prompt(delay=1), FakeRequest("r", PROMPT)
    host.expect(request)
    host.step()
    assert host.ask_now(request, 4) == 8
    host.admit(request, local=0, load=0)  # the GPU has lost it since: it is computed
    assert host.leases == 0


def test_blocks_behind_a_gap_are_found_if_the_gpu_has_those_before() -> None:
    """What was evicted hides nothing behind it."""
    host, cached, request = with_prompt(delay=1), FakeRequest("c", "abcdef"), FakeRequest("r", PROMPT)
    host.run(cached)
    host.finish(cached)
    host.settle()
    host.service.facade.admin.purge(keys=keys_of(PROMPT)[2:3]).run()
    host.expect(request)
    host.step()
    assert host.ask_now(request, 6) == 6
    host.admit(request, local=6, load=6)
    host.step()
    host.step()
    assert host.contents(request)[3:] == keys_of(PROMPT)[3:]


def test_a_request_that_ends_while_it_is_looked_up_leaves_no_lease() -> None:
    host, request = with_prompt(delay=2), FakeRequest("r", PROMPT)
    host.expect(request)
    host.side.finish(request, [[]])
    for _ in range(3):
        host.step()
    assert host.leases == 0


def test_only_so_many_requests_are_looked_up_ahead() -> None:
    host = with_prompt(delay=1)
    requests = [FakeRequest(str(number), PROMPT) for number in range(MOST_AHEAD + 1)]
    for request in requests:
        host.expect(request)
    host.step()
    assert host.ask_now(requests[-2]) == 12
    assert host.ask_now(requests[-1]) is None, "it is asked for now"


def test_blocks_that_wait_for_slots_are_not_handed_out() -> None:
    """Between the question and the answer nothing but a reference keeps what a store will read."""
    host, request = AttachedVllmHost(delay=3), FakeRequest("r", PROMPT)
    host.run(request)
    blocks = set(request.block_ids[0][:6])
    host.finish(request)
    host.step()
    assert not host.stored(), "the pool has not answered"
    assert not blocks & set(host.pool.free)
    host.settle()
    assert host.stored() == set(keys_of(PROMPT))
    assert blocks <= set(host.pool.free)


def test_a_lost_session_gives_back_what_waited_for_slots_and_the_next_one_stores_it() -> None:
    host, request = AttachedVllmHost(delay=3), FakeRequest("r", PROMPT)
    host.run(request)
    host.finish(request)
    host.step()
    host.service.lose()
    host.settle()
    for _ in range(300):
        host.clock.advance(0.1)
        host.step()
    assert host.stored() == set(keys_of(PROMPT))
    assert not host.side.holds_gpu_blocks


def test_a_load_that_was_promised_fails_if_the_session_ends_before_it_begins() -> None:
    host, request = with_prompt(delay=2), FakeRequest("r", PROMPT)
    assert host.answer(request) == 12
    host.admit(request, load=12)
    host.service.lose()
    plan = host.step()
    assert set(plan.lost_loads) == {"r"}
    assert plan.lost_loads["r"] == tuple(request.block_ids[0])
    assert host.ask_now(request) == 0, "it is computed"


def test_a_hit_of_a_lost_session_is_looked_up_again() -> None:
    host, request = with_prompt(delay=0), FakeRequest("r", PROMPT)
    assert host.answer(request) == 12
    host.service.lose()
    host.step()  # the next session
    host.step()  # the ranks join it
    assert host.answer(request) == 12
    host.admit(request, load=12)
    host.step()
    assert host.contents(request) == keys_of(PROMPT)


def test_a_load_under_way_ends_although_its_session_has() -> None:
    host, request = with_prompt(delay=0), FakeRequest("r", PROMPT)
    assert host.answer(request) == 12
    host.admit(request, load=12)
    host.step(copy=False)
    host.service.is_up = False
    host.service.lose()
    host.copy()
    assert host.contents(request) == keys_of(PROMPT)
    host.side.settle()
    assert not host.side.has_pending_stores


def test_without_a_service_requests_are_misses_at_once_and_nothing_is_held() -> None:
    host, request = AttachedVllmHost(is_up=False), FakeRequest("r", PROMPT)
    host.expect(request)
    assert host.ask_now(request) == 0
    host.run(request)
    host.finish(request)
    host.step()
    assert not host.side.holds_gpu_blocks
    assert host.control.refused_stores["not_attached"] > 0
    assert host.control.problem is not None


def test_a_service_that_does_not_answer_is_waited_for_no_longer_than_a_moment() -> None:
    host, request = with_prompt(delay=1), FakeRequest("r", PROMPT)
    host.service.is_silent = True
    assert host.ask_now(request) is None
    host.step()
    host.clock.advance(0.01)
    host.step()
    host.clock.advance(SLOW_SECONDS)
    assert host.ask_now(request) == 0
    host.step()
    other = FakeRequest("o", PROMPT)
    host.expect(other)
    assert host.ask_now(other) == 0, "nothing is asked"
    assert host.control.problem == "the node service does not answer"
    host.service.is_silent = False
    host.step()
    assert host.answer(FakeRequest("p", PROMPT)) == 12


def test_a_silent_service_loses_the_session_and_the_gpu_gets_its_blocks_back() -> None:
    host, request = AttachedVllmHost(delay=1), FakeRequest("r", PROMPT)
    host.service.is_silent = True
    host.run(request)
    host.finish(request)
    for _ in range(3):
        host.step()
    assert host.side.holds_gpu_blocks
    host.clock.advance(SILENT_SECONDS + 0.1)
    host.service.is_up = False
    host.step()
    host.step()
    assert not host.side.holds_gpu_blocks
    assert not host.control.is_attached


def test_a_step_that_takes_seconds_is_no_silence_of_the_service() -> None:
    """What was sent before the step may have been answered during it, and is read only after it."""
    host, request = with_prompt(delay=2), FakeRequest("r", PROMPT)
    host.expect(request)
    host.clock.advance(SILENT_SECONDS + 0.1)
    host.step()
    assert (host.control.is_attached, host.control.problem) == (True, None)


def test_a_reset_hides_what_was_stored_and_what_is_being_stored() -> None:
    host, request = with_prompt(delay=2), FakeRequest("r", "ABCDEFGHIJKLM")
    host.run(request)
    host.finish(request)
    asked = FakeRequest("asked", PROMPT)
    host.expect(asked)
    assert host.side.reset()
    host.settle()
    assert host.answer(asked) == 0
    assert host.answer(FakeRequest("s", PROMPT)) == 0
    assert host.answer(FakeRequest("t", "ABCDEFGHIJKLM")) == 0
    assert host.leases == 0


@pytest.mark.parametrize("lazy_blocks", [None, 12])
@pytest.mark.parametrize("seed", range(8))
def test_random_requests_over_sessions_that_end_get_the_right_bytes(seed: int, lazy_blocks: int | None) -> None:
    """A slot or a GPU block that is reused too early shows as a wrong content of a loaded block."""
    random = Random(seed)
    host = AttachedVllmHost(gpu_blocks=48, slots=24, delay=lambda: random.choice((0, 1, 1, 4)), lazy_blocks=lazy_blocks)
    prefixes = ["abcdefgh", "ijklmnop", "qrstuvwx"]
    loads = 0
    for number in range(60):
        request = FakeRequest(str(number), random.choice(prefixes) + random.choice("ABCD") * 5)
        host.clock.advance(0.3)
        host.expect(request)
        if random.random() < 0.15:
            host.service.lose()
        hit = host.answer(request)
        if hit:
            host.admit(request, load=hit)
            for _ in range(8):
                plan = host.step(copy=random.random() < 0.7)
                if request.request_id in plan.lost_loads:
                    hit = 0
            host.copy()
            host.side.settle()
            if hit and not host.side._requests[request.request_id].load.has_failed:
                loads += 1
                assert host.contents(request)[: hit // 2] == keys_of(request.tokens)[: hit // 2]
            else:
                hit = 0
            host.resume(request, 13 - hit, computed=hit)
            host.step({request: 13 - hit})
        else:
            host.run(request)
        host.finish(request)
        host.step(copy=random.random() < 0.7)
        host.copy()
        host.stored()
    assert loads > 3
    for _ in range(40):
        host.clock.advance(0.3)
        host.step()
    assert host.leases == 0
    assert not host.side.holds_gpu_blocks
    host.service.facade.check_integrity()


def deferrals(host: AttachedVllmHost) -> list[float]:
    return [seconds for name, seconds in host.observed if name == "lookup_async_delay_seconds"]


def test_how_long_a_request_waits_for_its_lookup_is_observed_once() -> None:
    host, request = with_prompt(delay=3), FakeRequest("r", PROMPT)
    host.expect(request)
    assert host.ask_now(request) is None
    host.step()
    assert host.ask_now(request) is None
    assert deferrals(host) == []
    assert host.answer(request) == 12
    host.admit(request, load=12)
    (seconds,) = deferrals(host)
    assert seconds > 0


def test_a_request_that_ends_before_its_lookup_is_answered_has_waited_until_then() -> None:
    host, request = with_prompt(delay=3), FakeRequest("r", PROMPT)
    host.expect(request)
    assert host.ask_now(request) is None
    host.side.finish(request, [[]])
    assert len(deferrals(host)) == 1


def test_the_state_says_why_there_is_no_host_cache(caplog: pytest.LogCaptureFixture) -> None:
    host = AttachedVllmHost(is_up=False)
    connection = host.service.connection
    assert host.control.state == AttachState("starting")
    connection.problem = "cannot connect"
    assert host.control.state == AttachState("no_service")
    connection.refusal = "version"
    assert host.control.state == AttachState("refused", "version")
    connection.refusal = "Something long\n" * 9
    assert host.control.state == AttachState("refused", "other"), "it is the label of a metric"
    host.service.is_up, connection.refusal = True, None
    host.step()
    assert host.control.state == AttachState("attached", sharing="yes")
    host.control.reset()
    assert host.control.state.sharing == "cache_was_reset"
    host.service.is_silent = True
    host.expect(FakeRequest("r", PROMPT))
    for _ in range(4):
        host.clock.advance(SLOW_SECONDS / 2)
        host.step()
    assert host.control.state == AttachState("no_answer", sharing="cache_was_reset")
    assert caplog.text.count("does not answer") == 1
    host.service.is_silent = False
    host.step()
    assert host.control.state == AttachState("attached", sharing="cache_was_reset")
    host.control.fail("injected")
    assert host.control.state == AttachState("failed")


@pytest.mark.parametrize(
    ("sentences", "word"),
    [
        ((), "yes"),
        (("not shared with namespace m-1: weights_id",), "differs"),
        (("not shared with pool p: x", "hashes_not_reproducible: set PYTHONHASHSEED"), "hashes_not_reproducible"),
        (("lora_names_not_unique: x",), "lora_names_not_unique"),
        (("weights_unknown: x",), "weights_unknown"),
        (("kv_scales_not_fixed: x",), "kv_scales_not_fixed"),
    ],
)
def test_the_word_for_what_is_not_shared(sentences: tuple[str, ...], word: str) -> None:
    assert sharing_word(sentences, was_reset=False) == word


# -- by layer ---------------------------------------------------------------------------------------------------


def by_layer(groups: KVGroups = ONE_GROUP, **options: Any) -> AttachedVllmHost:
    return with_prompt(groups, path="layer", **options)


def choices(host: AttachedVllmHost) -> dict[str, int]:
    counts = host.service.facade.stats().transfers.choices
    return {choice: count for choice, count in counts.items() if count}


@pytest.mark.parametrize("groups", [ONE_GROUP, WITH_WINDOW])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_load_by_layer_has_its_slots_before_vllm_is_told_of_it(groups: KVGroups, delay: int) -> None:
    host, request = by_layer(groups, delay=delay), FakeRequest("r", PROMPT)
    host.expect(request)
    assert host.answer(request) == 12
    assert host.side.loads_by_layer(request)
    host.admit(request, load=12)
    plan = host.step()
    assert (plan.loads.ops, plan.lost_loads, len(plan.layered.ops)) == ((), {}, 1)
    assert host.has_loaded(request, 12)
    host.settle()
    assert (host.leases, host.control.open_transfers, choices(host)) == (0, 0, {"layer_setting": 1})


def test_slots_of_one_prefix_are_asked_for_once() -> None:
    """While the service has not answered, a second request would ask for the same slots, and copy all of them again."""
    host, first, second = by_layer(delay=2), FakeRequest("first", PROMPT), FakeRequest("second", PROMPT)
    host.expect(first)
    host.expect(second)
    for _ in range(10):
        found = host.ask_now(first)
        assert host.ask_now(second) is None
        if found is not None:
            break
        host.step()
    assert (found, choices(host)) == (12, {"layer_setting": 1})
    host.admit(first, load=12)
    assert len(host.step().layered.ops) == 1
    assert host.ask_now(second, 12) == 0, "vLLM finds the blocks on the GPU"


def test_a_load_by_layer_that_vllm_has_no_blocks_for_is_given_up_and_goes_before_a_step() -> None:
    host, request = by_layer(), FakeRequest("r", PROMPT)
    assert host.answer(request) == 12
    plan = host.step()
    assert [(op.direction, op.blocks, op.slots) for op in plan.stores.ops] == [("load", (), ())]
    host.settle()
    assert (host.leases, host.control.open_transfers) == (0, 0)
    assert host.answer(request) == 12
    assert not host.side.loads_by_layer(request)
    host.admit(request, load=12)
    for _ in range(2):
        host.step()
    assert host.has_loaded(request, 12)
    assert choices(host) == {"layer_setting": 1, "async_no_room": 1}


def test_the_slots_of_a_request_that_ends_before_they_are_known_are_given_up() -> None:
    host, request = by_layer(delay=2), FakeRequest("r", PROMPT)
    while host.ask_now(request) is None and not choices(host):
        host.step()
    host.side.finish(request, request.block_ids)
    for _ in range(4):
        host.step()
    host.settle()
    assert (host.leases, host.control.open_transfers) == (0, 0)
    assert choices(host) == {"layer_setting": 1}


def test_a_prefix_that_the_gpu_has_meanwhile_gives_up_the_slots() -> None:
    host, request = begun_by_layer()
    host.run(FakeRequest("c", PROMPT[:4]))
    assert host.answer(request, 4) == 8
    host.admit(request, local=4, load=8)
    assert len(host.step().layered.ops) == 1
    assert host.has_loaded(request, 12)
    host.settle()
    assert (host.leases, host.control.open_transfers) == (0, 0)


def test_without_the_service_a_request_whose_slots_were_asked_for_is_computed() -> None:
    host, request = begun_by_layer()
    host.service.is_up = False
    host.control.disconnect("gone")
    assert host.answer(request) == 0


def begun_by_layer(**options: Any) -> tuple[AttachedVllmHost, FakeRequest]:
    """vLLM has asked for the request once since its slots were asked for, and does not know them yet."""
    host, request = by_layer(delay=2, **options), FakeRequest("r", PROMPT)
    for _ in range(5):
        assert host.ask_now(request) is None
        if choices(host):
            return host, request
        host.step()
    raise AssertionError("the lookup has no answer")


def test_slots_that_a_lost_session_gave_are_not_used() -> None:
    host, request = begun_by_layer()
    host.step()
    assert host.ask_now(request) is None
    host.step()
    assert host.service.connection.oldest_call is None, "the answer has come"
    host.service.lose()
    assert host.ask_now(request) == 0
    host.step()
    host.settle()
    assert (host.leases, host.control.open_transfers, host.side.loads_by_layer(request)) == (0, 0, False)


def test_slots_are_not_used_if_the_end_of_the_session_stands_behind_them() -> None:
    """The service has answered, and was killed. What it has sent arrives at once."""
    host, request = begun_by_layer()
    host.step()
    host.service.connection.hasten()
    host.service.die()
    assert host.control.is_attached
    assert host.ask_now(request) == 0
    assert not host.control.is_attached
    host.step()
    host.settle()
    assert (host.leases, host.control.open_transfers, host.side.loads_by_layer(request)) == (0, 0, False)


def test_no_load_by_layer_is_promised_before_every_rank_holds_its_gate() -> None:
    host, request = begun_by_layer()
    host.ranks_hold = False
    for _ in range(4):
        host.step()
        assert host.ask_now(request) is None
    host.ranks_hold = True
    host.step()
    assert host.ask_now(request) == 12
    assert host.side.loads_by_layer(request)


def test_a_request_does_not_wait_for_ever_for_a_rank_that_holds_no_gate() -> None:
    host, request = begun_by_layer()
    host.ranks_hold = False
    for _ in range(3):
        host.step()
        assert host.ask_now(request) is None
    host.clock.advance(WAIT_SECONDS)
    assert host.ask_now(request) == 0
    host.step()
    host.settle()
    assert (host.leases, host.control.open_transfers) == (0, 0)


def holds_of(ranks: int = 1) -> tuple[GateHolds, GateHold]:
    """They hold the first session."""
    holds = GateHolds(ranks)
    hold = holds.next(SessionTicket(1, ""), (), has_requests=True)
    for rank in range(ranks):
        assert not holds.is_held
        holds.note(rank, hold.number)
    assert holds.is_held
    return holds, hold


def test_a_hold_lasts_until_no_op_of_its_session_comes() -> None:
    holds, hold = holds_of(ranks=2)
    op = Op(unique_id(1, 7), "load", (1,), (1,))
    assert holds.next(SessionTicket(1, ""), (), has_requests=True) == hold
    assert holds.next(None, (op,), has_requests=True) == hold
    assert holds.next(SessionTicket(2, ""), (op,), has_requests=True) == hold
    assert holds.is_held
    other = holds.next(SessionTicket(2, ""), (), has_requests=True)
    assert (other.session, holds.is_held) == (2, False)
    assert other.number != hold.number


def test_an_engine_without_requests_holds_no_gate() -> None:
    holds, _ = holds_of()
    assert holds.next(SessionTicket(1, ""), (), has_requests=False) == NO_HOLD
    assert not holds.is_begun


def test_a_late_word_of_an_earlier_hold_does_not_count() -> None:
    """With asynchronous scheduling, the word of a step comes when the next one was planned."""
    holds, hold = holds_of()
    holds.next(SessionTicket(1, ""), (), has_requests=False)
    holds.next(SessionTicket(1, ""), (), has_requests=True)
    holds.note(0, hold.number)
    assert not holds.is_held


def test_a_rank_that_drops_its_hold_holds_nothing() -> None:
    holds, _ = holds_of()
    holds.note(0, 0)
    assert not holds.is_held


def test_a_request_that_waits_while_the_service_restarts_loads_from_the_new_session() -> None:
    host, request = begun_by_layer()
    for _ in range(4):
        host.step()
    host.service.lose()
    for _ in range(6):
        host.step()
    assert host.control.ticket is not None
    assert host.control.ticket.number == 2
    assert host.answer(request) == 12
    assert host.side.loads_by_layer(request)
    host.admit(request, load=12)
    assert len(host.step().layered.ops) == 1
    assert host.has_loaded(request, 12)
    host.settle()
    assert (host.leases, host.control.open_transfers) == (0, 0)


def test_slots_for_a_request_that_vllm_asks_for_no_more_are_given_up() -> None:
    """As a load that never ends, they would have the service stop serving the engine."""
    host, request = begun_by_layer()
    for _ in range(4):
        host.step()
    host.settle()
    assert (host.leases, host.control.open_transfers, choices(host)) == (0, 0, {"layer_setting": 1})
    assert host.service.session is not None
    assert sum(map(len, host.service.session.held_slots())) == 0
    assert host.answer(request) == 12
    assert host.side.loads_by_layer(request), "vLLM had room for it"


def test_of_many_loads_whose_slots_come_late_only_the_first_is_alone() -> None:
    host = with_prompt(delay=2, gpu_blocks=200, path="auto", step_budget=0.0)
    prompts = [PROMPT[number:] + PROMPT[:number] for number in range(4)]  # none waits for the load of another one
    for prompt in prompts[1:]:
        first = FakeRequest(prompt, prompt)
        host.run(first)
        host.finish(first)
    host.settle()
    for block in host.pool.blocks:
        block.block_hash = None
    requests = [FakeRequest(str(number), prompt) for number, prompt in enumerate(prompts)]
    host.expect(requests[0])
    while not choices(host):
        assert host.ask_now(requests[0]) is None, "its slots come late"
        host.step()
    for request in requests[1:]:
        host.expect(request)
    by_layer: dict[FakeRequest, bool] = {}
    while requests[0] not in by_layer:
        for request in requests:
            if request not in by_layer and host.ask_now(request):
                by_layer[request] = host.side.loads_by_layer(request)
                host.admit(request, load=12)
        assert len(host.step().layered.ops) <= 1
    host.settle()
    assert [request for request, is_by_layer in by_layer.items() if is_by_layer] == requests[:1]
    assert choices(host) == {"layer_alone": 1, **({"async_burst": len(by_layer) - 1} if len(by_layer) > 1 else {})}
    for request in requests:
        (host.finish if request in by_layer else host.drop)(request)
    host.settle()
    for block in host.pool.blocks:
        block.block_hash = None
    assert host.answer(again := FakeRequest("again", PROMPT)) == 12
    assert host.side.loads_by_layer(again), "no load waits any more"


def test_all_loads_of_a_step_wait_for_their_slots_no_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    host = by_layer(delay=3, gpu_blocks=200)
    requests = [FakeRequest(str(number), PROMPT) for number in range(4)]
    for request in requests:
        host.expect(request)
    for _ in range(3):
        host.step()
    waited: list[float] = []

    def wait(call: object, seconds: float) -> bool:
        waited.append(seconds)
        host.clock.advance(seconds)
        return False

    monkeypatch.setattr(host.service.connection, "wait", wait)
    assert [host.ask_now(request) for request in requests] == [None] * 4
    assert sum(waited) == pytest.approx(LAYER_WAIT_SECONDS)
    host.step()
    waited.clear()
    assert [host.ask_now(request) for request in requests] == [None] * 4
    assert sum(waited) == pytest.approx(LAYER_WAIT_SECONDS), "in the next step again"
    host.service.is_silent = True
    host.clock.advance(SLOW_SECONDS)
    for _ in range(2):
        host.step()
        waited.clear()
        assert host.ask_now(requests[0]) is None
    assert host.control.problem == "the node service does not answer"
    assert sum(waited) == 0.0


@pytest.mark.parametrize("path", ["async", "layer"])
def test_a_broken_lease_holds_nothing_after_it_was_refused(path: Literal["async", "layer"]) -> None:
    host, request = with_prompt(delay=1, path=path), FakeRequest("r", PROMPT)
    host.expect(request)
    host.step()
    assert host.service.session is not None
    assert host.leases == 1
    host.service.session.leases.break_all()
    if path == "layer":
        assert host.answer(request) == 0
    else:
        assert host.answer(request) == 12
        host.admit(request, load=12)
        host.step()
    host.step()
    assert host.leases == 0


def test_an_engine_whose_weights_may_have_changed_says_so() -> None:
    host = with_prompt(delay=0)
    assert host.side.reset("weights_changed: a test")
    host.step()
    assert host.control.state.sharing == "weights_changed"
    assert host.answer(FakeRequest("r", PROMPT)) == 0
    host.step()
    assert host.service.facade.blocks(limit=1000).blocks, "other engines keep what they share"
