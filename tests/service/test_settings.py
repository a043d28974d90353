from __future__ import annotations

from pathlib import Path

import pytest

from kvstow_service.replay.place import Place
from kvstow_service.replay.shapes import SHAPES
from kvstow_service.settings import Settings, load_settings


def errors_of(flags: dict[str, object], environ: dict[str, str] | None = None, config: Path | None = None) -> list[str]:
    with pytest.raises(ExceptionGroup) as caught:
        load_settings(flags, environ or {}, config)
    return [str(error) for error in caught.value.exceptions]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "kvstow.toml"
    path.write_text('ranks = 2\npool_size = "1GiB"\nslot_size = 4096\nlock = false\nreadiness_require = ["pool"]\n')
    return path


def test_defaults_are_those_of_the_documentation() -> None:
    settings = load_settings({}, {})
    assert (settings.pool_size, settings.slot_size, settings.device) == (8 << 30, 2 << 20, "cpu")
    assert (settings.host, settings.port) == ("127.0.0.1", 9595)


def test_the_file_wins_over_the_defaults(config: Path) -> None:
    settings = load_settings({}, {}, config)
    assert (settings.ranks, settings.pool_size, settings.slot_size) == (2, 1 << 30, 4096)
    assert (settings.lock, settings.readiness_require) == (False, ("pool",))


def test_variables_win_over_the_file_and_flags_over_both(config: Path) -> None:
    environ = {"KVSTOW_RANKS": "3", "KVSTOW_POOL_SIZE": "2GiB", "KVSTOW_LOCK": "true"}
    settings = load_settings({"ranks": "4", "pool_size": None}, environ, config)
    assert (settings.ranks, settings.pool_size, settings.slot_size, settings.lock) == (4, 2 << 30, 4096, True)


def test_a_variable_can_name_the_file(config: Path) -> None:
    assert load_settings({}, {"KVSTOW_CONFIG": str(config)}).ranks == 2


def test_an_empty_variable_is_not_given() -> None:
    assert load_settings({}, {"KVSTOW_TOKEN_FILE": "", "KVSTOW_RANKS": ""}) == load_settings({}, {})


def test_variables_without_the_prefix_are_ignored() -> None:
    assert load_settings({}, {"PATH": "/bin", "KVSTOWAGE": "1"}) == Settings()


LINK = "tcp://10.0.0.7:9595"


@pytest.mark.parametrize("service", ["KVSTOW", "KVSTOW_ADMIN", "KVSTOW_SERVER"])
def test_variables_by_which_kubernetes_describes_a_service_are_ignored(service: str) -> None:
    environ = {
        f"{service}_PORT": LINK,
        f"{service}_PORT_9595_TCP": LINK,
        f"{service}_PORT_9595_TCP_PROTO": "tcp",
        f"{service}_PORT_9595_TCP_PORT": "9595",
        f"{service}_PORT_9595_TCP_ADDR": "10.0.0.7",
        f"{service}_SERVICE_HOST": "10.0.0.7",
        f"{service}_SERVICE_PORT": "9595",
        f"{service}_SERVICE_PORT_HTTP": "9595",
    }
    assert load_settings({}, environ) == Settings()


def test_variables_of_the_other_commands_are_ignored() -> None:
    assert load_settings({}, {"KVSTOW_SERVER": "http://kvstow:9595", "KVSTOW_CONTEXT": "prod"}) == Settings()


@pytest.mark.parametrize("name", ["KVSTOW_ADMIN_PORT", "KVSTOW_SERVERS"])
def test_an_unknown_variable_is_refused(name: str) -> None:
    (error,) = errors_of({}, {name: "9595"})
    assert error.startswith(f"{name} is not a setting")


def test_an_unknown_variable_is_named_with_the_allowed_ones() -> None:
    (error,) = errors_of({}, {"KVSTOW_RANKZ": "2"})
    assert error.startswith("KVSTOW_RANKZ is not a setting; the settings are ")
    assert "KVSTOW_RANKS" in error


def test_an_unknown_key_of_the_file_is_named_with_the_file_and_the_allowed_ones(config: Path) -> None:
    config.write_text("rankz = 2\n")
    (error,) = errors_of({}, {}, config)
    assert error.startswith(f"{config}: rankz is not a setting; ")
    assert "slot_size" in error


@pytest.mark.parametrize("text", ["ranks =", "\xff"])
def test_a_file_that_is_no_toml_is_refused(config: Path, text: str) -> None:
    config.write_bytes(text.encode("latin-1"))
    (error,) = errors_of({}, {}, config)
    assert error.startswith(f"--config {config} is not a readable TOML file: ")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    (error,) = errors_of({}, {}, tmp_path / "none.toml")
    assert "No such file" in error


def test_every_wrong_value_gets_one_line_under_the_name_that_the_user_gave(config: Path) -> None:
    config.write_text("ranks = true\n")
    flags: dict[str, object] = {"pool_size": "8GX", "port": "65536", "readiness_require": "pool,pined"}
    environ = {"KVSTOW_PIN_PAUSE": "soon", "KVSTOW_LOG_FORMAT": "xml", "KVSTOW_LOCK": "maybe"}
    errors = errors_of(flags, environ, config)
    assert sorted(errors) == sorted(
        [
            f"{config}: ranks is True; allowed: a whole number, 1 or more",
            "--pool-size is '8GX'; allowed: a number of bytes, or a number with one of KiB MiB GiB TiB (powers of 1024)"
            " or kB MB GB TB",
            "--port is '65536'; allowed: 0 (any free port) to 65535",
            "--readiness-require is 'pool,pined'; allowed: a list of pool and pinned",
            "KVSTOW_PIN_PAUSE is 'soon'; allowed: 0 or more seconds, or a number with one of us ms s m h",
            "KVSTOW_LOG_FORMAT is 'xml'; allowed: 'text' or 'json'",
            "KVSTOW_LOCK is 'maybe'; allowed: true or false",
        ]
    )
    assert not any("\n" in error for error in errors)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"ranks": "0"}, "--ranks is '0'; allowed: a whole number, 1 or more"),
        ({"slot_size": "0"}, "--slot-size is '0'; allowed: more than 0 bytes"),
        ({"pin_chunk": "0"}, "--pin-chunk is '0'; allowed: more than 0 bytes"),
        ({"transfer_timeout": "0s"}, "--transfer-timeout is '0s'; allowed: more than 0 seconds"),
        ({"pool_size": "1MiB"}, "--pool-size 1MiB is less than one slot, 2 MiB"),
        ({"slot_size": "16GiB"}, "--pool-size 8GiB is less than one slot, 16 GiB"),
        ({"pool_max_size": "1GiB"}, "--pool-max-size 1GiB is less than --pool-size 8 GiB"),
        ({"replay_rate": "-2"}, "--replay-rate is '-2'; allowed: a number, more than 0"),
        ({"replay_rate": "x"}, "--replay-rate is 'x'; allowed: a number, more than 0"),
        (
            {"replay_rate": "2", "replay_time_scale": "3"},
            "--replay-time-scale 3 cannot be combined with --replay-rate",
        ),
        ({"exit_after_replay": True}, "--exit-after-replay needs --replay"),
        ({"policy": "fifo"}, "--policy is 'fifo'; allowed: lru or arc"),
        ({"device": "tpu"}, "--device is 'tpu'; allowed: 'cpu' or 'cuda'"),
        (
            {"device": "cuda", "lock": False},
            "--no-lock cannot be combined with --device cuda: CUDA copies from registered memory only",
        ),
        ({"copy_strategy": "direct"}, "--copy-strategy direct needs --device cuda"),
        ({"copy_strategy": "best"}, "--copy-strategy is 'best'; allowed: 'auto', 'staged' or 'direct'"),
        (
            {"shape": "gpt-2"},
            "--shape is 'gpt-2'; allowed: llama-3-8b or llama-3-70b-tp8 or mla-18k or gpt-oss-32k",
        ),
        (
            {"shape": "mla-18k", "slot_size": "2MiB"},
            "--slot-size 2MiB cannot be combined with --shape, which sets it",
        ),
        ({"pool_size": "1MiB", "shape": "llama-3-8b"}, "--pool-size 1MiB is less than one slot, 2 MiB"),
        ({"pin_pace": "slow"}, "--pin-pace is 'slow'; allowed: 'adaptive' or 'fixed'"),
        ({"tls_key": "k"}, "--tls-key k needs --tls-cert"),
        ({"tls_client_ca": "c"}, "--tls-client-ca c needs --tls-cert"),
        (
            {"viewer_token_file": "v"},
            "--viewer-token-file v needs --token-file or --tls-client-ca",
        ),
        ({"pin_latency_target": "0"}, "--pin-latency-target is '0'; allowed: more than 0 seconds"),
        (
            {"pin_latency_target": "1ms", "pin_pause": "1ms"},
            "--pin-latency-target 1ms needs an adaptive pace: --pin-pace fixed, --pin-chunk and --pin-pause fix it",
        ),
        (
            {"pin_latency_target": "1ms", "pin_pace": "fixed"},
            "--pin-latency-target 1ms needs an adaptive pace: --pin-pace fixed, --pin-chunk and --pin-pause fix it",
        ),
        (
            {"pin_pace": "adaptive", "pin_chunk": "1MiB"},
            "--pin-pace adaptive cannot be combined with --pin-chunk or --pin-pause, which fix the pace",
        ),
        ({"pool_size": 1.5}, "--pool-size is 1.5; allowed: a size such as 8GiB"),
        ({"huge_pages": "never"}, "--huge-pages is 'never'; allowed: 'advised' or 'reserved'"),
    ],
)
def test_contradictions_and_wrong_values_are_refused(flags: dict[str, object], error: str) -> None:
    assert errors_of(flags) == [error]


def test_the_pool_may_grow_into_a_ranks_share_of_the_memory() -> None:
    settings = load_settings({"ranks": "2", "pool_size": "1GiB"}, {})
    assert settings.pool_config(10 << 30).max_bytes == 5 << 30
    assert settings.pool_config(0).max_bytes == 1 << 30


def test_a_bound_on_growth_is_kept() -> None:
    settings = load_settings({"pool_size": "1GiB", "pool_max_size": "2GiB"}, {})
    assert settings.pool_config(10 << 30).max_slots == 1024


@pytest.mark.parametrize(
    ("flags", "chunk_bytes", "pause", "latency_target"),
    [
        ({}, None, None, None),
        ({"pin_pace": "adaptive", "pin_latency_target": "3ms"}, None, None, 0.003),
        ({"pin_pace": "fixed"}, 64 << 20, None, None),
        ({"pin_pause": "0"}, 64 << 20, 0.0, None),
        ({"pin_chunk": "8MiB"}, 8 << 20, None, None),
        ({"pin_pace": "fixed", "pin_chunk": "8MiB", "pin_pause": "5ms"}, 8 << 20, 0.005, None),
    ],
)
def test_the_pace_of_pinning_reaches_the_pool(
    flags: dict[str, object], chunk_bytes: int | None, pause: float | None, latency_target: float | None
) -> None:
    config = load_settings(flags, {}).pool_config(0)
    assert (config.chunk_bytes, config.pause, config.latency_target) == (chunk_bytes, pause, latency_target)
    assert config.has_fixed_pace == (chunk_bytes is not None)


def test_the_kind_of_huge_pages_reaches_the_pool() -> None:
    assert load_settings({}, {}).pool_config(0).huge_pages == "advised"
    assert load_settings({}, {"KVSTOW_HUGE_PAGES": "reserved"}).pool_config(0).huge_pages == "reserved"


def test_a_shape_is_the_size_of_a_slot() -> None:
    settings = load_settings({}, {"KVSTOW_SHAPE": "llama-3-70b-tp8"})
    assert settings.engine_config(16).slot_bytes == settings.pool_config(0).slot_bytes == 80 * 8192
    assert settings.place == Place("cpu", SHAPES["llama-3-70b-tp8"])
    assert load_settings({}, {}).place == Place()


def test_a_copy_strategy_reaches_the_place_of_the_kv_cache() -> None:
    assert load_settings({"device": "cuda", "copy_strategy": "direct"}, {}).place == Place("cuda", None, "direct")


def test_the_engine_gets_whole_slots() -> None:
    settings = load_settings({"pool_size": "5MiB", "slot_size": "2MiB", "policy": "arc"}, {})
    config = settings.engine_config(block_tokens=16)
    assert (config.capacity_slots, config.slot_bytes, config.policy) == (2, 2 << 20, "arc")
