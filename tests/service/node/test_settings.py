from __future__ import annotations

from pathlib import Path

import pytest

from kvstow_service.node.settings import Settings, load_settings

MEMORY: dict[str, object] = {"memory": "64GiB"}


def errors_of(flags: dict[str, object], environ: dict[str, str] | None = None, config: Path | None = None) -> list[str]:
    with pytest.raises(ExceptionGroup) as caught:
        load_settings(flags, environ or {}, config)
    return [str(error) for error in caught.value.exceptions]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "kvstow.toml"
    path.write_text(
        'memory = "3GiB"\nextent_size = "512MiB"\nport = 4096\nkeep_on_stop = true\nstate = "/s"\n'
        'readiness_require = ["pool"]\n'
    )
    return path


def test_memory_is_required() -> None:
    needed = "--memory is required: the host memory of this node for KV caches, such as 64GiB"
    assert errors_of({}) == [needed]
    assert errors_of({"port": "x"}) == [needed, "--port is 'x'; allowed: 0 (any free port) to 65535"]


def test_the_file_wins_over_the_defaults(config: Path) -> None:
    settings = load_settings({}, {}, config)
    assert (settings.memory, settings.extent_size, settings.port) == (3 << 30, 512 << 20, 4096)
    assert (settings.keep_on_stop, settings.readiness_require) == (True, ("pool",))


def test_variables_win_over_the_file_and_flags_over_both(config: Path) -> None:
    environ = {"KVSTOW_PORT": "3", "KVSTOW_MEMORY": "2GiB", "KVSTOW_KEEP_ON_STOP": "false"}
    settings = load_settings({"port": "4", "memory": None}, environ, config)
    assert (settings.port, settings.memory, settings.extent_size) == (4, 2 << 30, 512 << 20)
    assert not settings.keep_on_stop


def test_a_variable_can_name_the_file(config: Path) -> None:
    assert load_settings({}, {"KVSTOW_CONFIG": str(config)}).memory == 3 << 30


def test_an_empty_variable_is_not_given() -> None:
    assert load_settings(MEMORY, {"KVSTOW_TOKEN_FILE": "", "KVSTOW_RANKS": ""}) == load_settings(MEMORY, {})


def test_variables_without_the_prefix_are_ignored() -> None:
    assert load_settings(MEMORY, {"PATH": "/bin", "KVSTOWAGE": "1"}) == Settings(**MEMORY)


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
    assert load_settings(MEMORY, environ) == Settings(**MEMORY)


def test_variables_of_the_other_commands_are_ignored() -> None:
    environ = {"KVSTOW_SERVER": "http://kvstow:9595", "KVSTOW_CA_FILE": "/ca.pem"}
    assert load_settings(MEMORY, environ) == Settings(**MEMORY)


@pytest.mark.parametrize("name", ["KVSTOW_ADMIN_PORT", "KVSTOW_SERVERS", "KVSTOW_memory"])
def test_an_unknown_variable_is_refused(name: str) -> None:
    (error,) = errors_of({}, {name: "9595"})
    assert error.startswith(f"{name} is not a setting; the settings are ")
    assert "KVSTOW_MEMORY," in error


@pytest.mark.parametrize(
    "given", ["ml=1001,1002 web=0", ["ml=1001,1002", "web=0"], ("ml=1001,1002 web=0",), " web=0  ml=1001,1002 "]
)
def test_tenants_are_read_from_flags_variables_and_lists(given: object) -> None:
    settings = load_settings({**MEMORY, "tier": "mooncake://s:1", "tenant": given}, {})
    assert settings.tenants == {1001: "ml", 1002: "ml", 0: "web"}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("ml", "NAME=UID[,UID], such as ml=1001"),
        ("ml=", "NAME=UID[,UID], such as ml=1001"),
        ("=1", "NAME=UID[,UID], such as ml=1001"),
        ("ml=root", "NAME=UID[,UID], such as ml=1001"),
        ("ml=1,", "NAME=UID[,UID], such as ml=1001"),
        ("ml=-1", "NAME=UID[,UID], such as ml=1001"),
        ("ml=\u0661", "NAME=UID[,UID], such as ml=1001"),
        ("ML=1", "a name has up to 63 small letters"),
        ("-=1", "a name has up to 63 small letters"),
        ("m" * 64 + "=1", "a name has up to 63 small letters"),
        ([1001], "NAME=UID[,UID], such as ml=1001"),
        (1001, "or a list of these"),
        ("ml=1001 web=1002,1001", "each uid once, and 1001 is there twice"),
        ("ml=1,01", "each uid once, and 1 is there twice"),
        ("ml=1 ml=2", "each name once, and ml is there twice"),
        ("ml=65534", "no engine can attach as 65534"),
        ("ml=4294967295", "no engine can attach as 4294967295"),
        ("ml=99999999999999999999", "no engine can attach as 9"),
    ],
)
def test_wrong_tenants_are_refused(given: object, problem: str) -> None:
    (error,) = errors_of({**MEMORY, "tier": "mooncake://s:1", "tenant": given})
    assert error.startswith(f"--tenant is {given!r}; allowed: ")
    assert problem in error


def test_tenants_need_a_store() -> None:
    assert errors_of({**MEMORY, "tenant": "ml=1"}) == [
        "--tenant ml=1 needs --tier or --disk, the store through which tenants share blocks"
    ]
    assert load_settings({**MEMORY, "tenant": "ml=1", "disk": ("/mnt/a",)}, {}).tenants == {1: "ml"}


@pytest.mark.parametrize("given", ["/mnt/a:/mnt/b", ["/mnt/a", "/mnt/b"], ("/mnt/a", "/mnt/b")])
def test_disks_are_read_from_flags_variables_and_lists(given: object) -> None:
    settings = load_settings({**MEMORY, "disk": given, "disk_size": "2TiB", "disk_writes": "8TB"}, {})
    assert settings.disk == (Path("/mnt/a"), Path("/mnt/b"))
    assert (settings.disk_size, settings.disk_writes) == (2 << 40, 8 * 10**12)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"disk": "mnt"}, "--disk is 'mnt'; allowed: absolute paths, such as /mnt/nvme0"),
        ({"disk": ["/mnt/a", "/mnt/a"]}, "allowed: each path once"),
        ({"disk": 1}, "allowed: the path of a folder on a disk"),
        ({"disk": "/mnt/a", "disk_size": "0"}, "--disk-size is '0'; allowed: a size of more than 0 bytes"),
        ({"disk_size": "1TiB"}, "--disk-size 1TiB needs --disk"),
        ({"disk_writes": "1TiB"}, "--disk-writes 1TiB needs --disk"),
        ({"disk": "/mnt/a", "tier": "mooncake://s:1"}, "--disk /mnt/a cannot be given together with --tier"),
    ],
)
def test_wrong_disks_are_refused(given: dict[str, object], problem: str) -> None:
    (error,) = errors_of({**MEMORY, **given})
    assert problem in error


def test_an_unknown_key_of_the_file_is_named_with_the_file_and_the_allowed_ones(config: Path) -> None:
    config.write_text("memoryz = 2\n")
    (error,) = errors_of({}, {}, config)
    assert error.startswith(f"{config}: memoryz is not a setting; ")
    assert "extent_size" in error


@pytest.mark.parametrize("text", ["memory =", "\xff"])
def test_a_file_that_is_no_toml_is_refused(config: Path, text: str) -> None:
    config.write_bytes(text.encode("latin-1"))
    (error,) = errors_of({}, {}, config)
    assert error.startswith(f"--config {config} is not a readable TOML file: ")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    (error,) = errors_of({}, {}, tmp_path / "none.toml")
    assert "No such file" in error


def test_every_wrong_value_gets_one_line_under_the_name_that_the_user_gave(config: Path) -> None:
    config.write_text("port = true\n")
    flags: dict[str, object] = {"memory": "8GX", "pin_chunk": 1.5, "readiness_require": "pool,pined"}
    environ = {"KVSTOW_PIN_PAUSE": "soon", "KVSTOW_LOG_FORMAT": "xml", "KVSTOW_KEEP_ON_STOP": "maybe"}
    errors = errors_of(flags, environ, config)
    assert sorted(errors) == sorted(
        [
            f"{config}: port is True; allowed: 0 (any free port) to 65535",
            "--memory is '8GX'; allowed: a number of bytes, or a number with one of KiB MiB GiB TiB (powers of 1024)"
            " or kB MB GB TB, with or without the B",
            "--pin-chunk is 1.5; allowed: a size of more than 0 bytes, such as 8GiB",
            "--readiness-require is 'pool,pined'; allowed: a list of pool and pinned",
            "KVSTOW_PIN_PAUSE is 'soon'; allowed: 0 or more seconds, or a number with one of us ms s m min h",
            "KVSTOW_LOG_FORMAT is 'xml'; allowed: 'text' or 'json'",
            "KVSTOW_KEEP_ON_STOP is 'maybe'; allowed: true or false",
        ]
    )
    assert not any("\n" in error for error in errors)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"memory": "0"}, "--memory is '0'; allowed: a size of more than 0 bytes, such as 8GiB"),
        ({"memory": "1MiB"}, "--memory 1MiB is less than 2 MiB, the smallest unit of memory that a pool can get"),
        ({"port": "65536"}, "--port is '65536'; allowed: 0 (any free port) to 65535"),
        ({"pin_chunk": "0"}, "--pin-chunk is '0'; allowed: a size of more than 0 bytes, such as 8GiB"),
        ({"pin_chunk": "65MiB"}, "--pin-chunk 65MiB is more than 64 MiB, by which memory becomes usable"),
        ({"extent_size": "1000MB"}, "--extent-size 1000MB is not a multiple of 2 MiB, such as 1GiB"),
        ({"transfer_timeout": "0s"}, "--transfer-timeout is '0s'; allowed: more than 0 seconds"),
        (
            {"trust_eof": "0"},
            "--trust-eof is '0'; allowed: 2min or more, because workers use the memory that long",
        ),
        (
            {"trust_eof": "119s"},
            "--trust-eof is '119s'; allowed: 2min or more, because workers use the memory that long",
        ),
        ({"keep_on_stop": True}, "--keep-on-stop needs --state, the folder of the keeper that holds the memory"),
        ({"keep_timeout": "1h"}, "--keep-timeout 1h needs --state, the folder of the keeper that holds the memory"),
        ({"start_keeper": False}, "--no-start-keeper needs --state, the folder of the keeper that holds the memory"),
        (
            {"state": "s", "start_keeper": False, "keep_timeout": "1h"},
            "--keep-timeout 1h has no effect with --no-start-keeper: `kvstow keeper` takes it",
        ),
        ({"policy": "fifo"}, "--policy is 'fifo'; allowed: auto, lru"),
        ({"tls_key": "k"}, "--tls-key k needs --tls-cert"),
        ({"tls_client_ca": "c"}, "--tls-client-ca c needs --tls-cert"),
        (
            {"viewer_token_file": "v"},
            "--viewer-token-file v needs --token-file or --tls-client-ca",
        ),
        ({"huge_pages": "never"}, "--huge-pages is 'never'; allowed: 'advised' or 'reserved'"),
    ],
)
def test_contradictions_and_wrong_values_are_refused(flags: dict[str, object], error: str) -> None:
    assert errors_of(MEMORY | flags) == [error]


@pytest.mark.parametrize(
    ("memory", "budget"), [("2MiB", 2 << 20), ("3MiB", 2 << 20), ("64GB", 64_000_000_000 - 64_000_000_000 % (2 << 20))]
)
def test_the_budget_is_the_memory_in_whole_units_and_never_more(memory: str, budget: int) -> None:
    settings = load_settings({"memory": memory}, {})
    assert settings.budget_bytes == budget
    assert 0 <= settings.memory - budget < 2 << 20
