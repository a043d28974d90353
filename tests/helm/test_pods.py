"""Pods as the chart describes them, run with the real image: users, groups, capabilities, volumes, read-only root."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.helm.conftest import Manifest, Template
from tests.helm.images import Buildah, Container
from tests.helm.pods import Pod
from tests.helm.processes import until

pytestmark = pytest.mark.image

SMALL = (
    "image.registry=r.example.com",
    "service.memory=64Mi",
    "service.args={--extent-size=2MiB,--pin-pause=0}",
    "shutdown.delaySeconds=0",
)
ENGINE = ("mode=engine", "engine.model=m")

StartPod = Callable[..., Pod]


@pytest.fixture
def start_pod(template: Template, build: Callable[[str], str], buildah: Buildah, tmp_path: Path) -> Iterator[StartPod]:
    """The pod of a rendered release, on the one node that there is."""
    with ExitStack() as running:

        def start(name: str, *sets: str) -> Pod:
            folder = tmp_path / name
            folder.mkdir()
            manifests = template(*SMALL, *sets)
            pod = Pod(manifests, folder, node=tmp_path / "node", image=build("service"), buildah=buildah)
            running.callback(pod.close)
            return pod

        yield start


class Admin:
    """The service's admin server, as the kubelet sees it: in the pod's network, which nobody else is in."""

    def __init__(self, pod: Pod, container: Container) -> None:
        self._pod, self._container = pod, container

    def wait(self, path: str) -> None:
        until(lambda: self._ask(path)[0] == 200, f"{path} of\n{self._pod.log('kvstow')}")

    def num_blocks(self) -> int:
        status, answer = self._ask("/v1/pools")
        assert status == 200, answer
        return sum(pool["slots"]["cached"] for pool in json.loads(answer)["items"])

    def _ask(self, path: str) -> tuple[int, str]:
        """Status and text; 0 while nobody listens."""
        assert self._container.process.poll() is None, self._pod.log("kvstow")
        return self._container.get(f"http://127.0.0.1:9595{path}")


def replay(pod: Pod, attach: str) -> dict[str, Any]:
    """What an engine of two ranks found that ran in vLLM's container. It compares every byte that it loads."""
    trace = "kvstow trace generate --sessions 5 --output /tmp/trace"
    engine = f"kvstow replay /tmp/trace --ranks 2 --slot-size 16KiB --attach {attach} --json"
    container = pod.start("vllm", "sh", "-c", f"{trace} && {engine}")
    status = container.process.wait(300)
    assert status == 0, pod.log("vllm")
    found: dict[str, Any] = json.loads(pod.log("vllm").splitlines()[-1])
    assert (found["mismatches"], found["failed_loads"]) == (0, 0)
    return found


def loads_all(pod: Pod, attach: str) -> bool:
    """An engine that attaches late begins without the cache."""
    return bool(replay(pod, attach)["block_hit_rate"] == 1)


def attach_address(manifests: list[Manifest]) -> str:
    (config,) = (one for one in manifests if one["metadata"]["name"].endswith("-connection"))
    extra = json.loads(config["data"]["kv-transfer-config.json"])["kv_connector_extra_config"]
    return str(extra["attach"])


def start_service(pod: Pod) -> tuple[Container, Admin]:
    container = pod.start("kvstow")
    admin = Admin(pod, container)
    admin.wait("/startupz")
    admin.wait("/readyz/pinned")
    return container, admin


def assert_the_cache_outlives_containers(service: Pod, engine: Pod, attach: str) -> None:
    keeper = service.start("kvstow-keeper")
    serving, admin = start_service(service)
    until(lambda: replay(engine, attach)["stored_blocks"] > 100, "an engine that stores")
    before = admin.num_blocks()
    assert before > 100

    serving.kill()
    serving, admin = start_service(service)
    assert admin.num_blocks() == before
    until(lambda: loads_all(engine, attach), "an engine that loads")

    keeper.kill()
    keeper = service.start("kvstow-keeper")
    until(lambda: "a keeper holds everything again" in service.log("kvstow"), "a keeper that holds everything")
    assert serving.stop() == 0, service.log("kvstow")
    serving, admin = start_service(service)
    assert admin.num_blocks() == before
    until(lambda: loads_all(engine, attach), "an engine that loads")

    assert serving.stop() == 0, service.log("kvstow")
    assert keeper.stop() == 0, service.log("kvstow-keeper")


def make_socket_folder(pod: Pod) -> None:
    assert pod.start("socket-folder").process.wait(120) == 0, pod.log("socket-folder")


def test_mode_node(template: Template, start_pod: StartPod, tmp_path: Path) -> None:
    place = ("socket.folder=/var/run/inference/kvstow", "socket.group=2000")
    node = start_pod("node", "mode=node", *place)
    engine_values = (*ENGINE, "attach.node=true", *place, "pod.user=1500")
    engine = start_pod("engine", *engine_values)
    folder = tmp_path / "node" / "var/run/inference/kvstow"
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (0, 0o755), "as the kubelet makes it"
    for _ in range(2):  # with each pod
        make_socket_folder(node)
        found = folder.stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (65532, 2000, 0o750)
    assert_the_cache_outlives_containers(node, engine, attach_address(template(*SMALL, *engine_values)))


def test_engines_fill_the_cache_of_the_next_pod_of_mode_node(template: Template, start_pod: StartPod) -> None:
    """As in an upgrade: service and keeper end, and the cache with them."""
    engine_values = (*ENGINE, "attach.node=true")
    attach = attach_address(template(*SMALL, *engine_values))
    before = start_pod("before", "mode=node")
    make_socket_folder(before)
    keeper = before.start("kvstow-keeper")
    serving, admin = start_service(before)
    trace = "kvstow trace generate --sessions 5000 --output /tmp/trace"
    replay = f"kvstow replay /tmp/trace --ranks 2 --slot-size 16KiB --attach {attach} --rate 10"
    start_pod("engine", *engine_values).start("vllm", "sh", "-c", f"{trace} && {replay}")
    until(lambda: admin.num_blocks() > 200, "an engine that stores")
    assert serving.stop() == 0, before.log("kvstow")
    assert keeper.stop() == 0, before.log("kvstow-keeper")

    after = start_pod("after", "mode=node")
    make_socket_folder(after)
    after.start("kvstow-keeper")
    _, admin = start_service(after)
    until(lambda: admin.num_blocks() > 200, "the engine stores again")


def test_the_sidecar(template: Template, start_pod: StartPod) -> None:
    values = (*ENGINE, "sidecar=true")
    pod = start_pod("engine", *values)
    assert_the_cache_outlives_containers(pod, pod, attach_address(template(*SMALL, *values)))
