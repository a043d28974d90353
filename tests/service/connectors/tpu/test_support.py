"""What KVStow refuses in tpu-inference, and what it says."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from kvstow.errors import ConfigError, SettingError
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.tpu.support import TPUOptions, require_kept, require_supported


def config(**changes: Any) -> Any:
    """A `VllmConfig` of tpu-inference that is supported, with changes."""
    settings = {"dp": 1, "pp": 1, "dcp": 1, "additional": {}} | changes
    return SimpleNamespace(
        sharding_config=SimpleNamespace(total_dp_size=settings["dp"]),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=settings["pp"], decode_context_parallel_size=settings["dcp"]
        ),
        additional_config=settings["additional"],
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dp": 2}, "data parallelism is 2; allowed: 1 in a process: tpu-inference's data-parallel scheduler drops"),
        ({"pp": 2}, "pipeline_parallel_size is 2; allowed: 1: only the last pipeline stage"),
        ({"dcp": 4}, "decode_context_parallel_size is 4; allowed: 1"),
        (
            {"additional": {"enable_continue_decode": True}},
            "additional_config: enable_continue_decode is True; allowed: false",
        ),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        require_supported(config(**changes))


def test_what_is_supported_is_not_refused() -> None:
    require_supported(config())
    require_supported(config(additional=None))


def test_another_platform_is_told_which_connector_is_its_own() -> None:
    with pytest.raises(ConfigError, match=r"allowed: kvstow_service\.connectors\.vllm: this one is for tpu-inference"):
        require_supported(SimpleNamespace(parallel_config=None))


def test_recurrent_states_and_groups_that_are_left_out_are_refused() -> None:
    require_kept(KVGroups((KVGroup(0, 16, 1),), 16))
    with pytest.raises(ConfigError, match="is 'recurrent states'; allowed: attention layers only, on TPUs"):
        require_kept(KVGroups((KVGroup(0, 16, 1), KVGroup(1, 16, 1, is_state=True)), 16))
    with pytest.raises(ConfigError, match="not find by prefix'; allowed: attention layers without them, on TPUs"):
        require_kept(KVGroups((KVGroup(0, 16, 1),), 16, left_out=(8,)))


@pytest.mark.parametrize("key", ["attach", "weights_id", "attach_require_sharing", "copy_strategy"])
def test_options_of_other_devices_are_refused(key: str) -> None:
    with pytest.raises(SettingError, match=f"kv_connector_extra_config: {key}"):
        TPUOptions.parse({key: "direct"})


def test_options_add_the_bytes_in_flight() -> None:
    assert TPUOptions.parse(None).bytes_in_flight == 512 << 20
    assert TPUOptions.parse({"bytes_in_flight": "64MiB", "cpu_bytes_to_use": "1GiB"}).bytes_in_flight == 64 << 20
    with pytest.raises(ConfigError, match="bytes_in_flight"):
        TPUOptions.parse({"bytes_in_flight": 0})
    with pytest.raises(SettingError, match=r"unknown; known keys: .*bytes_in_flight"):
        TPUOptions.parse({"bytes": 1})
