from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from tests.service.stores.mooncake.cluster import Cluster, require_network


@pytest.fixture(scope="session")
def alone() -> None:
    require_network()


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Every thread that a test has started must end with it."""
    before = set(threading.enumerate())
    yield
    left = [one.name for one in threading.enumerate() if one not in before and one.name.startswith("kvstow")]
    assert left == []


@pytest.fixture(scope="session")
def shared_cluster(alone: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """For tests that leave it as it is."""
    cluster = Cluster(tmp_path_factory.mktemp("mooncake") / "log")
    yield cluster
    cluster.close()


@pytest.fixture
def make_cluster(alone: None, tmp_path_factory: pytest.TempPathFactory, stack: ExitStack) -> Callable[..., Cluster]:
    def make(segment_bytes: int = 1 << 30, **options: Any) -> Cluster:
        cluster = Cluster(tmp_path_factory.mktemp("mooncake") / "log", segment_bytes, **options)
        return stack.enter_context(closing(cluster))

    return make
