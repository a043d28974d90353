"""Blocks that the pool did not take are offered again while the GPU caches them, and a burst is spread over steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from tests.service.connectors.engine_core.vllmhost import (
    ONE_GROUP,
    SHORT_WINDOW,
    WITH_SHORT_WINDOW,
    FakeRequest,
    VllmHost,
    keys_of,
)

from kvstow_service.connectors.engine_core.kvgroups import KVGroups

LONG = "".join(map(chr, range(200, 232)))  # 16 blocks
KEYS = keys_of(LONG)


def idle_steps(host: VllmHost) -> int:
    """Let vLLM idle; how many steps the connector asked for."""
    for steps in range(1000):
        if not host.side.has_pending_stores:
            return steps
        host.step()
    raise AssertionError("it asks for steps for ever")


def run_and_finish(host: VllmHost, tokens: str = LONG, *, copy: bool = True) -> FakeRequest:
    request = FakeRequest(f"request of {len(tokens)}", tokens)
    host.run(request, copy=copy)
    host.finish(request)
    return request


def stuck_op(host: VllmHost) -> int:
    """A store that its rank says nothing of for too long."""
    request = FakeRequest("stuck", "zz")
    host.run(request, copy=False)
    host.finish(request)
    (op,) = host.step(copy=False).stores.ops
    host.clock.advance(host.engine.config.transfer_timeout + 1)
    host.engine.tick()
    return op.op_id


class Closed(NamedTuple):
    """A reason why no store starts: how it begins, how it ends, and how the blocks count."""

    reason: str
    begin: Callable[[VllmHost], Any]
    end: Callable[[VllmHost], Any]
    outcome: str
    pinned: int | None = None


CLOSED = [
    Closed("nothing is pinned", lambda host: None, lambda host: host.ranks[0].pin(64), "dropped_not_ready", pinned=0),
    Closed(
        "drained",
        lambda host: host.engine.admin.drain("all", None),
        lambda host: host.engine.admin.undrain(),
        "dropped_draining",
    ),
    Closed(
        "bypassed",
        lambda host: host.engine.admin.set_bypass(load=False, store=True, ttl_seconds=None),
        lambda host: host.engine.admin.set_bypass(load=False, store=False, ttl_seconds=None),
        "skipped_bypass",
    ),
    Closed("stuck", stuck_op, lambda host: host.ranks[0].run_all(), "dropped_not_ready"),
]
CLOSED_IDS = [closed.reason for closed in CLOSED]


@pytest.mark.parametrize("groups", [ONE_GROUP, WITH_SHORT_WINDOW], ids=["full", "window"])
@pytest.mark.parametrize("closed", CLOSED, ids=CLOSED_IDS)
def test_refused_blocks_are_stored_after_their_request_has_ended(closed: Closed, groups: KVGroups) -> None:
    host = VllmHost(groups, gpu_blocks=65, pinned=closed.pinned)
    closed.begin(host)
    before = host.outcomes.get("stored", 0)
    run_and_finish(host, copy=False)
    assert idle_steps(host) == 0  # nothing can be done, so an idle vLLM sleeps
    for _ in range(3):
        assert host.step(copy=False).stores.ops == ()
    num_blocks = 16 * len(groups.groups)
    refused = {name: count for name, count in host.outcomes.items() if name not in ("stored", "failed")}
    assert refused == {closed.outcome: num_blocks}, "each block counts once, under its own reason"
    closed.end(host)
    assert idle_steps(host) > 0
    assert {*KEYS} <= host.stored()
    assert host.outcomes["stored"] >= before + num_blocks
    assert host.outcomes[closed.outcome] == num_blocks


@pytest.mark.parametrize("closed", CLOSED, ids=CLOSED_IDS)
def test_refused_blocks_are_stored_while_their_request_runs(closed: Closed) -> None:
    host, request = VllmHost(gpu_blocks=65, pinned=closed.pinned), FakeRequest("r", LONG)
    closed.begin(host)
    host.run(request, copy=False)
    for more in "XYZ":
        request.tokens += more
        host.step({request: 1}, copy=False)
    closed.end(host)
    request.tokens += "!"
    host.step({request: 1})
    host.step()
    assert {*keys_of(LONG + "XY")} <= host.stored()


@pytest.mark.parametrize("closed", CLOSED[:3], ids=CLOSED_IDS[:3])
def test_lazy_stores_offer_refused_blocks_again(closed: Closed) -> None:
    host = VllmHost(gpu_blocks=17, lazy_blocks=16, pinned=closed.pinned)
    closed.begin(host)
    run_and_finish(host)
    for _ in range(3):
        assert host.step().stores.ops == ()
    assert idle_steps(host) == 0
    assert host.outcomes == {closed.outcome: 16}
    closed.end(host)
    assert idle_steps(host) > 0
    assert host.stored() == set(KEYS)
    assert host.outcomes == {closed.outcome: 16, "stored": 16}


class CountingEngine:
    """Counts the offers that the engine gets, and how many blocks they have."""

    def __init__(self, host: VllmHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offers: list[int] = []
        begin_store = host.engine.begin_store

        def count(keys: Any, blocks: Any, **rest: Any) -> Any:
            self.offers.append(len(keys))
            return begin_store(keys, blocks, **rest)

        monkeypatch.setattr(host.engine, "begin_store", count)


def test_a_full_pool_is_left_alone_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slot is held: nothing can be evicted."""
    host = VllmHost(gpu_blocks=65, slots=4)
    others = keys_of("ABCDEFGH")
    host.store(*others)
    lease = host.engine.acquire(others)
    counted = CountingEngine(host, monkeypatch)
    run_and_finish(host, LONG[:6])
    for _ in range(50):
        host.step()
    assert counted.offers == [3]
    assert host.outcomes["dropped_cpu_full"] == 3
    assert idle_steps(host) == 0
    host.engine.release_lease(lease)
    assert idle_steps(host) > 0
    assert {*KEYS[:3]} <= host.stored()
    assert counted.offers == [3, 3]
    assert host.outcomes["dropped_cpu_full"] == 3


def test_no_more_is_offered_again_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    host = VllmHost(gpu_blocks=65, slots=64, pinned=0)
    run_and_finish(host)
    counted = CountingEngine(host, monkeypatch)
    host.ranks[0].pin(5)
    host.step(copy=False)
    for _ in range(10):
        host.step(copy=False)  # all five slots are being filled
    assert counted.offers == [5]
    host.ranks[0].pin(64)
    host.copy()
    idle_steps(host)
    assert host.stored() == set(KEYS)
    assert host.outcomes == {"dropped_not_ready": 16, "stored": 16}


@pytest.mark.parametrize("lazy_blocks", [None, 16])
def test_a_store_that_failed_is_planned_again(lazy_blocks: int | None) -> None:
    host = VllmHost(gpu_blocks=17, lazy_blocks=lazy_blocks)
    run_and_finish(host)
    (op,) = host.step(copy=False).stores.ops
    host.ranks[0].run(op.op_id, fail=True)
    assert idle_steps(host) > 0
    assert host.stored() == set(KEYS)
    assert host.outcomes == {"failed": 16, "stored": 16}


def fail_all(host: VllmHost) -> int:
    """Every op that waits fails; how many there were."""
    queue = [*host.ranks[0].queue]
    for op_id in queue:
        host.ranks[0].run(op_id, fail=True)
    return len(queue)


@pytest.mark.parametrize("lazy_blocks", [None, 16])
def test_stores_that_go_on_failing_become_rare(lazy_blocks: int | None) -> None:
    host = VllmHost(gpu_blocks=17, lazy_blocks=lazy_blocks)
    run_and_finish(host)
    failed = 0
    for _ in range(1000):
        host.step(copy=False)
        failed += fail_all(host)
    assert 8 <= failed <= 14
    assert idle_steps(host) == 0  # an idle vLLM does not step for a rank that fails everything
    for _ in range(300):
        host.step()
    assert host.stored() == set(KEYS)


def test_blocks_that_the_gpu_has_evicted_are_forgotten() -> None:
    host = VllmHost(gpu_blocks=18, pinned=0)
    run_and_finish(host)
    run_and_finish(host, "ABCDEFGH")  # in one block that was never used, and three that it evicts
    host.ranks[0].pin(64)
    idle_steps(host)
    assert host.stored() == {*KEYS[:13], *keys_of("ABCDEFGH")}


def test_a_block_that_this_step_writes_is_not_read() -> None:
    """Its old content was refused. Now it bears the hash of what another request is about to compute."""
    host, twin = VllmHost(gpu_blocks=17, pinned=0), FakeRequest("twin", LONG)
    run_and_finish(host)
    run_and_finish(host, "A" * 32)  # the same blocks, with another content
    host.ranks[0].pin(64)
    host.admit(twin, 32)
    assert host.step({twin: 32}).stores.ops == ()
    idle_steps(host)
    assert host.stored() == set(KEYS)


def test_a_block_that_this_step_completes_is_not_read() -> None:
    """An older step has begun to write it. vLLM has given it its hash only now, before the rest is written."""
    host, twin = VllmHost(gpu_blocks=17, pinned=0), FakeRequest("twin", LONG)
    run_and_finish(host)
    host.admit(twin, 15)
    host.step({twin: 15})
    host.ranks[0].pin(64)
    assert twin.block_ids[0][7] not in {block for op in host.step({twin: 17}).stores.ops for block in op.blocks}
    idle_steps(host)
    host.finish(twin)
    idle_steps(host)
    assert host.stored() == set(KEYS)


def test_a_window_block_that_is_handed_out_again_is_stored_when_it_is_written() -> None:
    """It has left the window of one request, and another one, which computes the same tokens, is given it."""
    host, request, twin = VllmHost(WITH_SHORT_WINDOW), FakeRequest("r", "abcdefgh"), FakeRequest("t", "abcdefgh")
    host.run(request)
    window = request.block_ids[1]
    request.tokens += "i"
    host.schedule(request, 1)
    free = [block for block in host.pool.free if block != window[0]]
    host.hand_out_next(*free[:4], window[0])
    host.admit(twin, 8)
    assert twin.block_ids[1][0] == window[0]
    plan = host.step({request: 1, twin: 8})
    assert window[0] not in {each for op in plan.stores.ops for each in op.blocks}
    host.step({})
    assert keys_of("ab", SHORT_WINDOW)[0] in host.stored()


def test_a_window_block_that_holds_other_tokens_by_now_is_not_stored_as_the_old_ones() -> None:
    """It has left the window before its turn came, and another request has written it."""
    host = VllmHost(WITH_SHORT_WINDOW, step_blocks=2)
    request, other = FakeRequest("r", "abcdefgh"), FakeRequest("o", "stuvwxyz")
    host.run(request)
    window = request.block_ids[1]
    request.tokens += "ij"
    host.schedule(request, 1)
    host.hand_out_next(window[1])
    host.admit(other, 8)
    assert window[1] in {block_id for table in other.block_ids for block_id in table}
    host.step({request: 1, other: 8})
    host.schedule(request, 1)
    host.step({request: 1})
    host.finish(request)
    idle_steps(host)
    stored = host.stored()
    assert keys_of("abcd")[1] in stored
    assert keys_of("abcd", SHORT_WINDOW)[1] not in stored


def test_a_block_that_another_connector_loads_in_this_step_is_not_read() -> None:
    """MultiConnector may have a child that loads within the step. vLLM counts these tokens as computed by then."""
    host = VllmHost(gpu_blocks=65, pinned=0)
    ended, request = FakeRequest("e", "abcdefgh"), FakeRequest("r", "stuvwxyz!")
    host.run(ended)
    refused = ended.block_ids[0]
    host.finish(ended)
    host.step()
    host.ranks[0].pin(64)
    host.hand_out_next(*refused)
    host.admit(request, 9)
    assert request.block_ids[0][:4] == refused
    request.num_computed_tokens = 8  # of which the other child loads all
    plan = host.step({request: 1})
    assert plan.stores.ops == ()
    host.ranks[0].blocks.update(zip(refused, keys_of("stuvwxyz"), strict=True))
    host.step()
    assert host.stored() == set(keys_of("stuvwxyz"))


def test_after_a_reset_nothing_is_offered_again() -> None:
    host = VllmHost(gpu_blocks=65, pinned=0)
    run_and_finish(host)
    flying = VllmHost(gpu_blocks=65)
    run_and_finish(flying)
    (op,) = flying.step(copy=False).stores.ops
    for each in (host, flying):
        assert each.side.reset()
    host.ranks[0].pin(64)
    flying.ranks[0].run(op.op_id, fail=True)
    for each in (host, flying):
        assert idle_steps(each) == 0
        assert each.step().stores.ops == ()
        assert each.stored() == set()


# -- bursts ---------------------------------------------------------------------------------------------------


def attached(host: VllmHost, tokens: str = LONG) -> FakeRequest:
    """A request that finds all of its prompt on the GPU; the pool has lost it."""
    run_and_finish(host, tokens)
    idle_steps(host)
    host.engine.admin.purge(everything=True).run()
    request = FakeRequest("attached", tokens + "!")
    host.run(request, local=len(tokens))
    return request


def go_on(host: VllmHost, request: FakeRequest) -> list[int]:
    """A step that decodes; the blocks whose store it begins."""
    request.tokens += "?"
    return [block for op in host.step({request: 1}).stores.ops for block in op.blocks]


def test_a_step_offers_no_more_than_its_share_and_the_next_ones_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    host = VllmHost(gpu_blocks=65, step_blocks=5)
    request = attached(host)
    counted = CountingEngine(host, monkeypatch)
    stored = [go_on(host, request) for _ in range(5)]
    assert [len(each) for each in stored] == [5, 5, 5, 3, 0]  # the answer has filled blocks, too
    assert [block for each in stored for block in each] == request.block_ids[0][:18]
    assert max(counted.offers) == 5


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_request_that_ends_leaves_no_block_behind(steps: int) -> None:
    host = VllmHost(gpu_blocks=65, step_blocks=5)
    request = attached(host)
    for _ in range(steps):
        go_on(host, request)
    host.finish(request)
    assert idle_steps(host) > 0
    assert {*KEYS} <= host.stored()


def test_requests_that_end_together_share_what_a_step_may_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    host = VllmHost(gpu_blocks=65, step_blocks=4)
    requests = [FakeRequest(f"r{number}", chr(300 + number) * 6) for number in range(8)]
    for request in requests:
        host.admit(request, 6)
    host.step(dict.fromkeys(requests, 6))
    counted = CountingEngine(host, monkeypatch)
    for request in requests:
        host.finish(request)
    assert sum(counted.offers) <= 4 + 3
    before = len(counted.offers)
    idle_steps(host)
    assert max(counted.offers[before:]) <= 4
    assert host.stored() == {key for request in requests for key in keys_of(request.tokens)}


def test_no_request_keeps_others_waiting_with_its_burst() -> None:
    host = VllmHost(gpu_blocks=65, step_blocks=4)
    request = attached(host)
    other = FakeRequest("other", "ABCDEFGH")
    host.admit(other, 8)
    request.tokens += "?"
    host.step({request: 1, other: 8})
    for _ in range(2):
        for each in (request, other):
            each.tokens += "?"
        host.step({request: 1, other: 1})
    host.step()
    assert {*keys_of("ABCDEFGH")} <= host.stored()


@pytest.mark.parametrize("groups", [ONE_GROUP, WITH_SHORT_WINDOW], ids=["full", "window"])
def test_the_beginning_of_a_prefix_that_took_several_steps_is_evicted_last(groups: KVGroups) -> None:
    # Blocks of windows count with their request from its end on. Those that are not even offered by then, because they
    # did not fit into its last step, are evicted in the order in which they are stored.
    host = VllmHost(groups, gpu_blocks=65, step_blocks=6 if groups.is_plain else 64, slots=40)
    run_and_finish(host)
    idle_steps(host)
    for _ in range(10):
        host.step()
    expected = [key for number in range(16) for key in (keys_of(LONG, group)[number] for group in groups.groups)]
    for evicted in range(1, len(expected)):
        host.engine.admin.evict(slots=1).run()
        assert host.stored() == set(expected[: len(expected) - evicted])


def test_lazy_stores_offer_no_more_than_their_share() -> None:
    host = VllmHost(gpu_blocks=17, lazy_blocks=16, step_blocks=5)
    run_and_finish(host)
    counts = [sum(len(op.blocks) for op in host.step(copy=False).stores.ops) for _ in range(5)]
    assert counts == [5, 5, 5, 1, 0]
    host.copy()
    assert host.stored() == set(KEYS)
