"""What holds for every mode: valid objects, the restricted Pod Security Standard, no secret where anybody reads it."""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.deploy

CHART = Path(__file__).parents[2] / "helm" / "kvstow"
CASES = sorted((CHART / "ci").glob("*-values.yaml"))
OPERATOR = "monitoring.coreos.com/v1"
# The oldest that the chart promises to support, and a recent one.
KUBERNETES = ("1.25", "1.33")
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}

Template = Callable[..., list[dict[str, Any]]]

each_case = pytest.mark.parametrize("values", CASES, ids=lambda path: path.name.removesuffix("-values.yaml"))


def pod_specs(manifests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for manifest in manifests:
        if manifest["kind"] == "Pod":
            yield manifest["spec"]
        elif manifest["kind"] == "Deployment":
            yield manifest["spec"]["template"]["spec"]


def test_each_mode_has_values_to_test() -> None:
    modes = {yaml.safe_load(path.read_text()).get("mode", "addon") for path in CASES}
    assert modes == {"addon", "engine", "service"}


@each_case
def test_helm_finds_nothing_to_complain_about(helm: Path, values: Path) -> None:
    result = subprocess.run(
        [helm, "lint", "--strict", CHART, "--values", values], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


@each_case
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_would_take_every_object(template: Template, values: Path, version: str, tmp_path: Path) -> None:
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(yaml.safe_dump_all(template(values=values)))
    validate = shutil.which("kubernetes-validate", path=str(Path(sys.executable).parent))
    assert validate, "not installed: make test-deploy does that"
    command: list[str | Path] = [validate, "--strict", "--kubernetes-version", version, rendered]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Couldn't find schema" not in result.stderr


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
def test_pods_meet_the_restricted_standard(template: Template, values: Path) -> None:
    for pod in pod_specs(template(values=values)):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"].get("runAsUser") != 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in pod.get("volumes", []):
            assert (volume.keys() - {"name"}) < VOLUMES | {"name"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@each_case
def test_the_notes_are_complete(helm: Path, values: Path) -> None:
    command: list[str | Path] = [helm, "install", "test", CHART, "--dry-run=client", "--values", values]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    notes = result.stdout.partition("\nNOTES:\n")[2]
    assert "kvstow doctor" in notes
    for blank in ("<no value>", "<nil>", "%!", "\n\n\n"):
        assert blank not in notes


@each_case
def test_images_are_never_floating(template: Template, values: Path) -> None:
    images = [container["image"] for pod in pod_specs(template(values=values)) for container in pod["containers"]]
    assert all(image.startswith("registry.example.com/ml/kvstow") for image in images)
    assert not [image for image in images if "@sha256:" not in image and ":" not in image.rpartition("/")[2]]


@each_case
def test_the_token_is_in_the_secret_alone(template: Template, values: Path) -> None:
    manifests = template(values=values)
    secrets = [manifest for manifest in manifests if manifest["kind"] == "Secret"]
    others = yaml.safe_dump_all(manifest for manifest in manifests if manifest["kind"] != "Secret")
    tokens = [base64.b64decode(token).decode() for secret in secrets for token in secret["data"].values()]
    given = yaml.safe_load(values.read_text()).get("admin", {})
    assert len(tokens) == (0 if "tokenSecret" in given else 2 if "guardReading" in given else 1)
    assert all(len(token) >= 16 and token not in others for token in tokens)


@each_case
def test_only_the_pods_group_reads_its_secrets(template: Template, values: Path) -> None:
    """The doctor warns of a token file that other users may read."""
    for pod in pod_specs(template(values=values)):
        names = ("kvstow-token", "kvstow-tls")
        modes = [one["secret"].get("defaultMode") for one in pod.get("volumes", ()) if one["name"] in names]
        grouped = "fsGroup" in pod["securityContext"]
        assert all(mode == (0o440 if grouped else None) for mode in modes)


def test_without_a_group_secrets_stay_readable(template: Template) -> None:
    """Root owns them: with a narrower mode the container's user could not read them."""
    pods = pod_specs(template("mode=service", "image.registry=registry.example.com", "pod.user=null"))
    volumes = [volume for pod in pods for volume in pod.get("volumes", ()) if volume["name"] == "kvstow-token"]
    assert [volume["secret"].get("defaultMode") for volume in volumes] == [None]


@each_case
def test_selectors_find_the_pods_and_only_these(template: Template, values: Path) -> None:
    manifests = template(values=values, apis=(OPERATOR,))
    deployments = [manifest for manifest in manifests if manifest["kind"] == "Deployment"]
    for deployment in deployments:
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        for manifest in manifests:
            for selector in selectors(manifest):
                assert selector.items() <= labels.items()
    for test in (manifest for manifest in manifests if manifest["kind"] == "Pod"):
        for manifest in manifests:
            for selector in selectors(manifest):
                assert not selector.items() <= test["metadata"]["labels"].items()


def selectors(manifest: dict[str, Any]) -> Iterator[dict[str, str]]:
    spec = manifest.get("spec", {})
    if manifest["kind"] == "Service":
        yield spec["selector"]
    elif manifest["kind"] in ("PodMonitor", "Deployment", "PodDisruptionBudget"):
        yield spec["selector"]["matchLabels"]
    elif manifest["kind"] == "NetworkPolicy":
        yield spec["podSelector"]["matchLabels"]
