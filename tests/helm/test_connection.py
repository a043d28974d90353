"""What the chart says to KVStow is what KVStow understands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from tests.helm.conftest import (
    ATTACHED,
    CHART,
    ENGINE,
    NODE,
    OPERATOR,
    REGISTRY,
    SIDECAR,
    Find,
    Template,
    containers_of,
    notes_of,
    values_of,
)

from kvstow_service.cli import app
from kvstow_service.cli.keeper import keeper as keeper_command
from kvstow_service.cli.serve import serve
from kvstow_service.connectors.engine_core.options import ConnectorOptions
from kvstow_service.duration import parse_duration
from kvstow_service.node.settings import Settings, load_settings

pytestmark = pytest.mark.deploy

SERVICES = {"node": "DaemonSet", "engine-sidecar": "Deployment"}
"""The cases that run a node service, by the beginning of their names."""
SERVICE_CASES = [
    (path.name.removesuffix("-values.yaml"), kind)
    for start, kind in SERVICES.items()
    for path in sorted((CHART / "ci").glob(f"{start}*-values.yaml"))
]


def suffix_of(case: str) -> str:
    """Of the service's workload, where the keeper has one of its own."""
    return "kvstow" if case == "node-keeper" else ""


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
    config = connection(find, values=values_of(case))
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
        connection(find, values=values_of("addon-existing-pods"))["kv_connector_extra_config"]
    )
    assert options == ConnectorOptions(
        cpu_bytes_to_use_per_rank=40 << 30,
        max_bytes=4 << 40,  # of the four ranks of one engine
        lazy_offload=True,
        policy="lru",
        curve=False,
        copy_strategy="staged",
        load_path="layer",
        load_step_budget=0.02,
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


def settings_of(container: dict[str, Any]) -> Settings:
    """As `kvstow serve` reads its flags."""
    assert container["command"] == ["kvstow", "serve"]
    flags = serve.make_context("serve", list(container["args"])).params
    assert flags.pop("config") is None
    return load_settings(flags, {variable["name"]: variable["value"] for variable in container["env"]})


@pytest.mark.parametrize(("case", "kind"), SERVICE_CASES)
def test_kvstow_serve_takes_every_flag(find: Find, case: str, kind: str) -> None:
    values = values_of(case)
    settings = settings_of(containers_of(find(kind, values=values, suffix=suffix_of(case)))["kvstow"])
    assert settings.host == "0.0.0.0"
    assert settings.token_file == Path("/etc/kvstow/token/token")
    sizes = {
        "node-full": 8 << 30,
        "node-keeper": 8 << 30,
        "node-hugepages": 513 << 20,
        "node-prepared": 1 << 40,
        "engine-sidecar": 64 << 30,
    }
    others = {"engine-sidecar-full": 512 << 30, "engine-sidecar-tier": 64 << 30, "node-tier": 64 << 30}
    others |= {"engine-sidecar-disk": 64 << 30, "node-disk": 64 << 30}
    assert settings.memory == {**sizes, **others}.get(case, 512 << 20)
    assert (settings.policy == "lru") == case.endswith("-full")
    assert settings.pin_pause == (0.005 if case == "node-full" else 0.002)
    assert (settings.huge_pages == "reserved") == (case in ("node-hugepages", "engine-sidecar-full"))
    assert settings.drain_deadline == 60
    assert settings.transfer_timeout == (45 if case == "node-full" else 30)
    wanted = {"node-full": ("pool", "pinned"), "engine-sidecar-full": ("pool",)}
    assert settings.readiness_require == wanted.get(case, ())


@pytest.mark.parametrize(("case", "kind"), SERVICE_CASES)
def test_service_and_keeper_meet_in_a_folder_that_both_mount(find: Find, case: str, kind: str) -> None:
    values = values_of(case)
    workload = find(kind, values=values, suffix=suffix_of(case))
    containers = containers_of(workload)
    beside = find(kind, values=values, suffix="-keeper") if case == "node-keeper" else None
    if beside is not None:
        assert "kvstow-keeper" not in containers
        containers |= {"kvstow-keeper": containers_of(beside)["kvstow-keeper"]}
    settings = settings_of(containers["kvstow"])
    if case == "node-prepared":
        assert (settings.state, settings.start_keeper, "kvstow-keeper" in containers) == (None, True, False)
        return
    keeper = containers["kvstow-keeper"]
    assert keeper["command"] == ["kvstow", "keeper"]
    flags = keeper_command.make_context("keeper", list(keeper["args"])).params
    assert settings.state == Path(flags["state"])
    assert not settings.start_keeper
    assert settings.keep_on_stop == (case != "node-full")
    seconds = {"node-full": 1800, "engine-sidecar-full": 60}.get(case, 600)
    assert parse_duration(flags["keep_timeout"]) == seconds
    folders = [
        mount["mountPath"]
        for container in (keeper, containers["kvstow"])
        for mount in container["volumeMounts"]
        if mount["name"] == "kvstow-state"
    ]
    # The folder itself belongs to root or to everybody: the keeper makes one of its own in it.
    assert [Path(folder) for folder in folders] == [settings.state.parent] * 2
    pod = workload["spec"]["template"]["spec"]
    if beside is not None:
        volumes = [one["spec"]["template"]["spec"]["volumes"] for one in (workload, beside)]
        (folder,) = {v["hostPath"]["path"] for found in volumes for v in found if v["name"] == "kvstow-state"}
        assert folder == "/var/lib/inference/kvstow"
        assert beside["spec"]["updateStrategy"] == {"type": "OnDelete"}
        assert "restartPolicy" not in keeper
        return
    starts_first = [container["name"] for container in pod["initContainers"]]
    assert starts_first.index("kvstow-keeper") < [*starts_first, "kvstow"].index("kvstow")
    assert keeper["restartPolicy"] == "Always"


@pytest.mark.parametrize(
    "case", ["engine-node", "engine-sidecar", "engine-sidecar-full", "addon-node", "addon-sidecar"]
)
def test_the_connector_takes_every_way_to_attach(find: Find, case: str) -> None:
    options = ConnectorOptions.parse(connection(find, values=values_of(case))["kv_connector_extra_config"])
    in_sidecar = Path("/run/kvstow/node/attach.sock")
    assert options.attach == (in_sidecar if "sidecar" in case else Path("/run/kvstow/attach.sock"))
    all_of_it = case == "engine-node"
    assert options.cpu_bytes_to_use == (200 << 30 if all_of_it else 0)
    assert options.weights_id == ("qwen3-8b-2026-11" if all_of_it else None)
    assert options.attach_require_sharing == all_of_it
    if case == "engine-sidecar-full":
        assert (options.lazy_offload, options.copy_strategy) == (True, "direct")
        assert (options.load_path, options.load_step_budget) == ("async", 0.005)
        assert options.pin_latency_target == 0.0005


def socket_of(pod: dict[str, Any], container: dict[str, Any]) -> tuple[Any, str, bool]:
    """The volume in which a container finds the socket, where that is mounted, and whether for reading only."""
    (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "kvstow-socket")
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "kvstow-socket")
    return volume, mount["mountPath"], mount.get("readOnly", False)


def test_engines_and_the_node_service_meet_in_a_folder_of_the_node(find: Find) -> None:
    place = ("socket.folder=/var/run/inference/kvstow", "socket.group=2000")
    node = find("DaemonSet", *NODE, *place, "pod.user=1500")
    engine = find("Deployment", *ATTACHED, *place)
    pods = [workload["spec"]["template"]["spec"] for workload in (node, engine)]
    made, found = socket_of(pods[0], containers_of(node)["kvstow"]), socket_of(pods[1], containers_of(engine)["vllm"])
    assert made == (found[0], "/run/kvstow", False)
    assert found[1:] == ("/run/kvstow", True), "engines change nothing there"
    assert made[0]["hostPath"] == {"path": "/var/run/inference/kvstow", "type": "DirectoryOrCreate"}
    settings = settings_of(containers_of(node)["kvstow"])
    attach = connection(find, *ATTACHED, *place)["kv_connector_extra_config"]["attach"]
    assert attach == f"unix://{settings.attach_socket}"
    assert settings.attach_socket is not None
    assert settings.attach_socket.parent == Path("/run/kvstow")
    assert settings.attach_group == "2000"
    assert [pod["securityContext"]["supplementalGroups"] for pod in pods] == [[2000]] * 2
    folder = containers_of(node)["socket-folder"]
    assert "chown 1500:2000 /run/kvstow && chmod 0750 /run/kvstow" in folder["command"]
    assert socket_of(pods[0], folder) == made


def test_a_folder_that_is_prepared_must_be_there(find: Find) -> None:
    for kind, mode in (("DaemonSet", NODE), ("Deployment", ATTACHED)):
        workload = find(kind, *mode, "socket.prepare=false")
        volumes = workload["spec"]["template"]["spec"]["volumes"]
        assert [one["hostPath"]["type"] for one in volumes if "hostPath" in one] == ["Directory"]


def test_vllm_and_its_sidecar_meet_in_a_folder_of_the_pod(find: Find) -> None:
    workload = find("Deployment", *SIDECAR)
    pod, containers = workload["spec"]["template"]["spec"], containers_of(workload)
    volume = {"name": "kvstow-socket", "emptyDir": {}}
    assert socket_of(pod, containers["vllm"]) == (volume, "/run/kvstow", True)
    assert socket_of(pod, containers["kvstow"]) == (volume, "/run/kvstow", False)
    settings = settings_of(containers["kvstow"])
    attach = connection(find, *SIDECAR)["kv_connector_extra_config"]["attach"]
    assert attach == f"unix://{settings.attach_socket}"
    assert settings.attach_socket is not None
    # Everybody may write to an emptyDir, and the service refuses a folder where others could replace the socket.
    assert settings.attach_socket.parent.parent == Path("/run/kvstow")


def test_vllm_neither_waits_for_its_sidecar_nor_loses_traffic_with_it(find: Find) -> None:
    workload = find("Deployment", *SIDECAR)
    sidecar, vllm = containers_of(workload)["kvstow"], containers_of(workload)["vllm"]
    assert sidecar["restartPolicy"] == "Always"
    assert {name for name in sidecar if name.endswith("Probe")} == {"livenessProbe"}
    assert vllm["readinessProbe"]["httpGet"]["path"] == "/health"

    workload = find("Deployment", *SIDECAR, "engine.probes.readinessPath=/readyz/pinned")
    sidecar, vllm = containers_of(workload)["kvstow"], containers_of(workload)["vllm"]
    assert sidecar["readinessProbe"]["httpGet"]["path"] == "/readyz/pinned"
    assert vllm["readinessProbe"]["httpGet"]["path"] == "/health"


def test_an_engine_that_attaches_has_no_secret_of_kvstow(find: Find) -> None:
    for sets in (ATTACHED, SIDECAR):
        workload = find("Deployment", *sets)
        vllm = containers_of(workload)["vllm"]
        assert not [mount for mount in vllm["volumeMounts"] if mount["name"] == "kvstow-token"]
        assert not [port for port in vllm["ports"] if port["name"] == "kvstow"]


def test_releases_that_attach_leave_admin_api_and_rules_to_the_node_service(
    template: Template,
) -> None:
    apis = (OPERATOR,)
    addon = template("attach.node=true", REGISTRY, apis=apis)
    assert [manifest["kind"] for manifest in addon] == ["ConfigMap"]
    engine = template(*ATTACHED, apis=apis)
    assert sorted(manifest["kind"] for manifest in engine) == ["ConfigMap", "Deployment", "PodMonitor", "Service"]
    (monitor,) = (manifest for manifest in engine if manifest["kind"] == "PodMonitor")
    assert [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]] == ["http"]


def test_the_helm_test_runs_a_command_that_exists(find: Find) -> None:
    (container,) = find("Pod", REGISTRY)["spec"]["containers"]
    program, *arguments = container["command"]
    assert program == "kvstow"
    help_text = CliRunner().invoke(app, [arguments[0], "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert help_text.exit_code == 0, help_text.output
    for flag in arguments[1:]:
        assert flag.partition("=")[0] in help_text.output


def container_of(find: Find, *sets: str) -> dict[str, Any]:
    """vLLM's, or in mode node the service's."""
    workload = find("DaemonSet" if sets[0] == NODE[0] else "Deployment", *sets)
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(only)


def probes(find: Find, *sets: str) -> list[dict[str, str]]:
    """Of startup, liveness and readiness."""
    container = container_of(find, *sets)
    return [container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]


@pytest.mark.parametrize(("sets", "startup"), [((*ENGINE, "engine.probes.startupMinutes=5"), 300), (NODE, 60)])
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
    assert paths(*NODE) == [("kvstow", "/startupz"), ("kvstow", "/livez"), ("kvstow", "/readyz")]


def test_probes_of_kvstow_speak_tls_where_it_does(find: Find) -> None:
    def schemes(*sets: str) -> list[str]:
        return [probe.get("scheme", "HTTP") for probe in probes(find, *sets)]

    pinned = (*ENGINE, "engine.probes.readinessPath=/readyz/pinned")
    assert schemes(*NODE) == schemes(*pinned) == schemes(*ENGINE, *TLS) == ["HTTP"] * 3
    assert schemes(*NODE, *TLS) == ["HTTPS"] * 3
    assert schemes(*pinned, *TLS) == ["HTTP", "HTTP", "HTTPS"]


@pytest.mark.parametrize(
    ("case", "number"),
    [("node", 5), ("engine", 4), ("engine-sidecar", 5), ("engine-node", 1), ("addon", 4), ("addon-sidecar", 5)],
)
def test_the_notes_name_commands_that_exist(helm: Path, case: str, number: int) -> None:
    notes = notes_of(helm, values_of(case))
    commands = re.findall(r"-- kvstow (.+?)(?: +#.*)?$", notes, re.MULTILINE)
    assert len(commands) == number
    for words in commands:
        name, command, rest = app.resolve_command(click.Context(app), shlex.split(words))
        assert command is not None, words
        command.make_context(name, rest)


@pytest.mark.parametrize("case", ["engine", "engine-node", "addon", "addon-sidecar"])
def test_the_notes_of_an_engine_say_which_plugins_vllm_must_load(helm: Path, case: str) -> None:
    assert "VLLM_PLUGINS, the list must contain kvstow" in notes_of(helm, values_of(case))


def test_the_notes_name_the_resource_that_a_pool_in_reserved_huge_pages_needs(helm: Path) -> None:
    notes = notes_of(helm, values_of("addon-hugepages"))
    assert "\n     1 x (1 % of 8Gi)\n" in notes
    assert "the total is 6226Mi." in notes
    assert "\n     hugepages-2Mi: 8192Mi\n" in notes
    assert "hugepages" not in notes_of(helm, values_of("addon"))


def test_a_disruption_budget_says_how_many_pods_may_be_unavailable(find: Find) -> None:
    budget = "engine.podDisruptionBudget"
    made = find("PodDisruptionBudget", *ENGINE, f"{budget}.enabled=true", f"{budget}.maxUnavailable=2")
    assert made["spec"]["maxUnavailable"] == 2
