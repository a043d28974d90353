"""Eviction: a prefix that the pool has no room for is shortened from its end, in all KV groups alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.service.connectors.engine_core.vllmhost import FULL, ONE_GROUP, FakeRequest, VllmHost

from kvstow.hints import Hints
from kvstow.source import Source
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.stores import EndedRequests
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest

PROMPT = "abcdefghijklmnopqrstuvwxy"  # 24 tokens can be loaded
FULL_KINDS = {
    "one group": ONE_GROUP,
    "two groups": KVGroups((FULL, KVGroup(1, 2, 1)), 2),
    "two block sizes": KVGroups((FULL, KVGroup(1, 6, 3)), 6),
}
KINDS = FULL_KINDS | {
    "window": KVGroups((FULL, KVGroup(1, 2, 1, window=5)), 2),
    "window before full attention": KVGroups((KVGroup(0, 2, 1, window=5), KVGroup(1, 2, 1)), 2),
    "window of another block size": KVGroups((FULL, KVGroup(1, 6, 3, window=7)), 6),
    "all": KVGroups((FULL, KVGroup(1, 6, 3, window=7), KVGroup(2, 4, 2, chunk=8), KVGroup(3, 2, 1, window=3)), 12),
}


def blocks_of(groups: KVGroups, num_tokens: int) -> int:
    return sum(num_tokens // group.block_tokens for group in groups.groups)


def make_host(groups: KVGroups, room: int) -> VllmHost:
    """A pool that has room for one prompt and `room` blocks of another."""
    return VllmHost(groups, gpu_blocks=99, slots=blocks_of(groups, 24) + room)


def serve(host: VllmHost, request: FakeRequest) -> None:
    """From what the pool has of it to its end, and the store of all that it came to."""
    found = host.ask(request)
    if found:
        host.admit(request, load=found)
        host.step()
        host.resume(request, request.num_tokens - found)
        host.step({request: request.num_tokens - found})
    else:
        host.run(request)
    host.finish(request)
    host.step()


def fitting(groups: KVGroups, room: int) -> int:
    """The tokens whose blocks `room` slots can hold."""
    return room // blocks_of(groups, groups.alignment) * groups.alignment


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_is_served_as_far_as_there_is_room_for_it(kind: str) -> None:
    groups = KINDS[kind]
    for room in range(blocks_of(groups, 24) + 1):
        host = make_host(groups, room)
        serve(host, FakeRequest("1", PROMPT))
        serve(host, FakeRequest("2", PROMPT.upper()))
        assert host.ask(FakeRequest("3", PROMPT.upper())) == 24
        assert host.ask(FakeRequest("4", PROMPT)) == fitting(groups, room)
        host.stored()


@pytest.mark.parametrize("kind", FULL_KINDS)
def test_a_prefix_that_was_loaded_is_still_shortened_from_its_end(kind: str) -> None:
    groups = FULL_KINDS[kind]
    for room in range(blocks_of(groups, 24) + 1):
        host = make_host(groups, room)
        for name in "12":
            serve(host, FakeRequest(name, PROMPT))
        assert host.engine.stats().lookups.hit_blocks == 24 // groups.alignment
        serve(host, FakeRequest("3", PROMPT.upper()))
        assert host.ask(FakeRequest("4", PROMPT)) == fitting(groups, room)


def serve_in_steps(host: VllmHost, request: FakeRequest, step_tokens: int) -> None:
    """As vLLM computes a long prompt: each step is stored while the next one is computed."""
    left = request.num_tokens - step_tokens
    host.admit(request, step_tokens)
    host.step({request: step_tokens})
    while left:
        tokens = min(step_tokens, left)
        host.step({request: tokens})
        left -= tokens
    host.finish(request)
    host.step()


@pytest.mark.parametrize("kind", FULL_KINDS)
@pytest.mark.parametrize("step_tokens", [6, 10, 12])
def test_a_prompt_computed_in_several_steps_is_shortened_from_its_end(kind: str, step_tokens: int) -> None:
    groups = FULL_KINDS[kind]
    for room in range(blocks_of(groups, 24) + 1):
        host = make_host(groups, room)
        serve_in_steps(host, FakeRequest("1", PROMPT), step_tokens)
        serve(host, FakeRequest("2", PROMPT.upper()))
        assert host.ask(FakeRequest("3", PROMPT)) == fitting(groups, room)


def uses_on_the_pool(host: VllmHost, request: FakeRequest) -> list[int | None]:
    """By block of the first group; None for those that the pool does not have."""
    tracked = TrackedRequest(request, 1)
    keys = tracked.keys(host.groups.groups[0], 0, 99)
    slots = host.engine.namespace.keys.slots_of(keys)
    return [None if slot is None else host.engine.pool.index.uses.counts([slot])[0] for slot in slots]


def test_each_request_uses_its_whole_chain_once_what_the_gpu_had_of_it_included() -> None:
    host = VllmHost(ONE_GROUP, gpu_blocks=99, slots=64)
    for number, prompt in enumerate(["abcdefgh", "abcdefghijkl", "abcdefghijklmnop"]):
        request = FakeRequest(str(number), prompt)
        for local in (8, 0, 8):  # vLLM asks as often as it likes
            host.ask(request, local)
        host.run(request, local=min(8, 8 * number))
        host.finish(request)
        host.step()
        host.step()
    assert uses_on_the_pool(host, request) == [3, 3, 3, 3, 2, 2, 1, 1]


def test_a_long_chain_is_used_part_by_part_its_end_first(monkeypatch: pytest.MonkeyPatch) -> None:
    host = VllmHost(ONE_GROUP, gpu_blocks=99, slots=64, step_blocks=2)
    told: list[tuple[int, int, tuple[int, int] | None]] = []
    use = host.control.use

    def noted(
        keys: list[bytes], *, start: int, looked_up: tuple[int, int], hints: Hints | None, source: Source
    ) -> None:
        told.append((start, len(keys), looked_up))
        use(keys, start=start, looked_up=looked_up, hints=hints, source=source)

    monkeypatch.setattr(host.control, "use", noted)
    for number in range(2):
        request = FakeRequest(str(number), "abcdefghijklmnopq")
        host.ask(request, 6 * number)
        host.run(request, local=6 * number)
        host.finish(request)
        for _ in range(8):
            host.step()
    assert uses_on_the_pool(host, request) == [2] * 8
    assert told == [*[(start, 2, (0, 8)) for start in (6, 4, 2, 0)], *[(start, 2, (3, 8)) for start in (6, 4, 2, 0)]]


def test_blocks_that_are_stored_lazily_have_the_uses_from_before() -> None:
    host = VllmHost(ONE_GROUP, gpu_blocks=9, slots=64, lazy_blocks=4)
    for number in range(3):
        request = FakeRequest(str(number), "abcd")
        host.run(request, local=4 * bool(number))
        host.finish(request)
        host.step()
    assert uses_on_the_pool(host, request) == [None, None]
    other = FakeRequest("other", "ABCDEFGHIJ")
    host.run(other)
    host.finish(other)
    for _ in range(3):
        host.step()
    assert uses_on_the_pool(host, request) == [0, 0], "what is known of them is looked up with their next use"
    request = FakeRequest("again", "abcd")
    host.run(request)
    host.finish(request)
    for _ in range(3):
        host.step()
    assert uses_on_the_pool(host, request) == [4, 4]


def test_no_more_than_64_ended_requests_wait_for_the_backlog() -> None:
    used: list[int] = []
    engine: Any = SimpleNamespace(use=lambda keys, **_: used.append(len(keys)), source_key=b"")
    stores: Any = SimpleNamespace(newest=0, oldest=1)
    ended = EndedRequests(engine, ONE_GROUP, stores)
    for count in range(65):
        assert used == [], f"after {count} requests"
        tracked = TrackedRequest(FakeRequest(f"r{count}", PROMPT), 1)
        tracked.request.num_computed_tokens = 4
        ended.add_ended(tracked)
        ended.report_uses(1024, backlog_moves=True)
    assert used == [2] * 65
