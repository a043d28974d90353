"""Two real engines, each with a pool of its own, and one real Mooncake under both: answers, and what is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.service.tiers.mooncake.cluster import Cluster, require_network
from tests.vllm.engineprocess import EngineProcess
from tests.vllm.engines import A_BLOCKS, A_HIT, SHORT, A, B, C, D, Reference, assert_same, eventually

pytestmark = [pytest.mark.vllm, pytest.mark.tier]

ENVIRON = {"PYTHONHASHSEED": "0", "VLLM_HOST_IP": "127.0.0.1"}

Start = Callable[[Cluster], EngineProcess]


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts engines, each as on a node of its own: they have the store in common, and a model in the same folder."""
    with ExitStack() as stack:

        def start(cluster: Cluster) -> EngineProcess:
            engine = EngineProcess(model, None, tmp_path / "log", ENVIRON, tier=cluster.url, tier_write="through")
            stack.callback(engine.close)
            return engine

        yield start


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    require_network()
    cluster = Cluster(tmp_path / "store")
    yield cluster
    cluster.close()


def wait_connected(engine: EngineProcess) -> None:
    eventually(lambda: set(engine.tier()["clients"]) == {"connected"}, "connected clients", 120)


def put_all(engine: EngineProcess) -> None:
    eventually(lambda: not engine.tier()["is_busy"], "the end of all puts", 120)


def clients_of(engine: EngineProcess) -> set[int]:
    """The processes that talk to Mooncake for it."""
    found: set[int] = set()
    for task in Path(f"/proc/{engine.pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return {pid for pid in found if is_client(pid)}


def is_client(pid: int) -> bool:
    try:
        return b"storechild" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_one_engine_has_stored_another_one_hits_also_while_the_store_is_killed(
    model: Path, reference: Reference, start: Start, cluster: Cluster
) -> None:
    expected = dict(zip((A, B, C, D, *SHORT), reference(model, A, B, C, D, *SHORT), strict=True))
    first, second = start(cluster), start(cluster)
    for engine in (first, second):
        wait_connected(engine)
        engine.be_patient(60)

    assert_same(first.ask(A, C), [expected[A], expected[C]])
    put_all(first)
    assert first.tier()["counters"]["put_blocks"] >= 2 * A_BLOCKS

    answers = second.ask(A, B)
    assert_same(answers, [expected[A], expected[B]])
    assert [answer.cached for answer in answers] == [A_HIT, 512]
    assert first.fingerprint() == second.fingerprint() is not None
    assert second.tier()["counters"]["fetched_blocks"] == A_BLOCKS

    second.be_patient(0)

    # Its client dies: the next request is computed or found, whatever comes first, and another client is started.
    clients = clients_of(second)
    assert len(clients) == 2
    for pid in clients:
        os.kill(pid, signal.SIGKILL)
    assert_same(second.ask(D), [expected[D]])
    eventually(lambda: len(clients_of(second) - clients) == 2, "new clients")

    # The store dies while both read and write.
    first.begin(*SHORT)
    second.begin(C, *SHORT)
    cluster.kill(cluster.provider)
    cluster.kill(cluster.master)
    assert_same(first.finish(), [expected[each] for each in SHORT])
    assert_same(second.finish(), [expected[each] for each in (C, *SHORT)])
    for engine in (first, second):
        assert_same(engine.ask(B), [expected[B]])
        assert engine.is_ready()

    # An engine that is killed leaves no client behind, which could still write into its memory.
    left = clients_of(first)
    first.kill()
    eventually(lambda: not any(map(is_client, left)), "the end of the clients")
