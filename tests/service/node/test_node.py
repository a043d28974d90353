"""A whole node over its socket, and engines over bare connections."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.service.node import rawengine
from tests.service.node.rawengine import HELLO, SLOT_BYTES, RawEngine, key_of

from kvstow.memory.limits import MemoryLimits
from kvstow_service.node.node import Node, NodeSettings
from kvstow_service.node.nodedirectory import NodeDirectory

MIB = 1 << 20
EXTENT = 2 * MIB
ROW_SLOTS = EXTENT // SLOT_BYTES

MakeNode = Callable[..., Node]


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[MakeNode]:
    """Nodes that are closed at the end; none leaves a descriptor open."""
    (tmp_path / "meminfo").write_text(f"MemAvailable: {1 << 30} kB\n")
    limits = MemoryLimits(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "fs")
    before = len(os.listdir("/proc/self/fd"))
    nodes: list[Node] = []

    def make(extents: int = 8, **options: Any) -> Node:
        path = tmp_path / "node" / f"attach{len(nodes)}.sock"
        settings = NodeSettings(memory_bytes=extents * EXTENT, attach_socket=path, extent_bytes=EXTENT, **options)
        nodes.append(Node(settings, limits=limits))
        nodes[-1].start()
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()
        node.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def engines() -> Iterator[Callable[..., RawEngine]]:
    made: list[RawEngine] = []

    def make(node: Node, hello: Any = HELLO) -> RawEngine:
        made.append(RawEngine(node.settings.attach_socket, hello))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


Engines = Callable[..., RawEngine]


@pytest.fixture
def process() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(node: Node, count: int, first: int = 0) -> subprocess.Popen[str]:
        root = Path(__file__).parents[3]
        path = os.pathsep.join([str(root), *filter(None, sys.path)])
        arguments = [sys.executable, rawengine.__file__, str(node.settings.attach_socket), str(count), str(first)]
        started.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": path}))
        stdout = started[-1].stdout
        assert stdout is not None
        assert stdout.readline() == "stored\n"
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def test_two_engines_share_what_one_has_stored(make_node: MakeNode, engines: Engines) -> None:
    node = make_node()
    first = engines(node)
    keys = [key_of(number) for number in range(20)]
    first.store_all(keys)
    assert first.load(keys) == 20
    second = engines(node)
    second.wait_for(lambda: second.load(keys) == 20)
    assert (first.welcome.pool, first.welcome.namespace) == (second.welcome.pool, second.welcome.namespace)
    (pool,) = node.host.pools()
    assert pool.facade.stats().stores["stored"] == 20


def test_an_engine_that_is_killed_leaves_its_blocks_and_frees_the_rest(
    make_node: MakeNode, engines: Engines, process: Callable[..., subprocess.Popen[str]], eventually: Any
) -> None:
    node = make_node()
    directory = NodeDirectory(node)
    killed = process(node, 20)
    (session,) = directory.sessions()
    assert (session.pid, session.status.state, session.status.in_flight) == (killed.pid, "attached", 1)
    killed.kill()
    eventually(lambda: not directory.sessions())
    (hosted,) = directory.pools()
    hosted.facade.check_integrity()
    slots = hosted.facade.stats().pool.slots
    assert (slots.cached, slots.filling, slots.quarantined, slots.leased) == (20, 0, 0, 0)
    engine = engines(node)
    engine.wait_for(lambda: engine.load([key_of(number) for number in range(20)]) == 20)


def test_a_pool_grows_with_what_it_stores_up_to_the_node_s_memory(make_node: MakeNode, engines: Engines) -> None:
    node = make_node(extents=8)
    engine = engines(node)
    (pool,) = node.host.pools()
    engine.store_all([key_of(0)])
    engine.wait_for(lambda: len(pool.extents) == 2)
    engine.store_all([key_of(number) for number in range(6 * ROW_SLOTS)])
    assert len(pool.extents) == 4, "two ranks"
    assert node.memory.spare_bytes == 0
    assert pool.facade.stats().evicted_for_capacity == 2 * ROW_SLOTS
