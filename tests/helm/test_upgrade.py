"""`helm upgrade` from each way to run KVStow to each other, in a cluster that has the objects of the one before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helm.cluster import Cluster, serving
from tests.helm.conftest import CHART, OPERATOR, Template, must_run

pytestmark = pytest.mark.deploy

REGISTRY = ("image.registry=r.example.com",)
ENGINE = (*REGISTRY, "mode=engine", "engine.model=m", "engine.podDisruptionBudget.enabled=true")
RELEASES = {
    "addon": ("networkPolicy.enabled=true",),
    "addon-node": ("attach.node=true",),
    "addon-sidecar": (*REGISTRY, "sidecar=true"),
    "engine": (*ENGINE, "networkPolicy.enabled=true"),
    "engine-node": (*ENGINE, "attach.node=true"),
    "engine-sidecar": (*ENGINE, "sidecar=true"),
    "node": (*REGISTRY, "mode=node", "admin.guardReading=true"),
}

Objects = dict[tuple[str, str], dict[str, Any]]


class Release:
    """The release `test` in a cluster."""

    def __init__(self, helm: Path, cluster: Cluster, server: str, folder: Path) -> None:
        self._helm, self._cluster = helm, cluster
        (folder / "kubeconfig").touch()
        self._where = ("--namespace=kv", f"--kube-apiserver={server}", f"--kubeconfig={folder / 'kubeconfig'}")

    def apply(self, verb: str, *sets: str) -> None:
        """`helm install` or `helm upgrade`."""
        options = [word for one in sets for word in ("--set", one)]
        how = ("--server-side=true", "--disable-openapi-validation")
        must_run(self._helm, verb, "test", CHART, *self._where, *how, *options)

    def objects(self) -> Objects:
        """All but helm's own record of the release."""
        return {key: one for key, one in self._cluster.objects.items() if one.get("type") != "helm.sh/release.v1"}


def content(one: dict[str, Any]) -> Any:
    """What a release says of an object; a token is another one each time."""
    return list(one["data"]) if one["kind"] == "Secret" else one.get("spec", one.get("data"))


@pytest.mark.parametrize("name", RELEASES)
def test_an_upgrade_leaves_what_an_installation_would_make_and_nothing_else(
    helm: Path, template: Template, tmp_path: Path, name: str
) -> None:
    """From `name` to each release after it in the list, and back."""
    cluster = Cluster(has_operator=True)
    wanted = {
        other: {
            (one["kind"], one["metadata"]["name"]): content(one)
            for one in template(*sets, apis=(OPERATOR,))
            if one["kind"] != "Pod"  # `helm test` makes it
        }
        for other, sets in RELEASES.items()
    }
    others = list(RELEASES)[list(RELEASES).index(name) + 1 :]
    with serving(cluster) as server:
        release = Release(helm, cluster, server, tmp_path)
        release.apply("install", *RELEASES[name])
        for step in [step for other in others for step in (other, name)]:
            release.apply("upgrade", *RELEASES[step])
            found = {key: content(one) for key, one in release.objects().items()}
            assert found == wanted[step], f"{name}, {step}"


def test_values_of_mode_service_change_nothing_before_they_are_replaced(helm: Path, tmp_path: Path) -> None:
    """Then a Deployment becomes a DaemonSet, and the token stays."""
    cluster = Cluster(has_operator=False)
    with serving(cluster) as server:
        release = Release(helm, cluster, server, tmp_path)
        release.apply("install", *ENGINE)
        token = release.objects()["Secret", "test-kvstow-token"]["data"]
        with pytest.raises(OSError, match="mode: service was replaced: use mode=node"):
            release.apply("upgrade", *REGISTRY, "mode=service", "service.memory=8Gi")
        assert ("Deployment", "test-kvstow") in release.objects()
        release.apply("upgrade", *REGISTRY, "mode=node", "service.memory=8Gi")
    assert ("Deployment", "test-kvstow") not in release.objects()
    assert ("DaemonSet", "test-kvstow") in release.objects()
    assert release.objects()["Secret", "test-kvstow-token"]["data"] == token


def test_the_cluster_refuses_what_kubernetes_refuses() -> None:
    """Otherwise these tests would see nothing."""
    cluster = Cluster(has_operator=False)
    path = "/apis/apps/v1/namespaces/kv/daemonsets"
    body = b'{"kind": "DaemonSet", "metadata": {"name": "x"}, "spec": {"selector": {"matchLabels": {"a": "b"}}}}'
    assert cluster.answer("POST", path, body)[0] == 201
    assert cluster.answer("POST", path, body)[0] == 409
    assert cluster.answer("PATCH", f"{path}/x", body)[0] == 200
    assert cluster.answer("PATCH", f"{path}/x", body.replace(b'"b"', b'"c"'))[0] == 422
