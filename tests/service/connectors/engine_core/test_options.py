"""`kv_connector_extra_config`: what is accepted, what is refused, and how bytes become slots."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvstow.errors import ConfigError
from kvstow.memory.limits import MemoryLimits
from kvstow_service.connectors.engine_core.options import ConnectorOptions, default_size


@pytest.mark.parametrize("nothing", [None, {}, {"policy": None}])
def test_nothing_given_is_the_default(nothing: dict[str, Any] | None) -> None:
    assert ConnectorOptions.parse(nothing) == ConnectorOptions(cpu_bytes_to_use=default_size(MemoryLimits()))


def test_no_size_means_a_quarter_of_what_the_machine_or_the_container_has(tmp_path: Path) -> None:
    meminfo, cgroups, root = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "root"
    limits = MemoryLimits(meminfo=meminfo, own_cgroups=cgroups, cgroup_root=root)
    assert default_size(limits) == 8 << 30, "nobody knows how much there is"
    for available in (1 << 20, 5 << 20):
        meminfo.write_text(f"MemTotal: {16 << 20} kB\nMemAvailable: {available} kB\n")
        assert default_size(limits) == 4 << 30, "whatever is in use, or processes would decide on other sizes"
    cgroups.write_text("0::/pod\n")
    (root / "pod").mkdir(parents=True)
    (root / "pod" / "memory.max").write_text(f"{8 << 30}\n")
    assert default_size(limits) == 2 << 30
    (root / "pod" / "memory.max").write_text("max\n")
    assert default_size(limits) == 4 << 30


def test_a_limit_below_the_share_is_kept_and_a_rank_s_size_needs_no_other() -> None:
    assert ConnectorOptions.parse({"max_bytes": 1000}).cpu_bytes_to_use == 1000
    assert ConnectorOptions.parse({"cpu_bytes_to_use_per_rank": 1000, "max_bytes": 2000}).bytes_of_rank(8) == 1000


def test_everything_given_is_kept() -> None:
    given = {
        "cpu_bytes_to_use": "60GB",
        "cpu_bytes_to_use_per_rank": 1 << 30,
        "max_bytes": "80GiB",
        "lazy_offload": True,
        "async_register_cache": False,
        "policy": "lru",
        "curve": False,
        "transfer_timeout": "1m",
        "copy_strategy": "direct",
        "load_path": "auto",
        "load_step_budget": "5ms",
        "lock": False,
        "huge_pages": "reserved",
        "pin_chunk": "2MiB",
        "pin_pause": "5ms",
        "admin_host": "localhost",
        "admin_port": 0,
        "token_file": "/etc/kvstow/token",
        "viewer_token_file": "/etc/kvstow/viewer",
        "tls_cert": "/etc/kvstow/tls.crt",
        "tls_key": "/etc/kvstow/tls.key",
        "tls_client_ca": "/etc/kvstow/ca.crt",
        "readiness_require": ["pool"],
        "allowed_hosts": ["Ops.example"],
    }
    options = ConnectorOptions.parse(given)
    assert options == ConnectorOptions(
        cpu_bytes_to_use=60 * 10**9,
        cpu_bytes_to_use_per_rank=1 << 30,
        max_bytes=80 << 30,
        lazy_offload=True,
        async_register_cache=False,
        policy="lru",
        curve=False,
        transfer_timeout=60.0,
        copy_strategy="direct",
        load_path="auto",
        load_step_budget=0.005,
        lock=False,
        huge_pages="reserved",
        pin_chunk=2 << 20,
        pin_pause=0.005,
        admin_host="localhost",
        admin_port=0,
        token_file=Path("/etc/kvstow/token"),
        viewer_token_file=Path("/etc/kvstow/viewer"),
        tls_cert=Path("/etc/kvstow/tls.crt"),
        tls_key=Path("/etc/kvstow/tls.key"),
        tls_client_ca=Path("/etc/kvstow/ca.crt"),
        readiness_require=("pool",),
        allowed_hosts=("ops.example",),
    )
    paths = {name for name, value in given.items() if str(value).startswith("/")}
    others = {"pin_latency_target", "attach", "weights_id", "attach_require_sharing"}
    assert set(options.public()) == set(given) - paths | others


ATTACH = "unix:///run/kvstow/attach.sock"


def test_an_attached_engine_asks_for_all_memory_unless_told_otherwise() -> None:
    assert ConnectorOptions.parse({"attach": ATTACH}).cpu_bytes_to_use == 0
    given = {"attach": "unix:/a.sock", "cpu_bytes_to_use": "1GiB", "weights_id": "v1", "attach_require_sharing": True}
    options = ConnectorOptions.parse(given)
    assert (options.attach, options.cpu_bytes_to_use) == (Path("/a.sock"), 1 << 30)
    assert (options.weights_id, options.attach_require_sharing) == ("v1", True)


MEANT_FOR_ATTACHED = {
    *("attach", "weights_id", "attach_require_sharing", "cpu_bytes_to_use", "lazy_offload", "copy_strategy", "lock"),
    *("pin_chunk", "pin_pause", "pin_latency_target", "async_register_cache", "load_path", "load_step_budget"),
}


def test_every_other_option_is_refused_beside_attach() -> None:
    values: dict[str, Any] = {
        "transfer_timeout": "1m",
        "admin_port": 1,
        "policy": "lru",
        "curve": False,
        "huge_pages": "reserved",
        "readiness_require": ["pool"],
        "allowed_hosts": ["host"],
    }
    for key in {each.name for each in fields(ConnectorOptions)} - MEANT_FOR_ATTACHED:
        with pytest.raises(ConfigError, match=f"{key}.* has no effect beside attach"):
            ConnectorOptions.parse({"attach": ATTACH, key: values.get(key, "1")})


def test_what_belongs_to_attach_is_refused_without_it() -> None:
    with pytest.raises(ConfigError, match=r"attach_require_sharing.* needs attach"):
        ConnectorOptions.parse({"attach_require_sharing": True})
    with pytest.raises(ConfigError, match=r"weights_id v1 needs attach"):
        ConnectorOptions.parse({"weights_id": "v1"})


def test_vllms_start_never_waits_for_the_node_service() -> None:
    with pytest.raises(ConfigError, match=r"async_register_cache.* never waits for the node service"):
        ConnectorOptions.parse({"attach": ATTACH, "async_register_cache": False})


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("cpu_bytes_to_use", 0, "1 byte or more"),
        ("cpu_bytes_to_use", -1, "a number of bytes"),
        ("cpu_bytes_to_use", 6.5e9, "1 byte or more"),
        ("cpu_bytes_to_use", "much", "a number of bytes"),
        ("cpu_bytes_to_use_per_rank", True, "a number of bytes"),
        ("max_bytes", 0, "1 byte or more"),
        ("lazy_offload", "false", "true or false"),
        ("async_register_cache", 1, "true or false"),
        ("lock", 0, "true or false"),
        ("policy", "fifo", "auto, lru"),
        ("copy_strategy", "fast", "auto or staged or direct"),
        ("huge_pages", True, "advised or reserved"),
        ("transfer_timeout", 0, "more than 0 seconds"),
        ("transfer_timeout", "soon", "0 or more seconds"),
        ("pin_pause", -1, "0 or more seconds"),
        ("pin_latency_target", 0, "more than 0 seconds"),
        ("pin_chunk", 0, "1 byte or more"),
        ("admin_host", "", "a non-empty string"),
        ("admin_port", 65536, "0 (any free one) to 65535"),
        ("admin_port", True, "0 (any free one) to 65535"),
        ("token_file", 7, "a non-empty string"),
        ("readiness_require", ["loop"], "a list of pool and pinned"),
        ("allowed_hosts", ["a:80"], "a list of host names without ports"),
        ("attach", "/run/kvstow/attach.sock", "unix:PATH or unix:///PATH"),
        ("attach", 7, "a non-empty string"),
        ("attach_require_sharing", "yes", "true or false"),
        ("readiness_require", [{}], "a list of pool and pinned"),
    ],
)
def test_a_bad_value_is_refused_by_name(key: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ConnectorOptions.parse({key: value})
    assert f"kv_connector_extra_config: {key}" in str(refused.value)
    assert allowed in str(refused.value)


def test_an_unknown_key_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="cpu_bytes is unknown; known keys") as refused:
        ConnectorOptions.parse({"cpu_bytes": 7})
    for key in ("cpu_bytes_to_use", "lazy_offload", "async_init", "pin_chunk"):
        assert key in str(refused.value)


def test_keys_that_vllm_reads_are_ignored() -> None:
    assert ConnectorOptions.parse({"enable_cross_layers_blocks": True}) == ConnectorOptions.parse({})


def test_the_alias_is_the_same_option_and_stands_alone() -> None:
    assert ConnectorOptions.parse({"async_init": False}).async_register_cache is False
    with pytest.raises(ConfigError, match="the same option: set only one of them"):
        ConnectorOptions.parse({"async_register_cache": False, "async_init": True})


@pytest.mark.parametrize("fixed", [{"pin_chunk": "2MiB"}, {"pin_pause": 0}])
def test_a_pace_that_contradicts_itself_is_refused_at_once(fixed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"config: pin_latency_target 0.001 contradicts pin_chunk"):
        ConnectorOptions.parse({"pin_latency_target": "1ms", **fixed})


def test_the_bytes_are_exact_over_ranks_of_unlike_slots() -> None:
    options = ConnectorOptions.parse({"cpu_bytes_to_use": 1000})
    assert options.bytes_of_rank(2) == 500
    assert options.capacity_slots([100, 50]) == 6
    config = options.engine_config([100, 50], 32)
    assert (config.capacity_slots, config.slot_bytes, config.rank_slot_bytes) == (6, 100, (100, 50))
    assert (config.num_ranks, config.block_tokens) == (2, 32)


def test_bytes_per_rank_bound_the_rank_with_the_largest_slots() -> None:
    options = ConnectorOptions.parse({"cpu_bytes_to_use": 1, "cpu_bytes_to_use_per_rank": 1000})
    assert options.bytes_of_rank(2) == 1000
    assert options.capacity_slots([100, 50]) == 10


@pytest.mark.parametrize(
    ("key", "given", "least"), [("cpu_bytes_to_use", 149, 150), ("cpu_bytes_to_use_per_rank", 99, 100)]
)
def test_less_than_a_block_is_refused(key: str, given: int, least: int) -> None:
    with pytest.raises(ConfigError, match=f"at least one block, {least} bytes"):
        ConnectorOptions.parse({key: given}).capacity_slots([100, 50])
    assert ConnectorOptions.parse({key: least}).capacity_slots([100, 50]) == 1


def test_pool_and_bound_are_shared_by_one_rule() -> None:
    """100 bytes over slots of 30 and 20: two slots on each rank, although half of 100 is one slot of 30."""
    options = ConnectorOptions.parse({"cpu_bytes_to_use": 100, "max_bytes": 100})
    assert options.capacity_slots([30, 20]) == options.max_slots([30, 20], fitting=0) == 2
    assert options.reserved_bytes_of_rank(node_bytes=0) // 30 >= 2
    assert ConnectorOptions.parse({"cpu_bytes_to_use": 100, "max_bytes": 170}).max_slots([30, 20], fitting=9) == 3


def test_without_max_bytes_a_pool_may_grow_to_the_memory_of_the_machine() -> None:
    options = ConnectorOptions.parse({"cpu_bytes_to_use": 1000})
    assert (options.max_slots([100, 100], fitting=9), options.max_slots([100, 100], fitting=3)) == (9, 5)
    assert (options.reserved_bytes_of_rank(5000), options.reserved_bytes_of_rank(100)) == (5000, 1000)


def test_a_bound_below_the_pools_of_all_ranks_is_refused() -> None:
    options = ConnectorOptions.parse({"cpu_bytes_to_use_per_rank": 100, "max_bytes": 149})
    with pytest.raises(ConfigError, match="max_bytes is 149; allowed: none, or at least the size of all pools, 150"):
        options.max_slots([30, 20], fitting=9)


def test_the_pace_the_lock_and_the_kind_of_huge_pages_reach_the_pool() -> None:
    options = ConnectorOptions.parse({"pin_chunk": 64, "pin_pause": 0, "lock": False, "huge_pages": "reserved"})
    pool = options.pool_config(slot_bytes=8, pool_bytes=80, max_bytes=160)
    assert (pool.chunk_bytes, pool.pause, pool.latency_target, pool.lock) == (64, 0.0, None, False)
    assert pool.huge_pages == "reserved"
    assert (pool.capacity_slots, pool.max_slots) == (10, 20)


def test_a_bound_below_the_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_bytes"):
        ConnectorOptions.parse({"cpu_bytes_to_use": 2 << 30, "max_bytes": 1 << 30})
