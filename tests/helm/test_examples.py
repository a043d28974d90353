"""The example of a Mooncake Store: valid for Kubernetes, without privileges, and open to KVStow and itself alone."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helm import examples
from tests.helm.conftest import Find
from tests.helm.processes import validated
from tests.helm.test_manifests import KUBERNETES, RESTRICTED

from kvstow_service.stores.mooncake.mooncakestore import MooncakeLocation

FILES = sorted(examples.EXAMPLES.glob("*.yaml"))
STORES = ("mooncake.yaml", "mooncake-ha.yaml")
POLICIES = "mooncake-networkpolicy.yaml"
NAMESPACE = {"kubernetes.io/metadata.name": "mooncake"}
INFERENCE = {"kubernetes.io/metadata.name": "inference"}

each_file = pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
each_store = pytest.mark.parametrize("store", STORES)


def workloads(file: str) -> list[dict[str, Any]]:
    return [one for one in examples.manifests(file) if "template" in one["spec"]]


@pytest.mark.deploy
@each_file
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_would_take_every_object(file: Path, version: str) -> None:
    assert "Couldn't find schema" not in validated(file, version)


@each_store
def test_pods_meet_the_restricted_standard(store: str) -> None:
    for workload in workloads(store):
        pod = workload["spec"]["template"]["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not [volume for volume in pod.get("volumes", ()) if "hostPath" in volume]
        assert [one["securityContext"] for one in pod["containers"]] == [RESTRICTED]


@each_store
def test_mooncake_has_the_version_that_kvstow_is_tested_with(store: str) -> None:
    pyproject = tomllib.loads((examples.EXAMPLES.parents[1] / "pyproject.toml").read_text())
    (pin,) = re.findall(
        r"mooncake-[\w-]+==(\S+?)\"", str(pyproject["project"]["optional-dependencies"]).replace("'", '"')
    )
    images = [workload["spec"]["template"]["spec"]["containers"][0]["image"] for workload in workloads(store)]
    assert [image for image in images if "mooncake" in image] == [f"docker.io/kvcacheai/mooncake:{pin}"] * 2
    assert pin in (examples.EXAMPLES / store).read_text().partition("apiVersion")[0]


@each_store
def test_kvstow_takes_the_url_that_it_names(store: str) -> None:
    (url,) = re.findall(r"mooncake://\S*[^.\s]", (examples.EXAMPLES / store).read_text())
    location = MooncakeLocation.parse(url)
    assert location.is_ha == (store == "mooncake-ha.yaml")
    services = {one["metadata"]["name"] for one in examples.manifests(store) if one["kind"] == "Service"}
    hosts = [endpoint.rpartition(":")[0].removesuffix(".mooncake.svc") for endpoint in location.endpoints]
    assert all(host.split(".")[-1] in services for host in hosts)
    assert len(set(hosts)) == (3 if location.is_ha else 1)


@each_store
def test_selectors_find_their_pods(store: str) -> None:
    everything = examples.manifests(store)
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in workloads(store)]
    for workload, labels in zip(workloads(store), pods, strict=True):
        assert workload["spec"]["selector"]["matchLabels"] == labels
        for constraint in workload["spec"]["template"]["spec"].get("topologySpreadConstraints", ()):
            assert constraint["labelSelector"]["matchLabels"] == labels
    for service in (one for one in everything if one["kind"] == "Service"):
        assert service["spec"]["selector"] in pods


def test_no_master_or_etcd_listens_on_all_addresses() -> None:
    for store in STORES:
        arguments = examples.container(store, "Deployment", "mooncake-master")["args"]
        assert {"--rpc_address=$(POD_IP)", "--metrics_host=$(POD_IP)"} <= set(arguments)
        assert not [argument for argument in arguments if "http_metadata_server" in argument]
    command = examples.container("mooncake-ha.yaml", "StatefulSet", "mooncake-etcd")["command"]
    assert all("$(POD_IP)" in argument for argument in command if argument.startswith("--listen"))


def test_an_ssd_evicts_before_its_volume_is_full() -> None:
    store = "mooncake-ha.yaml"
    provider = examples.find(store, "StatefulSet", "mooncake-provider")["spec"]
    container = examples.container(store, "StatefulSet", "mooncake-provider")
    env = {one["name"]: one.get("value") for one in container["env"]}
    (claim,) = provider["volumeClaimTemplates"]
    assert env["MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY"] == "lru"
    volume = int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) << 30
    assert 0 < int(env["MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE"]) < 0.9 * volume
    assert env["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"] in [one["mountPath"] for one in container["volumeMounts"]]
    masters = examples.container(store, "Deployment", "mooncake-master")["args"]
    assert "--enable_offload=true" in masters
    assert "--enable_offload=true" in container["args"]


def selects(selector: dict[str, Any] | None, labels: dict[str, str]) -> bool:
    """As Kubernetes does it, with the operators that the policies use."""
    if selector is None:
        return False
    for one in selector.get("matchExpressions", ()):
        if one["operator"] == "Exists":
            if one["key"] not in labels:
                return False
        else:
            assert one["operator"] == "In"
            if labels.get(one["key"]) not in one["values"]:
                return False
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def open_ports(target: dict[str, str], client: dict[str, str], namespace: dict[str, str]) -> Iterator[int | None]:
    """Ports of a pod of the store that a client may reach; None stands for all."""
    for policy in examples.manifests(POLICIES):
        if selects(policy["spec"]["podSelector"], target):
            for rule in policy["spec"]["ingress"]:
                for peer in rule["from"]:
                    has_namespace = (
                        selects(peer["namespaceSelector"], namespace)
                        if "namespaceSelector" in peer
                        else namespace == NAMESPACE
                    )
                    if has_namespace and ("podSelector" not in peer or selects(peer["podSelector"], client)):
                        yield from (port["port"] for port in rule["ports"]) if "ports" in rule else (None,)


@each_store
def test_every_pod_of_a_store_has_a_policy(store: str) -> None:
    for workload in workloads(store):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert [one for one in examples.manifests(POLICIES) if selects(one["spec"]["podSelector"], labels)]


def of_store(component: str) -> dict[str, str]:
    return {"app.kubernetes.io/part-of": "mooncake", "app.kubernetes.io/component": component}


PORTS: dict[str, set[int | None]] = {"master": {50051}, "provider": {None}, "etcd": {2379}}


@pytest.mark.deploy
@pytest.mark.parametrize(
    ("sets", "kind"),
    [
        (("mode=node",), "DaemonSet"),
        (("mode=engine",), "Deployment"),
        (("mode=engine", "sidecar=true"), "Deployment"),
    ],
)
def test_the_policies_let_kvstow_in_and_not_its_test(find: Find, sets: tuple[str, ...], kind: str) -> None:
    given = (*sets, "image.registry=r.example.com", "engine.model=m")
    labels = find(kind, *given)["spec"]["template"]["metadata"]["labels"]
    test = find("Pod", *given)["metadata"]["labels"]
    for component, ports in PORTS.items():
        assert set(open_ports(of_store(component), labels, INFERENCE)) == ports
        assert set(open_ports(of_store(component), labels, {"kubernetes.io/metadata.name": "default"})) == set()
        assert set(open_ports(of_store(component), test, INFERENCE)) == set()


@pytest.mark.parametrize(
    ("component", "client", "namespace", "ports"),
    [
        *((name, {"kvstow-connection": "kvstow"}, INFERENCE, ports) for name, ports in PORTS.items()),
        *((name, {"app": "web"}, INFERENCE, set()) for name in PORTS),
        *((name, {"app": "web"}, NAMESPACE, set()) for name in PORTS),
        ("master", of_store("provider"), NAMESPACE, {50051}),
        ("provider", of_store("provider"), NAMESPACE, {None}),
        ("etcd", of_store("master"), NAMESPACE, {2379}),
        ("etcd", of_store("etcd"), NAMESPACE, {2379, 2380}),
        ("etcd", of_store("etcd"), INFERENCE, set()),
        ("master", {"app": "prometheus"}, {"kubernetes.io/metadata.name": "monitoring"}, {9003}),
    ],
)
def test_the_policies_let_in_the_store_and_nobody_else(
    component: str, client: dict[str, str], namespace: dict[str, str], ports: set[int | None]
) -> None:
    assert set(open_ports(of_store(component), client, namespace)) == ports
