"""The patch in the notes of mode addon, applied by kubectl to a Deployment that has nothing of KVStow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.helm.conftest import Find, containers_of, must_run, notes_of, values_of
from tests.helm.processes import validated

pytestmark = pytest.mark.deploy

CASES = ["addon", "addon-existing-pods", "addon-node", "addon-sidecar"]
DEPLOYMENT = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "llama"},
    "spec": {
        "selector": {"matchLabels": {"app": "vllm", "role": "decode"}},
        "template": {
            "metadata": {"labels": {"app": "vllm", "role": "decode"}},
            "spec": {
                "initContainers": [{"name": "weights", "image": "fetch:1"}],
                "containers": [
                    {
                        "name": "vllm",
                        "image": "vllm:1",
                        "args": ["--kv-transfer-config=$(KV_TRANSFER_CONFIG)"],
                        "env": [{"name": "HF_HOME", "value": "/models"}],
                        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                    }
                ],
                "volumes": [{"name": "models", "emptyDir": {}}],
            },
        },
    },
}

Connected = Callable[[str], dict[str, Any]]


@pytest.fixture
def connected(helm: Path, kubectl: Path, tmp_path: Path) -> Connected:
    """The Deployment after the patch."""

    def patch(case: str) -> dict[str, Any]:
        notes = notes_of(helm, values_of(case))
        assert "--kv-transfer-config=$(KV_TRANSFER_CONFIG)" in notes
        (tmp_path / "patch.yaml").write_text(notes.split("\n---\n")[1])
        (tmp_path / "deployment.json").write_text(json.dumps(DEPLOYMENT))
        files = ("-f", tmp_path / "deployment.json", "--patch-file", tmp_path / "patch.yaml")
        found: dict[str, Any] = json.loads(must_run(kubectl, "patch", "--local", *files, "--output=json"))
        return found

    return patch


@pytest.mark.parametrize("case", CASES)
def test_it_connects_a_pod_and_leaves_the_rest(find: Find, connected: Connected, case: str, tmp_path: Path) -> None:
    deployment = connected(case)
    (tmp_path / "patched.yaml").write_text(yaml.safe_dump(deployment))
    validated(tmp_path / "patched.yaml", "1.33")
    pod, containers = deployment["spec"]["template"]["spec"], containers_of(deployment)
    vllm, before = containers["vllm"], DEPLOYMENT["spec"]["template"]["spec"]["containers"][0]  # type: ignore[index]
    assert (vllm["image"], vllm["args"]) == (before["image"], before["args"])
    assert before["volumeMounts"][0] in vllm["volumeMounts"]
    assert before["env"][0] in vllm["env"]
    assert "weights" in containers
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in containers.values():
        assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes.keys()
    variables = {variable["name"]: variable for variable in vllm["env"]}
    source = variables.pop("KV_TRANSFER_CONFIG")["valueFrom"]["configMapKeyRef"]
    config = find("ConfigMap", values=values_of(case), suffix=source["name"])
    extra = json.loads(config["data"][source["key"]])["kv_connector_extra_config"]
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in vllm["volumeMounts"]}
    if "attach" in extra:
        assert variables.keys() == {"HF_HOME"}
        assert extra["attach"].startswith("unix:///run/kvstow/")
        assert "/run/kvstow" in mounts
    else:
        assert variables.keys() - {"HF_HOME"} <= {"KVSTOW_SERVER", "KVSTOW_TOKEN_FILE", "KVSTOW_CA_FILE"}
        files = [str(value) for value in extra.values() if str(value).startswith("/")]
        wanted = {str(Path(file).parent) for file in files}
        assert {path for path, volume in mounts.items() if "secret" in volume} == wanted
    if case != "addon-node":
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert find("Service", values=values_of(case), suffix="-admin")["spec"]["selector"].items() <= labels.items()


def test_a_pod_that_attaches_to_the_node_joins_the_sockets_group(connected: Connected) -> None:
    pod = connected("addon-node")["spec"]["template"]["spec"]
    assert pod["securityContext"]["supplementalGroups"] == [2000]
    (folder,) = (volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume)
    assert folder == "/var/run/inference/kvstow"


def test_a_sidecar_meets_the_restricted_standard_in_any_pod(connected: Connected) -> None:
    containers = containers_of(connected("addon-sidecar"))
    for name in ("kvstow-keeper", "kvstow"):
        assert containers[name]["restartPolicy"] == "Always"
        assert containers[name]["resources"]["requests"] == containers[name]["resources"]["limits"]
        assert containers[name]["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    names = list(containers)
    assert names.index("kvstow-keeper") < names.index("kvstow") < names.index("vllm")
