"""Requests that share a prefix, in an engine that is attached to the node service: the service answers late."""

from __future__ import annotations

import pytest
from tests.service.connectors.engine_core.vllmhost import ONE_GROUP, WITH_WINDOW, FakeRequest
from tests.service.connectors.engine_core.waitingqueue import WaitingQueue
from tests.service.connectors.vllm.attachedvllmhost import PROMPT, AttachedVllmHost, with_prompt

from kvstow_service.connectors.engine_core.kvgroups import KVGroups

HIT = 12


def make_queue(host: AttachedVllmHost, count: int) -> WaitingQueue:
    queue = WaitingQueue(host, *[FakeRequest(str(number), PROMPT) for number in range(count)])
    for request in queue.waiting:
        host.expect(request)
    return queue


@pytest.mark.parametrize("groups", [ONE_GROUP, WITH_WINDOW])
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_requests_of_one_prompt_copy_it_once(groups: KVGroups, delay: int) -> None:
    queue = make_queue(with_prompt(groups, delay=delay, gpu_blocks=199), 16)
    requests = list(queue.waiting)
    queue.run()
    assert queue.loads == {"0": HIT}
    assert queue.copied == len(groups.places(0, HIT))
    queue.assert_all_hold(requests)
    queue.host.step()
    assert queue.host.leases == 0


def test_a_request_waits_for_a_load_that_the_service_has_yet_to_agree_to() -> None:
    queue = make_queue(with_prompt(delay=3, gpu_blocks=99), 2)
    while not queue.loading:
        assert queue.step().loads.ops == ()
    assert queue.names(queue.waiting) == ["1"]


def test_the_request_loads_at_once_if_the_session_ends_before_the_other_one_s_load() -> None:
    """Its own hit is lost with the session, so it is computed."""
    host = with_prompt(delay=2, gpu_blocks=99)
    queue = make_queue(host, 2)
    while not queue.loading:
        queue.step(end_loads=False)
    host.service.lose()
    assert set(queue.step(end_loads=False).lost_loads) == {"0"}
    queue.step(end_loads=False)
    assert queue.names(queue.finished) == ["1"]
