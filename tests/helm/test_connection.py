"""What the chart says to KVStow is what KVStow understands."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from kvstow_service.cli import app
from kvstow_service.connectors.vllm.options import ConnectorOptions
from kvstow_service.settings import load_settings

pytestmark = pytest.mark.deploy

CHART = Path(__file__).parents[2] / "helm" / "kvstow"
ENGINE = ("mode=engine", "image.registry=r.example.com", "engine.model=m")
SERVICE = ("mode=service", "image.registry=r.example.com")

Find = Callable[..., dict[str, Any]]


def connection(find: Find, *sets: str, **given: Any) -> dict[str, Any]:
    manifest = find("ConfigMap", *sets, suffix="-connection", **given)
    return dict(json.loads(manifest["data"]["kv-transfer-config.json"]))


@pytest.mark.parametrize("case", ["addon", "addon-existing-pods", "addon-bare", "engine", "engine-full"])
def test_the_connector_takes_every_connection(find: Find, case: str) -> None:
    config = connection(find, values=CHART / "ci" / f"{case}-values.yaml")
    extra = config.pop("kv_connector_extra_config")
    assert config == {
        "kv_connector": "KVStowConnector",
        "kv_connector_module_path": "kvstow_service.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    options = ConnectorOptions.parse(extra)
    assert options.admin_host == "0.0.0.0"
    assert options.token_file is not None


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
        token_file=Path("/etc/kvstow/token/admin.txt"),
    )


def test_vllm_gets_the_connection_and_the_token(find: Find) -> None:
    deployment = find("Deployment", *ENGINE, "parallel.tensor=2", "admin.tokenSecret.key=admin.txt")
    pod = deployment["spec"]["template"]["spec"]
    (vllm,) = pod["containers"]
    assert vllm["command"] == ["vllm", "serve"]
    assert "--kv-transfer-config=$(KV_TRANSFER_CONFIG)" in vllm["args"]
    assert "--tensor-parallel-size=2" in vllm["args"]
    source = next(one for one in vllm["env"] if one["name"] == "KV_TRANSFER_CONFIG")["valueFrom"]["configMapKeyRef"]
    configs = find("ConfigMap", *ENGINE, suffix="-connection")
    assert source["name"] == configs["metadata"]["name"]
    assert source["key"] in configs["data"]
    assert_token_is_mounted(find, pod, vllm, "admin.tokenSecret.key=admin.txt")


def assert_token_is_mounted(find: Find, pod: dict[str, Any], container: dict[str, Any], *sets: str) -> None:
    """The file that the connection names lies where the Secret is mounted."""
    extra = connection(find, *sets)["kv_connector_extra_config"]
    mount = next(one for one in container["volumeMounts"] if one["name"].endswith("token"))
    volume = next(one for one in pod["volumes"] if one["name"] == mount["name"])
    secret = find("Secret", *sets)
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    assert Path(extra["token_file"]).parent == Path(mount["mountPath"])
    assert Path(extra["token_file"]).name in secret["data"]


@pytest.mark.parametrize("case", ["service", "service-cuda"])
def test_kvstow_serve_takes_every_flag(find: Find, case: str) -> None:
    deployment = find("Deployment", values=CHART / "ci" / f"{case}-values.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["kvstow", "serve"]
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in container["args"])
    settings = load_settings({name.replace("-", "_"): value for name, value in flags.items()}, {})
    assert settings.host == "0.0.0.0"
    assert settings.token_file == Path("/etc/kvstow/token/token")
    assert settings.pool_size == (512 << 20 if case == "service" else 8 << 30)
    assert settings.drain_deadline == 60


def test_the_helm_test_runs_a_command_that_exists(find: Find) -> None:
    (container,) = find("Pod", "image.registry=r.example.com")["spec"]["containers"]
    program, *arguments = container["command"]
    assert program == "kvstow"
    help_text = CliRunner().invoke(app, [arguments[0], "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert help_text.exit_code == 0, help_text.output
    for flag in arguments[1:]:
        assert flag.partition("=")[0] in help_text.output


def test_probes_ask_vllm_unless_told_otherwise(find: Find) -> None:
    def paths(*sets: str) -> list[tuple[str, str]]:
        (container,) = find("Deployment", *sets)["spec"]["template"]["spec"]["containers"]
        probes = [container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
        return [(probe["port"], probe["path"]) for probe in probes]

    assert paths(*ENGINE) == [("http", "/health")] * 3
    pinned = "engine.probes.readinessPath=/readyz/pinned"
    assert paths(*ENGINE, pinned) == [("http", "/health"), ("http", "/health"), ("kvstow", "/readyz/pinned")]
    assert paths(*SERVICE) == [("kvstow", "/startupz"), ("kvstow", "/livez"), ("kvstow", "/readyz")]


@pytest.mark.parametrize("case", ["addon", "addon-existing-pods"])
def test_the_patch_of_the_notes_connects_a_pod(find: Find, helm: Path, case: str) -> None:
    values = CHART / "ci" / f"{case}-values.yaml"
    command: list[str | Path] = [
        helm,
        "install",
        "test",
        CHART,
        "--namespace",
        "kv",
        "--dry-run=client",
        "--values",
        values,
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    notes = said.partition("\nNOTES:\n")[2]
    patch = yaml.safe_load(notes.split("\n---\n")[1])["spec"]["template"]
    labels = find("Service", values=values, suffix="-admin")["spec"]["selector"]
    assert patch.get("metadata", {"labels": labels})["labels"] == labels
    pod = patch["spec"]
    (container,) = pod["containers"]
    (variable,) = container["env"]
    assert f"--kv-transfer-config=$({variable['name']})" in notes
    source = variable["valueFrom"]["configMapKeyRef"]
    assert source["key"] in find("ConfigMap", values=values, suffix=source["name"])["data"]
    if case == "addon":
        assert_token_is_mounted(find, pod, container)
