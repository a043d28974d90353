"""A pod's memory holds the pool of every rank and what is stated beside it: too little ends in an OOM kill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.deploy

ENGINE = ("mode=engine", "image.registry=r.example.com", "engine.model=m")
SERVICE = ("mode=service", "image.registry=r.example.com")
GIB = 1024

Find = Callable[..., dict[str, Any]]


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(only)


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
        ([*SERVICE, "service.memory=100Mi", "service.overhead=512Mi"], 612),
        ([*SERVICE, "service.memory=1Ti", "parallel.tensor=8"], 1025 * GIB),
    ],
)
def test_request_and_limit_are_the_formula(find: Find, sets: list[str], mebibytes: int) -> None:
    resources = container(find("Deployment", *sets))["resources"]
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["memory"] == f"{mebibytes}Mi"


@pytest.mark.parametrize(
    ("sets", "mebibytes", "huge"),
    [
        ([*ENGINE, "pool.size=64Gi", "parallel.tensor=4"], 29246, 4 * 64 * GIB),  # the README's example
        ([*ENGINE, "pool.size=100Gi", "pool.maxSize=200Gi"], 2 * GIB + 6 * GIB + 2 * GIB, 200 * GIB),
        ([*ENGINE, "pool.size=100Gi", "parallel.data=2", "memory.poolPercent=0"], 14 * GIB, 200 * GIB),
        ([*SERVICE, "service.memory=513Mi", "service.overhead=512Mi"], 512, 512),
    ],
)
def test_a_pool_in_reserved_huge_pages_is_requested_as_such_and_as_nothing_else(
    find: Find, sets: list[str], mebibytes: int, huge: int
) -> None:
    resources = container(find("Deployment", *sets, "memory.hugePages=reserved"))["resources"]
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["memory"] == f"{mebibytes}Mi"
    assert resources["limits"]["hugepages-2Mi"] == f"{huge}Mi"


def test_a_pod_is_guaranteed_and_has_a_gpu_for_each_rank(find: Find) -> None:
    resources = container(find("Deployment", *ENGINE, "parallel.tensor=4", "parallel.pipeline=2"))["resources"]
    assert resources["limits"] == resources["requests"]
    assert resources["limits"].keys() == {"cpu", "memory", "nvidia.com/gpu"}
    assert resources["limits"]["nvidia.com/gpu"] == "8"


def test_shared_memory_is_bounded_by_what_was_counted(find: Find) -> None:
    deployment = find("Deployment", *ENGINE, "engine.sharedMemory=3Gi")
    volumes = {volume["name"]: volume for volume in deployment["spec"]["template"]["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "3Gi"}


@pytest.mark.parametrize("mode", [ENGINE, SERVICE])
def test_a_pod_may_take_as_long_to_stop_as_it_drains(find: Find, mode: tuple[str, ...]) -> None:
    deployment = find("Deployment", *mode, "shutdown.delaySeconds=7", "shutdown.drainSeconds=100")
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 7 + 100 + 30
