"""The data plane of a vLLM worker, on the CPU: real pools, real copies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.service.connectors.engine_core.processes import make_process

from kvstow.dataplane import DataPlane
from kvstow.errors import ConfigError, InsufficientMemoryError
from kvstow.memory.hostpool import HostPool
from kvstow.memory.limits import RESERVE_BYTES, HugePageLimits, MemoryLimits
from kvstow.memory.mlock import MlockRegistrar
from kvstow.messages import Completion, DesiredState, Op, StepPlan
from kvstow.testing.fakes import FakeDevice, FakeRegistrar
from kvstow_service.connectors.engine_core import hostmemory
from kvstow_service.connectors.engine_core.hostmemory import require_memory, wait_until_pinned
from kvstow_service.connectors.engine_core.options import ConnectorOptions
from kvstow_service.connectors.engine_core.rankplane import NoDataPlane
from kvstow_service.connectors.vllm import rankdataplane
from kvstow_service.connectors.vllm.kvgeometry import KVGeometry, kv_geometry
from kvstow_service.connectors.vllm.rankdataplane import build_plane, fence_of

BLOCKS, PAGE = 4, 4096


@pytest.fixture
def available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1 GiB of memory beside the reserve, which a test may change, and 16 MiB in reserved pages."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemAvailable: {((1 << 30) + RESERVE_BYTES) // 1024} kB\n")
    for name, pages in {"free_hugepages": 8, "resv_hugepages": 0}.items():
        (tmp_path / name).write_text(str(pages))
    limits = {
        "advised": MemoryLimits(meminfo, tmp_path / "none", tmp_path),
        "reserved": HugePageLimits(meminfo, tmp_path / "none", tmp_path, tmp_path),
    }
    monkeypatch.setattr(hostmemory, "limits_of", limits.__getitem__)
    return meminfo


@pytest.fixture
def kv() -> tuple[dict[str, torch.Tensor], KVGeometry]:
    """Two layers, whose blocks hold their own number."""
    blocks = torch.arange(BLOCKS, dtype=torch.uint8).repeat_interleave(PAGE).view(BLOCKS, PAGE)
    caches = {"first": blocks, "second": blocks + 100}
    return caches, kv_geometry(caches, BLOCKS)


@pytest.fixture
def worker(kv: tuple[dict[str, torch.Tensor], KVGeometry]) -> Iterator[DataPlane]:
    options = ConnectorOptions(lock=False, pin_pause=0.0)
    worker = build_plane(3, 10 * PAGE, 16 * PAGE, options, kv[1])
    yield worker
    worker.close()


def finish(worker: DataPlane, op: Op) -> Completion:
    worker.submit(StepPlan((op,)))
    assert worker.wait_completions(10)
    (completion,) = worker.take_completions()
    return completion


def test_blocks_of_all_layers_go_to_a_slot_and_come_back(
    kv: tuple[dict[str, torch.Tensor], KVGeometry], worker: DataPlane
) -> None:
    worker.pool.start()
    wait_until_pinned(worker.pool)
    assert finish(worker, Op(1, "store", (2,), (4,))).mark == "done"
    assert finish(worker, Op(2, "load", (0,), (4,))).mark == "done"
    assert {layer: tensor[:, 0].tolist() for layer, tensor in kv[0].items()} == {
        "first": [2, 1, 2, 3],
        "second": [102, 101, 102, 103],
    }


def test_a_plane_takes_no_memory_before_its_start(worker: DataPlane) -> None:
    report = worker.report()
    assert (report.rank, report.slot_bytes, report.pinned_slots, report.target_slots) == (3, 2 * PAGE, 0, 5)
    assert worker.pool.max_slots == 8


def test_a_pool_without_room_for_a_block_is_refused(kv: tuple[dict[str, torch.Tensor], KVGeometry]) -> None:
    with pytest.raises(ConfigError, match=f"at least one block, {2 * PAGE} bytes"):
        build_plane(0, 2 * PAGE - 1, 0, ConnectorOptions(), kv[1])


def test_another_device_is_refused(kv: tuple[dict[str, torch.Tensor], KVGeometry]) -> None:
    elsewhere = kv[1]._replace(tensors=(torch.empty(BLOCKS, PAGE, dtype=torch.uint8, device="meta"),))
    with pytest.raises(ConfigError, match="device of the KV cache is 'meta'; allowed: cuda or cpu"):
        build_plane(0, 10 * PAGE, 0, ConnectorOptions(), elsewhere)


def test_a_plane_that_cannot_be_built_leaves_nothing_behind(
    kv: tuple[dict[str, torch.Tensor], KVGeometry], monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[HostPool] = []

    def refuse(pool: HostPool, *_: object) -> None:
        pools.append(pool)
        raise RuntimeError("no device")

    monkeypatch.setattr(rankdataplane, "CpuDevice", refuse)
    with pytest.raises(RuntimeError, match="no device"):
        build_plane(0, 10 * PAGE, 0, ConnectorOptions(lock=False), kv[1])
    assert pools[0].status().state == "closed"


@pytest.mark.parametrize("path", ["_on_cpu", "_on_cuda"])
def test_a_worker_that_cannot_be_made_leaves_neither_device_nor_pool(
    path: str, kv: tuple[dict[str, torch.Tensor], KVGeometry], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, device, closed = make_pool(kv[1], FakeRegistrar()), FakeDevice(), list[str]()
    monkeypatch.setattr(device, "close", lambda: closed.append("device"))

    def build(*arguments: Any) -> tuple[HostPool, FakeDevice]:
        undo: ExitStack = arguments[-1]
        undo.callback(lambda: closed.append("pool"))
        undo.callback(pool.close)
        return pool, device

    def refuse(*_: object, **__: object) -> DataPlane:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(rankdataplane, path, build)
    monkeypatch.setattr(rankdataplane, "DataPlane", refuse)
    place = SimpleNamespace(device=torch.device(path.removeprefix("_on_")))
    geometry = KVGeometry(kv[1].layout, (place,), ("",))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="can't start new thread"):
        build_plane(0, 10 * PAGE, 0, ConnectorOptions(lock=False), geometry)
    assert closed == ["device", "pool"], "a device copies from the pool until it is closed"


@pytest.mark.parametrize("layer", [torch.empty(1), [torch.empty(1)]], ids=["tensor", "states"])
def test_on_the_cpu_all_work_is_done_when_its_call_returns(layer: Any) -> None:
    assert fence_of({"layer": layer})() is None


# -- waiting for the pool -------------------------------------------------------------------------------------


def make_pool(kv: KVGeometry, registrar: FakeRegistrar) -> HostPool:
    options = ConnectorOptions(pin_chunk=2 * PAGE, pin_pause=0.0)
    return HostPool(options.pool_config(kv.layout.slot_bytes, 10 * PAGE, 0), registrar)


def test_waiting_ends_with_the_last_chunk(kv: tuple[dict[str, torch.Tensor], KVGeometry]) -> None:
    registrar = FakeRegistrar(wait_at=2)
    pool = make_pool(kv[1], registrar)
    pool.start()
    waiter = threading.Thread(target=wait_until_pinned, args=(pool,))
    waiter.start()
    assert registrar.waiting.wait(10)
    assert waiter.is_alive()
    registrar.go_on.set()
    waiter.join(10)
    assert not waiter.is_alive()
    assert pool.status().pinned_slots == 5
    pool.close()


def test_waiting_ends_where_the_pool_stops_growing(kv: tuple[dict[str, torch.Tensor], KVGeometry]) -> None:
    pool = make_pool(kv[1], FakeRegistrar({1: RuntimeError("no more")}))
    pool.start()
    waiter = threading.Thread(target=wait_until_pinned, args=(pool,))
    waiter.start()
    waiter.join(10)
    assert not waiter.is_alive()
    assert pool.status().pinned_slots < 5
    pool.close()


# -- memory of the machine ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("available")
def test_pools_of_a_node_that_fit_together_may_have_all_that_it_can_give() -> None:
    options = ConnectorOptions(cpu_bytes_to_use=1 << 29)
    assert require_memory(options, make_process(num_ranks=2, ranks_per_node=2)) == 1 << 30
    assert require_memory(options, make_process(num_ranks=4, ranks_per_node=2)) == 1 << 30


@pytest.mark.usefixtures("available")
def test_pools_of_a_node_that_do_not_fit_together_are_refused() -> None:
    options = ConnectorOptions(cpu_bytes_to_use_per_rank=600 << 20)
    assert require_memory(options, make_process(num_ranks=1, ranks_per_node=1)) == 1 << 30
    with pytest.raises(InsufficientMemoryError, match="2 x 600 MiB of pool cannot fit"):
        require_memory(options, make_process(num_ranks=2, ranks_per_node=2))
    assert require_memory(options, make_process(num_ranks=2, ranks_per_node=1)) == 1 << 30


@pytest.mark.usefixtures("available")
def test_pools_of_a_node_share_its_reserved_huge_pages() -> None:
    process = make_process(num_ranks=2, ranks_per_node=2)
    options = ConnectorOptions(cpu_bytes_to_use_per_rank=7 << 20, huge_pages="reserved")
    assert require_memory(options, process) == 16 << 20
    options = ConnectorOptions(cpu_bytes_to_use_per_rank=9 << 20, huge_pages="reserved")
    with pytest.raises(InsufficientMemoryError, match="2 x 9 MiB of pool cannot fit: 20 MiB are needed in reserved"):
        require_memory(options, process)


def test_without_a_readable_limit_the_available_memory_is_unknown(available: Path) -> None:
    available.unlink()
    assert require_memory(ConnectorOptions(cpu_bytes_to_use=1000), make_process()) == 0


def test_a_rank_with_large_slots_begins_with_one_where_its_equal_share_is_less(
    kv: tuple[dict[str, torch.Tensor], KVGeometry],
) -> None:
    """The others' slots may be smaller: by the size of the slots its share is larger."""
    slot_bytes = kv[1].layout.slot_bytes
    worker = build_plane(0, slot_bytes - 1, 3 * slot_bytes, ConnectorOptions(), kv[1])
    assert (worker.pool.status().target_slots, worker.pool.max_slots) == (1, 3)
    worker.close()


def test_memory_on_the_cpu_is_locked(kv: tuple[dict[str, torch.Tensor], KVGeometry]) -> None:
    worker = build_plane(0, 10 * PAGE, 0, ConnectorOptions(), kv[1])
    assert worker.report().pin_mode == MlockRegistrar().mode != "populate"
    worker.close()


def test_memory_in_reserved_huge_pages_needs_no_lock(
    kv: tuple[dict[str, torch.Tensor], KVGeometry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HugePageLimits, "headroom", lambda self, **kind: None)
    worker = build_plane(0, 10 * PAGE, 0, ConnectorOptions(huge_pages="reserved"), kv[1])
    assert worker.report().pin_mode == "hugetlb"
    worker.close()


# -- without a data plane --------------------------------------------------------------------------------------


def test_a_rank_without_data_plane_numbers_its_reports_and_keeps_the_desired_state() -> None:
    plane = NoDataPlane(3, 64)
    for number in (2, 1):
        plane.apply(DesiredState("engine", 1, number=number))
    first, second = plane.report(), plane.report()
    assert (first.number, second.number) == (1, 2)
    assert (second.engine_id, second.applied, second.stale_desired_states) == ("engine", 2, 1)
    assert plane.applied.number == 2


def test_a_rank_without_data_plane_fails_every_op() -> None:
    rank = NoDataPlane(3, 64, "cuda", "no device")
    rank.submit(StepPlan((Op(1, "store", (4,), (0,)), Op(2, "load", (5,), (0,)))))
    assert [(each.op_id, each.mark) for each in rank.take_completions()] == [(1, "failed"), (2, "failed")]
    assert rank.take_completions() == []


def test_a_rank_without_data_plane_reports_why() -> None:
    report = NoDataPlane(3, 64, "cuda", "no device").report()
    assert (report.rank, report.state, report.error_reason, report.error) == (3, "failed", "cuda", "no device")
    assert (report.slot_bytes, report.pinned_slots, report.target_slots) == (64, 0, 0)
    asleep = NoDataPlane(3, 64).report()
    assert (asleep.state, asleep.error) == ("stopped", None)
