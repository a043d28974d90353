"""Requests that share a prefix: which of them load it, which wait for another one's load, and until when."""

from __future__ import annotations

import gc
import weakref
from typing import NoReturn

import pytest
from tests.service.connectors.engine_core.vllmhost import (
    FULL,
    LARGE,
    ONE_GROUP,
    WITH_WINDOW,
    FakeRequest,
    VllmHost,
    hashes_of,
    keys_of,
)
from tests.service.connectors.engine_core.waitingqueue import WaitingQueue

from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.loads import WAIT_SECONDS

PROMPT = "abcdefghijklm"  # 12 tokens can be loaded, in 6 blocks of 2
HIT = 12
KINDS = {
    "full": ONE_GROUP,
    "window": WITH_WINDOW,
    "two block sizes": KVGroups((FULL, LARGE), 6),
    "all": KVGroups((FULL, LARGE, KVGroup(2, 4, 2, chunk=8), KVGroup(3, 2, 1, window=5)), 12),
}


def make_queue(
    *prompts: str,
    groups: KVGroups = ONE_GROUP,
    stored: tuple[str, ...] = (),
    gpu_blocks: int = 199,
    drafts: bool = False,
) -> WaitingQueue:
    """Requests "0", "1" and so on with these prompts, which the pool has, or has as far as `stored` says."""
    host = VllmHost(groups, gpu_blocks=gpu_blocks, slots=256, drafts=drafts)
    keys = [key for prompt in stored or prompts for group in groups.groups for key in keys_of(prompt, group)]
    host.store(*dict.fromkeys(keys))
    return WaitingQueue(host, *[FakeRequest(str(number), prompt) for number, prompt in enumerate(prompts)])


# -- what is copied -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 4, 8, 50])
def test_requests_of_one_prompt_copy_it_once(kind: str, count: int) -> None:
    queue = make_queue(*[PROMPT] * count, groups=KINDS[kind], gpu_blocks=399)
    requests = list(queue.waiting)
    assert queue.run() == 2, "one step loads, the next one runs all of them"
    assert queue.loads == {"0": HIT}
    assert queue.copied == len(KINDS[kind].places(0, HIT))
    queue.assert_all_hold(requests)
    assert queue.host.leases == 0


def test_a_prompt_of_whole_blocks_is_copied_once() -> None:
    """Of such a prompt vLLM finds one block less on the GPU than the pool could load."""
    queue = make_queue(*[PROMPT[:12]] * 4)
    requests = list(queue.waiting)
    assert queue.run() == 2
    assert queue.loads == {"0": 12}
    queue.assert_all_hold(requests)


def test_what_follows_a_shared_prefix_is_loaded_after_the_wait() -> None:
    queue = make_queue(PROMPT + "01", PROMPT + "23", "abcdefghxy5")
    requests = list(queue.waiting)
    assert queue.run() == 3
    assert queue.loads == {"0": 14, "1": 2, "2": 2}
    queue.assert_all_hold(requests)


def test_a_shorter_prompt_waits_for_the_load_of_a_longer_one() -> None:
    queue = make_queue(PROMPT, PROMPT[:9])
    assert queue.run() == 2
    assert queue.loads == {"0": HIT}


def test_a_request_waits_although_the_gpu_has_the_beginning_of_its_prompt() -> None:
    queue = make_queue(PROMPT, PROMPT)
    queue.host.run(FakeRequest("before", PROMPT[:4]))
    assert queue.run() == 2
    assert queue.loads == {"0": HIT - 4}


def test_other_prompts_are_loaded_at_once() -> None:
    queue = make_queue(PROMPT, PROMPT[::-1], "x" + PROMPT[:12])
    assert queue.run() == 2
    assert queue.loads == {"0": HIT, "1": HIT, "2": HIT}


def test_the_load_with_most_of_the_prompt_is_waited_for() -> None:
    queue = make_queue("abcdefgh5", "abcdefghij5", "abcdefghijkl5")
    queue.step(end_loads=False)  # "1" waits for "0"
    assert queue.names(queue.loading) == ["0"]
    queue.end_loads()
    queue.step(end_loads=False)
    assert queue.names(queue.loading) == ["1", "2"], "each loads what the first one did not bring"

    queue = make_queue("abcdxyz", "abcdefghijk", "abcdefghijkl5")
    queue.step()
    queue.step()
    assert queue.loads == {"0": 6, "1": 10, "2": 2}


# -- how long a request waits ---------------------------------------------------------------------------------


def test_a_request_that_is_asked_about_before_the_loading_one_is_scheduled_still_waits() -> None:
    """vLLM before 0.32 asks about requests in another order."""
    queue = make_queue(PROMPT, PROMPT)
    second = queue.waiting[1]
    queue.step()
    assert queue.host.side.find_hit(second, 0) is None
    queue.run()
    assert queue.loads == {"0": HIT}


def test_a_request_loads_if_a_finished_load_brought_it_nothing() -> None:
    """vLLM has scheduled the loading request, or has had the chance to."""
    queue = make_queue(PROMPT, PROMPT)
    second = queue.waiting[1]
    queue.step()
    queue.step(held_up=True)
    assert queue.host.side.find_hit(second, 0) == HIT


def test_blocks_that_the_gpu_has_evicted_again_are_loaded() -> None:
    queue = make_queue(PROMPT, PROMPT)
    first, second = queue.waiting
    queue.step()
    queue.waiting.clear()
    queue.step()
    queue.host.finish(first)
    for block in queue.host.pool.blocks:
        block.block_hash = None
    queue.waiting.append(second)
    queue.run()
    assert queue.loads == {"0": HIT, "1": HIT}


def test_blocks_of_a_preempted_request_are_still_on_the_gpu() -> None:
    queue = make_queue(PROMPT, PROMPT)
    first, second = queue.waiting
    queue.step()
    queue.waiting.clear()
    queue.step()
    queue.host.preempt(first)
    queue.waiting += [second, first]
    queue.run()
    assert queue.loads == {"0": HIT}


def assert_all_load_at_once(queue: WaitingQueue, *names: str) -> None:
    """In the next step these requests load by themselves."""
    queue.step(end_loads=False)
    assert queue.names(queue.loading) == [*names]
    assert not queue.waiting


def test_all_load_at_once_when_the_load_has_failed() -> None:
    queue = make_queue(*[PROMPT] * 4)
    queue.step(fail="0")
    assert_all_load_at_once(queue, "1", "2", "3")
    queue.end_loads()
    queue.run()
    assert queue.host.leases == 0


def test_a_load_that_is_lost_before_it_begins_is_not_waited_for() -> None:
    queue = make_queue(PROMPT, PROMPT)
    first = queue.waiting.pop(0)
    found = queue.host.ask(first)
    queue.host.ranks[0].restart(pinned=256)
    queue.host.admit(first, load=found)
    queue.host.store(*keys_of(PROMPT))
    assert_all_load_at_once(queue, "1")


def test_all_load_at_once_when_the_loading_request_is_aborted() -> None:
    queue = make_queue(*[PROMPT] * 4)
    queue.step(end_loads=False)
    queue.abort(queue.loading[0])
    assert_all_load_at_once(queue, "1", "2", "3")


def test_all_load_at_once_after_a_bounded_time() -> None:
    queue = make_queue(*[PROMPT] * 3)
    queue.step(end_loads=False)
    queue.host.clock.advance(WAIT_SECONDS - 0.1)
    queue.step(end_loads=False)
    assert queue.names(queue.loading) == ["0"]
    queue.host.clock.advance(0.1)
    assert_all_load_at_once(queue, "0", "1", "2")


def test_a_request_that_has_waited_waits_for_no_other_load() -> None:
    """Otherwise a chain of requests that share more and more would load one after the other."""
    queue = make_queue("abcdefgh5", "abcdefghijkl5", "abcdefghijklmn5")
    queue.step()
    assert queue.names(queue.waiting) == ["1", "2"]
    queue.step(end_loads=False)
    assert queue.names(queue.loading) == ["1", "2"], "2 would find more of its prompt in the load of 1"


def test_a_request_that_is_admitted_again_may_wait_again() -> None:
    queue = make_queue(PROMPT, PROMPT)
    first, second = queue.waiting
    queue.run()
    for request in (first, second):
        queue.host.preempt(request)
    for block in queue.host.pool.blocks:
        block.block_hash = None
    queue.waiting += [first, second]
    queue.step()
    assert queue.names(queue.waiting) == ["1"]


def test_a_request_does_not_wait_for_much_more_than_it_needs() -> None:
    queue = make_queue("abcdefghijklmno", "abcdef5", "abcdefgh5")
    queue.step(end_loads=False)
    assert queue.names(queue.loading) == ["0", "1"], "14 tokens are more than twice 6, and not more than twice 8"
    assert queue.names(queue.waiting) == ["2"]


def test_a_request_does_not_wait_for_less_than_half_of_what_it_needs() -> None:
    queue = make_queue("abcdxy5", "abcdefghij5", "abcdefgh5")
    queue.step(end_loads=False)
    assert queue.names(queue.loading) == ["0", "1"]
    assert queue.names(queue.waiting) == ["2"], "the load of 1 brings all of it, that of 0 half of it"


def test_a_request_whose_own_load_begins_earlier_does_not_wait() -> None:
    """The GPU has evicted what the loading request had found there."""
    queue = make_queue(PROMPT, PROMPT)
    before = FakeRequest("before", PROMPT[:4])
    queue.host.run(before)
    first, second = queue.waiting
    assert queue.host.side.find_hit(first, 4) == HIT - 4
    queue.host.admit(first, local=4, load=HIT - 4)
    assert queue.host.side.find_hit(second, 0) == HIT


def test_a_request_does_not_wait_for_a_store() -> None:
    queue = make_queue(PROMPT, PROMPT, stored=("zz",))
    first, second = queue.waiting
    queue.host.run(first)
    queue.host.finish(first)
    assert queue.host.step(copy=False).stores.ops, "the blocks are being stored"
    assert queue.host.side.find_hit(second, 0) == 0


def test_a_request_that_skips_the_prefix_cache_does_not_wait() -> None:
    queue = make_queue(PROMPT, PROMPT)
    second = queue.waiting[1]
    second.skip_reading_prefix_cache = True
    queue.step(end_loads=False)
    assert queue.finished == [second]


# -- several KV groups ----------------------------------------------------------------------------------------


def test_with_windows_only_a_prompt_that_contains_the_whole_load_waits() -> None:
    """The load brings no window before any other block than its last."""
    queue = make_queue(PROMPT, "abcdefghij5", PROMPT + "no", groups=WITH_WINDOW)
    requests = list(queue.waiting)
    queue.step(end_loads=False)
    assert queue.names(queue.loading) == ["0", "1"]
    queue.end_loads()
    queue.run()
    assert queue.loads == {"0": HIT, "1": 10, "2": 2}
    queue.assert_all_hold(requests)


@pytest.mark.parametrize(("groups", "loading"), [(WITH_WINDOW, ["0", "1"]), (ONE_GROUP, ["0"])])
def test_with_a_drafter_and_a_window_nothing_waits(groups: KVGroups, loading: list[str]) -> None:
    """vLLM drops the last block of a hit, and the window before that was not loaded."""
    queue = make_queue(PROMPT, PROMPT, groups=groups, drafts=True)
    queue.step(end_loads=False)
    assert queue.names(queue.loading) == loading


# -- accounting and cost --------------------------------------------------------------------------------------


def test_tokens_of_a_shared_load_count_as_one_hit() -> None:
    queue = make_queue(PROMPT + "01", *[PROMPT] * 7)
    queue.run()
    assert {name: count for name, count in queue.host.engine.stats().lookups.results.items() if count} == {"full": 1}


def test_a_request_that_waits_holds_its_hit_once_until_it_ends() -> None:
    queue = make_queue(PROMPT, PROMPT)
    second = queue.waiting[1]
    for _ in range(3):
        queue.step(end_loads=False)
    assert queue.host.leases == 1
    queue.abort(second)
    assert queue.host.leases == 0


class NotCompared(list[bytes]):
    """The hashes of a request that nobody reads."""

    def __getitem__(self, at: object) -> NoReturn:
        pytest.fail("the hashes are read")


def test_asking_again_about_a_request_that_waits_or_has_waited_compares_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = make_queue(*[PROMPT] * 3)
    queue.step(end_loads=False)
    monkeypatch.setattr(FakeRequest, "block_hashes", property(lambda request: NotCompared(hashes_of(request.tokens))))
    queue.step(end_loads=False)
    queue.host.clock.advance(WAIT_SECONDS)
    for request in list(queue.waiting):
        assert queue.host.side.find_hit(request, 0) == HIT


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    queue = make_queue(*[PROMPT] * 2, *[PROMPT[::-1]] * 2)
    queue.step(fail="0", end_loads=True)
    queue.run()
    requests = [weakref.ref(request) for request in queue.finished]
    while queue.finished:
        queue.host.finish(queue.finished.pop())
    gc.collect()
    assert [request() for request in requests] == [None] * 4
