"""Disks in the chart: folders of the node that survive pods, or an emptyDir."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helm.conftest import NODE, Find, containers_of, values_of
from tests.helm.test_connection import settings_of

from kvstow.bytesize import parse_size

pytestmark = pytest.mark.deploy

TIB = 1 << 40


def volumes_of(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in pod["volumes"] if "disk" in one["name"]}


def test_the_service_gets_the_disks_of_the_node(find: Find) -> None:
    workload = find("DaemonSet", values=values_of("node-disk"))
    pod, service = workload["spec"]["template"]["spec"], containers_of(workload)["kvstow"]
    settings = settings_of(service)
    assert (settings.disk_size, settings.disk_writes) == (2 * TIB, 8 * TIB)
    mounts = {one["mountPath"]: one for one in service["volumeMounts"]}
    volumes = volumes_of(pod)
    paths = [volumes[mounts[str(path)]["name"]]["hostPath"] for path in settings.disk]
    assert paths == [{"path": f"/mnt/nvme{number}", "type": "Directory"} for number in (0, 1)]
    assert not any(mounts[str(path)].get("readOnly") for path in settings.disk)


def test_the_folder_on_each_disk_is_made_for_the_service(find: Find) -> None:
    workload = find("DaemonSet", values=values_of("node-disk"))
    (prepare,) = (
        one for one in workload["spec"]["template"]["spec"]["initContainers"] if one["name"] == "socket-folder"
    )
    mounted = {one["mountPath"] for one in prepare["volumeMounts"]}
    for path in settings_of(containers_of(workload)["kvstow"]).disk:
        assert str(path) in mounted
        assert (
            f"mkdir -p {path}/kvstow && chown 65532 {path}/kvstow && chmod 0700 {path}/kvstow" in prepare["command"][2]
        )


def test_an_ephemeral_disk_has_a_limit_above_its_size(find: Find) -> None:
    workload = find("Deployment", values=values_of("engine-sidecar-disk"))
    pod, service = workload["spec"]["template"]["spec"], containers_of(workload)["kvstow"]
    settings = settings_of(service)
    assert settings.disk_size == 200 << 30
    (volume,) = volumes_of(pod).values()
    assert int(volume["emptyDir"]["sizeLimit"]) > parse_size("209GiB")
    assert [one["name"] for one in containers_of(workload)["vllm"]["volumeMounts"] if "disk" in one["name"]] == []


def test_without_disks_there_is_none(find: Find) -> None:
    workload = find("DaemonSet", *NODE)
    assert settings_of(containers_of(workload)["kvstow"]).disk == ()
    assert volumes_of(workload["spec"]["template"]["spec"]) == {}
