"""Real engines on two nodes, each attached to a service with a pool of its own, and one real Mooncake under both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.service.stores.mooncake.cluster import Cluster, require_network
from tests.vllm.engines import A_BLOCKS, A_HIT, SHORT, A, B, C, Reference, assert_same, eventually
from tests.vllm.storednode import SECONDS, StoredNode

pytestmark = [pytest.mark.vllm, pytest.mark.tier]

MakeNode = Callable[[Path, str], StoredNode]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    require_network()
    cluster = Cluster(tmp_path / "store")
    yield cluster
    cluster.close()


@pytest.fixture
def make_node(tmp_path: Path, cluster: Cluster) -> Iterator[MakeNode]:
    with ExitStack() as stack:
        yield lambda model, name: StoredNode(model, tmp_path / name, ("--tier", cluster.url), stack)


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
