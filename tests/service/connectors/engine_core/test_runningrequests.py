"""What the pool is told of the engine's requests, and what is stored when they end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.service.connectors.engine_core.blockpool import FakeBlockPool
from tests.service.connectors.engine_core.vllmhost import FakeRequest, VllmHost, keys_of

from kvstow.endings import STATUSES, Ending
from kvstow_service.connectors.engine_core.gpublocks import Backlog, GPUBlocks
from kvstow_service.connectors.engine_core.runningrequests import ending_of

PROMPT = "abcdefghijklmnop"


def running(host: VllmHost) -> int:
    return sum(part.request is not None for part in host.engine.pool.index.chains.parts())


def generate(host: VllmHost, request: FakeRequest) -> None:
    """Its prompt, and a few tokens: the prompt is stored meanwhile."""
    host.run(request)
    for _ in range(3):
        request.tokens += "?"
        host.step({request: 1})


def state_of(host: VllmHost, status: Any) -> int:
    return host.engine.pool.index.chains.hazards.first_cell(STATUSES.index(status), 1)


@pytest.mark.parametrize(
    ("status", "tokens", "ending"),
    [
        ("FINISHED_STOPPED", [1, 2, 3], Ending("stop", (2, 3))),
        ("FINISHED_STOPPED", [1], Ending("stop")),
        ("FINISHED_LENGTH_CAPPED", [1, 2, 3], Ending("length")),
        ("FINISHED_ABORTED", [1, 2, 3], Ending("abort")),
        ("FINISHED_ERROR", [], Ending("other")),
        (None, None, Ending("other")),
    ],
)
def test_how_a_request_ends_is_read_from_its_status_and_tokens(status: Any, tokens: Any, ending: Ending) -> None:
    request = SimpleNamespace(status=SimpleNamespace(name=status), output_token_ids=tokens)
    assert ending_of(request) == ending
    assert ending_of(object()) == Ending("other")


def test_a_request_runs_from_its_admission_to_its_end() -> None:
    host = VllmHost()
    request = FakeRequest("r", PROMPT)
    generate(host, request)
    assert running(host) > 0
    assert host.stored() >= set(keys_of(PROMPT))
    host.finish(request)
    assert running(host) == 0
    host.engine.check_integrity()


def test_a_preempted_request_runs_no_longer() -> None:
    host = VllmHost()
    request = FakeRequest("r", PROMPT)
    generate(host, request)
    host.preempt(request)
    host.step()
    assert running(host) == 0
    parts = host.engine.pool.index.chains.parts()
    assert state_of(host, "interrupted") in {part.home.first_cell for part in parts}
    host.run(request)
    assert running(host) == 1, "it is admitted again"


def test_a_reset_ends_all_requests() -> None:
    host = VllmHost()
    host.run(FakeRequest("r", PROMPT))
    host.step()
    assert host.side.reset("test")
    assert running(host) == 0
    assert not host.engine.pool.index.chains.parts()


def test_what_was_lent_is_stored_again_at_the_end() -> None:
    host = VllmHost(slots=9)
    request = FakeRequest("r", PROMPT)
    generate(host, request)
    assert host.stored() >= set(keys_of(PROMPT))
    host.engine.admin.evict(slots=5).run()  # as a store of others does
    assert len(host.stored()) < 8
    host.finish(request)
    for _ in range(3):
        host.step()
    assert host.stored() >= set(keys_of(PROMPT))


def test_what_was_lent_is_stored_again_if_that_is_known_only_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a service says it that has lent the blocks between its last message and the end."""
    host = VllmHost(slots=9)
    late: list[int] = []
    end_request = host.control.end_request

    def end(number: int, *given: object, **options: object) -> bool:
        late.append(number)
        end_request(number, *given, **options)
        return False

    def take_late() -> list[int]:
        found, late[:] = list(late), []
        return found

    monkeypatch.setattr(host.control, "end_request", end)
    monkeypatch.setattr(host.control, "take_late", take_late)
    request = FakeRequest("r", PROMPT)
    generate(host, request)
    host.engine.admin.evict(slots=5).run()
    host.finish(request)
    for _ in range(3):
        host.step()
    assert host.stored() >= set(keys_of(PROMPT))


# -- the backlog -------------------------------------------------------------------------------------------------------


def test_blocks_of_ended_requests_are_kept_for_a_bounded_time_and_number() -> None:
    now = [0.0]
    pool = FakeBlockPool(65)
    backlog = Backlog(GPUBlocks(pool), lambda: now[0])
    backlog.add_blocks(range(1, 31), keep=True)
    kept = [block.block_id for block in pool.blocks if block.ref_cnt]
    assert [one for one in kept if one] == list(range(1, 9)), "an eighth of the GPU's blocks"
    now[0] = 1.9
    backlog.release_taken()
    assert backlog.keeps_blocks
    now[0] = 2.0
    backlog.release_taken()
    assert not backlog.keeps_blocks
    assert not any(block.ref_cnt for block in pool.blocks[1:])


def test_blocks_that_the_gpu_has_evicted_first_are_counted() -> None:
    gpu = GPUBlocks(FakeBlockPool(65))
    backlog = Backlog(gpu, lambda: 0.0)
    backlog.add_blocks([3, 4], keep=True)
    assert backlog.take_cached(5, frozenset()).keys == []
    assert gpu.lost_blocks == 2
    backlog.release_taken()
    assert not backlog.keeps_blocks
