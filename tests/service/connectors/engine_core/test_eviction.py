"""Eviction: a prefix that the pool has no room for is shortened from its end, in all KV groups alike."""

from __future__ import annotations

import pytest
from tests.service.connectors.engine_core.vllmhost import FULL, ONE_GROUP, FakeRequest, VllmHost

from kvstow.control.hazards import uses_of
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
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
    uses = {slot: uses_of(part.past) for part in host.engine.pool.index.chains.parts() for slot in part.slots}
    return [None if slot is None else uses[slot] for slot in slots]


def test_each_request_uses_its_whole_chain_once_what_the_gpu_had_of_it_included() -> None:
    host = VllmHost(ONE_GROUP, gpu_blocks=99, slots=64)
    for number, prompt in enumerate(["abcdefgh", "abcdefghijkl", "abcdefghijklmnop"]):
        request = FakeRequest(str(number), prompt)
        for local in (8, 0, 8):  # vLLM asks as often as it likes
            host.ask(request, local)
        host.run(request, local=min(8, 8 * number))
        host.finish(request)
        host.step()
        host.clock.advance(10.0)
    assert uses_on_the_pool(host, request) == [3, 3, 3, 3, 2, 2, 1, 1]
