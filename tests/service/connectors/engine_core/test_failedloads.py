"""Failed loads before vLLM 0.30: where a request goes on, and which are held back."""

from __future__ import annotations

import pytest
from tests.service.connectors.engine_core.vllmhost import FULL, FakeRequest, VllmHost, keys_of

from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups

PROMPT = "abcdefghi"  # 8 tokens can be loaded
SHORT = KVGroups((FULL, KVGroup(1, 2, 1, window=3)), 2)
LONG = KVGroups((FULL, KVGroup(1, 2, 1, window=9)), 2)


def make_host(groups: KVGroups, local: int = 0) -> tuple[VllmHost, FakeRequest]:
    """A host whose pool has all of the request, and whose GPU has its first `local` tokens."""
    host, request = VllmHost(groups), FakeRequest("r", PROMPT)
    for group in groups.groups:
        host.store(*keys_of(PROMPT, group))
    if local:
        host.run(FakeRequest("f", PROMPT[:local]))
    return host, request


def load(host: VllmHost, request: FakeRequest, local: int = 0, *, fail: bool) -> None:
    found = host.ask(request, local)
    assert found == 8 - local
    host.admit(request, local=local, load=found)
    for op in host.step(copy=False).loads.ops:
        host.ranks[0].run(op.op_id, fail=fail)
    host.side.settle()


def test_a_request_whose_load_succeeded_continues() -> None:
    host, request = make_host(SHORT)
    load(host, request, fail=False)
    assert host.side.failed_loads.continuing({"r", "unknown"}) == {"r", "unknown"}
    assert request.num_computed_tokens == 8
    assert not host.engine.admin.bypass.load


def test_a_request_whose_load_failed_continues_from_the_tokens_on_the_gpu() -> None:
    host, request = make_host(LONG, local=4)
    load(host, request, 4, fail=True)
    assert host.side.failed_loads.continuing({"r"}) == {"r"}
    assert request.num_computed_tokens == 4
    assert not host.engine.admin.bypass.load


def test_a_request_that_has_lost_its_window_is_held_back() -> None:
    host, request = make_host(SHORT, local=4)
    load(host, request, 4, fail=True)
    assert host.side.failed_loads.continuing({"r", "unknown"}) == {"unknown"}
    assert request.num_computed_tokens == 8


def test_a_request_without_tokens_on_the_gpu_is_held_back_until_it_is_aborted() -> None:
    host, request = make_host(LONG)
    load(host, request, fail=True)
    assert host.side.failed_loads.continuing({"r"}) == set()
    assert host.side.failed_loads.continuing(set()) == set()
    host.side.finish(request, [[], []])
    assert host.side.failed_loads.continuing(set()) == {"r"}
    assert host.side.failed_loads.continuing(set()) == set()


def test_after_a_request_was_held_back_nothing_is_loaded_until_an_operator_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host, request = make_host(SHORT)
    other = FakeRequest("o", "XYZUVWXYZ")
    for group in SHORT.groups:
        host.store(*keys_of(other.tokens, group))
    host.engine.admin.set_bypass(load=False, store=True, ttl_seconds=None)
    load(host, request, fail=True)
    host.side.failed_loads.continuing({"r"})
    assert "requests r wait until they are aborted" in caplog.messages[-1]
    assert "kvstow bypass --off" in caplog.messages[-1]
    assert host.ask(other) == 0
    bypass = host.engine.admin.bypass
    assert (bypass.load, bypass.store) == (True, True)
    host.engine.admin.set_bypass(load=False, store=False, ttl_seconds=None)
    assert host.ask(other) == 8


def test_what_was_computed_with_blocks_that_were_not_loaded_leaves_the_cache_and_each_request_computes_it() -> None:
    """A request that found them on the GPU would go on with them while the first one computes them again."""
    host = VllmHost()
    first, second, other = FakeRequest("a", PROMPT), FakeRequest("b", PROMPT[:6] + "xyz"), FakeRequest("c", "123456789")
    host.run(other)
    host.run(first)
    host.run(second, local=6)
    bad = first.block_ids[0][1]
    assert second.block_ids[0][1] == bad
    host.side.take_back({bad})
    assert [each.num_computed_tokens for each in (first, second, other)] == [2, 2, 9]
    hashes = [[block.block_hash is None for block in each.tables[0][:4]] for each in (first, second, other)]
    assert hashes == [[False, True, True, True], [False, True, True, True], [False] * 4]
