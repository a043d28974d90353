"""A vLLM process, and what of its configuration is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvstow.errors import ConfigError
from kvstow_service.connectors.engine_core.vllmprocess import VLLMProcess, hash_block_tokens, join_vllm_log

OURS, THEIRS = logging.getLogger("kvstow"), logging.getLogger("vllm")


def make_config(**changes: Any) -> SimpleNamespace:
    """A `VllmConfig` of two ranks; `part__field` changes one of them, `part` all of it."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        kv_transfer_config=SimpleNamespace(
            kv_connector="KVStowConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            engine_id="engine",
            is_kv_consumer=True,
        ),
        parallel_config=SimpleNamespace(
            rank=1,
            world_size=2,
            tensor_parallel_size=2,
            local_world_size=2,
            use_ray=False,
            distributed_executor_backend="mp",
            data_parallel_index=3,
            decode_context_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        model_config=SimpleNamespace(served_model_name="model", model="/path/of/the/model"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=8, async_scheduling=True),
        speculative_config=None,
        lora_config=None,
        instance_id="process",
    )
    for name, value in changes.items():
        part, _, field = name.partition("__")
        setattr(getattr(config, part) if field else config, field or part, value)
    return config


class FullAttentionSpec: ...


class MLAAttentionSpec: ...


def make_cache(*kinds: type, zeroes: bool = False) -> SimpleNamespace:
    """A `KVCacheConfig` with a group of each kind."""
    groups = [SimpleNamespace(kv_cache_spec=kind()) for kind in kinds]
    return SimpleNamespace(needs_kv_cache_zeroing=zeroes, kv_cache_groups=groups)


def process_of(*kinds: type, zeroes: bool = False, engine: dict[str, Any] | None = None, **changes: Any) -> VLLMProcess:
    """`engine`: what vLLM's own `KVTransferConfig` says otherwise."""
    config = make_config(**changes)
    transfer = SimpleNamespace(**vars(config.kv_transfer_config) | (engine or {}))
    return VLLMProcess.of(config, make_cache(*kinds, zeroes=zeroes), transfer)


def test_a_process_is_read_from_the_configuration() -> None:
    assert process_of(FullAttentionSpec) == VLLMProcess(
        engine_id="process-engine",
        model="model",
        rank=1,
        num_ranks=2,
        ranks_per_node=2,
        data_parallel_index=3,
        context_parallel=1,
        max_batched_tokens=2048,
        max_requests=8,
        frees_late=True,
        recomputes=True,
        may_load_by_layer=True,
    )


@pytest.mark.parametrize(
    ("kinds", "changes", "replicated"),
    [
        ([MLAAttentionSpec], {}, True),
        ([MLAAttentionSpec, MLAAttentionSpec], {}, True),
        ([MLAAttentionSpec, FullAttentionSpec], {}, False),
        ([FullAttentionSpec], {}, False),
        ([MLAAttentionSpec], {"parallel_config__decode_context_parallel_size": 2}, False),
        ([MLAAttentionSpec], {"parallel_config__tensor_parallel_size": 1}, False),  # of a pipeline of two
        ([MLAAttentionSpec], {"parallel_config__tensor_parallel_size": 1, "parallel_config__world_size": 1}, False),
    ],
)
def test_ranks_have_the_same_kv_if_all_layers_compress_it(
    kinds: list[type], changes: dict[str, Any], replicated: bool
) -> None:
    assert process_of(*kinds, **changes).replicated is replicated


def test_ranks_of_later_data_parallel_engines_count_from_zero() -> None:
    assert process_of(parallel_config__rank=5).rank == 1


@pytest.mark.parametrize("uses_ray", [False, True])
def test_ranks_that_may_be_on_another_node_are_not_counted(uses_ray: bool) -> None:
    local = 2 if uses_ray else 1
    process = process_of(parallel_config__local_world_size=local, parallel_config__use_ray=uses_ray)
    assert process.ranks_per_node == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"scheduler_config__async_scheduling": False},
        {"engine": {"is_kv_consumer": False}},
        {"speculative_config": object()},
        {"zeroes": True},
    ],
)
def test_loads_may_not_rely_on_late_frees(changes: dict[str, Any]) -> None:
    assert process_of().frees_late
    assert process_of(**changes).drafts is ("speculative_config" in changes)
    assert not process_of(**changes).frees_late


def test_batches_of_a_pipeline_overlap_too() -> None:
    changes: dict[str, Any] = {
        "scheduler_config__async_scheduling": False,
        "parallel_config__pipeline_parallel_size": 2,
    }
    assert process_of(**changes).frees_late


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_config__enable_prefix_caching": False}, "enable_prefix_caching is False; allowed: true"),
        (
            {"kv_transfer_config__kv_role": "kv_producer"},
            "kv_role is 'kv_producer'; allowed: kv_both: .* each connector has a kv_role",
        ),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context_parallel_size is 2; allowed: 1"),
        (
            {"parallel_config__distributed_executor_backend": "external_launcher"},
            "distributed_executor_backend is 'external_launcher'; allowed: mp or ray",
        ),
    ],
)
def test_unsupported_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        process_of(**changes)


def test_one_rank_of_an_external_launcher_has_its_own_scheduler() -> None:
    changes: dict[str, Any] = {
        "parallel_config__distributed_executor_backend": "external_launcher",
        "parallel_config__world_size": 1,
    }
    process = process_of(**changes)
    assert (process.rank, process.num_ranks) == (0, 1)


def test_the_policy_is_that_of_the_engine_and_not_of_a_child_of_multiconnector() -> None:
    engine = {"kv_load_failure_policy": "recompute"}
    assert process_of(kv_transfer_config__kv_load_failure_policy="fail", engine=engine).recomputes
    assert not process_of(engine={"kv_load_failure_policy": "fail"}).recomputes


def test_the_tokens_of_a_hash_are_those_that_vllm_has_resolved() -> None:
    assert hash_block_tokens(None, SimpleNamespace(hash_block_size=16)) == 16


# -- log ------------------------------------------------------------------------------------------------------


@pytest.fixture
def vllm_handler() -> Iterator[logging.Handler]:
    """vLLM's logger as vLLM configures it, and ours not configured."""
    before = [(each, each.handlers, each.level, each.propagate) for each in (OURS, THEIRS)]
    handler = logging.NullHandler()
    THEIRS.handlers, OURS.handlers, OURS.propagate = [handler], [], True
    THEIRS.setLevel(logging.INFO)
    OURS.setLevel(logging.NOTSET)
    yield handler
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_kvstow_logs_to_vllms_log(vllm_handler: logging.Handler) -> None:
    for _ in range(2):
        join_vllm_log()
    assert (OURS.handlers, OURS.level, OURS.propagate) == ([vllm_handler], logging.INFO, False)


@pytest.mark.parametrize("configure", ["handler", "level"])
@pytest.mark.usefixtures("vllm_handler")
def test_a_logger_that_is_configured_already_is_left_alone(configure: str) -> None:
    own = logging.NullHandler()
    if configure == "handler":
        OURS.addHandler(own)
    else:
        OURS.setLevel(logging.DEBUG)
    join_vllm_log()
    assert OURS.handlers == ([own] if configure == "handler" else [])
    assert OURS.propagate


@pytest.mark.usefixtures("vllm_handler")
def test_where_vllm_has_configured_nothing_nothing_changes() -> None:
    THEIRS.handlers = []
    join_vllm_log()
    assert (OURS.handlers, OURS.level, OURS.propagate) == ([], logging.NOTSET, True)


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel_config__pipeline_parallel_size": 2},
        {"parallel_config__decode_context_parallel_size": 2},
        {"parallel_config__use_ubatching": True},
        {"parallel_config__enable_dbo": True},
        {"model_config__enable_sleep_mode": True},
        {"speculative_config": object()},
    ],
)
def test_a_step_that_was_not_tried_loads_nothing_by_layer(changes: dict[str, Any]) -> None:
    assert process_of(FullAttentionSpec).may_load_by_layer
    assert not process_of(FullAttentionSpec, **changes).may_load_by_layer


def test_a_worker_knows_whether_vllm_has_another_connector() -> None:
    assert process_of(FullAttentionSpec).is_alone
    assert not process_of(FullAttentionSpec, engine={"kv_connector": "MultiConnector"}).is_alone
