"""The worker's half with a fleet tier: what it moves, what it refuses, and what it holds."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.service.connectors.engine_core.processes import make_process
from tests.vllm.engines import eventually

from kvstow.memory.hostpool import HostPool
from kvstow.messages import DesiredState, TierCompletion, TierDirection, TierOp
from kvstow.testing.tier import ControlledStore, ControlledTransfers
from kvstow.tier.objectname import ObjectName
from kvstow_service.connectors.engine_core.metadata import KVStowMetadata
from kvstow_service.connectors.engine_core.options import ConnectorOptions
from kvstow_service.connectors.engine_core.stepplan import TierPlan
from kvstow_service.connectors.engine_core.workerside import BootCompletions
from kvstow_service.connectors.vllm.workerhost import EmbeddedWorkerHost
from kvstow_service.tiers import stores

pytestmark = pytest.mark.vllm

URL = "mooncake://store:1"
BLOCKS, PAGE, SLOTS = 4, 4096, 8
KEYS = tuple(bytes([0, 0, number]) for number in range(SLOTS))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ControlledStore]:
    store = ControlledStore()
    monkeypatch.setattr(stores, "open_store", lambda url: store)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield store
    for gate in (store.puts, store.gets):
        gate.open()


@pytest.fixture
def worker(store: ControlledStore) -> Iterator[EmbeddedWorkerHost]:
    host = make_worker()
    yield host
    for gate in (store.puts, store.gets):
        gate.open()
    host.close()


def make_worker(*, tier: str | None = URL, rank: int = 0, **process: object) -> EmbeddedWorkerHost:
    options = ConnectorOptions(
        cpu_bytes_to_use=SLOTS * PAGE, lock=False, pin_chunk=PAGE, pin_pause=0.0, async_register_cache=False, tier=tier
    )
    host = EmbeddedWorkerHost(options, make_process(rank=rank, **process), BLOCKS)
    host.register({"layer": torch.zeros(BLOCKS, PAGE, dtype=torch.uint8)})
    return host


def op(number: int, direction: TierDirection, first: int = 0, end: int = SLOTS) -> TierOp:
    return TierOp(number, direction, "f", KEYS[first:end], tuple(range(first, end)))


def give(
    host: EmbeddedWorkerHost, number: int, *ops: TierOp, boot: str | None = None, rank: int = 0, url: str = URL
) -> None:
    """A step brings these ops, with each of its hooks."""
    boots = ("another rank's",) * rank + (boot or host.side.plane.boot_id,)
    plan = TierPlan(number, boots, url, tuple((rank, each) for each in ops))
    for _ in range(2):
        host.follow(KVStowMetadata(tier=plan))


def ends(host: EmbeddedWorkerHost, count: int) -> list[BootCompletions]:
    found: list[BootCompletions] = []

    def have_come() -> bool:
        found.extend(host.take_completions())
        return sum(len(each.completions) for each in found) >= count

    eventually(have_come, f"{count} completions")
    return found


def moved(batch: BootCompletions) -> list[int]:
    return [one.moved for one in batch.completions if isinstance(one, TierCompletion)]


def pool_of(host: EmbeddedWorkerHost) -> HostPool:
    pool = host.side.plane.pool  # type: ignore[attr-defined]
    assert isinstance(pool, HostPool)
    return pool


def test_a_rank_moves_slots_to_the_store_and_back(worker: EmbeddedWorkerHost, store: ControlledStore) -> None:
    pool = pool_of(worker)
    ctypes.memset(pool.address, 7, SLOTS * PAGE)
    give(worker, 1, op(1, "put"))
    (batch,) = ends(worker, 1)
    assert (batch.boot_id, moved(batch)) == (worker.side.plane.boot_id, [SLOTS])
    assert store.get(str(ObjectName("f", KEYS[0], 0, 1))) == bytes([7]) * PAGE
    ctypes.memset(pool.address, 0, SLOTS * PAGE)
    give(worker, 2, op(2, "fetch", 0, 2))
    (batch,) = ends(worker, 1)
    assert moved(batch) == [2]
    assert ctypes.string_at(pool.address, 3 * PAGE) == bytes([7]) * 2 * PAGE + bytes(PAGE)
    assert worker.tier_step == 2


@pytest.mark.parametrize(("replicated", "name"), [(False, "1of2"), (True, "0of1")])
def test_ranks_name_their_objects(store: ControlledStore, *, replicated: bool, name: str) -> None:
    host = make_worker(rank=1, num_ranks=2, replicated=replicated)
    give(host, 1, op(1, "put", 0, 1), rank=1)
    ends(host, 1)
    assert store.names("kvs1:f:") == [f"kvs1:f:0:{KEYS[0][2:].hex()}:{name}"]
    assert host.tier_step == 0, "rank 0 says when steps end"
    host.close()


def test_only_a_tier_whose_process_maps_the_pool_makes_it_shared(store: ControlledStore) -> None:
    for tier, is_shared in ((None, False), ("redis://store:1", False), ("mooncake://store:1", True)):
        host = make_worker(tier=tier)
        assert (pool_of(host).memory_range.fd is not None) is is_shared
        host.close()


def test_ops_for_another_boot_are_refused_and_touch_nothing(worker: EmbeddedWorkerHost, store: ControlledStore) -> None:
    """Their slots hold other bytes now."""
    give(worker, 1, op(1, "put"), boot="an older one")
    found = ends(worker, 2)
    assert {batch.boot_id for batch in found} == {"an older one", worker.side.plane.boot_id}
    assert {one.mark for batch in found for one in batch.completions} == {"failed"}
    assert store.num_objects == 0


def test_a_rank_that_boots_again_has_another_client_and_ends_what_was_under_way(
    worker: EmbeddedWorkerHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, clients = worker.side.plane.boot_id, list[int]()
    opened = ControlledStore.open_transfers

    def note(self: ControlledStore, rank: int, *more: int | None) -> ControlledTransfers:
        clients.append(rank)
        return opened(self, rank, *more)

    monkeypatch.setattr(ControlledStore, "open_transfers", note)
    give(worker, 1, op(1, "put"))
    worker.suspend()
    worker.resume()
    assert worker.side.plane.boot_id != first
    assert [batch.boot_id for batch in ends(worker, 1)] == [first]
    assert clients == [0]
    give(worker, 2, op(2, "put"))
    assert moved(ends(worker, 1)[-1]) == [SLOTS]


def test_a_pool_that_shrinks_takes_its_memory_back_from_the_client(
    worker: EmbeddedWorkerHost, store: ControlledStore
) -> None:
    pool = pool_of(worker)
    give(worker, 1, op(1, "put"))
    ends(worker, 1)
    worker.side.apply(DesiredState("engine", 2, number=1))
    eventually(lambda: pool.status().resident_bytes <= 2 * PAGE, "memory that was given back")
    give(worker, 2, op(2, "put"), op(3, "fetch", 0, 2))
    found = {one.op_id: one.mark for batch in ends(worker, 2) for one in batch.completions}
    assert found == {2: "failed", 3: "done"}


def test_a_rank_follows_what_operators_attach_and_detach(
    worker: EmbeddedWorkerHost, store: ControlledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    other = ControlledStore()
    monkeypatch.setattr(stores, "open_store", lambda url: opened.append(url) or other)  # type: ignore[func-returns-value]
    give(worker, 1, op(1, "put", 0, 1))
    ends(worker, 1)
    give(worker, 2, url="")
    assert worker.tier_client() is None
    give(worker, 3, op(2, "put"), url="")
    assert [one.mark for batch in ends(worker, 1) for one in batch.completions] == ["failed"]
    give(worker, 4, op(3, "put"), url="mooncake://other:1")
    assert moved(ends(worker, 1)[0]) == [SLOTS]
    assert (opened, store.num_objects, other.num_objects) == (["mooncake://other:1"], 1, SLOTS)
    worker.suspend()
    worker.resume()
    assert opened == ["mooncake://other:1"] * 2, "a rank that boots again keeps its store"


def test_a_rank_says_how_its_client_is(worker: EmbeddedWorkerHost) -> None:
    first = worker.tier_client()
    assert first is not None
    assert (first.health.state, first.stats.put_objects) == ("connected", 0)
    assert worker.tier_client() is None, "not in every step"


def test_a_store_that_cannot_be_opened_leaves_the_rank_as_it_is(
    store: ControlledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(url: str) -> None:
        raise OSError("no process can be started")

    monkeypatch.setattr(stores, "open_store", fail)
    host = make_worker()
    assert host.side.report().state == "ready"
    give(host, 1, op(1, "fetch"))
    assert [one.mark for one in ends(host, 1)[0].completions] == ["failed"]
    host.close()
