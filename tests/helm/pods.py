"""Pods of the chart on this machine: their containers, with volumes, users and groups as the kubelet gives them."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.helm.conftest import Manifest, containers_of
from tests.helm.images import Buildah, Container, Identity, Mount


class Pod:
    """One pod of a Deployment or DaemonSet. `node` stands for the root folder of the node."""

    def __init__(
        self, manifests: Iterable[Manifest], folder: Path, *, node: Path, image: str, buildah: Buildah
    ) -> None:
        found = list(manifests)
        (workload,) = (one for one in found if one["kind"] in ("Deployment", "DaemonSet"))
        self._spec = workload["spec"]["template"]["spec"]
        self._containers = containers_of(workload)
        self._objects = {(one["kind"], one["metadata"]["name"]): one for one in found}
        self._security = self._spec["securityContext"]
        self._folder, self._node, self._image, self._buildah = folder, node, image, buildah
        self._volumes = {volume["name"]: self._make(volume) for volume in self._spec["volumes"]}
        self._running = ExitStack()

    def start(self, name: str, *command: str) -> Container:
        """A container, with another command if one is given."""
        container = self._containers[name]
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"]["drop"] == ["ALL"]
        variables = dict(line.split("=", 1) for line in self._buildah.config_of(self._image)["Env"])
        variables |= {one["name"]: one["value"] for one in container.get("env", ()) if "value" in one}
        group = self._security.get("fsGroup")
        output = self._running.enter_context((self._folder / f"{name}.log").open("a"))
        started = Container(
            self._buildah.unpacked(self._image),
            command or [*container["command"], *container["args"]] if "args" in container else container["command"],
            variables,
            mounts=[
                Mount(self._volumes[one["name"]], one["mountPath"], one.get("readOnly", False))
                for one in container["volumeMounts"]
            ],
            identity=Identity(
                security.get("runAsUser", self._security["runAsUser"]),
                security.get("runAsGroup", self._security["runAsGroup"]),
                (*([] if group is None else [group]), *self._security.get("supplementalGroups", ())),
                tuple(security["capabilities"].get("add", ())),
            ),
            output=output,
        )
        self._running.callback(started.kill)
        return started

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def close(self) -> None:
        self._running.close()

    def _make(self, volume: Manifest) -> Path:
        if "hostPath" in volume:
            path = self._node / str(volume["hostPath"]["path"]).lstrip("/")
            if volume["hostPath"]["type"] == "DirectoryOrCreate":
                path.mkdir(mode=0o755, parents=True, exist_ok=True)
            return path
        path = self._folder / "volumes" / str(volume["name"])
        path.mkdir(parents=True)
        if "secret" in volume:
            self._fill(path, volume["secret"])
        else:
            assert "emptyDir" in volume
            self._give(path, 0o777)
        return path

    def _fill(self, path: Path, secret: dict[str, Any]) -> None:
        data = self._objects["Secret", secret["secretName"]]["data"]
        for key, value in data.items():
            (path / key).write_bytes(base64.b64decode(value))
            self._give(path / key, secret.get("defaultMode", 0o644))
        path.chmod(0o755)

    def _give(self, path: Path, mode: int) -> None:
        """To the pod's fsGroup, as far as that is set; a folder gives its group to what is made in it."""
        path.chmod(mode)
        if (group := self._security.get("fsGroup")) is not None:
            os.chown(path, -1, group)
            path.chmod(mode | 0o2000 if path.is_dir() else mode)
