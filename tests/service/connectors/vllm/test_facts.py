"""Facts of a vLLM process, and what of its configuration is refused."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvstow.errors import ConfigError
from kvstow_service.connectors.vllm.facts import HostFacts, hash_block_tokens


def make_config(**changes: Any) -> SimpleNamespace:
    """A `VllmConfig` of two ranks; `part__field` changes one of them, `part` all of it."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        kv_transfer_config=SimpleNamespace(
            kv_role="kv_both", kv_load_failure_policy="recompute", engine_id="engine", is_kv_consumer=True
        ),
        parallel_config=SimpleNamespace(
            rank=1, world_size=2, data_parallel_rank=0, master_addr="node-0", decode_context_parallel_size=1
        ),
        model_config=SimpleNamespace(served_model_name="model", model="/path/of/the/model"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        speculative_config=None,
        max_concurrent_batches=2,
        instance_id="process",
        kv_events_config=None,
    )
    for name, value in changes.items():
        part, _, field = name.partition("__")
        setattr(getattr(config, part) if field else config, field or part, value)
    return config


def facts_of(zeroes: bool = False, **changes: Any) -> HostFacts:
    return HostFacts.of(make_config(**changes), SimpleNamespace(needs_kv_cache_zeroing=zeroes))


def test_facts_are_read_from_the_configuration() -> None:
    assert facts_of() == HostFacts(
        engine_id="process-engine",
        model="model",
        rank=1,
        num_ranks=2,
        ranks_per_node=2,
        data_parallel_rank=0,
        master_host="node-0",
        context_parallel=1,
        max_batched_tokens=2048,
        frees_late=True,
        has_kv_events=False,
    )


def test_ranks_of_later_data_parallel_engines_count_from_zero() -> None:
    assert facts_of(parallel_config__rank=5).rank == 1


def test_an_engine_over_several_nodes_knows_so() -> None:
    assert not facts_of().spans_nodes
    facts = facts_of(parallel_config__nnodes=2)
    assert (facts.spans_nodes, facts.ranks_per_node) == (True, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_concurrent_batches": 1},
        {"kv_transfer_config__is_kv_consumer": False},
        {"speculative_config": object()},
        {"zeroes": True},
    ],
)
def test_loads_may_not_rely_on_late_frees(changes: dict[str, Any]) -> None:
    assert not facts_of(**changes).frees_late


@pytest.mark.parametrize(("enabled", "has"), [(True, True), (False, False)])
def test_kv_events_are_wanted_where_vllm_sends_them(enabled: bool, has: bool) -> None:
    assert facts_of(kv_events_config=SimpleNamespace(enable_kv_cache_events=enabled)).has_kv_events is has


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_config__enable_prefix_caching": False}, "enable_prefix_caching is False; allowed: true"),
        ({"kv_transfer_config__kv_role": "kv_producer"}, "kv_role is 'kv_producer'; allowed: kv_both"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context_parallel_size is 2; allowed: 1"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        facts_of(**changes)


def test_a_policy_that_fails_requests_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvstow.vllm"):
        facts_of()
        assert caplog.messages == []
        facts_of(kv_transfer_config__kv_load_failure_policy="fail")
    assert "kv_load_failure_policy is 'fail'" in caplog.messages[0]


def test_the_tokens_of_a_hash_are_those_that_vllm_has_settled() -> None:
    assert hash_block_tokens(None, SimpleNamespace(hash_block_size=16)) == 16
