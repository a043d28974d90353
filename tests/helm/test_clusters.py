"""The values of examples/clusters: the chart takes them, and Kubernetes what it renders."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tests.helm.conftest import CHART, OPERATOR, Template, containers_of, must_run
from tests.helm.processes import validated
from tests.helm.test_manifests import KUBERNETES

pytestmark = pytest.mark.deploy

CLUSTERS = sorted((CHART.parents[1] / "examples" / "clusters").glob("*.yaml"))
SHARED = {path.stem: path for path in CLUSTERS if path.stem.startswith("shared")}

each_cluster = pytest.mark.parametrize("values", CLUSTERS, ids=lambda path: path.stem)


@each_cluster
def test_kubernetes_would_take_what_the_command_in_their_head_installs(
    helm: Path, values: Path, tmp_path: Path
) -> None:
    (command,) = re.findall(r"^# +(helm install .*)$", values.read_text(), re.MULTILINE)
    words = command.split()
    assert words[words.index("--values") + 1] == f"examples/clusters/{values.name}"
    rendered = tmp_path / "rendered.yaml"
    manifests = yaml.safe_load_all(must_run(helm, "template", *words[2:], cwd=CHART.parents[1]))
    rendered.write_text(yaml.safe_dump_all(one for one in manifests if one and one["apiVersion"] != OPERATOR))
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
