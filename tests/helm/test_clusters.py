"""The values of examples/clusters: the chart takes them, and Kubernetes what it renders."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.helm.conftest import containers_of
from tests.helm.processes import validated
from tests.helm.test_manifests import CHART, KUBERNETES, OPERATOR

pytestmark = pytest.mark.deploy

Template = Callable[..., list[dict[str, Any]]]
CLUSTERS = sorted((CHART.parents[1] / "examples" / "clusters").glob("*.yaml"))
SHARED = {path.stem: path for path in CLUSTERS if path.stem.startswith("shared")}

each_cluster = pytest.mark.parametrize("values", CLUSTERS, ids=lambda path: path.stem)


@each_cluster
def test_the_chart_takes_them_as_the_command_in_their_head_does(helm: Path, values: Path) -> None:
    (command,) = re.findall(r"^# +(helm install .*)$", values.read_text(), re.MULTILINE)
    words = command.split()
    assert words[words.index("--values") + 1] == f"examples/clusters/{values.name}"
    result = subprocess.run(
        [helm, "template", *words[2:]], cwd=CHART.parents[1], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@each_cluster
def test_kubernetes_would_take_every_object(template: Template, values: Path, tmp_path: Path) -> None:
    rendered = tmp_path / "rendered.yaml"
    manifests = [one for one in template(values=values) if one["apiVersion"] != OPERATOR]
    rendered.write_text(yaml.safe_dump_all(manifests))
    validated(rendered, KUBERNETES[-1])


def test_engines_attach_to_the_service_of_their_node(template: Template) -> None:
    """Both mount one folder of the node, and run as one user."""

    def folder_and_user(values: Path, kind: str, container: str) -> tuple[str, int]:
        (workload,) = (
            one for one in template(values=values) if one["kind"] == kind and container in containers_of(one)
        )
        pod = workload["spec"]["template"]["spec"]
        (path,) = {
            volume["hostPath"]["path"] for volume in pod["volumes"] if "run/kvstow" in str(volume.get("hostPath"))
        }
        return path, pod["securityContext"]["runAsUser"]

    node = folder_and_user(SHARED["shared-node"], "DaemonSet", "kvstow")
    assert node == folder_and_user(SHARED["shared-engine"], "Deployment", "vllm")


def test_the_restricted_cluster_needs_no_folder_of_the_node_and_no_user(template: Template) -> None:
    (restricted,) = (path for path in CLUSTERS if path.stem == "restricted")
    (pod,) = (one["spec"]["template"]["spec"] for one in template(values=restricted) if one["kind"] == "Deployment")
    assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
    assert "runAsUser" not in pod["securityContext"]


def test_the_chart_makes_no_secret_that_argo_cd_would_make_anew(template: Template) -> None:
    (kserve,) = (path for path in CLUSTERS if path.stem == "kserve")
    kinds = {one["kind"] for one in template(values=kserve, apis=(OPERATOR,))}
    assert "Secret" not in kinds
    assert {"PodMonitor", "PrometheusRule", "NetworkPolicy"} <= kinds
