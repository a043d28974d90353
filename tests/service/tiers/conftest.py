"""Fixtures of stores that run on this machine, and of node services that share one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.service.conftest import Eventually
from tests.service.node.rawengine import HELLO, RawEngine
from tests.service.tiers.redisserver import Server

from kvstow.attach.identity import FleetWeights
from kvstow.control.fleettier import TierSettings
from kvstow.memory.limits import MemoryLimits
from kvstow_service.node.node import Node
from kvstow_service.node.settings import Settings
from kvstow_service.tiers.stores import open_store

# It imports what the tiers' extras bring.
collect_ignore = [] if find_spec("xxhash") else ["test_objectheader.py"]

_EXTENT = 2 << 20
_NAMED = replace(HELLO, fleet_weights=FleetWeights("digest 1"))


@pytest.fixture
def serve(tmp_path_factory: pytest.TempPathFactory, eventually: Eventually) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*options: str, tls_folder: Path | None = None) -> Server:
        servers.append(Server(tmp_path_factory.mktemp("redis"), *options, tls_folder=tls_folder))
        eventually(servers[-1].is_listening, "redis-server")
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for the store as long as it takes on a busy machine."""
    settings = partial(TierSettings, deadline=60.0, lookup_wait=60.0)
    monkeypatch.setattr("kvstow_service.node.tier.nodetier.TierSettings", settings)


@pytest.fixture
def make_tiered_node(tmp_path: Path) -> Iterator[Callable[[str], Node]]:
    """Nodes that use the store of a URL."""
    (tmp_path / "meminfo").write_text(f"MemAvailable: {1 << 30} kB\n")
    limits = MemoryLimits(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "fs")
    nodes: list[Node] = []

    def make(url: str) -> Node:
        settings = Settings(
            memory=8 * _EXTENT,
            attach_socket=tmp_path / "node" / f"attach{len(nodes)}.sock",
            extent_size=_EXTENT,
            tier=url,
        )
        nodes.append(Node(settings, store=open_store(url), limits=limits))
        nodes[-1].start()
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def engines() -> Iterator[Callable[[Path], RawEngine]]:
    made: list[RawEngine] = []

    def make(socket: Path) -> RawEngine:
        made.append(RawEngine(socket, _NAMED))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
