"""What the chart says to KVStow is what KVStow understands."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from kvstow_service.cli import app
from kvstow_service.connectors.engine_core.options import ConnectorOptions
from kvstow_service.node.settings import load_settings

pytestmark = pytest.mark.deploy

CHART = Path(__file__).parents[2] / "helm" / "kvstow"
ENGINE = ("mode=engine", "image.registry=r.example.com", "engine.model=m")
SERVICE = ("mode=service", "image.registry=r.example.com")

Find = Callable[..., dict[str, Any]]


def connection(find: Find, *sets: str, **given: Any) -> dict[str, Any]:
    manifest = find("ConfigMap", *sets, suffix="-connection", **given)
    return dict(json.loads(manifest["data"]["kv-transfer-config.json"]))


@pytest.mark.parametrize(
    ("case", "host"),
    [
        ("addon", "0.0.0.0"),
        ("addon-existing-pods", "0.0.0.0"),
        ("addon-bare", "0.0.0.0"),
        ("engine", "0.0.0.0"),
        ("engine-full", "::"),
        ("addon-hugepages", "0.0.0.0"),
        ("engine-hugepages", "0.0.0.0"),
    ],
)
def test_the_connector_takes_every_connection(find: Find, case: str, host: str) -> None:
    config = connection(find, values=CHART / "ci" / f"{case}-values.yaml")
    extra = config.pop("kv_connector_extra_config")
    assert config == {
        "kv_connector": "KVStowConnector",
        "kv_connector_module_path": "kvstow_service.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    options = ConnectorOptions.parse(extra)
    assert options.admin_host == host
    assert options.token_file is not None
    assert (options.huge_pages == "reserved") == ("hugepages" in case)


def test_values_reach_the_connector(find: Find) -> None:
    options = ConnectorOptions.parse(
        connection(find, values=CHART / "ci" / "addon-existing-pods-values.yaml")["kv_connector_extra_config"]
    )
    assert options == ConnectorOptions(
        cpu_bytes_to_use_per_rank=40 << 30,
        max_bytes=4 << 40,  # of the four ranks of one engine
        lazy_offload=True,
        policy="arc",
        copy_strategy="staged",
        pin_chunk=64 << 20,
        pin_pause=0.002,
        admin_host="0.0.0.0",
        admin_port=9600,
        readiness_require=("pool",),
        token_file=Path("/etc/kvstow/token/admin.txt"),
        viewer_token_file=Path("/etc/kvstow/token/viewers.txt"),
        tls_cert=Path("/etc/kvstow/tls/tls.crt"),
        tls_key=Path("/etc/kvstow/tls/tls.key"),
        tls_client_ca=Path("/etc/kvstow/client-ca/ca.crt"),
    )


def test_vllm_gets_the_connection(find: Find) -> None:
    deployment = find("Deployment", *ENGINE, "parallel.tensor=2")
    (vllm,) = deployment["spec"]["template"]["spec"]["containers"]
    assert vllm["command"] == ["vllm", "serve"]
    assert "--kv-transfer-config=$(KV_TRANSFER_CONFIG)" in vllm["args"]
    assert "--tensor-parallel-size=2" in vllm["args"]
    source = next(one for one in vllm["env"] if one["name"] == "KV_TRANSFER_CONFIG")["valueFrom"]["configMapKeyRef"]
    configs = find("ConfigMap", *ENGINE, suffix="-connection")
    assert source["name"] == configs["metadata"]["name"]
    assert source["key"] in configs["data"]


TLS = (
    "admin.guardReading=true",
    "admin.tls.secretName=stow-tls",
    "admin.tls.clientCa.secretName=operators",
    "admin.tls.clientCa.key=people.pem",
    "admin.tokenSecret.key=admin.txt",
)


def files_of(pod: dict[str, Any], container: dict[str, Any]) -> dict[str, str]:
    """Folders of the container, and the Secrets that lie there."""
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    return {mounts[name]: secret for name, secret in secrets.items()}


def wanted_files(find: Find, *sets: str, **given: Any) -> dict[str, Path]:
    """The settings that name files, as the connector gets them."""
    extra = connection(find, *sets, **given)["kv_connector_extra_config"]
    return {key: Path(value) for key, value in extra.items() if str(value).startswith("/")}


def test_files_that_the_connection_names_lie_where_secrets_are_mounted(find: Find) -> None:
    pod = find("Deployment", *ENGINE, *TLS)["spec"]["template"]["spec"]
    (vllm,) = pod["containers"]
    found, wanted = files_of(pod, vllm), wanted_files(find, *ENGINE, *TLS)
    secret = find("Secret", *ENGINE, *TLS)
    assert {key: (found[str(path.parent)], path.name) for key, path in wanted.items()} == {
        "token_file": (secret["metadata"]["name"], "admin.txt"),
        "viewer_token_file": (secret["metadata"]["name"], "viewer-token"),
        "tls_cert": ("stow-tls", "tls.crt"),
        "tls_key": ("stow-tls", "tls.key"),
        "tls_client_ca": ("operators", "people.pem"),
    }
    assert secret["data"].keys() == {"admin.txt", "viewer-token"}


@pytest.mark.parametrize("case", ["service", "service-full", "service-tls", "service-hugepages"])
def test_kvstow_serve_takes_every_flag(find: Find, case: str) -> None:
    deployment = find("Deployment", values=CHART / "ci" / f"{case}-values.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["kvstow", "serve"]
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in container["args"])
    environ = {variable["name"]: variable["value"] for variable in container["env"]}
    settings = load_settings({name.replace("-", "_"): value for name, value in flags.items()}, environ)
    assert settings.host == "0.0.0.0"
    assert settings.token_file == Path("/etc/kvstow/token/token")
    sizes = {"service-full": 8 << 30, "service-hugepages": 513 << 20}
    assert settings.memory == sizes.get(case, 512 << 20)
    assert settings.attach_socket == Path("/run/kvstow/node/attach.sock")
    assert (settings.policy, settings.pin_pause) == (("arc", 0.005) if case == "service-full" else ("lru", 0.002))
    assert settings.huge_pages == ("reserved" if case == "service-hugepages" else "advised")
    assert settings.drain_deadline == 60
    assert settings.transfer_timeout == 30
    assert settings.readiness_require == (("pool", "pinned") if case == "service-full" else ())


def test_the_helm_test_runs_a_command_that_exists(find: Find) -> None:
    (container,) = find("Pod", "image.registry=r.example.com")["spec"]["containers"]
    program, *arguments = container["command"]
    assert program == "kvstow"
    help_text = CliRunner().invoke(app, [arguments[0], "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert help_text.exit_code == 0, help_text.output
    for flag in arguments[1:]:
        assert flag.partition("=")[0] in help_text.output


def container_of(find: Find, *sets: str) -> dict[str, Any]:
    (only,) = find("Deployment", *sets)["spec"]["template"]["spec"]["containers"]
    return dict(only)


def probes(find: Find, *sets: str) -> list[dict[str, str]]:
    """Of startup, liveness and readiness."""
    container = container_of(find, *sets)
    return [container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]


@pytest.mark.parametrize(("sets", "startup"), [((*ENGINE, "engine.probes.startupMinutes=5"), 300), (SERVICE, 60)])
def test_a_slow_start_or_a_busy_minute_restarts_nothing(find: Find, sets: tuple[str, ...], startup: int) -> None:
    container = container_of(find, *sets)

    def patience(name: str) -> int:
        probe = container[name]
        return int(probe["periodSeconds"] * probe.get("failureThreshold", 3))

    assert patience("startupProbe") == startup
    assert patience("livenessProbe") == 60


def test_probes_ask_vllm_unless_told_otherwise(find: Find) -> None:
    def paths(*sets: str) -> list[tuple[str, str]]:
        return [(probe["port"], probe["path"]) for probe in probes(find, *sets)]

    assert paths(*ENGINE) == [("http", "/health")] * 3
    pinned = "engine.probes.readinessPath=/readyz/pinned"
    assert paths(*ENGINE, pinned) == [("http", "/health"), ("http", "/health"), ("kvstow", "/readyz/pinned")]
    assert paths(*SERVICE) == [("kvstow", "/startupz"), ("kvstow", "/livez"), ("kvstow", "/readyz")]


def test_probes_of_kvstow_speak_tls_where_it_does(find: Find) -> None:
    def schemes(*sets: str) -> list[str]:
        return [probe.get("scheme", "HTTP") for probe in probes(find, *sets)]

    pinned = (*ENGINE, "engine.probes.readinessPath=/readyz/pinned")
    assert schemes(*SERVICE) == schemes(*pinned) == schemes(*ENGINE, *TLS) == ["HTTP"] * 3
    assert schemes(*SERVICE, *TLS) == ["HTTPS"] * 3
    assert schemes(*pinned, *TLS) == ["HTTP", "HTTP", "HTTPS"]


def notes_of(helm: Path, values: Path) -> str:
    command: list[str | Path] = [helm, "install", "test", CHART, "--namespace=kv", "--dry-run=client", "-f", values]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return said.partition("\nNOTES:\n")[2]


def test_the_notes_name_commands_that_exist(helm: Path) -> None:
    notes = notes_of(helm, CHART / "ci" / "service-values.yaml")
    commands = re.findall(r"-- kvstow (.+?)(?: +#.*)?$", notes, re.MULTILINE)
    assert len(commands) == 4
    for words in commands:
        name, command, rest = app.resolve_command(click.Context(app), shlex.split(words))
        assert command is not None, words
        command.make_context(name, rest)


def test_the_notes_name_the_resource_that_a_pool_in_reserved_huge_pages_needs(helm: Path) -> None:
    notes = notes_of(helm, CHART / "ci" / "addon-hugepages-values.yaml")
    assert "\n     1 x (1 % of 8Gi)\n" in notes
    assert "the total is 6226Mi." in notes
    assert "\n     hugepages-2Mi: 8192Mi\n" in notes
    assert "hugepages" not in notes_of(helm, CHART / "ci" / "addon-values.yaml")


@pytest.mark.parametrize("case", ["addon", "addon-existing-pods"])
def test_the_patch_of_the_notes_connects_a_pod(find: Find, helm: Path, case: str) -> None:
    values = CHART / "ci" / f"{case}-values.yaml"
    notes = notes_of(helm, values)
    patch = yaml.safe_load(notes.split("\n---\n")[1])["spec"]["template"]
    labels = find("Service", values=values, suffix="-admin")["spec"]["selector"]
    assert patch.get("metadata", {"labels": labels})["labels"] == labels
    pod = patch["spec"]
    (container,) = pod["containers"]
    variable, *others = container["env"]
    assert {one["name"] for one in others} <= {"KVSTOW_SERVER", "KVSTOW_TOKEN_FILE", "KVSTOW_CA_FILE"}
    assert f"--kv-transfer-config=$({variable['name']})" in notes
    source = variable["valueFrom"]["configMapKeyRef"]
    assert source["key"] in find("ConfigMap", values=values, suffix=source["name"])["data"]
    wanted = wanted_files(find, values=values).values()
    assert files_of(pod, container).keys() == {str(path.parent) for path in wanted}
