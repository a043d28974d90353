"""Fixtures of stores that run on this machine, and of node services that share one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.service.node.rawengine import HELLO, RawEngine

from kvstow.attach.identity import FleetWeights
from kvstow.control import pooltier
from kvstow.memory.limits import MemoryLimits
from kvstow_service.node.node import Node
from kvstow_service.node.settings import Settings
from kvstow_service.stores.stores import open_store

_EXTENT = 2 << 20
_NAMED = replace(HELLO, fleet_weights=FleetWeights("digest 1"))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for the store as long as it takes on a busy machine."""
    monkeypatch.setattr(pooltier, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(pooltier, "UNKNOWN_SECONDS", 60.0)


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
