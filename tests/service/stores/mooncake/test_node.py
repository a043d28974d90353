"""Node services that share a real Mooncake."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from tests.service.node.keepers import end_keeper
from tests.service.node.noderunner import RunningNode, is_connected, written_blocks
from tests.service.node.rawengine import NAMED, RawEngine, key_of, keys_of
from tests.service.node.wholenode import whole_node
from tests.service.stores.mooncake.cluster import Cluster
from tests.waiting import eventually

from kvstow_service.node.node import Node
from kvstow_service.stores.mooncake.childchannel import ChildChannel
from kvstow_service.stores.mooncake.mooncakeblocks import MooncakeBlocks
from kvstow_service.stores.mooncake.mooncakestore import (
    MooncakeLocation,
    MooncakeLookups,
    MooncakeStore,
    MooncakeTransfers,
)

pytestmark = [pytest.mark.tier, pytest.mark.usefixtures("patient")]


MakeNode = Callable[[], Node]
Engines = Callable[[Path], RawEngine]


class NotedStore(MooncakeStore):
    """Notes the clients that it opens: one for transfers, and one for look-ups."""

    def __init__(self, location: MooncakeLocation) -> None:
        super().__init__(location)
        self.opened: list[ChildChannel] = []

    def open_transfers(self, witness: int) -> MooncakeTransfers:
        transfers = super().open_transfers(witness)
        self.opened.append(transfers)
        return transfers

    def open_lookups(self) -> MooncakeLookups:
        lookups = super().open_lookups()
        self.opened.append(lookups)
        return lookups


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster()


@pytest.fixture
def opened() -> list[NotedStore]:
    """The stores of the nodes, in the order in which these were made."""
    return []


@pytest.fixture
def make_node(tmp_path: Path, stack: ExitStack, cluster: Cluster, opened: list[NotedStore]) -> MakeNode:
    def make() -> Node:
        opened.append(NotedStore(cluster.location))
        store, socket = MooncakeBlocks(opened[-1], cluster.url), f"attach{len(opened)}"
        node = whole_node(tmp_path, socket=socket, store=store, tier=cluster.url)
        stack.callback(node.close)
        node.start()
        return node

    return make


@pytest.fixture
def engines(stack: ExitStack) -> Engines:
    return lambda socket: stack.enter_context(closing(RawEngine(socket, NAMED)))


def is_whole(node: RunningNode) -> bool:
    """Whether its pool is in use, with all its slots."""
    (pool,) = node.show()["pools"].values()
    return (pool["quarantined"], pool["is_waiting"]) == (0, False)


def test_what_one_node_has_stored_another_one_hits(make_node: MakeNode, engines: Engines) -> None:
    here, there = make_node(), make_node()
    keys = keys_of(0, 12)  # a lease holds half of a pool at most
    first = engines(here.settings.attach_path)
    first.wait_for(lambda: is_connected(here))
    first.store_until_found(keys)
    first.wait_for(lambda: written_blocks(here) >= 12)  # one that was evicted and stored again is put again
    second = engines(there.settings.attach_path)
    second.wait_for(lambda: second.load(keys) == 12)  # every byte of both ranks is verified
    for node in (here, there):
        for pool in node.host.pools():
            pool.facade.check_integrity()


def test_the_process_of_the_transfers_is_killed_and_the_other_one_lives(
    make_node: MakeNode, engines: Engines, opened: list[NotedStore]
) -> None:
    node = make_node()
    engine = engines(node.settings.attach_path)
    engine.wait_for(lambda: is_connected(node))
    transfers, lookups = opened[0].opened
    before_the_kill = [transfers.pid, lookups.pid]
    assert transfers.pid is not None
    engine.store_until_found(keys_of(0, 60))
    os.kill(transfers.pid, signal.SIGKILL)  # in the middle of the puts
    assert engine.load(keys_of(0, 20)) == 20
    engine.wait_for(lambda: transfers.pid not in (None, before_the_kill[0]))
    assert lookups.pid == before_the_kill[1]
    before = written_blocks(node)
    numbers = iter(range(1000, 2000))

    def puts_again() -> bool:
        """While the breaker is open, what is stored waits."""
        engine.store_until_found([key_of(next(numbers))])
        return written_blocks(node) > before

    engine.wait_for(puts_again)
    (pool,) = node.host.pools()
    eventually(lambda: not pool.facade.stats().pool.slots.quarantined, "the end of the quarantine")
    pool.facade.check_integrity()


def test_a_service_is_killed_with_its_processes_and_the_next_one_goes_on(
    tmp_path: Path, cluster: Cluster, child_environ: dict[str, str], engines: Engines
) -> None:
    socket, state = tmp_path / "node" / "attach.sock", tmp_path / "state"
    nodes = [RunningNode(socket, state, child_environ, 8, f"tier={cluster.url}")]
    try:
        engine = engines(socket)
        engine.wait_for(lambda: nodes[0].show()["connected"])
        engine.store_until_found(keys_of(0, 60))
        engine.wait_for(lambda: nodes[0].show()["put"] >= 60)
        nodes[0].kill()
        nodes.append(RunningNode(socket, state, child_environ, 8, f"tier={cluster.url}"))
        again = RawEngine(socket, NAMED, (engine.welcome.token,))
        try:
            again.wait_for(lambda: again.load(keys_of(0, 20)) == 20)
            again.wait_for(lambda: nodes[1].show()["connected"])
            again.store_until_found(keys_of(100, 4))
            again.wait_for(lambda: nodes[1].show()["put"] == 4)
            again.wait_for(lambda: len(nodes[1].show()["sessions"]) == 1)  # the former processes have ended
            again.wait_for(lambda: is_whole(nodes[1]))
        finally:
            again.close()
    finally:
        for node in nodes:
            node.close()
        end_keeper(state)
