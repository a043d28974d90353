"""Real engines on two nodes, each attached to a service with a pool of its own, and one real Mooncake under both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.service.stores.mooncake.cluster import Cluster, require_network
from tests.vllm.engineprocess import EngineProcess
from tests.vllm.engines import A_BLOCKS, A_HIT, SHORT, A, B, C, Reference, assert_same, eventually
from tests.vllm.nodeservice import NodeService, is_attached

pytestmark = [pytest.mark.vllm, pytest.mark.tier]

SECONDS = 120.0
ENVIRON = {"PYTHONHASHSEED": "0"}


class TieredNode:
    """A service with one engine."""

    def __init__(self, model: Path, folder: Path, cluster: Cluster, stack: ExitStack) -> None:
        folder.mkdir()
        options = ("--tier", cluster.url)
        self.service = NodeService(folder, "64MiB", *options, module="tests.vllm.patientservice")
        stack.callback(self.service.stop)
        self.service.start()
        self.engine = EngineProcess(model, self.service.attach, folder / "engine", ENVIRON)
        stack.callback(self.engine.kill)
        eventually(lambda: is_attached(self.service), "an attached engine", SECONDS)
        eventually(self._is_connected, "connected clients", SECONDS)
        self.engine.be_patient(60)

    def tier(self) -> dict[str, Any]:
        (item,) = self.service.get("/v1/tier")["items"]
        return dict(item)

    def _is_connected(self) -> bool:
        view = self.service.get("/v1/tier")
        return bool(view["items"]) and {part["state"] for part in view["parts"]} == {"on"}


MakeNode = Callable[[Path, str], TieredNode]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    require_network()
    cluster = Cluster(tmp_path / "store")
    yield cluster
    cluster.close()


@pytest.fixture
def make_node(tmp_path: Path, cluster: Cluster) -> Iterator[MakeNode]:
    with ExitStack() as stack:
        yield lambda model, name: TieredNode(model, tmp_path / name, cluster, stack)


def test_what_an_engine_of_one_node_has_stored_one_of_another_node_hits_also_while_the_store_is_killed(
    model: Path,
    reference: Reference,
    make_node: MakeNode,
    cluster: Cluster,
) -> None:
    prompts = (A, B, C, *SHORT)
    expected = dict(zip(prompts, reference(model, *prompts), strict=True))
    here, there = make_node(model, "here"), make_node(model, "there")

    assert_same(here.engine.ask(A, C), [expected[A], expected[C]])
    wanted = 2 * A_BLOCKS
    eventually(lambda: here.tier()["counters"]["written_blocks"] >= wanted, "the puts", SECONDS)
    eventually(lambda: not here.tier()["writing_blocks"], "the end of all puts", SECONDS)

    answers = there.engine.ask(A)
    assert_same(answers, [expected[A]])
    assert answers[0].cached == A_HIT
    assert here.tier()["fingerprint"] == there.tier()["fingerprint"] is not None
    assert there.tier()["counters"]["read_blocks"] >= A_BLOCKS
    assert here.tier()["counters"]["read_blocks"] == 0
    assert_same(there.engine.ask(B), [expected[B]])

    # The store dies while both nodes read and write.
    here.engine.begin(*SHORT)
    there.engine.begin(C, *SHORT)
    cluster.kill(cluster.provider)
    cluster.kill(cluster.master)
    assert_same(here.engine.finish(), [expected[each] for each in SHORT])
    assert_same(there.engine.finish(), [expected[each] for each in (C, *SHORT)])
    for node in (here, there):
        assert node.service.is_ready()
        assert_same(node.engine.ask(B), [expected[B]])
