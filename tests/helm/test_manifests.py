"""What holds for every mode: valid objects, no privileges but those that are stated, no secret that anybody reads."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.helm.conftest import CHART, OPERATOR, Find, Template, must_run, notes_of, values_of
from tests.helm.processes import validated

pytestmark = pytest.mark.deploy

CASES = sorted((CHART / "ci").glob("*-values.yaml"))
# The oldest that the chart promises to support, and a recent one.
KUBERNETES = ("1.29", "1.37")
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


each_case = pytest.mark.parametrize("values", CASES, ids=lambda path: path.name.removesuffix("-values.yaml"))


def pod_specs(manifests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for manifest in manifests:
        if manifest["kind"] == "Pod":
            yield manifest["spec"]
        elif manifest["kind"] in ("Deployment", "DaemonSet"):
            yield manifest["spec"]["template"]["spec"]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def attaches_to_node(values: Path) -> bool:
    """Whether the release has no admin server, as that is the node service's."""
    return bool(yaml.safe_load(values.read_text()).get("attach", {}).get("node"))


def test_the_oldest_version_that_is_tested_is_the_oldest_that_the_chart_takes() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"] == f">={KUBERNETES[0]}.0-0"


def test_each_mode_has_values_to_test() -> None:
    modes = {yaml.safe_load(path.read_text()).get("mode", "addon") for path in CASES}
    assert modes == {"addon", "engine", "node"}


@each_case
def test_helm_finds_nothing_to_complain_about(helm: Path, values: Path) -> None:
    must_run(helm, "lint", "--strict", CHART, "--values", values)


@each_case
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_would_take_every_object(template: Template, values: Path, version: str, tmp_path: Path) -> None:
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(yaml.safe_dump_all(template(values=values)))
    assert "Couldn't find schema" not in validated(rendered, version)


@each_case
def test_the_prometheus_operator_would_take_its_objects(
    template: Template, crd_errors: Callable[[list[dict[str, Any]]], str], values: Path
) -> None:
    monitors = [
        manifest for manifest in template(values=values, apis=(OPERATOR,)) if manifest["apiVersion"] == OPERATOR
    ]
    assert crd_errors(monitors) == ""


def test_the_operators_check_sees_mistakes(
    template: Template, crd_errors: Callable[[list[dict[str, Any]]], str]
) -> None:
    (rule,) = (manifest for manifest in template(apis=(OPERATOR,)) if manifest["kind"] == "PrometheusRule")
    rule["spec"]["groups"][0]["rules"][0]["for"] = "soon"
    assert "for" in crd_errors([rule])


@each_case
def test_pods_meet_the_restricted_standard_but_for_the_folder_of_the_node(template: Template, values: Path) -> None:
    manifests = template(values=values)
    for pod in pod_specs(manifests):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"].get("runAsUser") != 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in pod.get("volumes", []):
            if "hostPath" not in volume:
                assert (volume.keys() - {"name"}) < VOLUMES | {"name"}
        for container in containers(pod):
            if container["name"] not in ("socket-folder", "state-folder"):
                assert container["securityContext"] == RESTRICTED
    has_daemonset = any(manifest["kind"] == "DaemonSet" for manifest in manifests)
    names = [container["name"] for pod in pod_specs(manifests) for container in containers(pod)]
    is_prepared = yaml.safe_load(values.read_text()).get("socket", {}).get("prepare", True)
    assert ("socket-folder" in names) == (has_daemonset and is_prepared)
    volumes = [volume for pod in pod_specs(manifests) for volume in pod.get("volumes", ()) if "hostPath" in volume]
    own_volumes = {"node-keeper-values.yaml": 2, "node-disk-values.yaml": 2}.get(values.name, 0)
    assert len(volumes) == (has_daemonset or "engine-node" in values.name) + own_volumes


def test_one_container_has_privileges_and_they_are_two(find: Find) -> None:
    """To give the folder, which the kubelet makes for root, to the service."""
    folder, keeper = find("DaemonSet", values=values_of("node"))["spec"]["template"]["spec"]["initContainers"]
    assert keeper["securityContext"] == RESTRICTED
    assert folder["securityContext"] == {
        **RESTRICTED,
        "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]},
        "runAsNonRoot": False,
        "runAsUser": 0,
        "runAsGroup": 0,
    }


@each_case
def test_pods_are_guaranteed(template: Template, values: Path) -> None:
    """The kernel ends them last. Every container counts, also those that end before the others start."""
    for manifest in template(values=values):
        if manifest["kind"] in ("Deployment", "DaemonSet"):
            for container in containers(manifest["spec"]["template"]["spec"]):
                assert container["resources"]["requests"] == container["resources"]["limits"], container["name"]
                assert {"cpu", "memory"} <= container["resources"]["limits"].keys(), container["name"]


@each_case
def test_the_notes_are_complete(helm: Path, values: Path) -> None:
    notes = notes_of(helm, values)
    assert ("kvstow get sessions" if attaches_to_node(values) else "kvstow doctor") in notes
    for blank in ("<no value>", "<nil>", "%!", "\n\n\n"):
        assert blank not in notes


@each_case
def test_images_are_never_floating(template: Template, values: Path) -> None:
    images = [container["image"] for pod in pod_specs(template(values=values)) for container in containers(pod)]
    assert all(image.startswith("registry.example.com/ml/kvstow") for image in images)
    assert not [image for image in images if "@sha256:" not in image and ":" not in image.rpartition("/")[2]]


@each_case
def test_the_token_is_in_the_secret_alone(template: Template, values: Path) -> None:
    manifests = template(values=values)
    secrets = [manifest for manifest in manifests if manifest["kind"] == "Secret"]
    others = yaml.safe_dump_all(manifest for manifest in manifests if manifest["kind"] != "Secret")
    tokens = [base64.b64decode(token).decode() for secret in secrets for token in secret["data"].values()]
    given = yaml.safe_load(values.read_text()).get("admin", {})
    assert len(tokens) == (
        0 if "tokenSecret" in given or attaches_to_node(values) else 2 if "guardReading" in given else 1
    )
    assert all(len(token) >= 16 and token not in others for token in tokens)


@each_case
def test_only_the_pods_group_reads_its_secrets(template: Template, values: Path) -> None:
    """The doctor warns of a token file that other users may read."""
    for pod in pod_specs(template(values=values)):
        names = ("kvstow-token", "kvstow-tls", "kvstow-tier-password", "kvstow-tier-ca", "kvstow-tier-certificate")
        modes = [one["secret"].get("defaultMode") for one in pod.get("volumes", ()) if one["name"] in names]
        grouped = "fsGroup" in pod["securityContext"]
        assert all(mode == (0o440 if grouped else None) for mode in modes)


def test_without_a_group_secrets_stay_readable(template: Template) -> None:
    """Root owns them: with a narrower mode the container's user could not read them."""
    prepared = ("socket.prepare=false", "pod.user=null")
    pods = pod_specs(template("mode=node", "image.registry=registry.example.com", *prepared))
    volumes = [volume for pod in pods for volume in pod.get("volumes", ()) if volume["name"] == "kvstow-token"]
    assert [volume["secret"].get("defaultMode") for volume in volumes] == [None]


@each_case
def test_selectors_find_the_pods_and_only_these(template: Template, values: Path) -> None:
    manifests = template(values=values, apis=(OPERATOR,))
    for workload in (manifest for manifest in manifests if manifest["kind"] in ("Deployment", "DaemonSet")):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        is_keeper = labels.get("app.kubernetes.io/component") == "keeper"
        for manifest in manifests:
            for selector in selectors(manifest):
                is_its_own = manifest["metadata"]["name"].endswith("-keeper")
                assert (selector.items() <= labels.items()) == (is_keeper == is_its_own)
    for test in (manifest for manifest in manifests if manifest["kind"] == "Pod"):
        for manifest in manifests:
            for selector in selectors(manifest):
                assert not selector.items() <= test["metadata"]["labels"].items()


def selectors(manifest: dict[str, Any]) -> Iterator[dict[str, str]]:
    spec = manifest.get("spec", {})
    if manifest["kind"] == "Service":
        yield spec["selector"]
    elif manifest["kind"] in ("PodMonitor", "Deployment", "DaemonSet", "PodDisruptionBudget"):
        yield spec["selector"]["matchLabels"]
    elif manifest["kind"] == "NetworkPolicy":
        yield spec["podSelector"]["matchLabels"]
