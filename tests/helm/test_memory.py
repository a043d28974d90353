"""A pod's memory holds the pool of every rank and what is stated beside it: too little ends in an OOM kill."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helm.conftest import ATTACHED, ENGINE, NODE, SIDECAR, Find, containers_of

pytestmark = pytest.mark.deploy

GIB = 1024


def resources_of(find: Find, name: str, *sets: str) -> dict[str, Any]:
    workload = find("DaemonSet" if sets[0] == NODE[0] else "Deployment", *sets)
    return dict(containers_of(workload)[name]["resources"])


@pytest.mark.parametrize(
    ("sets", "mebibytes"),
    [
        ([*ENGINE, "pool.size=100Gi"], 101 * GIB + 6 * GIB + 2 * GIB),
        ([*ENGINE, "pool.size=64Gi", "parallel.tensor=4"], 291390),  # the README's example
        ([*ENGINE, "pool.size=100Gi", "parallel.tensor=2", "parallel.pipeline=2"], 4 * 107 * GIB + 2 * GIB),
        ([*ENGINE, "pool.size=100Gi", "parallel.data=8", "engine.sharedMemory=16Gi"], 8 * 107 * GIB + 16 * GIB),
        ([*ENGINE, "pool.size=100Gi", "pool.maxSize=200Gi"], 202 * GIB + 6 * GIB + 2 * GIB),
        ([*ENGINE, "pool.size=2Ti", "memory.poolPercent=0", "memory.overheadPerRank=10Gi"], 2060 * GIB),
        ([*ENGINE, "pool.size=2Mi", "memory.overheadPerRank=1Mi", "engine.sharedMemory=1Mi"], 5),  # 4.02 Mi, rounded up
        # Attached: what the ranks map is charged to the service; page tables and the driver's data are not.
        ([*SIDECAR, "service.memory=100Gi"], GIB + 6 * GIB + 2 * GIB),
        ([*ATTACHED, "service.memory=200Gi", "parallel.tensor=4"], 2 * GIB + 4 * 6 * GIB + 2 * GIB),
        ([*ATTACHED, "attach.memory=100Gi", "parallel.data=2"], 2 * GIB + 2 * 6 * GIB + 2 * GIB),
    ],
)
def test_request_and_limit_of_vllm_are_the_formula(find: Find, sets: list[str], mebibytes: int) -> None:
    resources = resources_of(find, "vllm", *sets)
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["memory"] == f"{mebibytes}Mi"


@pytest.mark.parametrize(
    ("sets", "mebibytes"),
    [
        ([*NODE, "service.memory=100Mi", "service.overhead=512Mi"], 612),
        ([*NODE, "service.memory=1Ti", "parallel.tensor=8"], 1025 * GIB),
        ([*SIDECAR, "service.memory=1Ti", "parallel.tensor=8"], 1025 * GIB),
    ],
)
def test_the_node_service_has_its_memory_and_an_overhead(find: Find, sets: list[str], mebibytes: int) -> None:
    resources = resources_of(find, "kvstow", *sets)
    assert resources["requests"] == resources["limits"]
    assert resources["limits"] == {"cpu": "2", "memory": f"{mebibytes}Mi"}


@pytest.mark.parametrize(
    ("name", "sets", "mebibytes", "huge"),
    [
        ("vllm", [*ENGINE, "pool.size=64Gi", "parallel.tensor=4"], 29246, 4 * 64 * GIB),  # the README's example
        ("vllm", [*ENGINE, "pool.size=100Gi", "pool.maxSize=200Gi"], 2 * GIB + 6 * GIB + 2 * GIB, 200 * GIB),
        ("vllm", [*ENGINE, "pool.size=100Gi", "parallel.data=2", "memory.poolPercent=0"], 14 * GIB, 200 * GIB),
        ("kvstow", [*NODE, "service.memory=513Mi", "service.overhead=512Mi"], 512, 512),
        ("kvstow", [*SIDECAR, "service.memory=64Gi"], GIB, 64 * GIB),
    ],
)
def test_a_pool_in_reserved_huge_pages_is_requested_as_such_and_as_nothing_else(
    find: Find, name: str, sets: list[str], mebibytes: int, huge: int
) -> None:
    resources = resources_of(find, name, *sets, "memory.hugePages=reserved")
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["memory"] == f"{mebibytes}Mi"
    assert resources["limits"]["hugepages-2Mi"] == f"{huge}Mi"


def test_vllm_that_attaches_requests_no_huge_pages(find: Find) -> None:
    """The service has reserved them, and is charged for them."""
    for sets in (SIDECAR, ATTACHED):
        assert "hugepages-2Mi" not in resources_of(find, "vllm", *sets, "memory.hugePages=reserved")["limits"]


@pytest.mark.parametrize("mode", [NODE, SIDECAR])
def test_no_container_of_the_node_service_has_a_gpu(find: Find, mode: tuple[str, ...]) -> None:
    for name in ("kvstow", "kvstow-keeper"):
        assert resources_of(find, name, *mode)["limits"].keys() == {"cpu", "memory"}


def test_vllm_has_a_gpu_for_each_rank(find: Find) -> None:
    resources = resources_of(find, "vllm", *ENGINE, "parallel.tensor=4", "parallel.pipeline=2")
    assert resources["limits"].keys() == {"cpu", "memory", "nvidia.com/gpu"}
    assert resources["limits"]["nvidia.com/gpu"] == "8"


def test_shared_memory_is_bounded_by_what_was_counted(find: Find) -> None:
    deployment = find("Deployment", *ENGINE, "engine.sharedMemory=3Gi")
    volumes = {volume["name"]: volume for volume in deployment["spec"]["template"]["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "3Gi"}


@pytest.mark.parametrize(("kind", "mode"), [("Deployment", ENGINE), ("DaemonSet", NODE)])
def test_a_pod_may_take_as_long_to_stop_as_it_drains(find: Find, kind: str, mode: tuple[str, ...]) -> None:
    deployment = find(kind, *mode, "shutdown.delaySeconds=7", "shutdown.drainSeconds=100")
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 7 + 100 + 30
